"""The fields of a response template: their delimiters, and how the text between them becomes a value."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.errors import WhetValueError
from whet.text.tool_calls import read_python_calls

THINKING = ("reasoning_content", "reasoning", "thinking")
CALLS = "tool_calls"
FIELDS = ("content", *THINKING, CALLS)
_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
}  # fmt: skip


class Delimiter:
    """A delimiter of a field.

    Args:
        source: regular expression that finds it.
        texts: as in the template.

    Attributes:
        pattern: finds it.
        texts: see Args.
    """

    def __init__(self, source: str, texts: Sequence[str]) -> None:
        import regex

        self.pattern: Any = regex.compile(source, regex.DOTALL)
        self.texts = tuple(texts)
        # A match that ends with the buffer is a partial one of this pattern, as it may become longer.
        self._followed: Any = regex.compile(f"(?>{source})[\\s\\S]", regex.DOTALL)

    @classmethod
    def read(cls, where: str, spec: Mapping[str, Any], name: str) -> Delimiter | None:
        """Read ``name`` or ``name_pattern``; None: the template has neither."""
        import regex

        literal, pattern = spec.get(name), spec.get(f"{name}_pattern")
        if literal is not None and pattern is not None:
            raise WhetValueError(f"{where} has both {name} and {name}_pattern, expected one of them.")
        if pattern is not None:
            try:
                return cls(pattern, [pattern])
            except (regex.error, TypeError) as error:
                raise WhetValueError(f"{where}: {name}_pattern {pattern!r:.80} is not a pattern: {error}.") from None
        if literal is None:
            return None
        texts = [literal] if isinstance(literal, str) else literal
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise WhetValueError(f"{where}: {name} is {literal!r:.80}, expected a text or a list of texts.")
        ordered = sorted(set(texts), key=lambda text: (-len(text), text))
        return cls("|".join(map(regex.escape, ordered)), ordered)

    def find(self, buffer: str, place: int, is_last: bool) -> tuple[Any, int]:
        """Return the first match, and the place before which more text cannot change that there is none."""
        if is_last:
            return self.pattern.search(buffer, place), len(buffer)
        found = self._followed.search(buffer, place, partial=True)
        if found is None:
            return None, len(buffer)
        if found.partial:
            return None, found.start()
        # The search prefers a complete match to an earlier partial one.
        starts = range(place, found.start() + 1)
        held = next((at for at in starts if self.pattern.fullmatch(buffer, at, partial=True)), None)
        if held is not None:
            return None, held
        match = self.pattern.match(buffer, found.start())
        extended = self.pattern.match(buffer + "\0", found.start())  # neither the end, nor a newline before it
        if extended and extended.span() == match.span() and match_groups(extended) == match_groups(match):
            return match, len(buffer)
        return None, found.start()


@dataclass(frozen=True)
class Field:
    """A field of a template: its delimiters, and how its text becomes a value."""

    name: str
    opening: Delimiter | None
    closing: Delimiter | None
    parser: str
    args: Mapping[str, Any]
    join: str
    transform: Any
    transforms_each: bool

    @classmethod
    def read(cls, name: str, spec: Any) -> Field:
        where = f"response_template: field {name}"
        check_keys(where, spec, _KEYS)
        parser, args, join = spec.get("content", "text"), spec.get("content_args", {}), spec.get("join", "")
        if name != CALLS and parser != "text":
            raise WhetValueError(f"{where}: content is {parser!r:.40}, and only text is supported.")
        _check_parser(where, parser, args)
        if not isinstance(join, str) or (join and not spec.get("repeats")):
            raise WhetValueError(f"{where}: join is {join!r:.40}, expected a text, with repeats.")
        if name != CALLS and "transform" in spec:
            raise WhetValueError(f"{where} has a transform, which is supported for {CALLS}.")
        transform, each = spec.get("transform"), spec.get("transform_each", False)
        if each and transform is None:
            raise WhetValueError(f"{where}: transform_each is set without a transform.")
        _check_transform(where, transform)
        opening, closing = Delimiter.read(where, spec, "open"), Delimiter.read(where, spec, "close")
        return cls(name, opening, closing, parser, args, join, transform, bool(each))

    @property
    def texts(self) -> list[str]:
        """The texts around the field and within it that are the template's."""
        around = [text for each in (self.opening, self.closing) if each for text in each.texts]
        within = [text for pair in self.args.get("string_delims", ()) for text in pair]
        return [*around, *within, *filter(None, [self.args.get("tag_pattern")])]

    def read_value(self, text: str, captures: Mapping[str, str]) -> Any:
        """Return the field's value."""
        value = _PARSERS[self.parser].read(text, self.args)
        if self.transform is None:
            return value
        if self.transforms_each:
            return [_fill(self.transform, {**captures, **each}) for each in value]
        return _fill(self.transform, {**captures, "content": value})


# --- parsers of a field's text ------------------------------------------------------------------------------------


def _read_text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _read_bool(text: str, args: Mapping[str, Any]) -> bool:
    return _read_text(text, args).lower() in ("true", "1")


