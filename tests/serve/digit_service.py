"""A small network that has learned digits, policies for it, and images to send."""

import base64
import io
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from digits import digits
from PIL import Image

from alight import TrainingSettings, calibrate, measure_costs, record, train_heads, zoo
from alight.engine.settings import RunSettings
from alight.networks.store import load_model, save_model
from alight.serve.access import Access, Tokens
from alight.serve.app import build_app
from alight.serve.hosting import ModelHost
from alight.serve.model import load_policies, load_served_model
from alight.serve.requests import Limits

BUDGETS = {"cheap": "30%", "expensive": "60%"}


@cache
def folder() -> Path:
    """A folder with the network, model, and its policies: cheap.json, expensive.json (of streams), unpaced.json."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    home = Path(mkdtemp())
    model = zoo.resnet_digits()
    training, settings = digits()[0][:640], TrainingSettings(mode="joint", epochs=1, learning_rate=1e-2)
    train_heads(model, ((255 * training[0]).to(torch.uint8), training[1]), settings, batch_size=64, progress=False)
    save_model(model, home / "model")
    images, labels = digits()[1].tensors
    pictures = (255 * images[:200]).to(torch.uint8)
    labelled = record(model, (pictures, labels[:200]), progress=False)
    costs = measure_costs(model, images[:1])
    for name, budget in BUDGETS.items():
        policy = calibrate.certified_stream(calibrate.eero, seed=0)(costs, budget, labelled, spend_all=True)
        policy.save(home / f"{name}.json")
    calibrate.eero(costs, "50%", labelled).save(home / "unpaced.json")
    return home


def model():
    """The network."""
    return load_model(folder() / "model")


def pixels(count: int, start: int = 200) -> np.ndarray:
    """Digits that nothing was calibrated on, as bytes (count, 8, 8)."""
    images = digits()[1].tensors[0][start : start + count, 0]
    return (255 * images).to(torch.uint8).numpy()


def png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def in_base64(picture: np.ndarray) -> str:
    return base64.b64encode(png(picture)).decode()


def served_model(*names: str):
    """The network under these policies, as the service has it."""
    policies = load_policies([folder() / f"{name}.json" for name in names or ("unpaced",)])
    return load_served_model(folder() / "model", policies, settings=RunSettings(threads=1))


def application(*names: str, state: Path | None = None, token: str | None = None, **limits):
    """The service of the network under these policies."""
    host = ModelHost.of(served_model(*names), Limits(**limits), state)
    return build_app(host, Access(None if token is None else Tokens.of(token)))
