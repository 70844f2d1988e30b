"""Quantisation-aware training in a learner: weights as a GGUF file of the merged adapters will store them.

    W' = Q(W + s B A),    dL/dA and dL/dB as of W + s B A

with Q the numbers of a matrix after encoding and decoding by the export's own encoder, and the straight-through
estimator (Bengio et al. 2013). ``whet.nn.rounding`` does the same in modules of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from whet.errors import WhetValueError
from whet.models.architecture import TABLE_SLOT, RowSlice
from whet.models.formats import FILE_TYPES, FileType, FormatSpan, file_format
from whet.models.loading import RangeCheck, pack_slices
from whet.models.packed_base import PackedBase
from whet.models.row_reader import RowReader
from whet.models.sizes import slot_bytes
from whet.models.slots import LoRA, ModelSource, WeightLocation, slot_columns
from whet.ops.quant import CORE_FORMATS

_CHUNK, _PANEL_ROWS = 1 << 22, 16
"""Numbers that are encoded at once, and the rows of a panel of packed weights."""


class RoundedBase:
    """The packed weights of a base and its adapters in the formats of a GGUF file.

    Args:
        base: the weights before rounding, which are not changed.
        file_type: of the file.
        where: the caller's name, for errors.

    Attributes:
        packed: the rounded weights; zeros until ``update``.

    Raises:
        WhetValueError: the file has the columns of a matrix in another order, or a second embedding.
    """

    def __init__(self, base: PackedBase, file_type: FileType, where: str) -> None:
        self._base, self._where = base, f"{where}: qat"
        self._formats = dict(_choose_formats(base, file_type, where))
        spans = {
            slot: tuple(FormatSpan(n, _packed(format)) for n, format in parts) for slot, parts in self._formats.items()
        }
        self.packed = PackedBase(base.source(), spans)
        self._unpacked = list(base.config.slots())

    def update(self, adapters: Sequence[LoRA]) -> None:
        """Round the matrices with adapters, whose sums W + s B A have changed; at first, all weights."""
        slots = self._unpacked or dict.fromkeys(adapter.slot for adapter in adapters)
        rows, check = (
            RowReader(self._base.source()._replace(adapters=tuple(adapters)), self._where),
            RangeCheck(self._where),
        )
        pack_slices(self.packed.core, (each for slot in slots for each in self._slices(rows, slot, check)))
        check.finish()
        self._unpacked = []

    def _slices(self, rows: RowReader, slot: str, check: RangeCheck) -> Iterator[RowSlice]:
        n, *k = self._base.config.slots()[slot]
        if not k:  # a norm or a bias
            yield RowSlice(slot, 0, rows.values(slot, np.arange(n)), "float32")
            return
        step, first = max(1, _CHUNK // k[0] // _PANEL_ROWS) * _PANEL_ROWS, 0
        for n_rows, format in self._formats[slot]:
            end = first + n_rows
            for begin in range(first, end, step):
                order = np.arange(begin, min(end, begin + step))
                yield RowSlice(slot, begin, rows.encode(slot, order, format, check), format)
            first = end


def rounded_bytes(source: ModelSource, file_type: FileType) -> int:
    """Return the bytes of the matrices of ``RoundedBase.packed``."""
    config, slots = source.config, source.config.slots()
    locations = (each for each in dict.fromkeys(source.targets.values()) if len(slots.get(each.weight, ())) == 2)
    formats = ((each.shape, _packed(file_format(FILE_TYPES[file_type], config, each))) for each in locations)
    return sum(slot_bytes(shape, format) for shape, format in formats)


def _choose_formats(base: PackedBase, file_type: FileType, where: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield the slot of each matrix, with the number and the format in the file of its consecutive rows."""
    config, mixture = base.config, FILE_TYPES[file_type]
    found: dict[str, list[WeightLocation]] = {}
    for location in dict.fromkeys(base.targets.values()):
        found.setdefault(location.weight, []).append(location)
    for slot, shape in config.slots().items():
        if slot == TABLE_SLOT or any(slot_columns(config, each) is not None for each in found.get(slot, ())):
            raise WhetValueError(
                f"{where}: qat is {file_type!r}, and a learner does not round {slot} as the file does. Train modules "
                f"of torch in floats (whet train: --base none)."
            )
        if len(shape) == 2:
            locations = sorted(found.get(slot, ()), key=lambda location: location.first_row)
            parts = [(location.shape[0], file_format(mixture, config, location)) for location in locations]
            yield slot, parts or [(shape[0], "float32")]


def _packed(format: str) -> str:
    """Return the core's format for numbers of a file's."""
    return format if format in CORE_FORMATS else "float32"
