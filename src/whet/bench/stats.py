"""Statistics of time samples: medians, spreads, and ratios of contenders with confidence intervals.

Intervals are seeded percentile bootstraps (Efron 1979): the same samples always give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_RESAMPLES = 4000


class Summary(NamedTuple):
    """Median, 20th and 80th percentile, and number of samples."""

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
        """Three stars if the interval excludes 1, else an empty string."""
        return "***" if self.low > 1 or self.high < 1 else ""


def summary(samples: Sequence[float]) -> Summary:
    """Return median, p20, p80 and n."""
    p20, median, p80 = np.percentile(samples, (20, 50, 80))
    return Summary(float(median), float(p20), float(p80), len(samples))


def paired_ratio(others: Sequence[float], ours: Sequence[float]) -> Ratio:
    """Return the median ratio ``others`` / ``ours`` over rounds.

    Sample i of both is from round i, so that slowdowns of a whole round cancel.
    """
    ratios = np.asarray(others, float) / np.asarray(ours, float)
    medians = np.median(_resample(ratios), axis=1)
    return Ratio(float(np.median(ratios)), *_interval(medians))


def unpaired_ratio(after: Sequence[float], before: Sequence[float]) -> Ratio:
    """Return median(``after``) / median(``before``) of two runs without common rounds."""
    medians = np.median(_resample(np.asarray(after, float)), axis=1)
    medians /= np.median(_resample(np.asarray(before, float), seed=1), axis=1)
    return Ratio(float(np.median(after) / np.median(before)), *_interval(medians))


def _resample(values: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return values[rng.integers(0, len(values), (_RESAMPLES, len(values)))]


def _interval(medians: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)
