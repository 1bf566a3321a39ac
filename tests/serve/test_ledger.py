"""What was spent survives: a clean stop exactly, any other by assuming the worst that the bound allows."""

import json

import pytest

from alight import calibrate
from alight.errors import BadFile, Mismatch
from alight.policies.paced import Pace
from alight.policies.policy import Threshold
from alight.serve.ledger import Book, Spending, resumed


@pytest.fixture(scope="module")
def policies(frozen):
    def made(budget):
        return calibrate.certified_stream(calibrate.eero)(frozen.costs, budget, frozen.labelled)

    return {"half": made("50%"), "third": made("33%")}


def spent(policy, samples, share):
    return Pace(admitted=samples, spent=share * samples * policy.budget)


def test_after_a_clean_stop_nothing_is_lost(policies, tmp_path):
    path, half = tmp_path / "spending.json", policies["half"]
    book = Book(resumed(path, policies), path, ahead=100)
    book.admit(40)
    book.settle(spent(half, 40, 0.9))
    book.close()
    again = resumed(path, policies)
    assert (again.name, again.pace.admitted, again.pace.spent) == ("half", 40, spent(half, 40, 0.9).spent)


def test_after_any_other_stop_what_may_have_come_is_owed(policies, tmp_path):
    path, half = tmp_path / "spending.json", policies["half"]
    book = Book(resumed(path, policies), path, ahead=100)
    book.admit(60)
    book.settle(spent(half, 60, 0.5))
    book.admit(60)  # more than is left of 100: written down with 60 known, 100 to come
    book.settle(spent(half, 120, 0.5))
    again = resumed(path, policies).pace
    assert again.admitted == 60
    assert again.spent == pytest.approx(60 * half.budget + half.costs[-1])  # as far ahead as the bound lets it
    for come in range(101):  # whatever really came, within its own bound, is no further ahead than is assumed
        worst = min(30 * half.budget + come * half.costs[-1], (60 + come) * half.budget + half.costs[-1])
        assert worst - (60 + come) * half.budget <= again.spent - 60 * half.budget + 1e-3


def test_a_write_comes_before_the_samples_that_it_allows(policies, tmp_path):
    path = tmp_path / "spending.json"
    book = Book(resumed(path, policies), path, ahead=100)
    counts = []
    for size in (30, 30, 30, 30, 300, 1):
        book.admit(size)
        counts.append(json.loads(path.read_text())["ahead"])
    assert counts == [100, 100, 100, 100, 300, 100]


def test_another_budget_takes_debts_along_and_no_savings(policies):
    half, third = policies["half"], policies["third"]
    ahead = Spending("half", half, Pace(admitted=10, spent=10 * half.budget + 5.0)).under("third", third)
    assert (ahead.pace.admitted, ahead.pace.spent) == (0, pytest.approx(5.0, abs=1e-3))
    assert Spending("half", half, spent(half, 10, 0.5)).under("third", third).pace.spent == 0


def test_the_policy_that_was_in_force_is_again_if_it_is_still_there(policies, tmp_path):
    path, half = tmp_path / "spending.json", policies["half"]
    book = Book(resumed(path, policies), path)
    book.change("third", policies["third"])
    assert resumed(path, policies).name == "third"
    book.settle(Pace(admitted=1, spent=policies["third"].budget + 7.0))
    book.close()
    other = resumed(path, {"half": half})
    assert (other.name, other.pace.admitted, other.pace.spent) == ("half", 0, pytest.approx(7.0, abs=1e-3))


def test_a_state_that_is_broken_or_of_another_unit_is_refused(policies, tmp_path):
    path = tmp_path / "spending.json"
    Book(resumed(path, policies), path).close()
    other = Threshold(thresholds=(0.5,), costs=(1.0, 2.0), unit="ms", budget=1.5)
    with pytest.raises(Mismatch, match="tells of costs in 'FLOPs' and the policies of 'ms'"):
        resumed(path, {"other": other})
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"pace": {}}))
    with pytest.raises(BadFile, match="its content is not usable"):
        resumed(path, policies)
    path.write_text(path.read_text()[:100])
    with pytest.raises(BadFile, match="it is not whole JSON"):
        resumed(path, policies)
