from dataclasses import replace

import numpy as np
import pytest
from conftest import made_up

from alight import Costs, at_equal_spend, calibrate, read_points, replay, sweep, write_points
from alight.errors import BadFile, BadInput, BudgetTooSmall, LabelsNeeded, Mismatch, ShiftWarning
from alight.evaluation import (
    ORACLE,
    SINGLE_EXIT,
    Point,
    calibration_errors,
    comparison_table,
    evaluate_policy,
    per_class,
)

LABELLED, TEST = made_up(1, 500, 4), made_up(2, 1500, 4)
COSTS = Costs([1.0, 1.0, 2.0, 2.0], [0.1, 0.1, 0.1, 0.1], unit="ms")
METHODS = {name: calibrate.METHODS[name] for name in ("eero", "geometric", "patience", "two_exits")}
BUDGETS = ["30%", 3.0, "70%", "100%"]


@pytest.fixture(scope="module")
def points():
    return sweep(METHODS, COSTS, BUDGETS, labelled=LABELLED, test=TEST)


def test_a_sweep_has_every_method_at_every_budget_and_the_references(points):
    assert [point.method for point in points] == [
        *(name for name in METHODS for _ in BUDGETS), *[ORACLE] * 4, *[SINGLE_EXIT] * 4,
    ]  # fmt: skip
    assert {point.full_cost for point in points} == {COSTS.full}


def test_a_point_is_what_replaying_the_policy_gives(points):
    point = next(point for point in points if point.method == "eero" and point.budget == 3.0)
    policy = calibrate.eero(COSTS, 3.0, LABELLED)
    decisions = replay(policy, TEST)
    assert point.accuracy == decisions.accuracy(TEST.labels)
    assert point.mean_cost == decisions.mean_cost
    assert point.accuracy_low < point.accuracy < point.accuracy_high
    assert point.mean_cost_low < point.mean_cost < point.mean_cost_high
    np.testing.assert_allclose(point.exit_rates, policy.exit_rates)
    np.testing.assert_allclose(point.exit_shares, decisions.exit_shares)


def test_a_policy_alone_gives_the_point_of_the_sweep(points):
    point = next(point for point in points if point.method == "eero" and point.budget == 3.0)
    policy = calibrate.eero(COSTS, 3.0, LABELLED)
    assert repr(evaluate_policy(policy, COSTS, TEST)) == repr(point)  # repr: a NaN equals no NaN
    free = evaluate_policy(replace(policy, budget=None), COSTS, TEST)
    assert free.budget == free.mean_cost == point.mean_cost
    with pytest.raises(LabelsNeeded):
        evaluate_policy(policy, COSTS, TEST.unlabelled())


def test_closed_exits_have_a_planned_rate_of_zero(points):
    for point in points:
        if point.method == "two_exits":
            assert len(point.exit_rates) == 4
            assert np.count_nonzero(point.exit_rates) <= 2


def test_a_sample_pays_for_the_heads_of_all_open_exits_up_to_its_own(points):
    for point in points:
        shares = np.array(point.exit_shares)
        paid = np.where(shares > 0, point.exit_costs, 0)  # inf where an exit is closed
        assert shares @ paid == pytest.approx(point.mean_cost)
    (eero,) = (point for point in points if point.method == "eero" and point.budget == 3.0)
    np.testing.assert_allclose(eero.exit_costs, [1.1, 2.2, 4.3, 6.4])
    np.testing.assert_allclose(COSTS.shares([0, 3]), np.array([1.1, 6.2]) / 6.1)


def test_a_point_tells_the_thresholds_of_every_exit_and_the_rule(points):
    policy = calibrate.eero(COSTS, 3.0, LABELLED)
    point = next(point for point in points if point.method == "eero" and point.budget == 3.0)
    assert point.thresholds == (*policy.thresholds, -np.inf)  # the last exit takes everyone
    assert point.rule == f"{policy.summary()}, on the margin"
    assert point.guarantee == ""
    for each in points:
        if each.method == "two_exits" and each.thresholds:
            assert [each.thresholds[index] for index in range(4) if each.exit_rates[index] == 0] == [np.inf] * 2
        if each.method == "patience":
            assert each.thresholds == ()
            assert "agree" in each.rule or "at once" in each.rule


