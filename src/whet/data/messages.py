"""Chat messages: lists of ``{"role": ..., "content": ...}``, and their forms in datasets.

Datasets store the arguments of tool calls as JSON text (OpenAI's form) or as a dict, content as text or as parts
(``[{"type": "text", "text": ...}]``), and reasoning under three names; a chat template reads one form of each.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Most templates read the first."""
_TEXT_PARTS = ("text", "input_text", "output_text", None)


def is_messages(value: Any) -> bool:
    """Whether ``value`` is a list of chat messages, which are mappings with a role."""
    rows = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else ()
    return len(rows) > 0 and all(isinstance(row, Mapping) and "role" in row for row in rows)


def count_shared(one: Any, other: Any) -> int:
    """Return the number of leading messages that two conversations have in common; 0 for other values."""
    pairs = zip(one, other, strict=False) if is_messages(one) and is_messages(other) else ()
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether a message is an assistant turn whose ``weight`` (OpenAI's format) is not 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def parts_of(message: Mapping[str, Any]) -> Sequence[Any]:
    """Return the parts of a message's content; none if the content is text."""
    content = message.get("content")
    return content if isinstance(content, Sequence) and not isinstance(content, str) else ()


def is_text_part(part: Any) -> bool:
    """Whether a part of a message's content is a text."""
    return isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message's content, its parts joined by line breaks; "" without content."""
    content = message.get("content")
    return content if isinstance(content, str) else "\n".join(filter(None, map(_part_text, parts_of(message))))


def _part_text(part: Any) -> str:
    return part["text"] if is_text_part(part) else ""


def drop_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row without the None values that Arrow adds to dicts of messages, tools and options for missing keys.

    Top-level keys of a message stay: templates distinguish a content of None.
    """
    return {name: _drop_from_field(name, value) for name, value in row.items()}


def _drop_from_field(name: str, value: Any) -> Any:
    if is_messages(value):
        return [{key: _drop_nulls(item) for key, item in message.items()} for message in value]
    return _drop_nulls(value) if name in ("tools", "chat_template_kwargs") else value


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_drop_nulls(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return value


class Form(NamedTuple):
    """A form of messages: the type of tool calls' ``arguments`` (dict or str), and whether content may be in parts."""

    arguments: type
    has_parts: bool

    def write(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages in this form."""
        return [self._write_message(message) for message in messages]

    def _write_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        written = {**message, **_alias_reasoning(message)}
        if parts_of(message) and not self.has_parts:
            written["content"] = text_of(message)
        if calls := tool_calls(message):
            written["tool_calls"] = [_map_arguments(call, self._write_arguments) for call in calls]
        return written

    def _write_arguments(self, arguments: Any) -> Any:
        if self.arguments is dict:
            return _parse_object(arguments)
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


FORMS = (Form(dict, True), Form(dict, False), Form(str, True), Form(str, False))
"""In the order that they are tried."""


def mark(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages in the first form, with unique markers as the text of their parts and arguments."""
    texts = map("\ue000{}\ue000".format, itertools.count())
    return [_mark_message(message, texts) for message in FORMS[0].write(messages)]


def _mark_message(message: dict[str, Any], texts: Iterator[str]) -> dict[str, Any]:
    def mark_object(arguments: Any) -> Any:
        return {"argument": next(texts)} if isinstance(arguments, Mapping) else arguments

    if parts_of(message):
        message = {**message, "content": [{**part, "text": next(texts)} for part in parts_of(message)]}
    calls = [_map_arguments(call, mark_object) for call in tool_calls(message)]
    return {**message, "tool_calls": calls} if calls else message


def is_read(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether a rendering of marked messages has every marker, and no list of parts or Python dict printed raw."""
    contents = [message["content"] for message in messages if parts_of(message)]
    functions = [call.get("function", call) for message in messages for call in tool_calls(message)]
    objects = [function.get("arguments") for function in functions if isinstance(function, Mapping)]
    raw = [str(value) for value in (*contents, *objects) if isinstance(value, (list, dict))]
    raw += [json.dumps(content, ensure_ascii=False) for content in contents]
    parts = [part["text"] for content in contents for part in content]
    return not any(value in text for value in raw) and all(part in text for part in parts)


def has_forms(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether messages hold content that datasets store in several forms."""
    return any(tool_calls(message) or parts_of(message) for message in messages)


def tool_calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tool calls of a message, which may be JSON text; none if they are not a list of dicts."""
    calls = message.get("tool_calls") or ()
    calls = _parse(calls) if isinstance(calls, str) else calls
    is_list = isinstance(calls, Sequence) and not isinstance(calls, str)
    return calls if is_list and all(isinstance(call, Mapping) for call in calls) else ()


def tool_result(call: Mapping[str, Any], text: str, *, is_error: bool = False) -> dict[str, Any]:
    """Return the message that answers a call."""
    own = {"name": call["function"]["name"], "tool_call_id": call.get("id"), "content": text}
    return {"role": "tool", **own, **({"is_error": True} if is_error else {})}


def call_text(call: Mapping[str, Any]) -> str:
    """Return a call as a line of text: ``add(a=1, b="x")``."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function.get('name')}({arguments or ''})"


def failed_calls(message: Mapping[str, Any], reason: str) -> list[dict[str, Any]]:
    """Return the messages that answer the calls of a turn if none was carried out."""
    return [tool_result(call, f"error: {reason}", is_error=True) for call in tool_calls(message)]


def example_call(name: str) -> dict[str, Any]:
    """Return a turn that calls a tool, to try a chat template."""
    call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": {"key": "value"}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def without(messages: Sequence[Mapping[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return the messages without the named fields."""
    return [{name: value for name, value in message.items() if name not in names} for message in messages]


def _alias_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's reasoning under the two names that templates read, as transformers does from 5.24."""
    given = next((message[name] for name in REASONING if message.get(name)), None)
    return {} if given is None else {"thinking": message.get("thinking") or given, "reasoning_content": given}


def _map_arguments(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a tool call with ``change`` applied to its arguments, or to the arguments of its function."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _map_arguments(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else dict(call)


def _parse_object(arguments: Any) -> Any:
    """Return the dict in a JSON text, {} for an empty text, and other arguments unchanged."""
    parsed = (_parse(arguments) if arguments.strip() else {}) if isinstance(arguments, str) else None
    return parsed if isinstance(parsed, dict) else arguments


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
