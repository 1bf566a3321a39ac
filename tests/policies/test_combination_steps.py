"""A combination in the walk is the combination of the table, for arrays and tensors; each keeps its own laws."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import made_up
from hypothesis import given
from hypothesis import strategies as st

from alight import HeadOutputs, load_policy, replay, route
from alight.errors import BadFile, BadInput
from alight.policies.combinations import COMBINATIONS, Gain, GeometricMean, Temperature, Vote, combination_from_dict
from alight.policies.policy import Mixture, Patience, Streak, Threshold

KINDS = ["vote", "gain", "geometric mean", "temperature"]


def spoken(seed: int, samples: int, exits: int, classes: int = 4) -> HeadOutputs:
    """Outputs with the likeliest three of four classes, some of them equal."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=samples)
    logits = rng.normal(size=(samples, exits, classes)).round(1)
    logits[np.arange(samples), :, labels] += np.linspace(0.5, 2.0, exits)
    return HeadOutputs.from_logits(logits, labels, features=["negative_entropy"], top=3)


def random_combination(kind: str, exits: tuple[int, ...], rng: np.random.Generator):
    """A combination of this kind with random numbers, some of them 0."""
    count = len(exits)
    if kind == "vote":
        rows = [[tuple(rng.uniform(-1, 2, size=size).clip(0).tolist()) for size in range(1, count + 1)] for _ in "ab"]
        others = tuple(rng.normal(size=count).tolist())
        return Vote(exits=exits, constants=tuple(rows[0]), slopes=tuple(rows[1]), others=others)
    if kind == "temperature":
        return Temperature(exits=exits, top=3, temperatures=tuple(rng.uniform(0.3, 3, size=count).tolist()), classes=4)
    if kind == "gain":
        knots = tuple(((0.2, 0.5), (-0.5,)) for _ in exits)
        sizes = [1 + 3 + 2, *[1 + 8 + 6 + 4] * (count - 1)]
        weights = tuple(tuple(rng.normal(size=size).tolist()) for size in sizes)
        of_classes = tuple(tuple(rng.normal(size=size).tolist()) for size in rng.integers(0, 5, size=count))
        columns = ("margin", "negative_entropy")
        return Gain(exits=exits, columns=columns, knots=knots, weights=weights, class_gains=of_classes)
    return GeometricMean(
        exits=exits,
        top=3,
        kept=(0.0, *rng.uniform(size=count - 1).tolist()),
        fresh=tuple(rng.uniform(size=count).tolist()),
    )


