"""Packed batches against values by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.learner.batch import pack_batch, split_micro_batches


def test_a_shared_prompt_is_stored_once():
    batch = pack_batch([[5, 6], [7], [5, 6]], [[1, 2, 3], [], [4]])
    assert batch.input_ids.tolist() == [5, 6, 1, 2, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0]
    assert batch.q_offsets.tolist() == [0, 2, 4, 5]
    assert batch.k_offsets.tolist() == [0, 2, 6, 7]
    assert batch.key_rows.tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert batch.reader_offsets.tolist() == [0, 2, 4, 5, 6, 7]
    assert batch.readers.tolist() == [0, 2, 1, 3, 4, 5, 6]
    # Tokens 1 and 4 are predicted by the prompt's last token, the others by the one before them.
    assert batch.targets.tolist() == [1, 2, 3, 4]
    assert batch.hidden_rows.tolist() == [1, 2, 3, 1]
    assert batch.rows.tolist() == [0, 0, 0, 2]
    assert batch.steps.tolist() == [0, 1, 2, 0]


def test_micro_batches_keep_a_prompt_together():
    # Prompts of 4 and 2 tokens; a completion of n tokens takes n - 1 inputs.
    rows = [([1] * 4, [9] * 3), ([2] * 2, [9] * 5), ([1] * 4, [9] * 3), ([2] * 2, [9] * 3)]
    assert split_micro_batches(rows, 100) == [[0, 1, 2, 3]]
    assert split_micro_batches(rows, 8) == [[0, 2], [1, 3]]
    assert split_micro_batches(rows, 7) == [[0], [1], [2], [3]]
    assert split_micro_batches(rows, 1) == [[0], [1], [2], [3]]
    assert split_micro_batches([], 4) == []


def test_a_pair_is_one_row():
    rows = [([1, 2], [3] * 4, [4] * 2), ([1, 2], [3] * 4, [4] * 2)]
    assert split_micro_batches(rows, 10) == [[0, 1]]
    assert split_micro_batches(rows, 9) == [[0], [1]]


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@given(st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 9), max_size=6)), max_size=12), st.integers(1, 20))
def test_micro_batches_hold_every_row_once_within_the_budget(rows, budget):
    batches = split_micro_batches(rows, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    assert all(batch == sorted(batch) for batch in batches)
    for batch in batches:
        n = len(pack_batch([rows[i][0] for i in batch], [rows[i][1] for i in batch]).input_ids)
        prompts = {tuple(rows[i][0]) for i in batch}
        assert n <= budget or (len(batch) == 1 or len(prompts) == 1)


@pytest.mark.parametrize("n", [1, 5])
def test_empty_completions_predict_nothing(n):
    batch = pack_batch([[3, 4]] * n, [[]] * n)
    assert batch.input_ids.tolist() == [3, 4]
    assert len(batch.targets) == len(batch.hidden_rows) == 0
