"""Which switches make a network quick here: tried by turns on this machine, and taken where they clearly pay."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from alight.engine.predictor import Predictor
from alight.engine.prepare import as_dtype, device_of
from alight.errors import AlightError, BadInput
from alight.networks.multi_exit import Carried, MultiExitModel, example_of
from alight.planning.timing import inputs_for_duration, interleaved_timings, random_exits, seconds
from alight.policies.policy import ExitAt, Policy, aligned

Settings = Mapping[str, Any]

ROUNDS = 5
WORTH = 1.03  # times as fast at least, in three of four rounds, or the plainer setting stays
HOPELESS = 1.3  # times as long in the first run: not run again
TAKEN = "taken"
BATCHES = 8  # of a run under a policy, so that those who stay find others


@dataclass(frozen=True)
class Trial:
    """One setting beside the best before it."""

    settings: Settings
    per_second: float  # samples; 0 where it could not run
    speedup: float  # over the best before it, median of the rounds
    low: float  # a quarter of the rounds are below
    high: float
    remark: str = ""  # "taken", or why it was not run to the end

    def cells(self) -> list[str]:
        """Setting, samples per second, speed-up and remark as text."""
        if not self.per_second:
            return [_told(self.settings), "", "", self.remark]
        spread = f"{self.speedup:.2f} ({self.low:.2f} to {self.high:.2f})"
        return [_told(self.settings), f"{self.per_second:,.0f}", spread, self.remark]


@dataclass(frozen=True)
class Tuned:
    """The switches that pay on this machine, and all that were tried.

    >>> print(Tuned({"channels_last": True}, speedup=1.4, batch_size=64, reason="channels_last pays.", trials=()))
    batches of 64
    setting  samples/s  over the best before
    channels_last pays.
    """

    settings: Settings  # for Predictor, record and plan
    speedup: float  # over the plain setting, measured in the end; 1 where that stays
    batch_size: int
    reason: str
    trials: tuple[Trial, ...] = field(repr=False)

    def __str__(self) -> str:
        header = ["setting", "samples/s", "over the best before", ""]
        columns = zip(header, *(each.cells() for each in self.trials), strict=True)
        lines = [f"batches of {self.batch_size}", *aligned([list(column) for column in columns]), self.reason]
        if any("dtype" in each.settings and each.remark == TAKEN for each in self.trials):
            lines.append("Another dtype gives other answers: record and calibrate in it.")
        return "\n".join(lines)


def tune_speed(
    model: MultiExitModel,
    policy: Policy | None = None,
    *,
    batch_size: int,
    example: Any = None,
    device: str | torch.device | None = None,
    dtypes: Sequence[str | torch.dtype] = (),
    compile: bool = False,  # noqa: A002  # torch's own word for it
    **settings: Any,
) -> Tuned:
    """The switches with which a predictor is quickest here at this batch size: `Predictor(model, policy, **settings)`.

    Tried are `channels_last` for images, `num_threads` on the host, `graphs` on a GPU, and under a policy `rebatch`;
    `compile` only if asked for, since compiling takes long, and only those `dtypes` that are named, since they change
    answers. Without a policy the whole network runs. Switches are tried one after the other, by turns with the best so
    far; a switch is taken if it is 1.03 times as fast in three of four rounds, and in the end all together must be.
    `settings` are kept as given. The example is one batch of real inputs, or made as the network describes them;
    samples leave by lot as often as the policy plans, or as it decides where it plans nothing.

    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> tuned = tune_speed(model, batch_size=64, example=torch.zeros(1, 4), num_threads=1)
    >>> tuned.settings["num_threads"], tuned.speedup >= 1
    (1, True)
    """
    if dtypes and policy is not None and policy.fingerprint:
        raise BadInput(
            "the policy knows the dtype of its recording: tune without a policy, record in the dtype that is chosen,"
            " and calibrate on that"
        )
    settings = settings if device is None else {"device": device, **settings}
    place = device_of(model, device)
    inputs = example_of(model) if example is None else example
    tuning = _Tuning(model, policy, inputs, batch_size, settings)
    carried = model.admit(inputs)
    for name, values in _switches(model, policy, carried, place, dtypes, compile).items():
        if name not in settings:
            tuning.attempt([{name: value} for value in values])
    return tuning.finished()


def _switches(
    model: MultiExitModel,
    policy: Policy | None,
    carried: Carried,
    device: torch.device,
    dtypes: Sequence[str | torch.dtype],
    compiling: bool,
) -> dict[str, list[Any]]:
    """What every switch can be beside what it is."""
    own = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
    images = any(each.dim() == 4 and each.is_floating_point() for each in carried)
    filters = any(each.dim() == 4 for each in model.parameters())
    several = policy is not None and len(policy.open_exits) > 1 and not policy.is_batch_dependent
    return {
        "dtype": [each for each in dtypes if as_dtype(each) != own],
        "channels_last": [True] if images and filters else [],
        "num_threads": _thread_counts() if device.type == "cpu" else [],
        "compile": [True] if compiling else [],
        "graphs": [True] if device.type == "cuda" else [],
        "rebatch": [False] if several else [],
    }


def _thread_counts() -> list[int]:
    """1, 2, 4, ... and as many as there are cores, but for what torch takes now."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    powers = {2**power for power in range(cores.bit_length()) if 2**power < cores}
    return sorted((powers | {cores}) - {torch.get_num_threads()})


