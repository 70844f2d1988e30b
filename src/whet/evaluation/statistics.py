"""Shares and means of scored completions with their 95% intervals, pass@k, and two models side by side.

Items are independent draws from a task; completions of one item are not independent of each other. So everything is
computed from one value per item, and errors are those of a mean over items: clustered by item, in the terms of Miller
2024, "Adding Error Bars to Evals" (arXiv 2411.00640), section 2.2. Two models answer the same items, and are compared
by the differences of items (section 4.2 there).

Needs only NumPy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from whet.errors import WhetValueError

Z = 1.959963984540054
"""The normal quantile of a two-sided 95% interval."""


class Estimate(NamedTuple):
    """A value and its 95% interval; NaN where the interval cannot be computed."""

    value: float
    low: float
    high: float


def share(values: np.ndarray, n_draws: int = 1) -> Estimate:
    """The mean of items' values in [0, 1], each estimated from ``n_draws`` yes-or-no draws, by Wilson's interval.

        p = mean(values),  n = N p (1 - p) / var(values), at most N n_draws,
        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    For values of 0 and 1 the effective number of draws n is N, and this is Wilson's score interval (1927). For means of
    several draws it is as many independent draws as tell as much (Korn and Graubard 1998). Where all values are 0 or
    all are 1, nothing is known of how draws of an item hang together, and n is N.

    Args:
        values: (N,), N at least 1.
        n_draws: draws behind each value.
    """
    n_items, p = len(values), float(np.mean(values))
    most = p * (1 - p)
    if most <= 0:
        n = float(n_items)
    else:
        variance = float(np.var(values))
        n = min(n_items * most / variance, n_items * n_draws) if variance else n_items * n_draws
    centre, half = p + Z**2 / (2 * n), Z * math.sqrt(most / n + Z**2 / (4 * n**2))
    return Estimate(p, max(0.0, (centre - half) / (1 + Z**2 / n)), min(1.0, (centre + half) / (1 + Z**2 / n)))


def mean(values: np.ndarray) -> Estimate:
    """The mean of items' values of any size, by the normal interval ``mean -+ z s / sqrt(N)``, s with N - 1.

    Of a single item there is none: NaN.
    """
    value = float(np.mean(values))
    half = Z * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(value, value - half, value + half)


def pass_at_k(solved: np.ndarray, k: int) -> np.ndarray:
    """(N,) of each item the probability that one of k completions solves it, without bias (Chen et al. 2021, eq. 1).

        1 - C(n - c, k) / C(n, k)    with c of n completions that do

    Args:
        solved: (N, n) bool.
        k: from 1 to n.

    Raises:
        WhetValueError: k is outside of that.
    """
    n = solved.shape[1]
    if not 1 <= k <= n:
        raise WhetValueError(f"pass_at_k: k is {k}, expected 1 to {n}, the completions per item. Sample more of them.")
    of_count = [(math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k) for c in range(n + 1)]
    return np.array(of_count)[solved.sum(axis=1)]


def share_difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Of shares of the same items, the second less the first, by the paired interval of Bonett and Price (2012).

    That is the normal interval after two more items, one that each of them wins. The value is that of the items alone.

    Args:
        first, second: (N,) values in [0, 1] of the same items in the same order.
    """
    differences = np.concatenate([second - first, [1.0, -1.0]])
    centre = float(np.mean(differences))
    half = Z * float(np.std(differences)) / math.sqrt(len(differences))
    value = float(np.mean(second - first))
    return Estimate(value, max(-1.0, centre - half), min(1.0, centre + half))


def sign_test(first: np.ndarray, second: np.ndarray) -> float:
    """Two-sided p-value of the exact sign test over the items whose values differ; 1 where there is none.

        min(1, 2 sum_{i <= m} C(n, i) / 2^n),  n items that differ, m of them by the rarer sign

    Of one yes-or-no completion per item this is McNemar's exact test.
    """
    better, worse = int(np.sum(second > first)), int(np.sum(second < first))
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)
