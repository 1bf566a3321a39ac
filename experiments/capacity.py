"""How many replicas a load needs, what they cost, and what exits save: an analytic model from measured times.

    python experiments/capacity.py                         # results/capacity*.csv and the figure, in ten seconds
    python experiments/capacity.py --folder MINE --rate 500      # prints your own numbers

Measured inputs, and the script that writes each (MINE holds the first three; without the second, batches take what
their stages and heads do):

    results/capacity_stages.csv     ms of every stage and head, by batch size        experiments/capacity_inputs.py
    results/capacity_batches.csv    ms of whole batches, full network and exits      experiments/capacity_inputs.py
    results/capacity_shares.csv     share of the samples that leaves at each exit    experiments/capacity_inputs.py
    results/serve_load.csv          capacity and latency of the HTTP service         benchmarks/serve_load.py
    results/energy_cuda.csv         images per second and joules on a GPU            benchmarks/energy.py

A stage takes a fixed time for a batch and a time for each sample in it: a line through the measured batch sizes. With
exits a stage runs for the samples that reach it, and its fixed time is paid if at least one does. What whole batches
take beyond their stages and heads was measured and is added, as is what an HTTP request takes beside the network. On
the GPU whole batches were measured with exits; their times are used directly.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from figure_style import BLACK, BLUE, panels, save
from recorded_cifar100 import RESULTS, rows
from scipy.optimize import nnls
from scipy.stats import poisson

from alight.files import write_rows

FIGURE = RESULTS.parent / "docs" / "figures" / "capacity.svg"
UTILISATION = 0.7  # of its capacity that a replica is planned for: room for bursts, restarts and a lost replica
DOLLARS_PER_HOUR = {"CPU core": 0.04, "H200": 4.0}  # of a replica; assumed, not measured
LOADS = {"CPU core": (100, 1_000, 10_000), "H200": (10_000, 100_000, 1_000_000)}  # requests per second
FULL = "full network"
SERVED = {"dense": FULL, "early": "exits"}  # by benchmarks/serve_load.py
MIXES = {"dense": FULL, "uniform": "exits, uniform mix", "early": "exits, early mix"}  # by benchmarks/energy.py
STEADY = 0.99  # above this utilisation a queue takes minutes to settle, and its stationary law says little
NODES = (np.arange(20) + 0.5) / 20  # midpoints of probability, to integrate over arrivals
Floats = npt.NDArray[np.float64]
Row = dict[str, str | float | int]
Rows = Sequence[dict[str, str]]


def column(table: Rows, name: str) -> Floats:
    return np.array([float(row[name]) for row in table])


def line(sizes: Floats, values: Floats) -> Floats:
    """Return the fixed part and the part per sample, neither below 0, with the least squared relative errors."""
    if not values.any():
        return np.zeros(2)
    weights = 1 / np.maximum(values, values[values > 0].min())
    return nnls(np.stack([weights, weights * sizes], axis=1), weights * values)[0]


def stage_lines(stages: Rows) -> Floats:
    """Return the lines of stages and heads in seconds, (2, exits, 2): the fixed part and the part per sample."""
    by_exit = [[row for row in stages if row["exit"] == name] for name in dict.fromkeys(row["exit"] for row in stages)]
    parts = ("stage_ms", "head_ms")
    return np.array([[line(column(own, "batch_size"), column(own, part) / 1e3) for own in by_exit] for part in parts])


def full_seconds(stages: Rows, batches: Rows, counts: Floats) -> Floats:
    """Return the seconds of batches of these sizes by the full network: all stages and the last head."""
    (trunk, heads), sizes = stage_lines(stages), column(batches, "batch_size")
    fixed, each = trunk.sum(axis=0) + heads[-1]
    return fixed + each * counts + between(counts, sizes, column(batches, "dense_ms") / 1e3 - fixed - each * sizes)


def exit_seconds(stages: Rows, batches: Rows, counts: Floats, shares: Floats, stays: int = 0) -> Floats:
    """Return the seconds of batches of these sizes with exits; `stays` samples of each go to the last exit."""
    (trunk, heads), sizes = stage_lines(stages), column(batches, "batch_size")
    if len(shares) != len(trunk) or (shares < 0).any() or abs(shares.sum() - 1) > 1e-3:
        raise SystemExit(f"exit shares {shares.tolist()} do not fit: give {len(trunk)}, one per exit, with the sum 1")
    reached = np.cumsum(shares[::-1])[::-1].clip(max=1)  # share of the samples that reaches each stage
    others, (fixed, each) = counts[:, None] - stays, (trunk + heads).T
    someone = 1 - (1 - reached) ** others * (stays == 0)  # probability that the stage runs at all
    extra = (column(batches, "exits_ms") - column(batches, "modelled_ms")) / 1e3
    return someone @ fixed + (stays + others * reached) @ each + between(counts, sizes, extra)


def between(counts: Floats, sizes: Floats, extra: Floats) -> Floats:
    """Return what batches take beyond stages and heads, interpolated; 0 where no whole batches were measured."""
    return np.interp(counts, sizes, extra.clip(min=0)) if len(sizes) else np.zeros(len(counts))


def latency(rate: float, seconds: Floats, quantile: float = 0.99) -> float:
    """Return a quantile of the latency, in seconds, of one replica that gets `rate` requests per second.

    Stationary law of the M/D/1 queue with bulk service (Bailey 1954), solved numerically: Poisson arrivals; a free
    replica takes all requests that wait, up to len(seconds); a batch of n takes seconds[n - 1]; its requests are
    answered together. Infinite above the steady utilisation.
    """
    size, full = len(seconds), seconds[-1]
    if (utilisation := rate * full / size) >= STEADY:
        return float("inf")
    waiting = np.arange(2 * size + int(10 / (1 - utilisation)))  # when a replica becomes free; longer queues are rare
    taken = waiting.clip(1, size)  # a replica that finds no request waits for one
    left, time = (waiting - taken).clip(min=0), seconds[taken - 1]
    moves = poisson.pmf(waiting - left[:, None], rate * time[:, None])
    balance = (moves / moves.sum(axis=1, keepdims=True)).T - np.eye(len(waiting))
    balance[-1] = 1  # shares sum to one
    share = np.linalg.solve(balance, np.eye(len(waiting))[-1])
    passed = time[:, None, None] * NODES[:, None]  # of the running batch, when a request arrives
    ahead, place = np.divmod(left[:, None, None] + poisson.ppf(NODES, rate * passed), size)  # full batches, requests
    until = time[:, None, None] - passed + ahead * full  # its own batch starts
    own = (place + 1 + rate * until).clip(max=size)  # those that come later at their mean number
    delays = np.append(until + np.interp(own, np.arange(size) + 1, seconds), seconds[0])  # the last finds no queue
    arrivals = np.broadcast_to((share * rate * time)[:, None, None] / len(NODES) ** 2, own.shape)
    order, weights = np.argsort(delays), np.append(arrivals, share[0])
    total = np.cumsum(weights[order])
    return float(delays[order[np.searchsorted(total, quantile * total[-1])]])


@dataclass(frozen=True, eq=False)
class Replica:
    """One device that serves a network: how long its batches take, and what it costs."""

    device: str
    served_by: str
    seconds: Floats  # of batches of 1, 2, ... requests, on average
    slow: Floats  # the same if one request of the batch stays to the last exit, for p99
    dollars_per_hour: float
    joules: float = np.nan  # of a request at full load, idle draw included; nan where it was not measured
    idle_watts: float = np.nan

    @property
    def capacity(self) -> float:
        """Requests per second in full batches."""
        return len(self.seconds) / float(self.seconds[-1])

    def replicas(self, rate: float, utilisation: float = UTILISATION) -> int:
        """Return how many replicas a load needs."""
        return int(np.ceil(rate / (utilisation * self.capacity)))

    def plan(self, rate: float, utilisation: float = UTILISATION) -> Row:
        """Return what a load takes: replicas that share it at random, and their latency, price and energy."""
        count = self.replicas(rate, utilisation)
        joules = self.joules - self.idle_watts / self.capacity + count * self.idle_watts / rate
        return {
            "device": self.device,
            "served_by": self.served_by,
            "requests_per_second": f"{rate:.12g}",
            "replica_capacity": f"{self.capacity:.1f}",
            "replicas": count,
            "utilisation": f"{rate / count / self.capacity:.2f}",
            "p99_ms": f"{1e3 * latency(rate / count, self.slow):.0f}",
            "dollars_per_million": f"{count * self.dollars_per_hour / 3600 * 1e6 / rate:.3f}",
            "wh_per_million": "" if np.isnan(joules) else f"{joules / 3600 * 1e6:.1f}",
        }


def tables_of(folder: Path) -> tuple[Rows, Rows, Floats]:
    """Return stages, whole batches (empty where they were not timed) and exit shares."""
    stages, batches, shares = (folder / f"capacity_{name}.csv" for name in ("stages", "batches", "shares"))
    return rows(stages), rows(batches) if batches.exists() else [], column(rows(shares), "share")


def staged(folder: Path, size: int, request: float, price: float) -> list[Replica]:
    """Return the full network and exits where stages were timed; a request takes seconds beside the network."""
    (stages, batches, shares), counts = tables_of(folder), np.arange(1, size + 1, dtype=np.float64)
    full = full_seconds(stages, batches, counts) + request * counts
    mean, slow = (exit_seconds(stages, batches, counts, shares, stays) + request * counts for stays in (0, 1))
    return [Replica("CPU core", FULL, full, full, price), Replica("CPU core", SERVED["early"], mean, slow, price)]


def measured() -> list[Replica]:
    """Return the replicas that were measured: a CPU core with a ResNet-18, an H200 with a ResNet-50."""
    (stages, batches, _), load = tables_of(RESULTS), rows(RESULTS / "serve_load.csv")
    size, dense = int(load[0]["batch_size"]), column([row for row in load if row["service"] == "dense"], "capacity")
    request = 1 / float(np.median(dense)) - float(full_seconds(stages, batches, np.array([float(size)]))[0]) / size
    found = staged(RESULTS, size, request, DOLLARS_PER_HOUR["CPU core"])
    for row in rows(RESULTS / "energy_cuda.csv"):
        seconds = np.full(int(row["batch_size"]), int(row["batch_size"]) / float(row["images_per_second"]))
        metered = float(row["joules_per_image"]), float(row["watts_idle"])
        found.append(Replica("H200", MIXES[row["mode"]], seconds, seconds, DOLLARS_PER_HOUR["H200"], *metered))
    return found


def planned(replicas: Sequence[Replica]) -> list[Row]:
    """Return a row for every replica and load, with what is saved against the full network."""
    found = [replica.plan(rate) for replica in replicas for rate in LOADS[replica.device]]
    full = {(row["device"], row["requests_per_second"]): row for row in found if row["served_by"] == FULL}
    for row in found:
        whole = full[row["device"], row["requests_per_second"]]
        row["replicas_saved"] = f"{1 - int(row['replicas']) / int(whole['replicas']):.0%}"
    return found


def compared(replicas: Sequence[Replica]) -> list[Row]:
    """Return every load of the measured service beside the model; no p99 above the steady utilisation."""
    found: list[Row] = []
    for row in rows(RESULTS / "serve_load.csv"):
        own = next(each for each in replicas if (each.device, each.served_by) == ("CPU core", SERVED[row["service"]]))
        p99 = 1e3 * latency(rate := float(row["rate"]), own.slow)
        made: Row = {"seed": row["seed"], "served_by": own.served_by, "requests_per_second": f"{rate:.1f}"}
        made |= {"measured_capacity": f"{float(row['capacity']):.1f}", "predicted_capacity": f"{own.capacity:.1f}"}
        made |= {"utilisation": f"{rate / own.capacity:.2f}", "measured_p99_ms": f"{float(row['p99_ms']):.0f}"}
        found.append(made | {"predicted_p99_ms": f"{p99:.0f}" if np.isfinite(p99) else ""})
    return found


def draw(replicas: Sequence[Replica], services: Sequence[Row], path: Path) -> None:
    """Draw p99 of one CPU core by its load, predicted and measured."""
    figure, [[panel]] = panels(width=6)
    for replica, colour, marker in zip(replicas, (BLACK, BLUE), ("s", "o"), strict=False):
        rates = np.linspace(0.1, 0.97, 40) * len(replica.slow) / replica.slow[-1]
        predicted = [1e3 * latency(rate, replica.slow) for rate in rates.tolist()]
        panel.plot(rates, predicted, color=colour, label=f"{replica.served_by}, predicted")
        own = [row for row in services if row["served_by"] == replica.served_by]
        points = np.array([[row["requests_per_second"], row["measured_p99_ms"]] for row in own], dtype=float).T
        panel.plot(*points, color=colour, marker=marker, linestyle="", label=f"{replica.served_by}, measured")
        panel.axvline(replica.capacity, color=colour, linestyle=":", linewidth=1)
    panel.set(xlabel="requests per second to one CPU core (dotted: capacity)", ylabel="p99 latency, ms", yscale="log")
    panel.legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, help="requests per second; prints what they need and writes nothing")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of your own measured CSV files")
    parser.add_argument("--batch-size", type=int, default=16, help="largest batch of the service")
    parser.add_argument("--request-ms", type=float, default=0.0, help="what a request takes beside the network")
    parser.add_argument("--price", type=float, default=DOLLARS_PER_HOUR["CPU core"], help="dollars per replica hour")
    parser.add_argument("--utilisation", type=float, default=UTILISATION)
    own = parser.parse_args()
    if own.rate:
        for replica in staged(own.folder, own.batch_size, own.request_ms / 1e3, own.price):
            made = {name: cell for name, cell in replica.plan(own.rate, own.utilisation).items() if name != "device"}
            print(", ".join(f"{name} {cell}" for name, cell in made.items() if cell != ""))
        return
    replicas = measured()
    services = compared(replicas)
    write_rows(RESULTS / "capacity.csv", planned(replicas))
    write_rows(RESULTS / "capacity_service.csv", services)
    draw(replicas, services, FIGURE)


if __name__ == "__main__":
    main()
