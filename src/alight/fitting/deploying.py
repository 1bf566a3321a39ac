"""From a network to a folder that runs elsewhere, in lower precision: quantised, recorded and calibrated again."""

import copy
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from alight import calibrate
from alight.calibrate.again import recalibrate
from alight.calibrate.crossval import affordable_exits, kept_exits
from alight.calibrate.risk_guarantees import RISKS
from alight.costs import Amount, Costs
from alight.data.batches import as_batch, in_batches
from alight.data.preprocess import InputSpec, as_array
from alight.display import accuracy_text, aligned, layer_label, quantity
from alight.engine.backends import Floats, State
from alight.engine.backends.exported import check_settings, exported_backend
from alight.engine.backends.onnx import on_host
from alight.engine.manifest import FLOAT32, GAPS, INT8, SMALL_GAP, Manifest, check_loses_nothing
from alight.engine.predictor import Predictor, check_exits
from alight.engine.recorder import Recorder, record
from alight.engine.settings import ONNXRUNTIME, OPENVINO, TORCH, RunSettings
from alight.errors import BadInput, LabelsNeeded, Mismatch
from alight.files import PathLike, whole_folder
from alight.fitting.calls import Steps
from alight.fitting.heads import keep_classes
from alight.fitting.steps import BUDGET, WORTH, Goal, default_method, lost_too_much
from alight.outputs import Decisions, HeadOutputs
from alight.policies.policy import Certificate, ExitAt, Policy, Threshold
from alight.policies.route import replay

CHOOSING = 1 / 3  # of the labelled samples choose ranges, precision and exits; the others calibrate the policy
RANGED = 128  # samples whose values give the ranges of int8
TOLERATED = 0.005  # accuracy that an exit may lose by lower precision, before a part of its stage stays in float32
DELTA = 0.05  # probability with which a guarantee of the largest loss may fail
AMOUNTS = 12  # budgets that are tried for a largest loss, from the full network down
FAILURES = 2  # of them in a row that end it: one may be bad luck
ROUNDS, SECONDS = 5, 1.0  # of the measurement at least
BATCH = 32  # samples that are recorded together
FEW = 50  # labelled samples below which a warning is given
FEWEST = 12  # labelled samples, of which both parts are divided once more
COUNTED = ("FLOPs", "MACs")  # units in which costs are known before anything runs
COMPARED = 4  # samples of a batch that are run alone, too


