"""Splits replies into thinking and answer while they are streamed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from whet.data.thinking import DEFAULT_TAGS, Tags


class TextChunk(NamedTuple):
    """Part of a reply: thinking or answer."""

    text: str
    is_thinking: bool


def split_thinking(texts: Iterable[str], is_open: bool = False, tags: Tags = DEFAULT_TAGS) -> Iterator[TextChunk]:
    """Split a reply into thinking, which is tagged at its beginning, and answer; the tags are removed.

    Args:
        texts: consecutive parts of the reply.
        is_open: whether the prompt ends with the opening tag.
        tags: the tags around the thinking.
    """
    texts = iter(texts)
    pending = ""
    while not is_open:  # until the text cannot begin with the tag any more
        text = next(texts, None)
        pending += text or ""
        prefix = pending.lstrip()
        is_open = prefix.startswith(tags.opening)
        if text is None or not (is_open or tags.opening.startswith(prefix)):
            yield from (TextChunk(text, False) for text in itertools.chain([pending], texts) if text)
            return
    answer, pending = None, pending.lstrip().removeprefix(tags.opening)
    for text in itertools.chain([""], texts):
        thinking, tag, rest = (pending + text).partition(tags.closing)
        n_partial_tag = 0 if tag else max(n for n in range(len(tags.closing)) if thinking.endswith(tags.closing[:n]))
        shown, pending = thinking[: len(thinking) - n_partial_tag], thinking[len(thinking) - n_partial_tag :]
        if shown:
            yield TextChunk(shown, True)
        if tag:
            answer = rest
            break
    if pending:
        yield TextChunk(pending, True)
    if answer is not None:
        answer_texts = itertools.dropwhile(lambda text: not text.strip(), itertools.chain([answer], texts))
        first = next(answer_texts, "")
        yield from (TextChunk(text, False) for text in itertools.chain([first.lstrip()], answer_texts) if text)
