"""JSON schemas of Python functions, as chat templates get them, and checks of arguments against a schema.

A function has type hints and a docstring in Google's style. The schema equals the one of transformers' (5.24)
``get_json_schema`` for every function that both accept; this module needs no transformers, and
rejects tensors and images.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from whet.errors import WhetTypeError, WhetValueError

_NAMES: dict[Any, str] = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", list: "array",
    tuple: "array", dict: "object",
}  # fmt: skip
_SCALARS = (int, float, str, bool, type(None))
_ENDS = re.compile(r"Returns:|Raises:")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function, in OpenAI's form: ``{"type": "function", "function": {...}}``.

    The docstring describes the function, and in its sections ``Args:`` and ``Returns:`` the parameters and the result.
    A parameter whose description ends in ``(choices: ["a", "b"])`` takes one of these values.

    Raises:
        WhetTypeError: it is not a function, or a parameter has no type hint, one that JSON has not, or cannot be passed
            by name.
        WhetValueError: it has no docstring, or the docstring does not describe a parameter.
    """
    name = getattr(function, "__name__", "")
    if not callable(function) or not name or inspect.isclass(function):
        raise WhetTypeError(f"tool_schema: {function!r:.60} is not a function with a name.")
    where = f"tool_schema: {name}"
    described, result = _read_docstring(inspect.getdoc(function) or "", where)
    properties, required = {}, []
    hints = get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        key = parameter.name
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise WhetTypeError(f"{where}: {key!r} cannot be passed by name, as a model does. Declare it by name.")
        if key not in hints:
            raise WhetTypeError(f"{where}: {key!r} has no type hint. Add one, such as {key}: int.")
        if key not in described:
            raise WhetValueError(f"{where}: the docstring does not describe {key!r}. Add it to the section Args.")
        properties[key] = _describe(_schema_of(hints[key], f"{where}: {key!r}"), described[key], f"{where}: {key!r}")
        required += [key] if parameter.default is parameter.empty else []
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    found = {"name": name, "description": described[""], "parameters": parameters}
    if "return" in hints:
        try:
            returned = _schema_of(hints["return"], where)
            found["return"] = returned if result is None else {**returned, "description": result}
        except WhetTypeError:
            pass  # the model does not write it
    return {"type": "function", "function": found}


def _read_docstring(text: str, where: str) -> tuple[dict[str, str], str | None]:
    """Return descriptions by parameter, with the function's as "", and the description of the result."""
    if not text.strip():
        raise WhetValueError(f"{where} has no docstring, which describes it and its parameters to the model. Add one.")
    text = text.strip()
    found = {"": re.split(r"Args:|Returns:|Raises:", text)[0].strip()}
    name, depth = "", ""
    for line in filter(str.strip, _ENDS.split(_section(text, "Args") or "")[0].rstrip().split("\n")):
        begin = re.match(r"([ \t]*)(\w+):(.*)", line)
        # A name that is indented deeper, or follows one without a description, is a part of that description.
        if begin and not (name and (not found[name].strip() or re.match(f"{depth}[ \t]", line))):
            depth, name, line = begin.groups()
            found[name] = line
        elif name:
            found[name] += f"\n{line}"
    result = _section(text, "Returns")
    clean = {key: re.sub(r"\s*\n+\s*", " ", part.strip()) if key else part for key, part in found.items()}
    return clean, None if result is None else result.partition("Raises:")[0].strip()


def _section(text: str, name: str) -> str | None:
    """Return the text after the heading of a section."""
    begin = re.search(rf"\n\s*{name}:\n", text)
    return text[begin.end() :] if begin else None


