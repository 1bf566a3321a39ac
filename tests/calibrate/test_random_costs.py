"""Guarantees when every call has its own cost: what is tested, what is refused, and that they hold."""

import sys
from pathlib import Path

import numpy as np
import pytest
from made_up_log import MOST, columns_of, logged_rows
from scipy.stats import binom

from alight import calibrate, read_log, replay
from alight.calibrate import CONTRACTS, certified_mean, certified_probability, certified_risk, certified_stream
from alight.errors import BadInput

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import random_costs

LOG = read_log(columns_of(logged_rows(0, 800)))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_guarantee_needs_the_most_that_a_call_can_cost(contract):
    with pytest.raises(BadInput, match=r"give max_costs=\[\.\.\.\], 3 numbers; the largest cost seen is not a bound"):
        CONTRACTS[contract](calibrate.eero)(LOG.costs, "50%", LOG.outputs)
    with pytest.raises(BadInput, match=r"a call of large cost .*, above its max_costs of 0.005 USD"):
        CONTRACTS[contract](calibrate.eero, max_costs=[0.01, 0.01, 0.005])(LOG.costs, "50%", LOG.outputs)
    with pytest.raises(BadInput, match="give a positive number for each of the 3 members"):
        CONTRACTS[contract](calibrate.eero, max_costs=[0.01, 0.01])(LOG.costs, "50%", LOG.outputs)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("name", ["eero", "global_threshold", "patience", "learned_stopping"])
def test_every_contract_takes_methods_of_all_kinds(contract, name):
    policy = CONTRACTS[contract](calibrate.METHODS[name], max_costs=MOST)(LOG.costs, "60%", LOG.outputs)
    assert policy.certificate.contract == contract
    assert policy.budget == pytest.approx(0.6 * LOG.costs.full)
    assert "no call costs more" in str(policy.certificate) or "no request costs more" in str(policy.certificate)
    spent = replay(policy, LOG.outputs, batch_size=50).spent
    if contract == "batch":
        assert (spent.reshape(-1, 50).mean(axis=1) <= policy.budget).all()


def test_the_mean_is_certified_by_the_most_that_a_request_can_cost():
    policy = certified_mean(calibrate.eero, max_costs=MOST, seed=0)(LOG.costs, "50%", LOG.outputs)
    numbers = policy.certificate.numbers
    assert (400 * numbers["mean cost"] + sum(MOST)) / 401 <= policy.budget
    assert numbers["most per sample"] == pytest.approx(sum(MOST))


def test_a_budget_above_all_that_calls_can_cost_needs_no_test():
    policy = certified_mean(calibrate.eero, max_costs=MOST)(LOG.costs, "1400%", LOG.outputs)
    assert str(policy.certificate).startswith("Guaranteed for every sample: cost <= 0.0312 USD")


def test_what_so_few_requests_cannot_certify_is_refused_with_what_to_do():
    few = LOG.outputs.take(slice(30))
    with pytest.raises(BadInput, match=r"15 samples cannot certify .* raise the budget, lower max_costs, or log more"):
        certified_probability(calibrate.eero, max_costs=[1.0, 1.0, 1.0])(LOG.costs, "30%", few)


def test_the_law_of_exit_shares_is_not_used_where_costs_differ():
    with pytest.raises(BadInput, match="slack 'exact' knows the law of exit shares, not that of costs"):
        calibrate.eero(LOG.costs, "50%", LOG.outputs, slack="exact")


def test_lost_accuracy_is_certified_on_logs_alone_and_beside_a_budget():
    cheapest = certified_risk(calibrate.eero, risk="excess_error", alpha=0.1, seed=0)(LOG.costs, None, LOG.outputs)
    assert replay(cheapest, LOG.outputs).mean_cost < LOG.costs.full
    both = certified_risk(calibrate.eero, risk="excess_error", alpha=0.25, max_costs=MOST, seed=0)
    assert both(LOG.costs, "70%", LOG.outputs).certificate.contract == "probability, excess_error"


def test_a_stream_that_becomes_hard_still_keeps_its_bound():
    policy = certified_stream(calibrate.eero, max_costs=MOST, seed=0)(LOG.costs, "40%", LOG.outputs)
    hard = LOG.outputs.take(np.argsort(-LOG.outputs.costs[:, -1]))
    spent = np.cumsum(replay(policy, hard, batch_size=1).spent)
    assert (spent <= np.arange(1, len(hard) + 1) * policy.budget + sum(MOST)).all()


@pytest.mark.guarantee
@pytest.mark.parametrize("costs", random_costs.DISTRIBUTIONS)
def test_failure_rates_stay_within_delta_whatever_the_distribution_of_costs(costs, monkeypatch):
    monkeypatch.setattr(random_costs, "FRESH", 5000)
    rows = {row["contract"]: row for row in (*random_costs.contracts(costs, 40), *random_costs.accounts(costs, 20))}
    assert set(rows) == {"mean", "probability", "batch", "stream"}
    assert all(row["holds"] == "True" for row in rows.values()), rows


def test_the_judge_of_failure_rates_can_fail():
    over = np.full(2000, random_costs.BUDGET * 1.01)
    assert random_costs.judged("mean", "constant", np.full(2000, 2 * random_costs.BUDGET))["holds"] == "False"
    some = np.where(np.arange(2000) < binom.ppf(0.999, 2000, 0.05) + 1, over, 0.0)
    assert random_costs.judged("probability", "constant", some)["holds"] == "False"
