"""The steps from a network to a predictor: measure, train, record, calibrate, time."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from alight import calibrate
from alight.calibrate.risk_guarantees import Risk
from alight.costs import Costs
from alight.data.batches import as_tensor, first_batch, split_batches
from alight.data.labels import single_classes
from alight.data.preprocess import as_array
from alight.display import exit_names, layer_label, number, quantity, shape_text
from alight.engine.backends.members import LogitsBackend
from alight.engine.recorder import Recorder
from alight.engine.settings import RunSettings
from alight.errors import BadInput, BudgetTooSmall, Mismatch
from alight.fitting.calls import Steps, costs_literal, data_literal, example_literal, settings_literal
from alight.fitting.checks import (
    check_given,
    check_places,
    check_trained,
    compare_samples,
    known_preprocess,
    near_guessing,
    warn_of_probabilities,
    warn_of_table,
)
from alight.fitting.fitted import Fit, FittedPredictor
from alight.fitting.heads import SEED, WithHeads, default_training, with_heads
from alight.fitting.inputs import KeptSamples, check_single
from alight.outputs import HeadOutputs
from alight.policies.policy import ExitAt, Policy
from alight.policies.route import replay
from alight.provenance import measured_on

if TYPE_CHECKING:
    from alight.planning.timing import SpeedComparison
    from alight.training.settings import TrainingSettings

BUDGET = "50%"  # of the full network's FLOPs, where nothing is asked for
BATCH_SIZE = 64
HELD_OUT = 0.1  # of the training samples, where an epoch is chosen: not of those that calibrate or test
HALF = 0.5  # of the validation samples calibrate, the others are the test
TIMED, SINGLE = 4, 16  # batches that are timed, and single samples
WORTH = 1.01  # times as fast as the full network at least, in three of four runs, or it does not pay
LEAST_LABELS = 600  # for `auto`: with fewer the method that it chooses is mostly less accurate than `eero`
MOST_LOST = 0.02  # of accuracy: beyond that it is said what to do
LOOKED_AT = 32  # validation samples, before anything is trained
TRIES, MARGIN = 8, 0.97  # budgets that are tried for a speed-up, and how far below the needed one the next begins
CLOSE, APART = 1.03, 0.05  # times the speed-up that is asked for, and between two budgets: near enough to stop


@dataclass(frozen=True)
class Goal:
    """What is asked for: a budget, a largest loss of accuracy, or a speed-up.

    >>> Goal(budget="3 ms").unit, Goal(budget="2.5 GFLOPs").unit, Goal(speedup=2).unit
    ('ms', 'FLOPs', 'ms')
    """

    budget: float | str | None = None
    max_accuracy_loss: float | None = None
    speedup: float | None = None

    def __post_init__(self) -> None:
        asked = {name: value for name, value in asdict(self).items() if value is not None}
        if len(asked) > 1:
            raise BadInput(f"{' and '.join(asked)} are {len(asked)} goals: give one of them")
        loss, speedup = self.max_accuracy_loss, self.speedup
        for name, example in (("max_accuracy_loss", "0.01 is one point"), ("speedup", "2 is twice as fast")):
            if not isinstance(asked.get(name, 0.0), int | float):
                raise BadInput(f"{name} {asked[name]!r} is not a number: {example}")
        if loss is not None and not 0 <= loss < 1:
            raise BadInput(f"max_accuracy_loss {loss:g} must lie in [0, 1): 0.01 is one point")
        if speedup is not None and not 1 < speedup < math.inf:
            raise BadInput(f"speedup {speedup:g} must be above 1: 2 is twice as fast as the full network")
        if not asked:
            object.__setattr__(self, "budget", BUDGET)

    @property
    def unit(self) -> str:
        """The unit of the costs that decide: FLOPs, ms or J."""
        if self.budget is None:
            return "ms"
        unit = str(self.budget).strip().lower().lstrip("0123456789.+-e ")
        if unit.endswith("s") and not unit.endswith(("flops", "macs")):
            return "ms"
        return "J" if unit.endswith("j") else "FLOPs"


def fit(
    network: Any,
    train: Any = None,
    validation: Any = None,
    *,
    budget: float | str | None = None,
    max_accuracy_loss: float | None = None,
    speedup: float | None = None,
    preprocess: Any = None,
    training: "TrainingSettings | None" = None,
    batch_size: int = BATCH_SIZE,
    progress: bool = True,
) -> FittedPredictor:
    """Attach exits, train their heads, measure, record, calibrate with a guarantee, time; return the predictor.

    If early exit does not pay on this machine, a goal in time gives the full network, and one in FLOPs a warning. Your
    network is not changed. With logits and `Costs` no torch is needed.

    Args:
        network: A module, one with exits, a folder, a name ("timm:resnet18", "nets.py:Net"), or `Costs` of another.
        train: Arrays, a list, a data set, a loader, a DataFrame or a path; None: heads are trained already.
        validation: Half of it calibrates, the other half is the test; with `Costs`: logits of every exit, and labels.
        budget: Average cost: "50%" of the full network (the default), "2.5 GFLOPs", "3 ms".
        max_accuracy_loss: Instead of a budget: 0.01 is one point.
        speedup: Instead of a budget: over the full network, measured here.
        preprocess: The `Normalisation` of images in bytes or files, or a tokenizer of texts.
        training: None: the heads alone; everything where a network is named without weights. `keep_best` and `patience`
            judge epochs by a tenth of the training samples, held out: validation samples choose no epoch.
        batch_size: Of training, recording and timing.
        progress: Print every step, and the table at the end.

    >>> logits = np.random.default_rng(0).normal(size=(400, 2, 3)) * [[[2.0], [4.0]]]
    >>> predictor = fit(Costs.from_cumulative([1.0, 4.0]), validation=(logits, logits[:, 1].argmax(1)), progress=False)
    >>> predictor.policy.certificate.contract, predictor(logits).mean_cost <= 2.0
    ('probability', True)
    """
    goal = Goal(budget, max_accuracy_loss, speedup)
    predictor = fit_to(goal, network, train, validation, preprocess, training, batch_size, Steps(progress))
    if progress:
        print(f"\n{predictor.summary}\n\nThe same by hand:\n\n{predictor.calls}")
    return predictor


def fit_to(
    goal: Goal,
    network: Any,
    train: Any,
    validation: Any,
    preprocess: Any = None,
    training: "TrainingSettings | None" = None,
    batch_size: int = BATCH_SIZE,
    steps: Steps | None = None,
    after: str | int | Sequence[str] = "auto",
) -> FittedPredictor:
    """Do what `fit` does, and print nothing but progress."""
    check_given(network, train, validation, training, batch_size)
    steps = steps or Steps(progress=False)
    if isinstance(network, Costs):
        check_places(after, network)
        return _of_logits(goal, network, train, validation, batch_size, steps)
    first = train if train is not None else validation
    made = with_heads(network, first, known_preprocess(preprocess), steps, after)
    fitting = _Fitting(goal, made, batch_size, steps)
    fitting.check(validation)
    check_trained(made.model.exits, made.new_heads and train is None)
    fitting.measure()
    if train is not None:
        compare_samples(train, validation, made.model.input_spec)
        fitting.train(train, training)
    fitting.record(validation)
    fitting.calibrate()
    return fitting.predictor()


class _Fitting:
    """One call of `fit` under way, for a network that torch runs."""

    costs: Costs  # in the unit of the goal
    policy: Policy
    labelled: HeadOutputs
    test: HeadOutputs
    kept: "KeptSamples | None" = None

    def __init__(self, goal: Goal, made: WithHeads, batch_size: int, steps: Steps) -> None:
        self.goal, self.made, self.batch_size, self.steps = goal, made, batch_size, steps
        self.model, self.example = made.model, made.example
        self.speeds: Sequence[SpeedComparison] = ()
        self.verdict, self.caution, self.mode = "", "", "none"

    def measure(self) -> None:
        """Measure what exits cost, before anything is trained: a goal that is out of reach is refused here."""
        from alight.costing.measure import measure_costs

        if self.goal.max_accuracy_loss is not None:
            return  # the plan measures
        if self.goal.unit == "ms":
            self._measure_time()
        else:
            measured = () if self.goal.unit == "FLOPs" else (self.goal.unit, self.batch_size)
            self.costs = measure_costs(self.model, self.example, *measured, progress=self.steps.progress)
            terms = ", ".join(["model", "example", *map(repr, measured)])
            self.steps.call(f"costs = alight.measure_costs({terms})")
        pairs = zip(self.model.exits[:-1], self.costs.shares(), strict=False)
        shares = ", ".join(f"{share:.0%} after {layer_label(name)}" for name, share in pairs)
        full = quantity(self.costs.full, self.costs.unit)
        self.steps.say(f"the full network costs {full} per sample; of that, an answer costs {shares}")
        if self.goal.budget is not None:
            allowed, cheapest = self.costs.budget(self.goal.budget), float(self.costs.alone.min())
            if allowed < cheapest:
                raise BudgetTooSmall(allowed, cheapest, self.costs.unit, full=self.costs.full)

    def _measure_time(self) -> None:
        from alight.planning.plan import walking_costs

        self.costs = walking_costs(self.model, self.example, self.batch_size, RunSettings())
        self.steps.call(
            f"costs = walking_costs(model, example, {self.batch_size}, alight.RunSettings())",
            imports=["from alight.planning.plan import walking_costs"],
        )
        if self.goal.speedup is not None:
            first = int(self.costs.alone[:-1].argmin())
            reachable = self._compared(self._exit_at(first), self.example, TIMED).speedup
            if reachable < self.goal.speedup:
                raise BadInput(
                    f"a speed-up of {self.goal.speedup:g} is out of reach here: if every sample left after"
                    f" {layer_label(self.model.exits[first])}, batches of {self.batch_size} would run {reachable:.2f}"
                    " times as fast as the full network; ask for less, or attach an earlier exit"
                )

    def check(self, validation: Any) -> None:
        """Read the first validation samples, so that data which cannot be used is refused before the training."""
        if isinstance(validation, HeadOutputs):
            if self.goal.speedup is not None:
                raise BadInput("a speed-up is timed on samples, and these are recorded outputs: give validation data")
            if validation.num_exits != self.model.num_exits:
                exits = f"{validation.num_exits} exits for a network of {self.model.num_exits}"
                raise Mismatch(f"a table of {exits}: give the validation data instead, or record this network")
            if validation.sample_shape:
                self._measure_at(validation.sample_shape)
        elif not isinstance(validation, Iterator):  # which would lose them
            batch = first_batch(validation, self.model.input_spec, LOOKED_AT)
            if self.model.num_classes is not None:
                batch.check(self.model.num_classes)
            if batch.labels is not None:
                single_classes(as_array(batch.labels))
            self._look_at(batch.inputs)

    def _look_at(self, inputs: Sequence[Any]) -> None:
        """Say what the network gets, so that values of another range are seen, and warn if it gives probabilities."""
        import torch

        first = as_tensor(inputs[0])
        if first.is_floating_point():
            check_single(first)
            if not first.isfinite().all():
                raise BadInput(
                    "the first validation samples hold NaN or infinite numbers: replace them, or leave them out"
                )
            low, high = number(float(first.min())), number(float(first.max()))
            self.steps.say(f"the network gets samples of {shape_text(first.shape[1:])} numbers, from {low} to {high}")
            self._measure_at(first.shape[1:])
        training = self.model.training
        with torch.inference_mode():
            logits = self.model.eval()(tuple(as_tensor(each).to(self.made.device) for each in inputs))[-1]
        self.model.train(training)
        warn_of_probabilities(logits)

    def _measure_at(self, shape: Sequence[int]) -> None:
        """Let costs be those of the validation samples, where they have another size than the training samples."""
        import torch

        if isinstance(self.example, torch.Tensor) and self.example.shape[1:] != shape:
            own = shape_text(self.example.shape[1:])
            self.steps.say(f"costs are measured at the size of the validation samples, not at {own}")
            self.example = self.example.new_zeros(2, *shape)
            self.steps.call(f"example = {example_literal(self.example)}", imports=["import torch"])

    def train(self, data: Any, training: "TrainingSettings | None") -> None:
        """Train the heads, or what the settings say."""
        from alight.training.training import train_heads

        settings = training or default_training(self.made, data)
        self.mode = settings.mode
        what = "the heads, and nothing else," if settings.mode == "frozen" else f"the whole network ({settings.mode})"
        why = "" if training or settings.mode == "frozen" else ": nothing says that it is trained"
        self.steps.say(f"training {what} for {settings.epochs} epoch{'s' * (settings.epochs > 1)}{why}")
        given, held_out, named = data, None, data_literal("train", data)
        if settings.watches_validation:
            given, held_out = split_batches(data, self.model.input_spec, HELD_OUT, self.batch_size, SEED)
            self.steps.say(f"{HELD_OUT:.0%} of the training samples are held out, to judge epochs by")
            terms = f"{named}, model.input_spec, {HELD_OUT}, {self.batch_size}, {SEED}"
            imports = ["from alight.data.batches import split_batches"]
            self.steps.call(f"part, held_out = split_batches({terms})", imports=imports)
            named = "part"
        progress = self.steps.progress
        train_heads(self.model, given, settings, validation=held_out, batch_size=self.batch_size, progress=progress)
        terms = f"{named}, {settings_literal(settings)}, " + "validation=held_out, " * (held_out is not None)
        self.steps.call(f"alight.train_heads(model, {terms}batch_size={self.batch_size})")

    def record(self, validation: Any) -> None:
        """Record what every head says about the validation samples, one half to calibrate and one to test."""
        if isinstance(validation, HeadOutputs):
            table = validation
            self.steps.call(f"table = {self.steps.sources.get('validation', 'validation')}")
        else:
            self.steps.say("recording what every head says about the validation samples")
            self.kept = KeptSamples(validation, self.model.input_spec, self.batch_size)
            table = Recorder(self.model).table(self.kept, progress=self.steps.progress)
            named = data_literal("validation", validation)
            self.steps.call(f"table = alight.record(model, {named}, batch_size={self.batch_size})")
        warn_of_table(table, self.model.num_classes)
        self.guesses = near_guessing(table, self.model.num_classes)
        self.labelled, self.test = _halves(table, self.steps)
        order = np.random.default_rng(SEED).permutation(len(table))  # as `split` draws it
        self.test_rows = order[len(self.labelled) :]

    def calibrate(self) -> None:
        """Choose the policy for the goal, and time it against the full network."""
        if self.goal.max_accuracy_loss is not None:
            self._plan(self.goal.max_accuracy_loss)
        elif self.goal.speedup is not None:
            self._search(self.goal.speedup)
        else:
            self.policy = _calibrated(self.costs, self.goal.budget or BUDGET, self.labelled, self.steps)
        self.caution = caution(self.goal, self.costs, self.guesses, *cautions(self.policy, self.labelled, self.test))
        self._time()

    def _plan(self, loss: float) -> None:
        from alight.planning.plan import plan

        self.steps.say(f"looking for the fastest policy that loses at most {loss:.1%} of accuracy")
        goal: dict[str, Any] = {"batch_size": self.batch_size, "max_accuracy_loss": loss}
        planned = plan(self.model, self.labelled, example=self.example, **goal, progress=self.steps.progress)
        self.policy, self.costs, self.verdict = planned.policy, planned.costs, planned.reason
        terms = f"example=example, batch_size={self.batch_size}, max_accuracy_loss={loss:g}"
        self.steps.call(f"planned = alight.plan(model, labelled, {terms})", "policy = planned.policy")

    def _search(self, wanted: float) -> None:
        """Find the largest time budget at which the policy is measured to be this much faster than the full network."""
        least, most = (float(each / self.costs.full) for each in (self.costs.alone[0], self.costs.cumulative()[-1]))
        if least >= 1:
            slower = f"the first exit takes {least:.2f} times as long as the full network"
            self.verdict = f"Early exit is not worth it on this machine: {slower}, which answers every sample."
            self._run_full_network()
            return
        tried: dict[float, tuple[Policy, Steps]] = {}

        def speedup(share: float) -> float:
            budget = f"{math.ceil(1e4 * share) / 100:g}%"  # rounded up, so that the cheapest exit stays affordable
            if share not in tried:
                steps = Steps(False)
                tried[share] = _calibrated(self.costs, budget, self.labelled, steps), steps
            measured = self._compared(tried[share][0])
            self.steps.say(f"{budget} of the full network's time: {measured.speedup:.2f} times as fast")
            return measured.speedup if measured.low >= WORTH else measured.low  # one that does not pay is too slow

        most = largest_share(speedup, wanted, least, most)
        for share in sorted((each for each in tried if each <= most), reverse=True):
            if speedup(share) >= MARGIN * wanted:  # again: what else the machine did may have made it fast
                break
        self.policy, steps = tried[share]
        self.steps.call(*steps.calls, imports=[*steps.imports])

    def _time(self) -> None:
        """Time the policy on validation samples, and say whether it pays; a goal in time is given up if not."""
        if self.kept is None:
            timed = "Not timed: there are recorded outputs, and no samples to run."
            self.verdict = " ".join(filter(None, [self.verdict or timed, self.too_much]))
            return
        self.steps.say("timing it against the full network, interleaved")
        self.speeds = speed, single = self._compared(self.policy), self._compared(self.policy, batch_size=1, rounds=3)
        if len(self.policy.open_exits) == 1 and self.policy.open_exits[0] == self.model.num_exits - 1:
            self.verdict = self.verdict or "The full network answers every sample."
            self.speeds = [_as_fast(each) for each in self.speeds]
        elif speed.low >= WORTH:
            self._say_that_it_pays(speed, single)
        elif self.goal.unit == "ms":
            self._fall_back(speed)
        else:
            then = " ".join(filter(None, ["It keeps its budget all the same.", self.too_much]))
            self.verdict = _not_paying(speed, then)
            warnings.warn(self.verdict, stacklevel=5)

    @property
    def lost(self) -> float:
        """Accuracy lost against the full network on the test samples."""
        return accuracy_lost(self.policy, self.test)

    @property
    def too_much(self) -> str:
        """What to do about the accuracy that is lost, where it is much."""
        return lost_too_much(self.lost, self.mode, self.goal, allows_full(self.goal, self.costs))

    def _say_that_it_pays(self, speed: "SpeedComparison", single: "SpeedComparison") -> None:
        """Say how much faster it is, at what loss of accuracy; warn if much is lost, or less reached than asked for."""
        faster = f"{speed.speedup:.2f}x as fast in batches of {speed.batch_size}"
        alone = single.full_latency[0] / single.latency[0]
        if alone * WORTH < 1:
            faster += f", {alone:.2f}x sample by sample"
        if self.too_much:
            paying = f"Faster here ({faster}). {self.too_much}"
        else:
            points = 100 * self.lost
            measured = "Measured here" if self.verdict or self.caution else "Early exit pays here"
            paying = f"{measured}: {faster}, {f'{points:.1f} points' if points > 0.05 else 'nothing'} lost."
        self.verdict = " ".join(filter(None, [self.verdict, paying]))
        less = speed.speedup < MARGIN * (self.goal.speedup or 0)
        if less:
            self.verdict += f" That is less than the {self.goal.speedup:g}x asked for, and the most that was found."
        if less or self.too_much:
            warnings.warn(self.verdict, stacklevel=6)

    def _fall_back(self, speed: "SpeedComparison") -> None:
        """Let the full network answer, since exits are not faster."""
        over = ""
        if self.goal.budget is not None and self.costs.full > self.costs.budget(self.goal.budget):
            over = f", which takes {quantity(self.costs.full, self.costs.unit)} per sample and so exceeds the budget"
        self.verdict = _not_paying(speed, f"This predictor runs the full network{over}.")
        self._run_full_network()
        self.speeds = [_as_fast(each) for each in self.speeds]

    def _run_full_network(self) -> None:
        """Let the full network answer every sample, and warn of the reason."""
        warnings.warn(self.verdict, stacklevel=6)
        self.policy = replace(self._exit_at(self.model.num_exits - 1), sample_shape=self.labelled.sample_shape)
        self.steps.call("policy = full_network(model)", imports=["from alight.planning.timing import full_network"])

    def _compared(
        self, policy: Policy, inputs: Any = None, batches: int = TIMED, batch_size: int | None = None, rounds: int = 5
    ) -> "SpeedComparison":
        """Return the policy beside the full network on kept samples, or on other inputs."""
        from alight.planning.timing import compare

        size = batch_size or self.batch_size
        count = SINGLE if size == 1 else batches * size
        inputs = self.kept.inputs if inputs is None and self.kept is not None else self.model.admit(inputs)
        rows = np.arange(count) % len(inputs[0])
        taken = tuple(as_tensor(each)[rows] for each in inputs)
        return compare(self.model, policy, taken, size, rounds=rounds, progress=self.steps.progress)

    def _exit_at(self, index: int) -> Policy:
        terms: dict[str, Any] = {"open_exits": (index,), "num_exits": self.model.num_exits, "unit": self.costs.unit}
        name = "full network" if index == self.model.num_exits - 1 else layer_label(self.model.exits[index])
        return ExitAt(costs=tuple(self.costs.cumulative([index]).tolist()), method=name, **terms)

    def predictor(self) -> FittedPredictor:
        """Return the predictor, and all that is known about it."""
        self.steps.call(f"predictor = alight.Predictor(model, policy, batch_size={self.batch_size})")
        shown = None if self.kept is None else self.kept.shown(self.test_rows)
        fitted = Fit(
            self.policy,
            self.costs,
            self.labelled,
            self.test,
            self.model.exits,
            str(self.steps),
            self.speeds,
            self.verdict,
            shown,
            measured_on("torch"),
            self.caution,
            None if self.kept is None else self.kept.inputs,
        )
        return FittedPredictor(self.model, fitted, self.batch_size)


def _of_logits(goal: Goal, costs: Costs, train: Any, validation: Any, batch_size: int, steps: Steps) -> FittedPredictor:
    """Return a predictor that decides about logits which another system computes."""
    if train is not None or goal.speedup is not None:
        what = "training data" if train is not None else "a speed-up, which is measured,"
        raise BadInput(f"{what} and no network: with Costs alone, give validation logits and a budget")
    steps.call(f"costs = {costs_literal(costs)}")
    if isinstance(validation, HeadOutputs):
        table, classes = validation, None
        steps.call(f"table = {steps.sources.get('validation', 'validation')}")
    else:
        logits, labels = validation if isinstance(validation, tuple) else (validation, None)
        table, classes = HeadOutputs.from_logits(logits, labels), np.shape(logits)[-1]
        given = "*validation" if isinstance(validation, tuple) else "validation"
        steps.call(f"table = alight.HeadOutputs.from_logits({given})")
    warn_of_table(table, classes)
    labelled, test = _halves(table, steps)
    if goal.max_accuracy_loss is not None:
        policy = _within_loss(costs, goal.max_accuracy_loss, labelled, steps)
    else:
        policy = _calibrated(costs, goal.budget or BUDGET, labelled, steps)
    exits = exit_names((), len(costs))
    said: dict[str, Any] = {
        "verdict": lost_too_much(accuracy_lost(policy, test), "none", goal, allows_full(goal, costs)),
        "caution": caution(goal, costs, near_guessing(table, classes), *cautions(policy, labelled, test)),
        "note": measured_on("numpy"),
    }
    fitted = Fit(policy, costs, labelled, test, exits, str(steps), **said)
    return FittedPredictor(LogitsBackend(exits, policy.open_exits, classes, table.fingerprint), fitted, batch_size)


def _halves(table: HeadOutputs, steps: Steps) -> tuple[HeadOutputs, HeadOutputs]:
    steps.call(f"labelled, test = table.split({HALF}, np.random.default_rng({SEED}))")
    return table.split(HALF, np.random.default_rng(SEED))


def default_method(labelled: HeadOutputs) -> str:
    """Return the method to use where none is named: `auto`, or `eero` where there are too few labels to choose by."""
    return "eero" if labelled.labels is None or len(labelled) < LEAST_LABELS else "auto"


def _calibrated(costs: Costs, budget: float | str, labelled: HeadOutputs, steps: Steps) -> Policy:
    """Return the best method's policy for a budget, with a guarantee."""
    name = default_method(labelled)
    steps.say(f"calibrating for {budget} on {len(labelled):,} samples: some choose the policy, the others certify it")
    method = calibrate.certified_probability(calibrate.METHODS[name], seed=SEED)
    steps.call(
        f"method = calibrate.certified_probability(calibrate.{name}, seed={SEED})",
        f"policy = method(costs, {budget!r}, labelled)",
        imports=["from alight import calibrate"],
    )
    return method(costs, budget, labelled)


