"""Check, checksum and pack the slices of a source, without a copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetValueError
from whet.models.architecture import RowSlice
from whet.models.slots import ModelSource
from whet.models.sources.mapped import release_pages


def list_slices(source: ModelSource, where: str) -> list[RowSlice]:
    """Return all slices of a source; of a model on a packed base, none.

    Raises:
        WhetValueError: the slices do not fill a slot.
    """
    slices = list(source.slices())
    slots = source.config.slots() if source.base is None else {}
    missing = {slot: shape[0] for slot, shape in slots.items()}
    for row_slice in slices:
        missing[row_slice.slot] -= len(row_slice.tensor)
    for slot, rows in missing.items():
        if rows:
            raise WhetValueError(f"{where}: {slot} lacks {rows} rows.")
    return slices


def check_finite(slices: Iterable[RowSlice], where: str) -> Iterator[RowSlice]:
    """Yield each slice after validating it.

    Raises:
        WhetValueError: a slice holds NaN or infinity.
    """
    for row_slice in slices:
        if not _core.is_finite(**_rows(row_slice)):
            raise WhetValueError(
                f"{where}: {row_slice.slot}, rows from {row_slice.first_row}, holds NaN or infinity. Check the step "
                f"or the file that produced it."
            )
        yield row_slice


def pack_slices(weights: _core.Weights, slices: Iterable[RowSlice]) -> None:
    """Pack finite slices; vectors become float32.

    A file's pages are released after each slot, so that the file and the packed weights are not both in memory.
    """
    for slot, of_tensor in itertools.groupby(slices, lambda row_slice: row_slice.slot):
        tensors = []
        for row_slice in of_tensor:
            weights.pack(slot, first=row_slice.first_row, **_rows(row_slice))
            tensors.append(row_slice.tensor)
        release_pages(tensors)


def checksums(slices: Iterable[RowSlice]) -> list[tuple[Any, ...]]:
    """Return slot, row, shape, format and 64-bit checksum of each slice, to detect changed weights."""
    prints = []
    for slot, first_row, tensor, format in slices:
        matrix = tensor if tensor.ndim == 2 else tensor[None]
        if _memory(matrix)[1][1] != 1:
            matrix = matrix.T if _memory(matrix)[1][0] == 1 else np.ascontiguousarray(matrix)
        address, (row_stride, _) = _memory(matrix)
        size = matrix.itemsize
        digest = _core.checksum(address, matrix.shape[0], matrix.shape[1] * size, row_stride * size)
        prints.append((slot, first_row, tuple(tensor.shape), format, digest))
    return prints


def _memory(tensor: Any) -> tuple[int, tuple[int, ...]]:
    """Return the address of the first element, and the strides in elements."""
    if hasattr(tensor, "data_ptr"):
        return tensor.data_ptr(), tuple(tensor.stride())
    return tensor.ctypes.data, tuple(stride // tensor.itemsize for stride in tensor.strides)


def _rows(row_slice: RowSlice) -> dict[str, Any]:
    """Return the memory of a slice as keywords of the core: a matrix or one row, strides in elements."""
    address, strides = _memory(row_slice.tensor)
    *n, width = row_slice.tensor.shape
    return {
        "address": address,
        "type": _core.StoredType[row_slice.format],
        "n": n[0] if n else 1,
        "width": width,
        "row_stride": strides[0] if n else 0,
        "column_stride": strides[-1],
    }
