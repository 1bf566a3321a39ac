"""The demo: from bare digits to a report, and what it prints is what was measured."""

import csv
import io
import json
import re
import shlex
import subprocess
from contextlib import chdir, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from commands import shared_folder

from alight import Costs, Decisions, HeadOutputs, Predictor, load_model, load_policy, record, recordings
from alight.cli.parser import COMMANDS, parser
from alight.demo.live import _planned, _timed, split_digits
from alight.planning.plan import Plan
from alight.planning.timing import SpeedComparison
from alight.policies.policy import ExitAt
from alight.policies.route import replay_on

LINES = ["full network", "exits", "budget", "spent", "batch 1", "batch 64", "plan", "CIFAR-100", "report", "next"]
PERCENT = r"([\d.]+) %"
RESULT = ("out.txt", "out.json", "err.txt")


class Shown(NamedTuple):
    """The folder in which the demo has run, its lines by name, its values, and its progress."""

    place: Path
    lines: dict[str, str]
    values: dict
    progress: str


@pytest.fixture(scope="session")
def shown(tmp_path_factory):
    """Run the demo once for all tests, over the folder of an earlier one."""
    place = shared_folder(tmp_path_factory.getbasetemp(), "demo", run_demo)
    text, values, progress = ((place / name).read_text() for name in RESULT)
    lines = [re.split(r" {2,}", line, maxsplit=1) for line in text.splitlines()]
    assert [name for name, _ in lines] == LINES
    return Shown(place, dict(lines), json.loads(values), progress)


def run_demo(place):
    (place / "alight-demo" / "digits" / "network").mkdir(parents=True)
    (place / "alight-demo" / "report.html").write_text("old")
    with chdir(place), redirect_stderr(io.StringIO()) as err:
        options = parser().parse_args(shlex.split(COMMANDS["demo"].examples[0]))
        result = options.run(options)
    for name, text in zip(RESULT, (result.text, result.as_json(), err.getvalue()), strict=True):
        (place / name).write_text(text)


@pytest.mark.slow
def test_progress_comes_with_the_seconds_and_in_the_order_of_the_work(shown):
    steps = re.findall(r"^\[ *\d+ s\] (\w+)", shown.progress, re.MULTILINE)
    assert steps == [
        *("loading", "training", "measuring", "recording", "timing", "planning", "comparing"),
        *("comparing", "comparing", "calibrating", "writing"),
    ]
    assert all(bar in shown.progress for bar in ("train:", "record:", "sweep:"))


@pytest.mark.slow
def test_the_values_for_programs_are_those_of_the_lines(shown):
    digits = shown.values["digits"]
    assert shown.values["missing"] == ""
    assert Path(shown.values["folder"]) == shown.place / "alight-demo"
    assert shown.values["report"] == shown.lines["report"]
    assert {path.name for path in (shown.place / "alight-demo").iterdir()} == {"cifar100", "digits", "report.html"}
    flops, accuracy = re.match(rf"([\d.]+) MFLOPs per sample, {PERCENT} accuracy", shown.lines["full network"]).groups()
    assert digits["full_network"]["FLOPs"] == pytest.approx(1e6 * float(flops), rel=0.01)
    assert digits["full_network"]["accuracy"] == pytest.approx(float(accuracy) / 100, abs=0.001)
    assert digits["spent"] < 0.55
    assert digits["full_network"]["accuracy"] > 0.95


@pytest.mark.slow
def test_the_network_that_is_left_does_what_was_printed(shown):
    own = shown.place / "alight-demo" / "digits"
    model, policy = load_model(own / "network"), load_policy(own / "policy.json")
    with np.load(own / "test.npz") as file:
        images, labels = file["images"], file["labels"]
    decisions = Predictor(model, policy)(images)
    full = Costs.load(own / "costs.json").full
    spent, accuracy, *shares = (float(number) for number in re.findall(PERCENT, shown.lines["spent"]))
    assert decisions.mean_cost / full == pytest.approx(spent / 100, abs=0.003)
    assert decisions.accuracy(labels) == pytest.approx(accuracy / 100, abs=0.003)
    assert shares == pytest.approx(100 * decisions.exit_shares, abs=1)
    again, tested = record(model, (images, labels), progress=False), HeadOutputs.load(own / "test_outputs.npz")
    assert again.predictions.tolist() == tested.predictions.tolist()
    accuracies = [float(number) for number in re.findall(rf"{PERCENT} at", shown.lines["exits"])]
    assert accuracies == pytest.approx(100 * tested.correct().mean(axis=0), abs=0.06)


@pytest.mark.slow
def test_half_of_the_compute_loses_little_and_all_exits_are_used(shown):
    spent, accuracy, *shares = (float(number) for number in re.findall(PERCENT, shown.lines["spent"]))
    full = float(re.findall(rf"{PERCENT} at 100 %", shown.lines["exits"])[0])
    assert full >= 97
    assert accuracy >= full - 1.5
    assert 40 <= spent <= 53  # the guarantee is about the mean of all digits there may be, these are 500
    assert sum(share > 0 for share in shares) >= 3
    certificate = load_policy(shown.place / "alight-demo" / "digits" / "policy.json").certificate
    assert certificate.contract == "probability"
    assert str(certificate).startswith(shown.lines["budget"].removeprefix("50 % of the FLOPs. "))


@pytest.mark.slow
def test_the_next_command_runs_as_printed(shown):
    line = [*shlex.split(shown.lines["next"]), "--samples", "32", "--batch-sizes", "32"]
    done = subprocess.run(line, cwd=shown.place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"with exits +[\d,]+ +[\d.]+x", done.stdout)


