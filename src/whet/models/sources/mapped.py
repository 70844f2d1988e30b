"""Memory-mapped files and views of them: read lazily, never copied."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import WhetValueError
from whet.system.memory import drop_pages

_MOST_JSON_BYTES = 100_000_000


def map_file(path: Path, where: str) -> np.ndarray:
    """Map a file: (n,) uint8, read-only.

    Raises:
        WhetValueError: it is not a file, is empty, or cannot be read.
    """
    if not path.is_file():
        raise WhetValueError(f"{where}: {path} is not a file. Models are not downloaded; pass a path.")
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
        WhetValueError: the file violates its format.
    """
    try:
        return parse(data)
    except ValueError as error:
        raise WhetValueError(f"{where}: {error}") from None


def release_pages(arrays: Sequence[Any]) -> None:
    """Release the resident pages of mapped tensors, given all views of each (MADV_DONTNEED).

    Pages are read from the files again on access. A no-op for other arrays.
    """
    mappings: dict[int, tuple[mmap.mmap, int, list[Any]]] = {}
    for array in arrays:
        whole, owner = _owner(array)
        if isinstance(owner, mmap.mmap):
            mappings.setdefault(id(owner), (owner, whole.ctypes.data, []))[2].append(array)
    for mapping, address, views in mappings.values():
        begin = min(view.ctypes.data for view in views) - address
        end = max(view.ctypes.data + _extent(view) for view in views) - address
        begin -= begin % mmap.PAGESIZE
        drop_pages(mapping, begin, end - begin)


def is_mapped(array: Any) -> bool:
    """Whether an array is a view of a mapped file."""
    return isinstance(_owner(array)[1], mmap.mmap)


def _owner(array: Any) -> tuple[Any, Any]:
    """Return the array that an array views, and the owner of its memory."""
    whole = owner = array
    while isinstance(owner, np.ndarray):
        whole, owner = owner, owner.base
    return whole, owner.obj if isinstance(owner, memoryview) else owner


def _extent(array: np.ndarray) -> int:
    """Return the bytes from the first to the last element of a view, including gaps between rows."""
    return array.itemsize + sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))


def view(data: np.ndarray, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """View bytes from ``offset`` on as an array; misaligned ones are copied.

    The caller has checked the bounds, and that the shape does not overflow.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    array = data[offset : offset + size].view(dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object in UTF-8.

    Raises:
        WhetValueError: it is not an object, is too large, or has a duplicate name.
    """
    if len(text) > _MOST_JSON_BYTES:
        raise WhetValueError(f"{where} has {len(text)} bytes of JSON, expected at most {_MOST_JSON_BYTES}.")
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, expected an object")
    except (ValueError, RecursionError) as error:
        raise WhetValueError(f"{where} is not valid JSON: {error}. Copy or download it again.") from None
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} is a duplicate name")
        found[name] = value
    return found
