"""Blocks of any bytes, of every type: what is taken for finite is so, and read as the gguf package reads it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet import _core
from whet.models.architecture import RowSlice
from whet.models.formats import TABLE
from whet.models.reference import stored_rows

QUANTISED = [format for format in TABLE.values() if format.gguf_type is not None and not format.is_float]
N_BLOCKS = 4
MOST_BYTES = N_BLOCKS * max(format.block_bytes for format in QUANTISED)
SCALES = st.sampled_from((0, 2, -4, -2))
"""Byte offsets of the scales in a block of each type."""
HALVES = st.sampled_from((0, 1, 0x63FF, 0x6400, 0x7BFF, 0x7C00, 0x7E01, 0x8000, 0xE3FF, 0xFBFF, 0xFC00, 0xFE01))
"""Zero, the smallest, just below and at 2^10, the largest, infinity and NaN, of both signs."""


@pytest.mark.parametrize("format", QUANTISED, ids=lambda format: format.name)
@settings(max_examples=100)
@given(
    data=st.binary(min_size=MOST_BYTES, max_size=MOST_BYTES),
    scales=st.lists(st.tuples(st.integers(0, N_BLOCKS - 1), SCALES, HALVES), max_size=8),
)
def test_finite_blocks_dequantise_as_in_the_gguf_package(format, data, scales):
    blocks = np.frombuffer(data, np.uint8)[: N_BLOCKS * format.block_bytes].reshape(N_BLOCKS, -1).copy()
    for block, at, half in scales:
        blocks[block, at], blocks[block, at + 1] = half & 255, half >> 8
    rows = blocks.reshape(2, -1)
    values = np.empty((2, N_BLOCKS // 2 * format.block_length), np.float32)
    stored = stored_rows(RowSlice("", 0, rows, format.name))
    _core.dequantize_rows(stored, values)
    if _core.is_finite(stored):
        assert np.isfinite(values).all()
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(format.gguf_type))
        np.testing.assert_array_equal(values, expected)
    else:  # what becomes another type is refused too where that cannot hold it
        assert format.packed_as != format.name or not np.isfinite(values).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_found_at_every_position(dtype, bad):
    def is_finite(matrix: np.ndarray) -> bool:
        return _core.is_finite(stored_rows(RowSlice("", 0, matrix, dtype)))

    def stored(values: np.ndarray) -> np.ndarray:
        if dtype == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(dtype)

    largest = 3e38 if dtype in ("float32", "bfloat16") else float(np.finfo(dtype).max)
    values = np.random.default_rng(0).choice([0.0, -1.0, largest, -largest], (7, 37))
    wrong = values.copy()
    wrong[4, 30] = bad
    for cut in (np.s_[:, :], np.s_[::2, :], np.s_[:, ::3], np.s_[::-1, ::-1], np.s_[4:5, 30:31]):
        for turned in (lambda x: x, np.transpose):
            assert is_finite(turned(stored(values)[cut]))
            assert not is_finite(turned(stored(wrong)[cut]))
