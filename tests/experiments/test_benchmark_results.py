"""The committed benchmark: what its page says is what its tables say, and its recordings make a small package."""

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
PAGE = " ".join((ROOT / "docs" / "benchmark.md").read_text().split())
SEED = 1  # of the committed resplits
BEYOND = 2  # standard errors that are taken for more than noise


def table(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


RESULTS, PLACES, DIFFERENCES = (table(f"benchmark{part}") for part in ("", "_leaderboard", "_differences"))
RESPLITS = int(RESULTS[0]["resplits"])
RECORDINGS = [*dict.fromkeys(row["recording"] for row in RESULTS)]
TEXTS = [name for name in RECORDINGS if name.startswith("minilm")]
FROZEN = [name for name in RECORDINGS if "frozen" in name]
KINDS = {
    "heads on a frozen backbone": FROZEN,
    "networks trained with their exits": [name for name in RECORDINGS if name not in (*FROZEN, *TEXTS)],
    "texts": TEXTS,
}


def points(value: float) -> str:
    return f"{100 * value:.2f}"


def gain(method: str, recording: str) -> tuple[float, float]:
    """How far a method is above auto, and the standard error."""
    row = next(each for each in DIFFERENCES if (each["method"], each["recording"]) == (method, recording))
    return float(row["difference"]), float(row["error"])


def above_auto() -> list[tuple[str, str]]:
    """Recordings and methods that are above auto beyond noise."""
    rows = [(row, *gain(row["method"], row["recording"])) for row in DIFFERENCES]
    return [(row["recording"], row["method"]) for row, value, error in rows if value > BEYOND * error]


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


def test_the_page_says_how_far_auto_is_from_the_best():
    auto = next(row for row in PLACES if row["method"] == "auto")
    assert f"{points(float(auto['regret']))} points below the best row of each recording and budget on average" in PAGE
    assert f"{points(float(auto['worst_regret']))} on its worst recording" in PAGE
    assert f"{len(RECORDINGS)} recordings, {RESPLITS} splits of each" in PAGE


def test_the_page_says_how_far_auto_is_above_the_old_default():
    for kind, names in KINDS.items():
        mean = -float(np.mean([gain("eero", name)[0] for name in names]))
        assert f"{points(mean)} points on {kind}" in PAGE
    assert f"{points(-gain('eero', ALL)[0])} points on all together" in PAGE


def test_the_page_names_each_method_that_is_above_auto_beyond_noise():
    listed = PAGE.split("Above `auto` by more than two standard errors:")[1].split(".")[0]
    assert listed.count("`") == 4 * len(above_auto())
    for recording, method in above_auto():
        assert f"`{method}` on `{recording}`" in listed


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
    assert_committed({"eero": calibrate.eero, "geometric": calibrate.geometric}, "minilm_banking77", SHARES)


@pytest.mark.slow
def test_the_committed_rows_of_auto_are_those_of_this_code():
    assert_committed({"auto": calibrate.auto}, "minilm_banking77", (0.5,))


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
