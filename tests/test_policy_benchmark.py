from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from alight import Costs, HeadOutputs, calibrate, recordings
from alight.benchmark import ALL, BenchmarkResult, Comparison, PairedDifference, benchmark, leaderboard, resplit
from alight.cli import main
from alight.cli.tables import BENCHMARKED, combined_with
from alight.errors import BadFile, BadInput
from alight.policies.policy import ExitAt
from alight.recordings import Recording


def recording(samples=60, seed=0):
    """Two exits that cost 1 and 4; the first is right for one half of the labels, the second always."""
    rng = np.random.default_rng(seed)
    labels = np.arange(samples) % 2
    predictions = np.stack([np.zeros(samples, dtype=int), labels], axis=1)
    table = HeadOutputs(rng.uniform(size=(samples, 2)), predictions, labels)
    return Recording(table.take(np.arange(20)), table.take(np.arange(20, samples)), Costs.from_cumulative([1.0, 4.0]))


def first_exit(costs, budget, labelled, unlabelled=None):
    return ExitAt(costs=(1.0,), open_exits=(0,), num_exits=2, score=labelled.score, budget=budget)


def last_exit_whatever_it_costs(costs, budget, labelled, unlabelled=None):
    return ExitAt(costs=(4.0,), open_exits=(1,), num_exits=2, score=labelled.score, budget=budget)


def test_accuracy_is_compared_at_equal_spent_budget():
    methods = {"first": first_exit, "last": last_exit_whatever_it_costs}
    results = benchmark(methods, {"both": recording()}, shares=(0.25, 0.5, 1.0), resplits=1).results
    found = {(each.method, each.budget): (each.accuracy, each.allowed_accuracy, each.spent) for each in results}
    assert found["first", 1.0] == pytest.approx((0.5, 0.5, 0.25))  # it never spends more, and keeps its accuracy
    assert found["last", 0.5] == pytest.approx((0.5 + 0.5 / 3, 1.0, 2.0))  # mixed with the first exit alone
    assert found["last", 0.25][0] == pytest.approx(0.5)
    assert found["last", 1.0][0] == 1.0


def test_budgets_below_the_first_exit_are_left_out():
    results = benchmark({"first": first_exit}, {"both": recording()}, shares=(0.1, 0.5), resplits=1).results
    assert [each.budget for each in results] == [0.5]


def test_resplits_hold_every_sample_once_in_parts_of_the_same_sizes():
    own = recording()
    assert resplit(own, 0) is own
    for number in (1, 2):
        labelled, test, _ = resplit(own, number)
        assert (len(labelled), len(test)) == (20, 40)
        together = np.concatenate([labelled.scores, test.scores])
        before = np.concatenate([own.labelled.scores, own.test.scores])
        assert not np.array_equal(together, before)
        assert np.array_equal(np.sort(together, axis=0), np.sort(before, axis=0))


def test_processes_give_what_one_process_gives():
    methods = {name: calibrate.METHODS[name] for name in ("eero", "geometric")}
    known = {"frozen": recordings.load()}
    alone, together = (benchmark(methods, known, shares=(0.5,), resplits=3, jobs=jobs) for jobs in (1, 2))
    assert [replace(each, seconds=0.0) for each in alone.results] == [
        replace(each, seconds=0.0) for each in together.results
    ]
    assert alone.differences == together.differences


def result(name, method, budget, accuracy):
    return BenchmarkResult(name, method, budget, accuracy, 0, 1, 0.01, accuracy, 1.0, 0.1, 0.0, 0.0, "a", 20)


def test_every_recording_counts_alike_on_the_leaderboard():
    results = [result("many", "a", share, 0.5) for share in (0.1, 0.2, 0.3)] + [result("one", "a", 0.5, 0.9)]
    results += [result("many", "b", share, 0.6) for share in (0.1, 0.2, 0.3)] + [result("one", "b", 0.5, 0.7)]
    differences = [PairedDifference(ALL, method, "a", 0.0, 0.0, 20) for method in "ab"]
    first, second = leaderboard(Comparison(results, differences))
    assert (first.method, second.method) == ("a", "b")
    assert first.regret == pytest.approx(0.05)
    assert first.worst_regret == pytest.approx(0.1)
    assert second.regret == pytest.approx(0.1)
    assert first.accuracy == pytest.approx(0.7)
    assert first.recordings == 2


def test_differences_are_paired_with_the_reference_and_have_the_standard_error_of_their_samples():
    methods = {"first": first_exit, "last": last_exit_whatever_it_costs}
    results, differences = benchmark(methods, {"both": recording()}, shares=(0.25, 1.0), resplits=1, reference="first")
    gains = {(each.method, each.budget): (each.difference, each.difference_error) for each in results}
    assert gains["first", 1.0] == (0.0, 0.0)
    right = np.tile([0.0, 1.0], 20)  # of 40 test samples one half is right at the last exit alone
    assert gains["last", 1.0] == pytest.approx((0.5, right.std(ddof=1) / np.sqrt(40)))
    of_last = {each.recording: each for each in differences if each.method == "last"}
    assert of_last["both"].difference == pytest.approx(0.25)  # mean of budgets: level at the first exit's cost
    assert of_last["both"].error == pytest.approx(0.5 * right.std(ddof=1) / np.sqrt(40))
    assert of_last[ALL].difference == of_last["both"].difference
    assert str(of_last[ALL]) == "last, all: +25.00 points (standard error 4.00) against first"


