"""The committed benchmark: no method beats auto, rows are those of this code, recordings make a small package."""

import csv
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from alight import HeadOutputs, calibrate
from alight.benchmark import ALL, SHARES, benchmark
from alight.cli.tables import BENCHMARKED
from alight.costs import Costs
from alight.recordings import NAMES as SHIPPED
from alight.recordings import Recording

ROOT = Path(__file__).parents[2]
SEED = 1  # of the committed resplits
BEYOND = 2  # standard errors that are taken for more than noise


def table(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


RESULTS, PLACES, DIFFERENCES = (table(f"benchmark{part}") for part in ("", "_leaderboard", "_differences"))
RESPLITS = int(RESULTS[0]["resplits"])
RECORDINGS = [*dict.fromkeys(row["recording"] for row in RESULTS)]


def gain(method: str, recording: str) -> tuple[float, float]:
    """How far a method is above auto, and the standard error."""
    row = next(each for each in DIFFERENCES if (each["method"], each["recording"]) == (method, recording))
    return float(row["difference"]), float(row["error"])


def test_every_method_has_a_row_for_every_recording_that_allows_it():
    assert {row["method"] for row in RESULTS} == {*BENCHMARKED}
    likely = [name for name in RECORDINGS if name not in SHIPPED and recording(name).labelled.top_classes is not None]
    for row in PLACES:
        assert int(row["recordings"]) == len(likely if "geometric_mean" in row["method"] else RECORDINGS)
    assert {row["resplits"] for row in RESULTS} == {str(RESPLITS)}
    assert {row["reference"] for row in DIFFERENCES} == {"auto"}


def test_auto_is_nearest_to_the_best_of_all_methods_that_have_every_recording():
    places = [row for row in PLACES if int(row["recordings"]) == len(RECORDINGS)]
    assert places[0]["method"] == "auto"
    assert float(places[0]["regret"]) < 0.002  # with combined answers and learned baselines among the rivals


def test_no_method_is_above_auto_on_average_over_all_recordings_beyond_noise():
    whole = {row["method"] for row in PLACES if int(row["recordings"]) == len(RECORDINGS)} - {"auto"}
    assert all(gain(method, ALL)[0] <= BEYOND * gain(method, ALL)[1] for method in whole)


def recording(name: str) -> Recording:
    folder = ROOT / "results" / "recordings" / name
    parts = (HeadOutputs.load(folder / f"{part}.npz") for part in ("calibration", "test"))
    return Recording(*parts, Costs.load(folder / "costs.json"))


def assert_committed(methods, name, shares):
    found = benchmark(methods, {name: recording(name)}, shares=shares, resplits=RESPLITS, seed=SEED).results
    for each in found:
        row = next(
            row
            for row in RESULTS
            if (row["recording"], row["method"], float(row["budget"])) == (name, each.method, each.budget)
        )
        assert each.allowed_accuracy == pytest.approx(float(row["allowed_accuracy"]), abs=1e-4), each


def test_the_committed_rows_of_a_fast_method_are_those_of_this_code():
    assert_committed({"eero": calibrate.eero, "geometric": calibrate.geometric}, "minilm_clinc150", SHARES)


@pytest.mark.slow
def test_the_committed_rows_of_auto_are_those_of_this_code():
    assert_committed({"auto": calibrate.auto}, "minilm_clinc150", (0.5,))


def test_all_recordings_make_a_package_below_60_megabytes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    script = importlib.import_module("pack_recordings")
    script.pack(tmp_path)
    for name in ("pack_recordings", "recorded_cifar100"):
        sys.modules.pop(name, None)
    packed = {path.stem: path.stat().st_size for path in tmp_path.glob("*.npz")}
    assert {*RECORDINGS} - {*packed} == {*SHIPPED}
    assert sum(packed.values()) < 60e6
    for name in packed:
        again, before = Recording.load(tmp_path / f"{name}.npz"), recording(name)
        np.testing.assert_array_equal(again.test.predictions, before.test.predictions)
        assert again.costs.full == before.costs.full
