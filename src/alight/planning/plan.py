"""Does early exit pay here? Times of this network on this machine, the exits and the policy for them, a trial run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from alight.calibrate.crossval import pruned
from alight.calibrate.published import eero
from alight.calibrate.risk_guarantees import largest_loss, loses_at_most, smallest_sample_for_loss
from alight.costing.cascades import example_inputs
from alight.costing.measure import REPEATS, WARMUP, time_cascade, time_stages
from alight.costs import Costs
from alight.display import accuracy_text, aligned, html_table, layer_label, percent, shown_steps
from alight.engine.backends.cascade import Cascade
from alight.engine.backends.torch.prepare import prepared, threads
from alight.engine.predictor import Predictor
from alight.engine.settings import TORCH, RunSettings
from alight.errors import BadInput, BudgetTooSmall
from alight.networks.multi_exit import MultiExitModel, check_has_exits, example_of
from alight.outputs import HeadOutputs
from alight.planning.engines import (
    EXITS,
    EXPORTED,
    RuntimeComparison,
    RuntimeTrial,
    compare_runtimes,
    installed_runtimes,
    runtime_costs,
)
from alight.planning.timing import (
    Network,
    full_network,
    inputs_for_duration,
    interleaved_timings,
    random_exits,
    stage_seconds,
)
from alight.planning.tune import Tuned, tune_speed
from alight.policies.policy import Policy, Threshold
from alight.policies.route import replay

Method = Callable[..., Policy]

LOSS = 0.01  # of accuracy, where neither a budget nor a loss is given
FITTED = 1 / 3  # of the labelled data: the policy is fitted to them, and tested on the others
CANDIDATES = 10  # budgets that are tried, from the full network down: each may be the first to fail, so few
BATCHES, ROUNDS = 8, 7  # of the trial: batches of a run at least, and runs
TESTING_SALT = 1  # so that ties are not drawn like those of the samples that set thresholds
CONFIDENCE = 0.95  # that no more accuracy is lost than was said
WORTH = 1.01  # times as fast as the full network at least, in three of four runs, or it does not pay
FULL, ACCURACY, AGREEMENT = "full network", "accuracy", "agreement"


@dataclass(frozen=True)
class Plan:
    """What to run on this machine at this batch size, and what to expect of it.

    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> made = Plan(full_network(model), False, 900.0, 900.0, 0.8, 0.8, Costs([1.0, 1.0], [0.1, 0.1], "ms"), 64, model)
    >>> made.speedup, made.open_exits
    (1.0, (1,))
    """

    policy: Policy  # to run
    pays: bool  # is it faster than the full network?
    throughput: float  # samples per second in the trial
    full_throughput: float  # of the full network
    accuracy: float  # on labelled samples that it was not fitted to
    full_accuracy: float  # on the same
    costs: Costs  # milliseconds per sample, as measured
    batch_size: int  # of the trial
    model: Network = field(repr=False)  # the network, or a cascade
    largest_loss: float = 0.0  # of accuracy, with 95 % confidence; in a cascade against each of its networks
    settings: RunSettings = field(default_factory=RunSettings)  # with which it runs
    reason: str = ""  # why it pays or not, in a sentence
    tuned: Tuned | None = field(default=None, repr=False)  # how the settings were chosen, where they were
    runtimes: RuntimeComparison | None = field(default=None, repr=False)  # PyTorch beside ONNX Runtime and OpenVINO
    measure: str = ACCURACY  # or agreement with the last exit, where labels are missing

    @property
    def open_exits(self) -> tuple[int, ...]:
        """Exits that are evaluated."""
        return self.policy.open_exits

    @property
    def speedup(self) -> float:
        """How many times as fast as the full network."""
        return self.throughput / self.full_throughput

    @property
    def fastest(self) -> tuple[str, Policy]:
        """The fastest runtime, and the policy for it: the plan's, unless another runtime was tried and is faster."""
        if self.runtimes is None or self.runtimes.fastest.runtime not in EXPORTED:
            return TORCH, self.policy
        return self.runtimes.fastest.runtime, self.runtimes.policy_of(self.runtimes.fastest)

    def predictor(self, *, probabilities: bool = False, allow_mismatch: bool = False) -> Predictor:
        """Return the planned predictor."""
        terms: dict[str, Any] = {"probabilities": probabilities, "allow_mismatch": allow_mismatch}
        return Predictor(self.model, self.policy, settings=self.settings, batch_size=self.batch_size, **terms)

    def _title(self) -> str:
        names = ", ".join(layer_label(self.model.exits[index]) for index in self.open_exits)
        by = "" if self.runtimes is None else f"{TORCH}, "  # the other runtimes have a table of their own
        return f"{by}batches of {self.batch_size}; open exits: {names}"

    def _columns(self) -> list[list[str]]:
        return [
            ["", FULL, "planned"],
            ["samples/s", f"{self.full_throughput:,.0f}", f"{self.throughput:,.0f}"],
            ["speed-up", "1.00x", f"{self.speedup:.2f}x"],
            [self.measure, accuracy_text(self.full_accuracy), accuracy_text(self.accuracy)],
        ]

    def _repr_html_(self) -> str:
        further = [each.reason for each in (self.tuned, self.runtimes) if each]
        return html_table(self._title(), self._columns(), [self.reason, *further])

    def __str__(self) -> str:
        own = "\n".join([self._title(), *aligned(self._columns()), self.reason])
        return "\n\n".join(str(each) for each in (self.tuned, own, self.runtimes) if each is not None)