@st.composite
def cases(draw):
    """A table, a combination of its open exits, and a policy whose levels lie among the combined scores."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    exits = draw(st.integers(1, 5))
    outputs = spoken(int(rng.integers(10**6)), draw(st.integers(1, 50)), exits)
    opened = tuple(sorted(draw(st.sets(st.integers(0, exits - 1), min_size=1))))
    combination = random_combination(draw(st.sampled_from(KINDS)), opened, rng)
    seen = combination.apply(outputs)
    common = {
        "costs": np.cumsum(np.ones(len(opened))),
        "open_exits": opened,
        "num_exits": exits,
        "score": combination.score,
    }

    def level() -> float:
        return float(rng.choice(seen.scores[:, list(opened)].ravel()))

    def rule(kind):
        if kind == "threshold":
            size = len(opened) - 1
            return Threshold(
                tuple(level() for _ in range(size)), tuple(rng.choice([0.5, 1.0], size=size).tolist()), **common
            )
        if kind == "streak":
            return Streak(level(), int(rng.integers(1, 3)), **common)
        if kind == "patience":
            return Patience(int(rng.integers(0, 3)), **common)
        return Mixture(rule("threshold"), rule("patience"), float(rng.uniform()), **common)

    return rule(draw(st.sampled_from(["threshold", "streak", "patience", "mixture"]))), combination, outputs


@given(cases(), st.integers(1, 60))
def test_the_lens_in_the_walk_is_the_lens_over_the_table(case, batch_size):
    policy, combination, outputs = case
    over_table = replay(policy, combination.apply(outputs))
    in_walk = replay(replace(policy, combination=combination), outputs)
    in_batches = replay(replace(policy, combination=combination), outputs, batch_size=batch_size)
    for decisions in (in_walk, in_batches):
        np.testing.assert_array_equal(decisions.exits, over_table.exits)
        np.testing.assert_array_equal(decisions.predictions, over_table.predictions)
        np.testing.assert_array_equal(decisions.spent, over_table.spent)


def walked(policy, outputs, as_array):
    """Samples, exits and predictions in the order in which the walk gives them, over arrays of any library."""
    waiting = as_array(np.arange(len(outputs)))
    predictions = as_array(outputs.predictions)
    columns = [as_array(outputs.column(name)) for name in policy.inputs]

    def read(exit_index, staying):
        nonlocal waiting
        waiting = waiting[staying]
        return predictions[waiting, exit_index], tuple(each[waiting, exit_index] for each in columns)

    steps = list(route(policy, as_array(np.arange(len(outputs))), read))
    return [
        (open_index, np.asarray(samples).tolist(), np.asarray(answers).tolist())
        for open_index, samples, answers in steps
    ]


@given(cases())
def test_arrays_and_tensors_take_the_same_combined_steps(case):
    torch = pytest.importorskip("torch")
    policy, combination, outputs = case
    policy = replace(policy, combination=combination)
    assert walked(policy, outputs, torch.tensor) == walked(policy, outputs, np.asarray)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_and_tensors_combine_to_the_same_bits(kind):
    torch = pytest.importorskip("torch")
    outputs = spoken(0, 500, 4)
    combination = random_combination(kind, (0, 1, 2, 3), np.random.default_rng(1))
    arrays, tensors = (), ()
    for index in range(4):
        columns = [outputs.column(name)[:, index] for name in combination.inputs]
        answers, scores, arrays = combination.step(index, outputs.predictions[:, index], tuple(columns), arrays)
        said = torch.tensor(outputs.predictions[:, index])
        others, levels, tensors = combination.step(index, said, tuple(map(torch.tensor, columns)), tensors)
        assert levels.dtype == torch.float64
        np.testing.assert_array_equal(answers, others.numpy())
        np.testing.assert_array_equal(scores, levels.numpy())


def naive_vote(vote, predictions, scores):
    """The answer and its lead at the last of a sample's exits, from a dictionary of votes."""
    votes = {}
    numbers = zip(vote.constants[-1], vote.slopes[-1], predictions, scores, strict=True)
    for constant, slope, prediction, score in numbers:
        votes[prediction] = votes.get(prediction, 0.0) + constant + slope * score
    answer = max(votes, key=lambda each: votes[each])
    return answer, votes.pop(answer) - max([vote.others[-1], *votes.values()])


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_a_vote_counts_what_each_exit_casts_for_its_class(seed, exits):
    outputs = spoken(seed, 30, exits)
    vote = random_combination("vote", tuple(range(exits)), np.random.default_rng(seed))
    combined = vote.apply(outputs)
    for row in range(30):
        answer, lead = naive_vote(vote, outputs.predictions[row].tolist(), outputs.scores[row].tolist())
        assert combined.scores[row, -1] == pytest.approx(lead, abs=1e-12)
        assert combined.predictions[row, -1] == answer or abs(lead) < 1e-12 or lead < vote.others[-1]


def test_of_equal_votes_the_latest_exit_wins():
    vote = Vote(exits=(0, 1), constants=((0.0,), (1.0, 1.0)), slopes=((0.0,), (0.0, 0.0)), others=(0.0, 0.0))
    assert vote.apply(HeadOutputs([[0.5, 0.5]], [[7, 3]])).predictions.tolist() == [[7, 3]]


def test_a_geometric_mean_with_one_weight_is_that_exit():
    outputs = spoken(0, 300, 3)
    own = GeometricMean(exits=(0, 1, 2), kept=(0.0, 0.0, 0.0), fresh=(1.0, 1.0, 1.0), top=3).apply(outputs)
    clear = outputs.scores > 1e-2  # log-probabilities are kept in half precision
    np.testing.assert_array_equal(own.predictions[clear], outputs.predictions[clear])
    first = GeometricMean(exits=(0, 1, 2), kept=(0.0, 1.0, 1.0), fresh=(1.0, 0.0, 0.0), top=3).apply(outputs)
    np.testing.assert_array_equal(first.predictions[clear[:, 0]], own.predictions[clear[:, 0]][:, [0, 0, 0]])
    np.testing.assert_array_equal(first.scores, own.scores[:, [0, 0, 0]])


@pytest.mark.parametrize("top", [1, 2, 3, 9])
def test_a_geometric_mean_counts_classes_beyond_the_top_as_the_last_of_it(top):
    rng = np.random.default_rng(1)
    outputs = HeadOutputs.from_logits(2 * rng.normal(size=(200, 3, 9)), top=top)
    combination = GeometricMean(exits=(0, 1, 2), kept=(0.0, 0.5, 2.0), fresh=(1.0, 0.25, 0.75), top=top)
    logs = np.repeat(outputs.top_log_probabilities[..., -1:].astype(float), 9, axis=-1)  # (samples, exits, classes)
    np.put_along_axis(logs, outputs.top_classes.astype(int), outputs.top_log_probabilities.astype(float), axis=-1)
    mean = logs[:, 0] + 0.5 * logs[:, 1] + 0.75 * logs[:, 2]  # 2 * 0.5, 2 * 0.25, 0.75
    ordered, combined = np.sort(mean, axis=1), combination.apply(outputs)
    named = combined.predictions[:, 2]
    np.testing.assert_allclose(mean[np.arange(200), named], ordered[:, -1], atol=1e-12)
    np.testing.assert_allclose(combined.scores[:, 2], ordered[:, -1] - ordered[:, -2], atol=1e-12)


