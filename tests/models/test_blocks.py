"""Blocks of any bytes, of every type: what is taken for finite is so, and read as the gguf package reads it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet import _core
from whet.models.formats import TABLE

QUANTISED = [format for format in TABLE.values() if format.gguf_type is not None and not format.is_float]
N_BLOCKS = 4
MOST_BYTES = N_BLOCKS * max(format.block_bytes for format in QUANTISED)
SCALES = st.sampled_from((0, 2, -4, -2))
"""Where a block of one type or another has a scale."""
HALVES = st.sampled_from((0, 1, 0x63FF, 0x6400, 0x7BFF, 0x7C00, 0x7E01, 0x8000, 0xE3FF, 0xFBFF, 0xFC00, 0xFE01))
"""Zero, the smallest, just below and at 2^10, the largest, infinity and NaN, of both signs."""


@pytest.mark.parametrize("format", QUANTISED, ids=lambda format: format.name)
@settings(max_examples=100, deadline=None)
@given(
    data=st.binary(min_size=MOST_BYTES, max_size=MOST_BYTES),
    scales=st.lists(st.tuples(st.integers(0, N_BLOCKS - 1), SCALES, HALVES), max_size=8),
)
def test_finite_blocks_are_read_as_the_gguf_package_reads_them(format, data, scales):
    blocks = np.frombuffer(data, np.uint8)[: N_BLOCKS * format.block_bytes].reshape(N_BLOCKS, -1).copy()
    for block, at, half in scales:
        blocks[block, at], blocks[block, at + 1] = half & 255, half >> 8
    stored, rows = _core.StoredType[format.name], blocks.reshape(2, -1)
    values = np.empty((2, N_BLOCKS // 2 * format.block_length), np.float32)
    _core.dequantize_rows(stored, rows, values)
    if _core.is_finite(stored, rows):
        assert np.isfinite(values).all()
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(format.gguf_type))
        np.testing.assert_array_equal(values, expected)
    else:  # what becomes another type is refused too where that cannot hold it
        assert format.packed_as != format.name or not np.isfinite(values).all()
