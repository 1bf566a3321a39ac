import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from alight.scores import SCORES, logit_margin, margin, max_probability, negative_entropy, probabilities, score_of

logits = arrays(np.float64, (4, 6), elements=st.floats(-50, 50, width=32))


@given(logits)
def test_probabilities_are_a_softmax(values):
    expected = np.exp(values) / np.exp(values).sum(-1, keepdims=True)
    np.testing.assert_allclose(probabilities(values), expected, rtol=1e-12)


@given(logits)
def test_scores_equal_their_definitions(values):
    shares = probabilities(values)
    ordered = np.sort(shares, axis=-1)
    np.testing.assert_array_equal(margin(shares), ordered[..., -1] - ordered[..., -2])
    np.testing.assert_array_equal(max_probability(shares), ordered[..., -1])
    np.testing.assert_allclose(negative_entropy(shares), (shares * np.log(shares)).sum(-1), atol=1e-12)
    raw = np.sort(values, axis=-1)
    np.testing.assert_array_equal(logit_margin(values), raw[..., -1] - raw[..., -2])


def test_huge_logits_neither_overflow_nor_saturate_the_logit_margin():
    values = np.array([[1e4, 0.0, -1e4], [2e4, 0.0, -1e4]])
    assert np.isfinite(probabilities(values)).all()
    assert logit_margin(values)[0] < logit_margin(values)[1]


def test_two_equal_tops_have_margin_zero():
    assert margin(np.array([0.4, 0.4, 0.2])) == 0


@pytest.mark.parametrize("name", SCORES)
def test_float32_logits_are_widened_first(name):
    values = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    assert score_of(name, values).dtype == np.float64
    np.testing.assert_array_equal(score_of(name, values), score_of(name, values.astype(np.float64)))


@pytest.mark.parametrize("name", SCORES)
def test_torch_tensors_give_the_same_scores(name):
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=(50, 5)) * 10
    values[0, :2] = 3.0
    from_torch = score_of(name, torch.from_numpy(values))
    assert from_torch.dtype == torch.float64
    np.testing.assert_allclose(from_torch.numpy(), score_of(name, values), rtol=1e-14, atol=1e-15)