def test_an_impossible_class_does_not_spoil_a_geometric_mean():
    logits = np.array([[[0.0, 1.0, -np.inf], [0.0, 1.0, 2.0]]])
    outputs = HeadOutputs.from_logits(logits)
    seen = GeometricMean(exits=(0, 1), kept=(0.0, 0.0), fresh=(0.0, 1.0), top=3).apply(outputs)
    assert np.isfinite(seen.scores).all()
    assert seen.predictions.tolist() == [[1, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_keeps_its_lens_in_its_file(kind, tmp_path):
    outputs = spoken(0, 60, 3)
    combination = random_combination(kind, (0, 1, 2), np.random.default_rng(0))
    policy = Threshold((0.3, 0.4), costs=(1.0, 2.0, 3.0), score=combination.score, combination=combination)
    policy.save(tmp_path / "policy.json")
    loaded = load_policy(tmp_path / "policy.json")
    assert loaded == policy
    assert combination_from_dict(json.loads(json.dumps(combination.to_dict()))) == combination
    np.testing.assert_array_equal(replay(loaded, outputs).predictions, replay(policy, outputs).predictions)


def test_every_combination_is_registered_by_its_name():
    assert {"Vote": Vote, "Gain": Gain, "GeometricMean": GeometricMean, "Temperature": Temperature} == COMBINATIONS


def test_a_file_with_an_unknown_combination_is_refused(tmp_path):
    combination = random_combination("vote", (0, 1), np.random.default_rng(0))
    Threshold((0.3,), costs=(1.0, 2.0), combination=combination).save(tmp_path / "policy.json")
    text = (tmp_path / "policy.json").read_text().replace('"Vote"', '"Guess"')
    (tmp_path / "policy.json").write_text(text)
    with pytest.raises(BadFile, match="Guess"):
        load_policy(tmp_path / "policy.json")


def test_a_policy_that_closes_an_exit_of_its_combination_is_refused():
    combination = random_combination("vote", (0, 1, 2), np.random.default_rng(0))
    with pytest.raises(BadInput, match=r"fitted for exits \(0, 1, 2\) and the policy opens \(0, 2\)"):
        Threshold((0.3,), costs=(1.0, 2.0), open_exits=(0, 2), combination=combination)


def test_a_table_of_fewer_exits_is_refused():
    combination = random_combination("vote", (0, 1, 2), np.random.default_rng(0))
    with pytest.raises(BadInput, match=r"a combination of exits \(0, 1, 2\) and a table of 2"):
        combination.apply(made_up(0, 10, 2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GeometricMean(exits=(0, 1), kept=(0.0,), fresh=(1.0, 1.0), top=5), "1 and 2 weights of the mean"),
        (lambda: GeometricMean(exits=(0,), kept=(0.0,), fresh=(1.0,)), "at least one class"),
        (lambda: GeometricMean(exits=(0, 1), kept=(0.0, -0.5), fresh=(1.0, 1.0), top=5), "must be at least 0"),
        (lambda: GeometricMean(exits=(0, 1), kept=(0.5, 0.5), fresh=(1.0, 1.0), top=5), "the first kept one 0"),
        (lambda: GeometricMean(exits=(1, 0), kept=(0.0, 0.5), fresh=(1.0, 1.0), top=5), "give increasing indices"),
        (lambda: Temperature(exits=(0,), temperatures=(0.0,), classes=4, top=3), "one positive number per exit"),
        (lambda: Temperature(exits=(0,), temperatures=(1.0,), classes=2, top=3), "no more classes than there are"),
        (lambda: Vote(exits=(0,), constants=((1.0, 1.0),), slopes=((1.0,),), others=(0.0,)), "for each exit so far"),
        (lambda: Vote(exits=(0,), constants=((-1.0,),), slopes=((1.0,),), others=(0.0,)), "must be at least 0"),
        (lambda: Vote(exits=(0,), constants=((1.0,),), slopes=((1.0,),), others=()), "0 votes for other classes"),
        (lambda: Vote(exits=(0,), constants=((1.0,),), slopes=((1.0,),), others=(np.nan,)), "a Vote holds .* NaN"),
        (lambda: Vote(exits=(0,), constants=((np.inf,),), slopes=((1.0,),), others=(0.0,)), "NaN or infinite"),
        (lambda: GeometricMean(exits=(0,), kept=(0.0,), fresh=(np.inf,), top=5), "NaN or infinite: fit it again"),
        (lambda: Temperature(exits=(0,), temperatures=(np.inf,), classes=4, top=3), "NaN or infinite"),
        (lambda: Gain(exits=(0,), columns=("margin",), knots=(((),),), weights=((0.0, np.nan),)), "NaN or infinite"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(make, words):
    with pytest.raises(BadInput, match=words):
        make()
