"""Parsers of replies: by the tokenizer's response template, or by the marks in its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from whet.data.thinking import Tags
from whet.text.thinking import TextChunk, ThinkingSplitter
from whet.text.tool_calls import ToolCall, ToolFormat, ToolParser


class ReplyParser(Protocol):
    """Parses a reply that arrives in parts."""

    def add(self, text: str, is_last: bool = False) -> list[TextChunk | ToolCall]:
        """Add a part of the reply, and return the texts and calls that are complete."""
        ...


class MarkedParser:
    """Parses a reply by the marks around thinking and calls.

    Args:
        is_open: whether the prompt opens the thinking.
        tags: marks of thinking.
        form: format of calls; None: there are none.
        tools: in OpenAI's form.
    """

    def __init__(self, is_open: bool, tags: Tags, form: ToolFormat | None, tools: Sequence[Mapping[str, Any]]) -> None:
        self._splitter = ThinkingSplitter(is_open, tags)
        self._calls = ToolParser(form, tools) if form else None

    def add(self, text: str, is_last: bool = False) -> list[TextChunk | ToolCall]:
        """Add a part of the reply, and return the texts and calls that are complete."""
        found: list[TextChunk | ToolCall] = []
        for chunk in self._splitter.add(text, is_last):
            found += [chunk] if chunk.is_thinking or self._calls is None else _parts(self._calls.add(chunk.text))
        return found + (_parts(self._calls.add("", is_last=True)) if self._calls and is_last else [])


def _parts(found: Sequence[str | ToolCall]) -> list[TextChunk | ToolCall]:
    return [TextChunk(each, is_thinking=False) if isinstance(each, str) else each for each in found]
