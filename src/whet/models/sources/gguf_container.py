"""A GGUF file's metadata and tensors, as the core's parser (``cpp/files/gguf.h``) reads them, in views of its bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet import _core
from whet.models.slots import Stored
from whet.models.sources.mapped import map_file, parse_container, view

_FORMATS = {
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "Q8_0": ("q8_0", "|u1"),
    "Q4_K": ("q4_k", "|u1"),
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
    metadata, found = parse_container(_core.parse_gguf, data, where)
    tensors = {}
    for name, type, shape, offset, size_bytes in found:
        format, dtype = _FORMATS[type]
        *rows, k = shape
        width = k if dtype != "|u1" else size_bytes // math.prod(rows)
        tensors[name] = Stored(view(data, offset, dtype, (*rows, width)), format, shape)
    return GGUFFile(metadata, tensors)
