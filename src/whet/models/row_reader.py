"""Read rows of a source's slots in any format, with adapters merged in.

Rows stored in the requested format are copied unchanged. Memory stays small: rows are encoded in chunks, and the pages
of mapped files are released.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from whet.errors import WhetValueError
from whet.models.architecture import RowSlice
from whet.models.formats import TABLE
from whet.models.loading import Loss, RangeCheck, check_finite, encoding_loss, list_slices
from whet.models.reference import slice_values
from whet.models.slots import (
    LoRA,
    ModelSource,
    NormValues,
    Rows,
    WeightLocation,
    factor_values,
    slot_columns,
    slot_rows,
)
from whet.models.sources.mapped import release_pages
from whet.ops.linear import pack_weight
from whet.ops.quant import bf16_bits

_CHUNK_BYTES = 32 << 20
"""float32 bytes of a chunk: enough rows to occupy all threads."""
_PANEL_ROWS = 16


class RowReader:
    """Reads rows of a source's slots.

    Args:
        source: a model from ``untie_adapted``, on a packed base or not; its adapters are merged into the rows, and its
            trained norms replace them.
        where: prefix of error messages.

    Raises:
        WhetValueError: the source does not fill a slot.
    """

    def __init__(self, source: ModelSource, where: str) -> None:
        self.config, self.base, self.where = source.config, source.base, where
        self._slices: dict[str, list[RowSlice]] = {}
        for row_slice in sorted(list_slices(source, where), key=lambda row_slice: row_slice.first_row):
            self._slices.setdefault(row_slice.slot, []).append(row_slice)
        self._adapters = [each for each in source.adapters if isinstance(each, LoRA)]
        self._rows = [each for each in source.adapters if isinstance(each, Rows)]
        self._norms = {each.slot: each.values for each in source.adapters if isinstance(each, NormValues)}

    def iter_chunks(self, location: WeightLocation, slot: str, format: str) -> Iterator[np.ndarray]:
        """Yield a module's tensor in chunks of rows, in the module's order of rows and columns and a given format.

        Args:
            slot: the slot of the weight or of the bias.
            format: a name in ``formats.TABLE``; a float format for norms and biases.

        Raises:
            WhetValueError: NaN or infinity, or weights that the format cannot represent; see ``RangeCheck``.
        """
        order, columns = slot_rows(self.config, location), slot_columns(self.config, location)
        k = self.config.slots()[slot][-1] if len(self.config.slots()[slot]) == 2 else 1
        step = max(1, _CHUNK_BYTES // (4 * k * _PANEL_ROWS)) * _PANEL_ROWS
        check = RangeCheck(self.where)
        for begin in range(0, len(order), step):
            yield self.encode(slot, order[begin : begin + step], format, check, columns)
        check.finish()
        release_pages(
            [row_slice.tensor for row_slice in self._slices.get(slot, ()) if isinstance(row_slice.tensor, np.ndarray)]
        )

    def encode(
        self, slot: str, order: np.ndarray, format: str, check: RangeCheck, columns: np.ndarray | None = None
    ) -> np.ndarray:
        """Return rows of a slot, in the given order, encoded: numbers, the bits of bfloat16, bytes of blocks.

        ``columns``: the order of the numbers of each row; None: the slot's.
        """
        if columns is None and self.stored_format(slot, order) == format:
            parts = [(at, np.asarray(row_slice.tensor)) for at, row_slice in self._parts(slot, order)]
            return _put_together(parts, len(order))
        values = self.values(slot, order)
        values = values if columns is None else np.ascontiguousarray(values[:, columns])
        check.add(slot, slot, int(order.min()), len(order), _loss(values, format))
        return encode(values, format, f"{self.where}: {slot}")

    def stored_format(self, slot: str, order: np.ndarray) -> str | None:
        """Return the format in which all these rows are stored; None: several, or they have to be computed."""
        is_changed = slot in self._norms or any(adapters_of(slot, order, self._adapters))
        if self.base is not None or is_changed or any(each.slot == slot for each in self._rows):
            return None
        formats = {row_slice.format for _, row_slice in self._parts(slot, order)}
        is_module = any(hasattr(row_slice.tensor, "detach") for row_slice in self._slices[slot])
        return None if is_module or len(formats) > 1 else formats.pop()

    def values(self, slot: str, order: np.ndarray) -> np.ndarray:
        """Return rows of a slot, in the given order, as float32."""
        if slot in self._norms:
            return self._norms[slot][order]
        if self.base is not None:
            rows = self._base_rows(slot, order)
        else:
            rows = _put_together(
                [(at, slice_values(row_slice)) for at, row_slice in self._parts(slot, order)], len(order)
            )
        rows = np.asarray(rows, np.float32)

        def writable() -> np.ndarray:
            return rows if rows.flags.writeable and rows.flags.owndata else rows.copy()

        for at, adapter in adapters_of(slot, order, self._adapters):
            rows, of_adapter = writable(), order[at] - adapter.first_row
            rows[at] += np.float32(adapter.scaling) * (factor_values(adapter.b)[of_adapter] @ factor_values(adapter.a))
            if adapter.magnitude is not None:
                rows[at] *= (adapter.magnitude[of_adapter] / np.linalg.norm(rows[at], axis=1))[:, None]
        for each in (each for each in self._rows if each.slot == slot):
            _, at, given = np.intersect1d(order, each.rows, return_indices=True)
            rows = writable()
            rows[at] = each.values[given]
        return rows

    def _base_rows(self, slot: str, order: np.ndarray) -> np.ndarray:
        assert self.base is not None
        slot = slot if slot in self.base.config.slots() else "embedding"  # an untied head
        first, last = int(order.min()), int(order.max())
        out = np.empty((last + 1 - first, *self.config.slots()[slot][1:]), np.float32)
        self.base.core.rows(slot, first, len(out), out)
        return out[order - first]

    def _parts(self, slot: str, order: np.ndarray) -> Iterator[tuple[Any, RowSlice]]:
        """Yield indices into ``order`` and these rows as a slice, checked for NaN and infinity."""
        is_run = bool((np.diff(order) == 1).all())
        for row_slice in self._slices[slot]:
            end = row_slice.first_row + len(row_slice.tensor)
            at: Any = np.flatnonzero((order >= row_slice.first_row) & (order < end))
            if not len(at):
                continue
            rows: Any = order[at] - row_slice.first_row
            if is_run:  # views, not copies
                at, rows = slice(int(at[0]), int(at[-1]) + 1), slice(int(rows[0]), int(rows[-1]) + 1)
            some = RowSlice(slot, int(order[0]), row_slice.tensor[rows], row_slice.format)
            yield at, next(check_finite([some], self.where))


def merge_slots(source: ModelSource, where: str, slots: Collection[str] | None = None) -> ModelSource:
    """Return a source with its adapters of some slots merged; these are float32, computed when they are read.

    Args:
        source: a model from ``untie_adapted``.
        slots: of a model on a packed base, all. Default: every slot that an adapter changes.
    """
    changed = {each.slot for each in source.adapters} if slots is None else slots
    rows, shapes = RowReader(source, where), source.config.slots()

    def slices() -> Iterator[RowSlice]:
        yield from (row_slice for row_slice in source.slices() if row_slice.slot not in changed)
        for slot in sorted(shapes.keys() & changed):
            yield RowSlice(slot, 0, rows.values(slot, np.arange(shapes[slot][0])), "float32")

    adapters = tuple(adapter for adapter in source.adapters if adapter.slot not in changed)
    return source._replace(slices=slices, adapters=adapters, base=None)


def encode(values: np.ndarray, format: str, label: str) -> np.ndarray:
    """Encode float32 rows in a format; quantises as ``whet.quantize``.

    Raises:
        WhetValueError: a number is out of range for float16.
    """
    if format == "float32":
        return np.ascontiguousarray(values)
    if format == "bfloat16":
        return bf16_bits(values)
    if format == "float16":
        halves = _to_float16(values)
        if not np.isfinite(halves).all():
            raise WhetValueError(f"{label} has numbers beyond 65504, the largest of float16. Write bf16 or f32.")
        return halves
    return pack_weight(values, format).unpack().data


def _loss(values: np.ndarray, format: str) -> Loss:
    """Return what float32 rows lose to the range of a format, for ``RangeCheck``."""
    if format != "float16":
        return encoding_loss(values, format)
    norm, lost = float(np.vdot(values, values)), values.size * 2.0**-50  # a float16 rounds by at most 2^-25 below 2^-14
    if 9 * lost > norm:
        exact = values.astype(np.float64)
        norm, lost = float(np.vdot(exact, exact)), float(np.square(exact - _to_float16(values)).sum())
    return format, float(np.abs(values).max(initial=0.0)), 65519.0, norm, lost


def _to_float16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def row_bytes(format: str, k: int) -> int:
    """Return the bytes of a row of k numbers in a format."""
    row = TABLE[format]
    return k * np.dtype(row.dtype).itemsize if row.is_float else k // row.block_length * row.block_bytes


def adapters_of(slot: str, order: np.ndarray, adapters: Sequence[LoRA]) -> Iterator[tuple[np.ndarray, LoRA]]:
    """Yield the adapters that change rows of a slot, with the indices of these rows in ``order``."""
    for adapter in adapters:
        if adapter.slot != slot:
            continue
        rows = np.flatnonzero((order >= adapter.first_row) & (order < adapter.first_row + len(adapter.b)))
        if len(rows):
            yield rows, adapter


def _put_together(parts: list[tuple[Any, np.ndarray]], n: int) -> np.ndarray:
    """Assemble rows at their indices; a single contiguous part is returned unchanged."""
    [(at, first), *rest] = parts
    if not rest and isinstance(at, slice):
        return first
    out = np.empty((n, *first.shape[1:]), first.dtype)
    for at, rows in parts:
        out[at] = rows
    return out
