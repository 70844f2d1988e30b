"""Rendering of a row's messages by a tokenizer's chat template: in the form that the template reads, and complete."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from whet.data.messages import (
    FORMS,
    REASONING,
    Form,
    has_forms,
    is_read,
    is_text_part,
    mark,
    parts_of,
    tool_calls,
    without,
)
from whet.errors import WhetTypeError, WhetValueError

_FLAGS = {"add_generation_prompt": False, "continue_final_message": False, "tokenize": False, "return_dict": False}


class Chat:
    """Renders the conversations of one row.

    Args:
        where: the caller's name, for errors.
        row: ``tools`` (a list, or JSON) and ``chat_template_kwargs`` (a dict, or JSON) are read from it.
        tokenizer: with ``apply_chat_template``.
    """

    def __init__(self, where: str, row: Mapping[str, Any], tokenizer: Any) -> None:
        self._where, self._row, self._tokenizer = where, row, tokenizer
        self._form: Form | None = None

    def render(self, messages: Sequence[Any], **flags: bool) -> str:
        """Return the text of messages.

        Args:
            flags: ``add_generation_prompt``, ``continue_final_message``.

        Raises:
            WhetValueError: there is no template, it rejects the messages, or they hold more than text.
            WhetTypeError: a role, tools or options have the wrong type.
        """
        return self._call(self.write(messages), flags)

    def write(self, messages: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the messages in the form that the template reads, which the row's first conversation determines."""
        self._check(messages)
        if self._form is None and has_forms(messages):
            self._form = self._find_form(messages)
        return (self._form or FORMS[0]).write(messages)

    def marked(self, messages: Sequence[Any]) -> Mapping[str, Any]:
        """Return ``input_ids``, and ``assistant_masks`` if the template has ``{% generation %}`` marks."""
        flags = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        return self._call(self.write(messages), flags)

    def check_complete(self, messages: Sequence[Any], first_learnt: int) -> None:
        """Reject messages of which the template drops tools or tool calls, or reasoning or content that is learnt.

        Args:
            first_learnt: the first message that may be learnt. Templates drop reasoning before it by design.

        Raises:
            WhetValueError: the rendering is the same without them.
        """
        written = self.write(messages)
        reduced = list(self._reduce(written, first_learnt))
        text = self._call(written, {}) if reduced else ""
        for name, fewer, options in reduced:
            if self._try(fewer, options) == text:
                raise self._error(
                    f"the row has {name}, and the tokenizer's chat template drops them. Use a template that renders "
                    f"them (--chat-template), or remove them from the row."
                )

    def _reduce(
        self, messages: list[dict[str, Any]], first_learnt: int
    ) -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
        """Yield each kind of content that the row has, its messages without that content, and options to change."""
        before, learnt = messages[:first_learnt], messages[first_learnt:]
        if self._tools:
            yield "tools", messages, {"tools": None}
        if any(map(tool_calls, messages)):
            yield "tool_calls", without(messages, "tool_calls"), {}
        if any(message.get(name) for message in learnt for name in REASONING):
            yield "reasoning", before + without(learnt, *REASONING), {}
        if any(tool_calls(message) and message.get("content") for message in learnt):
            without_content = [{**m, "content": ""} if tool_calls(m) and m.get("content") else m for m in learnt]
            yield "texts next to tool_calls", before + without_content, {}

    def _check(self, messages: Sequence[Any]) -> None:
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise self._error(
                "the row holds chat messages, and the tokenizer has no chat_template. Set one (in a model's folder the "
                "file chat_template.jinja, or by --chat-template), or give the row as text."
            )
        for message in messages:
            if not isinstance(message["role"], str):
                raise self._type_error(
                    f"a message has the role {message['role']!r:.40}, expected a text. If a DataLoader collated "
                    f"the rows, pass it collate_fn=list."
                )
            if message.get("weight") not in (None, 0, 1):
                raise self._error(f"the weight of a message is {message['weight']!r}, expected 1, or 0: not learnt.")
            for part in parts_of(message):
                if not is_text_part(part):
                    raise self._error(
                        f"the content of a message holds {part!r:.60}, expected a text, or parts "
                        f"{{'type': 'text', 'text': ...}}: images and other parts are not trained."
                    )
            if message.get("tool_calls") and not tool_calls(message):
                raise self._type_error(
                    f"tool_calls is {message['tool_calls']!r:.60}, expected a list of dicts, perhaps as JSON."
                )

    def _find_form(self, messages: Sequence[Any]) -> Form:
        """Return the first form that the template reads; if it reads none, the form whose error names the cause."""
        marked = mark(messages)
        for form in FORMS:
            written = form.write(marked)
            text = self._try(written, {})
            if text is not None and is_read(written, text):
                return form
        return FORMS[1]

    def _try(self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> str | None:
        """Return the rendering; None if the template rejects the messages."""
        try:
            return self._call(messages, options)
        except WhetValueError:
            return None

    def _call(self, messages: Sequence[dict[str, Any]], flags: Mapping[str, Any]) -> Any:
        tools = {"tools": self._tools} if self._tools else {}
        options = {**_FLAGS, **self._options, **tools, **flags}
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except Exception as error:
            raise self._error(f"the chat template rejects {messages!r:.80}: {error}.") from error

    @cached_property
    def _tools(self) -> list[Any]:
        return list(self._from_json("tools", (list, tuple), "a list of tools") or ())

    @cached_property
    def _options(self) -> dict[str, Any]:
        """The row's ``chat_template_kwargs``."""
        options = dict(self._from_json("chat_template_kwargs", Mapping, "a dict") or {})
        if clashing := options.keys() & {*_FLAGS, "tools", "return_assistant_tokens_mask"}:
            raise self._error(
                f"chat_template_kwargs sets {', '.join(sorted(clashing))}, which the task sets. Remove it."
            )
        return options

    def _from_json(self, name: str, kind: Any, expected: str) -> Any:
        """Return a field that may be JSON text; None if it is empty."""
        value = self._row.get(name)
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else None
            except ValueError as error:
                raise self._error(f"{name} is {value!r:.60}, expected {expected}, perhaps as JSON: {error}.") from error
        if value is not None and not isinstance(value, kind):
            raise self._type_error(f"{name} is {value!r:.60}, expected {expected}, perhaps as JSON.")
        return value

    def _error(self, text: str) -> WhetValueError:
        return WhetValueError(f"{self._where}: {text}")

    def _type_error(self, text: str) -> WhetTypeError:
        return WhetTypeError(f"{self._where}: {text}")
