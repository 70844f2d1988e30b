"""Rows from files (``sources``), their token ids (``rows``), and the batches of training steps (``batches``)."""

from __future__ import annotations

from whet.data.messages import is_messages
from whet.data.rows import shuffled_batches, tokenize_completion, tokenize_preference, tokenize_prompt, tokenize_turns
from whet.data.sources import read_rows
from whet.data.token_ids import token_rows

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
