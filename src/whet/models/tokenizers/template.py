"""Chat templates of model files: untrusted Jinja programs, rendered in a sandbox within bounds.

As in transformers, a template receives plain data, cannot access attributes that begin with an underscore, has
``raise_exception``, ``strftime_now`` and ``tojson``, and may mark the assistant's text (``{% generation %}``). Its
length and its work are bounded: loop iterations, macro calls, numbers of a range, and the sizes of results of ``+``,
``*``, ``**`` and ``~``. (Filters and ``%`` are not bounded.) Needs jinja2.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes, sandbox
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from whet.errors import WhetTypeError, WhetValueError

_MOST_CHARACTERS = 1 << 20
"""Longest template: forty times the longest known one."""
_MOST_STEPS = 1_000_000
"""Budget of one rendering; a step is an iteration, a macro call, a number of a range, or a kilobyte produced."""
_TAG = "\ue000end-of-the-message\ue000"
_BEGIN, _END = "\ue000generation\ue000", "\ue000endgeneration\ue000"


class _BudgetError(Exception):
    """A template exceeds its budget."""


class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja program.
        key: its key in the file, for error messages.

    Raises:
        WhetValueError: it is too long, or not a Jinja program.
    """

    def __init__(self, source: str, key: str = "tokenizer.chat_template") -> None:
        self.source, self.key = source, key
        if len(source) > _MOST_CHARACTERS:
            raise self._error(f"it has {len(source)} characters, expected at most {_MOST_CHARACTERS}")
        try:
            self._environment = _Environment()
            self._template = self._environment.from_string(source)
        except Exception as error:  # jinja2 raises many types
            raise self._error(f"it is not a Jinja template ({error})") from error

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[str, str]]:
        return ChatTemplate, (self.source, self.key)  # the compiled form has thread-local state

    def _error(self, text: str) -> WhetValueError:
        return WhetValueError(f"{self.key}: {text}. Set another chat_template, or give prompts as plain text.")

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False, **values: Any
    ) -> str:
        """Render messages to text.

        Args:
            messages: dicts with ``role`` and ``content``. None values are removed, as in transformers; a content of
                None is kept if the template rejects messages without content.
            continue_final_message: leave the last message open at the end of the text.
            values: further variables of the template: ``add_generation_prompt``, ``tools``, ``bos_token``, and so on.

        Raises:
            WhetValueError: the template rejects the messages, fails, violates the sandbox, or exceeds a bound.
            WhetTypeError: the messages are not plain data.
        """
        plain = [_copy_plain(message) for message in messages]
        try:
            return self._render([_drop_none(message) for message in plain], continue_final_message, values)
        except WhetValueError:
            if all(message.get("content", "") is not None for message in plain):
                raise
            return self._render([_drop_none(message, "content") for message in plain], continue_final_message, values)

    def _render(self, messages: list[dict[str, Any]], continue_final_message: bool, values: Mapping[str, Any]) -> str:
        if continue_final_message:
            if not messages or not isinstance(messages[-1].get("content"), str):
                raise self._error("the last message, which is to be continued, has no text as its content")
            messages[-1]["content"] += _TAG + " "
        try:
            self._environment.budget.steps = _MOST_STEPS
            text = self._template.render(messages=messages, **_copy_plain(values))
        except Exception as error:
            raise self._error(f"it cannot render these messages ({error or type(error).__name__})") from error
        if not continue_final_message:
            return text
        begin, tag, end = text.rpartition(_TAG)
        if not tag:
            raise self._error("it omits the end of the last message, which is to be continued")
        return begin if end.startswith(" ") else begin.rstrip()  # the template strips contents

    def generation_spans(
        self, text: str, messages: Sequence[Mapping[str, Any]], **values: Any
    ) -> list[tuple[int, int]]:
        """Return (start, end) of the spans that the template marks as the assistant's.

        Args:
            text: the result of ``render`` for these messages and values.

        Raises:
            WhetValueError: as ``render``, or the marks are nested or changed by a filter.
        """
        self._environment.marks.are_shown = True
        try:
            pieces = re.split(f"({_BEGIN}|{_END})", self.render(messages, **values))
        finally:
            self._environment.marks.are_shown = False
        if "".join(pieces[::2]) != text or pieces[1::2] != [_BEGIN, _END] * (len(pieces) // 4):
            raise self._error("its {% generation %} marks cannot be located in the rendered text")
        ends = list(itertools.accumulate(map(len, pieces[::2])))
        return list(zip(ends[:-1:2], ends[1::2], strict=True))

    def check_bounds(self, values: Mapping[str, Any]) -> None:
        """Check the bounds by rendering a short message, which a template may reject.

        Raises:
            WhetValueError: the template exceeds its bounds.
        """
        try:
            self.render([{"role": "user", "content": "a"}], add_generation_prompt=True, **values)
        except WhetValueError as error:
            if isinstance(error.__cause__, _BudgetError):
                raise


def _drop_none(message: Mapping[str, Any], kept: str = "") -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None or name == kept}


