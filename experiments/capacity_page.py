"""The tables of docs/scale.md, filled from results/.

    python experiments/capacity_page.py        # seconds; a test holds the page against this

Each table stands between the markers of its name.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from capacity import BUDGETS, HEADROOM, PEAK, bearable, device_of, devices_for
from capacity_devices import (
    GPU_NETWORK,
    GPU_SIZE,
    exits_asked,
    first_share,
    fit_errors,
    gpu_rows,
    half_of_the_time,
    head_share,
    mixed_shares,
)
from capacity_figures import KINDS, LOOKS, chosen, column
from capacity_queue import DAY
from recorded_cifar100 import RESULTS, rows

from alight.files import write_text

PAGE = RESULTS.parent / "docs" / "scale.md"
ENERGY = RESULTS / "energy_cuda.csv"
FLEETS = (10**6, 10**8, 10**9)  # images a day
PIXELS = {"cpu": 32, "h200": 224}
BENCHMARKED = {"resnet50": "ResNet-50, 224 px", "convnext_tiny": "ConvNeXt-T, 224 px"}
INSTEAD = {  # of results/instead.csv
    "ResNet-18 with exits, all of it": "plain network",
    "alight, half of the FLOPs": "half of the FLOPs",
    "alight, planned to lose 0.01": "planned to lose a point of accuracy",
}
Rows = Sequence[dict[str, str]]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Energy:
    """What a device draws when it idles, and joules and images a second at shares of the plain network's time."""

    idle: float  # watts
    shares: Floats
    joules: Floats
    rates: Floats

    @classmethod
    def of(cls, network: str) -> "Energy | None":
        """As measured in the largest batches, None where it was not."""
        if not (own := metered(network)):
            return None
        own = sorted(own, key=lambda row: float(row["time_share"]))
        parts = (column(own, name) for name in ("time_share", "joules_per_image", "images_per_second"))
        return cls(float(own[0]["watts_idle"]), *parts)

    def kilowatt_hours(self, images: float, devices: int, share: float) -> float:
        """Of a day: what idling devices draw, and what images take beyond that."""
        joules, rate = (float(np.interp(share, self.shares, each)) for each in (self.joules, self.rates))
        return (devices * DAY * self.idle + images * (joules - self.idle / rate)) / 3.6e6


def metered(network: str) -> Rows:
    """What was measured of a network's energy, in the largest batches."""
    found = [row for row in rows(ENERGY) if row["model"] == network] if ENERGY.exists() else []
    largest = max((int(row["batch_size"]) for row in found), default=0)
    return [row for row in found if int(row["batch_size"]) == largest]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    parts = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(part) + " |" for part in parts)


def made(own: Rows) -> str:
    """Where, when and with what rows were made."""
    first, commits = own[0], ", ".join(dict.fromkeys(row["commit"] for row in own))
    where = first["hardware"] if first.get("device", "cpu") in KINDS else first["device"]
    days = " and ".join(sorted({row["date"] for row in own}))
    return f"Run on {days}: {where}; {first['versions']}; commit {commits}."


def inputs() -> str:
    """Images a second and joules of devices that were measured."""
    lines = []
    for network, title in BENCHMARKED.items():
        wanted = {"model": network, "exits": "4", "batch_size": str(GPU_SIZE)}
        own = [row for row in rows(RESULTS / "runtime_cuda.csv") if wanted.items() <= row.items()]
        for mode in ("eager", "compiled"):
            lines += _benchmarked(network, title, mode, [row for row in own if row["mode"] == mode])
    for row in rows(RESULTS / "instead.csv"):
        if row["name"] in INSTEAD:
            plain = next(each for each in rows(RESULTS / "instead.csv") if INSTEAD.get(each["name"]) == "plain network")
            faster = float(row["per_second"]) / float(plain["per_second"])
            rate = f"{float(row['per_second']):,.0f}"
            lines.append(["two CPU cores", "ResNet-18, 32 px", "64", INSTEAD[row["name"]], rate, f"{faster:.2f}", "–"])
    joules = (
        f"joules an image, batch {found[0]['batch_size']}" if (found := metered(GPU_NETWORK)) else "joules an image"
    )
    header = ["device", "network", "batch", "served by", "images a second", "times the plain network", joules]
    sources = [[*gpu_rows(), *found], rows(RESULTS / "instead.csv")]
    return f"{markdown(header, lines)}\n\n" + "\n".join(made(each) for each in sources)