@dataclass(frozen=True)
class Deployed:
    """An exported folder in lower precision: accuracy and time of its exits, before and after, and its policy.

    >>> from alight.policies.policy import ExitAt
    >>> policy = ExitAt(open_exits=(0,), num_exits=1, costs=(2.0,))
    >>> decisions = replay(policy, HeadOutputs([[0.9], [0.4]], [[1], [0]], [1, 1]))
    >>> levels, accuracies, times = ("int8",), (0.5,), (2.0,)
    >>> own = {"times": times, "clocked": np.array([[2.0, 2.0, 5.0]]), "full_accuracy": 0.5, "sizes": (400, 110)}
    >>> terms = levels, accuracies, accuracies, decisions
    >>> found = Deployed(Path("int8"), policy, "onnxruntime", ("end",), *terms, **own)
    >>> found.shares, found.mean_time
    ((1.0,), 2.0)
    """

    folder: Path  # with the stages, the policy and the manifest
    policy: Policy  # calibrated again on what was exported
    runtime: str  # "onnxruntime" or "openvino"
    exits: tuple[str, ...]  # the open ones
    levels: tuple[str, ...]  # precision of the stage that ends at each of them
    before: tuple[float, ...]  # accuracy of each in float32, on all labelled samples
    after: tuple[float, ...]  # accuracy in the folder's precision
    decisions: Decisions = field(repr=False)  # of the deployed folder about all labelled samples
    times: tuple[float, ...]  # milliseconds per sample that the stages take until each answers, measured here
    clocked: Floats = field(repr=False)  # the same of predictors, in rounds: with exits, full network, that in float32
    full_accuracy: float  # of the full network in this precision, on all labelled samples
    sizes: tuple[int, int]  # bytes of the stages, in float32 and now

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of the labelled samples that leave at each open exit."""
        return tuple(self.decisions.exit_shares[list(self.policy.open_exits)].tolist())

    @property
    def mean_time(self) -> float:
        """Milliseconds per sample that a predictor of the folder takes, inputs made fit and decisions included."""
        return float(np.median(self.clocked[:, 0]))

    @property
    def full_time(self) -> float:
        """The same of the full network in this precision, in one piece."""
        return float(np.median(self.clocked[:, 1]))

    @property
    def float_time(self) -> float:
        """The same of the full network in float32."""
        return float(np.median(self.clocked[:, 2]))

    def predictor(self, settings: RunSettings | None = None) -> Predictor:
        """Return the predictor of the folder; `Predictor.load` takes further options."""
        return Predictor.load(self.folder, settings=settings)

    def columns(self) -> list[list[str]]:
        """Return columns of text about every open exit."""
        return [
            ["exit", *map(layer_label, self.exits)],
            ["precision", *self.levels],
            [f"accuracy, {FLOAT32}", *map(accuracy_text, self.before)],
            ["after", *map(accuracy_text, self.after)],
            ["stages take", *(quantity(value, "ms") for value in self.times)],
            ["leave", *map(accuracy_text, self.shares)],
        ]

    def __str__(self) -> str:
        before, after = (size / 2**20 for size in self.sizes)
        low, middle, high = np.quantile(self.clocked[:, 1] / self.clocked[:, 0], [0.25, 0.5, 0.75])
        name = "with exits" if len(self.exits) > 1 else f"{layer_label(self.exits[0])} alone"
        lost, is_lower = self.full_accuracy - self.decisions.accuracy(), any(each != FLOAT32 for each in self.levels)
        own, full, in_float = (quantity(each, "ms") for each in (self.mean_time, self.full_time, self.float_time))
        full += f", {in_float} in {FLOAT32}" if is_lower else ""
        lines = [
            f"{len(self.exits)} stages for {self.runtime}, {after:.1f} MiB ({before:.1f} MiB in {FLOAT32})",
            *aligned(self.columns()),
            f"{name}: {accuracy_text(self.decisions.accuracy())} accuracy, {own} on average; full network in this"
            f" precision: {accuracy_text(self.full_accuracy)}, {full}",
            f"{middle:.2f} ({low:.2f} to {high:.2f}) times as fast, with all that a predictor does around the stages",
            f"accuracies are of all {len(self.decisions):,} labelled samples, which chose and calibrated this: a little"
            " optimistic",
            *filter(None, [lost_too_much(lost) if self.policy.budget is not None else ""]),
        ]
        if low < WORTH and len(self.exits) > 1:
            lines.append("Early exit is not worth it here: open fewer exits, or deploy the full network.")
        if is_lower and self.float_time < min(self.mean_time, self.full_time):
            lines.append(f"Lower precision is not worth it here: the full network in {FLOAT32} is faster; deploy that.")
        if self.policy.certificate:
            lines.append(str(self.policy.certificate))
        return "\n".join(lines)


def deploy(
    model: Any,
    data: Any,
    folder: PathLike,
    *,
    policy: Policy | None = None,
    budget: float | str | None = None,
    max_accuracy_loss: float | None = None,
    precision: str = INT8,
    settings: RunSettings | None = None,
    batch_size: int = 1,
    progress: bool = True,
) -> Deployed:
    """Export a network in lower precision with a policy that was calibrated on what runs then, and its guarantee.

    Scores move when a network is quantised, so the policy of the original does not hold: the exported stages are
    recorded on the labelled data by the runtime that will run them, and a policy is calibrated on that. A third of the
    data gives the ranges of int8 and, where an exit loses more than half a point of accuracy, decides which parts stay
    in float32; it also chooses the exits where no policy is given. The other two thirds calibrate.

    Args:
        model: A `MultiExitModel` with trained heads.
        data: Labelled samples that trained nothing and chose no exits of `policy`, as `record` takes them; read often.
        folder: To write.
        policy: Calibrated on the original: its exits stay open, its method, budget and guarantee are used again.
        budget: Instead of a policy: "50%", "3 GFLOPs", "0.5 ms" of the exported network.
        max_accuracy_loss: Instead: the cheapest policy in milliseconds that loses no more against the last exit in this
            precision, with 95 % confidence; what the precision itself loses is shown beside.
        precision: "int8"; "float16": files of half the size; "bfloat16": arithmetic of OpenVINO; "float32".
        settings: `runtime`, `threads` and `providers` with which it will run; None: ONNX Runtime on all cores.
        batch_size: At which stages are timed.
        progress: Print every step.

    >>> import tempfile, torch
    >>> from torch import nn
    >>> from alight import MultiExitModel, calibrate, measure_costs
    >>> stages, heads = [nn.Linear(4, 64), nn.Linear(64, 64)], [nn.Linear(64, 3), nn.Linear(64, 3)]
    >>> recipe = {"source": "stages", "example": {"shape": [2, 4], "dtype": "float32"}}
    >>> model = MultiExitModel(stages, heads, recipe=recipe)
    >>> data = torch.randn(300, 4), torch.arange(300) % 3
    >>> deployed = deploy(model, data, f"{tempfile.mkdtemp()}/int8", budget="90%", progress=False)
    >>> len(deployed.predictor()(data[0]))
    300
    """
    model = model if hasattr(model, "stages") else getattr(model, "network", model)  # of what `fit` returns
    if not hasattr(model, "stages"):
        raise BadInput(
            f"{type(model).__name__} is not a network with exits: give a MultiExitModel. For a cascade in lower"
            " precision give cascade() the ONNX files of its networks in that precision, and export it"
        )
    if policy is not None and (budget, max_accuracy_loss) != (None, None):
        raise BadInput("a policy has its own budget: give a policy, a budget or a largest loss")
    wanted = policy or Goal(budget, max_accuracy_loss)
    from alight.export.exporting import check_weights

    check_loses_nothing(Path(folder))
    settings = settings or RunSettings()
    check_settings("a deployed network is exported", settings)
    if policy is not None:
        check_is_for(policy, model)
    check_weights(model)
    _check_affordable(model, wanted)
    model = copy.copy(model)  # which may get names of classes
    keep_classes(model, data, Steps(progress, "deploy"))
    with tempfile.TemporaryDirectory() as temporary:
        work = Deployment(model, data, precision, settings, batch_size, Path(temporary), progress)
        return work.deployed(folder, wanted)


class Deployment:
    """A network in one precision for one runtime, made ready to be deployed with one policy or several.

    `folder` is for files that are needed on the way, `original` the recording of the network in float32 where it is
    there already; other arguments as of `deploy`.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        precision: str,
        settings: RunSettings,
        batch_size: int,
        folder: Path,
        progress: bool,
        original: HeadOutputs | None = None,
    ) -> None:
        from alight.export.precision import check_precision

        self.model, self.data, self.precision, self.settings = model, data, precision, settings
        self.batch_size, self.folder, self.steps = batch_size, folder, Steps(progress, "deploy")
        self.runtime = settings.runtime or ONNXRUNTIME
        if self.runtime == TORCH:
            raise BadInput(f"a deployed folder runs without PyTorch: choose runtime='{ONNXRUNTIME}' or '{OPENVINO}'")
        check_precision(precision, self.runtime)
        if batch_size < 1:
            raise BadInput(f"batch size {batch_size}: give 1 or more")
        if isinstance(data, Iterator):
            raise BadInput("data that can be read only once, and deploying reads it several times: give a loader")
        if original is None:
            self.steps.say("recording the network in float32")
            original = record(model, data, batch_size=BATCH, progress=progress)
        self.original = original
        if self.original.labels is None:
            raise LabelsNeeded("calibrating a network of lower precision")
        if len(original) < FEWEST:
            raise BadInput(
                f"{len(original)} labelled samples, of which a third choose precision and exits, and the others"
                f" calibrate: give at least {FEWEST}, better 1,000"
            )
        if len(original) < FEW:
            warnings.warn(
                f"{len(original)} labelled samples, of which a third choose ranges, precision and exits: accuracies are"
                f" rough and the policy is cautious; give {FEW} or more, better 1,000",
                stacklevel=3,
            )
        drawn = np.random.default_rng(0).permutation(len(self.original))
        self.choosing, self.calibrating = np.split(drawn, [max(1, round(CHOOSING * len(drawn)))])
        self.samples = [
            *_samples_at(data, model.input_spec, np.sort(self.choosing)[:: max(1, len(self.choosing) // RANGED)])
        ]
        self.levels: dict[int, str] = {}  # of the stages that end at an exit, where they are known
        self.made: dict[tuple[int, ...], tuple[Path, HeadOutputs]] = {}  # stages up to these exits, and their recording
        self.sources: dict[tuple[int, ...], Path] = {}  # the same in float32
        self.numbers = count()  # of folders on the way

    def deployed(self, folder: PathLike, wanted: Policy | Goal) -> Deployed:
        """Return a folder with a policy for a goal, or with one like the given one."""
        if isinstance(wanted, Policy):
            return self.finished(wanted, Path(folder), None)
        policy = self.chosen(wanted)
        absolute = wanted.unit == "ms" and "%" not in str(wanted.budget)
        return self.finished(policy, Path(folder), Amount(policy.budget) if absolute and policy.budget else None)

    def chosen(self, goal: Goal) -> Policy:
        """Return a policy whose exits and method are to be used, fitted to the samples that choose."""
        every = tuple(range(self.model.num_exits))
        place, table = self.lowered(every)
        costs, name = self.costs(place, every, goal.unit), default_method(table.take(self.calibrating))
        table = table.take(self.choosing)
        self.steps.say("choosing exits")
        if goal.max_accuracy_loss is not None:
            return within_loss(costs, goal.max_accuracy_loss, table, self.model.exits)
        method = calibrate.METHODS[name]
        amount = costs.budget(goal.budget or BUDGET)
        opened = kept_exits(calibrate.eero, costs, amount, table)
        certified = calibrate.certified_probability(method)
        fitted = certified(costs.at_exits(opened), amount, table.at_exits(opened))
        return fitted.renumbered(opened, num_exits=len(every), exits=self.model.exits, full_cost=costs.full)

    def finished(self, policy: Policy, folder: Path, budget: Amount | None) -> Deployed:
        """Return the folder with a policy like this one, calibrated on its own stages."""
        while True:
            opened = policy.open_exits
            place, table = self.lowered(opened)
            costs = self.costs(place, opened, policy.unit)
            self.steps.say(f"calibrating on {len(self.calibrating):,} samples")
            labelled = table.take(self.calibrating)
            policy = replace(recalibrate(policy, costs, labelled, budget), exits=self.model.exits)
            if policy.open_exits == opened:
                break
            check_exits_kept(policy, opened)
        from alight.export.precision import put_policy

        put_policy(place, policy)
        check_loses_nothing(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as filling:
            shutil.copytree(place, filling, dirs_exist_ok=True)
        return self._described(policy, folder, table)

    def lowered(self, opened: tuple[int, ...]) -> tuple[Path, HeadOutputs]:
        """Return a folder of stages up to these exits, as precise as needed, and what they say about all samples."""
        if opened in self.made:
            return self.made[opened]
        source, levels = self._exported(opened), self._levels_for(opened)
        place, table = self._recorded(source, levels)
        for exit_index in range(len(opened)):
            if self._loses(table, opened, exit_index):
                place, table, levels = self._raised(source, levels, opened, exit_index)
        self.levels |= dict(zip(opened, levels, strict=True))
        self.made[opened] = place, table
        return place, table

    def _full_network(self) -> tuple[Path, HeadOutputs]:
        """Return a folder of the full network in one piece, as precise as it needs alone, and what it says."""
        last = (self.model.num_exits - 1,)
        if last not in self.made:
            levels, self.levels = self.levels, {}
            self.lowered(last)
            self.levels = levels
        return self.made[last]

    def _raised(
        self, source: Path, levels: list[str], opened: tuple[int, ...], exit_index: int
    ) -> tuple[Path, HeadOutputs, list[str]]:
        """Return stages of which as many parts are more precise as this exit needs, and their levels.

        Its own head and stage are raised first, then the stages before, until it loses little; then each stage goes
        back where the exit does not need it.
        """
        known, before = self._known_levels(), [*levels]
        steps = [(exit_index, level) for level in known[known.index(levels[exit_index]) + 1 :]]
        steps += [(stage, known[-1]) for stage in reversed(range(exit_index)) if levels[stage] != known[-1]]
        place, table = source, self.original
        for stage, level in steps:
            levels = [*levels[:stage], level, *levels[stage + 1 :]]
            self.steps.say(
                f"{layer_label(self.model.exits[opened[exit_index]])} loses accuracy: trying {level} up to"
                f" {layer_label(self.model.exits[opened[stage]])}"
            )
            place, table = self._recorded(source, levels)
            if not self._loses(table, opened, exit_index):
                break
        changed = [stage for stage in range(exit_index + 1) if levels[stage] != before[stage]]
        for stage in changed if len(changed) > 1 else ():
            lower = [*levels[:stage], before[stage], *levels[stage + 1 :]]
            other, found = self._recorded(source, lower)
            if not self._loses(found, opened, exit_index):
                place, table, levels = other, found, lower
        return place, table, levels

    def costs(self, place: Path, opened: tuple[int, ...], unit: str) -> Costs:
        """Return the costs of these exits in a unit: counted for the network, or timed for the exported stages."""
        if unit in COUNTED:
            from alight.costing.measure import measure_costs

            return measure_costs(self.model, unit=unit, progress=False).at_exits(opened)
        if unit != "ms":
            raise BadInput(f"costs in {unit or 'no unit'} cannot be measured for exported stages: use FLOPs or ms")
        from alight.planning.engines import exported_costs

        self.steps.say("timing stages and heads")
        return exported_costs(place, self.samples[0], self.batch_size, self.settings)

    def _exported(self, opened: tuple[int, ...]) -> Path:
        """Return a folder of stages in float32 up to these exits."""
        from alight.export.exporting import export_model

        self.steps.say(f"exporting {len(opened)} stages")
        costs = tuple(np.arange(1.0, len(opened) + 1).tolist())
        terms: dict[str, Any] = {"costs": costs, "open_exits": opened, "num_exits": self.model.num_exits}
        nobody = Threshold((np.inf,) * (len(opened) - 1), **terms) if len(opened) > 1 else ExitAt(**terms)
        made = export_model(self.model, nobody, self.folder / str(next(self.numbers)), progress=False)
        self.sources[opened], self.float_bytes = made, _bytes_of(made)
        return made

    def _recorded(self, source: Path, levels: Sequence[str]) -> tuple[Path, HeadOutputs]:
        from alight.export.precision import lower

        self.steps.say(f"writing stages in {self.precision}, and recording them by {self.runtime}")
        terms: dict[str, Any] = {"runtime": self.runtime, "providers": self.settings.providers, "levels": levels}
        place = lower(source, self.folder / str(next(self.numbers)), self.precision, self.samples, **terms)
        backend = exported_backend(place, Manifest.load(place), self.settings)
        table = Recorder(backend).table(self.data, BATCH, self.steps.progress)
        if not np.array_equal(table.truth(), self.original.truth()):
            raise BadInput(
                "the data came in another order when they were read again, so that samples which choose precision and"
                " exits would also calibrate: give a loader that does not shuffle"
            )
        self._check_alone(backend)
        return place, table

    def _check_alone(self, backend: Any) -> None:
        """Check that the last samples of a batch get alone what they get in it: engines have had faults there."""
        together = backend.admit(max(_joined(self.samples), key=lambda each: len(each[0])))
        alone = [tuple(each[-row:][:1] for each in together) for row in range(1, min(len(together[0]), COMPARED) + 1)]
        allowed = GAPS.get(self.precision, SMALL_GAP)
        for stage, exit_index in enumerate(backend.open_exits):
            values, together = backend.run(stage, together)
            for row in range(len(alone)):
                one, made = backend.run_one(stage, alone[row])
                alone[row] = tuple(np.array(on_host(each)) for each in made)
                gap = abs(one.largest - values.largest[-1 - row])
                if not gap <= allowed * max(1.0, abs(one.largest)):
                    raise Mismatch(
                        f"{self.runtime} in {self.precision} gives a sample {one.largest:.4g} alone and"
                        f" {values.largest[-1 - row]:.4g} in a batch, as largest logit at"
                        f" {layer_label(self.model.exits[exit_index])}: choose another runtime, version of it or"
                        " precision"
                    )

    def _known_levels(self) -> Sequence[str]:
        from alight.export.precision import LEVELS

        return LEVELS[self.precision]

    def _levels_for(self, opened: tuple[int, ...]) -> list[str]:
        """Return the precision of every stage: as high as that of its parts, where these are known."""
        known, levels = self._known_levels(), []
        for start, end in zip((0, *(index + 1 for index in opened)), opened, strict=False):
            parts = [known.index(self.levels.get(index, known[0])) for index in range(start, end + 1)]
            levels.append(known[max(parts)])
        return levels

    def _loses(self, table: HeadOutputs, opened: tuple[int, ...], exit_index: int) -> bool:
        """Return whether an exit loses accuracy on the samples that choose, by more than its standard error."""
        rows = self.choosing
        lost = self.original.correct()[rows, opened[exit_index]].astype(float) - table.correct()[rows, exit_index]
        return bool(lost.mean() - lost.std() / np.sqrt(len(rows)) > TOLERATED)

    def _described(self, policy: Policy, folder: Path, table: HeadOutputs) -> Deployed:
        from alight.planning.engines import exported_costs

        manifest, opened = Manifest.load(folder), [*policy.open_exits]
        self.steps.say("comparing it with the full network in one piece")
        sizes = self.float_bytes, _bytes_of(folder)  # the full network has its own
        whole, full = self._full_network()
        times = exported_costs(folder, self.samples[0], self.batch_size, self.settings)
        predictor = Predictor.load(folder, settings=self.settings, batch_size=BATCH)
        return Deployed(
            folder=folder.resolve(),
            policy=policy,
            runtime=self.runtime,
            exits=tuple(self.model.exits[index] for index in opened),
            levels=tuple(stage.precision for stage in manifest.stages),
            before=tuple(self.original.correct()[:, opened].mean(axis=0).tolist()),
            after=tuple(table.correct().mean(axis=0).tolist()),
            decisions=predictor.run(self.data, progress=self.steps.progress),
            times=tuple(times.cumulative().tolist()),
            clocked=self._clocked(folder, whole),
            full_accuracy=float(full.correct().mean()),
            sizes=sizes,
        )

    def _clocked(self, folder: Path, whole: Path) -> Floats:
        """Return milliseconds per sample by a deployed folder, and by full networks in this precision and float32."""
        from alight.planning.timing import full_network

        alone, size = full_network(self.model), self.batch_size
        places = [whole, self.sources[alone.open_exits]]
        runs = [exported_backend(each, Manifest.load(each), self.settings, batch_size=size) for each in places]
        ways = [Predictor(each, alone, batch_size=size) for each in runs]
        ways = [Predictor.load(folder, settings=self.settings, batch_size=size), *ways]
        parts = [
            tuple(each.take(range(row, row + size), axis=0, mode="wrap") for each in inputs)
            for inputs in _joined(self.samples)
            for row in range(0, len(inputs[0]), size)
        ]
        begin, taken = time.perf_counter(), list[list[float]]()
        while len(taken) <= ROUNDS or time.perf_counter() - begin < SECONDS:
            taken.append([_seconds(way, parts) for way in ways])
        return 1e3 * np.array(taken[1:]) / (size * len(parts))


def _seconds(predictor: Predictor, parts: Sequence[State]) -> float:
    """Return the seconds of all parts, one after the other."""
    begin = time.perf_counter()
    for part in parts:
        predictor(part)
    return time.perf_counter() - begin


def check_is_for(policy: Policy, model: Any) -> None:
    """Check that a policy is for this network, by the number and the names of its exits and by its fingerprint."""
    from alight.networks.store import fingerprint

    check_exits(policy, model.num_exits)
    what = ""
    if policy.exits and policy.exits != model.exits:
        what = f"for exits {', '.join(policy.exits)} and the network has {', '.join(model.exits)}"
    elif policy.fingerprint not in ("", own := fingerprint(model)):
        what = f"calibrated on outputs of the network {policy.fingerprint} and this is {own}"
    if what:
        raise Mismatch(
            f"the policy is {what}: calibrate on outputs of this network, or take its exits, method and budget all the"
            " same, as dataclasses.replace(policy, exits=(), fingerprint='') (--allow-mismatch)"
        )


def check_exits_kept(policy: Policy, opened: tuple[int, ...]) -> None:
    """Raise if the samples that certify a risk have closed some of these exits, unless the full network is left.

    The cheapest policy that passes the test is taken. With fewer exits it would be recorded and tested anew by the same
    samples, and each choice of exits may pass falsely: of certificates that should be false in 2 % of calibrations,
    4 % were. A guarantee of cost is safe: other samples than those that issue it have closed the exits.
    """
    if policy.certificate is None or policy.certificate.contract not in RISKS or policy.open_exits == opened[-1:]:
        return
    raise BadInput(
        f"{policy.method} opens {len(policy.open_exits)} of {len(opened)} exits by the samples that certify its"
        f" {RISKS[policy.certificate.contract]}, so that the guarantee would not hold for what is exported: calibrate"
        " by a method that keeps exits open, such as eero, or give max_accuracy_loss instead of a policy"
    )


def _check_affordable(model: Any, wanted: Policy | Goal) -> None:
    """Raise if no exit is cheap enough for a goal in counted operations, before anything is quantised."""
    if isinstance(wanted, Policy) or wanted.unit not in COUNTED:
        return
    from alight.costing.measure import measure_costs

    costs = measure_costs(model, unit=wanted.unit, progress=False)
    affordable_exits(costs, costs.budget(wanted.budget or BUDGET))


def within_loss(costs: Costs, loss: float, table: HeadOutputs, exits: tuple[str, ...]) -> Policy:
    """Return the cheapest policy that seems to lose no more accuracy, and the guarantee that it is to get."""
    fitting, testing = table.split(0.5, np.random.default_rng(0))
    full, last = testing.correct()[:, -1].mean(), len(costs) - 1
    terms: dict[str, Any] = {"num_exits": len(costs), "unit": costs.unit, "exits": exits, "full_cost": costs.full}
    best: Policy = ExitAt(costs=(costs.full,), open_exits=(last,), method="full network", **terms)
    fit, failed = partial(calibrate.eero, spend_all=True), 0
    for amount in map(Amount, np.linspace(costs.full, float(costs.alone.min()), AMOUNTS + 1)[1:]):
        kept = kept_exits(fit, costs, amount, fitting)
        opened = tuple(sorted({*kept, last}))  # a loss is one against the last exit, which has to be recorded
        policy = fit(costs.at_exits(opened), amount, fitting.at_exits(opened))
        failed = failed + 1 if full - replay(policy, testing.at_exits(opened)).accuracy() > loss else 0
        if failed == FAILURES:
            break
        if not failed and len(opened) > 1:
            best = policy.renumbered(opened, num_exits=len(costs), exits=exits, full_cost=costs.full)
    wanted = Certificate("excess_error", "", "", {"alpha": loss, "delta": DELTA})
    return best if isinstance(best, ExitAt) else replace(best, certificate=wanted, budget=None, exits=exits)


def _samples_at(data: Any, spec: InputSpec, rows: np.ndarray) -> Iterator[State]:
    """Yield the inputs of these rows of the data, in order, batch by batch."""
    seen = 0
    for raw in in_batches(data, spec, BATCH):
        batch = as_batch(raw, spec)
        own = rows[(rows >= seen) & (rows < seen + len(batch))] - seen
        if len(own):
            yield tuple(as_array(each)[own] for each in batch.inputs)
        seen += len(batch)


def _joined(batches: Sequence[State]) -> list[State]:
    """Return batches in which those of one shape, as texts of one length, are together."""
    alike: dict[Any, list[State]] = {}
    for batch in batches:
        alike.setdefault(tuple(each.shape[1:] for each in batch), []).append(batch)
    return [tuple(map(np.concatenate, zip(*each, strict=True))) for each in alike.values()]


def _bytes_of(folder: Path) -> int:
    """Return the size of all stages of a folder."""
    return sum((folder / stage.file).stat().st_size for stage in Manifest.load(folder).stages)
