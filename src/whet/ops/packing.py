"""Sequence packing: assigns sequences to the rows of a training batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs


def naive_pack_sequences(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Reference implementation of ``pack_sequences``: O(n * bins)."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        b = next((b for b, free in enumerate(room) if free >= lengths[i]), len(bins))
        if b == len(bins):
            bins.append([])
            room.append(max_length)
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


def pack_sequences(lengths: Any, max_length: int) -> list[list[int]]:
    """Pack by first-fit decreasing (Johnson 1973): longest first, each into the first bin with room, in O(n log n).

    Uses at most 11/9 OPT + 6/9 bins (Dosa 2007). Equal lengths are packed in the order of their indices.

    Args:
        lengths: n integers in [0, max_length], tokens per sequence: a list, or a NumPy or torch array.
        max_length: tokens per bin, at least 1.

    Returns:
        Bins of indices into lengths, each index once; an empty list for no lengths.

    Raises:
        WhetValueError: a length is negative or above max_length (the message names its index), lengths are not
            one-dimensional, or max_length < 1.
        WhetTypeError: lengths are not integers.
    """
    name = "pack_sequences"
    limit = inputs.as_positive_int(name, "max_length", max_length)
    array = inputs.as_integers(name, "lengths", lengths, "one axis of integers")
    if np.ndim(lengths) != 1:
        raise WhetTypeError(
            f"{name}: lengths has shape {np.shape(lengths)}, expected one axis: the number of tokens of each sequence."
        )
    bad = np.flatnonzero((array < 0) | (array > limit))
    if len(bad):
        i = int(bad[0])
        fix = "Truncate it or raise max_length." if array[i] > limit else "A length is a count of tokens."
        raise WhetValueError(f"{name}: lengths[{i}] is {array[i]}, expected 0 to max_length={limit}. {fix}")
    return _core.pack_sequences(array, min(limit, 2**63 - 1))
