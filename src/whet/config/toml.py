"""TOML files of settings."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.errors import WhetValueError
from whet.files import replace_text


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
    import tomli_w  # of the train extra; importing whet.config needs only NumPy

    def without_none(table: Mapping[str, Any]) -> dict[str, Any]:
        return {
            str(name): without_none(value) if isinstance(value, Mapping) else value
            for name, value in table.items()
            if value is not None
        }

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, tomli_w.dumps(without_none(settings)))
