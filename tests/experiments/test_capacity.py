"""The capacity model: its queue is exact, its policies are the real ones, its page holds what results give."""

import heapq
import importlib
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from alight import HeadOutputs, calibrate
from alight.policies.route import replay

ROOT = Path(__file__).parent.parent.parent
NAMES = (
    "recorded_cifar100",
    "figure_style",
    "capacity_devices",
    "capacity_queue",
    "capacity",
    "capacity_figures",
    "capacity_page",
)


@pytest.fixture(scope="module")
def scripts():
    """The scripts, by name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "experiments"))
        yield {name: importlib.import_module(name) for name in NAMES}
        for name in NAMES:
            sys.modules.pop(name)


def tiny_device(scripts, **changed):
    """A device with the recording's eight exits, on which a stage takes as long as any other."""
    devices = scripts["capacity_devices"]
    lines = devices.Lines(*(np.full(8, value) for value in (2e-4, 1e-3, 1e-5, 1e-5)))
    given = {"dense_fixed": 1.6e-3, "dense_each": 8e-3, "asking": 0.0, "lost": 1.0, "batch_size": 16}
    given |= {"max_wait": 0.01, "queue": 64, "target": 0.5}
    return devices.Device("tiny", "tiny", lines, **given | changed)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_single_images_of_one_length_wait_as_the_formula_of_pollaczek_and_khinchin_says(scripts, load):
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / load, size=150_000))
    found = scripts["capacity_queue"].batches(arrivals, lambda taken: 1.0, 1, 0.0, 10**6)
    waits = np.array([start - arrivals[taken[0]] for start, _, taken, _ in found])
    assert waits.mean() == pytest.approx(load / (2 * (1 - load)), rel=0.04)


def event_by_event(arrivals, seconds, batch_size, max_wait, queue):
    """The same queue, one event after another: an image comes, patience ends, a batch is done."""
    events = [(moment, 1, index) for index, moment in enumerate(arrivals)]
    heapq.heapify(events)
    waiting, busy, found, refused = [], False, [], []
    while events:
        now, kind, which = heapq.heappop(events)
        if kind == 0:
            busy = False
        elif kind == 1 and len(waiting) < queue:
            waiting.append(which)
            heapq.heappush(events, (now + max_wait, 2, which))
        elif kind == 1:
            refused.append(which)
        if not busy and waiting and (len(waiting) >= batch_size or now >= arrivals[waiting[0]] + max_wait):
            taken, waiting = waiting[:batch_size], waiting[batch_size:]
            busy = True
            heapq.heappush(events, (now + seconds(len(taken)), 0, -1))
            found.append((now, taken))
    return found, refused


@pytest.mark.parametrize("seed", range(30))
def test_batches_are_those_of_a_simulation_event_by_event(scripts, seed):
    rng = np.random.default_rng(seed)
    batch_size, max_wait, rate = int(rng.integers(1, 9)), float(rng.uniform(0, 2)), float(rng.uniform(0.5, 6))
    queue = batch_size + int(rng.integers(0, 12))
    arrivals = np.cumsum(rng.exponential(1 / rate, size=400))

    def seconds(count):
        return 0.5 + 0.2 * count

    found = list(
        scripts["capacity_queue"].batches(arrivals, lambda taken: seconds(len(taken)), batch_size, max_wait, queue)
    )
    expected, refused = event_by_event(arrivals, seconds, batch_size, max_wait, queue)
    assert [taken.tolist() for _, _, taken, _ in found] == [taken for _, taken in expected]
    assert [start for start, *_ in found] == pytest.approx([start for start, _ in expected])
    assert np.concatenate([each for *_, each in found]).astype(int).tolist() == refused


def test_a_day_has_its_mean_its_peak_and_its_bursts(scripts):
    queue = scripts["capacity_queue"]
    calm, hours = queue.Traffic(5.0, 3.0), np.arange(24) * 3600.0
    assert calm.rates(np.linspace(0, queue.DAY, 10_000, endpoint=False)).mean() == pytest.approx(5)
    assert calm.rates(hours).argmax() == queue.PEAK_HOUR
    assert calm.rates(hours).max() == pytest.approx(15)
    burst = queue.Traffic(5.0, 3.0, (queue.Burst(7200.0, 600.0, 4.0),))
    changed = burst.rates(hours) / calm.rates(hours)
    assert changed.tolist() == [4.0 if hour == 2 else 1.0 for hour in range(24)]


def test_arrivals_come_at_the_rate_of_the_moment(scripts):
    queue = scripts["capacity_queue"]
    traffic = queue.Traffic(400.0, 2.0, (queue.Burst(43_200.0, 7200.0, 3.0),))
    arrivals = traffic.arrivals(0.0, queue.DAY, 300.0, np.random.default_rng(0))  # a day in 288 seconds
    found, edges = np.histogram(arrivals, bins=np.arange(0, 289, 12))
    expected = [traffic.rates(300 * np.linspace(*span, 200)).mean() * 12 for span in pairwise(edges)]
    assert (np.diff(arrivals) >= 0).all()
    assert np.abs((found - expected) / np.sqrt(expected)).max() < 4


