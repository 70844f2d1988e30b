"""From files and tensors to rows of token ids (``rows``), and to the batches of training steps (``batches``)."""

from __future__ import annotations

from whet.data.rows import (
    is_messages,
    read_rows,
    shuffled_batches,
    token_rows,
    tokenize_completion,
    tokenize_preference,
    tokenize_prompt,
    tokenize_turns,
)

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
