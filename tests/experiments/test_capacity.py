"""The capacity model: its laws, its queue, and what it predicts beside what was measured."""

import importlib
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "scale.md").read_text()


@pytest.fixture(scope="module")
def capacity():
    """The script as a module."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "experiments"))
        yield importlib.import_module("capacity")
    for name in set(sys.modules) - before:
        if (ROOT / "experiments" / f"{name}.py").exists():
            sys.modules.pop(name)


@pytest.fixture(scope="module")
def replicas(capacity):
    return capacity.measured()


@pytest.fixture(scope="module")
def services(capacity, replicas):
    return capacity.compared(replicas)


def as_read(rows):
    return [{name: str(cell) for name, cell in row.items()} for row in rows]


def test_lines_through_measured_times_are_found_again(capacity):
    sizes = np.array([1.0, 2.0, 4.0])
    assert capacity.line(sizes, 2 + sizes) == pytest.approx([2, 1])
    assert capacity.line(sizes, np.zeros(3)).tolist() == [0, 0]
    assert (capacity.line(sizes, np.array([3.0, 2.0, 1.0])) >= 0).all()


def test_more_load_needs_no_fewer_replicas(replicas):
    for replica in replicas:
        counts = [replica.replicas(rate) for rate in replica.capacity * np.linspace(0.1, 3.3, 9)]
        assert counts == sorted(counts)
        assert counts[0] == 1
        assert counts[-1] == 5  # 3.3 / 0.7


def test_planned_replicas_stay_below_the_target_utilisation(replicas):
    for replica in replicas:
        for target in (0.5, 0.9):
            assert 7.3 / replica.replicas(7.3 * replica.capacity, target) <= target


@pytest.mark.parametrize("timed", [True, False])
def test_exits_that_every_sample_passes_cost_at_least_the_full_network(capacity, timed):
    stages, batches, _ = capacity.tables_of(ROOT / "results")
    counts, end = np.arange(1.0, 65.0), np.eye(8)[-1]
    full = capacity.full_seconds(stages, batches if timed else [], counts)
    assert (capacity.exit_seconds(stages, batches if timed else [], counts, end) >= full).all()


def test_earlier_exits_never_make_a_batch_slower(capacity):
    stages, batches, _ = capacity.tables_of(ROOT / "results")
    counts = np.arange(1.0, 65.0)
    times = [capacity.exit_seconds(stages, batches, counts, np.eye(8)[index]) for index in range(8)]
    assert (np.diff(times, axis=0) > 0).all()
    mixed = capacity.exit_seconds(stages, batches, counts, np.full(8, 1 / 8))
    assert (capacity.exit_seconds(stages, batches, counts, np.full(8, 1 / 8), stays=1) >= mixed).all()


def test_exit_shares_that_do_not_fit_are_refused(capacity):
    stages, batches, _ = capacity.tables_of(ROOT / "results")
    for shares in (np.full(7, 1 / 7), np.full(8, 0.2)):
        with pytest.raises(SystemExit, match="give 8, one per exit, with the sum 1"):
            capacity.exit_seconds(stages, batches, np.ones(1), shares)


def test_predicted_p99_grows_with_utilisation(capacity, replicas):
    for replica in replicas[:2]:
        full = len(replica.slow) / replica.slow[-1]
        values = [capacity.latency(share * full, replica.slow) for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.97)]
        assert values == sorted(values)
        assert values[0] >= replica.slow[0]
        assert capacity.latency(full, replica.slow) == float("inf")


def test_single_requests_wait_as_in_an_m_d_1_queue(capacity):
    """Of requests served one by one in a second each, 1 - load do not wait, (1 - load) e^load wait at most a second."""
    for load in (0.3, 0.6, 0.8):
        quantile = (1 - load) * np.exp(load)
        assert capacity.latency(load, np.ones(1), 0.98 * (1 - load)) == pytest.approx(1)
        assert capacity.latency(load, np.ones(1), 1.03 * (1 - load)) > 1
        assert capacity.latency(load, np.ones(1), quantile) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("load", [0.4, 0.8, 0.93])
def test_the_queue_of_batches_is_within_a_tenth_of_a_simulation(capacity, load):
    seconds = 0.5 + 0.2 * np.arange(1.0, 9.0)
    rate = load * len(seconds) / seconds[-1]
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, size=100_000))
    delays, first, free = [], 0, 0.0
    while first < len(arrivals):
        start = max(free, arrivals[first])
        last = min(int(np.searchsorted(arrivals, start, side="right")), first + len(seconds))
        free = start + seconds[last - first - 1]
        delays.append(free - arrivals[first:last])
        first = last
    for quantile in (0.5, 0.99):
        expected = np.quantile(np.concatenate(delays), quantile)
        assert capacity.latency(rate, seconds, quantile) == pytest.approx(expected, rel=0.1)


def test_energy_counts_what_idles_and_what_requests_take_beyond(capacity):
    replica = capacity.Replica("H200", "full network", np.array([0.005]), np.array([0.005]), 3.6, 0.3, 20.0)
    busy = replica.plan(200 * 0.98, utilisation=0.98)
    assert float(busy["wh_per_million"]) == pytest.approx((0.3 - 20 / 200 + 20 / 196) / 3600 * 1e6, abs=0.1)
    assert float(busy["dollars_per_million"]) == pytest.approx(3.6 / 3600 / 196 * 1e6, abs=1e-3)
    assert replica.replicas(100, utilisation=0.25) == 2


def test_whole_batches_take_what_was_measured(capacity):
    stages, batches, shares = capacity.tables_of(ROOT / "results")
    sizes = capacity.column(batches, "batch_size")
    full = capacity.full_seconds(stages, batches, sizes)
    assert full == pytest.approx(capacity.column(batches, "dense_ms") / 1e3)
    # Timed under a policy of half of the time, which spends nearly what the service's policy does.
    exits = capacity.exit_seconds(stages, batches, sizes, shares)
    assert exits == pytest.approx(capacity.column(batches, "exits_ms") / 1e3, rel=0.25)


def test_committed_results_are_those_of_the_script(capacity, replicas, services):
    assert as_read(capacity.planned(replicas)) == capacity.rows(ROOT / "results" / "capacity.csv")
    assert as_read(services) == capacity.rows(ROOT / "results" / "capacity_service.csv")


def test_the_answer_on_the_page_is_that_of_the_results(capacity):
    committed = capacity.rows(ROOT / "results" / "capacity.csv")
    found = {(row["device"], row["served_by"], row["requests_per_second"]): row for row in committed}
    full, exits = (found["CPU core", name, "10000"] for name in ("full network", "exits"))
    saved = exits["replicas_saved"].replace("%", " %")
    answer = f"{full['replicas']} replicas with the full network and {exits['replicas']} with exits: {saved} fewer"
    assert answer in PAGE
    mixes = [found["H200", f"exits, {name} mix", "1000000"] for name in ("uniform", "early")]
    low, high = (row["replicas_saved"].replace("%", "") for row in mixes)
    assert f"{low} to {high} % fewer replicas" in PAGE
    whole = float(found["H200", "full network", "1000000"]["wh_per_million"])
    low, high = (f"{100 * (1 - float(row['wh_per_million']) / whole):.0f}" for row in mixes)
    assert f"{low} to {high} % less energy" in PAGE


def test_committed_exit_shares_are_those_of_the_recording(capacity):
    shares = importlib.import_module("capacity_inputs").share_rows()
    committed = capacity.rows(ROOT / "results" / "capacity_shares.csv")
    assert [f"{row['share']:.4f}" for row in shares] == [row["share"] for row in committed]


def test_the_measured_service_is_predicted_within_the_factors_that_the_page_states(services):
    assert "within 20 %" in PAGE
    assert "within a factor of 2" in PAGE
    for row in services:
        assert 1 / 1.2 < float(row["predicted_capacity"]) / float(row["measured_capacity"]) < 1.2
        if row["predicted_p99_ms"]:
            assert 0.5 < float(row["predicted_p99_ms"]) / float(row["measured_p99_ms"]) < 2
        else:
            assert float(row["measured_p99_ms"]) > 2000  # overloaded, and it was
    assert sum(bool(row["predicted_p99_ms"]) for row in services) == 13


def test_your_own_numbers_are_printed(capacity, tmp_path):
    for name in ("stages", "shares"):
        (tmp_path / f"capacity_{name}.csv").write_text((ROOT / "results" / f"capacity_{name}.csv").read_text())
    command = [sys.executable, ROOT / "experiments" / "capacity.py", "--folder", tmp_path, "--rate", "500"]
    full, exits = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert full.startswith("served_by full network, requests_per_second 500, replica_capacity ")
    assert exits.startswith("served_by exits, requests_per_second 500, replica_capacity ")


@pytest.mark.slow
def test_the_figure_is_drawn_from_results_shown_and_small(capacity, replicas, services, tmp_path):
    capacity.draw(replicas, services, tmp_path / "capacity.svg")
    assert ElementTree.fromstring((tmp_path / "capacity.svg").read_text()).tag.endswith("svg")
    assert "(figures/capacity.svg)" in PAGE
    assert capacity.FIGURE.stat().st_size < 80_000
