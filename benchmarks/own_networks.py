"""What alight does with networks in people's own style: right, refused with a sentence, or silently wrong.

    python benchmarks/own_networks.py                      # writes results/own_networks.csv, seven minutes on one core
    python benchmarks/own_networks.py --part 1/3           # the first third of it; rows are replaced
    python benchmarks/own_networks.py --only cifar_resnet  # tries one network and prints every finding

Each network of `own_network_zoo.py` has random weights and BatchNorm statistics. Exits are attached to a copy of it,
and everything that a user trusts is compared with the untouched network:

    attach      the copy keeps its weights, statistics and mode
    classes     the network's logits are taken as logits
    head        heads read as many features as there are channels; padding does not change their logits
    logits      the last exit gives the network's logits for batches of 1, 4 and 7
    size        the same for inputs of other sizes, or an error of alight's
    extra       inputs that are not in the example change the logits as in the network, or an error of alight's
    compaction  samples that stay after an exit get the logits that the network gives them in the full batch
    predictor   the same under a policy that lets half of the samples leave, also across batches and for a single sample
    saved       a saved and loaded model gives the same, although other weights are passed in
    weights     weights that are loaded after attaching count
    training    gradients and buffers of three training steps are the network's; where heads are trained alone, its
                weights, buffers and logits stay

A network named `_told` is an earlier one with what its refusal asks for: an argument of `attach_heads`, another place,
or a change of the code. Where no answer can be right, because the logits of a sample depend on its batch, are random,
or are not one class per sample, `answerable` is False, and the network must be refused.

The outcome is `right` if all of it holds; what is refused for other sizes or extra inputs is in the detail. `refused`:
attaching, or something else above, raises an error of alight's. `wrong`: something differs silently. `error`: another
exception. `result` says it of a network with its `_told` row taken into account. The exit status is 1 if a network is
wrong.
"""

import argparse
import copy
import csv
import importlib.util
import logging
import random
import re
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from own_network_zoo import CASES, Batch, Case
from torch import Tensor, nn

from alight import MultiExitModel, Predictor, Threshold, TrainingSettings, attach_heads, train_heads
from alight.errors import AlightError
from alight.files import write_rows
from alight.networks.multi_exit import advance, read
from alight.networks.store import load_model, save_model
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "own_networks.csv"
SAMPLES = 8
OUTCOMES = ("wrong", "error", "refused", "right", "skipped")  # the first that a check has is the network's
MAY_REFUSE = ("size", "extra")
LONGEST = 400  # letters of a detail


class Finding(NamedTuple):
    """What one check found out."""

    check: str
    outcome: str
    detail: str


class BadCase(Exception):
    """A case that says nothing about alight: the network fails, or its logits are the same for all samples."""


