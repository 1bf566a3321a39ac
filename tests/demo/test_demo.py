"""The demo: from bare digits to a report, and what it prints is what was measured."""

import csv
import io
import json
import re
import shlex
import subprocess
import warnings
from contextlib import chdir, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from commands import shared_folder

from alight import Costs, HeadOutputs, Predictor, load_policy, recordings
from alight.cli.parser import COMMANDS, parser
from alight.demo import MAIN
from alight.demo.live import split_digits
from alight.policies.route import replay_on

PERCENT = r"([\d.]+) ?%"
RESULT = ("out.txt", "out.json", "err.txt")


class Shown(NamedTuple):
    """The folder in which the demo has run, its output, its values, and its progress."""

    place: Path
    text: str
    values: dict
    progress: str

    def line(self, start: str) -> str:
        """The line that starts with this, without it."""
        (found,) = (line for line in self.text.splitlines() if line.startswith(start))
        return found.removeprefix(start).strip()


@pytest.fixture(scope="session")
def shown(tmp_path_factory):
    """Run the demo once for all tests, over the folder of an earlier one."""
    place = shared_folder(tmp_path_factory.getbasetemp(), "demo", run_demo)
    text, values, progress = ((place / name).read_text() for name in RESULT)
    return Shown(place, text, json.loads(values), progress)


def run_demo(place):
    (place / "alight-demo" / "digits").mkdir(parents=True)
    (place / "alight-demo" / "report.html").write_text("old")
    with chdir(place), redirect_stderr(io.StringIO()) as err, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Early exit is not worth it on this machine")  # as on a busy one
        options = parser().parse_args(shlex.split(COMMANDS["demo"].examples[0]))
        result = options.run(options)
    for name, text in zip(RESULT, (result.text, result.as_json(), err.getvalue()), strict=True):
        (place / name).write_text(text)


@pytest.mark.slow
def test_progress_comes_with_the_seconds_and_in_the_order_of_the_work(shown):
    steps = re.findall(r"^\[ *\d+ s\] (\w+)", shown.progress, re.MULTILINE)
    assert steps == ["loading", "fitting", "training", *["comparing"] * 3, "calibrating", "writing"]
    assert all(bar in shown.progress for bar in ("train:", "record:", "sweep:", "fit: timing it"))


@pytest.mark.slow
def test_the_values_for_programs_are_those_of_the_table(shown):
    digits = shown.values["digits"]
    assert shown.values["missing"] == ""
    assert Path(shown.values["folder"]) == shown.place / "alight-demo"
    assert shown.values["report"] == shown.line("report:") == str(shown.place / "alight-demo" / "report.html")
    assert {path.name for path in (shown.place / "alight-demo").iterdir()} == {"cifar100", "digits", "report.html"}
    accuracies = [float(number) / 100 for number in re.findall(PERCENT, shown.line("accuracy"))]
    assert [digits["full_accuracy"], digits["accuracy"]] == pytest.approx(accuracies, abs=0.001)
    spent = float(re.findall(PERCENT, shown.line("of the full network"))[-1]) / 100
    assert digits["mean_cost"] / digits["full_cost"] == pytest.approx(spent, abs=0.001)


@pytest.mark.slow
def test_half_of_the_compute_loses_little_and_several_exits_are_used(shown):
    digits = shown.values["digits"]
    assert digits["full_accuracy"] >= 0.97
    assert digits["accuracy"] >= digits["full_accuracy"] - 0.015
    assert digits["mean_cost"] <= 0.53 * digits["full_cost"]  # the guarantee is about the mean of all digits
    assert sum(share > 0 for share in digits["exit_shares"]) >= 2
    assert digits["guarantee"] in shown.text
    certificate = load_policy(shown.place / "alight-demo" / "digits" / "policy.json").certificate
    assert certificate.contract == "probability"


