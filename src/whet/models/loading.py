"""Check, hash and pack the slices of a source, without a copy."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetValueError
from whet.models.architecture import TABLE_SLOT, ModelConfig, RowSlice
from whet.models.formats import TABLE
from whet.models.reference import memory_of, stored_rows
from whet.models.slots import PARTS, ModelSource, part_rows
from whet.models.sources.mapped import is_mapped, release_pages
from whet.ops.quant import CORE_FORMATS

Loss = tuple[str, float, float, float, float]
"""Format, largest |w| and the format's limit, squared norm of the weights and of what packing loses of them."""
_CHECK_ORIGIN = "Check the step or the file that produced it"
_WIDER = {"float32": _CHECK_ORIGIN, "bfloat16": "Use float32"}


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


class RangeCheck:
    """Reject weights that the format they are packed in cannot represent.

    A weight that would become infinite, or whose block's scale would, is always rejected. A block whose scale, a
    float16, rounds to 0 is not: padding rows and dead heads of real models vanish, as they do in llama.cpp. A tensor is
    rejected where more than half of its norm is lost, |W - packed(W)| > |W| / 2. Rounding to 4 bits with a usable scale
    loses at most 0.38 of it.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._tensors: dict[Hashable, list[tuple[str, int, int, Loss]]] = {}

    def add(self, tensor: Hashable, slot: str, first: int, n: int, loss: Loss) -> None:
        """Check rows [first, first + n) of a slot, and add them to the rows of their tensor.

        Raises:
            WhetValueError: a weight is NaN, infinite, or beyond the range of the format.
        """
        format, largest, limit, *_ = loss
        if largest > limit:
            name = TABLE[format].display_name
            label = f"{self._where}: {slot}, rows {first} to {first + n - 1}, holds"
            if largest == np.inf:
                raise WhetValueError(f"{label} NaN or infinity. {_CHECK_ORIGIN}.")
            raise WhetValueError(
                f"{label} a weight of magnitude {largest:.4g}, beyond {limit:.4g}, the largest of {name}. "
                f"{_range_fix(format)}"
            )
        self._tensors.setdefault(tensor, []).append((slot, first, n, loss))

    def finish(self) -> None:
        """Check the norms of the tensors that were added, and forget them.

        Raises:
            WhetValueError: one loses more than half of its norm.
        """
        for rows in self._tensors.values():
            norm, lost = sum(loss[3] for *_, loss in rows), sum(loss[4] for *_, loss in rows)
            if lost > norm / 4:
                slot, first, _, (format, *_) = rows[0]
                last = max(first + n for _, first, n, _ in rows) - 1
                largest = max(loss[1] for *_, loss in rows)
                raise WhetValueError(
                    f"{self._where}: {slot}, rows {first} to {last}, would lose {(lost / norm) ** 0.5:.0%} of its norm "
                    f"in {TABLE[format].display_name}, whose scales round to 0 below 2^-25: its largest weight has "
                    f"magnitude {largest:.4g}. {_range_fix(format)}"
                )
        self._tensors.clear()


def check_finite(slices: Iterable[RowSlice], where: str) -> Iterator[RowSlice]:
    """Yield each slice after validating it.

    Raises:
        WhetValueError: a slice holds NaN or infinity.
    """
    for row_slice in slices:
        if not _core.is_finite(stored_rows(row_slice)):
            raise WhetValueError(
                f"{where}: {row_slice.slot}, rows from {row_slice.first_row}, holds NaN or infinity. {_CHECK_ORIGIN}."
            )
        yield row_slice


def check_range(
    slices: Iterable[RowSlice], where: str, weights: _core.Weights, config: ModelConfig
) -> Iterator[RowSlice]:
    """Yield each slice after checking that the formats of the weights that it is packed in can represent it.

    Raises:
        WhetValueError: see ``RangeCheck``; the last slice of a tensor may have been yielded before.
    """
    check, slot = RangeCheck(where), ""
    for row_slice in slices:
        if row_slice.slot == TABLE_SLOT and is_mapped(row_slice.tensor):  # checked when a row is read
            yield row_slice
            continue
        if row_slice.slot != slot:
            check.finish()
        slot = row_slice.slot
        loss = weights.measure_loss(slot, row_slice.first_row, stored_rows(row_slice))
        check.add(_tensor_in_slot(config, row_slice), slot, row_slice.first_row, len(row_slice.tensor), loss)
        yield row_slice
    check.finish()


def encoding_loss(rows: np.ndarray, format: str) -> Loss:
    """Return the loss of float32 rows in a format that the core packs, for ``RangeCheck``."""
    return _core.packing_loss(CORE_FORMATS[format], stored_rows(RowSlice("", 0, rows, "float32")))


def split_deferrable(slices: Sequence[RowSlice], formats: Mapping[str, str]) -> tuple[list[RowSlice], list[RowSlice]]:
    """Return the slices to pack at once, and the slices of experts that can be packed when they are used.

    Those are in a mapped file, in the format that they are packed in; all slices of a slot are.

    Args:
        slices: of a model.
        formats: slot -> format, or formats, that the slot is packed in.
    """
    eager: list[RowSlice] = []
    deferred: list[RowSlice] = []
    for slot, group in itertools.groupby(slices, lambda row_slice: row_slice.slot):
        rows = list(group)
        is_deferrable = ".experts_" in slot and all(
            each.format in formats.get(slot, "").split(", ")
            and is_mapped(each.tensor)
            and each.tensor.strides[-1] == each.tensor.itemsize
            for each in rows
        )
        (deferred if is_deferrable else eager).extend(rows)
    return eager, deferred


def defer_slices(weights: _core.Weights, slices: Iterable[RowSlice]) -> None:
    """Leave slices of a mapped file where they are: each is packed when it is first used, or read row by row."""
    for row_slice in slices:
        weights.defer(row_slice.slot, row_slice.first_row, stored_rows(row_slice), row_slice.tensor)


def pack_slices(weights: _core.Weights, slices: Iterable[RowSlice]) -> None:
    """Pack finite slices; vectors become float32.

    A file's pages are released after each slot, so that the file and the packed weights are not both in memory.
    """
    for slot, of_tensor in itertools.groupby(slices, lambda row_slice: row_slice.slot):
        tensors = []
        for row_slice in of_tensor:
            if slot == TABLE_SLOT and is_mapped(row_slice.tensor):
                defer_slices(weights, [row_slice])
                continue
            weights.pack(slot, row_slice.first_row, stored_rows(row_slice))
            tensors.append(row_slice.tensor)
        release_pages(tensors)


def checksums(slices: Iterable[RowSlice]) -> list[tuple[Any, ...]]:
    """Return slot, row, shape, format and 64-bit checksum of each slice, to detect changed weights."""
    prints = []
    for slot, first_row, tensor, format in slices:
        tensor = tensor.join() if hasattr(tensor, "join") else tensor
        matrix = tensor if tensor.ndim == 2 else tensor[None]
        if memory_of(matrix)[1][1] != 1:
            matrix = matrix.T if memory_of(matrix)[1][0] == 1 else np.ascontiguousarray(matrix)
        address, (row_stride, _) = memory_of(matrix)
        size = matrix.itemsize
        digest = _core.checksum(address, matrix.shape[0], matrix.shape[1] * size, row_stride * size)
        prints.append((slot, first_row, tuple(tensor.shape), format, digest))
    return prints


def _range_fix(format: str) -> str:
    """Return the fix for weights beyond a format's range."""
    return f"{_WIDER.get(format, 'Use bf16 or float32')}, or scale it."


def _tensor_in_slot(config: ModelConfig, row_slice: RowSlice) -> int:
    """Number the tensors that a slot consists of, such as q, k and v, or the matrices of experts."""
    kind = row_slice.slot.split(".")[-1]
    if kind.startswith("experts_"):
        return row_slice.first_row
    _, *others = PARTS.get(kind, ("",))
    return sum(row_slice.first_row >= part_rows(config, row_slice.slot, part)[0] for part in others)