class Trial:
    """One network, and what was found out about it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.findings: list[Finding] = []
        self.original = new_network(case, 0).eval()

    @contextmanager
    def check(self, name: str, where: str = "") -> Iterator[None]:
        """Record what is raised in a check; errors of the case itself are raised."""
        prefix = f"{where}: " if where else ""
        try:
            yield
        except BadCase:
            raise
        except AlightError as error:
            self.findings.append(Finding(name, "refused", prefix + one_line(error)))
        except Exception as error:
            self.findings.append(Finding(name, "error", f"{prefix}{type(error).__name__}: {one_line(error)}"))

    def expect(self, holds: bool, check: str, detail: str) -> None:
        """Record a difference unless this holds."""
        if not holds:
            self.findings.append(Finding(check, "wrong", detail))

    def expect_same(self, got: Tensor, expected: Tensor, check: str, where: str, tolerance: float = 1e-5) -> None:
        """Record a difference unless the tensors are the same up to a relative tolerance."""
        difference = relative_difference(got, expected)
        self.expect(difference <= tolerance, check, f"{where}: differs by {difference:.2g}")

    def draw(self, make: Callable[..., Batch], *samples: int, seed: int = 0) -> Batch:
        """Return what is drawn with a seed that depends on the name of the case."""
        set_seeds(zlib.crc32(self.case.name.encode()) + 100 * seed + sum(samples))
        return make(*samples)

    def truth(self, batch: Batch, network: nn.Module | None = None) -> Tensor:
        """Return the logits that the untouched network gives."""
        try:
            with torch.no_grad():
                logits = self.case.logits(run(self.original if network is None else network, copied(batch)))
        except Exception as error:
            raise BadCase(f"the network itself fails: {type(error).__name__}: {error}") from error
        if not torch.isfinite(logits).all():
            raise BadCase("the network gives numbers that are not finite")
        return logits

    def attached(self) -> tuple[nn.Module, MultiExitModel]:
        """Return a copy of the network and the model made of it, in evaluation mode."""
        network = copy.deepcopy(self.original)
        example = self.draw(self.case.example or self.case.batch, 2, seed=1)
        model = attach_heads(network, self.case.after, example=example, **self.case.arguments)
        return network, model.eval()

    def run_all(self) -> None:
        """Try everything on the network."""
        case = self.case
        expected = self.truth(self.draw(case.batch, SAMPLES))
        if relative_difference(expected[:1].expand_as(expected), expected) < 1e-2:
            raise BadCase("the network gives nearly the same logits for all samples")
        set_seeds(0)
        with self.check("attach"):
            network, model = self.attached()
        if self.findings:
            return
        self.check_untouched(network)
        self.check_classes(model)
        self.check_head(model)
        self.check_logits(model)
        self.check_sizes(model)
        self.check_extras(model)
        self.check_compaction(model, self.draw(case.batch, SAMPLES), "compaction", "")
        self.check_predictor(model)
        self.check_saved(model)
        self.check_weights(network, model)
        if case.trains == "heads":
            self.check_heads_alone()
        elif case.trains:
            self.check_training()
        if case.must_refuse:
            refused = any(finding.outcome == "refused" for finding in self.findings)
            self.expect(refused, "task", f"accepted, although {case.must_refuse}")

    def check_untouched(self, network: nn.Module) -> None:
        """Check that attaching leaves the network unchanged."""
        with self.check("attach"):
            own, now = state_of(self.original), state_of(network)
            changed = [name for name in own if name not in now or not torch.equal(own[name], now[name])]
            self.expect(not changed, "attach", f"attaching changes {', '.join(changed)}")
            self.expect(not network.training, "attach", "attaching changes the mode")
            batch = self.draw(self.case.batch, SAMPLES)
            logits = self.case.logits(run(network, copied(batch)))
            self.expect_same(logits, self.truth(batch), "attach", "the network itself after attaching")

    def check_classes(self, model: MultiExitModel) -> None:
        """Check that the logits are those of the network, by their number."""
        got, expected = model.num_classes, self.case.classes
        self.expect(got == expected, "classes", f"{got} classes instead of {expected}: another tensor is taken")

    @torch.no_grad()
    def check_head(self, model: MultiExitModel) -> None:
        """Check that heads read channels, and not padding."""
        for index, expected in enumerate(self.case.widths):
            linear = next(module for module in model.heads[index].modules() if isinstance(module, nn.Linear))
            detail = f"head {index} reads {linear.in_features} features, and there are {expected} channels"
            self.expect(linear.in_features == expected, "head", detail)
        if self.case.padded is None:
            return
        alone, padded = self.draw(self.case.padded)
        if relative_difference(self.truth(padded), self.truth(alone)) > 1e-4:
            raise BadCase("padding changes the network's own logits")
        with self.check("size", "padding"):
            for index, (one, other) in enumerate(zip(model(alone), model(padded), strict=True)):
                self.expect_same(other, one, "head", f"exit {index} reads padding", 1e-4)

    @torch.no_grad()
    def check_logits(self, model: MultiExitModel) -> None:
        """Check the last exit at several batch sizes."""
        for samples in (1, 4, 7):
            batch = self.draw(self.case.batch, samples)
            expected = self.truth(batch)
            with self.check("logits", f"batch of {samples}"):
                self.expect_same(model(copied(batch))[-1], expected, "logits", f"batch of {samples}")

    @torch.no_grad()
    def check_sizes(self, model: MultiExitModel) -> None:
        """Check the last exit for inputs of other sizes."""
        for name, make in self.case.others.items():
            batch = self.draw(make, SAMPLES)
            expected = self.truth(batch)
            before = len(self.findings)
            with self.check("size", name):
                self.expect_same(model(copied(batch))[-1], expected, "size", name)
            if len(self.findings) == before:
                self.check_compaction(model, batch, "size", f"{name}, compacted")

    @torch.no_grad()
    def check_extras(self, model: MultiExitModel) -> None:
        """Check inputs that the example does not have."""
        for name, make in self.case.extras.items():
            batch = self.draw(make, SAMPLES)
            expected = self.truth(batch)
            if isinstance(batch, Mapping):
                without = self.truth({key: part for key, part in batch.items() if key != name})
                if relative_difference(without, expected) < 1e-3:
                    raise BadCase(f"{name} does not change the network's logits")
            with self.check("extra", name):
                self.expect_same(model(copied(batch))[-1], expected, "extra", f"{name} given")
            with self.check("extra", f"{name}, predictor"):
                predictions = Predictor(model, policy_for(model, [2.0]))(copied(batch)).predictions
                self.expect(same_classes(predictions, expected), "extra", f"{name} given to a predictor")

    @torch.no_grad()
    def check_compaction(self, model: MultiExitModel, batch: Batch, check: str, where: str) -> None:
        """Check that every second sample, carried on alone after an exit, gets the logits of the full batch."""
        expected = self.truth(batch)
        kept = torch.arange(0, SAMPLES, 2)
        for exit_index in range(model.num_exits - 1):
            with self.check(check, where or f"after exit {exit_index}"):
                carried = model.admit(copied(batch))
                for index, (stage, head) in enumerate(zip(model.stages, model.heads, strict=True)):
                    carried = advance(stage, carried)
                    logits = read(head, carried)
                    if index == exit_index:
                        carried = tuple(part[kept] for part in carried)
                detail = where or f"half of the samples kept after exit {exit_index}"
                self.expect_same(logits, expected[kept], check, detail, 1e-4)

    def check_predictor(self, model: MultiExitModel) -> None:
        """Check answers under a policy, with survivors of several batches together, and for a single sample."""
        batch = self.draw(self.case.batch, 12)
        with torch.no_grad(), self.check("predictor"):
            parts = [rows(batch, start, start + 4) for start in range(0, 12, 4)]
            early = torch.cat([model(copied(part))[0] for part in parts])
            expected = torch.cat([self.truth(part) for part in parts])
            policy = policy_for(model, early)
            decisions = Predictor(model, policy, batch_size=4, probabilities=True)(copied(batch))
            stayed = torch.from_numpy(decisions.exits == model.num_exits - 1)
            if not 0 < stayed.sum() < 12:
                raise BadCase(f"{int(stayed.sum())} of 12 samples stay until the end")
            detail = f"of {int(stayed.sum())} samples that stay, some get another class than the network's"
            self.expect(same_classes(decisions.predictions[stayed], expected[stayed]), "predictor", detail)
            detail = "some samples that leave get another class than the head's"
            self.expect(same_classes(decisions.predictions[~stayed], early[~stayed]), "predictor", detail)
            assert decisions.probabilities is not None
            sure = torch.from_numpy(decisions.probabilities)[stayed].float()
            self.expect_same(sure, expected[stayed].softmax(1).amax(1), "predictor", "the probability", 1e-3)
        with self.check("predictor", "one sample"):
            one = rows(batch, 0, 1)
            prediction = Predictor(model, policy_for(model, [2.0]))(copied(one)).predictions
            self.expect(same_classes(prediction, self.truth(one)), "predictor", "one sample gets another class")

    @torch.no_grad()
    def check_saved(self, model: MultiExitModel) -> None:
        """Check a saved model that is loaded into a network with other weights."""
        batch = self.draw(self.case.batch, SAMPLES)
        expected = self.truth(batch)
        with self.check("saved"), tempfile.TemporaryDirectory() as folder:
            own = model(copied(batch))
            save_model(model, folder)
            loaded = load_model(folder, new_network(self.case, 1), **functions_of(self.case))
            for index, (got, logits) in enumerate(zip(loaded(copied(batch)), own, strict=True)):
                self.expect_same(got, logits, "saved", f"exit {index} of the loaded model")
            self.expect_same(loaded(copied(batch))[-1], expected, "saved", "the loaded model")

    @torch.no_grad()
    def check_weights(self, network: nn.Module, model: MultiExitModel) -> None:
        """Check that other weights count when they are loaded after attaching."""
        for seed in (1, 2, 3):
            other = copy.deepcopy(self.original)
            other.load_state_dict(new_network(self.case, seed).state_dict())
            batch = self.draw(self.case.batch, SAMPLES)
            expected = self.truth(batch, other)
            with self.check("weights"):
                network.load_state_dict(other.state_dict())
                self.expect_same(model(copied(batch))[-1], expected, "weights", "weights loaded into the network")
                network.load_state_dict(self.original.state_dict())
                model.load_state_dict(with_weights(model, other.state_dict()))
                self.expect_same(model(copied(batch))[-1], expected, "weights", "weights loaded into the stages")

    def check_training(self) -> None:
        """Check three training steps."""
        expected = copy.deepcopy(self.original).train()
        network, model = self.attached()
        model.train()
        for seed in range(3):
            batch = self.draw(self.case.batch, SAMPLES, seed=seed)
            try:
                own = training_step(expected, lambda part: self.case.logits(run(expected, part)), batch, seed)
            except Exception as error:
                raise BadCase(f"the network itself does not train: {type(error).__name__}: {error}") from error
            before = len(self.findings)
            with self.check("training"):
                self.compare(training_step(network, lambda part: model(part)[-1], batch, seed), own, model)
            if len(self.findings) > before:
                return

    def check_heads_alone(self) -> None:
        """Check that the network stays unchanged while heads are trained."""
        network, model = self.attached()
        batch, labels = self.draw(self.case.batch, SAMPLES), torch.arange(SAMPLES) % self.case.classes
        loader = [batch | {"labels": labels} if isinstance(batch, dict) else (batch, labels)]
        with self.check("training"):
            train_heads(model, loader, TrainingSettings(epochs=2), progress=False)
            own, now = state_of(self.original), state_of(network)
            changed = [name for name in own if not torch.equal(own[name], now[name])]
            self.expect(not changed, "training", f"training heads changes {', '.join(changed)}")
            with torch.no_grad():
                logits = model.eval()(copied(batch))[-1]
            self.expect_same(logits, self.truth(batch), "training", "the logits once heads are trained")

    def compare(self, got: "Step", own: "Step", model: MultiExitModel) -> None:
        """Compare a training step with the network's own."""
        self.expect_same(got.logits, own.logits, "training", "logits in training mode", 1e-4)
        largest = max((float(each.abs().max()) for each in own.gradients.values() if each is not None), default=0.0)
        for name, gradient in own.gradients.items():
            other = got.gradients[name]
            if gradient is None or other is None:
                has = "no gradient" if other is None else "a gradient"
                self.expect(gradient is other, "training", f"{name} gets {has}, unlike in the network")
                continue
            allowed = 1e-3 * float(gradient.abs().max()) + 1e-5 * largest
            self.expect(bool((gradient - other).abs().max() <= allowed), "training", f"another gradient of {name}")
        in_stages = {name.split(".", 2)[2]: part for name, part in model.stages.named_buffers(prefix="stages")}
        for name, buffer in own.buffers.items():
            for buffers, where in ((got.buffers, "the network"), (in_stages, "the stages")):
                if name in buffers:
                    difference = relative_difference(buffers[name].float(), buffer.float())
                    self.expect(difference <= 1e-4, "training", f"another {name} in {where} after a step")

    def row(self) -> dict[str, str]:
        """Return the network's outcome and its detail."""
        counted = [each for each in self.findings if each.check not in MAY_REFUSE or each.outcome != "refused"]
        outcome = min((each.outcome for each in counted), key=OUTCOMES.index, default="right")
        shown = self.findings if outcome == "right" else [each for each in counted if each.outcome == outcome]
        details = []
        for check in dict.fromkeys(each.check for each in shown):
            first, *others = dict.fromkeys(each.detail for each in shown if each.check == check)
            details.append(f"{check}: {first}" + (f" (and {len(others)} more)" if others else ""))
        return named_row(self.case, outcome, "; ".join(details))