def _describe(schema: dict[str, Any], description: str, where: str) -> dict[str, Any]:
    """Return a parameter's schema with its description, from which choices are taken."""
    choices = re.search(r"\(choices:\s*(.*?)\)\s*$", description, re.IGNORECASE)
    if choices is None:
        return {**schema, "description": description}
    try:
        values = list(json.loads(choices[1]))
    except (ValueError, TypeError) as error:
        raise WhetValueError(f'{where} has the choices {choices[1]!r:.60}, expected JSON as in ["a", "b"].') from error
    values = [value.strip() if isinstance(value, str) else value for value in values]
    return {**schema, "enum": values, "description": description[: choices.start()].strip()}


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    """Return the schema of a type hint."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None and isinstance(hint, type) and issubclass(hint, Enum):
        return _schema_of_values([member.value for member in hint], where)
    if origin is Literal:
        return _schema_of_values(list(arguments), where)
    if hint is Any:
        return {}
    if origin is None and isinstance(hint, type) and hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin in (Union, types.UnionType):
        parts = [_schema_of(each, where) for each in arguments if each is not type(None)]
        names = sorted({part["type"] for part in parts if part.keys() == {"type"} and isinstance(part["type"], str)})
        if len(parts) == 1:
            schema = parts[0]
        elif all(part.keys() == {"type"} and part["type"] in names for part in parts):
            schema = {"type": names[0] if len(names) == 1 else names}
        else:
            schema = {"anyOf": parts}
        return {**schema, "nullable": True} if type(None) in arguments else schema
    if origin is list:
        return {"type": "array", "items": _schema_of(arguments[0], where)} if arguments else {"type": "array"}
    if origin is tuple and len(arguments) != 1 and ... not in arguments:
        items = {"prefixItems": [_schema_of(each, where) for each in arguments]} if arguments else {}
        return {"type": "array", **items}
    if origin is dict:
        values = {"additionalProperties": _schema_of(arguments[1], where)} if len(arguments) == 2 else {}
        return {"type": "object", **values}
    raise WhetTypeError(
        f"{where} has the type hint {hint!r}, which has no JSON schema. Use int, float, str, bool, None, Any, Literal, "
        f"an Enum of them, and list, tuple, dict or unions of these."
    )


def _schema_of_values(values: list[Any], where: str) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise WhetTypeError(f"{where} has the values {values!r:.60}, expected one or more of JSON's texts and numbers.")
    kinds = list(dict.fromkeys(_NAMES[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


# --- arguments ------------------------------------------------------------------------------------------


def find_fault(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """Return why arguments do not fit the parameters of a ``tool_schema``; empty if they do.

    As in Python, true is not an integer, and 1.0 is none either; an integer is a number.
    """
    properties, required = parameters["properties"], parameters.get("required", ())
    faults = [f"{name} is missing" for name in required if name not in arguments]
    faults += [f"there is no parameter {name!r}" for name in arguments if name not in properties]
    faults += [_fault(value, properties[name], name) for name, value in arguments.items() if name in properties]
    return "; ".join(filter(None, faults))


def _fault(value: Any, schema: Mapping[str, Any], place: str) -> str:
    """Return why a value does not fit a schema; empty if it does."""
    if value is None and schema.get("nullable"):
        return ""
    shown = f"{place} is {json.dumps(value, ensure_ascii=False)[:60]}"
    if "anyOf" in schema:
        parts = [_fault(value, part, place) for part in schema["anyOf"]]
        return "" if "" in parts else f"{shown}, which fits none of {json.dumps(schema['anyOf'])}"
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    own = {_NAMES[type(value)]} | ({"number"} if type(value) is int else set())
    if kinds and own.isdisjoint(kinds):
        return f"{shown}, expected {' or '.join(kinds)}"
    if "enum" in schema and not any(value == each and type(value) is type(each) for each in schema["enum"]):
        return f"{shown}, expected one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    parts = []
    if isinstance(value, list):
        prefix = schema.get("prefixItems")
        if prefix is not None and len(prefix) != len(value):
            return f"{place} has {len(value)} items, expected {len(prefix)}"
        items = prefix if prefix is not None else [schema.get("items", {})] * len(value)
        parts = [_fault(each, part, f"{place}[{i}]") for i, (each, part) in enumerate(zip(value, items, strict=True))]
    elif isinstance(value, dict):
        part = schema.get("additionalProperties", {})
        parts = [_fault(each, part, f"{place}[{key!r}]") for key, each in value.items()]
    return next(filter(None, parts), "")
