"""The weights of a model, packed once in the core's memory: engines sample from them, frozen modules multiply by them.

Nothing here knows torch: an ``out`` of torch is written where it lies.
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
from whet.models.slots import ModelSource, WeightLocation, find_location, keep_order
from whet.ops.quant import CORE_FORMATS


class PackedBase:
    """Packed weights, found by the names of the Hugging Face model's modules. Made by ``pack_base``.

    They do not change, so that any number of engines and trainers may hold them at once; a copy is the same object.

    Attributes:
        config: what the model computes.
        formats: slot -> format of every matrix; "q4_k, q6_k" where its parts have several.
        summary: these formats, each once.
        kv_format: the format of an engine's keys and values, "float32" or "bfloat16".
        is_quantised: whether a matrix is in blocks of integers, whose inputs an engine rounds to 8 bits.
        targets, short_position, path: as in ``ModelSource``.
        core: the core's weights, by slot.
    """

    def __init__(self, source: ModelSource, formats: Mapping[str, tuple[FormatSpan, ...]]) -> None:
        """Zeros in the shapes and formats of a source's matrices; see ``pack_base``."""
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
        """The model as an engine takes it: nothing is left to pack."""
        return ModelSource(self.config, lambda: iter(()), self.targets, (), self.short_position, self)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.core.size_bytes

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """The memory of the base, for ``whet.memory_report``: one block, however many engines and trainers have it."""
        yield "weights", ("base", id(self.core)), self.nbytes

    def digest(self) -> str:
        """sha-256, in hexadecimal, of every slot's name and format and of 64-bit checksums of its packed bytes.

        The same weights have the same on every machine and instruction set.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        slots = (f"{slot} {self.formats.get(slot, 'float32')} {self.core.checksum(slot):x}" for slot in self._shapes)
        return hashlib.sha256("\n".join(slots).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """The description by which checkpoints and folders of adapters know their base: how it was packed, its digest.

        ``check_record`` compares it with a base, ``pack_recorded`` packs the same one.
        """
        return {**self._asked, "formats": self.summary, "is_quantised": self.is_quantised, "digest": self.digest()}

    def shape(self, name: str) -> tuple[int, ...]:
        """That of a module's weight as ``rows`` has it: (n, k), or (n,) of a norm.

        Raises:
            WhetValueError: there is no such module.
        """
        return self._find_location(name, "PackedBase.shape").shape

    def rows(self, name: str, out: Any, first: int = 0) -> Any:
        """Rows [first, first + len(out)) of a module's weight, dequantised into ``out``, which is returned.

        Args:
            name: of the module in the Hugging Face model, "model.layers.0.self_attn.q_proj"; a tied head's rows are
                the embedding's.
            out: contiguous float32 or bfloat16, torch or NumPy (ml_dtypes), on the CPU and without gradient: (n, k), a
                row for each output of the module as it numbers them, also where it keeps its weight transposed; (n,) of
                a norm. bfloat16 is the float32 number, rounded to nearest even.
            first: 0 where the slot has the module's rows in another order (GPT-NeoX's query_key_value), and then
                ``out`` has all of them.

        Raises:
            WhetValueError: there is no such module, or it has no such rows.
            WhetTypeError: another kind of ``out``.
        """
        location = self._find_location(name, "PackedBase.rows")
        out = self._read("PackedBase.rows", name, location, self._weight_slot(location), out, first)
        if location.module.offset:
            out -= location.module.offset
        return out

    def bias(self, name: str, out: Any) -> Any:
        """A module's bias (n,), in ``out`` as in ``rows``.

        Raises:
            WhetValueError, WhetTypeError: as ``rows``; the module has no bias.
        """
        location = self._find_location(name, "PackedBase.bias")
        if location.bias is None:
            raise WhetValueError(f"PackedBase.bias: {name} has no bias.")
        return self._read("PackedBase.bias", name, location, location.bias, out, 0)

    def gather(self, name: str, ids: Any, out: Any) -> Any:
        """Rows of an embedding: ``out[i]`` is row ``ids[i]``.

        Args:
            name: of the module, whose weight has a slot of its own.
            ids: (m,) int64, contiguous.
            out: (m, k), as in ``rows``.

        Raises:
            WhetValueError, WhetTypeError: as ``rows``; ids outside the embedding.
        """
        where = "PackedBase.gather"
        location = self._find_location(name, where)
        slot = self._weight_slot(location)
        if self._shapes[slot] != location.shape or location.module.row_order is not keep_order:
            raise WhetValueError(f"{where}: {name} is no embedding. Read its rows with rows().")
        try:
            found = self.core.gather(slot, ids, out)
        except IndexError:
            raise WhetValueError(f"{where}: ids of {name} lie outside 0 ... {location.shape[0] - 1}.") from None
        if found is NotImplemented:
            expected = f"ids int64 (m,), and out contiguous float32 or bfloat16 (m, {location.shape[-1]})"
            raise WhetTypeError(f"{where}: ids are {_describe(ids)} and out is {_describe(out)}, expected {expected}.")
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedBase:
        return self

    def __reduce__(self) -> NoReturn:
        raise WhetTypeError(
            "PackedBase: packed weights are not pickled. Keep the model's folder or file, and pack it again."
        )

    def __repr__(self) -> str:
        return f"PackedBase({self.config.n_parameters:,} parameters, {self.summary}, {self.nbytes:,} bytes)"

    def _find_location(self, name: str, where: str) -> WeightLocation:
        return find_location(self.targets, name, where)

    def _weight_slot(self, location: WeightLocation) -> str:
        return location.weight if location.weight in self._shapes else "embedding"  # of a tied head

    def _read(self, where: str, name: str, location: WeightLocation, slot: str, out: Any, first: int) -> Any:
        if not getattr(out, "shape", ()):
            raise WhetTypeError(f"{where}: out is {_describe(out)}, expected an array of NumPy or torch.")
        n_rows, n = location.shape[0], len(out)
        if not 0 <= first <= n_rows - n:
            raise WhetValueError(
                f"{where}: {name} has {n_rows} rows, and rows {first} ... {first + n - 1} are asked for."
            )
        if location.module.row_order is not keep_order and n != n_rows:
            raise WhetValueError(f"{where}: {name} is read whole: {n_rows} rows, not {n}. Pass an out for all of them.")
        for begin, view in location.module.row_order(self.config, out):
            if self.core.rows(slot, location.first_row + first + begin, len(view), view) is NotImplemented:
                shape = (n_rows, *self._shapes[slot][1:])
                raise WhetTypeError(
                    f"{where}: out is {_describe(out)}, expected contiguous float32 or bfloat16 {shape}, or fewer "
                    f"rows, on the CPU and without gradient."
                )
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
        source: a model that ``open_pretrained``, ``open_gguf`` or ``open_module`` gives; LoRA adapters that it
            tells apart are no part of the base.
        weights, embedding, head: formats, as in ``Engine``; None keeps those of a GGUF file, and takes floats as bf16.
        where: begins the errors.

    Raises:
        WhetValueError: a format that there is not, weights that hold NaN or infinity or that their format
            cannot represent, or a model on a packed base.
    """
    if source.base is not None:
        raise WhetValueError(f"{where}: the model's weights are packed already. Share its base, which is source.base.")
    base = PackedBase(source, choose_formats(source, weights, embedding, head, where))
    base._asked = {"weights": weights, "embedding": embedding, "head": head}
    pack_slices(base.core, check_range(list_slices(source, where), where, base.core, base.config))
    return base


def _describe(array: Any) -> str:
    shape = getattr(array, "shape", None)
    return type(array).__name__ if shape is None else f"{getattr(array, 'dtype', 'of no dtype')} {tuple(shape)}"