class _Tuning:
    """The best setting so far, and all that was tried."""

    def __init__(
        self, model: MultiExitModel, policy: Policy | None, example: Any, batch_size: int, settings: Settings
    ) -> None:
        self.model, self.batch_size = model, batch_size
        self.policy = _tried_under(policy, model)
        self.given = settings
        self.chosen: dict[str, Any] = {}
        self.plain = self.best = self._predictor({})
        batches = BATCHES if len(self.policy.open_exits) > 1 else 1
        self.inputs, taken = inputs_for_duration(self.plain, example, batch_size, batches)
        self.trials = [Trial({}, len(self.inputs[0]) / taken, 1.0, 1.0, 1.0)]

    def attempt(self, options: Iterable[Settings]) -> None:
        """Try some settings beside the best so far, and take the quickest if it is clearly quicker."""
        limit = HOPELESS * seconds(self.best, self.inputs)
        ready: list[tuple[dict[str, Any], Predictor]] = []
        for option in options:
            wanted = {**self.chosen, **option}
            try:
                predictor = self._predictor(wanted)
                taken = min(seconds(predictor, self.inputs) for _ in range(2))  # the first compiles, or chooses kernels
            except (AlightError, RuntimeError) as error:
                self.trials.append(_not_run(wanted, str(error).splitlines()[0]))
                continue
            if taken > limit:
                ratio = limit / HOPELESS / taken
                self.trials.append(Trial(wanted, self._rate(taken), ratio, ratio, ratio, "slow, run once"))
            else:
                ready.append((wanted, predictor))
        if ready:
            self._compare(ready)

    def finished(self) -> Tuned:
        """What was chosen, if all together is quicker than the plain setting, else that."""
        plain = (dict(self.given), 1.0, self.batch_size)
        if not self.chosen:
            return Tuned(*plain, "No switch clearly pays here.", tuple(self.trials))
        runs = interleaved_timings([self.plain, self.best], self.inputs, ROUNDS)
        ratios, told = runs[:, 0] / runs[:, 1], _told(self.chosen)
        if np.quantile(ratios, 0.25) < WORTH:
            return Tuned(*plain, f"Tried once more, {told} does not clearly pay: plain stays.", tuple(self.trials))
        gain = float(np.median(ratios))
        reason = f"{told} pays: {gain:.2f} times as fast as plain."
        return Tuned({**self.given, **self.chosen}, gain, self.batch_size, reason, tuple(self.trials))

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

    def _predictor(self, chosen: Settings) -> Predictor:
        return Predictor(self.model, self.policy, batch_size=self.batch_size, **{**self.given, **chosen})

    def _rate(self, taken: float) -> float:
        return len(self.inputs[0]) / taken


def _tried_under(policy: Policy | None, model: MultiExitModel) -> Policy:
    """What runs in a trial: the whole network, or the policy, by lot where it says how many leave."""
    if policy is None:
        last = model.num_exits - 1
        return ExitAt(costs=(1.0,), open_exits=(last,), num_exits=model.num_exits)
    return policy if policy.is_batch_dependent or not policy.exit_rates else random_exits(policy, policy.exit_rates)


def _not_run(settings: Settings, why: str) -> Trial:
    return Trial(settings, 0.0, 0.0, 0.0, 0.0, f"does not run: {why}")


def _told(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items() if name != "device") or "plain"
