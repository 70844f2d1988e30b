"""A model's thinking before its answer, delimited by the tags of its chat template."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_NAMES = "think|thinking|thought|reasoning"
_MARK = re.compile(rf"[<\[]\|?[\w:]*(?:{_NAMES})\|?[>\]]", re.IGNORECASE)
_CLOSING = re.compile(rf"[<\[](?:/|\|END_)[\w:]*(?:{_NAMES})\|?[>\]]", re.IGNORECASE)
_TAG_TOKENS = 32
"""An upper bound for a tag and the whitespace after it."""


class Tags(NamedTuple):
    """The texts that delimit thinking."""

    opening: str
    closing: str


OPENING_TAG = "opening_tag"
"""Column of rollouts that holds ``Replies.opening_tag`` of each prompt."""
DEFAULT_TAGS = Tags("<think>", "</think>")
_CHANNEL = Tags("<|channel>", "<channel|>")
"""Tags of Gemma 4; the thinking begins with the channel's name, "thought"."""


def thinking_tags(template: str) -> Tags:
    """Return the thinking tags in the text of a chat template; default: ``<think>`` and ``</think>``.

    The opening tag is the first bracketed name that ends in "think", "thinking", "thought" or "reasoning" and whose
    closing tag occurs too: with a slash, as ``[/THINK]``, or with END for START, as ``<|END_THINKING|>``.
    """
    if all(tag in template for tag in _CHANNEL):
        return _CHANNEL
    for opening in _MARK.findall(template):
        closing = _closing_of(opening)
        if closing != opening and closing in template:
            return Tags(opening, closing)
    return DEFAULT_TAGS


def answer_in(reply: str, tags: Tags | None = None) -> str | None:
    """Return the text of a reply after its thinking; None if the reply was truncated while thinking.

    Args:
        reply: with the opening tag, even if the prompt ends with it; see ``Replies.opening_tag``.
        tags: delimiters of the thinking. None: the tags found in the reply.
    """
    tags = tags or _tags_in(reply)
    begin = reply.lstrip()
    if begin.startswith(tags.opening):
        _, closing, answer = begin.partition(tags.closing)
        return answer if closing else None
    answer = reply.rpartition(tags.closing)[2]
    return None if tags.opening in answer else answer


class Replies:
    """Decodes replies for scorers, and detects prompts that open the thinking.

    Attributes:
        tags: delimiters of the thinking; None if the tokenizer has no chat template.
        special_tags: id -> tag, for tags that are special tokens, which decoding skips.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        self.tags = thinking_tags(str(template)) if template else None
        encoded = {tag: tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in self.tags or ()}
        self.special_tags = {ids[0]: tag for tag, ids in encoded.items() if len(ids) == 1 and not self._decode(ids)}

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens without special tokens, except thinking tags."""
        if self.special_tags.keys().isdisjoint(token_ids):
            return self._decode(list(token_ids))
        runs = itertools.groupby(token_ids, lambda token_id: token_id in self.special_tags)
        return "".join(
            "".join(map(self.special_tags.__getitem__, run)) if is_tag else self._decode(list(run))
            for is_tag, run in runs
        )

    def opening_tag(self, prompt_ids: Sequence[int]) -> str:
        """Return the opening tag if the prompt ends with it, so that the reply begins inside the thinking, else ""."""
        if self.tags is None:
            return ""
        end = self._tokenizer.decode(list(prompt_ids[-_TAG_TOKENS:]), skip_special_tokens=False)
        return self.tags.opening if end.rstrip().endswith(self.tags.opening) else ""

    def closing_tag(self, prompt_ids: Sequence[int]) -> str:
        """Return the tag that ends the thinking which a prompt opens; "" if it opens none."""
        return self.tags.closing if self.tags is not None and self.opening_tag(prompt_ids) else ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _closing_of(opening: str) -> str:
    return opening.replace("START", "END") if "START" in opening else f"{opening[0]}/{opening[1:]}"


def _tags_in(reply: str) -> Tags:
    """Return the first tag of a reply and its counterpart, which need not occur."""
    closing = _CLOSING.search(reply)
    opening = next((mark for mark in _MARK.findall(reply) if not _CLOSING.fullmatch(mark)), None)
    if opening is not None:
        return Tags(opening, _closing_of(opening))
    if closing is not None:
        return Tags(closing[0].replace("/", "", 1).replace("END_", "START_"), closing[0])
    return DEFAULT_TAGS