@pytest.mark.slow
def test_the_report_has_the_guarantees_the_digits_and_the_plan(shown):
    assert shown.lines["report"] == str(shown.place / "alight-demo" / "report.html")
    policy = load_policy(shown.place / "alight-demo" / "digits" / "policy.json")
    network = networks_of(shown)["digits, live"]
    assert str(policy.certificate) in network["guarantees"][0]
    assert len(network["examples"]["images"]) == 60
    assert network["plan"]["pays"] in (True, False)
    assert network["exits"] == [*shown.values["digits"]["exits"]]


@pytest.mark.slow
def test_the_report_opens_with_what_was_printed(shown):
    digits, network = shown.values["digits"], networks_of(shown)["digits, live"]
    (batched,) = [run for run in digits["runs"] if run["batch_size"] == 64]
    assert {name: network["speed"][name] for name in ("speedup", "low", "high", "batch_size")} == {
        name: batched[name] for name in ("speedup", "low", "high", "batch_size")
    }
    assert network["speed"]["full_latency"] > 0
    assert digits["accuracy"] == pytest.approx(network["chosen"]["accuracy"], abs=0.003)
    assert digits["spent"] == pytest.approx(network["chosen"]["mean_cost"] / network["fullCost"], abs=0.003)
    assert networks_of(shown)[recordings.NAMES[0]]["chosen"]["unit"] == "FLOPs"


def networks_of(shown):
    """What the report's page holds, by network, its chosen point by column."""
    text = (shown.place / "alight-demo" / "report.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    for network in data["networks"]:
        if network["chosen"]:
            network["chosen"] = dict(zip(data["columns"], network["chosen"], strict=True))
    return {network["name"]: network for network in data["networks"]}


@pytest.mark.slow
def test_eero_is_ahead_of_the_papers_rule_and_of_single_exits(shown):
    with (shown.place / "alight-demo" / "cifar100" / "resnet18_cifar100_frozen.csv").open() as file:
        points = [*csv.DictReader(file)]
    assert {point["method"] for point in points} >= {"eero", "patience", "oracle", "single_exit"}
    rules = ("eero", "eero_marginal", "best_single_exit")
    rivals = zip(*([each for each in points if each["method"] == name] for name in rules), strict=True)
    for ours, paper, single in rivals:  # at every budget that is allowed
        assert float(ours["accuracy"]) >= float(paper["accuracy"]) - 0.001
        assert float(ours["accuracy"]) >= float(single["accuracy"]) - 0.001
        assert float(paper["mean_cost"]) <= float(ours["mean_cost"]) + 0.001 * float(ours["full_cost"])
        assert float(ours["mean_cost"]) <= 1.025 * float(ours["budget"])
    ours, paper, single = (float(number) for number in re.findall(rf"{PERCENT}(?:,|$)", shown.lines["CIFAR-100"]))
    assert ours >= paper >= single


@pytest.mark.slow
def test_policies_with_further_guarantees_are_written(shown):
    own = shown.place / "alight-demo" / "cifar100"
    certificates = {path.stem: load_policy(path).certificate for path in own.glob("*.json")}
    contracts = {name: certificate and certificate.contract for name, certificate in certificates.items()}
    page = "\n".join(networks_of(shown)[recordings.NAMES[0]]["guarantees"])
    kinds = {"policy": "probability", "batch": "batch", "stream": "stream", "careful": "excess_error", "auto": None}
    assert contracts == kinds
    assert all(str(certificate) in page for certificate in certificates.values() if certificate)
    most, delay = re.search(r"most expensive batch spent ([\d.]+)%.*raised after (\d+) of", page, re.DOTALL).groups()
    assert float(most) <= 100
    assert int(delay) <= 2000


@pytest.mark.slow
def test_the_stream_is_never_ahead_of_its_budget_by_more_than_a_full_pass(shown):
    stream, test = load_policy(shown.place / "alight-demo" / "cifar100" / "stream.json"), recordings.load().test
    test, half = test.take(np.random.default_rng(0).permutation(len(test))), len(test) // 2
    scores = np.concatenate([test.scores[:half], 0.3 * test.scores[half:]])  # which turn hard half-way
    decisions, _ = replay_on(stream, replace(test, scores=scores), batch_size=50)
    assert np.cumsum(decisions.spent - stream.budget)[49::50].max() <= stream.costs[-1]


def test_digits_for_training_calibration_and_test_are_disjoint():
    parts = split_digits()
    assert [len(each.labels) for each in parts] == [797, 500, 500]
    assert {each.images.dtype for each in parts} == {np.dtype("uint8")}
    whole = np.concatenate([each.images for each in parts])
    assert len(np.unique(whole.reshape(1797, -1), axis=0)) == 1797  # no digit is there twice
    assert [len(set(each.labels.tolist())) for each in parts] == [10, 10, 10]


def test_where_early_exit_is_not_worth_it_the_line_says_so():
    nothing = Decisions([0], [0], [1.0], 1)
    slower = SpeedComparison(64, 1000.0, 980.0, 0.98, 0.95, 1.02, (1.0, 1.0), (1.0, 1.0), nothing, nothing)
    assert _timed(slower).startswith("early exit is not worth it here: 0.98x as fast")
    assert _timed(replace(slower, speedup=1.5, low=1.4)).startswith("1.50x as fast")
    policy, costs = ExitAt(costs=(1.0,), open_exits=(0,), num_exits=1), Costs([1.0], [0.0], "ms")
    reason = "Use the full network."
    full = Plan(policy, False, 9.0, 9.0, 0.9, 0.9, costs, 64, None, reason=reason)
    assert _planned(full).endswith(f": {reason}")
    assert "2.00x as fast, 1.0 points lost" in _planned(replace(full, pays=True, throughput=18.0, accuracy=0.89))
