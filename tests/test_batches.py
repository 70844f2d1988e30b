"""The stream of batches: rows, ready batches, iterables, and where it starts."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from whet.batches import as_row, batch_stream, check_row_counts, is_batch, is_rows
from whet.errors import WhetTypeError, WhetValueError


def stream(dataset, batch_size=2, start=0, seed=0):
    return batch_stream(dataset, batch_size, seed, start, lambda item: as_row(item, ("a", "b"), "Test"))


def test_a_stream_can_start_anywhere():
    rows = [{"a": i} for i in range(7)]
    batches, per_epoch = stream(rows)
    whole = list(islice(batches, 12))
    assert per_epoch == 3
    for start in range(12):
        assert list(islice(stream(rows, start=start)[0], 12 - start)) == whole[start:]
    assert all(len(batch) == 1 and len(batch[0]) == 2 for batch in whole)


def test_tuples_are_rows_with_the_fields_in_order():
    batches, _ = stream([([1], [2])] * 4)
    assert next(batches) == ([{"a": [1], "b": [2]}, {"a": [1], "b": [2]}],)
    assert as_row((torch.tensor([1]), torch.tensor([2])), ("a", "b"), "Test").keys() == {"a", "b"}
    with pytest.raises(WhetTypeError, match=r"Test: a row is \(1, 2, 3\), expected a dict or a tuple of \(a, b\)"):
        as_row((1, 2, 3), ("a", "b"), "Test")


def test_batches_that_are_ready_keep_their_form():
    matrix = torch.zeros(2, 3, dtype=torch.int64)
    assert next(stream([matrix])[0]) == (matrix,)
    assert next(stream([(matrix, matrix)])[0]) == (matrix, matrix)
    encoded = {"input_ids": matrix, "attention_mask": matrix}
    assert next(stream([encoded])[0]) == (encoded,)
    rows = [{"a": 1}, {"a": 2}]
    assert next(stream(iter([rows]))[0]) == (rows,)
    assert next(stream(iter([{"a": [1, 2], "b": "xy"}]))[0]) == ([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],)


def test_iterables_start_over_and_iterators_end():
    class Loader:
        def __iter__(self):
            return iter([[[1]], [[2]], [[3]]])

    batches, per_epoch = stream(Loader(), start=2)
    assert per_epoch is None
    assert list(islice(batches, 4)) == [([[3]],), ([[1]],), ([[2]],), ([[3]],)]
    assert list(stream(iter([[[1]], [[2]]]), start=5)[0]) == [([[1]],), ([[2]],)]


def test_what_counts_as_a_batch():
    matrix, row = torch.zeros(2, 3), torch.zeros(3)
    assert is_batch(matrix) and is_batch((row, matrix)) and is_batch({"a": matrix.numpy()})
    assert not is_batch(row) and not is_batch([row]) and not is_batch({"a": "text"}) and not is_batch("text")
    assert is_rows([{"a": 1}]) and not is_rows([]) and not is_rows({"a": 1}) and not is_rows([row])


def test_row_counts_must_agree():
    check_row_counts("Test", ("a", "b"), ([1], [2]))
    with pytest.raises(WhetValueError, match=r"Test: rows of the batch: a 1, b 2\. Pass as many of each"):
        check_row_counts("Test", ("a", "b"), ([1], [2, 3]))
    with pytest.raises(WhetValueError, match="a 0, b 0"):
        check_row_counts("Test", ("a", "b"), ([], []))
