"""A lens in the walk is the lens over the table, for arrays and tensors; each lens keeps its own laws."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import made_up
from hypothesis import given
from hypothesis import strategies as st

from alight import HeadOutputs, load_policy, replay, route
from alight.errors import BadFile, BadInput
from alight.policies.lenses import LENSES, Ensemble, Gain, Recall, lens_from_dict
from alight.policies.policy import Mixture, Patience, Streak, Threshold

KINDS = ["gain", "recall", "ensemble"]


def spoken(seed: int, samples: int, exits: int, classes: int = 4) -> HeadOutputs:
    """Outputs with log-probabilities and a second score, some of them equal."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=samples)
    logits = rng.normal(size=(samples, exits, classes)).round(1)
    logits[np.arange(samples), :, labels] += np.linspace(0.5, 2.0, exits)
    return HeadOutputs.from_logits(logits, labels, features=["negative_entropy"], keep_log_probabilities=True)


def some_lens(kind: str, exits: tuple[int, ...], rng: np.random.Generator):
    """A lens of this kind with numbers by chance."""
    count = len(exits)
    if kind == "gain":
        knots = tuple(((0.2, 0.5), (-0.5,)) for _ in exits)
        sizes = [1 + 3 + 2, *[1 + 8 + 6 + 4] * (count - 1)]
        weights = tuple(tuple(rng.normal(size=size).tolist()) for size in sizes)
        return Gain(exits=exits, columns=("margin", "negative_entropy"), knots=knots, weights=weights)
    if kind == "recall":
        heights = tuple(tuple(np.sort(rng.uniform(size=3)).tolist()) for _ in exits)
        handicaps = (0.0, *rng.uniform(0, 0.2, size=count - 1).tolist())
        return Recall(exits=exits, levels=((0.0, 0.3, 1.0),) * count, reliabilities=heights, handicaps=handicaps)
    return Ensemble(
        exits=exits,
        kept=(0.0, *rng.uniform(size=count - 1).tolist()),
        fresh=tuple(rng.uniform(size=count).tolist()),
    )


