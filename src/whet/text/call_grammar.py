"""Grammars of replies that call a tool, in each format of ``tool_calls``, for replies that must call one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.text.tool_calls import ARGUMENTS, QUOTE, ToolFormat, types_of

_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""A grammar that allows any whitespace lets a small model write nothing else."""


def call_grammar(form: ToolFormat, tools: Sequence[Mapping[str, Any]], mark: Callable[[str], str]) -> str:
    """Return the Lark grammar of a reply that calls one of these tools.

    Args:
        form: format of the calls.
        tools: in OpenAI's form.
        mark: notation of ``form.opening`` and ``form.closing`` in the grammar; empty for an empty text.
    """
    rules = _Rules()
    functions = [tool.get("function", tool) for tool in tools]
    line = ""
    if form.content in ("json", "json-list"):
        call = rules.add_json(_json_schema(form, functions))
        line = r'"\n"' if form.content == "json" and form.opening else ""
    elif form.content == "named-json":
        call = rules.add(" | ".join(_named_call(rules, each, mark) for each in functions))
    elif form.content == "xml":
        call, line = rules.add(" | ".join(_xml_call(rules, each) for each in functions)), r'"\n"'
    elif form.content == "braces":
        call = rules.add(" | ".join(_braced_call(rules, each, mark(QUOTE)) for each in functions))
    else:
        one = rules.add(" | ".join(_python_call(rules, each) for each in functions))
        call = rules.add(f'"[" {one} (", " {one})* "]"')
    start = " ".join(filter(None, (mark(form.opening), line, call, line, mark(form.closing))))
    return "\n".join([f"start: {start}", *rules.lines]) + "\n"


_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


class _Rules:
    """The rules of a grammar, named in their order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, body: str) -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def add_json(self, schema: Mapping[str, Any]) -> str:
        """Add a rule for a JSON value."""
        return self.add("%json " + json.dumps({**schema, "x-guidance": _GUIDANCE}))


def _json_schema(form: ToolFormat, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of the text between opening and closing."""
    calls = []
    for i, function in enumerate(functions):
        arguments = function.get("parameters") or _NOTHING
        if isinstance(arguments, Mapping):  # an id makes it the root of its references, such as #/$defs/Name
            arguments = {"$id": f"urn:tool:{i}", **arguments}
        properties = {"name": {"const": function["name"]}, form.arguments: arguments}
        calls.append(
            {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        )
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "items": call, "minItems": 1} if form.content == "json-list" else call


def _arguments(function: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Return name, schema and whether it is required of each argument, the required ones first."""
    schema = function.get("parameters") or {}
    required = set(schema.get("required", ()))
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = [(name, {**part, **shared}, name in required) for name, part in (schema.get("properties") or {}).items()]
    return sorted(found, key=lambda each: not each[2])


def _named_call(rules: _Rules, function: Mapping[str, Any], mark: Callable[[str], str]) -> str:
    """Add the rule of ``NAME[ARGS]OBJECT``."""
    arguments = rules.add_json(function.get("parameters") or _NOTHING)
    return rules.add(f"{json.dumps(function['name'])} {mark(ARGUMENTS)} {arguments}")


def _xml_call(rules: _Rules, function: Mapping[str, Any]) -> str:
    """Add the rules of ``<function=NAME>`` with one ``<parameter=NAME>`` per argument."""
    parts = [json.dumps(f"<function={function['name']}>\n")]
    for name, schema, is_required in _arguments(function):
        opening = json.dumps(f"<parameter={name}>\n")
        parts.append(rules.add(f"{opening} {_xml_value(rules, schema)}") + ("" if is_required else "?"))
    return rules.add(" ".join([*parts, '"</function>"']))


def _xml_value(rules: _Rules, schema: Mapping[str, Any]) -> str:
    """Add the rule of a text for a string, and of JSON for anything else, with the closing tag."""
    closing = json.dumps("\n</parameter>\n")
    if choices := _choices(schema):
        texts = (each if isinstance(each, str) else json.dumps(each) for each in choices)
        return f"{rules.add(' | '.join(map(json.dumps, texts)))} {closing}"
    kinds = types_of(schema, schema)
    if "string" in kinds or not kinds:  # one token of the grammar's lexer, which takes the longest match
        return rules.add(r"/([^<]|<[^\/])*\n<\/parameter>\n/")
    return f"{rules.add_json(schema)} {closing}"


def _python_call(rules: _Rules, function: Mapping[str, Any]) -> str:
    """Add the rules of ``NAME(argument=value, ...)``."""
    return _call(rules, function, (function["name"] + "(", "=", ", ", ")"), lambda each: _python_value(rules, each))


def _braced_call(rules: _Rules, function: Mapping[str, Any], quote: str) -> str:
    """Add the rules of ``call:NAME{argument:value,...}``."""

    def value(schema: Mapping[str, Any]) -> str:
        if choices := _choices(schema):
            texts = (
                f"{quote} {json.dumps(c)} {quote}" if isinstance(c, str) else json.dumps(json.dumps(c)) for c in choices
            )
            return rules.add(" | ".join(texts))
        kinds = types_of(schema, schema)
        if "string" in kinds or not kinds:
            return rules.add(f"{quote} /[^<]*/ {quote}")  # the quote begins with this character
        return rules.add_json(schema)

    return _call(rules, function, (f"call:{function['name']}{{", ":", ",", "}"), value)


def _call(
    rules: _Rules, function: Mapping[str, Any], texts: tuple[str, str, str, str], value: Callable[[Any], str]
) -> str:
    """Add the rules of a call; ``texts``: before the arguments, after a name, between arguments, and after them."""
    begin, equals, comma, end = texts
    arguments = [
        (rules.add(f"{json.dumps(name + equals)} {value(schema)}"), is_required)
        for name, schema, is_required in _arguments(function)
    ]
    first, later = '""', '""'  # what may follow the opening parenthesis, and an argument
    for rule, is_required in reversed(arguments):
        choices_first = [f"{rule} {later}"] + ([] if is_required else [first])
        choices_later = [f"{json.dumps(comma)} {rule} {later}"] + ([] if is_required else [later])
        first, later = rules.add(" | ".join(choices_first)), rules.add(" | ".join(choices_later))
    return rules.add(f"{json.dumps(begin)} {first} {json.dumps(end)}")


def _python_value(rules: _Rules, schema: Mapping[str, Any]) -> str:
    """Add the rule of a Python literal: of JSON, except the constants."""
    if choices := _choices(schema):
        return rules.add(" | ".join(json.dumps(_python_literal(each)) for each in choices))
    kinds = types_of(schema, schema) or {"string"}
    constants = [f'"{name}"' for kind, names in _PYTHON_NAMES.items() if kind in kinds for name in names]
    others = sorted(kinds - _PYTHON_NAMES.keys())
    values = [rules.add_json({**schema, "type": others} if "type" in schema else schema)] if others else []
    return rules.add(" | ".join([*constants, *values]))


_PYTHON_NAMES = {"boolean": ("True", "False"), "null": ("None",)}


def _python_literal(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))
