"""Construction and validation of config dataclasses, from keyword arguments or a table of a file.

Fields have the types of TOML: a number, a string, a boolean, a list or a table of these; None is a missing value.
No field is special here: configs are defined in ``whet.config`` and next to the code that they configure.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

from whet.errors import WhetTypeError, WhetValueError, is_temperature

Config = TypeVar("Config")


class Range(NamedTuple):
    """Valid values of a field, in addition to its type; used in aliases such as ``Count``."""

    expected: str
    holds: Callable[[Any], bool]


class Conversion(NamedTuple):
    """Function applied to a field's value before validation; used in aliases, like ``Range``."""

    convert: Callable[[Any], Any]


def expand_home(value: Any) -> Any:
    """Replace ``~`` by the home folder in a path or in each path of a list, as a shell does."""
    if isinstance(value, (list, tuple)):
        return [expand_home(each) for each in value]
    return os.path.expanduser(value) if isinstance(value, (str, os.PathLike)) else value


def _as_paths(value: Any) -> Any:
    return expand_home([value] if isinstance(value, (str, os.PathLike)) else value)


Count = Annotated[int, Range("an integer >= 0", lambda n: n >= 0)]
OptionalCount = Annotated[int | None, Range("an integer >= 0, or None", lambda n: n is None or n >= 0)]
OptionalPositive = Annotated[int | None, Range("an integer >= 1, or None", lambda n: n is None or n >= 1)]
Positive = Annotated[int, Range("an integer >= 1", lambda n: n >= 1)]
Seed = Annotated[int, Range("an integer from 0 to 2^64 - 1", lambda n: 0 <= n < 1 << 64)]
NonNegative = Annotated[float, Range("a finite number >= 0", lambda x: 0 <= x < math.inf)]
Temperature = Annotated[float, Range("a finite number > 0, from 1e-30 to 1e30", is_temperature)]
TemperatureOrZero = Annotated[
    float, Range("a finite number >= 0: 0, or from 1e-30 to 1e30", lambda x: x == 0 or is_temperature(x))
]
AboveZero = Annotated[float, Range("a finite number > 0", lambda x: 0 < x < math.inf)]
OptionalAboveZero = Annotated[
    float | None, Range("a finite number > 0, or None", lambda x: x is None or 0 < x < math.inf)
]
BelowOne = Annotated[float, Range("a number in [0, 1)", lambda x: 0 <= x < 1)]
Penalty = Annotated[float, Range("a number from -2 to 2", lambda x: -2 <= x <= 2)]
TokenIds = Annotated[Sequence[int], Range("token ids >= 0", lambda ids: all(token >= 0 for token in ids))]
TokenBias = Annotated[
    Mapping[int, float],
    Range(
        "token ids >= 0 with numbers from -100 to 100",
        lambda bias: all(token >= 0 and -100 <= x <= 100 for token, x in bias.items()),
    ),
]
PathText = Annotated[str, Conversion(expand_home)]
Paths = Annotated[list[str], Conversion(_as_paths), Range("paths that are not empty", all)]
"""A list of paths, or a single path."""
StopStrings = Annotated[
    Sequence[str],
    Range(
        "at most 64 strings that are not empty, of whole characters",
        lambda stop: len(stop) <= 64 and all(text and text == text.encode(errors="replace").decode() for text in stop),
    ),
]


def make_config(config_class: type[Config], config: Config | None, settings: Mapping[str, Any]) -> Config:
    """Return a config of ``config_class``: ``config`` or the defaults, with the fields in ``settings`` replaced.

    Raises:
        WhetTypeError: config has another class, a setting is not a field (the message suggests the closest), or a
            value has the wrong type.
        WhetValueError: a value is out of range.
    """
    where = config_class.__name__
    if config is not None and type(config) is not config_class:
        raise WhetTypeError(f"{where}: config is a {type(config).__name__}, expected a {where}.")
    names = [f.name for f in dataclasses.fields(cast(Any, config_class))]
    for name in settings:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"Settings: {', '.join(names)}."
            raise WhetTypeError(f"{where}: unknown setting {name!r}. {hint}")
    if config is None:
        return config_class(**settings)
    return dataclasses.replace(cast(Any, config), **settings)