def test_a_certified_point_carries_its_guarantee():
    def certified(*given):
        return calibrate.certified_probability(calibrate.eero)(*given)

    (point,) = sweep({"eero": certified}, COSTS, [3.0], labelled=LABELLED, test=TEST, references=False)
    assert point.guarantee == str(certified(COSTS, 3.0, LABELLED, None).certificate)


def test_no_method_beats_the_oracle_at_what_it_spent(points):
    from alight.evaluation import oracle_within

    for point in points:
        if point.method in METHODS:
            assert point.accuracy <= oracle_within(COSTS, point.mean_cost * 1.0001, TEST).accuracy(TEST.labels) + 1e-9


def test_single_exits_pay_only_their_own_head(points):
    alone = [point for point in points if point.method == SINGLE_EXIT]
    np.testing.assert_allclose([point.mean_cost for point in alone], [1.1, 2.1, 4.1, 6.1])
    np.testing.assert_allclose([1 - point.accuracy for point in alone], TEST.risks())


def test_a_sweep_is_the_same_each_time(points):
    assert sweep(METHODS, COSTS, BUDGETS, labelled=LABELLED, test=TEST) == points


def test_points_survive_saving(points, tmp_path):
    write_points(points, tmp_path / "points.csv")
    assert repr(read_points(tmp_path / "points.csv")) == repr(points)  # NaN is not equal to itself


def test_columns_with_a_default_may_be_missing(tmp_path):
    (tmp_path / "points.csv").write_text("method,budget,accuracy,mean_cost\nmine,4.0,0.8,3.0\n")
    (point,) = read_points(tmp_path / "points.csv")
    assert repr(point) == repr(Point("mine", budget=4.0, accuracy=0.8, mean_cost=3.0))


def test_methods_are_compared_where_they_spent_the_same():
    points = [
        Point("a", budget=2.0, accuracy=0.5, mean_cost=1.0, accuracy_low=0.4, accuracy_high=0.6),
        Point("a", budget=4.0, accuracy=0.7, mean_cost=3.0, accuracy_low=0.6, accuracy_high=0.8),
        Point("b", budget=2.0, accuracy=0.6, mean_cost=2.0, accuracy_low=0.5, accuracy_high=0.7),
    ]
    rows = at_equal_spend(points, [1.5, 2.0, 5.0])
    assert [(row.method, row.spent) for row in rows] == [("a", 1.5), ("a", 2.0), ("b", 2.0)]
    assert rows[1].accuracy == pytest.approx(0.6)
    assert (rows[1].accuracy_low, rows[1].accuracy_high) == (pytest.approx(0.5), pytest.approx(0.7))


def test_between_two_points_lies_the_mixture_of_their_policies():
    from alight.policies.policy import Mixture

    first, second = (calibrate.geometric(COSTS, budget, LABELLED) for budget in (2.5, 4.0))
    terms = {"costs": first.costs, "open_exits": first.open_exits, "num_exits": 4}
    decided = [replay(policy, TEST) for policy in (first, second, Mixture(first, second, 0.5, **terms))]
    spent = [each.mean_cost for each in decided]
    accuracy = [each.accuracy(TEST.labels) for each in decided]
    assert accuracy[2] == pytest.approx(np.interp(spent[2], spent[:2], accuracy[:2]), abs=0.03)


def test_a_sweep_refuses_what_makes_no_comparison():
    with pytest.raises(BadInput, match="labelled table is also the test table"):
        sweep(METHODS, COSTS, BUDGETS, labelled=TEST, test=TEST)
    with pytest.raises(LabelsNeeded, match="a sweep's test table needs labels"):
        sweep(METHODS, COSTS, BUDGETS, labelled=LABELLED, test=TEST.unlabelled())
    with pytest.raises(Mismatch, match="test table has 3 exits"):
        sweep(METHODS, COSTS, BUDGETS, labelled=LABELLED, test=made_up(0, 50, 3))
    with pytest.raises(Mismatch, match="'margin', the test table's 'max_probability'"):
        sweep(METHODS, COSTS, BUDGETS, labelled=LABELLED, test=replace(TEST, score="max_probability"))
    with pytest.raises(BudgetTooSmall):
        sweep(METHODS, COSTS, ["1%"], labelled=LABELLED, test=TEST)


