"""A fleet under load, bursts and drift: what is spent, how long answers take, when the alarm is raised.

    python experiments/capacity.py               # everything: half an hour on one core
    python experiments/capacity.py drift         # one part: decisions, load, day, burst or drift
    python experiments/capacity.py --device h200 # one device, when its inputs were measured anew: eight minutes

One device of the fleet is simulated in full (capacity_queue.py), with times that were measured (capacity_devices.py),
on images drawn from a recording. `decisions` times the policies alone, on the host; `load` finds the rate that one
device bears; fleets are sized by it for a billion images a day. Writes results/capacity_<part>.csv, a row per device
and way to serve, and the same by time to results/capacity_<part>_series.csv; docs/scale.md states the figures.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from capacity_devices import DEVICES, RECORDING, Device
from capacity_queue import DAY, PEAK_HOUR, Burst, Dense, Exits, Served, Serving, Traffic, harder, simulate
from recorded_cifar100 import RESULTS, load, rows

from alight import Costs, HeadOutputs, Policy, calibrate, replay
from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Row = dict[str, str | float | int]
IMAGES = 10**9  # a day, of the whole fleet
PEAK = 2.0  # the day's highest rate over its mean
HEADROOM = 0.7  # of what a device bears is planned for at the peak: bursts, restarts, a device that fails
BUDGETS = {"cpu": "50%", "h200": "75%"}  # of the plain network's time
CONTRACTS = {"stream": "stream", "batch": "batch", "plain": "mean"}  # ways to serve with exits
CERTIFYING = 4000  # unlabelled images of the recording's test set, the others are drawn from
ALARM_RATE = 0.01  # false alarms a day, of the whole fleet
WINDOW = 1000  # images, of which the dearest in a row are looked for
DRAWN, BINS = "cpu", 36  # whose series are kept, and in how many parts of the time
DECIDED = 100  # batches of every size, to time policies
SECONDS = {  # simulated, of each part; the day is played so much faster that it fits
    "cpu": {"load": 150.0, "day": 1800.0, "burst": 1800.0, "drift": 1800.0},
    "h200": {"load": 15.0, "day": 120.0, "burst": 90.0, "drift": 90.0},
}
DEARER = {"cpu": 1.5, "h200": 1.25}  # drift: times what images cost as calibrated, once it is complete
BURST = 1.5  # times the peak's rate
REPLICAS = 4  # devices that are simulated under drift, to see how they differ
STEPS = np.arange(0.1, 2.2, 0.05)  # of the plain network's rate in full batches


@dataclass(frozen=True, eq=False)
class Stream:
    """Images to draw from, and what the exits know of them."""

    table: HeadOutputs
    correct: npt.NDArray[np.bool_]  # (rows, exits)
    certifying: HeadOutputs  # like the stream, unlabelled, and not drawn from
    calibration: HeadOutputs  # labelled


@cache
def stream() -> Stream:
    """The recording, its test images in two parts."""
    found = load(RECORDING)
    order = np.random.default_rng(0).permutation(len(found.test))
    certifying, table = (found.test.take(part) for part in (order[:CERTIFYING], order[CERTIFYING:]))
    correct = table.predictions == table.known_labels("the simulation")[:, None]
    return Stream(table, correct, certifying, found.calibration)


@cache
def device_of(kind: str) -> Device:
    """The device of this kind."""
    return DEVICES[kind]()


def policy_for(kind: str, contract: str, devices: int = 1) -> Policy:
    """A policy for the device's own costs; its alarm is false once in a hundred days of the whole fleet."""
    own, per_day = stream(), IMAGES // devices
    given = (device_of(kind).costs, BUDGETS[kind], own.calibration, own.certifying)
    told = {"alarm_rate": ALARM_RATE / devices, "horizon": per_day} if contract == "stream" else {}
    return calibrate.CONTRACTS[contract](calibrate.eero, **told)(*given, spend_all=True)


def serving_for(kind: str, how: str, devices: int = 1) -> Serving:
    """What serves: the plain network, or exits under a contract."""
    device = device_of(kind)
    return Dense(device) if how == "dense" else Exits(device, policy_for(kind, CONTRACTS[how], devices), stream().table)


def budget_of(kind: str) -> float:
    """Milliseconds of an image that the budget allows."""
    return device_of(kind).costs.budget(BUDGETS[kind])


def drawn(arrivals: Floats, rng: np.random.Generator, kind: str, hard: Floats | None = None) -> Integers:
    """Rows for the images that arrive; `hard` is the share of each that comes from a distribution of dear ones."""
    own = stream()
    found = rng.integers(len(own.table), size=len(arrivals))
    if hard is not None:
        chosen = rng.uniform(size=len(arrivals)) < hard
        spent = replay(policy_for(kind, "mean"), own.table).spent
        found[chosen] = rng.choice(len(own.table), size=int(chosen.sum()), p=harder(spent, DEARER[kind]))
    return found