def test_a_device_that_gets_its_share_by_lot_stands_for_its_fleet(scripts):
    queue, rng = scripts["capacity_queue"], np.random.default_rng(0)
    whole = queue.Traffic(300.0, 1.0).arrivals(0.0, 200.0, 1.0, rng)
    lots = rng.integers(3, size=len(whole))
    alone = queue.Traffic(100.0, 1.0).arrivals(0.0, 200.0, 1.0, rng)

    def delays(arrivals):
        found = queue.batches(arrivals, lambda taken: 0.02 + 0.006 * len(taken), 16, 0.02, 10**6)
        return np.concatenate([end - arrivals[taken] for _, end, taken, _ in found])

    fleet = np.concatenate([delays(whole[lots == lot]) for lot in range(3)])
    assert np.quantile(delays(alone), [0.5, 0.9]) == pytest.approx(np.quantile(fleet, [0.5, 0.9]), rel=0.05)


def test_harder_images_cost_as_much_more_as_is_asked(scripts):
    spent = np.random.default_rng(0).uniform(1, 4, size=500)
    weights = scripts["capacity_queue"].harder(spent, 1.3)
    assert weights @ spent == pytest.approx(1.3 * spent.mean())
    assert weights.sum() == pytest.approx(1)


@pytest.mark.parametrize("contract", ["stream", "batch", "mean"])
def test_the_policy_decides_in_the_queue_as_it_does_in_replay(scripts, contract):
    queue, own, device = scripts["capacity_queue"], scripts["capacity"].stream(), tiny_device(scripts)
    given = (device.costs, "60%", own.calibration, own.certifying)
    policy = calibrate.CONTRACTS[contract](calibrate.eero)(*given, spend_all=True)
    rows = np.random.default_rng(0).integers(len(own.table), size=320)
    serving = queue.Exits(device, policy, own.table)
    spent = [serving(part)[2] for part in rows.reshape(10, 32)]
    assert np.array_equal(np.concatenate(spent), replay(policy, own.table.take(rows), batch_size=32).spent)


def test_a_batch_takes_what_the_stages_take_that_anyone_reaches(scripts):
    device = tiny_device(scripts)
    everyone, nobody = np.full(8, 5), np.array([5, 0, 0, 0, 0, 0, 0, 0])
    assert device.seconds(nobody) == pytest.approx(2.1e-4 + 5 * 1.01e-3)
    assert device.seconds(everyone) == pytest.approx(8 * (2.1e-4 + 5 * 1.01e-3))
    assert device.dense_seconds(5) == pytest.approx(8 * (2e-4 + 5e-3))
    assert tiny_device(scripts, asking=0.1).seconds(nobody) == pytest.approx(0.1 + device.seconds(nobody))
    assert tiny_device(scripts, asking=0.1, lost=2.0).seconds(everyone) == pytest.approx(
        1.6 + 2 * device.seconds(everyone)
    )


def test_straight_lines_are_found_again(scripts):
    devices = scripts["capacity_devices"]
    sizes = (1, 4, 16)
    rows = [
        {"exit": name, "batch_size": size, "stage_ms": 3 + own * size, "head_ms": 0.0 if name == "end" else 1.0}
        for size in sizes
        for name, own in (("a", 0.5), ("end", 2.0))
    ]
    lines = devices.Lines.of_rows(rows)
    assert lines.stage_fixed == pytest.approx([3e-3, 3e-3])
    assert lines.stage_each == pytest.approx([0.5e-3, 2e-3])
    assert lines.head_fixed == pytest.approx([1e-3, 0])
    assert lines.costs(16).cumulative() == pytest.approx([3 / 16 + 0.5 + 1 / 16, 6 / 16 + 2.5 + 1 / 16])


def test_full_batches_of_the_core_take_what_was_measured_and_others_nearly(scripts):
    devices = scripts["capacity_devices"]
    core, measured = devices.core(), devices.rows(devices.RESULTS / "capacity_stages.csv")
    policy = devices.half_of_the_time(measured)
    for row in devices.rows(devices.RESULTS / "capacity_batches.csv"):
        size = int(row["batch_size"])
        modelled = float(row["modelled_ms"]) / 1e3 + core.asking * devices.exits_asked(policy, size)
        assert core.dense_seconds(size) == pytest.approx(float(row["dense_ms"]) / 1e3, rel=0.1)
        assert modelled == pytest.approx(float(row["exits_ms"]) / 1e3, rel=1e-6 if size == 16 else 0.25)


def test_the_times_of_the_gpu_are_met_within_three_percent(scripts):
    devices = scripts["capacity_devices"]
    assert np.abs(devices.fit_errors(devices.gpu_rows())).max() < 0.03


def drifting(scripts, monkeypatch, how, seconds=30.0):
    """A tiny device whose images become half as dear again after a third of the time."""
    capacity = scripts["capacity"]
    monkeypatch.setattr(capacity, "device_of", lambda kind: tiny_device(scripts))
    monkeypatch.setitem(capacity.BUDGETS, "cpu", "60%")
    monkeypatch.setattr(capacity, "IMAGES", int(capacity.DAY * 75))  # 75 a second, 150 at the peak: busy, not full
    return capacity.Case("drift", "cpu", how, 1, seconds=seconds).run()


