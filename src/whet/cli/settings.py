"""A config dataclass from a TOML file and flags, and back to a TOML file.

Defaults < file < flags. The dataclass is at once the keys of the file, the flags and their help (tyro). Knows no
setting by name.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from whet.config.fields import convert_fields, make_config
from whet.errors import WhetError, WhetValueError
from whet.files import replace_text

try:
    import tomllib  # pyright: ignore[reportMissingImports]
except ImportError:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

Config = TypeVar("Config")


def parse(config_class: type[Config], argv: Sequence[str], prog: str, description: str) -> Config:
    """The config that a command line asks for: the one argument that ends in .toml is its file.

    Raises:
        WhetValueError: two files; a file that is missing, is not TOML, or holds a value out of range.
        WhetTypeError: an unknown key, or a value of another type than its field; names file and key.
        SystemExit: after --help, or for flags that are not understood, which tyro explains.
    """
    files = [argument for argument in argv if argument.endswith(".toml") and not argument.startswith("-")]
    if len(files) > 1:
        raise WhetValueError(f"{prog}: there are two config files, {files[0]} and {files[1]}. Give one.")
    settings = read_toml(files[0]) if files else {}
    try:
        default = make_config(config_class, None, settings)
    except WhetError as error:
        raise type(error)(f"{files[0]}: {str(error).removeprefix(config_class.__name__ + ': ')}") from None
    flags = [argument for argument in argv if argument not in files]
    return parse_flags(config_class, flags, prog, " [CONFIG.toml]", default=default, description=description)


def parse_flags(config_class: type[Config], argv: Sequence[str], prog: str, more: str = "", **options: Any) -> Config:
    """The config that flags alone ask for.

    Args:
        more: what the usage line has after ``prog``.
        options: of ``tyro.cli``.

    Raises:
        WhetValueError: a flag of several values is there twice.
        SystemExit: as ``parse``.
    """
    _check_once(config_class, argv, prog)
    with _TABLES:
        config = tyro.cli(config_class, args=argv, prog=prog + more, **options)
    convert_fields(config)
    return config


def _check_once(config_class: type, flags: Sequence[str], prog: str) -> None:
    """Raise for a flag of several values that is there again: the parser would take those of the last only."""
    names = [flag.partition("=")[0].replace("_", "-") for flag in flags]
    hints, marked = (typing.get_type_hints(config_class, include_extras=extras) for extras in (False, True))
    for field in dataclasses.fields(config_class):
        flag = "--" + field.name.replace("_", "-")
        kind = typing.get_origin(hints[field.name])
        has_several = isinstance(kind, type) and issubclass(kind, Collection)
        is_repeated = tyro.conf.UseAppendAction in typing.get_args(marked[field.name])
        if has_several and not is_repeated and names.count(flag) > 1:
            raise WhetValueError(f"{prog}: {flag} is there twice. Name all its values after one: {flag} A B.")


_TABLES = ConstructorRegistry()


@_TABLES.primitive_rule
def _table_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[dict[Any, Any]] | None:
    """A table is one flag, ``--logit-bias 5 1.0 7 -2.0`` or ``5=1.0,7=-2.0``, also where a file has entries of it.

    tyro's own rule makes a flag of each of those entries.
    """
    if info.type_origin is not Mapping:
        return None
    of_key, of_value = typing.get_args(info.type)
    pair = f"{of_key.__name__} {of_value.__name__}".upper()

    def from_words(words: list[str]) -> dict[Any, Any]:
        words = [part for word in words for part in re.split("[=,]", word)]
        keys = [of_key(word) for word in words[::2]]
        if len(words) % 2 or len(set(keys)) < len(keys):
            raise ValueError(f"expected pairs of a key and its value, each key once, not {' '.join(words)!r}")
        return dict(zip(keys, map(of_value, words[1::2]), strict=True))

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{pair} [{pair} ...]]",
        instance_from_str=from_words,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda table: [str(word) for entry in table.items() for word in entry],
    )


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table that a file holds.

    Raises:
        WhetValueError: there is no such file, or it is not TOML.
    """
    path = Path(path)
    if not path.is_file():
        raise WhetValueError(f"{path}: there is no such config file.")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise WhetValueError(f"{path}: not TOML: {error}.") from error


def write_toml(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write settings, and tables of them, so that ``read_toml`` gives them back; None is left out.

    The folder is made. A reader, or a kill, sees the old file or the new one, never a part.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    lines = _lines({name: value for name, value in settings.items() if name not in tables})
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_lines(table)]
    replace_text(path, "\n".join(lines).lstrip() + "\n")


def _lines(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in settings.items() if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)
