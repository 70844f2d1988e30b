"""Intervals against published values and closed forms, and their coverage in simulations."""

import itertools
import math

import numpy as np
import pytest
from tests.raising import assert_raises

from whet.errors import WhetValueError
from whet.evaluation.statistics import Z, mean, pass_at_k, proportion, proportion_difference, sign_test


def coverage(make, truth, n_runs=4000):
    """Return the proportion of runs whose interval contains the true value."""
    rng = np.random.default_rng(0)
    intervals = [make(rng) for _ in range(n_runs)]
    return np.mean([low <= truth <= high for _, low, high in intervals])


def zeros_and_ones(n_ones, n):
    return np.repeat([1.0, 0.0], [n_ones, n - n_ones])


@pytest.mark.parametrize(
    ("n_ones", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_binary_proportions_have_wilsons_interval(n_ones, n, low, high):
    """Expected values: Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3."""
    found = proportion(zeros_and_ones(n_ones, n))
    assert found == pytest.approx((n_ones / n, low, high), abs=5e-5)


def test_bounds_of_wilsons_interval_have_p_value_of_5_percent_in_the_score_test():
    value, low, high = proportion(zeros_and_ones(7, 31))
    for p in (low, high):
        assert abs(value - p) / math.sqrt(p * (1 - p) / 31) == pytest.approx(Z)


def test_proportions_of_0_and_1_have_an_interval():
    assert proportion(np.ones(10)) == pytest.approx((1, 10 / (10 + Z**2), 1))
    assert proportion(np.zeros(10), n_draws=8) == pytest.approx((0, 0, Z**2 / (10 + Z**2)))
    assert proportion(np.ones(1)).low < 0.3


def test_identical_draws_count_as_one():
    item = zeros_and_ones(30, 100)
    repeated = np.repeat(item[:, None], 8, axis=1)
    assert proportion(repeated.mean(axis=1), n_draws=8) == pytest.approx(proportion(item))


def test_independent_draws_count_like_items():
    draws = np.random.default_rng(3).random((400, 8)) < 0.3
    few, every = proportion(draws.mean(axis=1), n_draws=8), proportion(draws.astype(float).ravel())
    assert few.high - few.low == pytest.approx(every.high - every.low, rel=0.1)
    # Underdispersed values do not make the interval narrower.
    even = np.full(50, 0.5)
    assert proportion(even, n_draws=2) == pytest.approx(proportion(zeros_and_ones(50, 100)))


@pytest.mark.parametrize("p", [0.03, 0.3, 0.9])
@pytest.mark.parametrize("n", [40, 400])
def test_intervals_of_proportions_cover_the_true_value(p, n):
    covered = coverage(lambda rng: proportion((rng.random(n) < p).astype(float)), p)
    assert 0.925 < covered < 0.985


def test_intervals_are_clustered_by_item():
    """Item difficulty is Beta(1, 3), mean 1/4. An interval that treats all draws as independent covers far less."""

    def draws(rng):
        return rng.random((100, 8)) < rng.beta(1, 3, size=(100, 1))

    clustered = coverage(lambda rng: proportion(draws(rng).mean(axis=1), n_draws=8), 0.25)
    naive = coverage(lambda rng: proportion(draws(rng).astype(float).ravel()), 0.25)
    assert 0.93 < clustered < 0.97 and naive < 0.85


def test_intervals_of_graded_means_cover_the_true_value():
    covered = coverage(lambda rng: mean(rng.beta(0.5, 1.5, size=200) * 3), 0.75)
    assert 0.93 < covered < 0.97
    assert mean(np.array([1.0, 2.0, 6.0])) == pytest.approx((3, 3 - Z * math.sqrt(7 / 3), 3 + Z * math.sqrt(7 / 3)))
    single = mean(np.array([0.5]))
    assert single.value == 0.5 and math.isnan(single.low) and math.isnan(single.high)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_proportion_of_subsets_with_a_solution(k):
    solved = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], bool)
    subsets = list(itertools.combinations(range(5), k))
    expected = [np.mean([row[list(subset)].any() for subset in subsets]) for row in solved]
    assert pass_at_k(solved, k) == pytest.approx(expected)


