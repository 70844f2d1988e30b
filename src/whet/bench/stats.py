"""Statistics of samples of time: medians, spreads, and whether one contender is faster than another.

Intervals are percentile bootstraps (Efron 1979), seeded: the same samples always give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_RESAMPLES = 4000


class Summary(NamedTuple):
    """Of samples in one unit: median, 20th and 80th percentile, and how many there are."""

    median: float
    p20: float
    p80: float
    n: int


class Ratio(NamedTuple):
    """A ratio with its 95% interval."""

    median: float
    low: float
    high: float

    @property
    def stars(self) -> str:
        """Three stars where the interval leaves out 1, on either side."""
        return "***" if self.low > 1 or self.high < 1 else ""


def summary(samples: Sequence[float]) -> Summary:
    """Median, p20, p80 and n."""
    p20, median, p80 = np.percentile(samples, (20, 50, 80))
    return Summary(float(median), float(p20), float(p80), len(samples))


def paired_ratio(others: Sequence[float], ours: Sequence[float]) -> Ratio:
    """How many times as long ``others`` took: the median of the rounds' ratios.

    Sample i of both comes from round i, so that what slowed a whole round down cancels.
    """
    ratios = np.asarray(others, float) / np.asarray(ours, float)
    medians = np.median(_resample(ratios), axis=1)
    return Ratio(float(np.median(ratios)), *_interval(medians))


def unpaired_ratio(after: Sequence[float], before: Sequence[float]) -> Ratio:
    """Median of ``after`` / median of ``before``, from two runs without common rounds."""
    medians = np.median(_resample(np.asarray(after, float)), axis=1)
    medians /= np.median(_resample(np.asarray(before, float), seed=1), axis=1)
    return Ratio(float(np.median(after) / np.median(before)), *_interval(medians))


def _resample(values: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return values[rng.integers(0, len(values), (_RESAMPLES, len(values)))]


def _interval(medians: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)