class Step(NamedTuple):
    """What one training step leaves behind."""

    logits: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def training_step(network: nn.Module, logits_of: Callable[[Batch], Tensor], batch: Batch, seed: int) -> Step:
    """Compute gradients of a loss on the logits; the weights stay."""
    network.zero_grad(set_to_none=True)
    set_seeds(seed)
    logits = logits_of(copied(batch))
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (logits.float() * weights + logits.float().square()).mean().backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: None if weight.grad is None else weight.grad.detach().clone()
        for name, weight in network.named_parameters()
    }
    return Step(logits.detach(), gradients, {name: buffer.clone() for name, buffer in network.named_buffers()})


def new_network(case: Case, seed: int) -> nn.Module:
    """Return the case's network with random weights and BatchNorm statistics."""
    set_seeds(1000 * seed + zlib.crc32(case.name.encode()) % 1000)
    network = case.make()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim > 1:
                fan_in = weight.numel() / weight.shape[0]
                weight.copy_(torch.randn(weight.shape) * max((2 / fan_in) ** 0.5, 0.2))
            elif weight.ndim:
                weight.add_(torch.randn(weight.shape) / 8)
        for module in network.modules():
            if isinstance(getattr(module, "running_mean", None), Tensor):
                norm: Any = module
                norm.running_mean.copy_(torch.randn(norm.running_mean.shape) / 4)
                norm.running_var.copy_(torch.rand(norm.running_var.shape) + 0.5)
    return network