def _benchmarked(network: str, title: str, mode: str, own: Rows) -> list[list[str]]:
    """The plain network and the benchmarked mixes, medians over all runs."""
    shares = mixed_shares(network)
    spelled = title if mode == "eager" else f"{title}, compiled"
    dense = float(np.median(column(own, "dense_per_second")))
    found = [("plain network", dense, 1.0, "dense")]
    for mix, share in shares.items():
        mixed = [row for row in own if row["mix"] == mix]
        rate, speedup = (float(np.median(column(mixed, name))) for name in ("per_second", "speedup"))
        found.append((f"{share:.0%} of the FLOPs, by lot", rate, speedup, mix))
    lines = []
    for name, rate, speedup, mix in found:
        joules = _joules(network, mix) if mode == "eager" else "–"
        lines.append(["H200", spelled, str(GPU_SIZE), name, f"{rate:,.0f}", f"{speedup:.2f}", joules])
    return lines


def _joules(network: str, mode: str) -> str:
    own = [row for row in metered(network) if row["mode"] == mode]
    return f"{float(own[0]['joules_per_image']):.4f}" if own else "–"


def model() -> str:
    """Batches as they were timed, and as straight lines say."""
    own, device = rows(RESULTS / "capacity_batches.csv"), device_of("cpu")
    policy, lines = half_of_the_time(rows(RESULTS / "capacity_stages.csv")), []
    for row in own:
        size = int(row["batch_size"])
        alone = float(row["modelled_ms"])
        told = [float(row["dense_ms"]), 1e3 * device.dense_seconds(size), float(row["exits_ms"]), alone]
        told.append(alone + 1e3 * device.asking * exits_asked(policy, size))
        lines.append([row["batch_size"], *(f"{each:.1f}" for each in told)])
    header = ["images", "plain network, ms", "modelled", "with exits, ms", "stages and heads alone", "and asking"]
    return f"{markdown(header, lines)}\n\n{made(own)}"


def gpu() -> str:
    """The fit to the GPU's mixes, in words."""
    measured, costs = gpu_rows(), device_of("h200").costs
    errors = fit_errors(measured)
    first = costs.cumulative()[0] / costs.full
    return (
        f"For ResNet-50 on the H200 `a` is {first_share(measured):.3f} and a head takes {head_share(measured):.2%} of"
        f" the plain network's time; modelled times of {len(errors)} measured runs are off by"
        f" {np.abs(errors).max():.1%} at most. Hence half of the FLOPs is about {time_of_half():.0%} of the time there,"
        f" and the first recorded exit alone {first:.0%}: a budget of half of the *time* cannot be met on that device."
    )


def time_of_half() -> float:
    """The share of the GPU's time that half of the FLOPs takes, an average of three heads asked."""
    measured = gpu_rows()
    first = first_share(measured)
    return first + (1 - first) * 0.5 + 3 * head_share(measured)


def capacity() -> str:
    """Devices, energy and traffic for fleets of every size."""
    lines = []
    for images in FLEETS:
        for kind, title in KINDS.items():
            device = device_of(kind)
            for how in ("dense", "stream"):
                rate = bearable(kind, how)
                share = 1.0 if how == "dense" else device.costs.budget(BUDGETS[kind]) / device.costs.full
                exact, fleet = images / DAY * PEAK / (HEADROOM * rate), devices_for(images, rate)
                energy = Energy.of(GPU_NETWORK) if kind == "h200" else None
                power = f"{energy.kilowatt_hours(images, fleet, share):,.1f}" if energy else "–"
                ingress = images / DAY * PEAK * 3 * PIXELS[kind] ** 2 * 8 / 1e9
                served = "plain network" if how == "dense" else f"exits, {BUDGETS[kind].replace('%', ' %')} of the time"
                lines.append(
                    [
                        f"{images:,}",
                        title,
                        served,
                        f"{rate:,.0f}",
                        f"{fleet:,} ({exact:,.2f})",
                        power,
                        f"{ingress:.2g}",
                    ]
                )
    header = ["images a day", "device", "served by", "bears, images a second", "devices (exactly)", "kWh a day"]
    return f"{markdown([*header, 'pixels in at the peak, Gbit/s'], lines)}\n\n{made(chosen('load'))}"


