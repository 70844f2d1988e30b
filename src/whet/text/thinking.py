"""Splits replies into thinking and answer while they are streamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from whet.data.thinking import DEFAULT_TAGS, Tags


class TextChunk(NamedTuple):
    """Part of a reply: thinking or answer."""

    text: str
    is_thinking: bool


class ThinkingSplitter:
    """Splits a reply that arrives in parts into thinking, tagged at its beginning, and answer; removes the tags.

    Args:
        is_open: whether the prompt ends with the opening tag.
        tags: the tags around the thinking.
    """

    def __init__(self, is_open: bool = False, tags: Tags = DEFAULT_TAGS) -> None:
        self._tags = tags
        self._place: Literal["start", "thinking", "between", "answer"] = "thinking" if is_open else "start"
        self._pending = ""

    def add(self, text: str, is_last: bool = False) -> list[TextChunk]:
        """Add a part of the reply, and return what it completes."""
        found: list[TextChunk] = []
        opening, closing = self._tags
        self._pending += text
        if self._place == "start":  # until the text cannot begin with the tag any more
            prefix = self._pending.lstrip()
            if prefix.startswith(opening):
                self._place, self._pending = "thinking", prefix.removeprefix(opening)
            elif is_last or not opening.startswith(prefix):
                self._place = "answer"
        if self._place == "thinking":
            thinking, tag, rest = self._pending.partition(closing)
            is_whole = bool(tag) or is_last
            n_partial_tag = 0 if is_whole else max(n for n in range(len(closing)) if thinking.endswith(closing[:n]))
            shown = thinking[: len(thinking) - n_partial_tag]
            self._pending = rest if tag else thinking[len(shown) :]
            found.append(TextChunk(shown, True))
            if tag:
                self._place = "between"
        if self._place == "between":
            self._pending = self._pending.lstrip()
            if self._pending:
                self._place = "answer"
        if self._place == "answer":
            found.append(TextChunk(self._pending, False))
            self._pending = ""
        return [chunk for chunk in found if chunk.text]


def split_thinking(texts: Iterable[str], is_open: bool = False, tags: Tags = DEFAULT_TAGS) -> Iterator[TextChunk]:
    """Split a reply, whose consecutive parts are ``texts``, into thinking and answer, as ``ThinkingSplitter`` does."""
    splitter = ThinkingSplitter(is_open, tags)
    for text in texts:
        yield from splitter.add(text)
    yield from splitter.add("", is_last=True)
