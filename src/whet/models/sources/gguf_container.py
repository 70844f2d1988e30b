"""A GGUF file's metadata and tensors, as the core's parser (``cpp/files/gguf.h``) reads them, in views of its bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet import _core
from whet.models.formats import TABLE
from whet.models.slots import Stored
from whet.models.sources.mapped import map_file, parse_container, view

_FORMATS = {format.gguf_name: format for format in TABLE.values() if format.gguf_type is not None}


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
        format = _FORMATS[type]
        *rows, k = shape
        width = k if format.is_float else size_bytes // math.prod(rows)
        tensors[name] = Stored(view(data, offset, format.dtype, (*rows, width)), format.name, shape)
    return GGUFFile(metadata, tensors)
