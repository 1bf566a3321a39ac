"""Runtimes on the clock: what exported stages and heads take, and which runtime is the fastest for a policy."""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alight.costs import Costs
from alight.data.batches import as_inputs, as_tensor
from alight.display import aligned, html_table, layer_label
from alight.engine.backends import Reads, State
from alight.engine.backends.exported import exported_backend
from alight.engine.manifest import FLOAT32, Manifest
from alight.engine.predictor import Predictor
from alight.engine.settings import ONNXRUNTIME, OPENVINO, TORCH, RunSettings
from alight.errors import AlightError, BadInput
from alight.export.exporting import export_model
from alight.export.precision import without_heads
from alight.files import PathLike
from alight.networks.multi_exit import MultiExitModel
from alight.planning.timing import as_planned, full_network, seconds
from alight.policies.policy import Policy, Threshold

SECONDS = 1.0  # of the measurement at least
LEAST_PASSES, RUN = 16, 5  # walks through all stages that count, with and without heads; in runs of so many
ROUNDS = 5
NOTABLE = 1.05  # times as fast as the next; less may be another order in another run
EXITS, FULL = "with exits", "full network"
COMPILED = f"{TORCH}, compiled"
EXPORTED = (ONNXRUNTIME, OPENVINO)
ABSENT = 'it or onnx is not installed, so not tried: pip install "alight[export,openvino]"'


@dataclass(frozen=True)
class RuntimeTrial:
    """One runtime, with exits or without."""

    runtime: str  # "torch", "torch, compiled", "onnxruntime" or "openvino"
    what: str  # "with exits" or "full network"
    per_second: float  # samples; 0 where it does not run
    remark: str = ""  # why it does not run


@dataclass(frozen=True)
class RuntimeComparison:
    """The same policy and the full network by every runtime that is installed, interleaved on this machine.

    >>> trials = (RuntimeTrial("torch", "with exits", 90.0), RuntimeTrial("openvino", "full network", 120.0))
    >>> print(RuntimeComparison(trials, 64))
    batches of 64  samples/s, with exits  samples/s, full network
    torch                             90
    openvino                                                  120
    openvino, full network, is the fastest here: 1.33 times the next.
    """

    trials: tuple[RuntimeTrial, ...]  # of every runtime, with exits and without
    batch_size: int  # samples that ran at once
    model: MultiExitModel | None = field(default=None, repr=False)  # what `export` writes
    policies: Mapping[str, Policy] = field(default_factory=dict, repr=False)  # under which each runtime ran
    note: str = ""  # what the fastest loses, where that is known

    @property
    def ranked(self) -> list[RuntimeTrial]:
        """Trials that ran, the fastest first."""
        return sorted((each for each in self.trials if each.per_second), key=lambda each: -each.per_second)

    @property
    def fastest(self) -> RuntimeTrial:
        """The trial with the most samples per second."""
        return self.ranked[0]

    def export(self, folder: PathLike, **options: Any) -> Path:
        """Write the fastest exported runtime to a folder, with exits or without, and return it; float32."""
        exported = [each for each in self.ranked if each.runtime in EXPORTED]
        if not exported or self.model is None:
            raise AlightError("no exported runtime was compared: install onnxruntime or openvino")
        made = export_model(self.model, self.policy_of(exported[0]), folder, progress=False, **options)
        replace(Manifest.load(made), runtime=exported[0].runtime).save(made)
        return made

    def policy_of(self, trial: RuntimeTrial) -> Policy:
        """Return the policy under which a trial ran, which is that of the full network where it had no exits."""
        policy = self.policies[trial.runtime]
        return policy if trial.what == EXITS or self.model is None else _alone(self.model, policy)

    def columns(self) -> list[list[str]]:
        """Return columns of text: every runtime, with exits and without."""
        names = list(dict.fromkeys(each.runtime for each in self.trials))
        found = {(each.runtime, each.what): each for each in self.trials}
        cells = [[_cell(found.get((name, what))) for name in names] for what in (EXITS, FULL)]
        heads = [f"samples/s, {what}" for what in (EXITS, FULL)]
        opened = [self.policies[name].open_exits if name in self.policies else () for name in names]
        labels = [", ".join(_label(self.model, index) for index in each) for each in opened]
        return [
            [f"batches of {self.batch_size}", *names],
            *([["open exits", *labels]] if len({*filter(None, opened)}) > 1 else []),
            *([head, *cell] for head, cell in zip(heads, cells, strict=True)),
        ]

    def values(self) -> dict[str, Any]:
        """Return what the table says, for programs."""
        return {"batch_size": self.batch_size, "trials": [*map(vars, self.trials)], "note": self.note}

    @property
    def reason(self) -> str:
        """The recommendation, in a sentence."""
        first, *others = self.ranked
        winner = f"{first.runtime}, {first.what}, is"
        if not others:
            return f"{winner} the fastest here."
        second, over = others[0], first.per_second / others[0].per_second
        if over < NOTABLE:
            return f"{winner} as fast here as {second.runtime}, {second.what} ({over:.2f} times)."
        return f"{winner} the fastest here: {over:.2f} times the next."

    def __str__(self) -> str:
        return "\n".join([*aligned(self.columns()), *self._remarks()])

    def _repr_html_(self) -> str:
        return html_table("Runtimes", self.columns(), self._remarks())

    def _remarks(self) -> list[str]:
        said = dict.fromkeys(f"{each.runtime}: {each.remark}" for each in self.trials if each.remark)
        return [*said, self.reason, *filter(None, [self.note])]


