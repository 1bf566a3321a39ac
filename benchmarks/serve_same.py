"""Whether the service gives the labels and exits of the predictor: 2,000 images and 500 texts, over HTTP.

    python benchmarks/serve_same.py STATE DATA TEXTS      # 5 minutes on two cores

STATE holds results of experiments/cifar100_train.py, DATA is CIFAR-100, TEXTS is banking77 (see experiments/). Images
go through the ResNet-18 that was trained with exits, as PNG; texts through MiniLM, whose heads are trained for a minute
here. Requests of one to eight samples are under way at once, so that batches differ from the predictor's. With --onnx
both networks are exported too, and the service runs them without PyTorch. A sample differs if its label or exit does;
those whose score is within 1e-5 of a threshold at some exit before may, and are counted. Writes results/serve_same.csv.
"""

import argparse
import asyncio
import base64
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from open_loop import Client
from PIL import Image
from service_process import served

from alight import Decisions, HeadOutputs, MultiExitModel, Predictor, calibrate, measure_costs, record, train_heads
from alight.files import write_rows
from alight.policies.policy import Threshold
from alight.provenance import provenance
from alight.runtime.loading import example_of, load_data

ROOT = Path(__file__).parent.parent
IMAGES, TEXTS = 2000, 500
UNDER_WAY = 4  # requests
NEAR = 1e-5  # of a threshold
SENTENCES = 1500  # to train the heads with
TOKENS = 24
Row = dict[str, str | float | int]


def image_network(state: Path, data: Path) -> tuple[MultiExitModel, HeadOutputs, np.ndarray]:
    """The network, its labelled table, and test images as bytes."""
    sys.path.insert(0, str(ROOT / "experiments"))
    from cifar100_data import Batches, read
    from cifar100_train import Job, load_result

    from alight.models.zoo import CIFAR

    model = load_result(Job("resnet18_mixed_distilled"), state).eval()
    labelled = record(model, [*Batches(read(data, 0, 1000).calibration, CIFAR, 250)], progress=False)
    with np.load(data / "test.npz") as file:
        return model, labelled, file["images"][:IMAGES]


def text_network(folder: Path, home: Path) -> tuple[MultiExitModel, HeadOutputs, list[str]]:
    """MiniLM with heads that have learned a little, its labelled table, and test sentences."""
    sys.path.insert(0, str(ROOT / "experiments"))
    from minilm_exits import LAYERS, _weights, read_banking77

    from alight import from_transformers

    train, test = read_banking77(folder)
    intents = sorted({intent for _, intent in train})
    order = np.random.default_rng(0).permutation(len(train))[: SENTENCES + 500]
    lines = [json.dumps({"text": train[row][0], "label": intents.index(train[row][1])}) for row in order]
    for name, part in (("train", lines[:SENTENCES]), ("labelled", lines[SENTENCES:])):
        (home / f"{name}.jsonl").write_text("\n".join(part), encoding="utf-8")
    model = from_transformers(_weights(), num_classes=len(intents), after=LAYERS)
    given: dict[str, Any] = {"tokenizer": _weights(), "max_tokens": TOKENS, "batch_size": 32}
    data = load_data(home / "train.jsonl", model, shuffle=True, **given)
    train_heads(model, data, epochs=4, learning_rate=1e-2, progress=False)
    labelled = record(model, load_data(home / "labelled.jsonl", model, **given), progress=False)
    texts = [text for text, _ in test]
    chosen = np.random.default_rng(1).permutation(len(texts))[:TEXTS]
    return model, labelled, [texts[row] for row in chosen]


