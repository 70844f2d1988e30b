"""Reading rows, dicts as in a JSON Lines file, from files and Hugging Face datasets.

A source is a file (.jsonl, .json, .csv, each also with .gz, or .parquet), a glob pattern of such files, or a dataset as
``NAME:CONFIG:SPLIT``: a folder or a name on the hub, as ``datasets.load_dataset`` reads it. Its configuration may be
empty or left out (the default one), and so may its split (train), which may be a slice, ``train[:1000]``.

Needs only the standard library; ``pyarrow`` and ``datasets`` where a source needs them.
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
    """Rows of one file or dataset: their places are ``prefix`` followed by a number each."""

    prefix: str
    numbers: Sequence[int]


class Rows(list[Row]):
    """Rows in memory that know where each of them was read.

    Args:
        rows: the rows.
        parts: where they come from, in their order; their numbers are as many as the rows.
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
    """Rows of one source or several, in their order.

    Args:
        source: a file, a glob pattern, or a dataset as ``NAME:CONFIG:SPLIT``; or a list of them. Files that match a
            pattern are read in the order of their names.
        columns: field -> name of the column that it is read from, such as ``{"prompt": "question"}``, in every source.
            Messages in it may be ShareGPT's, with ``from`` and ``value``. Other columns keep their names.

    Raises:
        WhetValueError: no such file, a file not in the format of its ending (with ``file:line`` for
            JSON Lines and CSV), one without rows, or one without a column that ``columns`` names.
        WhetTypeError: source is not a path or a list of paths.
        MissingExtraError: Parquet without pyarrow, or a dataset without ``datasets``.
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
    """One source, or a list of them, as a list.

    Raises:
        WhetTypeError: it is neither.
    """
    sources = list(source) if isinstance(source, (list, tuple)) else [source]
    if not sources or not all(isinstance(each, (str, os.PathLike)) for each in sources):
        raise WhetTypeError(
            f"read_rows: source is {source!r:.60}, expected a file, a pattern of files, the name of a dataset, or a "
            f"list of them."
        )
    return sources


def source_files(source: Source) -> list[Path]:
    """The files that a source names on this machine, a dataset's folder among them; none of one on the hub."""
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
    path, config, split = [*name.split(":", 2), "", ""][:3]
    return path, config, split or "train"


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
    """The reader of a file's format, by the ending of its name."""
    return _READERS.get(Path(name.removesuffix(".gz")).suffix)


def _read_file(file: Path) -> tuple[Part, list[Row]]:
    read = _reader(file.name)
    if read is None or file.name.endswith(".parquet.gz"):
        endings = ", ".join(ending for ending in _READERS if ending != ".parquet")
        raise WhetValueError(f"read_rows: {str(file)!r} does not end in {endings}, one of these and .gz, or .parquet.")
    return read(file)


def _content(file: Path) -> bytes:
    """The bytes of a file, unpacked, without a byte order mark."""
    content = file.read_bytes()
    if file.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise WhetValueError(f"read_rows: {file}: not gzip: {error}.") from error
    return content.removeprefix(b"\xef\xbb\xbf")


def _read_json(file: Path) -> tuple[Part, list[Row]]:
    """A list of objects if the first character is a bracket, else one object per line; empty lines are skipped."""
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
            raise WhetValueError(f'read_rows: {where}: {row!r:.60} is no JSON object, such as {{"prompt": ...}}.')
    return part, rows


def _parse_json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise WhetValueError(f"read_rows: {where}: not JSON in UTF-8: {error}.") from error


def _read_csv(file: Path) -> tuple[Part, list[Row]]:
    """Rows by the names in the first line; all values are text, and quoted ones may have several lines."""
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
                raise csv.Error(f"the row has another number of values than the {len(row.keys() - {None})} columns")
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
    except Exception as error:  # of many kinds: connections, names, splits, formats
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
    """Messages as ShareGPT writes them (from and value) with role and content; other values unchanged."""
    turns = value if isinstance(value, list) else []
    if not turns or not all(isinstance(turn, dict) and turn.keys() >= {"from", "value"} for turn in turns):
        return value
    return [{"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]


_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles."""
