"""pack_sequences against the reference of first-fit decreasing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.raising import assert_raises

import whet
from whet.ops.packing import naive_pack_sequences


def test_worked_example():
    # 7, 6, 4, 4, 3, 2 within 10: 7 opens a bin, 6 a second, 4 joins 6, 4 opens a third, 3 joins 7, 2 joins the third.
    assert whet.pack_sequences([4, 7, 2, 6, 4, 3], 10) == [[1, 5], [3, 0], [4, 2]]


@given(st.integers(1, 60).flatmap(lambda m: st.tuples(st.lists(st.integers(0, m), max_size=200), st.just(m))))
def test_equals_the_reference(case):
    lengths, max_length = case
    assert whet.pack_sequences(lengths, max_length) == naive_pack_sequences(lengths, max_length)


@pytest.mark.parametrize("max_length", [1024, 10**6])
def test_equals_the_reference_on_many(max_length):
    lengths = np.random.default_rng(0).integers(0, max_length + 1, 3000)
    assert whet.pack_sequences(lengths, max_length) == naive_pack_sequences(lengths.tolist(), max_length)


def test_a_million():
    lengths = np.random.default_rng(0).integers(1, 2049, 10**6)
    bins = whet.pack_sequences(lengths, 2048)
    order = np.concatenate(bins)
    np.testing.assert_array_equal(np.sort(order), np.arange(10**6))
    first = np.cumsum([0, *map(len, bins[:-1])])
    assert np.add.reduceat(lengths[order], first).max() <= 2048
    assert len(bins) <= 11 / 9 * np.ceil(lengths.sum() / 2048) + 1


def test_no_lengths_give_no_bins():
    assert whet.pack_sequences([], 8) == []


@pytest.mark.parametrize(
    ("lengths", "max_length", "facts"),
    [
        ([1, 9, 3], 8, ("lengths[1] is 9", "0 to max_length=8", "Truncate")),
        ([1, 2, -3], 8, ("lengths[2] is -3",)),
        ([1], 0, ("max_length is 0",)),
        ([1], 2.5, ("max_length is 2.5", "integer")),
        ([1.5], 8, ("dtype float64",)),
        ([[1, 2]], 8, ("shape (1, 2)",)),
    ],
)
def test_errors_name_the_fix(lengths, max_length, facts):
    assert_raises(whet.WhetError, facts, whet.pack_sequences, lengths, max_length)
