"""Rows from files (``sources``), their token ids (``rows``), and the batches of training steps (``batches``)."""

from __future__ import annotations

from whet.data.rows import (
    is_messages,
    shuffled_batches,
    token_rows,
    tokenize_completion,
    tokenize_preference,
    tokenize_prompt,
    tokenize_turns,
)
from whet.data.sources import read_rows

__all__ = [
    "is_messages",
    "read_rows",
    "shuffled_batches",
    "token_rows",
    "tokenize_completion",
    "tokenize_preference",
    "tokenize_prompt",
    "tokenize_turns",
]