def _within_loss(costs: Costs, loss: float, labelled: HeadOutputs, steps: Steps) -> Policy:
    """Return the cheapest policy that is guaranteed to lose no more accuracy than this."""
    risk: Risk = "disagreement" if labelled.labels is None else "excess_error"
    steps.say(f"looking for the cheapest policy that loses at most {loss:.1%} of accuracy")
    steps.call(
        f"method = calibrate.certified_risk(calibrate.eero, risk={risk!r}, alpha={loss:g}, seed={SEED})",
        "policy = method(costs, None, labelled)",
        imports=["from alight import calibrate"],
    )
    return calibrate.certified_risk(calibrate.eero, risk=risk, alpha=loss, seed=SEED)(costs, None, labelled)


def largest_share(speedup: Callable[[float], float], wanted: float, least: float, most: float) -> float:
    """Return the largest budget, as a share of the full network's time, that is measured to be fast enough.

    It goes down until a budget is, then up again by halves; where none is, the last one tried.

    >>> round(largest_share(lambda share: 4 - 3 * share, 1.6, 0.1, 1.0), 1)
    0.8
    """
    fast, slow, share = 0.0, most, 1 / wanted
    for _ in range(TRIES):
        share = max(share, least)
        measured = speedup(share)
        if measured >= wanted:
            fast = share
        else:
            slow = share
        if wanted <= measured <= CLOSE * wanted or slow <= least or slow - fast < APART:
            break
        share = (fast + slow) / 2 if fast else share * MARGIN * measured / wanted
    return fast or slow