def compare_runtimes(
    model: MultiExitModel,
    policy: Policy | Mapping[str, Policy],
    inputs: Any,
    batch_size: int,
    *,
    settings: RunSettings | None = None,
    compiled: bool = False,
    rounds: int = ROUNDS,
    allow_mismatch: bool = False,
) -> RuntimeComparison:
    """Return samples per second of a policy and of the full network, by PyTorch, ONNX Runtime and OpenVINO.

    Exported stages are float32, so that the policy holds for all of them. Runs are interleaved in one process; threads
    of a runtime rest a few milliseconds after its run ends, so give inputs for some tenths of a second.

    Args:
        model: The network.
        policy: For it; or one for each runtime that is to be tried, by its name, "torch" among them.
        inputs: Real ones, as a predictor takes them: the policy decides about them.
        batch_size: The one that will be served.
        settings: How PyTorch runs; `threads` are those of every runtime.
        compiled: Compile for PyTorch, too, which takes a while.
        rounds: Runs of each, of which the median counts.
        allow_mismatch: Take the policy of another network.

    >>> import torch
    >>> from torch import nn
    >>> from alight import Threshold
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> found = compare_runtimes(model, Threshold((0.5,), costs=(1.0, 2.0)), torch.randn(256, 4), 64, rounds=1)
    >>> {each.what for each in found.trials if each.runtime == "torch"} == {"with exits", "full network"}
    True
    """
    settings, installed = settings or RunSettings(), installed_runtimes()
    given = policy if isinstance(policy, Mapping) else dict.fromkeys([TORCH, *installed], policy)
    if TORCH not in given or {*given} - {TORCH, *EXPORTED}:
        raise BadInput(f"policies for {', '.join(given)}: give one for {TORCH}, others for {' and '.join(EXPORTED)}")
    policies = {TORCH: given[TORCH], **({COMPILED: given[TORCH]} if compiled else {})}
    policies |= {name: given[name] for name in installed if name in given}
    terms: dict[str, Any] = {"batch_size": batch_size, "allow_mismatch": allow_mismatch}
    made: dict[tuple[str, str], Predictor] = {}
    failed = [RuntimeTrial(name, FULL, 0.0, ABSENT) for name in EXPORTED if name not in installed]
    example = tuple(as_tensor(each)[:2] for each in as_inputs(inputs, model.input_spec))
    with tempfile.TemporaryDirectory() as temporary:
        for way, what, each in _each_way(model, policies):
            try:
                predictor = _started(model, each, Path(temporary), example, settings, terms, way)
                predictor(inputs)  # compiles, or finds out that it cannot
                made[way, what] = predictor
            except (AlightError, RuntimeError) as error:
                failed.append(_failed(way, what, error))
    if not made:
        raise AlightError(f"no runtime runs this network under this policy: {failed[-1].remark}")
    return RuntimeComparison((*_timed(made, inputs, rounds), *failed), batch_size, model, policies)


def _each_way(model: MultiExitModel, policies: Mapping[str, Policy]) -> Iterator[tuple[str, str, Policy]]:
    """Yield how a network runs, with exits and without, and the policy for it."""
    for way, policy in policies.items():
        full = _alone(model, policy)
        if policy.open_exits != full.open_exits:
            yield way, EXITS, policy
        yield way, FULL, full


def _timed(made: Mapping[tuple[str, str], Predictor], inputs: Any, rounds: int) -> list[RuntimeTrial]:
    """Return samples per second of every predictor, interleaved."""
    states = {key: each.place(inputs, len(as_inputs(inputs, each.backend.inputs)[0])) for key, each in made.items()}
    count = len(next(iter(states.values()))[0])
    samples = {key: as_planned(each.policy, count) for key, each in made.items()}  # where they leave at random
    runs = [[seconds(each, states[key], samples[key]) for key, each in made.items()] for _ in range(rounds + 1)]
    rates = count / np.median(runs[1:], axis=0)
    return [RuntimeTrial(*key, float(rate)) for key, rate in zip(made, rates, strict=True)]


def _started(
    model: MultiExitModel, policy: Policy, place: Path, example: Any, settings: RunSettings, terms: Any, way: str
) -> Predictor:
    """Return a predictor that runs in one way; `place` is for exported stages, one folder for each choice of exits."""
    if way in (TORCH, COMPILED):
        return Predictor(model, policy, settings=replace(settings, compile=way == COMPILED), **terms)
    _check_dtype(settings)
    folder = place / "-".join(map(str, policy.open_exits))
    if not folder.exists():
        allowed = terms["allow_mismatch"]
        export_model(model, policy, folder, example=example, allow_mismatch=allowed, progress=False)
    return Predictor.load(folder, policy, settings=RunSettings(threads=settings.threads, runtime=way), **terms)


