"""A source's pieces into the core's packed weights: all checked first, then packed from where they lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetValueError
from whet.models.architecture import Piece
from whet.models.formats import TABLE
from whet.models.slots import Source
from whet.models.sources.mapped import let_go


def check_pieces(source: Source, where: str) -> list[Piece]:
    """All pieces of a source.

    Raises:
        WhetValueError: a slot that they do not fill, or one that holds NaN or infinity.
    """
    pieces = list(source.pieces())
    missing = {slot: shape[0] for slot, shape in source.config.slots().items()}
    for piece in pieces:
        missing[piece.slot] -= len(piece.tensor)
        if not _is_finite(piece):
            raise WhetValueError(
                f"{where}: {piece.slot}, rows from {piece.first_row} on, holds NaN or infinity. Look at what made them."
            )
    for slot, rows in missing.items():
        if rows:
            raise WhetValueError(f"{where}: {slot} lacks {rows} rows.")
    return pieces


def load(core: Any, pieces: Iterable[Piece], matrices: Iterable[str]) -> None:
    """Packs pieces that ``check_pieces`` has seen; what is not of ``matrices`` becomes float32."""
    for slot, first_row, tensor, format in pieces:
        type = _core.StoredType[format]
        address, strides = _memory(tensor)
        if slot in matrices:
            n, width = tensor.shape
            core.load(
                slot, first=first_row, n=n, width=width, address=address, type=type, row_stride=strides[0],
                column_stride=strides[1],
            )  # fmt: skip
            let_go(tensor)  # the packed weights and the file's are not in memory both
        else:
            core.load_vector(
                slot, first=first_row, n=len(tensor), address=address, type=type, stride=strides[0]
            )  # fmt: skip


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


def _is_finite(piece: Piece) -> bool:
    """Whether no number is NaN or infinite. A sum tells in one pass, unless it overflows."""
    if hasattr(piece.tensor, "detach"):
        tensor = piece.tensor
        return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
    if piece.format == "bfloat16":
        return not ((piece.tensor & 0x7F80) == 0x7F80).any()
    if not TABLE[piece.format].is_float:
        return _core.is_finite(_core.StoredType[piece.format], piece.tensor)
    return bool(np.isfinite(piece.tensor).all())
