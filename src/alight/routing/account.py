"""What a router has spent and may still spend: the most is reserved before a call, and its real cost settled after."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from numbers import Real
from threading import Lock
from typing import Any

import numpy as np

from alight.display import quantity
from alight.errors import BadFile, BadInput, Mismatch
from alight.files import PathLike, read_json, write_json
from alight.policies.limits import Metered
from alight.policies.policy import Policy

KIND = "Router"  # of the file that keeps its state
COUNTED = ("calls", "failures", "timeouts", "unknown_costs", "above_most")  # for every model
ROUNDING = 1e-9  # of the most that a call can cost, above which it is too much


class SpendWarning(UserWarning):
    """A member reported a cost that cannot be, or more than a call of it can cost."""


class Account:
    """Requests admitted, money spent and reserved, calls counted; threads may share it.

    With a guard, which knows the most that a call of each model can cost, at every moment: spent <= requests x budget +
    the most that one request can cost.

    >>> from alight import Threshold
    >>> from alight.policies.limits import meter
    >>> policy = Threshold(thresholds=(0.8,), costs=(0.1, 1.1), budget=0.5, exits=("small", "large"))
    >>> account = Account(policy, ["small", "large"], meter(policy, [0.2, 2.0]))
    >>> account.admit(), account.settle(0, cost=0.1), account.reserve(1, is_answered=True), account.reserved
    (0, (0.1, ''), True, 2.0)
    """

    def __init__(self, policy: Policy, models: Sequence[str], guard: Metered | None) -> None:
        self.models, self.budget, self.unit, self.guard = tuple(models), policy.budget, policy.unit, guard
        self.means = np.diff(policy.costs, prepend=0.0).tolist()
        self.admitted, self.spent, self.reserved, self.under_way = 0, 0.0, 0.0, 0
        self.counts = {model: dict.fromkeys(COUNTED, 0) for model in self.models}
        self._lock, self._warned = Lock(), set[tuple[str, str]]()

    @property
    def allowed(self) -> float:
        """What may have been spent by now; infinite without a guard."""
        return self.guard.allowed(self.admitted) if self.guard else math.inf

    def most(self, open_index: int) -> float:
        """Return what is reserved for a call: the most that it can cost, nothing where that is not known."""
        return self.guard.max_costs[open_index] if self.guard else 0.0

    def admit(self) -> int:
        """Return the number of a new request, whose first call is paid for: it costs at most the budget."""
        with self._lock:
            self.admitted += 1
            self.reserved += self.most(0)
            return self.admitted - 1

    @contextmanager
    def routing(self) -> Iterator[None]:
        """Count a request as on its way."""
        with self._lock:
            self.under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1

    def reserve(self, open_index: int, *, is_answered: bool) -> bool:
        """Reserve the most that a call can cost, if the budget can pay for it.

        A request that has an answer leaves room for those whose first member will fail, as often as it has so far.
        """
        with self._lock:
            first, room = self.counts[self.models[0]], 0.0
            if self.guard and is_answered and (failed := first["failures"] + first["timeouts"]):
                room = sum(self.guard.max_costs) * (1 + self.under_way * failed / first["calls"])
            if self.spent + self.reserved + self.most(open_index) + room > self.allowed:
                return False
            self.reserved += self.most(open_index)
            return True

    def settle(self, open_index: int, cost: Any, fault: str = "") -> tuple[float, str]:
        """Charge a call instead of what was reserved for it; return the charge, and what is odd about the cost.

        What cannot be a cost is charged as the most. What is odd about a model's costs is said once.
        """
        model, most = self.models[open_index], self.most(open_index)
        unknown = most if self.guard else self.means[open_index]
        charge = unknown if (known := _as_cost(cost)) is None else known
        odd = "unknown_costs" if known is None else ""
        if self.guard and charge > most * (1 + ROUNDING):
            odd = "above_most"
        with self._lock:
            self.reserved = max(0.0, self.reserved - most)
            self.spent += charge
            for name in filter(None, ("calls", fault, odd)):
                self.counts[model][name] += 1
            is_new = odd and cost is not None and (model, odd) not in self._warned
            self._warned.add((model, odd))
        said = f"{model} reported a cost of {cost!r} for a call that"
        said += f" {'can cost' if self.guard else 'costs on average'} {quantity(unknown, self.unit)}:"
        said += f" {quantity(charge, self.unit)} was charged; further ones are counted in router.counts"
        return charge, said if is_new else ""

    def save(self, path: PathLike) -> None:
        """Write what was spent and counted to a JSON file; calls on their way count as the most that they can cost."""
        with self._lock:
            content: dict[str, Any] = {"models": [*self.models], "budget": self.budget, "unit": self.unit}
            content |= {"admitted": self.admitted, "spent": self.spent + self.reserved}
            content["counts"] = {model: {**each} for model, each in self.counts.items()}
        write_json(path, KIND, content)

    def restore(self, path: PathLike) -> None:
        """Take over the state of a JSON file that `save` wrote, of the same models and budget."""
        if self.under_way or self.reserved:
            raise BadInput(
                "requests of this router are on their way: restore before the first of them, or after the last"
            )
        content = read_json(path, KIND)
        try:
            admitted, spent = int(content["admitted"]), float(content["spent"])
            written = (tuple(content["models"]), content["budget"], content["unit"])
            counts = {model: {name: int(content["counts"][model][name]) for name in COUNTED} for model in written[0]}
            if admitted < 0 or not 0 <= spent < math.inf:
                raise ValueError(f"{admitted} requests admitted, {spent} spent")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadFile(path, f"its content is not usable ({error})", "start a fresh router") from error
        if written != (self.models, self.budget, self.unit):
            raise Mismatch(
                f"{path} is of a router of {', '.join(written[0])}, budget {written[1]}: start a fresh router"
            )
        with self._lock:
            self.admitted, self.spent, self.counts = admitted, spent, counts


def _as_cost(reported: Any) -> float | None:
    """Return what a member reported as a number, None where it cannot be a cost."""
    if isinstance(reported, bool) or not isinstance(reported, Real | Decimal):
        return None
    try:
        cost = float(reported)
    except (OverflowError, ValueError):  # a whole number beyond all floats, a signalling NaN
        return None
    return cost if 0 <= cost < math.inf else None
