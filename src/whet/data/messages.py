"""Chat messages: lists of ``{"role": ..., "content": ...}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_messages(value: Any) -> bool:
    """Whether it is a list of chat messages, mappings with a role."""
    rows = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else ()
    return len(rows) > 0 and all(isinstance(row, Mapping) and "role" in row for row in rows)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content, which may come in parts, ``{"type": "text", "text": ...}``; "" without one."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and part.get("text"))
    return content if isinstance(content, str) else ""
