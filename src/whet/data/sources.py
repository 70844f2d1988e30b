"""Reading rows, dicts as in a JSON Lines file, from files and Hugging Face datasets.

A source is a file (.jsonl, .json, .csv, each also with .gz, or .parquet), a glob pattern of such files, or a dataset as
``NAME:CONFIG:SPLIT``: a folder or a name on the hub, as ``datasets.load_dataset`` reads it. Its configuration may be
empty or omitted (default: the dataset's default configuration), and so may its split (default: train), which may be a
slice, ``train[:1000]``.

Needs only the standard library; Parquet needs ``pyarrow``, and a dataset ``datasets``.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import itertools
import json
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whet.data.messages import drop_nulls
from whet.errors import WhetTypeError, WhetValueError, check_installed

Row = dict[str, Any]
Source = str | os.PathLike[str]


class Part(NamedTuple):
    """Rows of one file or dataset. The location of a row is ``prefix`` followed by its number."""

    prefix: str
    numbers: Sequence[int]


class Rows(list[Row]):
    """Rows in memory, with the file and line that each was read from.

    Args:
        rows: the rows.
        parts: the sources of the rows, in order, with one number per row.
    """

    def __init__(self, rows: Iterable[Row] = (), parts: Iterable[Part] = ()) -> None:
        super().__init__(rows)
        self.parts = list(parts)

    def place(self, i: int) -> str:
        """File and line of row ``i``, or its index in a file without lines or in a dataset."""
        for prefix, numbers in self.parts:
            if i < len(numbers):
                return f"{prefix}{numbers[i]}"
            i -= len(numbers)
        raise IndexError(i)


def read_rows(source: Source | Sequence[Source], columns: Mapping[str, str] | None = None) -> Rows:
    """Read the rows of one source, or of several in order.

    Args:
        source: a file, a glob pattern, or a dataset as ``NAME:CONFIG:SPLIT``; or a list of these. Files that match a
            pattern are read in the order of their names.
        columns: field -> column to read it from, such as ``{"prompt": "question"}``, in every source. The column may
            hold ShareGPT messages, with ``from`` and ``value``. Other columns keep their names.

    Raises:
        WhetValueError: a file does not exist, is not in the format of its extension (with ``file:line`` for JSON Lines
            and CSV), has no rows, or lacks a column that ``columns`` names.
        WhetTypeError: source is not a path or a list of paths.
        MissingExtraError: ``pyarrow`` or ``datasets`` is needed and not installed.
    """
    found = Rows()
    for each in as_sources(source):
        for part, rows in _read_source(str(each)):
            if not rows:
                raise WhetValueError(f"read_rows: {str(each)!r} holds no rows.")
            found += _rename(rows, columns, str(each)) if columns else rows
            found.parts.append(part)
    return found


def as_sources(source: Any) -> list[Source]:
    """Return one source, or a list of sources, as a list.

    Raises:
        WhetTypeError: ``source`` is neither.
    """
    sources = list(source) if isinstance(source, (list, tuple)) else [source]
    if not sources or not all(isinstance(each, (str, os.PathLike)) for each in sources):
        raise WhetTypeError(
            f"read_rows: source is {source!r:.60}, expected a file, a pattern of files, the name of a dataset, or a "
            f"list of them."
        )
    return sources


def source_files(source: Source) -> list[Path]:
    """Return the local files that a source names, or that a dataset's folder holds; none for a dataset on the hub."""
    path, named = Path(source), Path(_split_name(str(source))[0])
    if path.is_file():
        return [path]
    if named.is_dir():
        files = (file for file in named.rglob("*") if file.is_file())
        return sorted(file for file in files if not any(p.startswith(".") for p in file.relative_to(named).parts))
    return _matches(str(source))


def _matches(pattern: str) -> list[Path]:
    return [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]


def _split_name(name: str) -> tuple[str, str, str]:
    """Name or folder, configuration and split of a dataset."""
    drive, name = os.path.splitdrive(name)
    path, config, split = [*name.split(":", 2), "", ""][:3]
    return drive + path, config, split or "train"


def _read_source(source: str) -> list[tuple[Part, list[Row]]]:
    if Path(source).is_file():
        return [_read_file(Path(source))]
    if files := _matches(source):
        return [_read_file(file) for file in files]
    if _reader(source) is not None or "*" in source:
        what = "no file matches" if glob.has_magic(source) else "there is no file"
        raise WhetValueError(f"read_rows: {what} {source!r}.")
    return [_read_dataset(source)]


def _reader(name: str) -> Callable[[Path], tuple[Part, list[Row]]] | None:
    """Return the reader for a file's extension."""
    return _READERS.get(Path(name.removesuffix(".gz")).suffix)