def test_under_drift_a_stream_keeps_its_budget_and_says_so_while_plain_thresholds_overspend(scripts, monkeypatch):
    paced, by_time = drifting(scripts, monkeypatch, "stream")
    assert paced["ahead"] <= 1
    assert paced["spent_of_budget"] <= 1.01
    assert 0 < paced["alarm_images"] < 1500
    assert 0 < paced["alarm_seconds"] < 20
    plain, later = drifting(scripts, monkeypatch, "plain")
    assert plain["alarm_images"] == ""
    assert plain["ahead"] > 10
    assert np.mean([float(row["spent"]) for row in later[-20:]]) > 1.3
    assert np.mean([float(row["spent"]) for row in by_time[-20:]]) < 1.03
    assert plain["p99_ms"] > paced["p99_ms"]


def test_the_dearest_window_is_found(scripts):
    spent = np.ones(5000)
    spent[2000:3000] = 3
    assert scripts["capacity"].worst_window(spent, 2.0) == pytest.approx(1.5)
    assert scripts["capacity"].worst_window(spent[:500], 2.0) == pytest.approx(0.5)


def test_a_fleet_grows_with_its_images(scripts):
    capacity = scripts["capacity"]
    assert capacity.devices_for(capacity.DAY * 70, 100.0) == 2  # 140 a second at the peak, 70 planned for each
    assert capacity.devices_for(1, 100.0) == 1


def test_a_policy_that_closes_exits_is_refused(scripts):
    own, device = scripts["capacity"].stream(), tiny_device(scripts)
    policy = calibrate.best_single_exit(device.costs, "50%", own.calibration)
    with pytest.raises(SystemExit, match="open all of them"):
        scripts["capacity_queue"].Exits(device, policy, own.table)
    assert isinstance(own.table, HeadOutputs)


@pytest.mark.parametrize("how", ["dense", "stream"])
def test_a_row_computed_anew_is_the_committed_one(scripts, how):
    found = next(scripts["capacity"].load_rows("cpu", how))
    expected = scripts["capacity_figures"].chosen("load", device="cpu", serving=how)[0]
    for name, cell in found.items():
        if isinstance(cell, float | int):
            assert cell == pytest.approx(float(expected[name]), rel=1e-3, abs=1e-4), name
        else:
            assert cell == expected[name]


def test_committed_streams_kept_their_bound_and_plain_thresholds_did_not(scripts):
    chosen = scripts["capacity_figures"].chosen
    for part in ("day", "burst", "drift"):
        for row in chosen(part, serving="stream"):
            assert float(row["ahead"]) <= 1
    assert all(row["alarm_images"] for row in chosen("drift", serving="stream"))
    assert all(float(row["ahead"]) > 1 for row in chosen("drift", serving="plain"))


def test_below_capacity_the_simulation_answers_as_the_measured_service_did(scripts):
    calm = [
        row
        for row in scripts["capacity_figures"].chosen("service")
        if float(row["rate"]) < 0.82 * float(row["simulated_capacity"])
    ]
    assert {row["service"] for row in calm} == {"dense", "early"}
    for row in calm:
        for name in ("p50_ms", "p99_ms"):
            assert float(row[f"simulated_{name}"]) == pytest.approx(float(row[f"measured_{name}"]), rel=0.2)


def test_energy_is_what_idles_and_what_images_take_beyond_that(scripts):
    page = scripts["capacity_page"]
    shares, joules, rates = np.array([0.5, 1.0]), np.array([0.2, 0.3]), np.array([400.0, 200.0])
    energy = page.Energy(20.0, shares, joules, rates)
    assert energy.kilowatt_hours(0, 3, 1.0) == pytest.approx(3 * 0.02 * 24)
    assert energy.kilowatt_hours(86_400 * 200, 1, 1.0) == pytest.approx(0.3 * 200 * 24 / 1e3)  # busy all day
    assert energy.kilowatt_hours(3.6e6, 0, 0.75) == pytest.approx(0.25 - 20 / 300)


def test_the_page_on_scale_holds_what_results_give(scripts):
    page = (ROOT / "docs" / "scale.md").read_text()
    assert scripts["capacity_page"].page(page) == page


def test_a_page_without_a_place_for_a_table_is_refused(scripts):
    with pytest.raises(SystemExit, match="has no place <!-- short -->"):
        scripts["capacity_page"].page("# Scale")


def test_figures_of_scale_are_drawn_from_results_alone_shown_and_small(scripts, tmp_path):
    figures, page = scripts["capacity_figures"], (ROOT / "docs" / "scale.md").read_text()
    figures.draw(list(figures.FIGURES), tmp_path)
    for name in figures.FIGURES:
        drawn = ElementTree.fromstring((tmp_path / f"{name}.svg").read_text())
        kept = ROOT / "docs" / "figures" / f"{name}.svg"
        assert drawn.tag.endswith("svg")
        assert f"(figures/{name}.svg)" in page
        assert kept.stat().st_size < 80_000
