from dataclasses import replace

import numpy as np
import pytest
from conftest import made_up
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from alight import Decisions, HeadOutputs
from alight.errors import BadFile, BadInput, LabelsNeeded
from alight.scores import SCORES, probabilities


def same(left: HeadOutputs, right: HeadOutputs) -> bool:
    def equal(a, b):
        return (a is None and b is None) or np.array_equal(a, b)

    return (
        all(equal(getattr(left, name), getattr(right, name)) for name in ("scores", "predictions", "labels"))
        and equal(left.top_classes, right.top_classes)
        and equal(left.top_log_probabilities, right.top_log_probabilities)
        and left.score == right.score
        and left.features.keys() == right.features.keys()
        and all(np.array_equal(left.features[name], right.features[name]) for name in left.features)
    )


def test_risks_are_error_rates_against_labels_and_disagreement_without():
    outputs = HeadOutputs(np.zeros((4, 2)), [[0, 1], [1, 1], [0, 0], [1, 0]], labels=[1, 1, 1, 1])
    np.testing.assert_array_equal(outputs.risks(), [0.5, 0.5])
    np.testing.assert_array_equal(outputs.unlabelled().risks(), [0.5, 0.0])


@given(arrays(np.float64, (5, 3, 4), elements=st.floats(-30, 30, width=32)))
def test_from_logits_takes_a_block_or_one_array_per_exit(logits):
    block = HeadOutputs.from_logits(logits, features=["negative_entropy"])
    listed = HeadOutputs.from_logits([logits[:, exit_index] for exit_index in range(3)], features=["negative_entropy"])
    np.testing.assert_array_equal(block.scores, listed.scores)
    np.testing.assert_array_equal(block.predictions, logits.argmax(-1))
    np.testing.assert_array_equal(block.features["negative_entropy"], listed.features["negative_entropy"])
    np.testing.assert_array_equal(block.top_classes, np.argsort(-logits, axis=-1, kind="stable"))
    logs = np.take_along_axis(np.log(probabilities(logits)), block.top_classes, axis=-1)
    np.testing.assert_allclose(block.top_log_probabilities, logs, rtol=1e-3, atol=1e-7)
    assert block.top_log_probabilities.dtype == np.float16
    assert block.scores.dtype == np.float64


@pytest.mark.parametrize("score", SCORES)
def test_from_logits_carries_the_name_of_its_score(score):
    outputs = HeadOutputs.from_logits(np.random.default_rng(0).normal(size=(3, 2, 4)), score=score)
    assert outputs.score == score


def test_masked_classes_are_allowed_as_minus_infinity():
    outputs = HeadOutputs.from_logits(np.array([[[1.0, 2.0, -np.inf]]]))
    assert outputs.predictions.tolist() == [[1]]
    assert np.isfinite(outputs.scores).all()


