"""The demo: from bare digits to a report, and what it prints is what was measured."""

import csv
import html
import io
import re
import shlex
import subprocess
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace

import numpy as np
import pytest

from alight import Costs, Decisions, HeadOutputs, Predictor, load_model, load_policy, record, recordings
from alight.cli import main
from alight.cli.parser import COMMANDS
from alight.demo.live import _planned, _timed, digits_in_three
from alight.planning.plan import Plan
from alight.planning.timing import Comparison
from alight.policies.policy import ExitAt
from alight.policies.route import replay_on

ROWS = ["network", "exits", "budget", "spent", "batch 1", "batch 64", "plan", "CIFAR-100", "report", "go on"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The folder in which a demo has run, its lines by their names, and what it told on the way."""
    place, out, err = tmp_path_factory.mktemp("demo"), io.StringIO(), io.StringIO()
    with chdir(place), redirect_stdout(out), redirect_stderr(err):
        assert main(shlex.split(COMMANDS["demo"].examples[0])) == 0
    rows = [re.split(r" {2,}", line, maxsplit=1) for line in out.getvalue().splitlines()]
    assert [name for name, _ in rows] == ROWS
    return place, dict(rows), err.getvalue()


def test_progress_is_told_with_the_seconds_and_in_the_order_of_the_work(shown):
    told = re.findall(r"^\[ *\d+ s\] (\w+)", shown[2], re.MULTILINE)
    assert told == [
        *("loading", "training", "measuring", "recording", "timing", "planning", "comparing"),
        *("comparing", "comparing", "calibrating", "writing"),
    ]
    assert all(bar in shown[2] for bar in ("train:", "record:", "sweep:"))


def test_the_network_that_is_left_does_what_was_printed(shown):
    place, rows, _ = shown
    own = place / "alight-demo" / "digits"
    model, policy = load_model(own / "network"), load_policy(own / "policy.json")
    with np.load(own / "test.npz") as file:
        images, labels = file["images"], file["labels"]
    decisions = Predictor(model, policy)(images)
    plain = Costs.load(own / "costs.json").full
    spent, right, *shares = (float(number) for number in re.findall(r"([\d.]+)%", rows["spent"]))
    assert decisions.mean_cost / plain == pytest.approx(spent / 100, abs=0.003)
    assert decisions.accuracy(labels) == pytest.approx(right / 100, abs=0.003)
    assert shares == pytest.approx(100 * decisions.exit_shares, abs=1)
    again, tested = record(model, (images, labels), progress=False), HeadOutputs.load(own / "test_outputs.npz")
    assert again.predictions.tolist() == tested.predictions.tolist()
    accuracies = [float(number) for number in re.findall(r"([\d.]+)% at", rows["exits"])]
    assert accuracies == pytest.approx(100 * tested.correct().mean(axis=0), abs=0.06)


def test_half_of_the_compute_loses_little_and_all_exits_are_used(shown):
    _, rows, _ = shown
    spent, right, *shares = (float(number) for number in re.findall(r"([\d.]+)%", rows["spent"]))
    plain = float(re.findall(r"([\d.]+)% at 100%", rows["exits"])[0])
    assert plain >= 97
    assert right >= plain - 1.5
    assert 40 <= spent <= 53  # the promise is about the mean of all digits there may be, these are 500
    assert sum(share > 0 for share in shares) >= 3
    assert rows["budget"].startswith("50% of the FLOPs. With probability 0.95")


def test_the_line_to_go_on_with_runs_as_it_stands(shown):
    place, rows, _ = shown
    line = [*shlex.split(rows["go on"]), "--samples", "32", "--batch-sizes", "32"]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "times as fast" in done.stdout


def test_the_report_has_the_promises_the_digits_and_the_plan(shown):
    place, rows, _ = shown
    page = (place / "alight-demo" / "report.html").read_text()
    assert rows["report"] == str(place / "alight-demo" / "report.html")
    policy = load_policy(place / "alight-demo" / "digits" / "policy.json")
    assert html.escape(str(policy.certificate)) in page
    assert page.count("data:image/png;base64,") == 60
    assert '"plan":{"pays":' in page
    assert '"name":"digits, live"' in page


def test_eero_is_ahead_of_the_papers_rule_and_of_single_exits(shown):
    place, rows, _ = shown
    with (place / "alight-demo" / "cifar100" / "resnet18_cifar100_frozen.csv").open() as file:
        points = [*csv.DictReader(file)]
    assert {point["method"] for point in points} >= {"eero", "patience", "oracle", "single_exit"}
    rules = ("eero", "eero_marginal", "best_single_exit")
    rivals = zip(*([each for each in points if each["method"] == name] for name in rules), strict=True)
    for ours, paper, single in rivals:  # at every budget that is allowed
        assert float(ours["accuracy"]) >= float(paper["accuracy"]) - 0.001
        assert float(ours["accuracy"]) >= float(single["accuracy"]) - 0.001
        assert float(paper["mean_cost"]) <= float(ours["mean_cost"]) + 0.001 * float(ours["full_cost"])
        assert float(ours["mean_cost"]) <= 1.025 * float(ours["budget"])
    ours, paper, single = (float(number) for number in re.findall(r"([\d.]+)%(?:,|$)", rows["CIFAR-100"]))
    assert ours >= paper >= single


def test_policies_with_further_promises_are_left(shown):
    place, _, _ = shown
    own = place / "alight-demo" / "cifar100"
    promised = {path.stem: load_policy(path).certificate for path in own.glob("*.json")}
    kinds = {name: certificate and certificate.contract for name, certificate in promised.items()}
    page = html.unescape((place / "alight-demo" / "report.html").read_text())
    told = {"policy": "probability", "batch": "batch", "stream": "stream", "careful": "excess_error", "auto": None}
    assert kinds == told
    assert all(str(certificate) in page for certificate in promised.values() if certificate)
    dearest, delay = re.search(r"dearest batch spent ([\d.]+)%.*raised after (\d+) of", page, re.DOTALL).groups()
    assert float(dearest) <= 100
    assert int(delay) <= 2000


def test_the_stream_is_never_ahead_of_its_budget_by_more_than_a_full_pass(shown):
    stream, test = load_policy(shown[0] / "alight-demo" / "cifar100" / "stream.json"), recordings.load().test
    test, half = test.take(np.random.default_rng(0).permutation(len(test))), len(test) // 2
    scores = np.concatenate([test.scores[:half], 0.3 * test.scores[half:]])  # which turn hard half-way
    decisions, _ = replay_on(stream, replace(test, scores=scores), batch_size=50)
    assert np.cumsum(decisions.spent - stream.budget)[49::50].max() <= stream.costs[-1]


def test_digits_to_train_to_calibrate_and_to_test_are_apart():
    parts = digits_in_three()
    assert [len(each.labels) for each in parts] == [797, 500, 500]
    assert {each.images.dtype for each in parts} == {np.dtype("uint8")}
    whole = np.concatenate([each.images for each in parts])
    assert len(np.unique(whole.reshape(1797, -1), axis=0)) == 1797  # no digit is there twice
    assert [len(set(each.labels.tolist())) for each in parts] == [10, 10, 10]


def test_where_exits_do_not_pay_the_line_says_so():
    nothing = Decisions([0], [0], [1.0], 1)
    slower = Comparison(64, 1000.0, 980.0, 0.98, 0.95, 1.02, (1.0, 1.0), (1.0, 1.0), nothing)
    assert _timed(slower).startswith("exits do not pay here: 0.98 times as fast")
    assert _timed(replace(slower, speedup=1.5, low=1.4)).startswith("1.50 times as fast")
    policy, costs = ExitAt(costs=(1.0,), open_exits=(0,), num_exits=1), Costs([1.0], [0.0], "ms")
    told = "Exits do not pay here (0.98 times as fast): run the plain network."
    plain = Plan(policy, False, 9.0, 9.0, 0.9, 0.9, costs, 64, None, reason=told)
    assert _planned(plain).endswith(f": {told}")
    assert "2.00 times as fast, 1.0 points lost" in _planned(replace(plain, pays=True, throughput=18.0, accuracy=0.89))
