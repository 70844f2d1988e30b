"""Tokenised rows: tokens that masks mark, and fields that are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.data.test_rows import words
from tests.raising import assert_raises, mentions

from whet.data.batches import tokenized_rows
from whet.data.rows import tokenize_completion, tokenize_example, tokenize_prompt, tokenize_turns
from whet.errors import WhetError, WhetTypeError, WhetValueError

IDS = [1, 10, 11, 20, 21, 2]
LABELS = [-100, -100, -100, 20, 21, 2]
MASK = [0, 0, 0, 1, 1, 1]
ANSWER = ([1, 10, 11], [20, 21, 2], [True] * 3)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"labels": LABELS}, ANSWER),
        ({"completion_mask": MASK}, ANSWER),
        ({"assistant_masks": [bool(mark) for mark in MASK]}, ANSWER),
        ({"labels": torch.tensor(LABELS), "completion_mask": np.array(MASK), "assistant_masks": None}, ANSWER),
        ({"labels": IDS}, ([1], IDS[1:], [True] * 5)),
        ({"labels": [1, -100, 11, 20, -100, -100]}, ([1], IDS[1:], [False, True, True, False, False])),
        # All masks have to mark a token.
        ({"labels": LABELS, "assistant_masks": [0, 0, 0, 0, 1, 1]}, ([1, 10, 11, 20], [21, 2], [True] * 2)),
        ({"labels": [-100] * 6}, (IDS, [], [])),
        # Fields without an effect, and columns that are not one number per token.
        ({"position_ids": range(6), "token_type_ids": [0] * 6, "seq_lengths": [6]}, ([1], IDS[1:], [True] * 5)),
        (
            {"special_tokens_mask": MASK, "length": 6, "tags": list("abcdef"), "vector": [0.5] * 7, "labels": LABELS},
            ANSWER,
        ),
    ],
)
def test_masks_of_tokenised_rows(row: dict[str, Any], expected: Any) -> None:
    assert tokenize_turns({"input_ids": IDS, **row}, None) == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_stripped_from_masks_and_tokens(side: str) -> None:
    def pad(values: list[int], filler: int) -> list[int]:
        return [filler] * 2 + values if side == "left" else [*values, filler, filler]

    positions = [1, 1, *range(6)] if side == "left" else [*range(6), 6, 7]
    row = {"input_ids": pad(IDS, 0), "attention_mask": pad([1] * 6, 0), "position_ids": positions}
    for masks in ({"labels": pad(LABELS, -100)}, {"completion_mask": pad(MASK, 0)}):
        assert tokenize_turns({**row, **masks}, None) == ANSWER
        assert tokenize_turns({name: [value] for name, value in {**row, **masks}.items()}, None) == ANSWER


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"labels": LABELS[1:]}, "labels has 5 values, expected one for each of 6 tokens"),
        ({"labels": [-100, -100, 20, 21, 2, 0]}, "labels has 20 at token 2, expected the token itself, 11, or -100"),
        ({"completion_mask": [0, 0, 0, 1, 2, 1]}, "completion_mask has 2 at token 4, expected 0 or 1"),
        ({"assistant_masks": 1}, "assistant_masks has 1 values, expected one for each of 6 tokens"),
        ({"position_ids": [0, 1, 2, 0, 1, 2]}, r"position_ids is \[0, 1, 2, 0, 1, 2\], expected \[0, 1, 2, 3, 4, 5\]"),
        ({"seq_lengths": [3, 3]}, r"seq_lengths is \[3, 3\], expected \[6\]: a row is one sequence"),
        ({"token_type_ids": MASK}, r"token_type_ids is \[0, 0, 0, 1, 1, 1\], expected \[0, 0"),
        ({"weights": [0.5] * 6}, "weights holds one number per token"),
        ({"loss_mask": torch.tensor(MASK)}, "loss_mask holds one number per token"),
        ({"text": "a b", "labels": LABELS}, "the row has 'labels', a mask over 'input_ids', and 'text'"),
        ({"input_ids": []}, "input_ids is empty"),
    ],
)
@pytest.mark.parametrize("read", [tokenize_completion, tokenize_turns])
def test_fields_without_effect_are_rejected(read: Any, row: dict[str, Any], message: str) -> None:
    assert_raises(WhetValueError, f"{read.__name__}: {message}", read, {"input_ids": IDS, **row}, words())


def test_the_error_names_a_mask_that_is_not_an_array() -> None:
    row = {"input_ids": [1, 2], "labels": [[1], [2, 3]]}
    assert_raises(WhetTypeError, r"\[\[1\], \[2, 3\]\] is not an array", tokenize_turns, row, None)


def test_masks_apply_only_to_input_ids() -> None:
    row = {"prompt": [1, 10], "completion": [20, 2]}
    assert_raises(WhetValueError, "has 'labels', .* and 'prompt'", tokenize_turns, {**row, "labels": [20, 2]}, None)
    assert_raises(WhetValueError, "has 'completion_mask'", tokenize_completion, {**row, "completion_mask": [1]}, None)
    # In a row of text, labels are a column of the dataset.
    assert tokenize_turns({"text": "a b", "labels": [1, 0]}, words())[2] == [True] * 3


def test_loss_on_determines_the_first_learnt_token() -> None:
    row, gaps = {"input_ids": IDS, "labels": LABELS}, {"input_ids": IDS, "assistant_masks": [0, 1, 0, 1, 0, 1]}
    assert tokenize_completion(row, None) == ANSWER[:2]
    assert tokenize_example(row, None, "last_turn") == tokenize_example(row, None, "completion") == ANSWER
    assert tokenize_example(gaps, None, "completion")[2] == [True, False, True, False, True]
    assert_raises(
        WhetValueError, ("gaps", "tokenize_turns", "loss_on='completion'"), tokenize_example, gaps, None, "last_turn"
    )
    assert_raises(WhetValueError, ("loss_on is 'all'", "'labels'"), tokenize_example, row, None, "all")
    assert tokenize_example({"input_ids": IDS}, None, "all") == ([1], IDS[1:], [True] * 5)


def test_a_prompt_is_one_sequence() -> None:
    assert tokenize_prompt({"input_ids": IDS, "labels": LABELS}, None) == IDS
    with pytest.raises(WhetError, match=mentions("tokenize_prompt", "position_ids", "[0, 1, 2, 0")):
        tokenize_prompt({"input_ids": IDS, "position_ids": [0, 1, 2, 0, 1, 2]}, None)


def test_rows_of_a_collated_batch() -> None:
    batch = {"input_ids": torch.tensor([IDS, IDS]), "labels": torch.tensor([LABELS, IDS]), "text": ["a"], "x": None}
    rows = tokenized_rows(batch, "SFT")
    assert [list(row) for row in rows] == [["input_ids", "labels"]] * 2
    assert [tokenize_turns(row, None) for row in rows] == [ANSWER, ([1], IDS[1:], [True] * 5)]
    message = ("SFT", "max_length_q is 12", "2 rows")
    assert_raises(WhetValueError, message, tokenized_rows, {**batch, "max_length_q": 12}, "SFT")
