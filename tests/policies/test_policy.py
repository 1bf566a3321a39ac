import json
import math

import numpy as np
import pytest

from alight import HeadOutputs, load_policy
from alight.display import quantity
from alight.errors import BadFile, BadInput, Mismatch
from alight.policies.combinations import Vote
from alight.policies.limits import Quota
from alight.policies.policy import ExitAt, Mixture, Patience, Streak, Threshold

COMMON = {
    "costs": (1.0, 2.5, 4.0),
    "unit": "ms",
    "budget": 3.0,
    "method": "by hand",
    "settings": {"patience": 2, "why": "x"},
}
POLICIES = {
    "threshold": Threshold((0.3, math.inf), (1.0, 0.25), exit_rates=(0.5, 0.0, 0.5), **COMMON),
    "always": Threshold((-math.inf, math.inf), **COMMON),
    "closed": Threshold((0.7,), costs=(1.0, 4.0), open_exits=(0, 3), num_exits=5, score="negative_entropy"),
    "named": Threshold((0.7,), costs=(1.0, 4.0), exits=("layer1", "end"), full_cost=8.0),
    "streak": Streak(0.25, 2, **COMMON),
    "streak, never": Streak(math.inf, 2, **COMMON),
    "patience": Patience(2, **COMMON),
    "exit at": ExitAt(costs=(2.0,), open_exits=(1,), num_exits=3),
    "mixture": Mixture(Patience(2, **COMMON), Streak(0.5, 1, **COMMON), 0.125, salt=2**53 - 1, **COMMON),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_survives_saving(name, tmp_path):
    policy = POLICIES[name]
    policy.save(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy


def test_infinite_thresholds_are_words_in_the_file(tmp_path):
    POLICIES["always"].save(tmp_path / "policy.json")
    assert json.loads((tmp_path / "policy.json").read_text())["thresholds"] == ["always", "never"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_prints_as_a_person_would_read_it(name):
    policy = POLICIES[name]
    text = str(policy)
    assert policy.score in text
    for exit_index, cost in zip(policy.open_exits, policy.costs, strict=True):
        name = policy.exit_names[exit_index]
        assert any(line.startswith(name) and quantity(cost, policy.unit) in line for line in text.splitlines())
    if policy.budget is not None:
        assert "budget 3 ms per sample" in text
    if policy.exit_rates:
        assert "50.0 %" in text
        assert f"planned {quantity(policy.planned_cost, policy.unit)}" in text
    if isinstance(policy, Threshold):
        assert "everyone" in text


def test_arrays_and_lists_become_plain_tuples():
    policy = Threshold(np.array([0.5]), [0.5], costs=np.array([1.0, 2.0]))
    assert policy == Threshold((0.5,), (0.5,), costs=(1.0, 2.0))
    assert all(type(value) is float for value in policy.thresholds + policy.costs)


def test_numpy_scalars_are_saved_as_numbers(tmp_path):
    settings = {"seed": np.int64(1), "temperature": np.float32(0.5)}
    policy = Streak(np.float64(0.5), np.int64(2), costs=np.array([1.0, 2.0]), settings=settings)
    policy.save(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy
    assert hash(policy) == hash(load_policy(tmp_path / "policy.json"))


def test_a_mixture_prints_the_thresholds_of_both_parts():
    parts = [Threshold((0.25,), costs=(1.0, 2.0)), Threshold((0.75,), costs=(1.0, 2.0))]
    text = str(Mixture(*parts, 0.5, costs=(1.0, 2.0)))
    assert "first threshold" in text
    assert "0.25" in text
    assert "0.75" in text


def test_a_policy_refuses_a_table_of_another_network_or_score():
    policy = Threshold((0.5,), costs=(1.0, 2.0))
    with pytest.raises(Mismatch, match="for 2 exits and the table has 3"):
        policy.check(HeadOutputs(np.zeros((1, 3)), np.zeros((1, 3), int)))
    with pytest.raises(Mismatch, match="calibrated on 'margin' and the table's score is 'negative_entropy'"):
        policy.check(HeadOutputs(np.zeros((1, 2)), np.zeros((1, 2), int), score="negative_entropy"))


BAD = {
    "no costs": (lambda: Patience(1, costs=()), "no costs"),
    "falling costs": (lambda: Patience(1, costs=(2.0, 1.0)), "positive, increasing"),
    "exits out of order": (lambda: Patience(1, costs=(1.0, 2.0), open_exits=(1, 0)), "increasing indices"),
    "exits beyond": (lambda: Patience(1, costs=(1.0,), open_exits=(4,), num_exits=3), "open exits"),
    "costs for others": (lambda: Patience(1, costs=(1.0, 2.0), open_exits=(1,)), "one each"),
    "rates for others": (
        lambda: Patience(1, costs=(1.0, 2.0), exit_rates=(1.0,)),
        r"exit rates \(1.0,\) for open exits \(0, 1\)",
    ),
    "thresholds for others": (lambda: Threshold((0.5, 0.5), costs=(1.0, 2.0)), "2 thresholds and 2 tie shares for 2"),
    "NaN": (lambda: Threshold((math.nan,), costs=(1.0, 2.0)), "NaN"),
    "two exits at once": (lambda: ExitAt(costs=(1.0, 2.0)), "opens 2 exits"),
    "unlike parts": (
        lambda: Mixture(Patience(1, costs=(1.0, 2.0)), Patience(1, costs=(1.0, 3.0)), 0.5, costs=(1.0, 2.0)),
        "same open exits",
    ),
    "NaN costs": (lambda: Patience(1, costs=(1.0, math.nan)), "finite"),
    "half an exit": (lambda: Patience(1, costs=(1.0,), open_exits=(0.5,)), "whole numbers"),
    "score of no text": (lambda: Patience(1, costs=(1.0,), score=3), "must be texts"),
    "negative budget": (lambda: Patience(1, costs=(1.0,), budget=-1.0), "budget -1.0"),
    "rates beyond 1": (lambda: Patience(1, costs=(1.0,), exit_rates=(2.0,)), "must lie in"),
    "rates that do not add up": (
        lambda: Patience(1, costs=(1.0, 2.0), exit_rates=(0.5, 0.4)),
        r"exit rates \(0.5, 0.4\) must add up to 1",
    ),
    "tie share": (lambda: Threshold((0.5,), (1.5,), costs=(1.0, 2.0)), "tie shares"),
    "salt": (lambda: Patience(1, costs=(1.0,), salt=2**53), "salt 9007199254740992 must be a whole number from 0 to"),
    "salt that is not whole": (lambda: Patience(1, costs=(1.0,), salt=0.5), "salt 0.5 must be a whole number"),
    "impatience": (lambda: Patience(-1, costs=(1.0,)), "0 or more"),
    "no streak": (lambda: Streak(0.5, 0, costs=(1.0,)), "1 or more"),
    "full cost": (lambda: Patience(1, costs=(1.0,), full_cost=0.0), "full_cost 0.0 must be a positive number"),
    "names for others": (lambda: Patience(1, costs=(1.0,), exits=("a", "b")), "give the name of each, or none"),
    "share": (lambda: Mixture(*2 * [Patience(1, costs=(1.0,))], 1.5, costs=(1.0,)), "share 1.5"),
}


@pytest.mark.parametrize("case", BAD)
def test_parts_that_do_not_fit_are_refused(case):
    build, message = BAD[case]
    with pytest.raises(BadInput, match=message):
        build()


def test_files_that_are_not_policies_are_refused_by_name(tmp_path):
    good = {"alight": "Policy", "schema": 1} | POLICIES["threshold"].to_dict()
    cases = {
        json.dumps(good)[:-40]: "not whole JSON",
        json.dumps({"alight": "Costs", "schema": 1}): "it is a Costs, not a Policy",
        json.dumps(good | {"schema": 2}): "its schema is 2 and this alight reads up to 1; upgrade alight",
        json.dumps(good | {"rule": "os.system"}): "it lacks 'os.system'",
        json.dumps({key: value for key, value in good.items() if key != "costs"}): "not usable",
        json.dumps(good | {"thresholds": ["sometimes", 1.0]}): "it lacks 'sometimes'",
        json.dumps(good | {"thresholds": [1.0]}): "1 thresholds",
        json.dumps(good | {"surprise": 1}): "surprise",
        json.dumps(good | {"costs": []}): "no costs",
        json.dumps(good | {"schema": True}): "not a Policy",
        json.dumps(good | {"budget": "much"}): "positive number",
    }
    path = tmp_path / "policy.json"
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(BadFile, match=message) as caught:
            load_policy(path)
        assert "policy.json" in str(caught.value)


def test_a_policy_says_what_a_walk_must_know_of_its_combination():
    plain = Threshold(thresholds=(0.5,), costs=(1.0, 3.0))
    vote = Vote(exits=(0, 1), constants=((0.0,), (0.0, 0.5)), slopes=((2.0,), (2.0, 2.0)), others=(0.0, 0.0))
    combined = Threshold(thresholds=(0.5,), costs=(1.0, 3.0), score="lead", combination=vote)
    outputs = HeadOutputs(scores=[[0.25, 0.5]], predictions=[[3, 4]])
    assert (plain.inputs, plain.takes_single_samples) == (("margin",), True)
    assert (combined.inputs, combined.takes_single_samples) == (("margin",), True)
    assert not Quota(costs=(1.0, 3.0), exit_rates=(0.5, 0.5), budget=2.0).takes_single_samples
    assert plain.view(outputs) is outputs
    assert combined.view(outputs).score == "lead"


def test_a_size_of_images_is_whole_numbers():
    for shape in ((3, 0, 16), (3, 16.0, 16), ("3", 16, 16)):
        with pytest.raises(BadInput, match=r"sample shape .* give whole numbers above 0, or none"):
            Threshold((0.5,), costs=(1.0, 2.0), sample_shape=shape)