@st.composite
def cases(draw):
    """A table, a lens over its open exits, and a policy whose levels lie among the scores that the lens gives."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    exits = draw(st.integers(1, 5))
    outputs = spoken(int(rng.integers(10**6)), draw(st.integers(1, 50)), exits)
    opened = tuple(sorted(draw(st.sets(st.integers(0, exits - 1), min_size=1))))
    lens = some_lens(draw(st.sampled_from(KINDS)), opened, rng)
    seen = lens.apply(outputs)
    common = {
        "costs": np.cumsum(np.ones(len(opened))),
        "open_exits": opened,
        "num_exits": exits,
        "score": lens.score,
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

    return rule(draw(st.sampled_from(["threshold", "streak", "patience", "mixture"]))), lens, outputs


@given(cases(), st.integers(1, 60))
def test_the_lens_in_the_walk_is_the_lens_over_the_table(case, batch_size):
    policy, lens, outputs = case
    over_table = replay(policy, lens.apply(outputs))
    in_walk = replay(replace(policy, lens=lens), outputs)
    in_batches = replay(replace(policy, lens=lens), outputs, batch_size=batch_size)
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
def test_arrays_and_tensors_take_the_same_steps_through_a_lens(case):
    torch = pytest.importorskip("torch")
    policy, lens, outputs = case
    policy = replace(policy, lens=lens)
    assert walked(policy, outputs, torch.tensor) == walked(policy, outputs, np.asarray)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_and_tensors_look_alike_through_a_lens(kind):
    torch = pytest.importorskip("torch")
    outputs = spoken(0, 500, 4)
    lens = some_lens(kind, (0, 1, 2, 3), np.random.default_rng(1))
    arrays, tensors = (), ()
    for index in range(4):
        columns = [outputs.column(name)[:, index] for name in lens.inputs]
        answers, scores, arrays = lens.step(index, outputs.predictions[:, index], tuple(columns), arrays)
        said = torch.tensor(outputs.predictions[:, index])
        others, levels, tensors = lens.step(index, said, tuple(map(torch.tensor, columns)), tensors)
        assert levels.dtype == torch.float64
        np.testing.assert_array_equal(answers, others.numpy())
        np.testing.assert_allclose(scores, levels.numpy(), rtol=0, atol=1e-12)
        if kind != "ensemble":  # which takes exponentials
            np.testing.assert_array_equal(scores, levels.numpy())


@given(st.integers(0, 10**6))
def test_recall_without_handicap_never_lowers_reliability_along_exits(seed):
    outputs = spoken(seed, 40, 5)
    lens = replace(some_lens("recall", tuple(range(5)), np.random.default_rng(seed)), handicaps=())
    seen = lens.apply(outputs)
    assert (np.diff(seen.scores, axis=1) >= 0).all()
    alone = np.stack(
        [
            replace(lens, exits=(index,), levels=(line,), reliabilities=(height,), handicaps=())
            .apply(outputs)
            .scores[:, index]
            for index, (line, height) in enumerate(zip(lens.levels, lens.reliabilities, strict=True))
        ],
        axis=1,
    )
    np.testing.assert_array_equal(seen.scores, np.maximum.accumulate(alone, axis=1))
    said = outputs.predictions[np.arange(40), alone.argmax(axis=1)]
    unique = np.sort(alone, axis=1)[:, -1] > np.sort(alone, axis=1)[:, -2]
    np.testing.assert_array_equal(seen.predictions[unique, -1], said[unique])


def test_a_handicap_of_one_never_recalls():
    outputs = spoken(3, 100, 4)
    lens = replace(some_lens("recall", (0, 1, 2, 3), np.random.default_rng(3)), handicaps=(0.0, 1.0, 1.0, 1.0))
    np.testing.assert_array_equal(lens.apply(outputs).predictions, outputs.predictions)


def test_reliability_never_falls_as_the_score_rises():
    scores = np.sort(np.random.default_rng(0).uniform(-0.2, 1.2, size=2000))[:, None]
    rng = np.random.default_rng(1)
    levels, heights = (tuple(np.sort(rng.uniform(size=30)).tolist()) for _ in range(2))
    lens = Recall(exits=(0,), levels=(levels,), reliabilities=(heights,))
    seen = lens.apply(HeadOutputs(scores, np.zeros((2000, 1), dtype=int)))
    assert (np.diff(seen.scores[:, 0]) >= 0).all()
    np.testing.assert_allclose(seen.scores[:, 0], np.interp(scores[:, 0], levels, heights), rtol=0, atol=1e-12)


def test_recall_of_one_exit_answers_as_it_does():
    outputs = made_up(0, 50, 1)
    seen = Recall(exits=(0,), levels=((-1.0, 2.0),), reliabilities=((0.0, 1.0),)).apply(outputs)
    np.testing.assert_array_equal(seen.predictions, outputs.predictions)
    np.testing.assert_array_equal(np.argsort(seen.scores[:, 0]), np.argsort(outputs.scores[:, 0]))


def test_an_ensemble_with_one_weight_is_that_exit():
    outputs = spoken(0, 300, 3)
    own = Ensemble(exits=(0, 1, 2), kept=(0.0, 0.0, 0.0), fresh=(1.0, 1.0, 1.0)).apply(outputs)
    np.testing.assert_allclose(own.scores, outputs.scores, atol=5e-3)  # log-probabilities are kept in float16
    clear = outputs.scores > 1e-2
    np.testing.assert_array_equal(own.predictions[clear], outputs.predictions[clear])
    first = Ensemble(exits=(0, 1, 2), kept=(0.0, 1.0, 1.0), fresh=(1.0, 0.0, 0.0)).apply(outputs)
    np.testing.assert_array_equal(first.predictions, own.predictions[:, [0, 0, 0]])
    np.testing.assert_array_equal(first.scores, own.scores[:, [0, 0, 0]])


def test_an_ensemble_is_the_weighted_geometric_mean():
    outputs = spoken(1, 200, 3)
    lens = Ensemble(exits=(0, 1, 2), kept=(0.0, 0.5, 2.0), fresh=(1.0, 0.25, 0.75))
    logs = outputs.log_probabilities.astype(float)
    mean = np.exp(logs[:, 0] + 0.5 * logs[:, 1] + 0.75 * logs[:, 2])  # 2 * 0.5, 2 * 0.25, 0.75
    mean /= mean.sum(axis=1, keepdims=True)
    ordered = np.sort(mean, axis=1)
    np.testing.assert_allclose(lens.apply(outputs).scores[:, 2], ordered[:, -1] - ordered[:, -2], atol=1e-9)


def test_an_impossible_class_does_not_spoil_an_ensemble():
    logits = np.array([[[0.0, 1.0, -np.inf], [0.0, 1.0, 2.0]]])
    outputs = HeadOutputs.from_logits(logits, keep_log_probabilities=True)
    seen = Ensemble(exits=(0, 1), kept=(0.0, 0.0), fresh=(0.0, 1.0)).apply(outputs)
    assert np.isfinite(seen.scores).all()
    assert seen.predictions.tolist() == [[0, 2]]


def test_gain_leaves_answers_unchanged():
    outputs = spoken(0, 60, 3)
    seen = some_lens("gain", (0, 1, 2), np.random.default_rng(0)).apply(outputs)
    np.testing.assert_array_equal(seen.predictions, outputs.predictions)
    assert seen.score == "negative_gain"


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_keeps_its_lens_in_its_file(kind, tmp_path):
    outputs = spoken(0, 60, 3)
    lens = some_lens(kind, (0, 1, 2), np.random.default_rng(0))
    policy = Threshold((0.3, 0.4), costs=(1.0, 2.0, 3.0), score=lens.score, lens=lens)
    policy.save(tmp_path / "policy.json")
    loaded = load_policy(tmp_path / "policy.json")
    assert loaded == policy
    assert lens_from_dict(json.loads(json.dumps(lens.to_dict()))) == lens
    np.testing.assert_array_equal(replay(loaded, outputs).predictions, replay(policy, outputs).predictions)


def test_every_lens_is_registered_by_its_name():
    assert {"Gain": Gain, "Recall": Recall, "Ensemble": Ensemble} == LENSES


def test_a_file_with_an_unknown_lens_is_refused(tmp_path):
    lens = some_lens("recall", (0, 1), np.random.default_rng(0))
    Threshold((0.3,), costs=(1.0, 2.0), lens=lens).save(tmp_path / "policy.json")
    text = (tmp_path / "policy.json").read_text().replace('"Recall"', '"Monocle"')
    (tmp_path / "policy.json").write_text(text)
    with pytest.raises(BadFile, match="Monocle"):
        load_policy(tmp_path / "policy.json")


def test_a_policy_that_closes_an_exit_of_its_lens_is_refused():
    lens = some_lens("recall", (0, 1, 2), np.random.default_rng(0))
    with pytest.raises(BadInput, match=r"fitted for exits \(0, 1, 2\) and the policy opens \(0, 2\)"):
        Threshold((0.3,), costs=(1.0, 2.0), open_exits=(0, 2), lens=lens)


def test_a_table_of_fewer_exits_is_refused():
    lens = some_lens("recall", (0, 1, 2), np.random.default_rng(0))
    with pytest.raises(BadInput, match=r"a lens for exits \(0, 1, 2\) and a table of 2"):
        lens.apply(made_up(0, 10, 2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Ensemble(exits=(0, 1), kept=(0.0,), fresh=(1.0, 1.0)), "1 and 2 weights of an ensemble"),
        (lambda: Ensemble(exits=(0, 1), kept=(0.0, -0.5), fresh=(1.0, 1.0)), "must be at least 0"),
        (lambda: Ensemble(exits=(0, 1), kept=(0.5, 0.5), fresh=(1.0, 1.0)), "the first kept one 0"),
        (lambda: Ensemble(exits=(1, 0), kept=(0.0, 0.5), fresh=(1.0, 1.0)), "give increasing indices"),
        (lambda: Recall(exits=(0,), levels=(), reliabilities=()), "give one per exit"),
        (lambda: Recall(exits=(0,), levels=((0.0, 0.0),), reliabilities=((0.0, 1.0),)), "do not rise side by side"),
        (lambda: Recall(exits=(0,), levels=((0.0, 1.0),), reliabilities=((1.0, 0.0),)), "do not rise side by side"),
        (
            lambda: Recall(exits=(0,), levels=((0.0,),), reliabilities=((1.0,),), handicaps=(-1.0,)),
            "must be at least 0",
        ),
        (lambda: Gain(exits=(0,), columns=("margin",), knots=(), weights=()), "give one entry per exit"),
        (lambda: Gain(exits=(0,), columns=("margin",), knots=(((0.5,),),), weights=((0.0, 1.0),)), "take 3 weights"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(make, words):
    with pytest.raises(BadInput, match=words):
        make()