def drift(moments: Floats, length: float) -> Floats:
    """How far the drift has come: it begins after a third of the time and is complete after two.

    >>> drift(np.array([10.0, 45.0, 80.0]), 90.0).tolist()
    [0.0, 0.5, 1.0]
    """
    return np.clip(3 * moments / length - 1, 0, 1)


def load_rows(kind: str, how: str) -> Iterator[Row]:
    """One device at rates that grow, until it refuses or answers late."""
    device, seconds = device_of(kind), SECONDS[kind]["load"]
    for step in STEPS.tolist():
        rng, rate = np.random.default_rng(0), step * device.dense_per_second
        arrivals = Traffic(rate, 1.0).arrivals(0.0, seconds, 1.0, rng)
        served = simulate(
            arrivals, drawn(arrivals, rng, kind), device, serving_for(kind, how), stream().correct, seconds
        )
        yield {"device": kind, "serving": how, "per_second": round(rate, 1)} | figures(served, budget_of(kind))
        if len(served.refused) or np.quantile(served.delays, 0.99) > 2 * device.target:
            return


def bearable(kind: str, how: str) -> float:
    """Images a second at which, as at all below, 99 % are answered in time; of results/capacity_load.csv."""
    device = device_of(kind)
    best = 0.0
    for row in rows(RESULTS / "capacity_load.csv"):
        if (row["device"], row["serving"]) == (kind, how):
            if float(row["refused"]) > 0 or float(row["p99_ms"]) > 1e3 * device.target:
                break
            best = float(row["per_second"])
    return best


def devices_for(images: float, per_second: float) -> int:
    """Devices for so many images a day, each of which bears this rate."""
    return int(np.ceil(images / DAY * PEAK / (HEADROOM * per_second)))


def figures(served: Served, budget: float) -> Row:
    """What one device did, in numbers."""
    p50, p99 = (1e3 * np.quantile(served.delays, [0.5, 0.99])).tolist()
    return {
        "images": len(served.spent),
        "spent_of_budget": float(served.spent.mean() / budget),
        "worst_window": worst_window(served.spent, budget),
        "p50_ms": p50,
        "p99_ms": p99,
        "refused": len(served.refused) / max(1, len(served.refused) + len(served.spent)),
        "accuracy": float(served.right.mean()),
        "batch": float(served.sizes.mean()),
        "busy": float(served.busy.sum() / max(served.length, served.answered[-1])),
    }


def worst_window(spent: Floats, budget: float) -> float:
    """What the dearest images in a row cost on average, over the budget."""
    size = min(WINDOW, len(spent))
    sums = np.cumsum(np.concatenate([[0.0], spent]))
    return float((sums[size:] - sums[:-size]).max() / size / budget)


def series(served: Served, budget: float) -> Iterator[Row]:
    """The same by time: a row for each part of what was simulated, by the moment of arrival."""
    edges = np.linspace(0, served.length, BINS + 1)
    for index, (first, last) in enumerate(pairwise(edges)):
        own = (served.arrived >= first) & (served.arrived < last)
        batches = (served.starts >= first) & (served.starts < last)
        refused = int(((served.refused >= first) & (served.refused < last)).sum())
        if own.any() and batches.any():
            p50, p99 = (1e3 * np.quantile(served.delays[own], [0.5, 0.99])).tolist()
            yield {
                "bin": index,
                "per_second": f"{(int(own.sum()) + refused) / (last - first):.1f}",
                "spent": f"{served.spent[own].mean() / budget:.4f}",
                "p50_ms": f"{p50:.1f}",
                "p99_ms": f"{p99:.1f}",
                "accuracy": f"{served.right[own].mean():.4f}",
                "refused": f"{refused / (int(own.sum()) + refused):.3g}",
                "batch": f"{served.sizes[batches].mean():.1f}",
                "busy": f"{served.busy[batches].sum() / (last - first):.3f}",
            }


