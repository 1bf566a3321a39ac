import json

import numpy as np
import pytest

from alight import Costs
from alight.costs import as_costs
from alight.errors import BadFile, BadInput


def test_cumulative_costs_hold_every_stage_and_every_open_head_on_the_way():
    costs = Costs(stages=[2, 3, 4], heads=[0.5, 0.25, 1], unit="ms")
    np.testing.assert_array_equal(costs.cumulative(), [2.5, 5.75, 10.75])
    np.testing.assert_array_equal(costs.cumulative([1, 2]), [5.25, 10.25])
    np.testing.assert_array_equal(costs.cumulative([0]), [2.5])
    assert costs.full == 10.0


def test_a_plain_array_is_taken_to_the_last_bit():
    values = np.cumsum(np.random.default_rng(0).uniform(size=30)) * 1e9
    np.testing.assert_array_equal(as_costs(values).cumulative(), values)
    assert as_costs(values).full == values[-1]
    assert as_costs(values).budget("100%") == values[-1]


def test_costs_survive_saving(tmp_path):
    costs = Costs([1, 2], [0.5, 0.25], "J")
    costs.save(tmp_path / "costs.json")
    loaded = Costs.load(tmp_path / "costs.json")
    np.testing.assert_array_equal(loaded.stages, costs.stages)
    np.testing.assert_array_equal(loaded.heads, costs.heads)
    assert loaded.unit == "J"


BUDGETS = {
    ("FLOPs", 3e9): 3e9,
    ("FLOPs", "3e9"): 3e9,
    ("FLOPs", "50%"): 2e9,
    ("FLOPs", " 12.5 % "): 5e8,
    ("FLOPs", "2.5 GFLOPs"): 2.5e9,
    ("FLOPs", "2.5GFLOPS"): 2.5e9,
    ("FLOPs", "2500 mflops"): 2.5e9,
    ("FLOPs", "1.25 GMACs"): 2.5e9,
    ("MACs", "2.5 GFLOPs"): 1.25e9,
    ("FLOPs", "0.002 TFLOP"): 2e9,
    ("ms", "3 ms"): 3.0,
    ("ms", "0.003 s"): 3.0,
    ("ms", "3000 us"): 3.0,
    ("ms", "3000 µs"): 3.0,
    ("J", "0.4 J"): 0.4,
    ("J", "400 mJ"): 0.4,
    ("J", "0.0004 kJ"): 0.4,
    ("GFLOPs", "2.5 GFLOPs"): 2.5,
    ("GFLOPs", "2500 MFLOPs"): 2.5,
    ("s", "3 ms"): 0.003,
    ("ms", "3000 \u03bcs"): 3.0,
}


@pytest.mark.parametrize(("unit", "budget"), BUDGETS)
def test_budgets_are_numbers_percentages_or_quantities(unit, budget):
    costs = Costs.from_cumulative([1e9, 4e9] if unit in ("FLOPs", "MACs") else [0.001, 5.0], unit=unit)
    assert costs.budget(budget) == pytest.approx(BUDGETS[unit, budget], rel=1e-12)


def test_a_percentage_is_of_the_full_network_without_the_early_heads():
    assert Costs([10, 10], [5, 1]).budget("50%") == 10.5


BAD_BUDGETS = {
    "word": ("half", "not a number, percentage or quantity"),
    "other unit": ("3 ms", "not in the costs' unit FLOPs"),
    "unknown unit": ("3 apples", "unknown unit 'apples'"),
    "rate": ("3 mflop/s", "unknown unit"),
    "nanoflops": ("1 nFLOPs", "unknown unit 'nFLOPs'"),
    "upper-case newton": ("3 NJ", "unknown unit 'NJ'"),
    "too large": (10**400, "not a number"),
    "beyond floats": ("1e400", "not a positive, finite amount"),
    "zero": (0, "not a positive, finite amount"),
    "negative": ("-5%", "not a positive, finite amount"),
    "NaN": (float("nan"), "not a positive, finite amount"),
    "infinite": (float("inf"), "not a positive, finite amount"),
    "nothing": (None, "not a number"),
}


@pytest.mark.parametrize("case", BAD_BUDGETS)
def test_a_bad_budget_is_refused_in_one_clear_sentence(case):
    budget, message = BAD_BUDGETS[case]
    with pytest.raises(BadInput, match=message):
        Costs.from_cumulative([1.0, 2.0], unit="FLOPs").budget(budget)


def test_a_quantity_needs_costs_with_a_unit():
    with pytest.raises(BadInput, match="the costs' unit is not given"):
        as_costs([1.0, 2.0]).budget("1 GFLOPs")


BAD_COSTS = {
    "falling": ([1.0, 3.0, 2.0], "exit 2 costs 3 and exit 3 costs 2: give cumulative costs"),
    "level": ([1.0, 1.0], "exit 1 costs 1 and exit 2 costs 1"),
    "zero": ([0.0, 1.0], "exit 1 costs 0"),
    "NaN": ([1.0, float("nan")], "finite"),
    "empty": ([], r"shape \(0,\)"),
    "table": ([[1.0, 2.0]], r"shape \(1, 2\)"),
    "words": (["a"], "not numbers"),
}


@pytest.mark.parametrize("case", BAD_COSTS)
def test_bad_costs_are_refused_in_one_clear_sentence(case):
    values, message = BAD_COSTS[case]
    with pytest.raises(BadInput, match=message):
        as_costs(values)


def test_stages_and_heads_must_fit_and_not_be_negative():
    with pytest.raises(BadInput, match="2 stages and 1 heads"):
        Costs([1, 2], [1])
    with pytest.raises(BadInput, match="negative"):
        Costs([1, 2], [1, -1])


def test_files_that_are_not_costs_are_refused_by_name(tmp_path):
    cases = {
        '{"alight": "Costs", "sch': "not whole JSON",
        "[1, 2]": "it holds no Costs",
        "{}": "a file from elsewhere, not a Costs",
        json.dumps({"alight": "Policy", "schema": 1}): "it is a Policy, not a Costs",
        json.dumps({"alight": "Costs", "schema": 9}): "schema is 9",
        json.dumps({"alight": "Costs", "schema": 1, "stages": [1]}): "not usable",
        json.dumps({"alight": "Costs", "schema": 1, "stages": [-1], "heads": [0], "unit": "J"}): "negative",
    }
    path = tmp_path / "costs.json"
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(BadFile, match=message):
            Costs.load(path)