def test_standard_errors_of_differences_hold_over_fresh_samples_and_calibrations():
    """The mean of many benchmarks lies within two of a benchmark's standard errors about as often as it should."""
    methods = {name: calibrate.METHODS[name] for name in ("eero", "geometric")}
    labelled, test, costs = recordings.load()
    pool, means, errors = HeadOutputs.joined([labelled, test]), [], []
    for seed in range(30):
        rows = np.random.default_rng(seed).permutation(len(pool))[:900]
        own = Recording(pool.take(rows[:300]), pool.take(rows[300:]), costs)
        found = benchmark(methods, {"few": own}, shares=(0.5,), resplits=4, seed=seed, reference="eero").differences
        gain = next(each for each in found if each.method == "geometric")
        means.append(gain.difference)
        errors.append(gain.error)
    assert np.std(means) <= 1.5 * np.mean(errors)  # conservative: the same samples calibrate and test in turn
    assert np.mean(errors) <= 3 * np.std(means)


def test_a_method_has_no_row_where_the_recording_lacks_what_it_needs():
    methods = {"eero": calibrate.eero, "mean": partial(combined_with, "geometric_mean", calibrate.eero)}
    results, differences = benchmark(methods, {"frozen": recordings.load()}, shares=(0.5,), resplits=1)
    assert {each.method for each in results} == {each.method for each in differences} == {"eero"}


def test_an_unknown_reference_is_refused():
    with pytest.raises(BadInput, match="the reference 'none' is not among the methods"):
        benchmark({"first": first_exit}, {"both": recording()}, reference="none")


def test_the_default_benchmark_has_auto_and_combined_answers_as_rows():
    assert {"auto", "eero, vote", "global_threshold, geometric_mean"} <= {*BENCHMARKED}


@pytest.mark.parametrize("given", [{"resplits": 0}, {"shares": (0.0,)}])
def test_a_benchmark_of_nothing_is_refused(given):
    with pytest.raises(BadInput, match="at least one of each"):
        benchmark({"first": first_exit}, {"both": recording()}, **given)


def test_a_recording_is_one_file(tmp_path):
    labelled, test, costs = recordings.load("resnet18_cifar100_joint")
    again = Recording.load(Recording(labelled, test, costs).save(tmp_path / "one.npz"))
    for before, after in ((labelled, again.labelled), (test, again.test)):
        assert before.score == after.score
        assert {name: each.tolist() for name, each in before.rows().items()} == {
            name: each.tolist() for name, each in after.rows().items()
        }
    assert again.costs.cumulative().tolist() == costs.cumulative().tolist()
    assert again.costs.unit == costs.unit


def test_a_recording_whose_parts_do_not_fit_is_refused(tmp_path):
    own = recording()
    other = Costs.from_cumulative([1.0, 2.0, 3.0])
    with pytest.raises(BadFile, match="2 and 2 exits in its tables and 3 costs"):
        Recording.load(Recording(own.labelled, own.test, other).save(tmp_path / "one.npz"))


def test_ones_own_method_and_recording_get_their_rows(tmp_path, capsys):
    recording().save(tmp_path / "mine.npz")
    (tmp_path / "my_method.py").write_text(
        "from alight import calibrate\n\n\ndef thrifty(costs, budget, labelled, unlabelled=None):\n"
        "    return calibrate.eero(costs, costs.budget(budget) * 0.9, labelled, unlabelled)\n"
    )
    given = ["--method", f"{tmp_path}/my_method.py:thrifty", "--methods", "eero", "--resplits", "2", "--quiet"]
    written = ["-o", f"{tmp_path}/results.csv", "--leaderboard", f"{tmp_path}/places.csv"]
    written += ["--differences", f"{tmp_path}/differences.csv"]
    page = ["--report", f"{tmp_path}/page.html"]
    assert main(["benchmark", f"{tmp_path}/mine.npz", *given, *written, *page]) == 0
    assert "thrifty: " in capsys.readouterr().out
    assert "mine,thrifty,0.30000" in (tmp_path / "results.csv").read_text()
    assert (tmp_path / "places.csv").read_text().count("\n") == 3
    assert "all,thrifty,eero," in (tmp_path / "differences.csv").read_text()
    assert "thrifty" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("text", "error"), [("none.py:mine", "there is no file 'none.py'"), ("{file}:other", "has no function 'other'")]
)
def test_a_method_that_is_not_there_is_named(tmp_path, capsys, text, error):
    file = tmp_path / "empty_method.py"
    file.write_text("")
    assert main(["benchmark", "--method", text.format(file=file), "-o", f"{tmp_path}/results.csv"]) != 0
    assert error in capsys.readouterr().err
