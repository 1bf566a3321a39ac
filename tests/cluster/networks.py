"""A small network and data on disk, and a policy for it: what jobs are made of."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from commands import make_network
from PIL import Image
from pyarrow import parquet

from alight import Predictor, calibrate, load_model, measure_costs, record
from alight.runtime.loading import example_of, load_data


def made(folder: Path, samples: int = 300, contract: str | None = None):
    """A folder with a network, digits as .npz, and a policy for them."""
    make_network(folder, samples)
    model = load_model(folder / "model")
    labelled = record(model, load_data(folder / "train.npz", model), progress=False)
    costs = measure_costs(model, example_of(model))
    policy = calibrate.eero(costs, "80%", labelled)
    if contract:
        policy = calibrate.certify(calibrate.eero, costs, "80%", labelled, contract=contract)
    policy.save(folder / "policy.json")
    return model, policy


def on_one_machine(model, policy, where, batch_size):
    """What one process decides about the same data."""
    predictor = Predictor(model, policy, batch_size=batch_size)
    return predictor.run(load_data(where, model, split="test", batch_size=batch_size), progress=False)


def as_pictures(archive: Path, folder: Path) -> None:
    """The images of an .npz as files in a folder for each class."""
    with np.load(archive) as arrays:
        for number, (image, label) in enumerate(zip(arrays["images"], arrays["labels"], strict=True)):
            (folder / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(folder / str(label) / f"{number:05}.png")


def as_table(archive: Path, folder: Path, rows: int = 50) -> None:
    """The images of an .npz as two Parquet files of tensors, in row groups."""
    folder.mkdir()
    with np.load(archive) as arrays:
        half = len(arrays["labels"]) // 2
        for name, part in {"a.parquet": slice(None, half), "b.parquet": slice(half, None)}.items():
            images = pa.FixedShapeTensorArray.from_numpy_ndarray(arrays["images"][part])
            table = pa.table({"image": images, "label": arrays["labels"][part]})
            parquet.write_table(table, folder / name, row_group_size=rows)
