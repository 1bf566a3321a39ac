"""One device of a fleet: images arrive, wait, are served in micro-batches, and a policy decides where each leaves.

An exact simulation of events. Arrivals are a Poisson process whose rate follows the day; a fleet that spreads images at
random gives each of its devices such a process, so one device simulated in full is a fair sample of the fleet. A batch
starts once the device is free and either a full batch waits or the oldest image has waited long enough; an image that
finds the queue full is refused. Answers go out when their batch is done. Images are drawn from a recording, and the
policy itself decides, by the one walk: nothing about exits is a formula.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from capacity_devices import Device
from scipy.optimize import brentq
from scipy.special import i0e

from alight import HeadOutputs, Policy
from alight.policies.policy import BatchState, Memory
from alight.policies.route import route

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
DAY = 86_400.0
PEAK_HOUR = 20


@dataclass(frozen=True)
class Burst:
    """So many times the usual rate, for a while."""

    start: float  # seconds of the day
    seconds: float
    factor: float


@dataclass(frozen=True)
class Traffic:
    """Images a second through a day: a smooth curve with one peak, and bursts.

    >>> calm = Traffic(mean=10.0, peak=2.0)
    >>> calm.rates(np.array([20 * 3600.0])).round(6).tolist()
    [20.0]
    """

    mean: float  # images a second over the day, bursts left out
    peak: float = 2.0  # the curve's peak over its mean
    bursts: tuple[Burst, ...] = ()

    def rates(self, seconds: Floats) -> Floats:
        """Images a second at these seconds of the day."""
        bend = _bend(self.peak)
        angle = 2 * np.pi * (seconds - PEAK_HOUR * 3600) / DAY
        found = self.mean * np.exp(bend * (np.cos(angle) - 1)) / i0e(bend)
        for burst in self.bursts:
            inside = (seconds >= burst.start) & (seconds < burst.start + burst.seconds)
            found = np.where(inside, burst.factor * found, found)
        return found

    def arrivals(self, start: float, end: float, speed: float, rng: np.random.Generator) -> Floats:
        """Moments of arrival while the day runs from start to end, `speed` times as fast as the clock; from 0 on."""
        length, pieces = (end - start) / speed, []
        for first in np.arange(0.0, length, 10.0):  # in pieces, so that the highest rate is that of the moment
            last = min(first + 10.0, length)
            moments = np.linspace(first, last, 101)
            highest = 1.02 * float(self.rates(start + speed * moments).max())
            came = np.sort(rng.uniform(first, last, rng.poisson(highest * (last - first))))
            kept = rng.uniform(size=len(came)) * highest < self.rates(start + speed * came)
            pieces.append(came[kept])
        return np.concatenate(pieces)


def _bend(peak: float) -> float:
    """The curve exp(bend cos) that has this peak over its mean."""
    return 0.0 if peak == 1 else float(brentq(lambda bend: 1 / i0e(bend) - peak, 1e-9, 500.0))


def harder(spent: Floats, factor: float) -> Floats:
    """Weights that draw dear images more often, so that what they cost grows by this factor on average."""
    if factor == 1:
        return np.full(len(spent), 1 / len(spent))

    def weights(tilt: float) -> Floats:
        raised = np.exp(tilt * (spent / spent.max() - 1))
        return raised / raised.sum()

    return weights(brentq(lambda tilt: weights(tilt) @ spent - factor * spent.mean(), 0.0, 200.0))


class Serving(Protocol):
    """What a device does with a batch."""

    def __call__(self, rows: Integers) -> tuple[float, Integers, Floats]:
        """Seconds, the exits taken, and what was spent on each image; rows are those of the recording."""
        ...


class Dense:
    """The plain network: everyone leaves at the last exit, and no other head is asked."""

    def __init__(self, device: Device) -> None:
        self.device, self.last = device, len(device.costs) - 1

    def __call__(self, rows: Integers) -> tuple[float, Integers, Floats]:
        """Everyone at the last exit."""
        spent = np.full(len(rows), self.device.costs.full)
        return self.device.dense_seconds(len(rows)), np.full(len(rows), self.last), spent


class Exits:
    """A network with exits under a policy, which remembers its stream; images are numbered as they come."""

    def __init__(self, device: Device, policy: Policy, recording: HeadOutputs) -> None:
        policy.check(recording)
        if len(policy.open_exits) != len(device.costs):
            raise SystemExit(f"the policy opens {policy.open_exits} of {len(device.costs)} exits: open all of them")
        self.device, self.policy, self.served = device, policy, 0
        self.memory: Memory = ()
        self.columns = [recording.column(name) for name in policy.inputs]
        self.predictions, self.costs = recording.predictions, np.array(policy.costs)

    def __call__(self, rows: Integers) -> tuple[float, Integers, Floats]:
        """As the policy decides; it remembers."""
        samples = np.arange(self.served, self.served + len(rows))
        waiting, positions = rows, np.empty(len(rows), dtype=np.int64)

        def read(exit_index: int, staying: Any) -> tuple[Any, tuple[Any, ...]]:
            nonlocal waiting
            waiting = waiting[staying]
            return self.predictions[waiting, exit_index], tuple(each[waiting, exit_index] for each in self.columns)

        walk = route(self.policy, samples, read, self.memory)
        while True:
            try:
                position, leaving, _ = next(walk)
            except StopIteration as end:
                self.memory = tuple(part for part in end.value if isinstance(part, BatchState))
                break
            positions[leaving - self.served] = position
        self.served += len(rows)
        left = np.bincount(positions, minlength=len(self.costs))
        reached = len(rows) - np.cumsum(left) + left
        return self.device.seconds(reached), positions, self.costs[positions]

    @property
    def alarmed_at(self) -> int:
        """Images served when the drift alarm was raised, -1 if it was not."""
        return getattr(self.memory[0], "alarmed_at", -1) if self.memory else -1


@dataclass(frozen=True, eq=False)
class Served:
    """What became of every image that was not refused, in order, and of every batch."""

    arrived: Floats
    answered: Floats
    spent: Floats
    right: npt.NDArray[np.bool_]
    starts: Floats  # of batches
    sizes: Integers
    busy: Floats  # seconds
    refused: Floats  # moments at which an image was refused
    length: float  # seconds simulated

    @property
    def delays(self) -> Floats:
        """Seconds from arrival to answer."""
        return self.answered - self.arrived


def batches(
    arrivals: Floats, serve: Callable[[Integers], float], batch_size: int, max_wait: float, queue: int
) -> Iterator[tuple[float, float, Integers, Integers]]:
    """Every batch: its start, its end, the arrivals in it and those refused before it; `serve` tells its seconds.

    `queue` is at least `batch_size`. The queue empties only as a batch starts, so who is refused follows from how many
    came since the last.
    """
    waiting: list[int] = []
    upcoming, free, total = 0, 0.0, len(arrivals)
    while waiting or upcoming < total:
        oldest = arrivals[waiting[0]] if waiting else arrivals[upcoming]
        missing = batch_size - len(waiting)
        if missing <= 0:
            start = free
        elif upcoming + missing <= total:
            start = max(free, min(float(arrivals[upcoming + missing - 1]), float(oldest) + max_wait))
        else:
            start = max(free, float(oldest) + max_wait)
        came = int(np.searchsorted(arrivals, start, side="right"))
        room = queue - len(waiting)
        waiting.extend(range(upcoming, min(came, upcoming + room)))
        refused = np.arange(min(came, upcoming + room), came)
        upcoming = came
        taken = np.array(waiting[:batch_size])
        del waiting[:batch_size]
        free = start + serve(taken)
        yield start, free, taken, refused


def simulate(
    arrivals: Floats,
    rows: Integers,
    device: Device,
    serving: Serving,
    correct: npt.NDArray[np.bool_],
    length: float,
) -> Served:
    """One device through its arrivals; `rows` of the recording are the images, `correct` which exits know them."""
    count = len(arrivals)
    answered, spent, right, kept = np.zeros(count), np.zeros(count), np.zeros(count, bool), np.ones(count, bool)
    starts, sizes, busy, turned_away = [], [], [], [np.empty(0)]

    def serve(taken: Integers) -> float:
        seconds, exits, cost = serving(rows[taken])
        spent[taken], right[taken] = cost, correct[rows[taken], exits]
        return seconds

    for start, end, taken, refused in batches(arrivals, serve, device.batch_size, device.max_wait, device.queue):
        answered[taken] = end
        kept[refused] = False
        starts.append(start)
        sizes.append(len(taken))
        busy.append(end - start)
        turned_away.append(arrivals[refused])
    return Served(
        arrivals[kept],
        answered[kept],
        spent[kept],
        right[kept],
        np.array(starts),
        np.array(sizes),
        np.array(busy),
        np.concatenate(turned_away),
        length,
    )
