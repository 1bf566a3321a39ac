"""The spend survives a clean stop exactly, and a crash by assuming the worst that the bound allows."""

import json

import pytest

from alight import calibrate
from alight.errors import BadFile, Mismatch
from alight.policies.paced import Pace
from alight.policies.policy import Threshold
from alight.serve.ledger import SpendLedger, SpendState, resume_state


@pytest.fixture(scope="module")
def policies(frozen):
    def certified(budget):
        return calibrate.certified_stream(calibrate.eero, seed=0)(frozen.costs, budget, frozen.labelled)

    return {"half": certified("50%"), "third": certified("33%")}


def spent(policy, samples, share):
    return Pace(admitted=samples, spent=share * samples * policy.budget)


def test_after_a_clean_stop_nothing_is_lost(policies, tmp_path):
    path, half = tmp_path / "spending.json", policies["half"]
    ledger = SpendLedger(resume_state(path, policies), path, reserve=100)
    ledger.admit(40)
    ledger.settle(spent(half, 40, 0.9))
    ledger.close()
    again = resume_state(path, policies)
    assert (again.name, again.pace.admitted, again.pace.spent) == ("half", 40, spent(half, 40, 0.9).spent)


def test_after_a_crash_all_reserved_samples_are_owed(policies, tmp_path):
    path, half = tmp_path / "spending.json", policies["half"]
    ledger = SpendLedger(resume_state(path, policies), path, reserve=100)
    ledger.admit(60)
    ledger.settle(spent(half, 60, 0.5))
    ledger.admit(60)  # more than is left of 100: written with 60 counted and 100 reserved
    ledger.settle(spent(half, 120, 0.5))
    again = resume_state(path, policies).pace
    assert again.admitted == 60
    assert again.spent == pytest.approx(60 * half.budget + half.costs[-1])  # as much as the bound allows
    for come in range(101):  # whatever really came, within its own bound, exceeds the budget by no more than is assumed
        worst = min(30 * half.budget + come * half.costs[-1], (60 + come) * half.budget + half.costs[-1])
        assert worst - (60 + come) * half.budget <= again.spent - 60 * half.budget + 1e-3


def test_the_state_is_written_before_samples_beyond_the_reserve_are_admitted(policies, tmp_path):
    path = tmp_path / "spending.json"
    ledger = SpendLedger(resume_state(path, policies), path, reserve=100)
    counts = []
    for size in (30, 30, 30, 30, 300, 1):
        ledger.admit(size)
        counts.append(json.loads(path.read_text())["reserved"])
    assert counts == [100, 100, 100, 100, 300, 100]


def test_another_policy_takes_over_what_is_owed_and_not_what_was_saved(policies):
    half, third = policies["half"], policies["third"]
    owing = SpendState("half", half, Pace(admitted=10, spent=10 * half.budget + 5.0)).under("third", third)
    assert (owing.pace.admitted, owing.pace.spent) == (0, pytest.approx(5.0, abs=1e-3))
    assert SpendState("half", half, spent(half, 10, 0.5)).under("third", third).pace.spent == 0


def test_the_policy_in_force_is_resumed_if_it_is_still_given(policies, tmp_path):
    path, half = tmp_path / "spending.json", policies["half"]
    ledger = SpendLedger(resume_state(path, policies), path)
    ledger.change("third", policies["third"])
    assert resume_state(path, policies).name == "third"
    ledger.settle(Pace(admitted=1, spent=policies["third"].budget + 7.0))
    ledger.close()
    other = resume_state(path, {"half": half})
    assert (other.name, other.pace.admitted, other.pace.spent) == ("half", 0, pytest.approx(7.0, abs=1e-3))


def test_a_state_that_is_broken_or_of_another_unit_is_refused(policies, tmp_path):
    path = tmp_path / "spending.json"
    SpendLedger(resume_state(path, policies), path).close()
    other = Threshold(thresholds=(0.5,), costs=(1.0, 2.0), unit="ms", budget=1.5)
    with pytest.raises(Mismatch, match="has costs in 'FLOPs', the policies in 'ms'"):
        resume_state(path, {"other": other})
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"pace": {}}))
    with pytest.raises(BadFile, match="its content is not usable"):
        resume_state(path, policies)
    path.write_text(path.read_text()[:100])
    with pytest.raises(BadFile, match="it is not whole JSON"):
        resume_state(path, policies)