def test_files_that_are_not_points_are_refused_by_name(points, tmp_path):
    write_points(points, tmp_path / "good.csv")
    text = (tmp_path / "good.csv").read_text()
    cases = {
        "": "it has no rows",
        "a,b\n1,2\n": "lacks the column 'method'",
        text.splitlines()[0]: "it has no rows",
        text[: len(text) // 2]: "not a table of points",
        text[:-5]: "not a table of points",
        text[:-1]: "cut short",
        text.replace(str(points[0].accuracy), "nan", 1): "line 2 is not a point",
        text.replace("0.", "x", 3): "not a table of points",
    }
    for content, message in cases.items():
        (tmp_path / "points.csv").write_text(content)
        with pytest.raises(BadFile, match=message):
            read_points(tmp_path / "points.csv")


def test_names_of_exits_survive_saving(tmp_path):
    names = ("layer1", "block 2", 'a "b", c', "end")
    named = sweep({"eero": calibrate.eero}, COSTS, ["60%"], labelled=LABELLED, test=replace(TEST, exits=names))
    write_points(named, tmp_path / "points.csv")
    assert {point.exits for point in read_points(tmp_path / "points.csv")} == {names}


def test_a_table_marks_the_best_method_that_kept_its_budget():
    of = {"full_cost": 10.0, "unit": "ms", "mean_cost_low": 4.2}
    points = [Point("eero", 4.0, 0.8, 3.9, **of), Point("greedy", 4.0, 0.9, 4.5, **of), Point("eero", 6.0, 0.8, 5.0)]
    assert [point.is_over_budget for point in points] == [False, True, False]
    points = [*points[:2], Point("eero", 6.0, 0.85, 5.0, **of), Point("single_exit", 10.0, 0.95, 10.0, **of)]
    header, eero, greedy, full = comparison_table(points)
    assert header.split() == ["accuracy", "(%)", "40", "%", "60", "%", "100", "%"]
    assert (eero.split(), greedy.split()) == (["eero", "80.0*", "85.0*"], ["greedy", "90.0!"])
    assert full.split() == ["full", "network", "95.0"]
    many = [Point("eero", 0.1 * index, 0.5, 0.05 * index, full_cost=10.0) for index in range(1, 40)]
    assert comparison_table(many, most=5)[0].count("%") == 1 + 5


def test_a_point_names_the_class_that_loses_most(points):
    point = next(point for point in points if point.method == "eero" and point.budget == 3.0)
    classes = per_class(replay(calibrate.eero(COSTS, 3.0, LABELLED), TEST), TEST)
    worst = classes.classes.tolist().index(int(point.worst_class))
    assert point.worst_class_loss == -classes.gain.min() == -classes.gain[worst]
    assert point.worst_class_cost == classes.mean_cost[worst]
    assert [each.worst_class_loss for each in points][-1] == 0  # of the last exit alone


def test_exits_alone_have_calibration_errors_where_probabilities_are_recorded(points):
    assert np.isnan([point.calibration_error for point in points]).all()  # made of margins
    sure = replace(TEST, features={"max_probability": np.clip(TEST.scores, 0, 1)})
    found = sweep({}, COSTS, BUDGETS, labelled=LABELLED, test=sure)
    errors = [point.calibration_error for point in found if point.method == SINGLE_EXIT]
    np.testing.assert_array_equal(errors, calibration_errors(sure))


def test_a_test_table_of_another_distribution_is_noticed_and_said_beside_guarantees():
    certified = {"certified": calibrate.certified_mean(calibrate.eero), "plain": calibrate.eero}
    harder = TEST.take(np.argsort(TEST.scores[:, 0])[:1100])
    with pytest.warns(ShiftWarning, match="the calibration and the test samples differ at exit"):
        found = sweep(certified, COSTS, [3.0], labelled=LABELLED, test=harder, references=False)
    assert "Doubtful" in found[0].guarantee
    assert found[1].guarantee == ""
