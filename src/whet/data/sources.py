"""Reading rows, dicts as in a JSON Lines file, from files and Hugging Face datasets.

Needs only the standard library; ``pyarrow`` and ``datasets`` where a source needs them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from whet.errors import WhetTypeError, WhetValueError, check_installed


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines, JSON (a list of objects) or Parquet file, or of a Hugging Face dataset.

    Args:
        path: a file ending in .jsonl, .json or .parquet; any other string that names no file is
            a dataset's name, whose train split is read (needs ``datasets``).

    Raises:
        WhetValueError: no such file, a file not in the format of its ending (with ``file:line`` for
            JSON Lines), or one without rows.
        WhetTypeError: path is no path.
        MissingExtraError: Parquet without pyarrow, or a dataset's name without ``datasets``.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise WhetTypeError(f"read_rows: path is {path!r:.60}, expected a file, or the name of a dataset.")
    file = Path(path)
    if file.suffix in (".jsonl", ".json", ".parquet"):
        if not file.is_file():
            raise WhetValueError(f"read_rows: there is no file {str(path)!r}.")
        rows = _read_parquet(file) if file.suffix == ".parquet" else _read_json(file)
    elif file.exists():
        raise WhetValueError(f"read_rows: {str(path)!r} does not end in .jsonl, .json or .parquet.")
    else:
        rows = _read_dataset(str(path))
    if not rows:
        raise WhetValueError(f"read_rows: {str(path)!r} holds no rows.")
    return rows


def _read_json(file: Path) -> list[dict[str, Any]]:
    """A list of objects if the first character says so, else one object per line; empty lines are skipped."""
    content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if content.lstrip()[:1] == b"[":
        rows = _parse_json(content, str(file))
        numbered = [(f"{file}: row {i}", row) for i, row in enumerate(rows)]
    else:
        lines = enumerate(content.split(b"\n"), start=1)
        numbered = [(f"{file}:{i}", _parse_json(line, f"{file}:{i}")) for i, line in lines if line.strip()]
    for where, row in numbered:
        if not isinstance(row, dict):
            raise WhetValueError(f'read_rows: {where}: {row!r:.60} is no JSON object, such as {{"prompt": ...}}.')
    return [row for _, row in numbered]


def _parse_json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise WhetValueError(f"read_rows: {where}: not JSON in UTF-8: {error}.") from error


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    check_installed(f"Reading {file}", "pyarrow", extra="datasets")
    from pyarrow import parquet

    try:
        return parquet.read_table(file).to_pylist()
    except ValueError as error:
        raise WhetValueError(f"read_rows: {file}: not Parquet: {error}.") from error


def _read_dataset(name: str) -> list[dict[str, Any]]:
    what = f"read_rows: there is no file {name!r}, and reading it as a dataset's name"
    check_installed(what, "datasets", extra="datasets")
    import datasets  # pyright: ignore[reportMissingImports]

    try:
        return [dict(row) for row in datasets.load_dataset(name, split="train")]
    except Exception as error:  # of many kinds: connections, names, splits, formats
        raise WhetValueError(
            f"read_rows: there is no file {name!r}, and as a dataset's name it failed: {type(error).__name__}: {error}"
        ) from error