def plan(
    model: Network,
    labelled: HeadOutputs,
    *,
    batch_size: int = 64,
    example: Any = None,
    budget: float | str | None = None,
    max_accuracy_loss: float | None = None,
    method: Method | None = None,
    speed: str | None = None,
    settings: RunSettings | None = None,
    progress: bool = True,
) -> Plan:
    """Return the policy that pays on this machine at this batch size, or the full network where none does.

    Stages and heads are timed. One third of the labelled samples fits policies, from the full network's budget down,
    and the others test each of them, up to the first that fails: the more are labelled, the cheaper the plan may be.
    Then it is tried against the full network, samples leaving at random as often as planned; if it is not faster, the
    full network is the plan. A `cascade` is tried against the cheapest of its networks that is as accurate alone, and
    where it is not faster that network is the plan.

    Args:
        model: With trained heads; or a cascade.
        labelled: What `record` gives on samples that trained nothing.
        batch_size: The one that will be served.
        example: A batch; None: like the one that heads were attached with.
        budget: "60%" of the full network's time, "0.2 ms".
        max_accuracy_loss: The largest loss with 95 % confidence; None without a budget: 0.01.
        method: Fits the policies; None: `calibrate.eero`.
        speed: "auto": tune the settings first (`tune_speed`); "runtimes": and then ONNX Runtime and OpenVINO are tried,
            each under a policy for its own times; `runtimes.export` writes the fastest of them to a folder.
        settings: How the network runs.
        progress: Show a bar.

    >>> import torch
    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> labelled = HeadOutputs.from_logits(np.zeros((60, 2, 3)), np.arange(60) % 3)
    >>> settings = RunSettings(threads=1)
    >>> planned = plan(model, labelled, example=torch.zeros(1, 4), batch_size=256, settings=settings, progress=False)
    >>> planned.pays == (planned.policy.method != "full network")
    True
    """
    _check(model, labelled, budget, max_accuracy_loss, speed)
    example = _example(model) if example is None else example
    fit: Method = method or partial(pruned(eero), spend_all=True)
    settings, tuned = settings or RunSettings(), None
    loss = LOSS if max_accuracy_loss is None else max_accuracy_loss
    with shown_steps("plan", 3 + bool(speed) + (speed == "runtimes"), progress=progress) as begin:
        if speed and isinstance(model, MultiExitModel):
            begin("trying settings")
            tuned = tune_speed(model, batch_size=batch_size, example=example, settings=settings)
            settings = tuned.settings
        begin("timing stages and heads")
        costs = walking_costs(model, example, batch_size, settings)
        begin("fitting policies")
        fitting, testing = labelled.split(FITTED, np.random.default_rng(0))
        others = installed_runtimes() if speed == "runtimes" else []
        delta = (1 - CONFIDENCE) / (1 + len(others))  # of which any may be chosen, by its time
        question = _Question(fit, fitting, testing, budget, loss, delta, _baselines(model))
        policy = question.policy_for(costs)
        begin("running it beside the full network")
        baseline = _as_accurate(policy, costs, testing) if isinstance(model, Cascade) else -1
        own: dict[str, Any] = {"costs": (float(costs.alone[baseline]),), "unit": costs.unit, "full_cost": costs.full}
        alone = replace(full_network(model, baseline), method=FULL, sample_shape=labelled.sample_shape, **own)
        right = float(testing.correct()[:, baseline].mean())
        measure = ACCURACY if labelled.labels is not None else AGREEMENT
        terms: dict[str, Any] = {"settings": settings, "tuned": tuned, "measure": measure}
        full = Plan(alone, False, 0.0, 0.0, right, right, costs, batch_size, model, **terms)
        if policy is None:
            planned = _untried(full, example, _nothing_cheaper(loss, delta, len(labelled), _instead(full)))
        elif isinstance(model, Cascade) and policy.open_exits == alone.open_exits:
            alike = f"No cascade is better than one of its networks here: use {model.exits[baseline]} alone."
            planned = _untried(full, example, alike)
        else:
            planned = _tried(full, policy, testing, example, loss if budget is None else None)
        if speed == "runtimes":
            begin("running it by other runtimes")
            planned = _by_runtimes(planned, others, question, example)
        return planned


