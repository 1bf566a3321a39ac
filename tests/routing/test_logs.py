"""Logs become tables: requests by models, each call with its own cost, and codes that never tell who is right."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from made_up_log import MODELS, MOST, PRICES, columns_of, logged_rows, write_log

from alight import Costs, HeadOutputs, calibrate, read_log, replay
from alight.calibrate.cost_guarantees import CostContract, spend_to_aim_at
from alight.calibrate.crossval import on_exits
from alight.errors import BadInput, Mismatch

ROWS = logged_rows()
COLUMNS = columns_of(ROWS)


def by_hand(name: str) -> np.ndarray:
    """The column of a kind as (requests, models), requests in the order of their first row."""
    requests = [*dict.fromkeys(row["request"] for row in ROWS)]
    found = {(row["request"], row["model"]): row[name] for row in ROWS}
    return np.array([[found[request, model] for model in MODELS] for request in requests])


def test_a_log_becomes_the_table_of_a_cascade_cheapest_model_first():
    outputs, costs = read_log(COLUMNS)
    assert outputs.exits == MODELS
    assert (outputs.score, costs.unit) == ("score", "USD")
    np.testing.assert_array_equal(outputs.scores, by_hand("score"))
    np.testing.assert_array_equal(outputs.costs, by_hand("cost_usd"))
    np.testing.assert_array_equal(outputs.correct(), by_hand("correct"))
    np.testing.assert_allclose(costs.heads, by_hand("cost_usd").mean(axis=0))
    assert not costs.stages.any()
    assert costs.full == pytest.approx(by_hand("cost_usd")[:, -1].mean())


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "frame"])
def test_files_and_frames_give_the_same_table(kind, tmp_path):
    path, frame = tmp_path / f"log.{kind}", pd.DataFrame(COLUMNS)
    if kind == "csv":
        write_log(path)
    elif kind == "parquet":
        frame.to_parquet(path)
    elif kind == "jsonl":
        frame.to_json(path, orient="records", lines=True, double_precision=15)
    outputs, costs = read_log(frame if kind == "frame" else path)
    expected = read_log(COLUMNS)
    for name, values in expected.outputs.rows().items():
        np.testing.assert_allclose(outputs.rows()[name], values, rtol=1e-9)
    np.testing.assert_allclose(costs.heads, expected.costs.heads)


def test_a_row_per_request_is_read_too():
    frame = pd.DataFrame(COLUMNS).pivot(index="request", columns="model").reset_index()
    frame.columns = ["_".join(filter(None, map(str, pair))) for pair in frame.columns]
    wide = frame.rename(columns={f"cost_usd_{model}": f"cost_{model}" for model in MODELS})
    outputs, costs = read_log(wide)
    assert outputs.exits == MODELS
    np.testing.assert_allclose(costs.heads, read_log(COLUMNS).costs.heads)
    np.testing.assert_allclose(outputs.risks(), read_log(COLUMNS).outputs.risks())


def test_columns_of_models_may_stand_in_any_order():
    wide = {"request_id": [1, 2], "score_small": [0.1, 0.2], "score_large": [0.5, 0.6], "correct_large": [1, 1]}
    wide |= {"correct_small": [0, 0], "cost_large": [10.0, 10.0], "cost_small": [1.0, 1.0]}
    outputs, costs = read_log(wide)
    assert outputs.exits == ("small", "large")
    np.testing.assert_array_equal(outputs.risks(), [1, 0])
    np.testing.assert_array_equal(costs.heads, [1, 10])
    with pytest.raises(BadInput, match="only some of small, large have a column of the correct"):
        read_log({name: values for name, values in wide.items() if name != "correct_small"})


def test_a_column_that_is_named_is_not_overruled_by_one_that_is_guessed():
    judged = {**COLUMNS, "judged": [1] * len(ROWS), "rating": [0.0] * len(ROWS)}
    np.testing.assert_array_equal(read_log(judged, correct="judged").outputs.risks(), [0] * len(MODELS))


@pytest.mark.parametrize("name", ["cost_cents", "cost_eur", "seconds", "kwh"])
def test_a_unit_that_is_not_known_is_asked_for(name):
    columns = {**{key: values for key, values in COLUMNS.items() if key != "cost_usd"}, name: COLUMNS["cost_usd"]}
    with pytest.raises(BadInput, match="unit of the costs in"):
        read_log(columns, cost=name)
    assert read_log(columns, cost=name, unit="cents").costs.unit == "cents"


def test_answers_that_cannot_be_compared_are_not_combined():
    outputs, costs = read_log(columns_of(ROWS, "answer", "truth"))
    with pytest.raises(BadInput, match="several different answers to one sample are right"):
        calibrate.combined(calibrate.eero, "vote")(costs, "70%", outputs)


def test_tables_with_and_without_costs_are_not_certified_together():
    outputs, costs = read_log(COLUMNS)
    bare = replace(outputs, costs=None, labels=None, quality=None)
    for certified in (calibrate.certified_mean, calibrate.certified_probability, calibrate.certified_stream):
        with pytest.raises(Mismatch, match="one table has a cost for every sample"):
            certified(calibrate.eero, max_costs=MOST)(costs, "50%", outputs, bare)


def test_a_guarantee_on_cost_and_risk_says_the_most_that_it_assumes():
    method = calibrate.certified_risk(calibrate.eero, risk="error", alpha=0.6, max_costs=MOST, seed=0)
    outputs, costs = read_log(COLUMNS)
    assert "no request costs more than" in method(costs, "90%", outputs).certificate.assumption


def test_the_first_model_need_not_be_the_cheapest():
    outputs, _ = read_log(COLUMNS, models=[MODELS[1], MODELS[0], *MODELS[2:]])
    costs = Costs(np.zeros(outputs.num_exits), outputs.costs.mean(axis=0), "USD")
    first = float(costs.heads[0])
    contract = CostContract("probability", max_costs=(MOST[1], MOST[0], *MOST[2:]))
    assert spend_to_aim_at(costs, 1.3 * first, outputs, 200, contract) > first


def test_the_most_may_be_what_a_call_has_cost_but_for_a_rounding():
    outputs, costs = read_log(COLUMNS)
    most = outputs.costs.max(axis=0) * (1 - 1e-12)
    assert calibrate.certified_mean(calibrate.eero, max_costs=most, seed=0)(costs, "80%", outputs).certificate
    with pytest.raises(BadInput, match="above its max_costs"):
        calibrate.certified_mean(calibrate.eero, max_costs=0.99 * most, seed=0)(costs, "80%", outputs)


def test_models_of_a_pruned_meter_keep_their_numbers():
    outputs, costs = read_log(COLUMNS)
    opened = (1, len(MODELS) - 1)
    most = [MOST[index] for index in opened]
    policy = on_exits(calibrate.certified_stream(calibrate.eero, max_costs=most, seed=0), opened)(costs, 0.007, outputs)
    assert policy.policy.open_exits == policy.open_exits == opened


def test_answers_and_truth_say_what_is_right_and_which_models_agree():
    outputs, _ = read_log(columns_of(ROWS, "correct"))
    np.testing.assert_array_equal(outputs.correct(), by_hand("correct"))
    answers = by_hand("answer")
    for first, second in ((0, 1), (1, 2), (0, 2)):
        same = outputs.predictions[:, first] == outputs.predictions[:, second]
        np.testing.assert_array_equal(same, answers[:, first] == answers[:, second])


@pytest.mark.parametrize("without", [("answer", "truth"), ("correct",)])
def test_the_number_of_an_answer_does_not_tell_whether_it_is_right(without):
    outputs, _ = read_log(columns_of(logged_rows(1, 4000), *without))
    for code in range(3):  # were it to tell, a method could learn from it what it cannot know of new requests
        right = outputs.correct()[:, 0][outputs.predictions[:, 0] == code]
        assert right.mean() == pytest.approx(outputs.correct()[:, 0].mean(), abs=4 * 0.5 / np.sqrt(len(right)))


def test_answers_alone_are_judged_by_the_last_model():
    outputs, _ = read_log(columns_of(ROWS, "correct", "truth"))
    answers = by_hand("answer")
    assert outputs.labels is None
    np.testing.assert_array_equal(outputs.correct(), answers == answers[:, -1:])


def test_grades_take_the_place_of_right_and_wrong():
    rows = [{**row, "quality": 0.25 + 0.5 * int(row["correct"])} for row in ROWS]
    outputs, costs = read_log(columns_of(rows, "correct", "truth"))
    np.testing.assert_allclose(1 - outputs.risks(), 0.25 + 0.5 * by_hand("correct").mean(axis=0))
    policy = calibrate.search(costs, "50%", outputs)
    decisions = replay(policy, outputs)
    taken = outputs.quality[np.arange(len(outputs)), decisions.exits]
    assert decisions.accuracy() == pytest.approx(taken.mean())
    assert decisions.mean_cost <= costs.budget("50%")


def test_models_and_their_order_can_be_chosen_and_columns_be_named():
    renamed = {"q": COLUMNS["request"], "who": COLUMNS["model"], "sure": COLUMNS["score"], "usd": COLUMNS["cost_usd"]}
    renamed["ok"] = ["yes" if each else "no" for each in COLUMNS["correct"]]
    names = {"request": "q", "model": "who", "score": "sure", "correct": "ok", "cost": "usd"}
    outputs, costs = read_log(renamed, **names, models=["large", "small"], unit="cents")
    assert outputs.exits == ("large", "small")
    assert costs.unit == "cents"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": None, "score": None}, "the log has no column of the model"),
        ({"score": None}, "no column of the score, only request, model"),
        ({"cost_usd": None}, "no column of the cost"),
        ({"correct": None, "answer": None}, "nothing in the log tells right answers from wrong ones"),
        ({"correct": ["maybe"] * len(ROWS)}, "'maybe' in the log is neither right nor wrong"),
        ({"cost_usd": [-1.0] * len(ROWS)}, "costs in the log are negative"),
        ({"score": ["high"] * len(ROWS)}, "does not hold numbers alone"),
        ({"model": ["small"] * len(ROWS)}, "has two rows of model 'small'"),
        ({"model": [None, *COLUMNS["model"][1:]]}, "1 of 1,200 rows of the log lack their request or model"),
        ({"correct": COLUMNS["correct"][1:]}, "not equally long .*correct 1,199"),
        ({name: [] for name in COLUMNS}, "the log has no rows"),
        (
            {"correct": None, "truth": [np.nan, *COLUMNS["truth"][1:]], "answer": [np.nan, *COLUMNS["answer"][1:]]},
            "1 of 1,200 rows of the log lack their 'truth'",
        ),
        ({"correct": None, "truth": COLUMNS["answer"]}, "'truth' differs between the models of"),
        ({"score": ["", *COLUMNS["score"][1:]]}, "1 of 1,200 rows of the log lack their 'score': fill them in"),
        ({"cost_usd": [None, *COLUMNS["cost_usd"][1:]]}, "1 of 1,200 rows of the log lack their 'cost_usd'"),
        ({"cost_usd": [float(each != "small") for each in COLUMNS["model"]]}, "small costs nothing in the log"),
    ],
)
def test_what_a_log_lacks_is_said(changed, said):
    columns = {name: values for name, values in {**COLUMNS, **changed}.items() if values is not None}
    with pytest.raises(BadInput, match=said):
        read_log(columns)


def test_requests_that_lack_a_model_are_refused_or_left_out_and_counted():
    fewer = columns_of(
        [row for row in ROWS if (row["request"], row["model"]) not in {("r1", "large"), ("r7", "small")}]
    )
    with pytest.raises(BadInput, match="2 of 400 requests in the log lack a row of one of"):
        read_log(fewer)
    with pytest.warns(UserWarning, match=r"2 of 400 requests .* are left out"):
        outputs, _ = read_log(fewer, incomplete="drop")
    assert len(outputs) == 398


def test_costs_and_grades_are_kept_when_a_table_is_saved_split_joined_and_pruned(tmp_path):
    outputs, _ = read_log(COLUMNS)
    outputs.save(tmp_path / "log.npz")
    first, second = HeadOutputs.load(tmp_path / "log.npz").split(0.5, np.random.default_rng(0))
    joined = HeadOutputs.joined([first, second]).at_exits([0, 2])
    assert np.sort(joined.costs[:, 1]).tolist() == np.sort(outputs.costs[:, 2]).tolist()
    assert joined.quality.mean() == pytest.approx(outputs.quality[:, [0, 2]].mean())
    unlabelled = outputs.unlabelled()
    assert unlabelled.quality is None
    assert unlabelled.labels is None
    assert unlabelled.costs is not None


def test_what_is_spent_is_the_sum_of_the_calls_that_were_made():
    outputs, costs = read_log(COLUMNS)
    policy = calibrate.two_exits(costs, "50%", outputs, early=0)
    decisions = replay(policy, outputs)
    by_both = outputs.costs[:, 0] + np.where(decisions.exits == 2, outputs.costs[:, 2], 0.0)
    np.testing.assert_allclose(decisions.spent, by_both)


def test_budgets_may_be_dollars_for_a_thousand_requests():
    costs = Costs([0, 0], [0.0002, 0.004], unit="USD")
    per_thousand = ("$1.20/1000", "1.20 USD/1,000", "1.20 $ per 1,000 requests")
    for text in (*per_thousand, "0.0012 USD", "0.0012 usd", "$0.0012", 0.0012, "30%"):
        assert costs.budget(text) == pytest.approx(0.0012)
    with pytest.raises(BadInput, match=r"unknown unit 'EUR'.* and the unit of the costs, USD"):
        costs.budget("3 EUR")


def test_pruned_methods_choose_among_models_and_percentages_stay_those_of_the_largest():
    outputs, costs = read_log(COLUMNS)
    policy = calibrate.pruned(calibrate.eero)(costs, "60%", outputs)
    assert policy.budget == pytest.approx(0.6 * costs.full)
    assert replay(policy, outputs).mean_cost <= policy.budget
    assert policy.exits == MODELS


def test_prices_of_the_log_are_what_it_was_made_with():
    _, costs = read_log(COLUMNS)
    np.testing.assert_allclose(costs.heads / costs.heads[0], np.array(PRICES) / PRICES[0])


def test_costs_in_several_currencies_do_not_add_up():
    columns = {"request": [1, 1, 2, 2], "model": ["small", "large"] * 2, "score": [0.1, 0.9, 0.8, 0.7]}
    columns |= {"correct": [0, 1, 1, 1], "cost": [1.0, 2.0, 1.0, 3.0]}
    assert read_log(columns).costs.unit == "USD"
    assert read_log({**columns, "currency": ["eur", "EUR", "EUR ", "EUR"]}).costs.unit == "EUR"
    mixed = {**columns, "currency": ["EUR", "USD", "EUR", "EUR"]}
    with pytest.raises(BadInput, match="in EUR, USD, which do not add up: convert them to one"):
        read_log(mixed)
    converted = {name.replace("cost", "cost_usd"): values for name, values in mixed.items()}
    assert read_log(converted).costs.unit == "USD"  # whatever was paid with


def test_a_budget_for_no_requests_is_refused():
    costs = Costs([0.0, 0.0], [0.001, 0.01], "USD")
    for budget in ("$5/0", "5 $ per 0 requests", "5 USD per , requests", "5 USD per 0,000 requests"):
        with pytest.raises(BadInput, match="budget"):
            costs.budget(budget)
    assert costs.budget("5 $ per 1,000 requests") == 0.005


@pytest.mark.parametrize("names", [{"score": "correct"}, {"answer": "truth"}, {"cost": "score"}])
def test_a_column_is_not_taken_for_two_things(names):
    with pytest.raises(BadInput, match=r"is taken as the .* and as the .* of the log: name a column of its own"):
        read_log(COLUMNS, **names)


@pytest.mark.parametrize("log", [5, None, [1, 2]])
def test_what_is_not_a_log_is_refused(log):
    with pytest.raises(BadInput, match="is not a log: give a file, a DataFrame, or columns by name"):
        read_log(log)


def test_missing_answers_agree_with_nothing_and_judge_nothing():
    answers = [np.nan if row["model"] == "small" else row["answer"] for row in ROWS]
    columns = {**columns_of(ROWS, "correct", "truth"), "answer": answers}
    outputs, _ = read_log(columns)
    assert not (outputs.predictions[:, :1] == outputs.predictions[:, 1:]).any()
    lost = ["" if row["model"] != "medium" else row["answer"] for row in ROWS]
    with pytest.raises(BadInput, match="400 of 400 requests in the log lack the answer of the last model"):
        read_log({**columns, "answer": lost})
    outputs, _ = read_log({**columns, "answer": lost}, models=["small", "medium"])
    assert not (outputs.predictions[:, 0] == outputs.predictions[:, 1]).any()


def test_whole_numbers_are_the_same_answer_though_missing_ones_made_them_fractions(tmp_path):
    numbers = [str("ABCD".index(row["truth"])) for row in ROWS]
    said = ["" if row["request"] == "r1" else f"{'ABCD'.index(row['answer'])}.0" for row in ROWS]
    path = tmp_path / "log.csv"
    named = {**columns_of(ROWS, "correct"), "answer": said, "truth": numbers}
    lines = [",".join(named), *(",".join(map(str, each)) for each in zip(*named.values(), strict=True))]
    path.write_text("\n".join(lines))
    right = {(row["request"], row["model"]): row["correct"] and row["request"] != "r1" for row in ROWS}
    outputs, _ = read_log(path)
    assert outputs.correct().sum() == sum(right.values())


def test_scores_that_are_higher_where_answers_are_wrong_are_warned_of():
    scored = [(row["model"], row["score"]) for row in ROWS]
    with pytest.warns(UserWarning, match="the score of small is higher where its answers are worse"):
        read_log({**COLUMNS, "score": [-score if model == "small" else score for model, score in scored]})
    read_log({**COLUMNS, "score": [-score if model == "large" else score for model, score in scored]})  # never used
    read_log({**COLUMNS, "score": np.random.default_rng(0).normal(size=len(ROWS))})  # says nothing: by chance
    read_log({**COLUMNS, "score": [1.0] * len(ROWS)})
