"""The same labels and exits from PyTorch, from ONNX and from the HTTP service, on images and on texts.

    python experiments/same_decisions.py --networks STATE --images test.npz --texts FOLDER

STATE holds results of cifar100_train.py, of which resnet18_mixed_distilled-0 is taken with the policy for half of its
FLOPs; test.npz the test images of CIFAR-100; FOLDER banking77's train.csv and test.csv, on which heads of a frozen
MiniLM are trained for some minutes. An engine decides every sample in batches of 32; the service, with PyTorch
and with what was exported, in requests of one to eight under way together, as image files and as texts. A sample that
is decided in another way is `near` if one of the scores that decided lies within 1e-5 of its threshold, or the two
likeliest classes of an answer do of each other; others are `different`. `score_gap` is the largest difference of a
score, over all exits and samples. Writes results/same_decisions.csv. About 6 minutes on one core.

Measured (see the CSV for hardware, versions, date and commit): no sample differs, scores by less than 1e-5.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar100_train import Job, load_result
from minilm_exits import LAYERS, _weights, read_banking77
from served_answers import as_png, ask_service

from alight import (
    Costs,
    Decisions,
    HeadOutputs,
    MultiExitModel,
    Policy,
    Predictor,
    TrainingSettings,
    calibrate,
    export_model,
    from_transformers,
    measure_costs,
    record,
    train_heads,
)
from alight.data.batches import as_inputs, load_data
from alight.engine.backends import HeadValues, Reads
from alight.files import WEIGHTS, write_rows, write_text
from alight.networks.multi_exit import example_of
from alight.networks.store import save_model
from alight.policies.policy import Threshold
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "results" / "same_decisions.csv"
NETWORK = "resnet18_mixed_distilled-0"
BUDGET = "50%"
IMAGES, SENTENCES = 2000, 500
TRAINED, CALIBRATION, EPOCHS = 1500, 500, 8  # sentences, and passes over them
MAX_TOKENS, BATCH = 24, 32
NEAR = 1e-5  # of a threshold, or of the second class
Row = dict[str, str | float | int]


@dataclass(frozen=True)
class Case:
    """A network, its policy, and samples as every engine takes them."""

    name: str
    model: MultiExitModel
    policy: Policy
    batches: Sequence[Any]  # bytes of images, or arrays by name of texts
    folder: Path  # to work in


@dataclass(frozen=True)
class EngineResult:
    """What an engine has decided, and the scores of every open exit where it returns them."""

    decisions: Decisions
    scores: np.ndarray | None = None


def by_torch(case: Case) -> EngineResult:
    """The predictor, in PyTorch."""
    predictor = Predictor(case.model, case.policy, probabilities=True)
    scores = _table(case).scores[:, list(case.policy.open_exits)]
    return EngineResult(predictor.run(case.batches, progress=False), scores)


def by_onnx(case: Case) -> EngineResult:
    """Return what onnxruntime decides with the exported stages."""
    folder = export_model(case.model, case.policy, case.folder / "exported")
    predictor = Predictor.load(folder, probabilities=True)
    scores = np.concatenate([_scores(predictor, batch) for batch in case.batches])
    return EngineResult(predictor.run(case.batches, progress=False), scores)


def _scores(predictor: Predictor, batch: Any) -> np.ndarray:
    """Return the margins of every open exit, (samples, open exits)."""
    stages = len(predictor.policy.open_exits)
    backend = predictor.backend.with_reads([Reads(("margin",))] * stages)
    state, columns = backend.admit(as_inputs(batch, backend.inputs)), []
    for stage in range(stages):
        values, state = backend.run(stage, state)
        assert isinstance(values, HeadValues)  # stages run on the host
        columns.append(values.columns[0])
    return np.stack(columns, axis=1)


def by_service(case: Case) -> EngineResult:
    """The HTTP service, with PyTorch."""
    return EngineResult(served_decisions(save_model(case.model, case.folder / "model"), case))


def by_exported_service(case: Case) -> EngineResult:
    """The HTTP service, with what was exported."""
    tokenizer = _weights() if case.model.input_names else None
    return EngineResult(
        served_decisions(export_model(case.model, case.policy, case.folder / "served", tokenizer=tokenizer), case)
    )


ENGINES: dict[str, Callable[[Case], EngineResult]] = {  # the first is what others must equal
    "torch": by_torch,
    "onnx": by_onnx,
    "service": by_service,
    "service, exported": by_exported_service,
}


def served_decisions(network: Path, case: Case) -> Decisions:
    """What a service of the network decides about the samples."""
    case.policy.save(case.folder / "policy.json")
    options = ["--max-tokens", str(MAX_TOKENS), "--no-state"]
    if case.model.input_names:
        samples = [json.loads(line)["text"] for line in (case.folder / "test.jsonl").read_text("utf-8").splitlines()]
        if (network / WEIGHTS).is_file():
            options += ["--tokenizer", str(_weights())]
        answers = ask_service(network, case.folder / "policy.json", "texts", samples, options)
    else:
        samples = [as_png(image) for batch in case.batches for image in batch]
        answers = ask_service(network, case.folder / "policy.json", "images", samples, options)
    names = ("index", "exit", "cost", "probability")
    labels, exits, spent, probabilities = ([answer[name] for answer in answers] for name in names)
    return Decisions(labels, exits, spent, case.policy.num_exits, probabilities)


def images(state: Path, path: Path, folder: Path, count: int = IMAGES) -> Case:
    job = Job.named(NETWORK)
    result = state / job.name / "result"
    labelled, costs = HeadOutputs.load(result / "calibration.npz"), Costs.load(result / "costs.json")
    with np.load(path) as file:
        pixels = file["images"][:count]
    policy = calibrate.eero(costs, BUDGET, labelled)
    return Case("CIFAR-100 images", load_result(job, state), policy, [*_parts(pixels)], folder)


def texts(path: Path, folder: Path, count: int = SENTENCES, trained: int = TRAINED) -> Case:
    train, test = read_banking77(path)
    intents = sorted({intent for _, intent in train})
    order = np.random.default_rng(0).permutation(len(train))
    chosen = {
        "train": [train[index] for index in order[:trained]],
        "calibration": [train[index] for index in order[trained : trained + CALIBRATION]],
        "test": [test[index] for index in np.random.default_rng(1).permutation(len(test))[:count]],
    }
    torch.manual_seed(0)
    model = from_transformers(_weights(), num_classes=len(intents), after=LAYERS)
    given: dict[str, Any] = {"batch_size": BATCH, "tokenizer": _weights(), "max_tokens": MAX_TOKENS}
    loaders = {}
    for part, sentences in chosen.items():
        lines = [json.dumps({"text": text, "label": intents.index(intent)}) for text, intent in sentences]
        where = write_text(folder / f"{part}.jsonl", "\n".join(lines))
        loaders[part] = load_data(where, model.input_spec, shuffle=part == "train", **given)
    for name, weight in model.stages.named_parameters():
        weight.requires_grad_("classifier" in name or "pooler" in name)  # the last exit's own head
    settings = TrainingSettings(mode="joint", epochs=EPOCHS, learning_rate=3e-3)
    train_heads(model, loaders["train"], settings, progress=False)
    costs = measure_costs(model, example_of(model, 16))
    policy = calibrate.eero(costs, BUDGET, record(model, loaders["calibration"], progress=False))
    batches = [{name: batch[name].numpy() for name in model.input_names} for batch in loaders["test"]]
    return Case("banking77 texts", model, policy, batches, folder)


def compared(case: Case) -> Iterator[Row]:
    """A row for every engine beside the first."""
    table, results = _table(case), {name: engine(case) for name, engine in ENGINES.items()}
    first, *others = results
    truth = results[first]
    for name in others:
        other = results[name]
        labels = truth.decisions.predictions != other.decisions.predictions
        exits = truth.decisions.exits != other.decisions.exits
        near = near_a_threshold(case.policy, table)
        gap = _gap(truth.decisions.probabilities, other.decisions.probabilities, ~exits)
        yield {
            "data": case.name,
            "engine": name,
            "beside": first,
            "samples": len(truth.decisions),
            "exits_taken": len({*truth.decisions.exits.tolist()}),
            "other_labels": int(labels.sum()),
            "other_exits": int(exits.sum()),
            "near": int(((labels | exits) & near).sum()),
            "different": int(((labels | exits) & ~near).sum()),
            "near_in_all": int(near.sum()),
            "score_gap": "" if other.scores is None else f"{_gap(truth.scores, other.scores):.2e}",
            "probability_gap": f"{gap:.2e}",
        }


def near_a_threshold(policy: Policy, table: HeadOutputs) -> np.ndarray:
    """Samples of which a score or an answer could go either way by the last bits."""
    scores = table.scores[:, list(policy.open_exits)]
    near = scores <= NEAR  # margins: of the two likeliest classes
    if isinstance(policy, Threshold):
        near[:, :-1] |= np.abs(scores[:, :-1] - np.array(policy.thresholds)) <= NEAR
    return np.asarray(near.any(axis=1))


def _table(case: Case) -> HeadOutputs:
    return record(case.model, case.batches, progress=False)


def _gap(one: Any, other: Any, rows: Any = slice(None)) -> float:
    return float(np.abs(np.asarray(one)[rows] - np.asarray(other)[rows]).max())


def _parts(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), BATCH):
        yield rows[start : start + BATCH]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = provenance("torch", "onnxruntime", "transformers", "numpy", folder=ROOT)
    rows: list[Row] = []
    for make in (partial(images, options.networks, options.images), partial(texts, options.texts)):
        with tempfile.TemporaryDirectory() as folder:
            for row in compared(make(Path(folder))):
                print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                rows.append({**row, **made})
    write_rows(RESULT, rows)


if __name__ == "__main__":
    main()
