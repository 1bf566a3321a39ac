"""Paced: a stream of samples that is never ahead of its budget, follows drift, and raises an alarm.

For every number t of samples admitted, whatever they are: spent <= t * budget + costs[-1]. A batch is one step, and the
bound holds at its end. Three parts work together:

- *the guard* lets no more samples go on than the bound allows;
- *the plan* sets thresholds for a budget that saves or gives back, over the next `pace` samples, what a small reserve
  lacks or what is left over, so that the guard is seldom needed;
- *the alarm* bets that more samples than at calibration would now pass each exit, were its thresholds kept. To see
  that, a share of the samples, the witnesses, keeps to them, and others are made to save. Once the alarm is raised,
  thresholds are planned anew for every batch, on the scores last seen at each exit, the batch's own included.

Without a shift, the samples that pass an exit as calibrated are drawn from an urn: k of n calibration samples and all
met since are in it. The next passes with probability k/n exactly, whatever the scores are, so a bet at that price is
fair, and a Shiryaev-Roberts sum of such bets is raised to 1 / alarm_rate with probability alarm_rate at most.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from alight.budgeting.rates import Floats, tilted_rates
from alight.budgeting.thresholds import between, hashed_below, tie_range
from alight.display import quantity
from alight.errors import BadFile, BadInput, Mismatch
from alight.files import PathLike, read_json, write_json
from alight.policies.limits import surest
from alight.policies.policy import Array, BatchState, Memory, Policy, Step, reaches

PLANS = 65  # rates are solved for so many budgets and interpolated between: costs are linear in rates
SHIFTS = (1.1, 1.2, 1.4)  # the alarm bets as if samples had become this many times as expensive
WITNESSES, WITNESSING = 0.75, 2  # their share of the samples, and the purpose of its draw: not that of ties
GENEROUS = 2  # reserves left over, so that random variation is seldom the reason
RESERVED = 0.005  # of the budget so far, at most, is kept back
ROUNDING = 1e-12  # of the bound, so that no way of adding up exceeds it


@dataclass(frozen=True, eq=False)
class Pace(BatchState):
    """What a paced policy remembers of its stream: small, plain, saved and restored.

    >>> Pace(admitted=10, spent=4.0).alarmed
    False
    """

    admitted: int = 0
    last: int = 0  # how many of them in the last batch
    spent: float = 0.0
    recent: tuple[Floats, ...] = ()  # the scores last seen at each exit but the last, oldest first
    met: tuple[int, ...] = ()  # samples that came to each exit but the last as calibrated, as far as that is known
    passed: tuple[int, ...] = ()  # how many of them would have gone on
    evidence: Floats = field(default_factory=lambda: np.full(len(SHIFTS), -np.inf))  # log of each bet's sum
    stakes: Floats = field(default_factory=lambda: np.zeros(len(SHIFTS)))  # log of what this batch multiplies it by
    alarmed_at: int = -1  # samples admitted when the alarm was raised

    @property
    def alarmed(self) -> bool:
        """Whether the alarm has been raised."""
        return self.alarmed_at >= 0

    def _checked(self) -> "Pace":
        if not (self.admitted >= self.last >= 0 and 0 <= self.spent < math.inf):
            raise ValueError(f"{self.admitted} samples admitted, {self.last} of them last, {self.spent} spent")
        complete = len(self.evidence) == len(self.stakes) == len(SHIFTS) and len(self.met) == len(self.passed)
        if not complete or np.isnan([*self.evidence, *self.stakes]).any():
            raise ValueError("the alarm's evidence is not complete")
        if not all(0 <= passed <= met for passed, met in zip(self.passed, self.met, strict=True)):
            raise ValueError(f"of {self.met} samples met, {self.passed} passed")
        if not all(scores.ndim == 1 and len(scores) and np.isfinite(scores).all() for scores in self.recent):
            raise ValueError("the scores last seen are not complete")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        content |= {"recent": [scores.tolist() for scores in self.recent], "stakes": self.stakes.tolist()}
        return content | {"evidence": np.maximum(self.evidence, -1e300).tolist()}  # JSON has no infinity

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Pace":
        """Return the state that `to_dict` gave; a KeyError, TypeError or ValueError says what is wrong with it."""
        read: dict[str, Any] = {name: int(content[name]) for name in ("admitted", "last", "alarmed_at")}
        read |= {name: tuple(map(int, content[name])) for name in ("met", "passed")}
        read |= {name: np.array(content[name], dtype=np.float64) for name in ("evidence", "stakes")}
        recent = tuple(np.array(scores, dtype=np.float64) for scores in content["recent"])
        return cls(spent=float(content["spent"]), recent=recent, **read)._checked()

    def save(self, path: PathLike) -> None:
        """Write the state to a JSON file, whole or not at all."""
        write_json(path, "Pace", self.to_dict())

    @classmethod
    def load(cls, path: PathLike) -> "Pace":
        """Load the state of a JSON file that `save` wrote."""
        content = read_json(path, "Pace")
        try:
            return cls.from_dict(content)
        except (KeyError, TypeError, ValueError) as error:
            raise BadFile(path, f"its content is not usable ({error})", "start from a fresh state") from error


@dataclass(frozen=True)
class PacedBatch(BatchState):
    """What holds for one batch: of those waiting, the share to leave at each exit, and what is left to spend."""

    shares: Floats
    saving: bool  # whether the shares are meant to save
    recent: bool  # whether thresholds come from the scores last seen instead of the calibration's
    betting: bool  # whether the alarm learns from it
    left: float


@dataclass(frozen=True)
class Paced(Policy):
    """Leave by thresholds that follow the stream, and never let it get ahead of its budget."""

    is_batch_dependent: ClassVar[bool] = True

    thresholds: tuple[float, ...]  # as calibrated: what the alarm compares with
    tie_shares: tuple[float, ...]
    recent: tuple[tuple[float, ...], ...]  # scores of calibration samples waiting at each exit but the last
    law: tuple[int, ...]  # Dirichlet law of the exit shares as calibrated
    alarm_rate: float = 0.01  # probability that the alarm is raised within `horizon` samples like the calibration's
    horizon: int = 100_000
    pace: int = 200  # samples over which what is left over is given back

    def _check(self) -> None:
        super()._check()
        if not self.exit_rates or self.budget is None or len(self.costs) < 2:
            raise BadInput("pacing needs a budget, exit rates and two open exits: use certified_stream(method)")
        exits = len(self.costs)
        if not len(self.thresholds) == len(self.tie_shares) == len(self.recent) == exits - 1:
            raise BadInput(f"{len(self.recent)} windows of scores for {exits} exits: give one less than exits")
        if not (0 < self.alarm_rate < 1 and self.horizon > 0 and self.pace > 0):
            raise BadInput(f"alarm rate {self.alarm_rate:g} must lie inside (0, 1), horizon and pace be positive")
        if len(self.law) != exits or min(self.law) < 0 or not sum(self.law):
            raise BadInput(f"a law {self.law} of the shares of {exits} exits: give one count per exit")

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        if open_index == 0:
            state, batch = self._admit(memory[0] if memory else Pace(), len(samples))
            left_before = samples != samples  # none
        else:
            state, batch, left_before = memory
        waiting, here, after = len(samples), self.costs[open_index], self.costs[open_index + 1]
        seen = np.concatenate([state.recent[open_index], np.asarray(scores.tolist(), dtype=np.float64)])
        state = replace(state, recent=_with(state.recent, open_index, seen[-len(self.recent[open_index]) :]))
        as_calibrated = reaches(scores, samples, self.thresholds[open_index], self.tie_shares[open_index], self.salt)
        window = state.recent[open_index] if batch.recent else self._windows[open_index]
        leaving = reaches(scores, samples, *_cut(window, float(batch.shares[open_index])), self.salt)
        witness = hashed_below(samples, WITNESSES, self.salt, WITNESSING)
        if not state.alarmed:  # what is left over may hold a witness back, nothing but the guard sends it out early
            leaving = (witness & as_calibrated & (leaving | batch.saving)) | (~witness & leaving)
        going_on = waiting - int(leaving.sum())
        affordable = max(0, math.floor((batch.left - waiting * here) / (after - here)))
        for group in (~witness, witness):  # if so many leave here and the rest at the next exit, the bound still holds
            if (excess := going_on - affordable) > 0:
                staying = group & ~leaving
                cut = min(excess, int(staying.sum()))
                forced = leaving & ~leaving  # none
                forced[staying] = surest(scores[staying], samples[staying], cut, self.salt)
                leaving = leaving | forced
                going_on -= cut
        last = open_index == len(self.costs) - 2
        paid = (waiting - going_on) * here + (going_on * after if last else 0.0)
        state = replace(state, spent=state.spent + paid)
        followed = ~left_before & (witness | (open_index == 0))  # at the first exit everyone is seen
        if batch.betting:
            state = self._bet(state, open_index, ~as_calibrated[followed])
        sent_out = int((witness & followed & ~as_calibrated & leaving).sum())  # the others would be a biased choice
        batch = replace(batch, left=batch.left - paid, betting=batch.betting and not sent_out)
        return leaving, (state, batch, left_before | as_calibrated)

    def sent_out(self, open_index: int, count: int, memory: Memory) -> Memory:
        state, batch, left_before = memory
        paid = count * self.costs[open_index]
        if open_index == len(self.costs) - 2:  # they were taken to go on to the last exit
            paid -= count * self.costs[open_index + 1]
        state = replace(state, spent=state.spent + paid)
        return state, replace(batch, left=batch.left - paid, betting=False), left_before

    def owing(self, state: Pace, count: int) -> Pace:
        """Return the state if up to `count` more samples were admitted at unknown cost: it owes all they may cost.

        The guard lets them exceed the budget by the cost of the last exit at most, whatever they were.
        """
        assert self.budget is not None  # checked at the border
        owed = most_owed(state, self.budget, self.costs[-1], count)
        return replace(state, spent=state.admitted * self.budget + owed)

    def summary(self) -> str:
        most = quantity(self.costs[-1], self.unit)
        return f"leave at thresholds that follow the stream, never ahead of its budget by more than {most}"

    @cached_property
    def _plans(self) -> tuple[Floats, Floats]:
        """Budgets from the cheapest planned exit to the most expensive, and the rates that spend each."""
        rates, costs = np.array(self.exit_rates), np.array(self.costs)
        cheapest, costliest = costs[np.flatnonzero(rates)[[0, -1]]]
        budgets = np.linspace(cheapest, costliest, PLANS)
        return budgets, np.array([tilted_rates(rates, costs, float(budget)) for budget in budgets])

    @cached_property
    def _odds(self) -> Floats:
        """Factors by which the odds of passing each exit grow as samples become more expensive; (shifts, exits - 1)."""
        rates, costs = np.array(self.exit_rates), np.array(self.costs)
        mean, last = float(rates @ costs), float(costs[np.flatnonzero(rates)[-1]])
        shifted = [min(shift * mean, (mean + last) / 2) for shift in SHIFTS]
        return np.array([_odds(tilted_rates(rates, costs, budget)) for budget in shifted]) / _odds(rates)

    @cached_property
    def _reserve(self) -> float:
        """What is kept back so that random variation seldom needs the guard: three deviations of `pace` samples."""
        rates, costs = np.array(self.exit_rates), np.array(self.costs)
        return 3 * math.sqrt(self.pace * float(rates @ (costs - rates @ costs) ** 2))

    def _admit(self, state: Pace, count: int) -> tuple[Pace, PacedBatch]:
        """Return the state as a batch begins, with the bets of the last one settled, and what holds for the batch."""
        assert self.budget is not None  # checked at the border
        exits = len(state.recent or self.recent) + 1
        if exits != len(self.costs):
            raise Mismatch(f"a state of {exits} exits for a policy of {len(self.costs)}: start a fresh one")
        before, evidence = state.admitted, state.evidence
        if state.last:  # R becomes (R + the batch's share of the horizon) times what the batch multiplied it by
            evidence = np.logaddexp(evidence, math.log(state.last / self.horizon)) + state.stakes
        # without a shift R grows by that share at most on average: to 1 over the horizon, so seldom to 1 / alarm_rate
        convincing = np.logaddexp.reduce(evidence) - math.log(len(SHIFTS)) >= math.log(1 / self.alarm_rate)
        admitted = replace(
            state,
            admitted=before + count,
            last=count,
            recent=state.recent or self._windows,
            met=state.met or (0,) * len(self.recent),
            passed=state.passed or (0,) * len(self.recent),
            evidence=evidence,
            stakes=np.zeros(len(SHIFTS)),
            alarmed_at=before if convincing and not state.alarmed else state.alarmed_at,
        )
        meant = min(self.budget, float(np.dot(self.exit_rates, self.costs)))  # a plan may leave some of the budget
        credit = before * meant - state.spent - min(self._reserve, RESERVED * before * meant)
        saving = 1 - WITNESSES if credit < 0 and not admitted.alarmed else 1.0  # share of the samples that save
        shares = self._shares(meant + credit / max(self.pace, count) / saving)
        left = (admitted.admitted * self.budget + self.costs[-1]) * (1 - ROUNDING) - state.spent
        ample = credit > GENEROUS * self._reserve  # samples have become easy: as calibrated, all of them would leave
        return admitted, PacedBatch(shares, credit < 0, admitted.alarmed or ample, not admitted.alarmed, left)

    @cached_property
    def _windows(self) -> tuple[Floats, ...]:
        return tuple(np.array(scores) for scores in self.recent)

    def _shares(self, aim: float) -> Floats:
        """Return the share of the waiting samples that leaves at each exit but the last, for this budget."""
        budgets, plans = self._plans
        if budgets[0] == budgets[1]:  # all at one exit
            return np.where(np.array(self.exit_rates) > 0, 1.0, 0.0)[:-1]
        place = float(np.clip((aim - budgets[0]) / (budgets[1] - budgets[0]), 0, PLANS - 1))
        low = min(int(place), PLANS - 2)
        rates = (low + 1 - place) * plans[low] + (place - low) * plans[low + 1]
        waiting = 1 - np.concatenate([[0.0], np.cumsum(rates)[:-1]])
        return np.clip(rates / np.maximum(waiting, 1e-12), 0, 1)[:-1]

    def _bet(self, state: Pace, open_index: int, passing: Array) -> Pace:
        """Return the state after bets on whether samples that came to an exit as calibrated would pass it."""
        passes = np.asarray(passing.tolist(), dtype=np.float64)
        met, passed = state.met[open_index], state.passed[open_index]
        inside = np.cumsum(passes) - passes + sum(self.law[open_index + 1 :]) + passed
        price = inside / (np.arange(len(passes)) + sum(self.law[open_index:]) + met)
        odds = self._odds[:, open_index, None]
        stakes = (passes * np.log(odds) - np.log1p(price * (odds - 1))).sum(axis=1)
        return replace(
            state,
            met=_with(state.met, open_index, met + len(passes)),
            passed=_with(state.passed, open_index, passed + int(passes.sum())),
            stakes=state.stakes + stakes,
        )


def most_owed(state: Pace, budget: float, last_cost: float, count: int) -> float:
    """Return how far a stream may exceed its budget once up to `count` samples more, of unknown cost, are in it.

    >>> most_owed(Pace(admitted=10, spent=4.0), budget=0.5, last_cost=2.0, count=1)
    0.5
    >>> most_owed(Pace(admitted=10, spent=4.0), budget=0.5, last_cost=2.0, count=100)
    2.0
    """
    excess = state.spent - state.admitted * budget
    return max(excess, min(last_cost, excess + count * (last_cost - budget)))


def _odds(rates: Floats) -> Floats:
    """Return the odds of passing each exit but the last for samples that reach it; 1 where all pass or none."""
    beyond = np.cumsum(rates[::-1])[::-1][1:]
    both = (beyond > 0) & (rates[:-1] > 0)
    return np.where(both, beyond, 1.0) / np.where(both, rates[:-1], 1.0)


def _with(values: tuple[Any, ...], open_index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:open_index], value, *values[open_index + 1 :])


def _cut(scores: Floats, share: float) -> tuple[float, float]:
    """Return the threshold and tie share with which this share of the scores leaves."""
    passing = round((1 - share) * len(scores))
    if passing in (0, len(scores)):
        return (math.inf if passing else -math.inf), 1.0
    ordered = np.partition(scores, [passing - 1, passing])
    lower, upper = float(ordered[passing - 1]), float(ordered[passing])
    threshold = between(lower, upper)
    if lower < tie_range(threshold)[0]:
        return threshold, 1.0
    lowest, highest = tie_range(upper)
    below, above = int((scores < lowest).sum()), int((scores > highest).sum())
    return upper, 1 - (passing - below) / (len(scores) - below - above)