def _read_json(text: str, args: Mapping[str, Any]) -> Any:
    """Read JSON whose keys may lack quotes, and whose strings may have other delimiters."""
    import regex

    strings: list[str] = []

    def keep(match: Any) -> str:
        strings.append(json.dumps(match[1]))
        return f"\1{len(strings) - 1}\2"

    given = text
    if args.get("string_delims") and ("\1" in text or "\2" in text):
        raise ValueError("the text has control characters")
    for opening, closing in args.get("string_delims", ()):
        text = regex.sub(regex.escape(opening) + "(.*?)" + regex.escape(closing), keep, text, flags=regex.DOTALL)
    if args.get("unquoted_keys"):  # the first alternative skips whole strings
        quoted = r'"(?:\\.|[^"\\])*"|(?<=[{,])(\s*)(\w+)(\s*):'
        text = regex.sub(quoted, lambda m: m[0] if m[2] is None else f'{m[1]}"{m[2]}"{m[3]}:', text)
    text = regex.sub("\1(\\d+)\2", lambda m: strings[int(m[1])], text)
    try:
        return json.loads(text)
    except ValueError:
        if args.get("allow_non_json"):
            return given.strip()
        raise


def _read_xml(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    import regex

    found: dict[str, list[Any]] = {}
    for match in regex.finditer(args["tag_pattern"], text, flags=regex.DOTALL):
        found.setdefault(match["key"], []).append(_read_inner(match["value"], args))
    merges = args.get("merge_duplicates", False)
    return {key: values if merges and len(values) > 1 else values[-1] for key, values in found.items()}


def _read_lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = _read_text(line, args).partition(args.get("kv_sep", ":"))
        if separator:
            found[_read_text(key, args)] = _read_inner(_read_text(value, args), args)
    return found


def _read_inner(text: str, args: Mapping[str, Any]) -> Any:
    parser = args.get("value_parser")
    return text if parser is None else _PARSERS[parser.get("name", "text")].read(text, parser.get("args", {}))


def _read_calls(text: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": call.name, "arguments": call.arguments} for call in read_python_calls(text.strip())]


@dataclass(frozen=True)
class _Parser:
    """A parser of fields, and the arguments that it supports."""

    read: Callable[[str, Mapping[str, Any]], Any]
    args: tuple[str, ...]


_PARSERS = {
    "text": _Parser(_read_text, ("strip",)),
    "int": _Parser(lambda text, args: int(_read_text(text, args)), ("strip",)),
    "float": _Parser(lambda text, args: float(_read_text(text, args)), ("strip",)),
    "bool": _Parser(_read_bool, ("strip",)),
    "json": _Parser(_read_json, ("unquoted_keys", "string_delims", "allow_non_json")),
    "xml-inline": _Parser(_read_xml, ("tag_pattern", "value_parser", "merge_duplicates")),
    "kv-lines": _Parser(_read_lines, ("line_sep", "kv_sep", "value_parser", "strip")),
    "python-call-list": _Parser(_read_calls, ()),
}


# --- checks and transforms ----------------------------------------------------------------------------------------


def check_keys(where: str, given: Any, known: Sequence[str] | set[str]) -> None:
    """Raise a WhetValueError unless ``given`` is an object with known keys."""
    if not isinstance(given, Mapping):
        raise WhetValueError(f"{where} is {given!r:.60}, expected an object.")
    if unknown := sorted(given.keys() - {*known}):
        raise WhetValueError(
            f"{where} has {', '.join(map(repr, unknown))}, and supported are {', '.join(sorted(known))}."
        )


def _check_parser(where: str, name: Any, args: Any) -> None:
    import regex

    if name not in _PARSERS:
        raise WhetValueError(f"{where}: the parser {name!r:.40} is not supported; supported are {', '.join(_PARSERS)}.")
    check_keys(f"{where}: content_args of {name}", args, _PARSERS[name].args)
    if name == "xml-inline":
        try:
            groups = regex.compile(args["tag_pattern"]).groupindex
        except (KeyError, TypeError, regex.error) as error:
            raise WhetValueError(f"{where}: tag_pattern is not a pattern: {error}.") from None
        if not {"key", "value"} <= groups.keys():
            raise WhetValueError(f"{where}: tag_pattern has the groups {[*groups]}, expected key and value.")
    if (inner := args.get("value_parser")) is not None:
        check_keys(f"{where}: value_parser", inner, ("name", "args"))
        _check_parser(where, inner.get("name", "text"), inner.get("args", {}))


def _placeholder(text: str) -> list[str] | None:
    """Return the path that a text such as "{content.name}" names; None: it is a text."""
    import regex

    found = regex.fullmatch(r"\{(\w+(?:\.\w+)*)\}", text)
    return found[1].split(".") if found else None


def _check_transform(where: str, transform: Any) -> None:
    import regex

    if isinstance(transform, str) and _placeholder(transform) is None and regex.search(r"\{\w+(\.\w+)*\}", transform):
        raise WhetValueError(
            f"{where}: transform {transform!r:.60} mixes a placeholder with text, expected one of them."
        )
    for each in transform.values() if isinstance(transform, dict) else transform if isinstance(transform, list) else ():
        _check_transform(where, each)


def _fill(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Replace the placeholders of a transform."""
    if isinstance(transform, dict):
        return {key: _fill(each, scope) for key, each in transform.items()}
    if isinstance(transform, list):
        return [_fill(each, scope) for each in transform]
    path = _placeholder(transform) if isinstance(transform, str) else None
    value: Any = scope if path else transform
    for key in path or ():
        value = value[key]
    return value


def match_groups(match: Any) -> dict[str, str]:
    """Return the named groups that a match has."""
    return {name: text for name, text in match.groupdict().items() if text is not None}
