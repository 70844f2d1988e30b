"""Files mapped into memory, and views of them. Nothing is read before it is used, and nothing is copied."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import WhetValueError

_MOST_JSON_BYTES = 100_000_000


def map_file(path: Path, where: str) -> np.ndarray:
    """The bytes of a file, (n,) uint8, read-only.

    Raises:
        WhetValueError: it is no file, it is empty, or it cannot be read.
    """
    if not path.is_file():
        raise WhetValueError(f"{where}: {path} is no file. Models are not downloaded; pass the path of one.")
    try:
        if path.stat().st_size == 0:
            raise WhetValueError(f"{where}: {path} is empty. Copy or download it again.")
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise WhetValueError(f"{where}: {path} cannot be read: {error.strerror}.") from None


def parse_container(parse: Callable[[np.ndarray], Any], data: np.ndarray, where: str) -> Any:
    """Parse a file's bytes with one of the core's parsers of model files.

    Raises:
        WhetValueError: the file is not exactly what its format allows.
    """
    try:
        return parse(data)
    except ValueError as error:
        raise WhetValueError(f"{where}: {error}") from None


def release_pages(arrays: Sequence[Any]) -> None:
    """Take the pages of mapped tensors, of each of which these are all views, out of the process's memory.

    The files have them still. Of other arrays, nothing.
    """
    mappings: dict[int, tuple[mmap.mmap, int, list[Any]]] = {}
    for array in arrays:
        whole = owner = array
        while isinstance(owner, np.ndarray):
            whole, owner = owner, owner.base
        owner = owner.obj if isinstance(owner, memoryview) else owner
        if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            mappings.setdefault(id(owner), (owner, whole.ctypes.data, []))[2].append(array)
    for mapping, address, views in mappings.values():
        begin = min(view.ctypes.data for view in views) - address
        end = max(view.ctypes.data + _extent(view) for view in views) - address
        begin -= begin % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _extent(array: np.ndarray) -> int:
    """Bytes from the first element of a view to the end of its last, with what lies between its rows."""
    return array.itemsize + sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))


def view(data: np.ndarray, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes from ``offset`` on as an array; a copy only where they do not lie on a multiple of the number's size.

    The caller has checked that they are there, and that the shape does not overflow.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    array = data[offset : offset + size].view(dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """An object of JSON in UTF-8.

    Raises:
        WhetValueError: it is none, is far too large, or has the same name twice.
    """
    if len(text) > _MOST_JSON_BYTES:
        raise WhetValueError(f"{where} has {len(text)} bytes of JSON, expected at most {_MOST_JSON_BYTES}.")
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, expected an object")
    except (ValueError, RecursionError) as error:
        raise WhetValueError(f"{where} is no JSON to rely on: {error}. Copy or download it again.") from None
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} is there twice")
        found[name] = value
    return found