@dataclass(frozen=True)
class _Question:
    """What a plan answers: how policies are fitted and tested, and for which budget or largest loss."""

    fit: Method
    fitting: HeadOutputs
    testing: HeadOutputs
    budget: float | str | None
    loss: float  # where no budget is given
    delta: float  # probability that the policy for some costs loses more
    baselines: Sequence[int]  # exits against each of which it must not lose more

    def policy_for(self, costs: Costs) -> Policy | None:
        """Return the policy for these costs; None where no cheaper one can be shown to lose so little."""
        if self.budget is not None:
            return self.fit(costs, self.budget, self.fitting)
        return cheapest(self.fit, costs, self.fitting, self.testing, self.loss, self.delta, self.baselines)


def _example(model: Network) -> Any:
    return example_inputs(model) if isinstance(model, Cascade) else example_of(model)


def _by_runtimes(planned: Plan, runtimes: Sequence[str], question: _Question, example: Any) -> Plan:
    """Return the plan, and what ONNX Runtime and OpenVINO make of it, each under a policy for its own times.

    As many samples leave as in the table.
    """
    model, size, settings = planned.model, planned.batch_size, planned.settings
    assert isinstance(model, MultiExitModel)  # _check refuses cascades
    policies = {TORCH: planned.policy}
    times, failed = runtime_costs(model, runtimes, example, size, settings)
    for name, costs in times.items():
        try:
            policy = question.policy_for(costs)
        except BudgetTooSmall as error:
            failed.append(RuntimeTrial(name, EXITS, 0.0, str(error)))
            continue
        alone = replace(full_network(model), method=FULL, costs=(costs.full,), unit=costs.unit, full_cost=costs.full)
        policies[name] = alone if policy is None else replace(policy, exits=model.exits)
    shares = {name: replay(each, question.testing).exit_shares for name, each in policies.items()}
    tried = {name: random_exits(each, shares[name][[*each.open_exits]].tolist()) for name, each in policies.items()}
    inputs, _ = inputs_for_duration(planned.predictor(), example, size, BATCHES)
    found = compare_runtimes(model, tried, inputs, size, settings=settings, compiled=settings.compile)
    policies = {way: policies.get(way, planned.policy) for way in found.policies}  # compiled or not
    found = replace(found, trials=(*found.trials, *failed), policies=policies)
    return replace(planned, runtimes=replace(found, note=_loss_of(found, question, planned.measure)))


def _loss_of(found: RuntimeComparison, question: _Question, measure: str) -> str:
    """Return what the fastest exported runtime loses: its policy is another one than that of the plan."""
    if found.fastest.runtime not in EXPORTED or found.fastest.what != EXITS:
        return ""
    decisions = replay(replace(found.policy_of(found.fastest), salt=TESTING_SALT), question.testing)
    correct, before = decisions.correct(question.testing.truth()), question.testing.correct()[:, -1]
    lost = question.loss
    if question.budget is not None:  # any of these may be the fastest
        lost = largest_loss(before, correct, (1 - CONFIDENCE) / len(found.policies))
    right = f"{found.fastest.runtime}, {EXITS}: {accuracy_text(float(correct.mean()))} {measure}"
    return f"{right}; it loses at most {percent(lost)}, with {percent(CONFIDENCE)} confidence."