def as_png(image: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


async def asked(port: int, kind: str, samples: Sequence[str]) -> list[dict[str, Any]]:
    """The answers of the service, in the order of the samples."""
    client, rng, start = Client("127.0.0.1", port), np.random.default_rng(0), 0
    parts = []
    while start < len(samples):
        size = int(rng.integers(1, 9))
        parts.append(samples[start : start + size])
        start += size
    found: list[list[dict[str, Any]]] = [[] for _ in parts]
    turns = iter(enumerate(parts))

    async def ask() -> None:
        for index, part in turns:
            reply = await client.post("/predict", json.dumps({kind: list(part)}).encode())
            if reply.status != 200:
                raise SystemExit(f"{reply.status}: {reply.content}")
            found[index] = reply.content["answers"]

    await asyncio.gather(*(ask() for _ in range(UNDER_WAY)))
    client.close()
    return [answer for part in found for answer in part]


def row(name: str, engine: str, answers: Sequence[dict[str, Any]], expected: Decisions, near: np.ndarray) -> Row:
    """How many answers are those of the predictor."""
    labels = np.array([answer["index"] for answer in answers])
    exits = np.array([answer["exit"] for answer in answers])
    chances = np.array([answer["probability"] for answer in answers])
    differs = (labels != expected.predictions) | (exits != expected.exits)
    assert expected.probabilities is not None  # as asked for
    same = ~differs
    return {
        "data": name,
        "engine": engine,
        "samples": len(answers),
        "exits_taken": len(set(exits.tolist())),
        "labels_equal": int((labels == expected.predictions).sum()),
        "exits_equal": int((exits == expected.exits).sum()),
        "near_a_threshold": int(near.sum()),
        "differ": int(differs.sum()),
        "differ_and_not_near": int((differs & ~near).sum()),
        "largest_difference": f"{np.abs(chances - expected.probabilities)[same].max():.1e}",  # of probabilities
    }


def near_thresholds(table: HeadOutputs, policy: Threshold, exits: np.ndarray) -> np.ndarray:
    """Which samples have a score within NEAR of the threshold at their exit or one before."""
    positions = np.searchsorted(policy.open_exits, exits)
    scores = table.scores[:, list(policy.open_exits[:-1])]
    close = np.abs(scores - np.array(policy.thresholds)) <= NEAR
    passed = np.arange(scores.shape[1]) <= positions[:, None]
    return np.asarray((close & passed).any(axis=1))


def compared(
    name: str, model: MultiExitModel, labelled: HeadOutputs, samples: Any, home: Path, onnx: bool
) -> list[Row]:
    """The rows of one network: the service with PyTorch, and where asked for without it."""
    kind = "texts" if isinstance(samples[0], str) else "images"
    example = example_of(model, TOKENS) if kind == "texts" else example_of(model)
    policy = calibrate.eero(measure_costs(model, example), "50%", labelled)
    assert isinstance(policy, Threshold)  # as the method makes them
    folder, tokenizer = home / name, None
    folder.mkdir()
    model.save(folder / "model")
    policy.save(folder / "policy.json")
    sent = list(samples) if kind == "texts" else [as_png(image) for image in samples]
    options = ["--max-tokens", str(TOKENS)]
    if kind == "texts":
        from minilm_exits import _weights

        tokenizer = _weights()
        lines = "\n".join(json.dumps({"text": text}) for text in samples)
        (folder / "texts.jsonl").write_text(lines, encoding="utf-8")
        given: Any = load_data(folder / "texts.jsonl", model, tokenizer=tokenizer, max_tokens=TOKENS)
    else:
        given = samples
    expected = Predictor(model, policy, probabilities=True).run(given, progress=False)
    near = near_thresholds(record(model, given, progress=False), policy, expected.exits)
    engines = {"PyTorch": (folder / "model", [*options, *(("--tokenizer", str(tokenizer)) if tokenizer else ())])}
    if onnx:
        from alight.export.folder import export_model

        export_model(model, policy, folder / "exported", tokenizer=tokenizer)
        engines["onnxruntime"] = (folder / "exported", options)
    rows = []
    for engine, (network, words) in engines.items():
        with served(network, folder / "policy.json", *words) as process:
            answers = asyncio.run(asked(process.port, kind, sent))
        rows.append(row(name, engine, answers, expected, near))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--onnx", action="store_true", help="serve exported networks too")
    parser.add_argument("--output", type=Path, default=ROOT / "results/serve_same.csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        rows = compared("cifar100", *image_network(options.state, options.data), home, options.onnx)
        rows += compared("banking77", *text_network(options.texts, home), home, options.onnx)
    made = provenance("numpy", "torch", "onnxruntime", "transformers", "fastapi", folder=ROOT)
    write_rows(options.output, [each | made for each in rows])


if __name__ == "__main__":
    main()