def allows_full(goal: Goal, costs: Costs) -> bool:
    """Return whether the budget is not below the cost of the full network."""
    return goal.budget is not None and costs.budget(goal.budget) >= costs.full


def caution(goal: Goal, costs: Costs, guesses: str, *further: str) -> str:
    """Return why the numbers of a fit say little: a network that guesses, a budget that saves nothing, and `further`.

    >>> caution(Goal("200%"), Costs.from_cumulative([1.0, 4.0]), "")
    'The budget 200% allows the full network (4) for every sample: ask for less.'
    """
    full = f"the full network ({quantity(costs.full, costs.unit)}) for every sample: ask for less."
    above = f"The budget {goal.budget} allows {full}" if allows_full(goal, costs) else ""
    first = f"T{guesses[1:]}. Until then the numbers below say little." if guesses else ""
    return " ".join(filter(None, [first, above, *further]))


def cautions(policy: Policy, labelled: HeadOutputs, test: HeadOutputs) -> tuple[str, str]:
    """Return how many validation samples would let more than one exit be certified, and that there are no labels.

    >>> cautions(ExitAt(costs=(1.0,), open_exits=(0,), num_exits=2), *[HeadOutputs([[0.5]], [[0]], [0])] * 2)
    ('', '')
    """
    numbers: Mapping[str, Any] = policy.certificate.numbers if policy.certificate else {}
    samples, needed, few = numbers.get("samples", 0), numbers.get("smallest sample", 0), ""
    if samples < needed:
        given = len(labelled) + len(test)
        more = f"give {math.ceil(given * needed / samples):,} or more, or raise the budget"
        few = f"{given:,} validation samples certify no policy but the first exit for all samples: {more}."
    unlabelled = "The validation data has no labels: accuracy here is agreement with the full network."
    return few, "" if test.labels is not None else unlabelled


