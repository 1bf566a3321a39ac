"""The spend survives a clean stop exactly, and a crash by assuming the worst that the bound allows."""

import json
import shutil
from contextlib import closing

import pytest

from alight import calibrate
from alight.errors import BadFile, BadInput, Mismatch
from alight.policies.paced import Pace
from alight.policies.policy import Threshold
from alight.serve import ledger as ledger_module
from alight.serve.ledger import HOUR, SpendLedger, SpendState


@pytest.fixture(scope="module")
def policies(frozen):
    def certified(budget):
        return calibrate.certified_stream(calibrate.eero, seed=0)(frozen.costs, budget, frozen.labelled)

    return {"half": certified("50%"), "third": certified("33%")}


def found_in(path, policies):
    """The state that a service finds in a copy of the file, as after a crash of the one that wrote it."""
    copy = shutil.copy(path, path.with_name("copy.json"))
    with closing(SpendLedger(copy, policies)) as ledger:
        return ledger.state


def spent(policy, samples, share):
    return Pace(admitted=samples, spent=share * samples * policy.budget)


def test_after_a_clean_stop_nothing_is_lost(policies, tmp_path):
    path, half = tmp_path / "spending.json", policies["half"]
    ledger = SpendLedger(path, policies, reserve=100)
    ledger.admit(40)
    ledger.settle(spent(half, 40, 0.9))
    ledger.close()
    again = found_in(path, policies)
    assert (again.name, again.pace.admitted, again.pace.spent) == ("half", 40, spent(half, 40, 0.9).spent)


def test_after_a_crash_all_reserved_samples_are_owed(policies, tmp_path):
    path, half = tmp_path / "spending.json", policies["half"]
    ledger = SpendLedger(path, policies, reserve=100)
    ledger.admit(60)
    ledger.settle(spent(half, 60, 0.5))
    ledger.admit(60)  # more than is left of 100: written with 60 counted and 100 reserved
    ledger.settle(spent(half, 120, 0.5))
    again = found_in(path, policies).pace
    assert again.admitted == 60
    assert again.spent == pytest.approx(60 * half.budget + half.costs[-1])  # as much as the bound allows
    for come in range(101):  # whatever really came, within its own bound, exceeds the budget by no more than is assumed
        worst = min(30 * half.budget + come * half.costs[-1], (60 + come) * half.budget + half.costs[-1])
        assert worst - (60 + come) * half.budget <= again.spent - 60 * half.budget + 1e-3


def test_the_state_is_written_before_samples_beyond_the_reserve_are_admitted(policies, tmp_path):
    path = tmp_path / "spending.json"
    ledger = SpendLedger(path, policies, reserve=100)
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
    ledger = SpendLedger(path, policies)
    ledger.change("third", policies["third"])
    assert found_in(path, policies).name == "third"
    ledger.settle(Pace(admitted=1, spent=policies["third"].budget + 7.0))
    ledger.close()
    other = found_in(path, {"half": half})
    assert (other.name, other.pace.admitted, other.pace.spent) == ("half", 0, pytest.approx(7.0, abs=1e-3))


def test_a_file_of_another_unit_or_kind_is_refused_and_left_alone(policies, tmp_path):
    path = tmp_path / "spending.json"
    SpendLedger(path, policies).close()
    other = Threshold(thresholds=(0.5,), costs=(1.0, 2.0), unit="ms", budget=1.5)
    with pytest.raises(Mismatch, match="has costs in 'FLOPs', the policies in 'ms'"):
        found_in(path, {"other": other})
    policies["half"].save(path)
    with pytest.raises(BadFile, match="not a SpendState"):
        SpendLedger(path, policies)
    path.write_bytes(b"PK something else")
    with pytest.raises(BadFile, match="it is not whole JSON"):
        SpendLedger(path, policies)
    assert path.read_bytes() == b"PK something else"


@pytest.mark.parametrize("damage", ["changed", "truncated", "emptied"])
def test_of_a_damaged_file_one_full_cost_sample_is_owed(policies, tmp_path, damage):
    path, half = tmp_path / "spending.json", policies["half"]
    with closing(SpendLedger(path, policies)) as ledger:
        ledger.settle(spent(half, 1000, 1.0))
    text = path.read_text()
    changed = text.replace('"spent": ', '"spent": 0.0, "was": ', 1)
    path.write_text({"changed": changed, "truncated": text[:100], "emptied": ""}[damage])
    state = found_in(path, policies)
    assert (state.name, state.pace.admitted, state.pace.spent) == ("half", 0, half.costs[-1])


def test_two_services_do_not_share_a_file(policies, tmp_path):
    path = tmp_path / "spending.json"
    with closing(SpendLedger(path, policies)), pytest.raises(BadInput, match="another service keeps its spend in"):
        SpendLedger(path, policies)
    SpendLedger(path, policies).close()


def test_what_tenants_have_leased_survives_a_crash_and_ends_with_the_hour(policies, tmp_path, monkeypatch):
    path = tmp_path / "spending.json"
    monkeypatch.setattr(ledger_module.time, "time", lambda: 10 * HOUR + 600)
    with closing(SpendLedger(path, policies)) as ledger:
        assert ledger.lease("shop", cap=80.0, need=20.0, want=100.0) == (20.0, HOUR - 600)
        assert ledger.lease("shop", cap=80.0, need=1.0, want=100.0)[0] == 7.5
        crashed = path.read_text()
    path.write_text(crashed)
    with closing(SpendLedger(path, policies)) as ledger:
        assert ledger.lease("shop", cap=80.0, need=60.0, want=60.0)[0] == 0.0
        assert ledger.lease("shop", cap=80.0, need=52.5, want=60.0)[0] == 52.5
        assert ledger.lease("other", cap=80.0, need=60.0, want=60.0)[0] == 60.0
        monkeypatch.setattr(ledger_module.time, "time", lambda: 11 * HOUR)
        assert ledger.lease("shop", cap=80.0, need=80.0, want=80.0)[0] == 80.0
    path.write_text("")
    with closing(SpendLedger(path, policies)) as ledger:  # nobody knows what was leased in this hour
        assert ledger.lease("shop", cap=80.0, need=1.0, want=1.0)[0] == 0.0


def test_a_clock_that_is_set_back_does_not_begin_the_hour_anew(policies, tmp_path, monkeypatch):
    ledger = SpendLedger(tmp_path / "spending.json", policies)
    monkeypatch.setattr(ledger_module.time, "time", lambda: 100 * HOUR + 1)
    assert ledger.lease("shop", 10.0, 10.0, 10.0) == (10.0, HOUR - 1)
    monkeypatch.setattr(ledger_module.time, "time", lambda: 100 * HOUR - 60)
    assert ledger.lease("shop", 10.0, 1.0, 1.0) == (0.0, HOUR + 60)
    monkeypatch.setattr(ledger_module.time, "time", lambda: 101 * HOUR)
    assert ledger.lease("shop", 10.0, 1.0, 1.0) == (1.0, HOUR)
    monkeypatch.setattr(ledger_module.time, "time", lambda: 95 * HOUR)
    assert ledger.lease("shop", 10.0, 10.0, 10.0) == (0.0, HOUR)
    assert ledger.lease("shop", 10.0, 9.0, 9.0) == (9.0, HOUR)
    monkeypatch.setattr(ledger_module.time, "time", lambda: 96 * HOUR)
    assert ledger.lease("shop", 10.0, 10.0, 10.0) == (10.0, HOUR)
    ledger.close()
