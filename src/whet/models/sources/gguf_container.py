"""Read metadata and tensors of GGUF files with the core's parser (``cpp/files/gguf.h``), as views of the mapped bytes.

A split model (``model-00001-of-00003.gguf``) is opened by any of its files. Source of their names and keys:
llama.cpp's tools/gguf-split and src/llama-model-loader.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet import _core
from whet.errors import WhetValueError
from whet.models.formats import TABLE
from whet.models.slots import StoredTensor
from whet.models.sources.mapped import map_file, parse_container, view

_FORMATS = {format.gguf_name: format for format in TABLE.values() if format.gguf_type is not None}
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFFile(NamedTuple):
    """The file, or files, of a model.

    Attributes:
        paths: the file, or all files of a split model in order.
        metadata: key -> value, from the first file; an array of strings is a ``_core.GGUFTexts``, see its ``to_list``.
        tensors: name -> tensor, from all files.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path, where: str) -> GGUFFile:
    """Read the metadata and tensors of a file, or of all files of a split model; see ``parse_gguf``.

    Raises:
        WhetValueError: a file violates the format; or a file of a split model is missing, duplicated or another's.
    """
    metadata, tensors = parse_gguf(map_file(path, where), where)
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return GGUFFile((path,), metadata, tensors)
    paths = _part_paths(path, count, where)
    parts = list(_read_parts(paths, where))
    metadata, tensors = parts[0][0], {}
    for part, (_, found) in zip(paths, parts, strict=True):
        if twice := sorted(tensors.keys() & found.keys()):
            raise WhetValueError(
                f"{where}: {part.name} has {twice[0]}, and so has an earlier part. It belongs to another model."
            )
        tensors |= found
    if len(tensors) != metadata.get("split.tensors.count"):
        raise WhetValueError(
            f"{where}: the {len(paths)} parts have {len(tensors)} tensors, expected the "
            f"{metadata.get('split.tensors.count')!r:.40} of split.tensors.count. Copy or download them again."
        )
    return GGUFFile(paths, metadata, tensors)


def parse_gguf(data: np.ndarray, where: str) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Parse the metadata and tensors of a file's bytes, (n,) uint8; tensor data is not read.

    Raises:
        WhetValueError: the file violates the format, or a tensor's type is not supported.
    """
    metadata, found = parse_container(_core.parse_gguf, data, where)
    tensors = {}
    for name, type, shape, offset, size_bytes in found:
        format = _FORMATS[type]
        *rows, k = shape
        width = k if format.is_float else size_bytes // math.prod(rows)
        tensors[name] = StoredTensor(view(data, offset, format.dtype, (*rows, width)), format.name, shape)
    return metadata, tensors


def _part_paths(path: Path, count: Any, where: str) -> tuple[Path, ...]:
    """Return the files of all parts, from the name of one."""
    name = _PART.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise WhetValueError(
            f"{where}: this is a part of a model, and split.count is {count!r:.40}; expected a name such as "
            f"model-00001-of-00003.gguf, with that number. Restore the names of the parts."
        )
    return tuple(path.with_name(f"{name[1]}-{i:05d}-of-{name[3]}.gguf") for i in range(1, int(name[3]) + 1))


def _read_parts(paths: tuple[Path, ...], where: str) -> Iterator[tuple[dict[str, Any], dict[str, StoredTensor]]]:
    """Yield the metadata and tensors of each part, after checking its number and total."""
    n_tensors = None
    for i, path in enumerate(paths):
        if not path.is_file():
            raise WhetValueError(
                f"{where}: {path.name} is missing, part {i + 1} of {len(paths)}. Copy or download it into this folder."
            )
        label = f"{where}: {path.name}"
        metadata, tensors = parse_gguf(map_file(path, label), label)
        split = tuple(metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count"))
        n_tensors = split[2] if i == 0 else n_tensors
        if split != (i, len(paths), n_tensors):
            raise WhetValueError(
                f"{label} has split.no, split.count and split.tensors.count {split!r:.80}, expected "
                f"{(i, len(paths), n_tensors)!r:.80}: another part, or another model's. Download it again."
            )
        yield metadata, tensors
