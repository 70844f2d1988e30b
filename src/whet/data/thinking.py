"""A model's thinking before its answer, told apart by the tags that its chat template has around it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_NAMES = "think|thinking|thought|reasoning"
_MARK = re.compile(rf"[<\[]\|?[\w:]*(?:{_NAMES})\|?[>\]]", re.IGNORECASE)
_CLOSING = re.compile(rf"[<\[](?:/|\|END_)[\w:]*(?:{_NAMES})\|?[>\]]", re.IGNORECASE)
_TAG_TOKENS = 32
"""More than a tag has, and the blanks after it."""


class Tags(NamedTuple):
    """The texts that thinking begins and ends with."""

    opening: str
    closing: str


OPENING_TAG = "opening_tag"
"""The column of rollouts with ``Replies.opening_tag`` of each prompt."""
USUAL_TAGS = Tags("<think>", "</think>")


def thinking_tags(template: str) -> Tags:
    """The tags of thinking in the text of a chat template; ``<think>`` and ``</think>`` where it has none.

    They are the first name in brackets that ends in "think", "thinking", "thought" or "reasoning" and whose partner is
    there too: with a slash, as ``[/THINK]``, or with END for START, as ``<|END_THINKING|>``.
    """
    for opening in _MARK.findall(template):
        closing = _closing_of(opening)
        if closing != opening and closing in template:
            return Tags(opening, closing)
    return USUAL_TAGS


def answer_in(reply: str, tags: Tags | None = None) -> str | None:
    """The text of a reply behind its thinking; None where the thinking was cut off before there was an answer.

    Args:
        reply: with the opening tag, also where that is the prompt's; see ``Replies.opening_tag``.
        tags: around the thinking; None: those that are found in the reply.
    """
    tags = tags or _tags_in(reply)
    begin = reply.lstrip()
    if begin.startswith(tags.opening):
        _, closing, answer = begin.partition(tags.closing)
        return answer if closing else None
    answer = reply.rpartition(tags.closing)[2]
    return None if tags.opening in answer else answer


class Replies:
    """The texts of replies as scorers get them, and whether their prompt has opened the thinking.

    Attributes:
        tags: around the thinking; None: the tokenizer has no chat template.
        unread_tags: id -> tag, of those that are special tokens, which decoding leaves out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        self.tags = thinking_tags(str(template)) if template else None
        encoded = {tag: tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in self.tags or ()}
        self.unread_tags = {ids[0]: tag for tag, ids in encoded.items() if len(ids) == 1 and not self._show(ids)}

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens without special ones, except the tags of thinking."""
        if self.unread_tags.keys().isdisjoint(token_ids):
            return self._show(list(token_ids))
        runs = itertools.groupby(token_ids, lambda token_id: token_id in self.unread_tags)
        return "".join(
            "".join(map(self.unread_tags.__getitem__, run)) if is_tag else self._show(list(run)) for is_tag, run in runs
        )

    def opening_tag(self, prompt_ids: Sequence[int]) -> str:
        """The tag that a prompt ends with, so that the reply begins within the thinking; "": it does not."""
        if self.tags is None:
            return ""
        end = self._tokenizer.decode(list(prompt_ids[-_TAG_TOKENS:]), skip_special_tokens=False)
        return self.tags.opening if end.rstrip().endswith(self.tags.opening) else ""

    def _show(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _closing_of(opening: str) -> str:
    return opening.replace("START", "END") if "START" in opening else f"{opening[0]}/{opening[1:]}"


def _tags_in(reply: str) -> Tags:
    """The first tag of a reply, and its partner, which need not be there."""
    closing = _CLOSING.search(reply)
    opening = next((mark for mark in _MARK.findall(reply) if not _CLOSING.fullmatch(mark)), None)
    if opening is not None:
        return Tags(opening, _closing_of(opening))
    if closing is not None:
        return Tags(closing[0].replace("/", "", 1).replace("END_", "START_"), closing[0])
    return USUAL_TAGS