def short() -> str:
    """What it comes to for a billion images a day, in words."""
    said = []
    for kind, title in KINDS.items():
        exact = [FLEETS[-1] / DAY * PEAK / (HEADROOM * bearable(kind, how)) for how in ("dense", "stream")]
        right = [float(chosen("day", device=kind, serving=how)[-1]["accuracy"]) for how in ("dense", "stream")]
        said.append(
            f"- **{title}**: a billion images a day need {exact[0]:,.1f} devices with the plain network and"
            f" {exact[1]:,.1f} with exits at {BUDGETS[kind].replace('%', ' %')} of its time,"
            f" {1 - exact[1] / exact[0]:.0%} fewer; {right[0]:.1%} and {right[1]:.1%} of the recorded network's answers"
            " are right."
        )
    energy, share = Energy.of(GPU_NETWORK), float(BUDGETS["h200"].removesuffix("%")) / 100
    if energy:
        joules = [float(np.interp(each, energy.shares, energy.joules)) for each in (1.0, share)]
        said.append(
            f"- **Energy**: on the H200 an image takes {1e3 * joules[0]:.1f} mJ, and {1e3 * joules[1]:.1f} mJ at that"
            f" budget, {1 - joules[1] / joules[0]:.0%} less; an idle device draws {energy.idle:.0f} W all the same."
        )
    kept, plain = (chosen("drift", device="cpu", serving=how)[0] for how in ("stream", "plain"))
    said.append(
        "- **Drift** that makes images half as dear again, in half an hour at the peak: plain thresholds spend"
        f" {float(plain['spent_of_budget']):.0%} of the budget and answer 99 % within {_time(float(plain['p99_ms']))};"
        f" `stream` spends {float(kept['spent_of_budget']):.1%}, answers within {_time(float(kept['p99_ms']))}, and"
        f" rings when images are {float(kept['alarm_dearer']) - 1:.0%} dearer, {float(kept['alarm_seconds']):.0f} s"
        " after it began."
    )
    return "\n".join(said)


def service() -> str:
    """A service that was measured, and what the simulation says of it."""
    own = chosen("service")
    lines = []
    for row in own:
        pairs = [
            f"{_time(float(row[f'measured_{name}']))} / {_time(float(row[f'simulated_{name}']))}"
            for name in ("p50_ms", "p99_ms")
        ]
        both = f"{float(row['measured_capacity']):.1f} / {float(row['simulated_capacity']):.1f}"
        named = "plain network" if row["service"] == "dense" else "exits, contract stream"
        lines.append([named, f"{float(row['load']):.0%}", f"{float(row['rate']):.1f}", *pairs, both])
    header = ["service", "of the dense capacity", "images a second", "half within, measured / simulated"]
    header += ["99 % within, measured / simulated", "capacity, measured / simulated"]
    told = f"Beside the network a request takes {float(own[0]['entrance_ms']):.1f} ms by the dense service's capacity."
    return f"{markdown(header, lines)}\n\n{told} {made(own)}"


def part_table(part: str) -> str:
    """Every device and way to serve of a part."""
    own = chosen(part)
    header = [
        "device",
        "served by",
        "devices",
        "spent, % of the budget",
        f"dearest {1000:,} in a row",
        "ahead, full passes",
    ]
    header += ["half within", "99 % within", "refused", "accuracy", "batch", "busy"]
    header += ["alarm"] if any(row["alarm_images"] for row in own) else []
    lines = []
    for row in own:
        spent = [f"{100 * float(row[name]):.1f}" for name in ("spent_of_budget", "worst_window")]
        within = [_time(float(row[name])) for name in ("p50_ms", "p99_ms")]
        shares = [f"{float(row[name]):.1%}" for name in ("refused", "accuracy")]
        line = [KINDS[row["device"]].split(",")[0], LOOKS[row["serving"]].label, row["devices"], *spent]
        line += [
            _ahead(row),
            *within,
            *shares,
            f"{float(row['batch']):.0f}",
            f"{float(row['busy']):.0%}",
        ]
        lines.append(line + ([_alarm(row)] if header[-1] == "alarm" else []))
    ratio = "; ".join(
        f"{KINDS[kind].split(',')[0]}: {float(first['seconds']):,.0f} s simulated, one image of"
        f" {1 / float(first['of_the_stream']):,.0f}"
        for kind in KINDS
        for first in chosen(part, device=kind, serving="stream")[:1]
    )
    return f"{markdown(header, lines)}\n\n{ratio}. {made(own)}"


def _ahead(row: dict[str, str]) -> str:
    return "–" if row["serving"] == "dense" else f"{max(0.0, float(row['ahead'])):,.2f}"


def _alarm(row: dict[str, str]) -> str:
    if not row["alarm_images"]:
        return "–"
    return (
        f"after {int(row['alarm_images']):,} images, {float(row['alarm_seconds']):,.1f} s:"
        f" {float(row['alarm_dearer']) - 1:.0%} dearer"
    )


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1e3:.1f} s"


TABLES: dict[str, Callable[[], str]] = {
    "short": short,
    "inputs": inputs,
    "model": model,
    "gpu": gpu,
    "capacity": capacity,
    "service": service,
    "day": lambda: part_table("day"),
    "burst": lambda: part_table("burst"),
    "drift": lambda: part_table("drift"),
}


def page(text: str) -> str:
    """The page with its tables."""
    for marker, shown in TABLES.items():
        start, end = f"<!-- {marker} -->\n", f"\n<!-- end of {marker} -->"
        before, found, rest = text.partition(start)
        if not found or end not in rest:
            raise SystemExit(f"{PAGE.name} has no place {start.strip()} ... {end.strip()}: make one")
        text = before + start + shown() + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    write_text(PAGE, page(Path(PAGE).read_text()))
