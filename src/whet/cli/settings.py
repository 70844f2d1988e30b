"""Reads a config dataclass from a TOML file and flags.

Flags override the file, and the file overrides defaults. The dataclass defines the keys of the file, the flags and
their help (tyro). No setting is known by name here.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import tyro
from tyro.constructors import (
    MISSING_NONPROP,
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from whet.config.fields import convert_fields, make_config
from whet.config.toml import read_toml
from whet.errors import WhetError, WhetValueError

Config = TypeVar("Config")


def parse(config_class: type[Config], argv: Sequence[str], prog: str, description: str) -> Config:
    """Parse a command line: the argument that ends in .toml is the config file, the others are flags.

    Raises:
        WhetValueError: there are two files; the file is missing, is not TOML, or has a value out of range.
        WhetTypeError: an unknown key or a value of the wrong type; names file and key.
        SystemExit: after --help, or for invalid flags, which tyro explains.
    """
    files = [argument for argument in argv if argument.endswith(".toml") and not argument.startswith("-")]
    if len(files) > 1:
        raise WhetValueError(f"{prog}: there are two config files, {files[0]} and {files[1]}. Pass one.")
    settings = read_toml(files[0]) if files else {}
    try:
        default = make_config(config_class, None, settings)
    except WhetError as error:
        raise type(error)(f"{files[0]}: {str(error).removeprefix(config_class.__name__ + ': ')}") from None
    flags = [argument for argument in argv if argument not in files]
    return parse_flags(config_class, flags, prog, " [CONFIG.toml]", default=default, description=description)


def parse_flags(config_class: type[Config], argv: Sequence[str], prog: str, more: str = "", **options: Any) -> Config:
    """Parse flags.

    Args:
        more: text after ``prog`` in the usage line.
        options: passed to ``tyro.cli``.

    Raises:
        WhetValueError: a flag with several values is repeated.
        SystemExit: as for ``parse``.
    """
    _reject_repeats(config_class, argv, prog)
    with _RULES:
        config = tyro.cli(config_class, args=argv, prog=prog + more, **options)
    convert_fields(config)
    return config


def _reject_repeats(config_class: type, flags: Sequence[str], prog: str) -> None:
    """Raise if a flag with several values is repeated: the parser would only use the last one."""
    names = [flag.partition("=")[0].replace("_", "-") for flag in flags]
    hints, marked = (typing.get_type_hints(config_class, include_extras=extras) for extras in (False, True))
    for field in dataclasses.fields(config_class):
        flag = "--" + field.name.replace("_", "-")
        kind = typing.get_origin(hints[field.name])
        has_several = isinstance(kind, type) and issubclass(kind, Collection)
        is_repeated = tyro.conf.UseAppendAction in typing.get_args(marked[field.name])
        if has_several and not is_repeated and names.count(flag) > 1:
            raise WhetValueError(f"{prog}: {flag} is repeated. Pass all values after one flag: {flag} A B.")


_RULES = ConstructorRegistry()


@_RULES.struct_rule
def _dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Unwrap the docstrings of fields for the help text. tyro's default rule keeps their line breaks."""
    if not dataclasses.is_dataclass(info.type):
        return None
    hints = typing.get_type_hints(info.type, include_extras=True)
    fields = []
    for field in dataclasses.fields(info.type):
        # Deferred until --help: reading the source takes 0.3 s.
        help_text = functools.partial(_field_docstring, info.type, field.name)
        fields.append(StructFieldSpec(field.name, hints[field.name], _default_of(field, info.default), help_text))
    return StructConstructorSpec(info.type, tuple(fields))


def _default_of(field: dataclasses.Field[Any], config: Any) -> Any:
    """Return the field's value in ``config`` if it is one, otherwise the default of its class."""
    if dataclasses.is_dataclass(config):
        return getattr(config, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING_NONPROP if field.default is dataclasses.MISSING else field.default


def _field_docstring(config_class: type, name: str) -> str | None:
    return _field_docstrings(config_class).get(name)


@functools.cache
def _field_docstrings(config_class: type) -> dict[str, str]:
    """Docstrings of the fields of a dataclass and its bases, with one line per paragraph and without backticks."""
    docstrings = {}
    for each in reversed(config_class.__mro__):
        try:
            definition = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        except (OSError, TypeError):  # made by make_dataclass, or compiled
            continue
        assert isinstance(definition, ast.ClassDef)
        for field, following in itertools.pairwise(definition.body):
            match field, following:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(docstring))):
                    paragraphs = inspect.cleandoc(docstring).replace("``", "").split("\n\n")
                    docstrings[name] = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return docstrings


@_RULES.primitive_rule
def _table_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[dict[Any, Any]] | None:
    """Parse a table from one flag: ``--logit-bias 5 1.0 7 -2.0`` or ``5=1.0,7=-2.0``.

    tyro's default rule creates a flag for each entry that the file has.
    """
    if info.type_origin is not Mapping:
        return None
    key_type, value_type = typing.get_args(info.type)
    pair = f"{key_type.__name__} {value_type.__name__}".upper()

    def from_words(words: list[str]) -> dict[Any, Any]:
        words = [part for word in words for part in re.split("[=,]", word)]
        keys = [key_type(word) for word in words[::2]]
        if len(words) % 2 or len(set(keys)) < len(keys):
            raise ValueError(f"expected pairs of a key and its value, each key once, not {' '.join(words)!r}")
        return dict(zip(keys, map(value_type, words[1::2]), strict=True))

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{pair} [{pair} ...]]",
        instance_from_str=from_words,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda table: [str(word) for entry in table.items() for word in entry],
    )