@pytest.mark.slow
def test_the_folder_that_is_left_does_what_was_printed_on_digits_that_nothing_has_seen(shown):
    own = shown.place / "alight-demo" / "digits"
    with np.load(own / "test.npz") as file:
        images, labels = file["images"], file["labels"]
    decisions = Predictor.load(own)(images)
    assert decisions.mean_cost <= 0.58 * Costs.load(own / "costs.json").full
    assert decisions.accuracy(labels) >= 0.94
    tested = HeadOutputs.load(own / "test_outputs.npz")
    assert tested.correct()[:, -1].mean() == shown.values["digits"]["full_accuracy"]


@pytest.mark.slow
def test_the_next_command_runs_as_printed(shown):
    line = [*shlex.split(shown.line("next:")), "--samples", "32", "--batch-sizes", "32"]
    done = subprocess.run(line, cwd=shown.place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"with exits +[\d,]+ +[\d.]+x", done.stdout)


@pytest.mark.slow
def test_the_report_opens_with_what_was_printed(shown):
    digits, network = shown.values["digits"], networks_of(shown)["digits, live"]
    policy = load_policy(shown.place / "alight-demo" / "digits" / "policy.json")
    assert str(policy.certificate) in network["guarantees"][0]
    assert len(network["examples"]["images"]) == 60
    assert network["exits"] == digits["exits"]
    batched = next(run for run in digits["runs"] if run["batch_size"] == 64)
    names = ("speedup", "low", "high", "batch_size")
    assert {name: network["speed"][name] for name in names} == {name: batched[name] for name in names}
    assert network["speed"]["full_latency"] > 0
    assert network["smaller"]["accuracy"] > 0.9
    assert network["smaller"]["cost"] < 0.6 * digits["full_cost"]
    assert network["chosen"]["accuracy"] == pytest.approx(digits["accuracy"], abs=0.003)
    assert network["chosen"]["mean_cost"] == pytest.approx(digits["mean_cost"], rel=0.01)
    assert len({point[0] for point in network["points"]}) > 10
    assert networks_of(shown)[MAIN]["chosen"]["unit"] == "FLOPs"


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
    line = shown.line("CIFAR-100,").partition("accuracy ")[2]
    ours, single, full = (float(number) for number in re.findall(PERCENT, line))
    assert full >= ours >= single


@pytest.mark.slow
def test_policies_with_further_guarantees_are_written(shown):
    own = shown.place / "alight-demo" / "cifar100"
    certificates = {path.stem: load_policy(path).certificate for path in own.glob("*.json")}
    contracts = {name: certificate and certificate.contract for name, certificate in certificates.items()}
    page = "\n".join(networks_of(shown)[MAIN]["guarantees"])
    kinds = {"policy": "probability", "batch": "batch", "stream": "stream", "careful": "excess_error", "auto": None}
    assert contracts == kinds
    assert all(str(certificate) in page for certificate in certificates.values() if certificate)
    most, delay = re.search(r"most expensive batch spent ([\d.]+)%.*raised after (\d+) of", page, re.DOTALL).groups()
    assert float(most) <= 100
    assert int(delay) <= 2000


@pytest.mark.slow
def test_the_stream_is_never_ahead_of_its_budget_by_more_than_a_full_pass(shown):
    stream, test = load_policy(shown.place / "alight-demo" / "cifar100" / "stream.json"), recordings.load(MAIN).test
    test, half = test.take(np.random.default_rng(0).permutation(len(test))), len(test) // 2
    scores = np.concatenate([test.scores[:half], 0.3 * test.scores[half:]])  # which turn hard half-way
    decisions, _ = replay_on(stream, replace(test, scores=scores), batch_size=50)
    assert np.cumsum(decisions.spent - stream.budget)[49::50].max() <= stream.costs[-1]


def test_digits_for_training_validation_and_afterwards_are_disjoint():
    parts = split_digits()
    assert [len(each.labels) for each in parts] == [797, 800, 200]
    assert {each.images.dtype for each in parts} == {np.dtype("uint8")}
    whole = np.concatenate([each.images for each in parts])
    assert len(np.unique(whole.reshape(1797, -1), axis=0)) == 1797  # no digit is there twice
    assert [len(set(each.labels.tolist())) for each in parts] == [10, 10, 10]