@dataclass(frozen=True)
class Case:
    """One device of a fleet for some time."""

    part: str
    kind: str
    how: str
    devices: int
    replica: int = 0
    seconds: float = 0.0  # simulated; by default the part's own

    def run(self) -> tuple[Row, list[Row]]:
        """What it did, in all and by time."""
        device, length = device_of(self.kind), self.seconds or SECONDS[self.kind][self.part]
        rng = np.random.default_rng(self.replica)
        traffic, start, speed = Traffic(IMAGES / DAY / self.devices, PEAK), PEAK_HOUR * 3600 - length / 2, 1.0
        if self.part == "day":
            start, speed = 0.0, DAY / length
        if self.part == "burst":
            traffic = replace(traffic, bursts=(Burst(start + length / 3, length / 3, BURST),))
        arrivals = traffic.arrivals(start, start + speed * length, speed, rng)
        hard = drift(arrivals, length) if self.part == "drift" else None
        images = drawn(arrivals, rng, self.kind, hard)
        serving = serving_for(self.kind, self.how, self.devices)
        served = simulate(arrivals, images, device, serving, stream().correct, length)
        budget = budget_of(self.kind)
        told: Row = {"device": self.kind, "serving": self.how, "devices": self.devices, "replica": self.replica}
        told |= figures(served, budget) | {
            "of_the_stream": f"{1 / self.devices / speed:.3g}",
            "seconds": length,
            "ahead": ahead(served.spent, served.sizes, budget, float(device.costs.cumulative()[-1])),
            **self._alarm(served, serving),
        }
        named: Row = {"device": self.kind, "serving": self.how, "devices": self.devices}
        return told, [named | row for row in series(served, budget)]

    def _alarm(self, served: Served, serving: Serving) -> Row:
        """When the alarm was raised, after the drift began where there is one, and how dear images were by then."""
        at = getattr(serving, "alarmed_at", -1)
        if at < 0:
            return {"alarm_seconds": "", "alarm_images": "", "alarm_dearer": ""}
        since = served.length / 3 if self.part == "drift" else 0.0
        moment = served.arrived[min(at, len(served.arrived) - 1)]
        dearer = 1 + (DEARER[self.kind] - 1) * drift(moment, served.length) if self.part == "drift" else 1.0
        before = int((served.arrived < since).sum())
        return {"alarm_seconds": float(moment - since), "alarm_images": at - before, "alarm_dearer": float(dearer)}


def ahead(spent: Floats, sizes: Integers, budget: float, dearest: float) -> float:
    """By how many full passes the stream was ahead of its budget at most, at the end of a batch."""
    ends = np.cumsum(sizes)
    return float(((np.cumsum(spent)[ends - 1] - ends * budget) / dearest).max())


def decisions_part(_kinds: Sequence[str]) -> Iterator[tuple[Row, list[Row]]]:
    """Milliseconds that each policy takes to decide about a batch, of the GPU's costs and size."""
    own = stream()
    rng, costs = np.random.default_rng(0), Costs.from_cumulative(np.arange(1.0, own.table.num_exits + 1), "ms")
    for contract in CONTRACTS.values():
        policy = calibrate.CONTRACTS[contract](calibrate.eero)(costs, "60%", own.calibration, own.certifying)
        for size in (1, 16, 256, 1024):
            taken = []
            for _ in range(DECIDED):
                images = own.table.take(rng.integers(len(own.table), size=size))
                start = time.perf_counter()
                replay(policy, images)
                taken.append(1e3 * (time.perf_counter() - start))
            low, middle, high = np.quantile(taken, [0.25, 0.5, 0.75]).tolist()
            yield {"contract": contract, "batch_size": size, "ms": middle, "ms_low": low, "ms_high": high}, []


def load_part(kinds: Sequence[str]) -> Iterator[tuple[Row, list[Row]]]:
    for kind in kinds:
        for how in ("dense", "stream"):
            yield from ((row, []) for row in load_rows(kind, how))


def cases(part: str, kind: str) -> Iterator[Case]:
    """Every way to serve and fleet of a part."""
    fleets = {how: devices_for(IMAGES, bearable(kind, how)) for how in ("dense", "stream")}
    for how in CONTRACTS:
        count = REPLICAS if (part, how) == ("drift", "stream") else 1
        yield from (Case(part, kind, how, fleets["stream"], replica) for replica in range(count))
    if part != "drift":  # the plain network does not mind
        yield from (Case(part, kind, "dense", devices) for devices in sorted(set(fleets.values())))


def case_part(part: str, kinds: Sequence[str]) -> Iterator[tuple[Row, list[Row]]]:
    yield from (case.run() for kind in kinds for case in cases(part, kind))


PARTS: dict[str, Callable[[Sequence[str]], Iterator[tuple[Row, list[Row]]]]] = {
    "decisions": decisions_part,
    "load": load_part,
    **{part: partial(case_part, part) for part in ("day", "burst", "drift")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all, unless some are named")
    parser.add_argument("--device", choices=DEVICES, help="of which rows are made anew; those of others stay")
    options = parser.parse_args()
    kinds = [options.device] if options.device else list(DEVICES)
    for part in options.parts or list(PARTS):
        begin, path = time.perf_counter(), RESULTS / f"capacity_{part}.csv"
        made = provenance("numpy", "scipy", folder=ROOT)
        before = rows(path) if path.exists() else []
        found: list[Row] = [{**row} for row in before if row.get("device") not in (None, *kinds)]
        by_time: list[Row] = []
        for row, own in PARTS[part](kinds):
            found.append({**row, **made})
            by_time += own if row.get("device") == DRAWN and not row.get("replica") else []
            shown = (f"{name}={cell:.4g}" if isinstance(cell, float) else str(cell) for name, cell in row.items())
            print(" ".join(shown), flush=True)
        write_rows(path, sorted(found, key=lambda row: str(row.get("device", ""))))  # stable: as they were made
        if by_time:
            write_rows(RESULTS / f"capacity_{part}_series.csv", by_time)
        print(f"{part}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
