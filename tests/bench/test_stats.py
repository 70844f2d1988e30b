"""Statistics of speed comparisons, on samples with known medians."""

import numpy as np
import pytest

from whet.bench.stats import paired_ratio, summary, unpaired_ratio


def times(rng, n, median=1.0, spread=0.05):
    """Draw call times: a minimum, a skewed spread above it, and occasional interruptions."""
    samples = median * (1 + spread * rng.exponential(1.0, n) - spread * np.log(2))
    samples[rng.random(n) < 0.05] *= 3
    return samples


def test_summary_by_hand():
    assert summary([5, 1, 4, 2, 3, 6]) == (3.5, 2.0, 5.0, 6)


def test_paired_ratio_is_the_median_of_pairs():
    ratio = paired_ratio([2.0, 40.0, 6.0], [1.0, 10.0, 3.0])
    assert ratio.median == 2.0
    assert (ratio.low, ratio.high) == (2.0, 4.0)


def test_slowdown_of_a_whole_round_cancels():
    rng = np.random.default_rng(0)
    drift = np.exp(rng.normal(0, 0.7, 31))
    ratio = paired_ratio(1.1 * drift * times(rng, 31, spread=0.01), drift * times(rng, 31, spread=0.01))
    assert ratio.stars == "***"
    assert ratio.median == pytest.approx(1.1, rel=0.03)
    assert unpaired_ratio(1.1 * drift, rng.permutation(drift)).stars == ""


@pytest.mark.parametrize("n", [5, 9, 31])
def test_equal_providers_are_rarely_significant(n):
    rng = np.random.default_rng(1)
    starred = sum(paired_ratio(times(rng, n), times(rng, n)).stars == "***" for _ in range(200))
    assert starred <= 20  # 5% are expected with a 95% interval


@pytest.mark.parametrize(("factor", "n"), [(1.1, 31), (0.9, 31), (1.25, 9), (0.8, 9)])
def test_difference_is_found_in_either_direction(factor, n):
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(100):
        ratio = paired_ratio(factor * times(rng, n, spread=0.03), times(rng, n, spread=0.03))
        found += ratio.stars == "***" and (ratio.median > 1) == (factor > 1)
    assert found >= 90


def test_interval_covers_the_true_ratio_in_95_percent():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        ratio = paired_ratio(1.3 * times(rng, 21), times(rng, 21))
        covered += ratio.low <= 1.3 <= ratio.high
    assert covered >= 275


def test_unpaired_ratio_finds_a_planted_regression():
    rng = np.random.default_rng(4)
    slower = unpaired_ratio(1.1 * times(rng, 31, spread=0.02), times(rng, 31, spread=0.02))
    assert slower.low > 1.05
    same = unpaired_ratio(times(rng, 31), times(rng, 31))
    assert same.low < 1 < same.high


def test_interval_is_deterministic():
    samples = times(np.random.default_rng(5), 20)
    assert paired_ratio(samples, samples[::-1]) == paired_ratio(samples, samples[::-1])
