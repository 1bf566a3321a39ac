"""Commands on a log of models: a policy, dollars beside the largest model, and a sentence where something is wrong."""

import json

import pytest
from commands import run
from made_up_log import MOST, write_log

from alight import Router, load_policy, read_points

CAPS = ",".join(map(str, MOST))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log.csv")
    return tmp_path


def test_calibrate_shows_dollars_and_accuracy_beside_the_largest_model(folder, capsys):
    status, out, _ = run("calibrate log.csv --budget 50%", capsys)
    assert status == 0
    assert "cost per 1,000 requests" in out
    assert "large alone" in out
    assert out.splitlines()[-1].startswith("Not guaranteed: every call has its own cost; --max-costs")


def test_calibrate_guarantees_dollars_and_writes_a_policy_that_a_router_takes(folder, capsys):
    line = f"calibrate log.csv --budget '$2.50/1000' --max-costs {CAPS} -o policy.json"
    status, out, _ = run(line, capsys)
    assert status == 0
    assert "Guaranteed with 95 % confidence: mean cost <= 0.0025 USD" in out
    assert load_policy("policy.json").budget == pytest.approx(0.0025)
    status, out, _ = run(f"{line} --contract stream --json", capsys)
    assert json.loads(out)["policy"]["rule"] == "Metered"
    assert Router(load_policy("policy.json")).allowed > 0


def test_calibrate_bounds_the_accuracy_that_is_lost(folder, capsys):
    status, out, _ = run("calibrate log.csv --max-accuracy-loss 0.08", capsys)
    assert status == 0
    assert "error above the last exit's <= 8 %" in out


def test_sweep_and_report_take_a_log(folder, capsys):
    assert run("sweep log.csv --methods search,eero --budgets 30%,60% --report one.html", capsys)[0] == 0
    assert {point.method for point in read_points("points.csv")} >= {"search", "eero", "oracle", "single_exit"}
    assert run("report log.csv points.csv -o two.html", capsys)[0] == 0
    assert "medium" in (folder / "two.html").read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("calibrate log.csv --budget 50% --contract mean", "give max_costs"),
        ("calibrate log.csv --budget 1%", "below the cheapest exit"),
        ("calibrate log.csv --budget 50% --costs 1,2,3", "a log has its own costs"),
        ("calibrate log.csv --budget 50% --column cost=nothing", "no column 'nothing' for the cost"),
        ("calibrate log.csv --budget 50% --column price=cost_usd", "write KIND=NAME with KIND one of request"),
        ("calibrate log.csv --budget 50% --models small,huge", "the log has no model 'huge'"),
        ("calibrate log.csv --risk error --alpha 0.1 --max-accuracy-loss 0.1", "give one of them"),
        ("sweep log.csv log.csv", "give one log alone"),
    ],
)
def test_mistakes_are_named(line, said, folder, capsys):
    status, _, err = run(line, capsys)
    assert status == 1
    assert said in err