def _copy_plain(value: Any) -> Any:
    """Copy a value as JSON types only, whose methods are safe to expose to a template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_copy_plain(key): _copy_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise WhetTypeError(
        f"ChatTemplate.render: a message or option holds {value!r:.60}, expected texts, numbers, lists and dicts."
    )


class _Budget(threading.local):
    """Remaining steps of a rendering, per thread."""

    steps = 0

    def spend(self, n: int = 1) -> None:
        self.steps -= n
        if self.steps < 0:
            raise _BudgetError(f"it takes more than {_MOST_STEPS} steps")


class _Marks(threading.local):
    """Whether a rendering contains marks around the assistant's spans, per thread."""

    are_shown = False


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``: the body, between marks if they are shown."""

    tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([_call("mark", [nodes.Const(mark)])]) for mark in (_BEGIN, _END))
        return nodes.Scope([begin, *body, end], lineno=line)


class _Generator(CodeGenerator):
    """Compiles loops, macros and ``~`` with calls to the budget."""

    def visit_For(self, node: nodes.For, frame: Any) -> None:
        node.body.insert(0, nodes.ExprStmt(_call("spend")))
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Any) -> None:
        node.body.insert(0, nodes.ExprStmt(_call("spend")))
        super().visit_Macro(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.visit(_call("join_texts", node.nodes), frame)


def _call(name: str, arguments: Sequence[nodes.Expr] = ()) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


class _Namespace(Namespace):
    """Rejects attributes that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args  # a template may name a value "self"
        Namespace.__init__(self)
        for name, value in dict(*given, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError(f"a namespace has no {name!r}: it begins with an underscore")
        super().__setitem__(name, value)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """transformers' environment of chat templates, with a budget."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.budget = _Budget()
        self.marks = _Marks()
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _fail, "strftime_now": _strftime_now, "namespace": _Namespace}
        self.globals["range"] = self.bounded_range

    def spend(self) -> None:
        self.budget.spend()

    def mark(self, mark: str) -> str:
        return mark if self.marks.are_shown else ""

    def bounded_range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self.budget.spend(len(numbers[: _MOST_STEPS + 1]))
        return numbers

    def join_texts(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        self.budget.spend(sum(map(len, texts)) >> 10)
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend(_count_steps(operator, left, right))
        return super().call_binop(context, operator, left, right)


def _fail(message: str) -> None:
    raise TemplateError(message)


def _count_steps(operator: str, left: Any, right: Any) -> int:
    """Bound the cost of an operator: kilobytes or 1024 items of its result, or squared kilobits of a product."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        if operator == "**":
            bits = (left.bit_length() * abs(right),) * 2
        return bits[0] * bits[1] >> 20
    sizes = [len(value) for value in (left, right) if isinstance(value, (str, list, tuple))]
    counts = [abs(value) for value in (left, right) if isinstance(value, int)]
    return sum(sizes) * (counts[0] if counts else 1) >> 10


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON without the HTML escapes of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
