"""Write GGUF files: header, metadata, and tensors that are encoded while they are written.

Writing is atomic. Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md;
``cpp/files/gguf.h`` reads it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.errors import WhetTypeError, WhetValueError
from whet.files import check_folder_of, disk_full_errors, force_to_disk, temporary_next_to, unwritable_errors
from whet.models.formats import TABLE
from whet.models.row_reader import row_bytes
from whet.system.files import replace

_VERSION = 3
_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL, _UINT32, _UINT64, _INT64, _FLOAT32, _INT32 = 8, 9, 7, 4, 10, 11, 6, 5
_VALUE_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}
"""NumPy dtype -> GGUF's number of the value type."""
_SIZES = {number: int(name[1]) for name, number in _VALUE_TYPES.items()}

Progress = Callable[[int, int], None]
"""Called with the bytes written and the total."""


class Tensor(NamedTuple):
    """A tensor to write.

    Attributes:
        name: name in the file.
        format: a name in ``formats.TABLE``.
        shape: row-major, in weights, not in blocks.
        chunks: yields its rows in chunks, encoded in ``format``.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[np.ndarray]]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * row_bytes(self.format, self.shape[-1])


class Encoded(bytes):
    """An encoded value: its type and its bytes."""


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Sequence[Tensor],
    *,
    overwrite: bool = False,
    where: str = "write_gguf",
    progress: Progress | None = None,
    check: Callable[[Path], Any] | None = None,
) -> int:
    """Write a file, force it to disk, and return its size. On failure ``path`` is unchanged.

    Args:
        path: the file, in an existing folder.
        metadata: key -> bool, str, int (uint32, or 64 bits if needed), float (float32), list of str, NumPy array, or
            ``Encoded``.
        tensors: in the order of the file.
        overwrite: replace an existing file.
        where: prefix of error messages.
        progress: called after every chunk.
        check: called with the path of the temporary file before it replaces ``path``; an exception removes the file.

    Raises:
        WhetValueError: the file exists or cannot be written, or an error from ``chunks``.
        WhetTypeError: GGUF has no such value.
        DiskFullError: the disk is full.
    """
    path = Path(path)
    check_destination(path, overwrite, where)
    keys = [_text(key) + encode_value(key, value, where) for key, value in metadata.items()]
    infos, offset = [], 0
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        infos.append(_text(tensor.name) + sizes + struct.pack("<IQ", _type_number(tensor, where), offset))
        offset += tensor.size_bytes + _padding(tensor.size_bytes)
    head = b"".join([b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)), *keys, *infos])
    head += bytes(_padding(len(head)))
    total = len(head) + offset
    with unwritable_errors(path, where):
        with disk_full_errors(path, total), temporary_next_to(path, "exporting") as temporary:
            with temporary.open("wb", buffering=0) as file:
                for n_written in _write(file, head, tensors, where):
                    if progress is not None:
                        progress(n_written, total)
                os.fsync(file.fileno())
            if check is not None:
                check(temporary)
            replace(temporary, path)
        force_to_disk(path.parent)
    return total


def check_destination(path: Path, overwrite: bool, where: str) -> None:
    """Check that ``path`` can be written, before anything is read.

    Raises:
        WhetValueError: it exists and may not be replaced, or its folder is missing.
    """
    if path.is_dir() or (path.exists() and not overwrite):
        what = "is a folder" if path.is_dir() else "exists"
        raise WhetValueError(f"{where}: {path} {what}. Choose another name, or replace a file with --overwrite.")
    check_folder_of(path, where)


def _write(file: Any, head: bytes, tensors: Sequence[Tensor], where: str) -> Iterator[int]:
    """Write everything, and yield the number of bytes written so far."""
    n_written = _write_all(file, head)
    yield n_written
    for tensor in tensors:
        begin = n_written
        for chunk in tensor.chunks():
            n_written += _write_all(file, np.ascontiguousarray(chunk).data.cast("B"))
            yield n_written
        if n_written - begin != tensor.size_bytes:
            raise WhetValueError(
                f"{where}: {tensor.name} has {n_written - begin} bytes, expected {tensor.size_bytes} for "
                f"{tensor.shape} in {tensor.format}."
            )
        n_written += _write_all(file, bytes(_padding(tensor.size_bytes)))
    yield n_written


def _write_all(file: Any, data: Any) -> int:
    rest = memoryview(data)
    while rest:  # a nearly full disk writes a part
        rest = rest[file.write(rest) :]
    return len(data)


def encode_value(key: str, value: Any, where: str = "encode_value") -> bytes:
    """Encode a value: its type and its bytes.

    Raises:
        WhetTypeError: GGUF has no such value.
    """
    if isinstance(value, Encoded):
        return value
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, int):
        kind, code = (_UINT32, "I") if 0 <= value < 1 << 32 else (_UINT64, "Q") if value > 0 else (_INT64, "q")
        return struct.pack(f"<I{code}", kind, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.str[1:] in _VALUE_TYPES:
        head = struct.pack("<IIQ", _ARRAY, _VALUE_TYPES[value.dtype.str[1:]], len(value))
        return head + np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    raise WhetTypeError(f"{where}: {key} is {value!r:.60}, a {type(value).__name__}, which GGUF does not have.")


def read_encoded_metadata(data: np.ndarray) -> dict[str, Encoded]:
    """Return the encoded metadata of a file that ``parse_gguf`` has accepted, by key, to copy it to another file."""
    memory = data.data
    version, _, n_keys = struct.unpack_from("<IQQ", memory, 4)
    assert version in (2, 3)
    at, found = 24, {}
    for _ in range(n_keys):
        (length,) = struct.unpack_from("<Q", memory, at)
        key = bytes(memory[at + 8 : at + 8 + length]).decode()
        at += 8 + length
        (kind,) = struct.unpack_from("<I", memory, at)
        end = _find_end(memory, at + 4, kind)
        found[key] = Encoded(memory[at:end])
        at = end
    return found


def _find_end(memory: memoryview, at: int, kind: int) -> int:
    """Return the offset after the value that begins at ``at``."""
    if kind == _STRING:
        return at + 8 + struct.unpack_from("<Q", memory, at)[0]
    if kind != _ARRAY:
        return at + _SIZES[kind]
    item, count = struct.unpack_from("<IQ", memory, at)
    at += 12
    if item in _SIZES:
        return at + count * _SIZES[item]
    for _ in range(count):
        at = _find_end(memory, at, item)
    return at


def _type_number(tensor: Tensor, where: str) -> int:
    number = TABLE[tensor.format].gguf_type
    if number is None:
        raise WhetValueError(f"{where}: {tensor.name} is {tensor.format}, which GGUF does not have.")
    return number


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padding(size: int) -> int:
    return -size % _ALIGNMENT
