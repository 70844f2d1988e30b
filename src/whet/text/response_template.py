"""Replies of models whose tokenizer has a ``response_template``, transformers' description of a model's messages.

Source: transformers 5.24, ``utils/chat_parsing``; ``regex`` finds delimiters that have arrived in part. A template has
fields of text (``content``; ``reasoning_content``, ``reasoning`` or ``thinking``) and ``tool_calls``. Differences: a
text that is divided by calls is kept whole; a call that cannot be parsed, or names no tool, remains content; and
``optional`` has no effect, since a reply without a field is still a reply.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.errors import WhetError, WhetValueError, check_installed
from whet.text.response_fields import CALLS, FIELDS, THINKING, Delimiter, Field, check_keys, match_groups
from whet.text.thinking import TextChunk
from whet.text.tool_calls import ToolCall, read_argument, read_calls, types_of

_FORM = r"\s*(?:<\|constrain\|>)?\s*\w*<\|message\|>"
_TO = r"to=functions\.(?P<name>[\w.-]+)"
_CHANNEL = r"<\|channel\|>(?:commentary|analysis)"
KNOWN: dict[str, dict[str, Any]] = {
    "<|channel|>analysis": {  # Harmony, of gpt-oss
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {
                "open": "<|channel|>analysis<|message|>", "close": "<|end|>", "repeats": True, "join": "\n",
            },
            "content": {
                "open_pattern": rf"<\|channel\|>(?:final|commentary){_FORM}", "close": ["<|end|>", "<|return|>"],
                "repeats": True, "join": "\n",
            },
            "tool_calls": {
                "open_pattern": rf"{_TO}{_CHANNEL}{_FORM}|{_CHANNEL}\s+{_TO}{_FORM}", "close": "<|call|>",
                "repeats": True, "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    },
}  # fmt: skip
"""Response templates of tokenizers without one, by texts in their chat templates."""
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}


def find_response_template(tokenizer: Any) -> ResponseTemplate | None:
    """Return the response template of a tokenizer, or one that fits its chat template.

    None: it has none, or, after a warning, an unsupported one.
    """
    spec, chat = getattr(tokenizer, "response_template", None), str(getattr(tokenizer, "chat_template", None))
    spec = next((known for text, known in KNOWN.items() if text in chat), None) if spec is None else spec
    if spec is None:
        return None
    try:
        return ResponseTemplate(spec)
    except WhetError as error:
        warnings.warn(f"the format of replies is chosen by the chat template: {error}", stacklevel=2)
        return None


class ResponseTemplate:
    """A response template whose fields are all supported.

    Args:
        spec: value of ``response_template`` in tokenizer_config.json.

    Attributes:
        delimiters: literal texts and patterns that occur around and within fields.
        has_calls: whether replies can call tools.

    Raises:
        WhetValueError: a key, field, parser or pattern is not valid, or not supported.
        MissingExtraError: regex is not installed.
    """

    def __init__(self, spec: Any) -> None:
        check_installed("a response_template", "regex", extra="serve")
        check_keys("response_template", spec, _KEYS)
        if spec.get("version", 1) != 1:
            raise WhetValueError(f"response_template: version is {spec['version']!r:.40}, expected 1.")
        fields = spec.get("fields")
        check_keys("response_template: fields", fields, FIELDS)
        check_keys("response_template: defaults", spec.get("defaults", {}), ("role", *FIELDS))
        self.fields = {name: Field.read(name, field) for name, field in fields.items()}
        implicit = [name for name, field in self.fields.items() if field.opening is None]
        if len(implicit) > 1:
            raise WhetValueError(f"response_template: {' and '.join(implicit)} have no open, expected at most one.")
        self.implicit = implicit[0] if implicit else None
        anchor = Delimiter.read("response_template", spec, "start_anchor")
        if anchor is None:
            raise WhetValueError("response_template has no start_anchor.")
        self._anchor = anchor.pattern
        self.delimiters = [text for field in self.fields.values() for text in field.texts]
        self.has_calls = CALLS in self.fields

    def begin_of_reply(self, prompt: str) -> str:
        """Return the part of the reply that a prompt ends with, such as an opening tag; empty without an anchor."""
        ends = [found.end() for found in self._anchor.finditer(prompt)]
        return prompt[ends[-1] :] if ends else ""

    def parser(
        self, tools: Sequence[Mapping[str, Any]] = (), prompt: str = "", with_errors: bool = False
    ) -> TemplateParser:
        """Return the parser of a reply.

        Args:
            tools: in OpenAI's form; empty: calls remain text.
            prompt: its end may be the reply's beginning.
            with_errors: as for ``ToolParser``.
        """
        return TemplateParser(self, tools, self.begin_of_reply(prompt), with_errors and bool(tools))


class TemplateParser:
    """Parses a reply that arrives in parts."""

    def __init__(
        self, template: ResponseTemplate, tools: Sequence[Mapping[str, Any]], begin: str, with_errors: bool
    ) -> None:
        self._with_errors = with_errors
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas = {str(each.get("name")): each.get("parameters") or {} for each in functions}
        self._fields = [*template.fields.values()]
        self._implicit = template.fields.get(template.implicit or "")
        self._buffer, self._place = "", 0
        self._texts = {field.name: _Text(field) for field in self._fields if field.name != CALLS}
        self._open: Field | None = None  # the field that is open; None: the one without an opening, or none
        self._captures: dict[str, str] = {}
        self._call, self._opened_by = "", ""
        self.add(begin)

    def add(self, text: str, is_last: bool = False) -> list[TextChunk | ToolCall]:
        """Add a part of the reply, and return the texts and calls that are complete."""
        self._buffer += text
        found: list[TextChunk | ToolCall] = []
        n_empty = 0  # delimiters since the last character
        while True:
            event, end = self._scan(is_last)
            until = event.match.start() if event else end
            if n_empty > len(self._fields):  # or empty delimiters would follow each other for ever
                event, until = None, min(self._place + 1, len(self._buffer))
            n_empty = n_empty + 1 if event and event.match.end() == self._place else 0
            is_done = event is None and until in (end, self._place)
            self._write(self._buffer[self._place : until], found)
            self._place = event.match.end() if event else until
            if is_done:
                break
            if event:
                self._follow(event, found)
        if is_last:
            self._close("", found)
        return found

    def _follow(self, event: _Event, found: list[TextChunk | ToolCall]) -> None:
        """Open or close a field."""
        self._captures |= match_groups(event.match)
        if not event.opens:
            self._close(event.match[0], found)
            return
        self._end_text(self._implicit, keeps_space=event.field.name == CALLS)
        self._open, self._captures = event.field, match_groups(event.match)
        self._call, self._opened_by = "", event.match[0]

    def _scan(self, is_last: bool) -> tuple[_Event | None, int]:
        """Return the first delimiter that is complete, and the place up to which there is none."""
        awaited = [(True, field) for field in self._fields if self._open is None and field.opening is not None]
        current = self._open or self._implicit
        awaited += [(False, current)] if current is not None and current.closing is not None else []
        events, held = [], len(self._buffer)
        for opens, field in awaited:
            delimiter = field.opening if opens else field.closing
            assert delimiter is not None, "only fields with the delimiter are awaited"
            match, place = delimiter.find(self._buffer, self._place, is_last)
            held = min(held, place)
            events += [_Event(opens, field, match)] if match else []
        # The earliest, and of several the longest, the first opening before a closing.
        first = min(
            events, key=lambda e: (e.match.start(), -len(e.match[0]), not e.opens, e.field.name), default=None
        )  # fmt: skip
        return (first if first and (is_last or first.match.start() < held) else None), held

    def _write(self, text: str, found: list[TextChunk | ToolCall]) -> None:
        """Add text to the open field; text between fields is dropped."""
        field = self._open or self._implicit
        if field is None or not text:
            return
        if field.name == CALLS:
            self._call += text
        else:
            found += self._texts[field.name].add(text)

    def _end_text(self, field: Field | None, keeps_space: bool = False) -> None:
        if field is not None and field.name != CALLS:
            self._texts[field.name].end(keeps_space)

    def _close(self, closed_by: str, found: list[TextChunk | ToolCall]) -> None:
        """Close the open field."""
        field, self._open = self._open or self._implicit, None
        if field is None or field.name != CALLS:
            self._end_text(field)
            return
        if field.opening is None and not self._call.strip():
            return
        calls = self._read_calls(field)
        if calls:
            found += calls
            self._end_text(self._implicit)
        elif "content" in self._texts:
            found += self._texts["content"].add(self._opened_by + self._call + closed_by)
        self._call = self._opened_by = ""

    def _read_calls(self, field: Field) -> list[ToolCall]:
        """Return the calls of a field; none if it is anything else."""

        def read() -> list[ToolCall]:
            value = field.read_value(self._call, self._captures)
            return [self._as_call(each) for each in (value if isinstance(value, list) else [value])]

        return read_calls(read, self._call.strip(), self._schemas, with_errors=self._with_errors)

    def _as_call(self, value: Mapping[str, Any]) -> ToolCall:
        function = value.get("function", value)
        name, arguments = function["name"], function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        schema = self._schemas.get(name, {})
        kinds = {key: types_of(part, schema) for key, part in schema.get("properties", {}).items()}
        return ToolCall(name, {key: _as_argument(each, kinds.get(key, set())) for key, each in arguments.items()})


@dataclass(frozen=True)
class _Event:
    """A delimiter that was found: the opening or the closing of a field."""

    opens: bool
    field: Field
    match: Any


class _Text:
    """The text of a field, without the whitespace around it."""

    def __init__(self, field: Field) -> None:
        self._is_thinking = field.name in THINKING
        self._strips, self._join = field.args.get("strip", True), field.join
        self._space, self._is_begun, self._has_text = "", False, False

    def add(self, text: str) -> list[TextChunk]:
        """Return the text that is not at the end, if it is whitespace."""
        text = self._space + text
        if self._strips:
            text = text if self._is_begun else text.lstrip()
            self._space = text[len(text.rstrip()) :]
            text = text[: len(text) - len(self._space)]
        if not text:
            return []
        joined = self._join if self._has_text and not self._is_begun else ""
        self._is_begun = self._has_text = True
        return [TextChunk(joined + text, self._is_thinking)]

    def end(self, keeps_space: bool) -> None:
        """End a part of the field; ``keeps_space``: it may go on."""
        if not keeps_space:
            self._space, self._is_begun = "", False


def _as_argument(value: Any, kinds: set[str]) -> Any:
    """Return an argument with a type of its schema, if it was written as text."""
    if isinstance(value, list) and "array" not in kinds:  # of tags that occur several times
        return [_as_argument(each, kinds) for each in value]
    return read_argument(value, kinds) if isinstance(value, str) else value
