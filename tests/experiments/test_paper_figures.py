"""Figures, tables and summaries of the paper: computed anew they are those that are committed."""

import csv
import importlib
import io
import json
import re
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from alight import HeadOutputs
from alight.files import write_arrays

ROOT = Path(__file__).parent.parent.parent
NAMES = (
    "recorded_cifar100",
    "figure_style",
    "paper_tables",
    "paper_figures",
    "paper_seeds",
    "paper_summaries",
    "paper_report",
    "cifar100_ship",
    "cifar100_duplicates",
)


@pytest.fixture(scope="module")
def scripts():
    """The scripts, by name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "experiments"))
        yield {name: importlib.import_module(name) for name in NAMES}
        for name in NAMES:
            sys.modules.pop(name)


def committed(table, **where):
    with (ROOT / "results" / "paper" / f"{table}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == str(value) for key, value in where.items())]


# of 10,000: tables of seeds whose recordings are not here were computed before near ties were ties
FIVE_IMAGES = 5e-4


def assert_same(found, expected, gap=2e-6):
    """Cell by cell; numbers but for their last printed digit."""
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        for name, cell in own.items():
            try:
                assert float(cell) == pytest.approx(float(other[name]), abs=gap), (name, own)
            except ValueError:
                assert cell == other[name]


def written(tables, rows):
    return list(csv.DictReader(io.StringIO(tables.text_of(list(rows)))))


def test_a_sweep_gives_what_is_committed(scripts):
    tables = scripts["paper_tables"]
    methods = ("eero", "geometric", "patience")
    found = written(tables, tables.sweep_rows("convnext_frozen", methods))
    expected = committed("sweep", network="convnext_frozen")
    assert_same(found, [row for row in expected if row["method"] in (*methods, "oracle", "single_exit")])
    every = {row["method"] for row in expected}
    assert every == {*tables.calibrate.METHODS, "oracle", "single_exit"}


@pytest.mark.parametrize(
    ("table", "part", "where"),
    [
        ("two_exits", lambda tables: partial(tables.two_exit_rows, early=(3,)), {"head": 3}),
        ("weights", lambda tables: partial(tables.weight_rows, "convnext_frozen"), {}),
        ("overthinking", lambda tables: partial(tables.overthinking_rows, "msdnet_joint"), {"network": "msdnet_joint"}),
        (
            "temperature",
            lambda tables: partial(tables.temperature_rows, "msdnet_joint", (0.04,)),
            {"network": "msdnet_joint", "temperature": "0.040000"},
        ),
        (
            "gains",
            lambda tables: partial(tables.gain_rows, "msdnet_joint", ("geometric",)),
            {"network": "msdnet_joint", "rival": "geometric"},
        ),
        (
            "calibration_size",
            lambda tables: partial(tables.size_rows, "msdnet_joint", (100,)),
            {"network": "msdnet_joint", "calibration_images": 100},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_table_computed_anew_is_the_committed_one(scripts, table, part, where):
    tables = scripts["paper_tables"]
    assert_same(written(tables, part(tables)()), committed(table, **where))


def test_all_tables_are_committed_with_how_they_were_made(scripts):
    tables = scripts["paper_tables"]
    for name in tables.TABLES:
        assert committed(name)
    made = json.loads((ROOT / "results" / "paper" / "made.json").read_text())
    assert {"hardware", "versions", "date", "commit", "seed", "seconds"} <= set(made)


def test_gains_of_a_seed_with_frozen_heads_are_the_committed_ones(scripts):
    seeds, tables, recorded = scripts["paper_seeds"], scripts["paper_tables"], scripts["recorded_cifar100"]
    found = written(tables, seeds.seed_rows("convnext_frozen", [recorded.load("convnext_frozen")], redraws=2))
    named = ("network", "seed", "method", "rival", "spent")
    expected = {tuple(row[name] for name in named): row for row in committed("frozen_seeds")}
    own = [row for row in found if row["seed"] == "0"]
    assert len(own) == len(committed("frozen_seeds", network="convnext_frozen", seed=0)) > 0
    for row in own:
        other = expected[tuple(row[name] for name in named)]
        for name in ("gain", "low", "high"):
            assert float(row[name]) == pytest.approx(float(other[name]), abs=FIVE_IMAGES)
    alone = [{name: row[name] for name in row if name != "seed"} for row in found if row["seed"] == "mean"]
    assert alone == [{name: row[name] for name in row if name != "seed"} for row in own]  # the mean of one seed


def test_who_leaves_where_is_the_committed_table_and_nobody_is_lost(scripts):
    seeds, tables, recorded = scripts["paper_seeds"], scripts["paper_tables"], scripts["recorded_cifar100"]
    found = written(tables, seeds.share_rows("convnext_frozen", recorded.load("convnext_frozen")))
    assert_same(found, committed("frozen_shares", network="convnext_frozen", seed=0), FIVE_IMAGES)
    for method in ("eero", "geometric", "gaussian"):
        own = [row for row in found if row["method"] == method]
        assert sum(float(row["observed"]) for row in own) == pytest.approx(1, abs=1e-4)
        assert all(float(row[name]) <= float(row["observed"]) for row in own for name in ("right", "right_at_end"))


def test_nothing_is_planned_for_closed_exits_unless_the_budget_asks_for_them(scripts):
    seeds, result = scripts["paper_seeds"], scripts["recorded_cifar100"].load("convnext_frozen")
    ample, scarce = (seeds.first_half_closed(result.costs, budget, result.calibration) for budget in ("90%", "20%"))
    assert not any(ample.exit_rates[:6])
    assert sum(ample.exit_rates) == pytest.approx(1)
    assert scarce.exit_rates == seeds.calibrate.eero(result.costs, "20%", result.calibration).exit_rates


def test_the_best_rival_is_as_good_as_each(scripts):
    found = committed("frozen_seeds", method="eero")
    best = {(row["network"], row["seed"], row["spent"]): row for row in found if row["rival"] == "best"}
    for row in found:
        if row["seed"] != "mean":  # of the seeds: each has its own best
            other = best[row["network"], row["seed"], row["spent"]]
            assert float(other["gain"]) <= float(row["gain"]) + 2e-6


def test_figures_are_drawn_from_results_alone(scripts, tmp_path):
    figures = scripts["paper_figures"]
    names = ["accuracy_budget", "msdnet_budget", "all_methods", "training_modes", "epsilon_aggreg", "front"]
    figures.draw(names, tmp_path)
    for name in names:
        text = (tmp_path / f"{name}.svg").read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "%" in text  # an axis with its unit


def test_every_figure_is_committed_shown_and_small(scripts):
    names = scripts["paper_figures"].FIGURES
    page = (ROOT / "docs" / "experiments.md").read_text()
    assert "(docs/figures/front.svg)" in (ROOT / "README.md").read_text()
    assert "(figures/front.svg)" in (ROOT / "docs" / "index.md").read_text()
    assert sum((ROOT / "docs" / "figures" / f"{name}.svg").stat().st_size for name in names) < 1.2e6
    for name, (_, papers) in names.items():
        assert f"(figures/{name}.svg)" in page or name == "front"
        assert not papers or f"`{papers}`" in page
    shown = set(re.findall(r"\(figures/(\w+)\.svg\)", page))
    assert shown | {"front"} == set(names)


@pytest.mark.parametrize("name", ["claims", "equal_spend", "mean_gains", "frozen_groups"])
def test_a_summary_computed_anew_is_the_committed_one(scripts, name):
    summaries = scripts["paper_summaries"]
    assert name in summaries.SUMMARIES
    text = scripts["paper_tables"].text_of(list(summaries.SUMMARIES[name]()))
    assert text == (ROOT / "results" / "paper" / f"{name}.csv").read_text()


def test_accuracy_between_two_points_is_interpolated_and_beyond_them_there_is_none(scripts):
    accuracy_at = scripts["paper_summaries"].accuracy_at
    own = [{"spent": "0.6", "accuracy": "0.9"}, {"spent": "0.2", "accuracy": "0.5"}]
    assert accuracy_at(own, 0.3) == pytest.approx(0.6)
    assert accuracy_at(own, 0.1) is accuracy_at(own, 0.7) is None


def test_a_small_picture_is_the_same_picture(scripts):
    drawn = (
        '<g id="line2d_1">\n <!-- 5 --> <path d="M 1.23456 2 \nL 3 4 \nz\n" style="fill: none; stroke: #000"/>\n</g>'
    )
    assert scripts["figure_style"].small(drawn) == ('<g><path d="M1.23 2L3 4z" style="fill:none;stroke:#000"/></g>\n')


def test_recordings_are_small_and_keep_their_decisions(scripts, tmp_path, capsys):
    recorded = scripts["recorded_cifar100"]
    package = ROOT / "src" / "alight" / "recordings"
    sizes = {False: 0, True: 0}  # those with log-probabilities, for the benchmark, end in their seed
    seeds = len([*recorded.FOLDER.glob("*_[0-9]")])
    for path in [*recorded.FOLDER.rglob("*"), *package.glob("*.npz")]:
        sizes[path.parent.name[-2:-1] == "_"] += path.stat().st_size if path.is_file() else 0
    assert sizes[False] < 5e6
    assert sizes[True] < 1.5e6 * seeds
    scripts["cifar100_ship"].keep(recorded.FOLDER / "msdnet_joint", tmp_path / "again", ())
    assert " 0 of " in capsys.readouterr().out
    again, before = recorded.Result.of(tmp_path / "again"), recorded.load("msdnet_joint")
    assert np.array_equal(again.test.scores, before.test.scores)
    assert again.run == before.run
    assert "epochs" not in again.run["settings"]


def test_a_narrow_table_is_read_as_any_other(scripts, tmp_path):
    dice = np.random.default_rng(0)
    table = HeadOutputs.from_logits(dice.normal(size=(20, 3, 9)), dice.integers(9, size=20), features=["logit_margin"])
    write_arrays(tmp_path / "table.npz", "HeadOutputs", scripts["cifar100_ship"].narrow(table, ["logit_margin"]))
    read = HeadOutputs.load(tmp_path / "table.npz")
    assert np.allclose(read.scores, table.scores, atol=1e-7)
    assert np.array_equal(read.predictions, table.predictions)
    assert np.array_equal(read.labels, table.labels)
    assert list(read.features) == ["logit_margin"]


def test_rows_of_a_training_are_those_of_its_results(scripts):
    ship, recorded = scripts["cifar100_ship"], scripts["recorded_cifar100"]
    result = recorded.load("msdnet_joint")
    for path, made in ((recorded.RUNS, ship.run_rows(result)), (recorded.MODES, ship.mode_rows(result))):
        own = [row for row in recorded.rows(path) if (row["run"], row["seed"]) == ("msdnet_joint", "0")]
        found = [{name: str(value) for name, value in row.items()} for row in made]
        assert len(found) == len(own)
        for row, other in zip(found, own, strict=True):
            for name in row:
                if name in ("low", "high", "accuracy", "spent"):  # rounding of scores may move a decision
                    assert float(row[name]) == pytest.approx(float(other[name]), abs=2e-3)
                else:
                    assert row[name] == other[name]


def test_the_most_similar_picture_is_found_even_mirrored(scripts):
    duplicates = scripts["cifar100_duplicates"]
    seen = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), np.uint8)
    asked = np.stack([seen[7], seen[11][:, ::-1], 255 - seen[3]])
    similarity, which = duplicates.neighbours(asked, duplicates.unit(seen))
    assert which[:2].tolist() == [7, 11]
    assert similarity[:2] == pytest.approx([1, 1], abs=1e-5)
    assert similarity[2] < 0.5


def test_all_networks_are_on_one_page_to_play_with(scripts, tmp_path, monkeypatch, capsys):
    networks, report = scripts["recorded_cifar100"].NETWORKS, scripts["paper_report"]
    monkeypatch.setattr(report, "METHODS", ("geometric",))
    monkeypatch.setattr(report, "TEXTS", {})
    monkeypatch.setattr(report, "NETWORKS", {name: networks[name] for name in ("msdnet_joint", "convnext_frozen")})
    monkeypatch.setattr(sys, "argv", ["paper_report.py", "-o", str(tmp_path / "new" / "page.html")])
    report.main()
    page = Path(capsys.readouterr().out.strip()).read_text()
    for name in ("MSDNet", "ConvNeXt, frozen heads", "geometric"):
        assert name in page


def test_shipping_some_trainings_keeps_the_rows_of_others(scripts, tmp_path):
    ship, path = scripts["cifar100_ship"], tmp_path / "runs.csv"
    rows = [{"run": "a", "seed": seed, "calibration_images": 1000, "accuracy": 0.5} for seed in (0, 1)]
    ship.write_beside(path, rows)
    ship.write_beside(path, [rows[1] | {"accuracy": 0.75}])
    assert [(row["seed"], row["accuracy"]) for row in ship.rows(path)] == [("0", "0.5"), ("1", "0.75")]
