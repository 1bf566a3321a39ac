"""A policy that is fitted again has a guarantee that was issued again, or none."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import made_up

from alight import Costs, calibrate
from alight.calibrate import CONTRACTS, certified_mean, certified_risk
from alight.calibrate.again import recalibrate
from alight.calibrate.crossval import on_exits
from alight.costs import Amount
from alight.errors import BadInput, BudgetTooSmall

COSTS = Costs(stages=[1.0, 1.0, 2.0, 2.0], heads=[0.1] * 4, unit="FLOPs")
TABLE = made_up(1, 1200, 4)
BROKEN = replace(TABLE, predictions=TABLE.predictions + 1)


def test_the_risk_of_one_exit_is_tested_on_the_new_recording():
    policy = certified_risk(calibrate.best_single_exit, risk="error", alpha=0.5)(COSTS, None, TABLE)
    opened = policy.open_exits
    again = recalibrate(policy, COSTS.at_exits(opened), made_up(2, 1200, 4).at_exits(opened))
    assert again.open_exits == opened
    assert again.certificate.numbers["error"] != policy.certificate.numbers["error"]  # other samples tested it
    with pytest.raises(BadInput, match="too near or above alpha"):
        recalibrate(policy, COSTS.at_exits(opened), BROKEN.at_exits(opened))


def test_the_guaranteed_cost_of_one_exit_is_the_new_one():
    policy = certified_mean(calibrate.best_single_exit)(COSTS, 3.0, TABLE)
    (index,) = policy.open_exits
    table, expensive = TABLE.at_exits([index]), Costs([9.0], [0.0])
    again = recalibrate(policy, expensive, table)
    assert "cost <= 9 FLOPs" in str(again.certificate)
    assert again.planned_cost == 9.0 <= again.budget == pytest.approx(9 * policy.budget / policy.costs[0])
    with pytest.raises(BudgetTooSmall):
        recalibrate(policy, expensive, table, Amount(3.0))


def test_the_cheapest_policy_of_a_risk_is_not_held_to_the_budget_that_it_happened_to_have():
    policy = certified_risk(calibrate.eero, risk="error", alpha=0.4)(COSTS, None, TABLE)
    assert policy.budget is not None
    assert recalibrate(policy, COSTS, made_up(2, 1200, 4)).certificate.contract == "error"


@pytest.mark.parametrize("risk", ["excess_error", "disagreement"])
def test_a_guarantee_against_the_last_exit_is_refused_where_that_is_closed(risk):
    policy = certified_risk(calibrate.eero, risk=risk, alpha=0.3)(COSTS, None, TABLE)
    opened = (0, 1, 2)
    part = calibrate.eero(COSTS.at_exits(opened), 2.0, TABLE.at_exits(opened))
    closing = replace(part, open_exits=opened, num_exits=4, certificate=policy.certificate)
    with pytest.raises(BadInput, match=r"compares with exit 4, which it closes.*keeps the last exit open"):
        recalibrate(closing, COSTS.at_exits(opened), TABLE.at_exits(opened))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_guarantee_that_the_budget_gives_for_free_is_issued_again(contract):
    policy = CONTRACTS[contract](calibrate.eero)(COSTS, 6.4, TABLE)
    again = recalibrate(policy, COSTS, TABLE)
    assert again.certificate.contract == contract
    assert np.isclose(again.budget, 6.4)


def test_a_budget_is_guaranteed_in_percent_of_the_full_network_where_the_last_exit_is_closed():
    opened = (0, 1, 2)
    policy = on_exits(certified_mean(calibrate.eero), opened)(COSTS, 3.0, TABLE)
    again = recalibrate(policy, COSTS.at_exits(opened), TABLE.at_exits(opened))
    assert again.full_cost == COSTS.full
    assert "mean cost <= 3 FLOPs (49.2 %)" in again.certificate.guarantee


@pytest.mark.parametrize("method", [calibrate.best_single_exit, calibrate.eero])
def test_a_policy_that_is_fitted_again_is_for_the_size_of_the_new_images(method):
    small, large = (replace(TABLE, sample_shape=(3, size, size)) for size in (16, 32))
    policy = method(COSTS, 3.0, small)
    opened = policy.open_exits
    assert recalibrate(policy, COSTS.at_exits(opened), large.at_exits(opened)).sample_shape == (3, 32, 32)


def test_the_full_network_as_the_cheapest_policy_of_a_risk_is_of_the_network_and_the_size_of_the_table():
    table = replace(TABLE, fingerprint="0123456789abcdef", sample_shape=(3, 16, 16))
    policy = certified_risk(calibrate.eero, risk="disagreement", alpha=0.01)(COSTS, None, table)
    assert policy.method == "full network"
    assert (policy.fingerprint, policy.sample_shape) == ("0123456789abcdef", (3, 16, 16))
