"""Which switches make a network fast here: interleaved trials on this machine; those that clearly pay are taken."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from alight.data.batches import as_inputs, as_tensor
from alight.display import aligned
from alight.engine.backends.onnx import available_cores
from alight.engine.backends.torch.prepare import device_of
from alight.engine.predictor import Predictor
from alight.engine.settings import RunSettings
from alight.errors import AlightError, BadInput
from alight.networks.multi_exit import MultiExitModel, example_of
from alight.planning.engines import RuntimeComparison, compare_runtimes
from alight.planning.timing import full_network, inputs_for_duration, interleaved_timings, random_exits, seconds
from alight.policies.policy import Policy

Switches = Mapping[str, Any]  # fields of RunSettings that differ from the given ones, and `rebatch`

ROUNDS = 5
WORTH = 1.03  # times as fast at least, in three of four rounds, or the given setting stays
HOPELESS = 1.3  # times as long in the first run: not run again
TAKEN = "taken"
BATCHES = 8  # of a run under a policy, so that survivors find others


@dataclass(frozen=True)
class Trial:
    """One setting beside the best before it."""

    switches: Switches
    per_second: float  # samples; 0 where it could not run
    speedup: float  # over the best before it, median of the rounds
    low: float  # a quarter of the rounds are below
    high: float
    remark: str = ""  # "taken", or why it was not run to the end

    def cells(self) -> list[str]:
        """Return setting, samples per second, speed-up and remark as text."""
        if not self.per_second:
            return [_text(self.switches), "", "", self.remark]
        spread = f"{self.speedup:.2f} ({self.low:.2f} to {self.high:.2f})"
        return [_text(self.switches), f"{self.per_second:,.0f}", spread, self.remark]


@dataclass(frozen=True)
class Tuned:
    """The settings that pay on this machine, and all that were tried.

    >>> settings = RunSettings(channels_last=True)
    >>> print(Tuned(settings, True, speedup=1.4, batch_size=64, reason="channels_last pays.", trials=()))
    batches of 64
    setting  samples/s  over the best before
    channels_last pays.
    """

    settings: RunSettings  # that pay
    rebatch: bool  # whether re-batching pays
    speedup: float  # over the given settings, measured in the end; 1 where they stay
    batch_size: int  # of the trials
    reason: str  # in a sentence
    trials: tuple[Trial, ...] = field(repr=False)  # all that were tried
    runtimes: RuntimeComparison | None = field(default=None, repr=False)  # where they were to be tried

    def __str__(self) -> str:
        header = ["setting", "samples/s", "over the best before", ""]
        columns = zip(header, *(each.cells() for each in self.trials), strict=True)
        lines = [f"batches of {self.batch_size}", *aligned([list(column) for column in columns]), self.reason]
        if any("dtype" in each.switches and each.remark == TAKEN for each in self.trials):
            lines.append("Another dtype gives other answers: record and calibrate in it.")
        if self.runtimes is not None:
            lines += ["", str(self.runtimes)]
        return "\n".join(lines)


def tune_speed(
    model: MultiExitModel,
    policy: Policy | None = None,
    *,
    batch_size: int,
    example: Any = None,
    settings: RunSettings | None = None,
    dtypes: Sequence[str | torch.dtype] = (),
    switches: Sequence[str] = ("dtype", "channels_last", "threads", "compile", "graphs", "rebatch"),
    allow_mismatch: bool = False,
) -> Tuned:
    """Return the settings with which a predictor is fastest here at this batch size.

    Every switch is interleaved with the best so far, and taken if it is 1.03 times as fast in three of four rounds; in
    the end all together must be. Samples leave at random as often as the policy plans.

    Args:
        model: The network.
        policy: None: the whole network runs.
        batch_size: The one that will be served.
        example: A batch of real inputs; None: made as the network describes them.
        settings: What they fix is kept; `compile=True` lets it be tried.
        dtypes: To try: they change answers.
        switches: To try, in this order; with "runtimes" ONNX Runtime and OpenVINO are compared with the result, and
            `runtimes.export` writes the fastest of them to a folder.
        allow_mismatch: Take the policy of another network.

    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> tuned = tune_speed(model, batch_size=64, example=torch.zeros(1, 4), settings=RunSettings(threads=1))
    >>> tuned.settings.threads, tuned.speedup >= 1
    (1, True)
    """
    if dtypes and policy is not None and policy.fingerprint:
        raise BadInput(
            "the policy knows the dtype of its recording: tune without a policy, record in the dtype that is chosen,"
            " and calibrate on that"
        )
    given = settings or RunSettings()
    inputs = example_of(model) if example is None else example
    tuning = _Tuning(model, policy, inputs, batch_size, replace(given, compile=False), allow_mismatch)
    for name, values in _options(model, policy, inputs, given, dtypes).items():
        if name in switches:
            tuning.attempt([{name: value} for value in values])
    tuned = tuning.finished()
    if "runtimes" not in switches:
        return tuned
    terms: dict[str, Any] = {"settings": tuned.settings, "compiled": given.compile, "allow_mismatch": allow_mismatch}
    found = compare_runtimes(model, tuning.policy, tuning.inputs, batch_size, **terms)
    own = dict.fromkeys(found.policies, policy or tuning.policy)  # random exits stood for it
    return replace(tuned, runtimes=replace(found, policies=own))


def _options(
    model: MultiExitModel, policy: Policy | None, inputs: Any, given: RunSettings, dtypes: Sequence[str | torch.dtype]
) -> dict[str, list[Any]]:
    """Return what every switch can be beside what it is; what is given is not tried."""
    default = RunSettings()
    fixed = {each.name for each in fields(given) if getattr(given, each.name) != getattr(default, each.name)}
    device = device_of(model, given.device)
    own = next((str(each.dtype) for each in model.parameters() if each.is_floating_point()), "")
    named = [RunSettings(dtype=each).dtype for each in dtypes]
    survivors_may_wait = policy is not None and len(policy.open_exits) > 1 and not policy.is_batch_dependent
    options: dict[str, list[Any]] = {  # in the order of trying
        "dtype": [name for name in named if f"torch.{name}" != own],
        "channels_last": [True] * _has_images(model, inputs),
        "threads": _thread_counts() if device.type == "cpu" else [],
        "compile": [True] * given.compile,
        "graphs": [True] * (device.type == "cuda" and not given.compile),
        "rebatch": [False] * survivors_may_wait,
    }
    return {name: values for name, values in options.items() if name == "compile" or name not in fixed}


def _has_images(model: MultiExitModel, inputs: Any) -> bool:
    tensors = map(as_tensor, as_inputs(inputs, model.input_spec))
    images = any(each.dim() == 4 and each.is_floating_point() for each in tensors)
    return images and any(each.dim() == 4 for each in model.parameters())


def _thread_counts() -> list[int]:
    """Return 1, 2, 4, ... and the number of cores, but for what torch takes now."""
    cores = available_cores()
    powers = {2**power for power in range(cores.bit_length()) if 2**power < cores}
    return sorted((powers | {cores}) - {torch.get_num_threads()})


class _Tuning:
    """The best setting so far, and all that was tried."""

    def __init__(
        self,
        model: MultiExitModel,
        policy: Policy | None,
        example: Any,
        batch_size: int,
        settings: RunSettings,
        allow_mismatch: bool,
    ) -> None:
        self.model, self.batch_size, self.allow_mismatch = model, batch_size, allow_mismatch
        self.policy, self.settings = _policy_of_trials(policy, model), settings
        self.chosen: dict[str, Any] = {}
        self.given = self.best = self._predictor({})
        batches = BATCHES if len(self.policy.open_exits) > 1 else 1
        self.inputs, taken = inputs_for_duration(self.given, example, batch_size, batches)
        self.trials = [Trial({}, len(self.inputs[0]) / taken, 1.0, 1.0, 1.0)]

    def attempt(self, options: Iterable[Switches]) -> None:
        """Try some switches beside the best so far, and take the fastest if it is clearly faster."""
        limit = HOPELESS * seconds(self.best, self.inputs)
        ready: list[tuple[dict[str, Any], Predictor]] = []
        for option in options:
            wanted = {**self.chosen, **option}
            try:
                predictor = self._predictor(wanted)
                taken = min(seconds(predictor, self.inputs) for _ in range(2))  # the first compiles, or chooses kernels
            except (AlightError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
                self.trials.append(Trial(wanted, 0.0, 0.0, 0.0, 0.0, f"does not run: {reason}"))
                continue
            if taken > limit:
                ratios = (limit / HOPELESS / taken,) * 3
                self.trials.append(Trial(wanted, self._rate(taken), *ratios, "slow, run once"))
            else:
                ready.append((wanted, predictor))
        if ready:
            self._compare(ready)

    def finished(self) -> Tuned:
        """Return what was chosen, if all together is faster than the given settings, else those."""
        given = (self.settings, True, 1.0, self.batch_size)
        if not self.chosen:
            return Tuned(*given, "No switch clearly pays here.", tuple(self.trials))
        runs = interleaved_timings([self.given, self.best], self.inputs, ROUNDS)
        ratios, text = runs[:, 0] / runs[:, 1], _text(self.chosen)
        if np.quantile(ratios, 0.25) < WORTH:
            return Tuned(*given, f"Tried once more, {text} does not clearly pay: left out.", tuple(self.trials))
        gain = float(np.median(ratios))
        reason = f"{text} pays: {gain:.2f} times as fast as without."
        return Tuned(*self._settings(self.chosen), gain, self.batch_size, reason, tuple(self.trials))

    def _compare(self, ready: Sequence[tuple[dict[str, Any], Predictor]]) -> None:
        runs = interleaved_timings([self.best, *(predictor for _, predictor in ready)], self.inputs, ROUNDS)
        low, middle, high = np.quantile(runs[:, :1] / runs[:, 1:], [0.25, 0.5, 0.75], axis=0)
        clear = np.where(low >= WORTH, middle, 0.0)
        winner = int(clear.argmax()) if clear.any() else None
        for place, (wanted, _) in enumerate(ready):
            rate, remark = self._rate(float(np.median(runs[:, place + 1]))), TAKEN if place == winner else ""
            self.trials.append(Trial(wanted, rate, middle[place], low[place], high[place], remark))
        if winner is not None:
            self.chosen, self.best = ready[winner]

    def _settings(self, chosen: Switches) -> tuple[RunSettings, bool]:
        changed = {name: value for name, value in chosen.items() if name != "rebatch"}
        return replace(self.settings, **changed), chosen.get("rebatch", True)

    def _predictor(self, chosen: Switches) -> Predictor:
        settings, rebatch = self._settings(chosen)
        terms: dict[str, Any] = {"batch_size": self.batch_size, "allow_mismatch": self.allow_mismatch}
        return Predictor(self.model, self.policy, settings=settings, rebatch=rebatch, **terms)

    def _rate(self, taken: float) -> float:
        return len(self.inputs[0]) / taken


def _policy_of_trials(policy: Policy | None, model: MultiExitModel) -> Policy:
    """Return what runs in a trial: the full network, or the policy, at random where it plans how many leave."""
    if policy is None:
        return full_network(model)
    if policy.is_batch_dependent or not policy.exit_rates:
        return policy
    return random_exits(policy, policy.exit_rates)


def _text(switches: Switches) -> str:
    return ", ".join(f"{name}={value}" for name, value in switches.items()) or "as given"