def _untried(full: Plan, example: Any, reason: str) -> Plan:
    """Return the full network as the plan, with the reason."""
    return _at(full, _throughputs(full, example, full.policy)[0], reason)


def _tried(full: Plan, policy: Policy, testing: HeadOutputs, example: Any, loss: float | None) -> Plan:
    """Return the policy as a plan if it is faster than the full network in a trial, else the full network.

    `loss` is the accuracy that it was shown to lose at most; None where that is to be found.
    """
    instead = _instead(full)
    if policy.open_exits == full.open_exits:  # the same network: they differ by noise alone
        return _untried(full, example, f"No earlier exit is accurate enough here. Use {instead}.")
    policy = replace(policy, exits=full.model.exits)
    decisions = replay(replace(policy, salt=TESTING_SALT), testing)
    correct, before = decisions.correct(testing.truth()), testing.correct().T[[*_baselines(full.model)]]
    lost = max(largest_loss(each, correct, 1 - CONFIDENCE) for each in before) if loss is None else loss
    shares = decisions.exit_shares[list(policy.open_exits)].tolist()
    ours, theirs, ratios = _throughputs(full, example, random_exits(policy, shares))
    if np.quantile(ratios, 0.25) < WORTH:
        median = f"{np.median(ratios):.2f}x median, slower in {(ratios < 1).mean():.0%} of runs"
        return _at(full, theirs, f"Early exit is not worth it here: {median}. Use {instead}.")
    against = " against each of its networks" if len(before) > 1 else ""
    measure = full.measure if full.measure == ACCURACY else f"{full.measure} with the last exit"
    sure = f"with {percent(CONFIDENCE)} confidence"
    reason = f"Early exit pays; it loses at most {percent(lost)} of {measure}{against}, {sure}."
    paying = replace(_at(full, theirs, reason), policy=policy, pays=True, throughput=ours)
    return replace(paying, accuracy=float(correct.mean()), largest_loss=lost)


def _instead(full: Plan) -> str:
    """Return what is used where early exit does not pay."""
    return f"{full.model.exits[full.open_exits[0]]} alone" if isinstance(full.model, Cascade) else "the full network"


def _baselines(model: Network) -> Sequence[int]:
    """Return the exits that accuracy is compared with: the last, or every network of a cascade."""
    return range(model.num_exits) if isinstance(model, Cascade) else (-1,)


def _as_accurate(policy: Policy | None, costs: Costs, testing: HeadOutputs) -> int:
    """Return the cheapest network of a cascade that is alone as accurate as the policy; the best where none is."""
    accuracies = testing.correct().mean(axis=0)
    wanted = 1.0 if policy is None else replay(policy, testing).accuracy(testing.truth())
    accurate = accuracies >= min(wanted, float(accuracies.max()))
    return int(np.where(accurate, costs.alone, np.inf).argmin())


def _nothing_cheaper(loss: float, delta: float, samples: int, instead: str) -> str:
    """Return why the full network is the plan, and how many samples would allow another one."""
    needed = smallest_sample_for_loss(loss, delta)
    needed = None if needed is None else math.ceil(needed / (1 - FITTED))
    more = f" ({needed:,} are needed at least)" if needed is not None and samples < needed else ""
    sure = f"{percent(CONFIDENCE)} confidence from {samples:,} labelled samples{more}"
    return f"No policy that is cheaper by these times loses at most {percent(loss)} with {sure}: use {instead}."


def _check(
    model: Network, labelled: HeadOutputs, budget: object, max_accuracy_loss: float | None, speed: str | None
) -> None:
    if isinstance(model, HeadOutputs):
        raise BadInput("the arguments are in another order: write plan(model, labelled)")
    if not isinstance(model, Cascade):
        check_has_exits(model)
    if not isinstance(labelled, HeadOutputs):
        raise BadInput(f"a {type(labelled).__name__} is not recorded outputs: give what `record` returns, with labels")
    if budget is not None and max_accuracy_loss is not None:
        raise BadInput("a budget and a largest loss are two questions: give one of them")
    if max_accuracy_loss is not None and not 0 <= max_accuracy_loss < 1:
        raise BadInput(f"max_accuracy_loss {max_accuracy_loss:g} must lie in [0, 1): 0.01 is one point")
    if labelled.num_exits != model.num_exits:
        raise BadInput(f"a table of {labelled.num_exits} exits for a network of {model.num_exits}: record this network")
    if speed not in (None, "auto", "runtimes"):
        raise BadInput(f"speed {speed!r}: give 'auto', 'runtimes', or settings such as RunSettings(channels_last=True)")
    if speed and isinstance(model, Cascade):
        raise BadInput("every network of a cascade has settings of its own: tune each, and give Member(..., settings=)")


