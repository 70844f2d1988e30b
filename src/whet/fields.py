"""Config dataclasses: made from keyword arguments or a table of a file, and their fields checked by type.

A field holds what TOML can: a number, a string, a boolean, a list of them, or None for one left out. Knows
no field by name: the configs are in ``whet.config``.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, cast

from whet.errors import WhetTypeError, WhetValueError

Config = TypeVar("Config")


def make_config(config_class: type[Config], config: Config | None, settings: Mapping[str, Any]) -> Config:
    """A config of ``config_class``: ``config``, or the defaults, with ``settings`` in place of its fields.

    Raises:
        WhetTypeError: config is of another class, a setting is no field (the message suggests the
            closest), or a value is of another type than its field.
        WhetValueError: a value out of its field's range.
    """
    where = config_class.__name__
    if config is not None and type(config) is not config_class:
        raise WhetTypeError(f"{where}: config is a {type(config).__name__}, expected a {where}.")
    names = [f.name for f in dataclasses.fields(cast(Any, config_class))]
    for name in settings:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(names)}."
            raise WhetTypeError(f"{where}: there is no setting {name!r}. {hint}")
    if config is None:
        return config_class(**settings)
    return dataclasses.replace(cast(Any, config), **settings)


def check_types(config: Any) -> None:
    """Refuse a value that is not of its field's type; an int does for a float, and a tuple for a list.

    Raises:
        WhetTypeError: naming the field, its type and the value.
        WhetValueError: a text that is not among a field's choices.
    """
    hints = typing.get_type_hints(type(config))
    for name in (f.name for f in dataclasses.fields(config)):
        value = getattr(config, name)
        if not _fits(value, hints[name]):
            error = WhetValueError if isinstance(value, str) and _choices(hints[name]) else WhetTypeError
            raise error(f"{type(config).__name__}: {name} is {value!r}, expected {_words(hints[name])}.")


def check_range(config: Any, name: str, ok: bool, expected: str) -> None:
    """Refuse the field ``name`` of ``config`` unless ``ok``.

    Raises:
        WhetValueError: naming the field, its value and what was expected.
    """
    if not ok:
        where = type(config).__name__
        raise WhetValueError(f"{where}: {name} is {getattr(config, name)!r}, expected {expected}.")


def check_choice(where: str, name: str, value: Any, choices: Any) -> None:
    """Refuse a ``value`` that is not among the ``choices`` of a Literal type."""
    if value not in typing.get_args(choices):
        raise WhetValueError(f"{where}: {name} is {value!r}, expected one of {', '.join(typing.get_args(choices))}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in arguments)
    if origin is list:
        return isinstance(value, (list, tuple)) and all(_fits(item, arguments[0]) for item in value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of a Literal, or of those in a union."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return tuple(choice for member in typing.get_args(hint) for choice in _choices(member))


def _words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if _choices(hint):
        return "one of " + ", ".join(map(repr, _choices(hint)))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is list:
        return f"a list of {_words(arguments[0])} values"
    return "None" if hint is type(None) else hint.__name__
