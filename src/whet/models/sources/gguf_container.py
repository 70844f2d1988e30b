"""The container GGUF: key-value metadata, and where each tensor lies. Strict, and blind to what the keys mean.

    "GGUF", version u32, n_tensors u64, n_keys u64
    keys     name, type u32, value        (string: length u64, bytes; array: type u32, count u64, values)
    tensors  name, n_dims u32, sizes u64 (fastest first), type u32, offset u64 from the start of the data
    data     at the next multiple of general.alignment (32)

All little-endian. Strings in arrays (the tokenizer's vocabulary) are passed over.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.errors import WhetValueError
from whet.models.formats import TABLE, Format
from whet.models.slots import Stored
from whet.models.sources.mapped import map_file, view

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LONGEST_NAME = 1 << 10
_MOST_DIMS = 4


_TYPES = {format.gguf_type: format for format in TABLE.values() if format.gguf_type is not None}
_OTHER_TYPES = {
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


class GGUFFile(NamedTuple):
    """Metadata by key (an array of strings is its length), and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def read_gguf(path: Path, where: str) -> GGUFFile:
    """The metadata and tensors of a file; see ``parse_gguf``."""
    return parse_gguf(map_file(path, where), where)


def parse_gguf(data: np.ndarray, where: str) -> GGUFFile:
    """The metadata and tensors of a file's bytes, (n,) uint8; those of the tensors are not looked at.

    Raises:
        WhetValueError: the file is not exactly what the format allows, or a tensor has a type that is not read.
    """
    cursor = _Cursor(data, where)
    if cursor.bytes(4, "the magic") != b"GGUF":
        raise WhetValueError(f"{where}: the file does not begin with GGUF. It is another kind of file.")
    version = cursor.number("<I", "the version")
    if version not in (2, 3):
        hint = "it is big-endian" if version in (2 << 24, 3 << 24) else "convert it with a current llama.cpp"
        raise WhetValueError(f"{where}: GGUF version {version}; this engine reads 2 and 3: {hint}.")
    n_tensors = cursor.count("the number of tensors", each=8 + 4 + 4 + 8)
    n_keys = cursor.count("the number of keys", each=8 + 4 + 1)
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.name("a key")
        if key in metadata:
            raise WhetValueError(f"{where}: the key {key} is there twice. Convert the model again.")
        metadata[key] = cursor.value(key)
    infos = {}
    for _ in range(n_tensors):
        name = cursor.name("a tensor's name")
        if name in infos:
            raise WhetValueError(f"{where}: the tensor {name} is there twice. Convert the model again.")
        infos[name] = _info(cursor, name, where)
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
        raise WhetValueError(f"{where}: general.alignment is {alignment!r:.40}, expected a multiple of 8.")
    start = -(-cursor.at // alignment) * alignment
    return GGUFFile(metadata, _tensors(data, start, alignment, infos, where))


class _Info(NamedTuple):
    type: Format
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def _info(cursor: _Cursor, name: str, where: str) -> _Info:
    n_dims = cursor.number("<I", f"the axes of {name}")
    if not 1 <= n_dims <= _MOST_DIMS:
        raise WhetValueError(f"{where}: {name} has {n_dims} axes, expected 1 to {_MOST_DIMS}.")
    shape = tuple(cursor.number("<Q", f"the shape of {name}") for _ in range(n_dims))[::-1]
    number = cursor.number("<I", f"the type of {name}")
    offset = cursor.number("<Q", f"the offset of {name}")
    if number not in _TYPES:
        said = _OTHER_TYPES.get(number, f"of type {number}")
        *known, last = (kind.gguf_name for kind in _TYPES.values())
        raise WhetValueError(f"{where}: {name} is {said}; this engine reads {', '.join(known)} and {last}.")
    kind = _TYPES[number]
    if shape[-1] % kind.block_length:
        raise WhetValueError(
            f"{where}: {name} has rows of {shape[-1]}, which blocks of {kind.block_length} do not divide."
        )
    return _Info(kind, shape, offset, math.prod(shape) // kind.block_length * kind.block_bytes)


def _tensors(data: np.ndarray, start: int, alignment: int, infos: dict[str, _Info], where: str) -> dict[str, Stored]:
    end, found = 0, {}
    for name, info in sorted(infos.items(), key=lambda item: (item[1].offset, item[1].n_bytes)):
        if info.offset % alignment or info.offset < end:
            raise WhetValueError(
                f"{where}: {name} begins at byte {info.offset} of the data, expected a multiple of {alignment} from "
                f"{end} on. The file is damaged."
            )
        end = info.offset + info.n_bytes
        if start + end > len(data) or 0 in info.shape:
            raise WhetValueError(
                f"{where}: {name} of shape {info.shape} ends at byte {start + end}, and the file has {len(data)}. It "
                f"is cut short, or damaged. Copy or download it again."
            )
        *rows, k = info.shape
        kind = info.type
        width = k if kind.is_float else k // kind.block_length * kind.block_bytes
        array = view(data, start + info.offset, kind.dtype, (*rows, width))
        found[name] = Stored(array, kind.name, info.shape)
    return found


class _Cursor:
    """Reads the head of a file forwards, and never past its end."""

    def __init__(self, data: np.ndarray, where: str) -> None:
        self.data, self.where, self.at = memoryview(data.data), where, 0

    def take(self, n: int, what: str) -> int:
        at = self.at
        if n > len(self.data) - at:
            raise WhetValueError(
                f"{self.where}: the file ends at byte {len(self.data)}, within {what} ({n} bytes from {at} on). It is "
                f"cut short, or damaged. Copy or download it again."
            )
        self.at = at + n
        return at

    def bytes(self, n: int, what: str) -> bytes:
        at = self.take(n, what)
        return bytes(self.data[at : at + n])

    def number(self, layout: str, what: str) -> Any:
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout), what))[0]

    def count(self, what: str, each: int) -> int:
        """A count of things that take at least ``each`` bytes, so that one past the file's end is told at once."""
        n = self.number("<Q", what)
        if n * each > len(self.data) - self.at:
            raise WhetValueError(
                f"{self.where}: {what} is {n}, more than the {len(self.data) - self.at} bytes left can hold. The file "
                f"is cut short, or damaged. Copy or download it again."
            )
        return n

    def name(self, what: str) -> str:
        text = self.string(what)
        if not 1 <= len(text) <= _LONGEST_NAME or not text.isprintable():
            raise WhetValueError(f"{self.where}: {what} is {text!r:.80}, expected plain text. The file is damaged.")
        return text

    def string(self, what: str) -> str:
        n = self.number("<Q", what)
        try:
            text = self.bytes(n, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise WhetValueError(f"{self.where}: {what} is not UTF-8: {error.reason}. The file is damaged.") from None
        return text

    def value(self, key: str) -> Any:
        kind = self.number("<I", key)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _BOOL:
            return self.flag(key)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        raise WhetValueError(f"{self.where}: {key} has type {kind}, which GGUF does not have. The file is damaged.")

    def flag(self, key: str) -> bool:
        value = self.number("<B", key)
        if value > 1:
            raise WhetValueError(f"{self.where}: {key} is {value}, expected 0 or 1: a truth value.")
        return bool(value)

    def array(self, key: str) -> Any:
        kind = self.number("<I", key)
        if kind in _SCALARS or kind == _BOOL:
            dtype = np.dtype(_SCALARS.get(kind, "|u1"))
            n = self.count(f"the length of {key}", each=dtype.itemsize)
            return np.frombuffer(self.bytes(n * dtype.itemsize, key), dtype).tolist()
        if kind != _STRING:
            raise WhetValueError(f"{self.where}: {key} is an array of type {kind}, expected numbers or strings.")
        n = self.count(f"the length of {key}", each=8)
        for _ in range(n):
            self.take(self.number("<Q", key), key)
        return n
