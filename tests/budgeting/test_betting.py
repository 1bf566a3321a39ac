import numpy as np
import pytest
from scipy.stats import binom

from alight.budgeting.bounds import betting_p_value, hoeffding_bentkus_p_value, smallest_sample

TESTS = {
    "betting": lambda values, bound: betting_p_value(values, bound, 0.05),
    "hoeffding_bentkus": hoeffding_bentkus_p_value,
}
DRAWS = {
    "coins": (lambda rng, n: (rng.uniform(size=n) < 0.3).astype(float), 0.3),
    "rare": (lambda rng, n: (rng.uniform(size=n) < 0.02).astype(float), 0.02),
    "uniform": (lambda rng, n: rng.uniform(size=n), 0.5),
    "heavy": (lambda rng, n: rng.beta(0.1, 0.9, size=n), 0.1),
}


@pytest.mark.guarantee
@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("samples", [20, 300])
def test_a_true_claim_is_refuted_no_more_often_than_stated(test, draw, samples):
    make, mean = DRAWS[draw]
    refuted = sum(TESTS[test](make(np.random.default_rng(seed), samples), mean) <= 0.05 for seed in range(1000))
    assert refuted <= binom.ppf(0.999, 1000, 0.05)


@pytest.mark.parametrize("test", TESTS)
def test_a_claim_far_from_the_truth_is_refuted(test):
    values = (np.random.default_rng(0).uniform(size=1000) < 0.3).astype(float)
    assert TESTS[test](values, 0.4) < 0.01
    assert TESTS[test](values, 0.3) > 0.05
    assert TESTS[test](values, 0.2) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("test", TESTS)
def test_bounds_at_the_ends(test):
    assert TESTS[test](np.zeros(10), 0.0) == 1
    assert TESTS[test](np.ones(10), 0.5) == 1


def test_the_smallest_sample_is_the_smallest():
    for bound, delta in ((0.05, 0.05), (0.3, 0.01), (0.5, 0.1)):
        count = smallest_sample(bound, delta)
        assert betting_p_value(np.zeros(count), bound, delta) <= delta
        assert betting_p_value(np.zeros(count - 1), bound, delta) > delta
