"""A source's pieces into the core's packed weights, from where they lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetValueError
from whet.models.architecture import Piece
from whet.models.slots import Source
from whet.models.sources.mapped import let_go


def all_pieces(source: Source, where: str) -> list[Piece]:
    """The pieces of a source; none of a model on a packed base.

    Raises:
        WhetValueError: a slot that they do not fill.
    """
    pieces = list(source.pieces())
    slots = source.config.slots() if source.base is None else {}
    missing = {slot: shape[0] for slot, shape in slots.items()}
    for piece in pieces:
        missing[piece.slot] -= len(piece.tensor)
    for slot, rows in missing.items():
        if rows:
            raise WhetValueError(f"{where}: {slot} lacks {rows} rows.")
    return pieces


def checked(pieces: Iterable[Piece], where: str) -> Iterator[Piece]:
    """The pieces, each once it has been looked at.

    Raises:
        WhetValueError: one holds NaN or infinity.
    """
    for piece in pieces:
        if not _core.is_finite(**_rows(piece)):
            raise WhetValueError(
                f"{where}: {piece.slot}, rows from {piece.first_row} on, holds NaN or infinity. Look at what made them."
            )
        yield piece


def load(weights: _core.Weights, pieces: Iterable[Piece]) -> None:
    """Packs finite pieces; those of vectors become float32.

    A file's pages are let go with each tensor, so that packed weights and the file are not in memory both.
    """
    for slot, of_tensor in itertools.groupby(pieces, lambda piece: piece.slot):
        tensors = []
        for piece in of_tensor:
            weights.pack(slot, first=piece.first_row, **_rows(piece))
            tensors.append(piece.tensor)
        let_go(tensors)


def checksums(pieces: Iterable[Piece]) -> list[tuple[Any, ...]]:
    """Slot, row, shape, format and a 64-bit checksum of all bytes of each piece, to tell what has changed."""
    prints = []
    for slot, first_row, tensor, format in pieces:
        matrix = tensor if tensor.ndim == 2 else tensor[None]
        if _memory(matrix)[1][1] != 1:
            matrix = matrix.T if _memory(matrix)[1][0] == 1 else np.ascontiguousarray(matrix)
        address, (row_stride, _) = _memory(matrix)
        size = matrix.itemsize
        digest = _core.checksum(address, matrix.shape[0], matrix.shape[1] * size, row_stride * size)
        prints.append((slot, first_row, tuple(tensor.shape), format, digest))
    return prints


def _memory(tensor: Any) -> tuple[int, tuple[int, ...]]:
    """Address of the first element, and strides in elements."""
    if hasattr(tensor, "data_ptr"):
        return tensor.data_ptr(), tuple(tensor.stride())
    return tensor.ctypes.data, tuple(stride // tensor.itemsize for stride in tensor.strides)


def _rows(piece: Piece) -> dict[str, Any]:
    """The place of a piece in memory, as the core takes it: a matrix or one row, strides in elements."""
    address, strides = _memory(piece.tensor)
    *n, width = piece.tensor.shape
    return {
        "address": address,
        "type": _core.StoredType[piece.format],
        "n": n[0] if n else 1,
        "width": width,
        "row_stride": strides[0] if n else 0,
        "column_stride": strides[-1],
    }
