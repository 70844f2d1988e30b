"""Calls of tools in replies: the formats of model families as data, and a parser for replies that arrive in parts."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple


class ToolFormat(NamedTuple):
    """Format of calls of tools in replies of some families.

    Attributes:
        marker: text in the chat templates of these families.
        opening: text before a call, or before a list of calls; empty: the reply begins with a call.
        closing: text after it; empty: the end of the reply.
        content: of the call: "json" is an object, "json-list" a list of objects, "xml" Qwen3-Coder's <function=NAME>,
            "python" a list of calls with keyword arguments, "named-json" Mistral's NAME[ARGS]OBJECT, perhaps with a
            [CALL_ID] after the name, and with the opening again before further calls, "braces" Gemma 4's
            call:NAME{KEY:VALUE,...}, with texts in ``QUOTE``.
        arguments: key of the arguments in JSON.
    """

    marker: str
    opening: str
    closing: str
    content: Literal["json", "json-list", "xml", "python", "named-json", "braces"]
    arguments: str = "arguments"

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the tokenizer may have as special tokens."""
        inside = {"named-json": [ARGUMENTS, CALL_ID], "braces": [QUOTE]}
        return (self.opening, self.closing, *inside.get(self.content, ()))


FORMATS = (
    ToolFormat("<function=", "<tool_call>", "</tool_call>", "xml"),  # Qwen3-Coder, Qwen3.5, Nemotron 3
    ToolFormat("<tool_call>", "<tool_call>", "</tool_call>", "json"),  # Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4
    ToolFormat("<|tool_call_start|>", "<|tool_call_start|>", "<|tool_call_end|>", "python"),  # LFM2
    ToolFormat("<|tool_call>", "<|tool_call>", "<tool_call|>", "braces"),  # Gemma 4
    ToolFormat("<|tool_call|>", "<|tool_call|>", "<|/tool_call|>", "json-list"),  # Phi-4-mini
    ToolFormat("<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>", "json-list"),  # Nemotron Nano 2
    ToolFormat("[ARGS]", "[TOOL_CALLS]", "", "named-json"),  # Mistral Small 3.2, Ministral 3
    ToolFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "", "json-list"),  # Mistral
    ToolFormat('"parameters":', "", "", "json", "parameters"),  # Llama 3.1 to 3.3
)
"""The first whose marker is in the template is a model's format."""


