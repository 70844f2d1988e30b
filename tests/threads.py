"""Runs code with different numbers of Whet's threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import whet
from whet import _core


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    """Set the number of Whet's threads within a ``with``; they run at once on fewer processors too."""
    before = whet.get_num_threads()
    _core.set_num_threads(n, oversubscribe=True)
    try:
        yield
    finally:
        whet.set_num_threads(before)


def same_on_any_threads(work: Callable[[], Any]) -> Any:
    """Assert that ``work`` returns the same bits on 1, 2 and 5 threads, and return its arrays."""
    results = []
    for n in (1, 2, 5):
        with threads(n):
            results.append(work())
    for result in results[1:]:
        for got, right in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(got, right)
    return results[0]
