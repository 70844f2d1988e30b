"""Parsers of replies: by the tokenizer's response template, or by the marks in its chat template."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from whet.data.thinking import DEFAULT_TAGS, Replies, Tags
from whet.errors import WhetValueError
from whet.models.tokenizers.token_texts import TokenTexts
from whet.text.response_template import find_response_template
from whet.text.thinking import TextChunk, ThinkingSplitter
from whet.text.tool_calls import ToolCall, ToolFormat, ToolParser, tool_format


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
        with_errors: as for ``ToolParser``.
    """

    def __init__(
        self,
        is_open: bool,
        tags: Tags,
        form: ToolFormat | None,
        tools: Sequence[Mapping[str, Any]],
        with_errors: bool = False,
    ) -> None:
        self._splitter = ThinkingSplitter(is_open, tags)
        self._calls = ToolParser(form, tools, with_errors) if form else None

    def add(self, text: str, is_last: bool = False) -> list[TextChunk | ToolCall]:
        """Add a part of the reply, and return the texts and calls that are complete."""
        found: list[TextChunk | ToolCall] = []
        for chunk in self._splitter.add(text, is_last):
            found += [chunk] if chunk.is_thinking or self._calls is None else _parts(self._calls.add(chunk.text))
        return found + (_parts(self._calls.add("", is_last=True)) if self._calls and is_last else [])


def _parts(found: Sequence[str | ToolCall]) -> list[TextChunk | ToolCall]:
    return [TextChunk(each, is_thinking=False) if isinstance(each, str) else each for each in found]


class ReplyFormat:
    """The form of a model's replies: thinking, text and calls of tools.

    Args:
        tokenizer: with a chat template.
        texts: of its tokens.

    Attributes:
        longest_token: most bytes of text of a token.
        template: the tokenizer's description of replies; None: marks in the chat template describe them.
    """

    def __init__(self, tokenizer: Any, texts: TokenTexts) -> None:
        self._tokenizer, self._special = tokenizer, texts.special_ids
        self.longest_token = max(map(len, texts.tokens), default=0)
        self.template = find_response_template(tokenizer)

    @cached_property
    def thinking(self) -> Replies:
        """The marks around a reply's thinking."""
        return Replies(self._tokenizer)

    @cached_property
    def calls(self) -> ToolFormat | None:
        """The format of calls that marks in the chat template, or special tokens, name; None: none that is known."""
        return tool_format(str(getattr(self._tokenizer, "chat_template", None) or ""), self._special)

    @property
    def can_call(self) -> bool:
        """Whether replies can call tools."""
        return self.template.has_calls if self.template else self.calls is not None

    def check_can_call(self, where: str) -> None:
        """Raise a WhetValueError unless replies can call tools."""
        if not self.can_call:
            raise WhetValueError(
                f"{where}: there are tools, and the chat template has no form of calls that can be read. Use a model "
                f"that was trained to call tools, or pass the template of such a model (--chat-template)."
            )

    def shown_tokens(self, has_tools: bool) -> dict[int, str]:
        """Return the special tokens that are parts of replies, by id."""
        special = self._special
        if self.template:
            texts = "\n".join(self.template.delimiters).replace("\\", "")  # of patterns too
            return {token_id: text for text, token_id in special.items() if text in texts}
        marks = self.calls.marks if has_tools and self.calls else ()
        return self.thinking.special_tags | {special[mark]: mark for mark in marks if mark in special}

    def parser(
        self, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], with_errors: bool = False
    ) -> ReplyParser:
        """Return the parser of a reply.

        Args:
            prompt_ids: the prompt, which may end with the reply's beginning.
            tools: in OpenAI's form; empty: calls remain text.
            with_errors: as for ``ToolParser``.
        """
        if self.template:
            prompt = self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
            return self.template.parser(tools, prompt, with_errors)
        is_open, tags = bool(self.thinking.opening_tag(prompt_ids)), self.thinking.tags or DEFAULT_TAGS
        return MarkedParser(is_open, tags, self.calls if tools else None, tools, with_errors)

    def message(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return a reply as a message: ``content``, and if it has them ``reasoning_content`` and ``tool_calls``.

        A call that cannot be parsed, or names no tool, is a call with an ``error``: templates accept an answer of a
        tool only after calls.

        Args:
            token_ids: of the reply; a stop token has no text.
            prompt_ids: see ``parser``.
            tools: see ``parser``.
            stop: strings that end a reply: the message has the text before the first.
        """
        shown = self.shown_tokens(bool(tools))
        runs = itertools.groupby(token_ids, lambda token_id: token_id in shown)
        text = "".join(
            "".join(map(shown.__getitem__, run))
            if is_shown
            else self._tokenizer.decode(list(run), skip_special_tokens=True)
            for is_shown, run in runs
        )
        ends = [(at + len(string), at) for string in stop if (at := text.find(string)) >= 0]
        text = text[: min(ends)[1]] if ends else text
        return as_message(self.parser(prompt_ids, tools, with_errors=True).add(text, is_last=True))


def as_message(parts: Iterable[TextChunk | ToolCall]) -> dict[str, Any]:
    """Return the texts and calls of a reply as a message."""
    found: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, TextChunk):
            name = "reasoning_content" if part.is_thinking else "content"
            found[name] = found.get(name, "") + part.text
        else:
            function = {"name": part.name, "arguments": part.arguments}
            error = {"error": part.error} if part.error else {}
            # Mistral's templates want ids of nine letters and digits.
            calls.append({"type": "function", "id": f"call{len(calls):05d}", "function": function, **error})
    return {**found, "tool_calls": calls} if calls else found