ARGUMENTS = "[ARGS]"
"""Text before the arguments in "named-json"."""
CALL_ID = "[CALL_ID]"
"""Text before the id of a call in "named-json"."""
QUOTE = '<|"|>'
"""Text before and after a text in "braces"."""


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        name: of the tool.
        arguments: by name.
        error: why it cannot be carried out: it names no tool, or cannot be read; then ``name`` is ``UNREADABLE`` and
            the only argument is its ``text``. Empty: it can.
    """

    name: str
    arguments: dict[str, Any]
    error: str = ""


UNREADABLE = "unreadable_call"
"""Name of a call that cannot be read."""


def read_calls(
    read: Callable[[], list[ToolCall]], text: str, names: Collection[str], *, with_errors: bool
) -> list[ToolCall]:
    """Return the calls of a text; none if it is anything else.

    Args:
        read: reads them, or raises.
        text: the text.
        names: of the tools.
        with_errors: whether to return calls that cannot be carried out, instead of none.
    """
    try:
        calls = read()
        if not calls:
            raise ValueError("it has no name")
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"the call cannot be read ({type(error).__name__}: {error})"
        return [ToolCall(UNREADABLE, {"text": text}, reason)] if with_errors else []
    wrong = f"; the tools are {', '.join(names)}"
    checked = [c if c.name in names else c._replace(error=f"there is no tool {c.name!r}{wrong}") for c in calls]
    return checked if with_errors or not any(call.error for call in checked) else []


def tool_format(template: str, special: Collection[str] = ()) -> ToolFormat | None:
    """Return the format of a chat template's replies; None: it has none of ``FORMATS``.

    Args:
        template: the chat template.
        special: special tokens of the tokenizer. They name the format if the template lists tools without a marker, as
            LFM2's does.
    """
    named = next((form for form in FORMATS if form.marker in template), None)
    if named or "tools" not in template:
        return named
    return next((form for form in FORMATS if form.opening in special), None)


class ToolParser:
    """Separates calls of tools from text. What cannot be parsed, or names no tool, remains text.

    Args:
        form: format of the calls.
        tools: the tools, in OpenAI's form; their schemas determine the types of arguments that are written as text.
        with_errors: whether a call that cannot be parsed, or names no tool, is a call with an error instead of text.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Mapping[str, Any]], with_errors: bool = False) -> None:
        self._form, self._with_errors = form, with_errors
        functions = [tool.get("function", tool) for tool in tools]
        self._schemas = {str(each.get("name")): each.get("parameters") or {} for each in functions}
        self._pending, self._is_inside, self._has_text = "", False, False

    def add(self, text: str, is_last: bool = False) -> list[str | ToolCall]:
        """Add a part of the reply, and return the texts and calls that are complete."""
        found: list[str | ToolCall] = []
        self._pending += text
        while True:
            if self._is_inside:
                body, closing, rest = (
                    self._pending.partition(self._form.closing) if self._form.closing else ("", "", "")
                )
                if not closing and not is_last:
                    return found
                if not closing:
                    body, rest = self._pending, ""
                calls = self._parse(body)
                found += calls or [self._form.opening + body + closing]
                self._has_text |= not calls
                # Whitespace after a call is not text.
                self._pending, self._is_inside = rest.lstrip() if calls else rest, False
                if not closing:
                    return found
                continue
            if not self._form.opening:  # the reply as a whole is a call, or text
                start = self._pending.lstrip()
                self._is_inside = start.startswith("{") and not self._has_text
                if self._is_inside:
                    continue
                if not start and not is_last:
                    return found
                shown, self._pending = self._pending, ""
            else:
                shown, opening, rest = self._pending.partition(self._form.opening)
                if opening:
                    self._is_inside, self._pending = True, rest
                    found += [shown.rstrip()] if shown.strip() else []
                    continue
                lengths = range(0 if is_last else len(self._form.opening))
                n_partial = max((n for n in lengths if shown.endswith(self._form.opening[:n])), default=0)
                whole = shown[: len(shown) - n_partial]
                whole = whole if is_last else whole.rstrip()  # whitespace before a call is not text either
                shown, self._pending = whole, shown[len(whole) :]
            self._has_text |= bool(shown)
            return [*found, shown] if shown else found

    def _parse(self, body: str) -> list[ToolCall]:
        """Return the calls of a text; none if it is anything else."""
        readers = {"xml": self._read_xml, "python": read_python_calls, "named-json": self._read_named}
        readers |= {"braces": read_braced_call}
        read = readers.get(self._form.content, self._read_json)
        # Without an opening, JSON that has no arguments is an answer.
        is_call = bool(self._form.opening) or f'"{self._form.arguments}"' in body
        with_errors = self._with_errors and is_call
        return read_calls(lambda: read(body.strip()), body.strip(), self._schemas, with_errors=with_errors)

    def _read_json(self, body: str) -> list[ToolCall]:
        found = json.loads(body)
        calls = []
        for each in found if isinstance(found, list) else [found]:
            arguments = each.get(self._form.arguments, {})
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append(ToolCall(str(each["name"]), dict(arguments)))
        return calls

    def _read_named(self, body: str) -> list[ToolCall]:
        calls, rest = [], body
        while rest:
            name, marker, rest = rest.partition(ARGUMENTS)
            if not marker:
                raise ValueError("no arguments")
            arguments, end = json.JSONDecoder().raw_decode(rest.lstrip())
            calls.append(ToolCall(name.partition(CALL_ID)[0].strip(), dict(arguments)))
            rest = rest.lstrip()[end:].lstrip().removeprefix(self._form.opening)
        return calls

    def _read_xml(self, body: str) -> list[ToolCall]:
        calls = []
        for name, inside in re.findall(r"<function=([^>\n]+)>(.*?)</function>", body, re.DOTALL):
            pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", inside, re.DOTALL)
            schema = self._schemas.get(name, {})
            kinds = schema.get("properties", {})
            calls.append(
                ToolCall(name, {key: read_argument(text, types_of(kinds.get(key), schema)) for key, text in pairs})
            )
        return calls


def read_braced_call(body: str) -> list[ToolCall]:
    """Read ``call:NAME{KEY:VALUE,...}``, JSON except for quotes and keys without them.

    Raises:
        ValueError: it is anything else.
    """
    name, brace, rest = body.partition("{")
    parts = f"{brace}{rest}".split(QUOTE)  # every second is a text
    parts[::2] = [re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    if not name.startswith("call:"):
        raise ValueError("not a call")
    return [ToolCall(name.removeprefix("call:"), dict(json.loads("".join(parts))))]


def read_python_calls(body: str) -> list[ToolCall]:
    """Read a call, or a list of calls, with keyword arguments.

    Raises:
        ValueError, SyntaxError: it is anything else.
    """
    expression = ast.parse(body, mode="eval").body
    calls = []
    for call in expression.elts if isinstance(expression, ast.List) else [expression]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("not a call with keyword arguments")
        arguments = {str(each.arg): ast.literal_eval(_JsonNames().visit(each.value)) for each in call.keywords}
        calls.append(ToolCall(ast.unparse(call.func), arguments))
    return calls


class _JsonNames(ast.NodeTransformer):
    """Replaces the names of JSON's constants, which models write within lists and objects."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


_JSON_NAMES = {"true": True, "false": False, "null": None}


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema names, through its references and alternatives."""
    found: set[str] = set()
    parts, followed = [schema], set[str]()
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            continue
        kinds = part.get("type") or []
        found |= {kinds} if isinstance(kinds, str) else set(kinds)
        parts += [each for name in ("anyOf", "oneOf", "allOf") for each in part.get(name, ())]
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/") and reference not in followed:
            followed.add(reference)
            target: Any = root
            for key in reference[2:].split("/"):
                target = target.get(key) if isinstance(target, Mapping) else None
            parts.append(target)
    return found


def read_argument(text: str, kinds: set[str]) -> Any:
    """Return an argument that is written as text, with a type of its schema if it can be read so."""
    if text == "null" and "null" in kinds:
        return None
    if not kinds - {"null"} or "string" in kinds:
        return text
    try:
        return json.loads(text.lower() if "boolean" in kinds else text)
    except ValueError:
        return text