def accuracy_lost(policy: Policy, test: HeadOutputs) -> float:
    """Return by how much a policy is less accurate than the last exit; without labels, how often it disagrees."""
    return float(test.correct()[:, -1].mean()) - replay(policy, test).accuracy(test.truth())


def lost_too_much(lost: float, mode: str = "none", goal: Goal | None = None, allows_full: bool = False) -> str:
    """Return what to do about a large loss of accuracy under a goal, in a sentence; nothing where it is small.

    >>> lost_too_much(0.004)
    ''
    """
    if lost <= MOST_LOST:
        return ""
    goal = goal or Goal()
    better = "train the whole network with its exits (mode='joint')" if mode == "frozen" else "train longer"
    train = "" if mode == "none" else f", {better}"
    points = f"{100 * lost:.1f} points of accuracy are lost"
    if goal.max_accuracy_loss is not None:
        asked = 100 * goal.max_accuracy_loss
        more = f"{points} on the test samples, of {asked:g} asked for: give more validation data{train}."
        return more if lost > goal.max_accuracy_loss else ""
    raised = "the full network is within it" if allows_full else "raise it"
    at, less = ("budget", raised) if goal.speedup is None else ("speed-up", "ask for a smaller one")
    return f"{points} at this {at}: {less}{train}, or ask for max_accuracy_loss=0.01 instead."


def _as_fast(speed: "SpeedComparison") -> "SpeedComparison":
    """Return the comparison of the full network with itself."""
    same: dict[str, Any] = {"per_second": speed.full_per_second, "latency": speed.full_latency}
    return replace(speed, **same, speedup=1.0, low=1.0, high=1.0)


def _not_paying(speed: "SpeedComparison", then: str) -> str:
    measured = f"{speed.speedup:.2f}x ({speed.low:.2f} to {speed.high:.2f}) in batches of {speed.batch_size}"
    return f"Early exit is not worth it on this machine: {measured}. {then}"