def test_pass_at_k_is_unbiased():
    p, k = 0.2, 4
    solved = np.random.default_rng(0).random((20_000, 8)) < p
    value, low, high = proportion(pass_at_k(solved, k), n_draws=2)
    assert value == pytest.approx(1 - (1 - p) ** k, abs=0.01) and low < value < high


@pytest.mark.parametrize("k", [0, 6])
def test_pass_at_k_needs_k_completions(k):
    assert_raises(WhetValueError, (f"k is {k}", "1 to 5"), pass_at_k, np.ones((2, 5), bool), k)


def paired(only_first, only_second, both, neither):
    first = np.repeat([1.0, 0.0, 1.0, 0.0], [only_first, only_second, both, neither])
    second = np.repeat([0.0, 1.0, 1.0, 0.0], [only_first, only_second, both, neither])
    return first, second


def test_paired_difference_has_the_interval_of_bonett_and_price():
    f12, f21, n = 5, 14, 100
    p12, p21 = (f12 + 1) / (n + 2), (f21 + 1) / (n + 2)
    half = Z * math.sqrt((p12 + p21 - (p21 - p12) ** 2) / (n + 2))
    found = proportion_difference(*paired(f12, f21, 50, 31))
    assert found == pytest.approx(((f21 - f12) / n, p21 - p12 - half, p21 - p12 + half))


@pytest.mark.parametrize("n", [50, 1000])
def test_paired_differences_cover_the_true_value_and_are_narrower_than_unpaired_ones(n):
    """Both models solve easy items: A below 0.5, B below 0.6 of the same uniform difficulty, each with 5% noise."""

    def answers(rng):
        easy = rng.random(n)
        return [((easy < level) ^ (rng.random(n) < 0.05)).astype(float) for level in (0.5, 0.6)]

    truth = 0.9 * 0.1
    assert 0.93 < coverage(lambda rng: proportion_difference(*answers(rng)), truth) < 0.975
    first, second = answers(np.random.default_rng(1))
    _, low, high = proportion_difference(first, second)
    widths = [estimate.high - estimate.low for estimate in (proportion(first), proportion(second))]
    assert high - low < 0.8 * math.hypot(*widths)


def test_difference_of_equal_models_has_an_interval():
    _, low, high = proportion_difference(np.ones(5), np.ones(5))
    assert low < -0.3 and high > 0.3


def test_sign_test_equals_mcnemars_exact_test():
    """2 P(X <= 5) with X ~ Bin(21, 1/2), for 5 and 16 items that only one model solves."""
    expected = 2 * sum(math.comb(21, i) for i in range(6)) / 2**21
    assert sign_test(*paired(5, 16, 40, 9)) == pytest.approx(expected) == pytest.approx(0.0266, abs=1e-4)
    assert sign_test(*paired(16, 5, 40, 9)) == sign_test(*paired(5, 16, 0, 1))
    assert sign_test(*paired(0, 0, 3, 4)) == 1.0
    assert sign_test(*paired(4, 4, 3, 4)) == 1.0
    assert 0 < sign_test(*paired(1000, 2000, 0, 0)) < 1e-70
    graded = np.array([0.2, 0.5, 0.9]), np.array([0.3, 0.5, 1.0])
    assert sign_test(*graded) == 0.5


def test_sign_test_has_a_false_positive_rate_below_5_percent():
    rng = np.random.default_rng(0)
    pairs = [(rng.random(60) < 0.4, rng.random(60) < 0.4) for _ in range(2000)]
    assert np.mean([sign_test(*pair) < 0.05 for pair in pairs]) < 0.05