def test_noise_unties_saturated_scores_and_keeps_clear_predictions():
    logits = np.zeros((200, 2, 3))
    logits[:, :, 1] = 60.0  # every margin is 1.0 in double precision
    plain = HeadOutputs.from_logits(logits)
    noisy = HeadOutputs.from_logits(logits, noise=1e-5, rng=np.random.default_rng(0))
    assert len(np.unique(plain.scores)) == 1
    assert len(np.unique(noisy.scores)) == noisy.scores.size
    np.testing.assert_array_equal(noisy.predictions, plain.predictions)
    again = HeadOutputs.from_logits(logits, noise=1e-5, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(again.scores, noisy.scores)


def test_noise_changes_no_prediction_whose_top_two_differ_by_more():
    logits = np.random.default_rng(1).normal(size=(3000, 2, 4))
    logits[::3, :, 0] = logits[::3, :, 1]  # some exact ties
    plain = HeadOutputs.from_logits(logits)
    noisy = HeadOutputs.from_logits(logits, noise=1e-3, rng=np.random.default_rng(0))
    changed = noisy.predictions != plain.predictions
    assert changed.any()
    assert (plain.scores[changed] <= 1e-3).all()


@pytest.mark.parametrize("labelled", [True, False])
def test_a_table_survives_saving(tmp_path, labelled):
    logits = np.random.default_rng(0).normal(size=(9, 3, 4))
    labels = np.arange(9) % 4 if labelled else None
    table = HeadOutputs.from_logits(logits, labels, "logit_margin", features=["margin", "negative_entropy"])
    table.save(tmp_path / "table.npz")
    assert same(HeadOutputs.load(tmp_path / "table.npz"), table)


def test_a_split_is_disjoint_complete_and_decided_by_its_generator():
    table = made_up(0, 100, 3)
    first, second = table.split(0.3, np.random.default_rng(0))
    assert (len(first), len(second)) == (30, 70)
    together = np.concatenate([first.scores, second.scores])
    np.testing.assert_array_equal(np.sort(together, axis=0), np.sort(table.scores, axis=0))
    assert same(first, table.split(0.3, np.random.default_rng(0))[0])
    assert not same(first, table.split(0.3, np.random.default_rng(1))[0])


def test_another_score_can_take_the_place_of_the_first():
    table = HeadOutputs.from_logits(np.random.default_rng(0).normal(size=(5, 2, 3)), features=["negative_entropy"])
    swapped = table.with_score("negative_entropy")
    assert swapped.score == "negative_entropy"
    np.testing.assert_array_equal(swapped.scores, table.features["negative_entropy"])
    assert same(swapped.with_score("margin"), table)
    assert table.with_score("margin") is table
    with pytest.raises(BadInput, match="no 'nothing', only margin, negative_entropy"):
        table.with_score("nothing")


def test_decisions_count_and_survive_saving(tmp_path):
    decisions = Decisions([1, 2, 1, 0], [0, 2, 0, 1], [1.0, 4.0, 1.0, 2.0], num_exits=4)
    np.testing.assert_array_equal(decisions.exit_shares, [0.5, 0.25, 0.25, 0.0])
    assert decisions.mean_cost == 2.0
    assert decisions.accuracy([1, 2, 0, 1]) == 0.5
    decisions.save(tmp_path / "decisions.npz")
    loaded = Decisions.load(tmp_path / "decisions.npz")
    np.testing.assert_array_equal(loaded.exits, decisions.exits)
    assert loaded.num_exits == 4


TWO = [[0, 1], [1, 1]]


def top_of(logs):
    return {"top": (np.zeros(np.shape(logs), int), logs)}


BAD_TABLES = {
    "NaN": ({"scores": [[0.1, np.nan], [0.2, 0.3]], "predictions": TWO}, "1 values that are.*sample 0 at index 1"),
    "infinite": ({"scores": [[0.1, np.inf], [0.2, np.inf]], "predictions": TWO}, "2 values that are NaN or infinite"),
    "shapes": ({"scores": np.zeros((2, 2)), "predictions": [[0, 1, 1], [0, 1, 1]]}, r"\(2, 3\) and scores \(2, 2\)"),
    "empty": ({"scores": np.zeros((0, 3)), "predictions": np.zeros((0, 3), int)}, r"empty, shape \(0, 3\)"),
    "one axis": ({"scores": [0.1, 0.2], "predictions": [0, 1]}, "1 axes"),
    "float predictions": ({"scores": np.zeros((2, 2)), "predictions": np.zeros((2, 2))}, "float64, not class indices"),
    "negative labels": ({"scores": np.zeros((2, 2)), "predictions": TWO, "labels": [0, -1]}, "labels hold -1"),
    "short labels": ({"scores": np.zeros((2, 2)), "predictions": TWO, "labels": [0]}, r"\(1,\) for 2 samples"),
    "multi-label": ({"scores": np.zeros((2, 2)), "predictions": TWO, "labels": TWO}, "multi-label"),
    "float labels": ({"scores": np.zeros((2, 2)), "predictions": TWO, "labels": [0.0, 1.0]}, "labels are float64"),
    "feature like the score": (
        {"scores": np.zeros((2, 2)), "predictions": TWO, "features": {"margin": np.zeros((2, 2))}}, "rename it"
    ),
    "huge index": ({"scores": np.zeros((2, 2)), "predictions": np.full((2, 2), 2**63, np.uint64)}, "stay below"),
    "words": ({"scores": [["a", "b"]], "predictions": [[0, 1]]}, "not a table of numbers"),
    "feature shape": ({"scores": np.zeros((2, 2)), "predictions": TWO, "features": {"x": [[1.0]]}}, "feature 'x' have"),
    "top shape": (
        {"scores": np.zeros((2, 2)), "predictions": TWO, **top_of(np.zeros((2, 3, 4)))}, r"\(2, 3, 4\) beside scores"
    ),
    "rising top": ({"scores": np.zeros((2, 2)), "predictions": TWO, **top_of([[[-2, -1]] * 2] * 2)}, "rise at 4"),
    "a class twice": ({"scores": np.zeros((2, 2)), "predictions": TWO, **top_of([[[-1, -2]] * 2] * 2)}, "twice at 4"),
    "positive top": ({"scores": np.zeros((2, 2)), "predictions": TWO, **top_of(np.ones((2, 2, 1)))}, "4 values"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_bad_table_is_refused_in_one_clear_sentence(case):
    arguments, message = BAD_TABLES[case]
    with pytest.raises(BadInput, match=message) as caught:
        HeadOutputs(**arguments)
    assert ":" in str(caught.value)
    assert "\n" not in str(caught.value)


BAD_LOGITS = {
    "one logit": ({"logits": np.zeros((3, 2, 1))}, r"1 class per exit.*stack \[0, logit\]"),
    "two axes": ({"logits": np.zeros((3, 2))}, "2 axes"),
    "empty": ({"logits": np.zeros((0, 2, 3))}, "empty"),
    "NaN": (
        {"logits": np.full((1, 1, 2), np.nan)},
        "2 values that are NaN or infinite, the first of sample 0 at index 0 of the exits",
    ),
    "all masked": ({"logits": np.full((1, 1, 2), -np.inf)}, "NaN or infinite"),
    "label out of range": (
        {"logits": np.zeros((1, 1, 3)), "labels": [3]},
        "labels run from 3 to 3, but the logits",
    ),
    "unknown score": ({"logits": np.zeros((1, 1, 3)), "score": "luck"}, "no score 'luck': choose one of margin"),
    "ragged": ({"logits": [np.zeros((2, 3)), np.zeros((2, 4))]}, "disagree in shape"),
    "words": ({"logits": "abc"}, "not numbers"),
    "complex": ({"logits": np.zeros((1, 1, 3), dtype=complex)}, "complex"),
    "no exits": ({"logits": []}, "empty"),
    "NaN noise": ({"logits": np.zeros((1, 1, 3)), "noise": float("nan")}, "noise nan"),
    "noise without dice": ({"logits": np.zeros((1, 1, 3)), "noise": 1e-5}, "explicit generator"),
    "noise on logits": (
        {"logits": np.zeros((1, 1, 3)), "score": "logit_margin", "noise": 1e-5, "rng": np.random.default_rng(0)},
        "logit_margin does not use",
    ),
}


@pytest.mark.parametrize("case", BAD_LOGITS)
def test_bad_logits_are_refused_in_one_clear_sentence(case):
    arguments, message = BAD_LOGITS[case]
    with pytest.raises(BadInput, match=message):
        HeadOutputs.from_logits(**arguments)


def test_labels_are_asked_for_where_the_truth_is_needed():
    with pytest.raises(LabelsNeeded, match="the oracle needs labels"):
        made_up(0, 5, 2).unlabelled().known_labels("the oracle")


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1, 0.01])
def test_a_split_with_an_empty_side_is_refused(fraction):
    with pytest.raises(BadInput, match="leaves one side empty"):
        made_up(0, 10, 2).split(fraction, np.random.default_rng(0))


def test_a_damaged_table_is_refused_by_name_however_it_is_damaged(tmp_path):
    made_up(0, 40, 3).save(tmp_path / "good.npz")
    whole = (tmp_path / "good.npz").read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.npz"
    refused = 0
    for _ in range(300):
        place, size = int(rng.integers(2, len(whole) - 40)), int(rng.integers(1, 40))
        removed = whole[:place] + whole[place + size :]
        flipped = whole[:place] + bytes(255 - byte for byte in whole[place : place + size]) + whole[place + size :]
        path.write_bytes(removed if rng.uniform() < 0.5 else flipped)
        try:
            HeadOutputs.load(path)
        except BadFile:  # and nothing else
            refused += 1
    assert refused > 250  # a few hit bytes that mean nothing


def test_tensors_are_taken_whatever_their_dtype_and_graph():
    torch = pytest.importorskip("torch")
    logits = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    outputs = HeadOutputs.from_logits(logits)
    np.testing.assert_array_equal(outputs.predictions, logits.argmax(-1).numpy())
    listed = HeadOutputs.from_logits([logits[:, exit_index].to(torch.bfloat16) for exit_index in range(2)])
    assert listed.scores.dtype == np.float64


def test_files_that_are_not_tables_are_refused_by_name(tmp_path):
    HeadOutputs.from_logits(np.random.default_rng(0).normal(size=(5, 2, 3))).save(tmp_path / "good.npz")
    whole = (tmp_path / "good.npz").read_bytes()
    (tmp_path / "truncated.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "foreign.npz", x=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object))
    np.save(tmp_path / "lone.npy", np.zeros(3))
    np.savez(tmp_path / "newer.npz", alight=np.array("HeadOutputs"), schema=np.array(99))
    np.savez(tmp_path / "lacking.npz", alight=np.array("HeadOutputs"), schema=np.array(1), scores=np.zeros((1, 1)))
    half = {name: values for name, values in np.load(tmp_path / "good.npz").items() if name != "top_log_probabilities"}
    np.savez(tmp_path / "half.npz", **half)
    Decisions([0], [0], [1.0]).save(tmp_path / "decisions.npz")
    for name, message in {
        "truncated.npz": "it is damaged",
        "text.npz": "it is not an .npz file",
        "empty.npz": "it is not an .npz file",
        "foreign.npz": "a file from elsewhere",
        "pickled.npz": "it is damaged",
        "lone.npy": "it is not an .npz file",
        "newer.npz": "schema is 99 and this alight reads up to 1; upgrade alight",
        "lacking.npz": "not usable",
        "half.npz": "only one of top_classes and top_log_probabilities",
        "decisions.npz": "it is a Decisions, not a HeadOutputs",
    }.items():
        with pytest.raises(BadFile, match=message) as caught:
            HeadOutputs.load(tmp_path / name)
        assert name in str(caught.value)


def test_the_size_of_images_survives_saving_and_tables_of_several_sizes_have_none(tmp_path):
    labelled = made_up(1, 40, 2)
    small, large = (replace(labelled, sample_shape=(3, size, size)) for size in (16, 32))
    small.save(tmp_path / "table.npz")
    assert HeadOutputs.load(tmp_path / "table.npz").sample_shape == (3, 16, 16)
    labelled.save(tmp_path / "table.npz")
    assert HeadOutputs.load(tmp_path / "table.npz").sample_shape == ()
    joined = [HeadOutputs.joined(parts).sample_shape for parts in ([small, small], [small, large], [small, labelled])]
    assert joined == [(3, 16, 16), (), ()]


def test_an_argument_that_a_table_does_not_have_is_refused():
    with pytest.raises(TypeError, match="HeadOutputs has no argument 'labelz'"):
        HeadOutputs([[0.5]], [[0]], labelz=[0])
