"""Chat messages: lists of ``{"role": ..., "content": ...}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_messages(value: Any) -> bool:
    """Whether it is a list of chat messages, mappings with a role."""
    rows = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else ()
    return len(rows) > 0 and all(isinstance(row, Mapping) and "role" in row for row in rows)
