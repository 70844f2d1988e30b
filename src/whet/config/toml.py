"""TOML files of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.errors import WhetValueError
from whet.files import replace_text

try:
    import tomllib  # pyright: ignore[reportMissingImports]
except ImportError:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        WhetValueError: the file does not exist or is not TOML.
    """
    path = Path(path)
    if not path.is_file():
        raise WhetValueError(f"{path}: the config file does not exist.")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise WhetValueError(f"{path}: not TOML: {error}.") from error


def write_toml(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write settings, and tables of settings, for ``read_toml``; None is omitted.

    Creates the folder. The file is replaced atomically.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    lines = _format_lines({name: value for name, value in settings.items() if name not in tables})
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_format_lines(table)]
    replace_text(path, "\n".join(lines).lstrip() + "\n")


def _format_lines(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_format_value(value)}" for name, value in settings.items() if value is not None]


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format_value, value))}]"
    return repr(value)