def _failed(way: str, what: str, error: Exception) -> RuntimeTrial:
    return RuntimeTrial(way, what, 0.0, f"does not run: {str(error).splitlines()[0]}")


def _check_dtype(settings: RunSettings) -> None:
    if settings.dtype not in (None, FLOAT32):
        raise BadInput(f"exported stages are {FLOAT32}, and the policy is for {settings.dtype}: leave dtype out")


def installed_runtimes() -> list[str]:
    """Return the runtimes of exported networks that are installed here."""
    return [name for name in EXPORTED if importlib.util.find_spec(name) and importlib.util.find_spec("onnx")]


def _alone(model: MultiExitModel, policy: Policy) -> Policy:
    """Return the policy of the full network, with its cost where that is known."""
    alone = replace(full_network(model), unit=policy.unit, fingerprint=policy.fingerprint)
    return alone if policy.full_cost is None else replace(alone, costs=(policy.full_cost,), full_cost=policy.full_cost)


def _label(model: MultiExitModel | None, exit_index: int) -> str:
    return str(exit_index) if model is None else layer_label(model.exits[exit_index])


def _cell(trial: RuntimeTrial | None) -> str:
    return f"{trial.per_second:,.0f}" if trial and trial.per_second else ""


def runtime_costs(
    model: MultiExitModel, runtimes: Sequence[str], inputs: Any, batch_size: int, settings: RunSettings
) -> tuple[dict[str, Costs], list[RuntimeTrial]]:
    """Return milliseconds per sample of every stage and head by runtimes of exported networks, and which do not run."""
    every, example = range(model.num_exits), tuple(as_tensor(each) for each in as_inputs(inputs, model.input_spec))
    nobody = Threshold((np.inf,) * (len(every) - 1), costs=tuple(1.0 + index for index in every))
    found: dict[str, Costs] = {}
    failed: list[RuntimeTrial] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "exported"
        for name in runtimes:
            try:
                _check_dtype(settings)
                if not folder.exists():
                    export_model(model, nobody, folder, example=tuple(each[:2] for each in example), progress=False)
                own = RunSettings(threads=settings.threads, runtime=name)
                found[name] = exported_costs(folder, tuple(each.numpy() for each in example), batch_size, own)
            except (AlightError, RuntimeError) as error:
                failed.append(_failed(name, EXITS, error))
    return found, failed


def exported_costs(folder: Path, inputs: State, batch_size: int, settings: RunSettings | None = None) -> Costs:
    """Return milliseconds per sample of every stage and head of an exported folder, at this batch size.

    A stage is timed with its head and the score, and without them, interleaved; a head's cost is the difference.
    """
    settings = settings or RunSettings()
    manifest = Manifest.load(folder)
    terms: dict[str, Any] = {"batch_size": batch_size, "allow_mismatch": True, "allow_compiled": True}
    backend = exported_backend(folder, manifest, settings, **terms)
    margins = [Reads(("margin",))] * (len(manifest.stages) - 1)
    backend = backend.with_reads([*margins, Reads(())])
    with tempfile.TemporaryDirectory() as temporary:
        trunk_folder = without_heads(folder, Path(temporary) / "stages")
        trunks = exported_backend(trunk_folder, Manifest.load(trunk_folder), settings, **terms).stages
        rows = np.arange(batch_size) % len(inputs[0])
        given = backend.admit(tuple(each[rows] for each in inputs))
        alone = batch_size == 1
        run = backend.run_one if alone else backend.run
        ways: list[list[Callable[[State], tuple[Any, State]]]] = [
            [partial(run, stage) for stage in range(len(trunks))],
            [_states_of(trunk, alone) for trunk in trunks],
        ]
        times: list[list[list[float]]] = [[] for _ in ways]
        begin = time.perf_counter()
        while len(times[0]) < LEAST_PASSES or time.perf_counter() - begin < SECONDS:
            for stages, taken in zip(ways, times, strict=True):
                walks = [_walk(stages, given) for _ in range(RUN)]  # several, so that caches hold what they would
                taken += walks[1:]
    together, without = (1e3 * np.median(each, axis=0) / batch_size for each in times)
    without[-1] = together[-1]  # the last head is part of the full network
    return Costs(without, np.maximum(together - without, 0.0), "ms")


def _states_of(trunk: Any, alone: bool) -> Callable[[State], tuple[None, State]]:
    """Return a stage that gives states alone, called as one that gives head values, too."""
    run = getattr(trunk, "run_one", trunk) if alone else trunk

    def called(state: State) -> tuple[None, State]:
        made, others = run(state)
        return None, (made, *others)

    return called


def _walk(stages: Sequence[Callable[[State], tuple[Any, State]]], state: State) -> list[float]:
    """Return the seconds of every stage in one walk."""
    taken = []
    for stage in stages:
        start = time.perf_counter()
        _, state = stage(state)
        taken.append(time.perf_counter() - start)
    return taken
