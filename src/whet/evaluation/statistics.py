"""Proportions and means of scored completions with 95% intervals, pass@k, and paired comparison of two models.

Items are independent draws from a task; completions of one item are not. Therefore all estimates use one value per
item, and standard errors are clustered by item (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640, section
2.2). Two models answer the same items and are compared by paired differences (section 4.2 there).

Depends only on NumPy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from whet.errors import WhetValueError

Z = 1.959963984540054
"""Normal quantile of a two-sided 95% interval."""


class Estimate(NamedTuple):
    """A value and its 95% interval; the interval is NaN if it cannot be computed."""

    value: float
    low: float
    high: float


def proportion(values: np.ndarray, n_draws: int = 1) -> Estimate:
    """Return the mean of item values in [0, 1], each estimated from ``n_draws`` binary draws, with Wilson's interval.

        p = mean(values),  n = N p (1 - p) / var(values), at most N n_draws,
        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    For binary values the effective sample size n is N, and this is Wilson's score interval (1927). For means of several
    draws it is the number of independent draws with the same variance (Korn and Graubard 1998). If all values are 0 or
    all are 1, the correlation of an item's draws is unknown, and n is N.

    Args:
        values: (N,), N >= 1.
        n_draws: number of draws per value.
    """
    n_items, p = len(values), float(np.mean(values))
    binomial_variance = p * (1 - p)
    if binomial_variance <= 0:
        n = float(n_items)
    else:
        variance = float(np.var(values))
        n = min(n_items * binomial_variance / variance, n_items * n_draws) if variance else n_items * n_draws
    centre, half = p + Z**2 / (2 * n), Z * math.sqrt(binomial_variance / n + Z**2 / (4 * n**2))
    return Estimate(p, max(0.0, (centre - half) / (1 + Z**2 / n)), min(1.0, (centre + half) / (1 + Z**2 / n)))


def mean(values: np.ndarray) -> Estimate:
    """Return the mean of unbounded item values with the normal interval ``mean -+ z s / sqrt(N)``, s with N - 1.

    The interval of a single item is NaN.
    """
    value = float(np.mean(values))
    half = Z * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(value, value - half, value + half)


def pass_at_k(solved: np.ndarray, k: int) -> np.ndarray:
    """Return (N,) unbiased estimates that at least one of k completions solves an item (Chen et al. 2021, eq. 1).

        1 - C(n - c, k) / C(n, k)    with c of n completions solving the item

    Args:
        solved: (N, n) bool.
        k: from 1 to n.

    Raises:
        WhetValueError: k is out of range.
    """
    n = solved.shape[1]
    if not 1 <= k <= n:
        raise WhetValueError(f"pass_at_k: k is {k}, expected 1 to {n}, the completions per item. Sample more.")
    by_count = [(math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k) for c in range(n + 1)]
    return np.array(by_count)[solved.sum(axis=1)]


def proportion_difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Return the difference second - first of paired proportions, with the interval of Bonett and Price (2012).

    The interval is the normal one after adding two items, one won by each. The value does not include these items.

    Args:
        first: (N,) values in [0, 1].
        second: (N,) values in [0, 1] of the same items, in the same order.
    """
    differences = np.concatenate([second - first, [1.0, -1.0]])
    centre = float(np.mean(differences))
    half = Z * float(np.std(differences)) / math.sqrt(len(differences))
    value = float(np.mean(second - first))
    return Estimate(value, max(-1.0, centre - half), min(1.0, centre + half))


def sign_test(first: np.ndarray, second: np.ndarray) -> float:
    """Return the two-sided p-value of the exact sign test over items whose values differ; 1 without such items.

        min(1, 2 sum_{i <= m} C(n, i) / 2^n),  n items that differ, m of them by the rarer sign

    With one binary completion per item this is McNemar's exact test.
    """
    better, worse = int(np.sum(second > first)), int(np.sum(second < first))
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)
