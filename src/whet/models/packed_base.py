"""Weights of a model packed once in the core's memory, for engines that sample and frozen modules that multiply.

Torch is not imported: an ``out`` that is a torch tensor is written in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from functools import cached_property
from typing import Any, NoReturn

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.models.formats import TABLE, FormatSpan, choose_formats, describe_spans, kv_format, summarise
from whet.models.loading import check_range, list_slices, pack_slices
from whet.models.slots import (
    ModelSource,
    WeightLocation,
    find_location,
    keep_order,
    slot_columns,
    split_pairs_of_experts,
)
from whet.ops.quant import CORE_FORMATS


class PackedBase:
    """Packed weights, addressed by the module names of the Hugging Face model. Created by ``pack_base``.

    Immutable: any number of engines and trainers may share them; a copy is the same object.

    Attributes:
        config: the architecture.
        formats: slot -> format of every matrix; "q4_k, q6_k" if it has several.
        summary: the formats of all matrices, each once.
        kv_format: format of an engine's keys and values, "float32" or "bfloat16".
        is_quantised: whether any matrix is quantised; an engine rounds the inputs of such a matrix to 8 bits.
        targets: as in ``ModelSource``.
        short_position: as in ``ModelSource``.
        path: as in ``ModelSource``.
        core: the core's weights, by slot.
    """

    def __init__(self, source: ModelSource, formats: Mapping[str, tuple[FormatSpan, ...]]) -> None:
        """Allocate weights of the source's shapes in these formats, all zero; see ``pack_base``."""
        self.config = source.config
        self.targets = source.targets
        self.short_position = source.short_position
        self.path = source.path
        self.formats = {slot: describe_spans(parts) for slot, parts in formats.items()}
        self.summary = summarise(formats)
        self.kv_format = kv_format(formats)
        self.is_quantised = not all(TABLE[part.format].is_float for parts in formats.values() for part in parts)
        self._asked: dict[str, str | None] = {}
        self._shapes = source.config.slots()
        slots = [
            (slot, CORE_FORMATS.get(format), n, shape[-1])
            for slot, shape in self._shapes.items()
            for n, format in formats.get(slot, [(shape[0], "")])
        ]
        self.core = _core.Weights(vars(source.config), slots)

    def source(self) -> ModelSource:
        """Return the model as a source for an engine, which has nothing left to pack."""
        return ModelSource(self.config, lambda: iter(()), self.targets, (), self.short_position, self)

    @property
    def nbytes(self) -> int:
        """Size of all weights in bytes."""
        return self.core.size_bytes

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory of the base for ``whet.memory_report``: one block, however many share it."""
        yield "weights", ("base", id(self.core)), self.nbytes

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of every slot's name, format and 64-bit checksum of its packed bytes.

        The checksum of a second embedding (Gemma 4) covers 64 rows. Equal weights have equal digests on every machine
        and instruction set.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        slots = (f"{slot} {self.formats.get(slot, 'float32')} {self.core.checksum(slot):x}" for slot in self._shapes)
        return hashlib.sha256("\n".join(slots).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the settings and the digest by which checkpoints and folders of adapters identify their base.

        ``check_record`` compares a record with a base, ``pack_recorded`` packs the recorded base again.
        """
        return {**self._asked, "formats": self.summary, "is_quantised": self.is_quantised, "digest": self.digest()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a module's weight as read by ``rows``: (n, k), or (n,) for a norm.

        Raises:
            WhetValueError: there is no such module.
        """
        return self._find_location(name, "PackedBase.shape").shape

    def rows(self, name: str, out: Any, first: int = 0) -> Any:
        """Dequantise rows [first, first + len(out)) of a module's weight into ``out``, and return it.

        Args:
            name: a module of the Hugging Face model, "model.layers.0.self_attn.q_proj"; a tied head reads the
                embedding.
            out: contiguous float32 or bfloat16, torch or NumPy (ml_dtypes), on the CPU and without gradient: (n, k), a
                row per output of the module in its order, also if the module stores its weight transposed; (n,) for a
                norm. bfloat16 is the float32 number, rounded to nearest even.
            first: must be 0, and ``out`` must cover all rows, if the slot has the module's rows in another order
                (GPT-NeoX's query_key_value).

        Raises:
            WhetValueError: the model has no such module, or the module no such rows.
            WhetTypeError: ``out`` has the wrong type, dtype or layout.
        """
        location = self._find_location(name, "PackedBase.rows")
        out = self._read("PackedBase.rows", name, location, self._weight_slot(location), out, first)
        if (columns := slot_columns(self.config, location)) is not None:
            out[...] = out[:, columns]
        if not location.module.is_stored:
            out[...] = location.module.from_slot(out)
        return out

    def bias(self, name: str, out: Any) -> Any:
        """Dequantise a module's bias (n,) into ``out``, see ``rows``, and return it.

        Raises:
            WhetValueError, WhetTypeError: as ``rows``, or the module has no bias.
        """
        location = self._find_location(name, "PackedBase.bias")
        if location.bias is None:
            raise WhetValueError(f"PackedBase.bias: {name} has no bias.")
        return self._read("PackedBase.bias", name, location, location.bias, out, 0)

    def gather(self, name: str, ids: Any, out: Any) -> Any:
        """Gather rows of an embedding: ``out[i]`` is row ``ids[i]``.

        Args:
            name: a module whose weight fills a slot.
            ids: (m,) int64, contiguous.
            out: (m, k), as in ``rows``.

        Raises:
            WhetValueError, WhetTypeError: as ``rows``, or ids are out of range.
        """
        where = "PackedBase.gather"
        location = self._find_location(name, where)
        slot = self._weight_slot(location)
        if self._shapes[slot] != location.shape or location.module.row_order is not keep_order:
            raise WhetValueError(f"{where}: {name} is not an embedding. Read its rows with rows().")
        try:
            found = self.core.gather(slot, ids, out)
        except IndexError:
            raise WhetValueError(
                f"{where}: ids of {name} are out of range, expected 0 ... {location.shape[0] - 1}."
            ) from None
        if found is NotImplemented:
            expected = f"ids int64 (m,), and out contiguous float32 or bfloat16 (m, {location.shape[-1]})"
            raise WhetTypeError(f"{where}: ids are {_describe(ids)} and out is {_describe(out)}, expected {expected}.")
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedBase:
        return self

    def __reduce__(self) -> NoReturn:
        raise WhetTypeError("PackedBase: packed weights cannot be pickled. Pack the model's folder or file again.")

    def __repr__(self) -> str:
        return f"PackedBase({self.config.n_parameters:,} parameters, {self.summary}, {self.nbytes:,} bytes)"

    def _find_location(self, name: str, where: str) -> WeightLocation:
        return find_location(self.targets, name, where)

    def _weight_slot(self, location: WeightLocation) -> str:
        return location.weight if location.weight in self._shapes else "embedding"  # a tied head

    def _read(self, where: str, name: str, location: WeightLocation, slot: str, out: Any, first: int) -> Any:
        if not getattr(out, "shape", ()):
            raise WhetTypeError(f"{where}: out is {_describe(out)}, expected a NumPy array or a torch tensor.")
        n_rows, n = location.shape[0], len(out)
        if not 0 <= first <= n_rows - n:
            raise WhetValueError(
                f"{where}: rows {first} ... {first + n - 1} of {name} are out of range, which has {n_rows} rows."
            )
        if location.module.row_order is not keep_order and n != n_rows:
            raise WhetValueError(f"{where}: out has {n} rows, and {name} is read whole. Pass all {n_rows} rows.")
        for begin, view in location.module.row_order(self.config, out):
            is_strided = location.module.row_order is split_pairs_of_experts
            rows = view + 0 if is_strided else view
            if self.core.rows(slot, location.first_row + first + begin, len(view), rows) is NotImplemented:
                shape = (n_rows, *self._shapes[slot][1:])
                raise WhetTypeError(
                    f"{where}: out is {_describe(out)}, expected contiguous float32 or bfloat16 {shape}, or fewer "
                    f"rows, on the CPU and without gradient."
                )
            if is_strided:
                view[...] = rows
        return out


def pack_base(
    source: ModelSource,
    *,
    weights: str | None = None,
    embedding: str | None = None,
    head: str | None = None,
    where: str = "pack_base",
) -> PackedBase:
    """Pack a model's weights once, for engines and trainers to share.

    Args:
        source: a model from ``open_pretrained``, ``open_gguf`` or ``open_module``; its separate LoRA adapters are not
            part of the base.
        weights: format of the layers, see ``Engine``. Default: a GGUF file's own, and bf16 for floats.
        embedding: format of the embedding, with the same default.
        head: format of the head, with the same default.
        where: prefix of error messages.

    Raises:
        WhetValueError: an unknown format, weights with NaN or infinity or out of range for their format, or a model on
            a packed base.
    """
    if source.base is not None:
        raise WhetValueError(f"{where}: the model's weights are already packed. Share its base: source.base.")
    base = PackedBase(source, choose_formats(source, weights, embedding, head, where))
    base._asked = {"weights": weights, "embedding": embedding, "head": head}
    pack_slices(base.core, check_range(list_slices(source, where), where, base.core, base.config))
    return base


def _describe(array: Any) -> str:
    shape = getattr(array, "shape", None)
    return type(array).__name__ if shape is None else f"{getattr(array, 'dtype', 'of no dtype')} {tuple(shape)}"