def _read_file(file: Path) -> tuple[Part, list[Row]]:
    read = _reader(file.name)
    if read is None or file.name.endswith(".parquet.gz"):
        endings = ", ".join(ending for ending in _READERS if ending != ".parquet")
        raise WhetValueError(f"read_rows: {str(file)!r} does not end in {endings}, one of these and .gz, or .parquet.")
    return read(file)


def _content(file: Path) -> bytes:
    """Return the bytes of a file, decompressed and without a byte order mark."""
    content = file.read_bytes()
    if file.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise WhetValueError(f"read_rows: {file}: not gzip: {error}.") from error
    return content.removeprefix(b"\xef\xbb\xbf")


def _read_json(file: Path) -> tuple[Part, list[Row]]:
    """Parse a JSON array of objects if the first character is a bracket, else JSON Lines without empty lines."""
    content, numbers = _content(file), array("Q")
    if content.lstrip()[:1] == b"[":
        rows = _parse_json(content, str(file))
        part = Part(f"{file}, row ", range(len(rows)))
    else:
        rows, part = [], Part(f"{file}:", numbers)
        for i, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                rows.append(_parse_json(line, f"{file}:{i}"))
                numbers.append(i)
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            where = f"{part.prefix}{part.numbers[i]}"
            raise WhetValueError(f'read_rows: {where}: {row!r:.60} is not a JSON object, such as {{"prompt": ...}}.')
    return part, rows


def _parse_json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise WhetValueError(f"read_rows: {where}: not JSON in UTF-8: {error}.") from error


def _read_csv(file: Path) -> tuple[Part, list[Row]]:
    """Parse CSV with a header line. All values are text, and a quoted value may span lines."""
    try:
        text = _content(file).decode()
    except ValueError as error:
        raise WhetValueError(f"read_rows: {file}: not CSV in UTF-8: {error}.") from error
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows, numbers = [], array("Q")
    limit = csv.field_size_limit(sys.maxsize)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise csv.Error(f"the number of values is not the number of columns, {len(row.keys() - {None})}")
            rows.append(row)
            numbers.append(reader.line_num)
    except csv.Error as error:
        raise WhetValueError(f"read_rows: {file}:{reader.line_num}: not CSV: {error}.") from error
    finally:
        csv.field_size_limit(limit)
    return Part(f"{file}:", numbers), rows


def _read_parquet(file: Path) -> tuple[Part, list[Row]]:
    check_installed(f"Reading {file}", "pyarrow", extra="datasets")
    from pyarrow import parquet

    try:
        rows = [drop_nulls(row) for row in parquet.read_table(file).to_pylist()]
    except ValueError as error:
        raise WhetValueError(f"read_rows: {file}: not Parquet: {error}.") from error
    return Part(f"{file}, row ", range(len(rows))), rows


_READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


def _read_dataset(name: str) -> tuple[Part, list[Row]]:
    path, config, split = _split_name(name)
    what = f"the folder {path!r}" if Path(path).is_dir() else f"there is no file {name!r}, and reading it"
    check_installed(f"read_rows: {what} as a dataset", "datasets", extra="datasets")
    import datasets  # pyright: ignore[reportMissingImports]

    try:
        rows = [drop_nulls(dict(row)) for row in datasets.load_dataset(path, config or None, split=split)]
    except Exception as error:  # connections, names, splits, formats: no common base class
        raise WhetValueError(
            f"read_rows: {what} as a dataset failed: {type(error).__name__}: {error} Configuration and split are given "
            f"as NAME:CONFIG:SPLIT."
        ) from error
    return Part(f"{path}:{config}:{split}, row ", range(len(rows))), rows


def _rename(rows: list[Row], columns: Mapping[str, str], source: str) -> list[Row]:
    present = dict.fromkeys(itertools.chain.from_iterable(rows))
    for field, column in columns.items():
        if column not in present:
            names = ", ".join(map(repr, present))
            raise WhetValueError(f"read_rows: {source!r} has no column {column!r} for {field!r}; it has {names}.")
    replaced = {*columns, *columns.values()}
    return [
        {name: value for name, value in row.items() if name not in replaced}
        | {field: _as_messages(row[column]) for field, column in columns.items() if column in row}
        for row in rows
    ]


def _as_messages(value: Any) -> Any:
    """Convert ShareGPT messages (from, value) to role and content; return other values unchanged."""
    turns = value if isinstance(value, list) else []
    if not turns or not all(isinstance(turn, dict) and turn.keys() >= {"from", "value"} for turn in turns):
        return value
    return [{"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]


_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT role -> role."""
