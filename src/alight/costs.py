"""What each stage and each head costs, and budgets in the same unit.

Costs are per sample. A multiply-add counts as 2 FLOPs (so 1 MAC = 2 FLOPs).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from alight.display import base_unit, exit_names, html_table, layer_label, percent, quantity
from alight.errors import BadFile, BadInput, BudgetTooSmall
from alight.files import PathLike, read_json, write_json

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
FAR = 1.5  # times the most expensive exit: a bare number above it is not meant in the unit


class Amount(float):
    """A budget in the unit of its costs, as `Costs.budget` gives it: not taken for a percentage any more."""


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Costs:
    """Cost per sample of each stage (the layers between two exits) and of each head.

    A closed exit's head is never evaluated and costs nothing. In a cascade `members` says to which network an exit
    belongs, by default to one of its own where no stage costs anything: each network starts anew from the input, and
    the full network, to which percentages refer, is the most expensive one alone.

    >>> costs = Costs(stages=[2, 3, 4], heads=[1, 1, 1], unit="FLOPs")
    >>> costs.cumulative(), costs.cumulative([0, 2]), costs.full
    (array([ 3.,  7., 12.]), array([ 3., 11.]), 10.0)
    >>> cascade = Costs(stages=[2, 3, 8], heads=[1, 0, 0], members=[0, 0, 1])  # a network with an exit, then another
    >>> cascade.cumulative(), cascade.cumulative([0, 2]), cascade.full
    (array([ 3.,  6., 14.]), array([ 3., 11.]), 8.0)
    """

    stages: Floats  # (exits,), of the layers between two exits
    heads: Floats  # (exits,), of the head of each exit
    unit: str = "FLOPs"  # or "MACs", "ms", "J", "USD", ""
    members: tuple[int, ...] = ()  # (exits,), which network of a cascade each exit belongs to: 0, 0, 1, ...
    sample_shape: tuple[int, ...] = ()  # of the images that they were measured with, where it is known
    _through: Floats = field(init=False)  # (exits,), the stages of its network up to each
    _full: float | None = field(init=False)  # of the full network, where these do not tell it

    def __init__(
        self,
        stages: npt.ArrayLike,
        heads: npt.ArrayLike,
        unit: str = "FLOPs",
        members: Sequence[int] = (),
        sample_shape: Sequence[int] = (),
    ) -> None:
        stages, heads = _numbers("stages", stages), _numbers("heads", heads)
        if stages.shape != heads.shape:
            raise BadInput(f"{len(stages)} stages and {len(heads)} heads: give one stage and one head per exit")
        if (heads < 0).any() or (stages < 0).any():
            raise BadInput(f"a cost is negative (stages {stages.tolist()}, heads {heads.tolist()}): measure again")
        if not isinstance(unit, str):
            raise BadInput(f"unit {unit!r} is not a text: give 'FLOPs', 'ms', 'J' or ''")
        groups = _members(members, len(stages), separate=not stages.any())
        through = np.concatenate([np.cumsum(stages[groups == member]) for member in range(groups[-1] + 1)])
        self.__dict__.update(stages=stages, heads=heads, unit=unit, members=tuple(groups.tolist()))
        self.__dict__.update(sample_shape=tuple(map(int, sample_shape)), _through=through, _full=None)
        _check_increasing(self.cumulative())

    @classmethod
    def from_cumulative(
        cls, values: npt.ArrayLike, unit: str = "", full: float | None = None, sample_shape: Sequence[int] = ()
    ) -> "Costs":
        """Return costs of which only the cumulative ones are known; heads are then part of their stage.

        `full` is the cost of the full network, where it is not the last: percentages refer to it.

        >>> Costs.from_cumulative([1.0, 2.5]).cumulative(), Costs.from_cumulative([1.0, 2.5], full=1.5).budget("100%")
        (array([1. , 2.5]), 1.5)
        """
        cumulative = _numbers("costs", values)
        _check_increasing(cumulative)
        none, first = np.zeros(len(cumulative)), np.zeros(len(cumulative), dtype=int)
        made = cls._from_through(cumulative, none, unit, first, sample_shape)
        made.__dict__["_full"] = full
        return made

    @classmethod
    def _from_through(
        cls, through: Floats, heads: Floats, unit: str, members: Integers, sample_shape: Sequence[int]
    ) -> "Costs":
        starts = np.diff(members, prepend=-1) != 0
        before = np.where(starts, 0.0, np.roll(through, 1))
        costs = cls(through - before, heads, unit, (np.cumsum(starts) - 1).tolist(), sample_shape)
        costs.__dict__["_through"] = through  # a sum of differences would miss it by a rounding
        return costs

    def __len__(self) -> int:
        return len(self.stages)

    def __repr__(self) -> str:
        values = ", ".join(quantity(value, self.unit) for value in self.cumulative())
        return f"Costs({values} per sample, cumulative)"

    def _repr_html_(self) -> str:
        return html_table(f"Costs per sample; full network {quantity(self.full, self.unit)}", self.columns())

    def columns(self, exits: Sequence[str] = ()) -> list[list[str]]:
        """Return columns of text with a row for each exit, by name where names are given.

        >>> for row in zip(*Costs(stages=[2e6, 3e6], heads=[1e6, 1e6]).columns(["layer1", "end"])):
        ...     print(*row, sep=" | ")
        exit | stage | head | cumulative | of the full network
        layer1 | 2 MFLOPs | 1 MFLOPs | 3 MFLOPs | 50 %
        end | 3 MFLOPs | 1 MFLOPs | 7 MFLOPs | 117 %
        """
        columns = [["exit", *map(layer_label, exit_names(exits, len(self)))]]
        for name, values in {"stage": self.stages, "head": self.heads, "cumulative": self.cumulative()}.items():
            columns.append([name, *(quantity(value, self.unit) for value in values)])
        return [*columns, ["of the full network", *(percent(share) for share in self.shares())]]

    def cumulative(self, open_exits: Sequence[int] | None = None) -> Floats:
        """Return the cost of answering at each open exit: the stages up to it and all open heads on the way (B-hat)."""
        chosen = np.arange(len(self)) if open_exits is None else np.asarray(open_exits)
        ordered = chosen.ndim == 1 and chosen.dtype.kind in "iu" and (np.diff(chosen) > 0).all()
        if not (ordered and len(chosen) and chosen[0] >= 0 and chosen[-1] < len(self)):
            raise BadInput(f"open exits {open_exits} of a network with exits 0 to {len(self) - 1}: give them in order")
        through = self._through[chosen]
        if self.is_cascade:  # all of a network that is left behind was paid for
            leaves = np.diff(np.asarray(self.members)[chosen], append=self.members[chosen[-1]]) != 0
            through = through + np.cumsum(np.where(leaves, through, 0.0)) - np.where(leaves, through, 0.0)
        return through + np.cumsum(self.heads[chosen])

    @property
    def is_cascade(self) -> bool:
        """Whether the exits belong to several networks."""
        return self.members[-1] > 0

    @property
    def alone(self) -> Floats:
        """Cost of answering at each exit when no other is open.

        >>> Costs(stages=[2, 3, 4], heads=[1, 1, 1]).alone
        array([ 3.,  6., 10.])
        """
        return self._through + self.heads

    def shares(self, open_exits: Sequence[int] | None = None) -> Floats:
        """Return the cost of answering at each open exit as a share of the full network's.

        >>> Costs(stages=[2, 3, 4], heads=[1, 1, 1]).shares()
        array([0.3, 0.7, 1.2])
        """
        return self.cumulative(open_exits) / self.full

    def at_exits(self, open_exits: Sequence[int]) -> "Costs":
        """Return the costs of the network that has these exits alone: their heads, and the stages between them.

        >>> Costs(stages=[2, 3, 4], heads=[1, 1, 1]).at_exits([0, 2])
        Costs(3 FLOPs, 11 FLOPs per sample, cumulative)
        """
        chosen = np.asarray(open_exits, dtype=np.int64)
        members = np.asarray(self.members)[chosen]
        return self._from_through(self._through[chosen], self.heads[chosen], self.unit, members, self.sample_shape)

    @property
    def full(self) -> float:
        """Cost of the full network: all stages and the last head, no other head; the most expensive of a cascade."""
        if self._full is not None:
            return self._full
        ends = np.diff(self.members, append=len(self)) != 0
        return float(self.alone[ends].max())

    def budget(self, budget: "float | str") -> float:
        """Return a budget as a number in the unit of these costs: 3e8, "50%" of the full network, or "2.5 GFLOPs".

        Of costs in USD, "$1.20/1000" is 1.20 USD for 1,000 samples, and "0.0012 USD" the same for each.

        A bare number that no exit fits, such as 0.5 or 50 where costs are millions, is refused: a percentage is meant.

        >>> costs = Costs.from_cumulative([1e9, 4e9], unit="FLOPs")
        >>> costs.budget("2.5 GFLOPs"), costs.budget("50 percent") == costs.budget("50%")
        (2500000000.0, True)
        """
        if isinstance(budget, Amount):
            return budget
        amount = self._amount(budget)
        if not (np.isfinite(amount) and amount > 0):
            raise BadInput(f"budget {budget!r} is not a positive, finite amount: give one, such as '50%' or '3 ms'")
        if not isinstance(budget, str) or re.fullmatch(r"[-+.\deE\s]+", budget):
            self._check_meant(amount)
        return Amount(amount)

    def _check_meant(self, amount: float) -> None:
        """Raise if a bare number is far from what this network costs, and say which percentage it may stand for."""
        cheapest = float(self.alone.min())
        most = max(self.full, float(self.cumulative()[-1]))
        share = amount if amount <= 1 else amount / 100
        meant = percent(share).replace(" ", "") if cheapest <= share * self.full <= self.full else ""
        if amount < cheapest:
            raise BudgetTooSmall(amount, cheapest, self.unit, full=self.full, meant=meant)
        if meant and amount > FAR * most:
            allowed, times = quantity(amount, self.unit), amount / self.full
            raise BadInput(
                f"budget {allowed} per sample is {times:,.3g} times what the full network costs"
                f" ({quantity(self.full, self.unit)}): did you mean '{meant}'? Write"
                f" '{allowed if base_unit(self.unit) else f'{times:.0%}'}' to allow it"
            )

    def _amount(self, budget: "float | str") -> float:
        if not isinstance(budget, str):
            try:
                return float(budget)
            except (TypeError, ValueError, OverflowError) as error:
                known = "a number, percentage or quantity such as '2.5 GFLOPs'"
                raise BadInput(f"budget {budget!r} is not {known}") from error
        match = re.fullmatch(
            rf"\s*(\$?)\s*({NUMBER})\s*(\S*?)\s*(?:(?:/|per)\s*([1-9][\d,]*)(?: requests| samples)?)?\s*", budget
        )
        if match is None:
            known = "a number, percentage or quantity: write '50%', '2.5 GFLOPs', '3 ms', '$1.20/1000'"
            raise BadInput(f"budget {budget!r} is not {known}")
        number, unit = float(match[2]), match[3].replace("$", "USD") or ("USD" if match[1] else "")
        if match[4]:  # for so many samples
            number /= int(match[4].replace(",", ""))
        if unit == "":
            return number
        return number / 100 * self.full if unit in ("%", "percent") else number * self._in_own_unit(budget, unit)

    def _in_own_unit(self, budget: str, unit: str) -> float:
        asked, own = base_unit(unit), base_unit(self.unit)
        if unit.lower() == self.unit.lower():
            return 1.0
        if asked is None:
            raise BadInput(
                f"unknown unit {unit!r} in budget {budget!r}: alight knows %, FLOPs, MACs, s and J with prefixes,"
                f" as in GFLOPs, ms, mJ, and the unit of the costs, {self.unit or 'which they have not'}"
            )
        if own is None:
            raise BadInput(
                f"budget {budget!r} has a unit, but the costs' unit is {self.unit or 'not given'}:"
                " give the budget as a number or a percentage, or the costs as Costs(..., unit='FLOPs')"
            )
        (scale, kind), (own_scale, own_kind) = asked, own
        if {kind, own_kind} == {"FLOPs", "MACs"}:
            scale, kind = (scale * 2, "FLOPs") if kind == "MACs" else (scale / 2, "MACs")
        if kind != own_kind:
            known = {"FLOPs": "FLOPs", "MACs": "MACs", "s": "ms", "J": "J"}[kind]
            raise BadInput(
                f"budget {budget!r} is not in the costs' unit {self.unit}: give a percentage, or measure costs in that"
                f" unit first (`alight costs --unit {known}`, measure_costs(..., unit={known!r}))"
            )
        return scale / own_scale

    def save(self, path: PathLike) -> None:
        """Write the costs to a JSON file, whole or not at all."""
        content: dict[str, object] = {"cumulative": self.cumulative().tolist()}
        if self.heads.any() or self.is_cascade:
            content = {"stages": self.stages.tolist(), "heads": self.heads.tolist()}
        known = {"sample_shape": self.sample_shape} if self.sample_shape else {}
        members = {"members": self.members} if self.is_cascade else {}
        write_json(path, "Costs", {**content, "unit": self.unit, **members, **known})

    @classmethod
    def load(cls, path: PathLike) -> "Costs":
        """Load the costs of a JSON file that `save` wrote."""
        content = read_json(path, "Costs")
        try:
            if "cumulative" in content:
                return cls.from_cumulative(content.pop("cumulative"), **content)
            return cls(**content)
        except (TypeError, OverflowError, BadInput) as error:
            raise BadFile(path, f"its content is not usable ({error})", "save the costs again") from error


def as_costs(costs: Costs | npt.ArrayLike) -> Costs:
    """Return costs unchanged, or those of an array of cumulative costs."""
    if hasattr(costs, "predictions"):
        raise BadInput("the arguments are in another order, recorded outputs first: write (costs, budget, labelled)")
    return costs if isinstance(costs, Costs) else Costs.from_cumulative(costs)


def _numbers(what: str, values: npt.ArrayLike) -> Floats:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"{what} are not numbers ({error}): give one cost per exit") from error
    if numbers.ndim != 1 or not numbers.size:
        raise BadInput(f"{what} have shape {numbers.shape}: give one cost per exit")
    if not np.isfinite(numbers).all():
        raise BadInput(f"{what} are {numbers.tolist()}: give finite costs")
    return numbers


def _members(members: Sequence[int], count: int, *, separate: bool) -> Integers:
    """Return the network that each exit belongs to; each exit to one of its own, or all to one, where none is given."""
    if not len(members):
        return np.arange(count) if separate else np.zeros(count, dtype=np.int64)
    groups = np.asarray(members)
    whole = groups.shape == (count,) and groups.dtype.kind in "iu"
    if not whole or groups[0] != 0 or not np.isin(np.diff(groups), (0, 1)).all():
        raise BadInput(f"members {[*members]} for {count} exits: number the networks of a cascade 0, ..., in order")
    return groups.astype(np.int64)


def _check_increasing(costs: Floats) -> None:
    if costs[0] <= 0:
        raise BadInput(f"exit 1 costs {costs[0]:g}: costs are cumulative, per sample, and positive")
    if (falls := np.flatnonzero(np.diff(costs) <= 0)).size:
        first = int(falls[0])
        raise BadInput(
            f"costs must increase from exit to exit, but exit {first + 1} costs {costs[first]:g}"
            f" and exit {first + 2} costs {costs[first + 1]:g}: give cumulative costs, cheapest exit first"
        )