def check_types(config: Any) -> None:
    """Convert the values of all fields, and check their types and ranges.

    ``convert_fields`` runs first. An int is a valid float, a tuple a valid list. NumPy scalars and other numbers become
    Python numbers, for JSON, TOML and native code; integer keys of a table are also parsed from strings, which is how
    JSON and TOML store them.

    Raises:
        WhetTypeError: a value has the wrong type; names the field, its type and the value.
        WhetValueError: a string is not among a field's choices, or a value is NaN or out of range.
    """
    convert_fields(config)
    hints = _hints(type(config))
    for name in (f.name for f in dataclasses.fields(config)):
        value, hint, notes = getattr(config, name), hints[name], ()
        if typing.get_origin(hint) is Annotated:
            hint, *notes = typing.get_args(hint)
        if isinstance(value, Mapping) and typing.get_args(hint)[:1] == (int,):
            value = {_as_integer(key): item for key, item in value.items()}
        if not _is_of_type(value, hint):
            error = WhetValueError if isinstance(value, str) and _choices(hint) else WhetTypeError
            raise error(f"{type(config).__name__}: {name} is {value!r}, expected {_describe_type(hint)}.")
        plain = _as_python(value)
        items = plain.values() if isinstance(plain, dict) else plain if isinstance(plain, (list, tuple)) else [plain]
        if any(item != item for item in items):
            raise WhetValueError(f"{type(config).__name__}: {name} is {value!r}, expected a number other than NaN.")
        object.__setattr__(config, name, plain)
        for note in notes:
            if isinstance(note, Range):
                check_range(config, name, note.holds(plain), note.expected)


def convert_fields(config: Any) -> None:
    """Apply the ``Conversion`` of each field that has one, such as paths that begin with ``~``."""
    for name, hint in _hints(type(config)).items():
        for note in typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ():
            if isinstance(note, Conversion):
                object.__setattr__(config, name, note.convert(getattr(config, name)))


@functools.cache
def _hints(config_class: type) -> Mapping[str, Any]:
    """Return the types of a config's fields, with their notes. A server checks three configs per request."""
    return typing.get_type_hints(config_class, include_extras=True)


def check_range(config: Any, name: str, ok: bool, expected: str) -> None:
    """Raise unless ``ok``.

    Raises:
        WhetValueError: names the field ``name`` of ``config``, its value and the expected one.
    """
    if not ok:
        where = type(config).__name__
        raise WhetValueError(f"{where}: {name} is {getattr(config, name)!r}, expected {expected}.")


def reject_ineffective(config: Any, names: Sequence[str], effective: bool, why: str) -> None:
    """Raise if a field of ``config`` differs from its default, unless the fields are ``effective``.

    Raises:
        WhetValueError: names the field, its value, ``why`` it has no effect, and its default.
    """
    defaults = {f.name: f for f in dataclasses.fields(config)}
    for name in () if effective else names:
        value, default = getattr(config, name), _default(defaults[name])
        if value != default:
            raise WhetValueError(
                f"{type(config).__name__}: {name} is {value!r} and has no effect: {why}. Leave it at {default!r}."
            )


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _as_python(value: Any) -> Any:
    """Convert numbers, also in lists and tables, to int or float; return other values unchanged."""
    if type(value) in (int, str, float):  # most values, such as the tokens of a prompt
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_python, value))
    if isinstance(value, Mapping):
        return {_as_python(key): _as_python(item) for key, item in value.items()}
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _as_integer(key: Any) -> Any:
    """Parse an integer from a string; return other values unchanged."""
    try:
        return int(key) if isinstance(key, str) else key
    except ValueError:
        return key


def _is_of_type(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of_type(value, member) for member in arguments)
    if origin in (list, Sequence):
        return isinstance(value, (list, tuple)) and all(_is_of_type(item, arguments[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _is_of_type(key, arguments[0]) and _is_of_type(item, arguments[1]) for key, item in value.items()
        )
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _choices(hint: Any) -> tuple[Any, ...]:
    """Values of a Literal, or of the Literals in a union."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return tuple(choice for member in typing.get_args(hint) for choice in _choices(member))


def _describe_type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if _choices(hint):
        return "one of " + ", ".join(map(repr, _choices(hint)))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_describe_type, arguments))
    if origin in (list, Sequence):
        return f"a list of {_describe_type(arguments[0])} values"
    if origin is Mapping:
        return f"a table of {_describe_type(arguments[0])} to {_describe_type(arguments[1])}"
    return "None" if hint is type(None) else hint.__name__