def set_seeds(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # networks that draw from the global generator


def run(network: nn.Module, batch: Batch) -> Any:
    """Return the network's output, called as its user calls it."""
    if isinstance(batch, Mapping):
        return network(**batch)
    return network(*batch) if isinstance(batch, tuple) else network(batch)


def mapped(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return the batch with every tensor in it changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(change, part) for name, part in batch.items()}
    return type(batch)(mapped(change, part) for part in batch)


def copied(batch: Batch) -> Batch:
    return mapped(Tensor.clone, batch)


def rows(batch: Batch, start: int, stop: int) -> Batch:
    return mapped(lambda part: part[start:stop], batch)


def relative_difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest number; infinity if the shapes differ."""
    if expected.shape != got.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = float((got.double() - expected.double()).abs().max())
    return difference / max(float(expected.double().abs().max()), 1e-12) if difference == difference else float("inf")


def same_classes(predictions: Any, logits: Tensor) -> bool:
    """Check that the classes are those of the largest logits; near ties count as either."""
    logits = logits.reshape(len(predictions), -1)  # squeezed by some networks
    chosen = logits.gather(1, torch.as_tensor(predictions).long()[:, None])[:, 0]
    return bool((chosen >= logits.amax(1) - 1e-4 * logits.abs().max()).all())


def policy_for(model: MultiExitModel, early: Tensor | Sequence[float]) -> Threshold:
    """Return a policy under which about half of the samples with these early logits leave first; or by thresholds."""
    if isinstance(early, Tensor):
        best = early.softmax(1).topk(min(2, early.shape[1]), 1).values
        margins = (best[:, 0] - best[:, -1]).sort().values
        first = float(margins[len(margins) // 2 - 1 : len(margins) // 2 + 1].mean())
    else:
        first = early[0]
    thresholds = (first, *(2.0 for _ in range(model.num_exits - 2)))  # nobody reaches a margin of 2
    return Threshold(thresholds=thresholds, costs=tuple(float(1 + index) for index in range(model.num_exits)))


def functions_of(case: Case) -> dict[str, Any]:
    """Return what a folder cannot keep: functions that were passed to `attach_heads`."""
    return {name: value for name, value in case.arguments.items() if callable(value)}


def state_of(network: nn.Module) -> dict[str, Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def with_weights(model: MultiExitModel, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the model's state with the network's weights in the place of the stages' own."""
    own = model.state_dict()
    names = {name: name.split(".", 2)[2] for name in own if name.startswith("stages.")}
    return {name: weights.get(names.get(name, ""), tensor) for name, tensor in own.items()}


def one_line(error: BaseException) -> str:
    """Return the message without line breaks and the folders of this machine."""
    text = " ".join(str(error).split()).replace(f"{ROOT}/", "")
    return re.sub(r"/\S*/site-packages/", "", re.sub(r"/tmp/tmp\w+", "the folder", text))


def named_row(case: Case, outcome: str, detail: str) -> dict[str, str]:
    detail = detail if len(detail) <= LONGEST else detail[: LONGEST - 3] + "..."
    about = {"network": case.name, "kind": case.kind, "what it tests": case.tests, "remedy": case.remedy}
    return about | {"answerable": str(not case.must_refuse), "outcome": outcome, "detail": detail, "result": ""}


def result_of(row: Mapping[str, str], outcomes: Mapping[str, str]) -> str:
    """Return what becomes of a network with what its refusal asks for; nothing for rows that have it."""
    if row["remedy"] or row["outcome"] != "refused":
        return "" if row["remedy"] else row["outcome"]
    if outcomes.get(f"{row['network']}_told") == "right":
        return "right with its remedy"
    return "refused" if row["answerable"] == "True" else "refused, no right answer"


def try_network(case: Case) -> tuple[dict[str, str], list[Finding]]:
    """Return the row of one network, and all findings."""
    if case.needs and importlib.util.find_spec(case.needs) is None:
        return named_row(case, "skipped", f"{case.needs} is not installed"), []
    trial = Trial(case)
    try:
        trial.run_all()
    except BadCase as error:
        raise SystemExit(f"{case.name} is not a case: {error}") from error
    return trial.row(), trial.findings


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Try alight on networks in people's own style.")
    parser.add_argument("--only", metavar="NAME", choices=CASES, help="try this network and print every finding")
    parser.add_argument("--part", metavar="PART/PARTS", default="1/1", help="try this part of the networks")
    options = parser.parse_args(arguments)
    chosen, (part, parts) = options.only, map(int, options.part.split("/"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # transformers and torch.compile log much that is not a finding
    if chosen:
        row, findings = try_network(CASES[chosen])
        for finding in findings:
            print(f"{finding.check:12} {finding.outcome:8} {finding.detail}")
        print(f"{chosen}: {row['outcome']}")
        return int(row["outcome"] == "wrong")
    made = provenance("torch", "torchvision", "timm", "transformers", folder=ROOT)
    tried = {}
    for case in list(CASES.values())[len(CASES) * (part - 1) // parts : len(CASES) * part // parts]:
        row, _ = try_network(case)
        print(f"{row['kind']:9} {row['network']:32} {row['outcome']:8} {row['detail'][:120]}", flush=True)
        tried[case.name] = row | made
    with RESULTS.open(newline="") as file:  # parts may run side by side
        rows = {row["network"]: row for row in csv.DictReader(file) if parts > 1} | tried
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    found = [rows[name] | {"result": result_of(rows[name], outcomes)} for name in CASES if name in rows]
    write_rows(RESULTS, found)
    counts = print_counts(found)
    return int(counts["wrong"] > 0)


def print_counts(found: Sequence[Mapping[str, str]]) -> Counter[str]:
    """Print how often each outcome occurs, by kind and in all; return the counts of all."""
    written = [row for row in found if not row["remedy"]]
    parts = {
        **{kind: [row for row in found if row["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in found)},
        "as written": written,
        "as written, answerable": [row for row in written if row["answerable"] == "True"],
        "all, answerable": [row for row in found if row["answerable"] == "True"],
        "all": found,
    }
    print(f"\n{'':24}{' '.join(f'{each:>8}' for each in ('networks', *OUTCOMES, 'right'))}")
    for name, rows_of in parts.items():
        counts = Counter(row["outcome"] for row in rows_of)
        numbers = " ".join(f"{counts[each]:8}" for each in OUTCOMES)
        print(f"{name:24}{counts.total():8} {numbers} {counts['right'] / (counts.total() - counts['skipped']):8.1%}")
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
