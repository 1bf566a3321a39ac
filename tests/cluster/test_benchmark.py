"""The figures about Ray and large recordings come from results, and the benchmark counts faults."""

import importlib.util
import os
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

ROOT = Path(__file__).parents[2]


def benchmark(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(module)
    return module


def test_a_sample_spends_what_the_whole_recording_does(tmp_path, monkeypatch):
    large = benchmark("large_calibration")
    monkeypatch.setattr(large, "PARTITION", 1000)
    sample, whole = large.measure(tmp_path, 3500, "50%", sample=2000)
    assert len(list((tmp_path / "3500").glob("part-*.npz"))) == 4
    assert (sample["drawn"], whole["drawn"]) == (2000, 3500)
    assert sample["held"] > 10
    assert sample["spent"] == pytest.approx(whole["spent"], abs=0.05)
    assert sample["accuracy"] == pytest.approx(whole["accuracy"], abs=0.05)


def test_rows_that_are_missing_or_double_are_counted(tmp_path):
    job = benchmark("cluster").Job(tmp_path, 6, 2, tmp_path)
    for index, samples in enumerate([[0, 1, 2], [2, 3, 3]]):
        parquet.write_table(pa.table({"sample": samples}), tmp_path / f"part-0000{index}.parquet")
    assert job.counts() == (2, 2)


def test_memory_of_a_process_is_read_from_the_system():
    held = benchmark("cluster").held
    assert 10 < held(os.getpid(), "RssAnon") <= held(os.getpid()) < 1e5
    assert held(2**30) == 0.0


@pytest.mark.parametrize("what", ["two workers over one, all busy", "rows missing, a worker killed -9 half-way"])
def test_the_results_hold_the_measures_of_the_goals(what):
    assert what in (ROOT / "results" / "cluster.csv").read_text()