def _at(full: Plan, throughput: float, reason: str) -> Plan:
    """Return the plan of the full network with its measured throughput."""
    return replace(full, throughput=throughput, full_throughput=throughput, reason=reason)


def walking_costs(model: Network, example: Any, batch_size: int, settings: RunSettings) -> Costs:
    """Return milliseconds per sample of stages and heads, and in the heads what the walk itself takes at an exit.

    Beside the whole networks of a cascade a walk takes next to nothing.
    """
    if isinstance(model, Cascade):
        terms: dict[str, Any] = {"repeats": REPEATS, "warmup": WARMUP, "settings": settings, "progress": False}
        return time_cascade(model, example, batch_size, terms).costs()
    with threads(settings.threads):
        times = time_stages(prepared(model, settings), example, batch_size, progress=False).costs()
    if model.num_exits == 1:
        return times
    nobody = Threshold((np.inf,) * (model.num_exits - 1), costs=tuple(times.cumulative().tolist()))
    walk = Predictor(model, nobody, settings=settings, batch_size=batch_size)
    inputs, taken = inputs_for_duration(walk, example, batch_size, BATCHES)
    if settings.compile or settings.graphs or "the device decides" in walk.decided_by:
        whole = 1e3 * stage_seconds(walk, tuple(each[:batch_size] for each in inputs)) / batch_size
        heads = times.heads / (times.stages + times.heads)  # both run as one: shared as when they run apart
        times = Costs(whole * (1 - heads), whole * heads, "ms", sample_shape=times.sample_shape)
    walked = min(taken, float(np.median(interleaved_timings([walk], inputs, ROUNDS)))) / len(inputs[0])
    beside = max(0.0, 1e3 * walked - float(times.cumulative()[-1])) / (model.num_exits - 1)
    heads = times.heads + beside * (np.arange(len(times)) < len(times) - 1)
    return Costs(times.stages, heads, "ms", sample_shape=times.sample_shape)


def cheapest(
    fit: Method,
    costs: Costs,
    fitting: HeadOutputs,
    testing: HeadOutputs,
    loss: float,
    delta: float = 1 - CONFIDENCE,
    baselines: Sequence[int] = (-1,),
) -> Policy | None:
    """Return the cheapest policy that loses no more accuracy, None where none can be shown to.

    Budgets are tried in a fixed order, from the full network down: policies are fitted to one table and each is tested
    once on the other. The first that fails ends it, so that any is wrong with probability `delta` at most. Of several
    baselines, exits that the accuracy is compared with, it loses as little against each, so against the best.
    """
    before, truth, passed = testing.correct().T[[*baselines]], testing.truth(), None
    for amount in np.linspace(costs.full, costs.cumulative()[0], CANDIDATES + 1)[1:]:
        policy = fit(costs, float(amount), fitting)
        decisions = replay(replace(policy, salt=TESTING_SALT), testing)
        if not all(loses_at_most(loss, each, decisions.correct(truth), delta) for each in before):
            break
        passed = policy
    return passed


def _throughputs(full: Plan, example: Any, policy: Policy) -> tuple[float, float, np.ndarray]:
    """Return samples per second of a policy and of the full network, interleaved, and the ratio in each round."""
    terms: dict[str, Any] = {"settings": full.settings, "batch_size": full.batch_size}
    pair = [Predictor(full.model, each, **terms) for each in (policy, full.policy)]
    inputs, _ = inputs_for_duration(pair[1], example, full.batch_size, BATCHES)  # the slower one, as a rule
    rounds = interleaved_timings(pair, inputs, ROUNDS)
    rates = (len(inputs[0]) / np.median(rounds, axis=0)).tolist()
    return rates[0], rates[1], rounds[:, 1] / rounds[:, 0]
