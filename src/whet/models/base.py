"""The weights of a model, packed once in the core's memory: engines sample from them, frozen modules multiply by them.

Nothing here knows torch: an ``out`` of torch is written where it lies.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from whet import _core
from whet.errors import CheckpointError, WhetTypeError, WhetValueError
from whet.files import replace_text
from whet.models.formats import TABLE, Part, choose_formats, describe_parts, is_quantised, kv_format, summarise
from whet.models.loading import all_pieces, checked, load
from whet.models.slots import Place, Source, find_place, whole
from whet.ops.quant import CORE_FORMATS

_RECORD = "whet_base.json"


class PackedBase:
    """Packed weights, found by the names of the Hugging Face model's modules. Made by ``pack_base``.

    They do not change, so that any number of engines and trainers may hold them at once; a copy is the same object.

    Attributes:
        config: what the model computes.
        formats: slot -> format of every matrix; "q4_k, q6_k" where its parts have several.
        summary: these formats, each once.
        kv_format: the format of an engine's keys and values, "float32" or "bfloat16".
        is_quantised: whether a matrix is in blocks of integers, whose inputs an engine rounds to 8 bits.
        targets, short_position, path: as in ``Source``.
        core: the core's weights, by slot.
    """

    def __init__(self, source: Source, formats: Mapping[str, tuple[Part, ...]]) -> None:
        """Zeros in the shapes and formats of a source's matrices; see ``pack_base``."""
        self.config = source.config
        self.targets = source.targets
        self.short_position = source.short_position
        self.path = source.path
        self.formats = {slot: describe_parts(parts) for slot, parts in formats.items()}
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

    def source(self) -> Source:
        """The model as an engine takes it: nothing is left to pack."""
        return Source(self.config, lambda: iter(()), self.targets, (), self.short_position, self)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.core.size_bytes

    def held_memory(self) -> Iterator[tuple[str, Hashable, int]]:
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
        return self._place(name, "PackedBase.shape").shape

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
        place = self._place(name, "PackedBase.rows")
        out = self._read("PackedBase.rows", name, place, self._weight_slot(place), out, first)
        if place.module.offset:
            out -= place.module.offset
        return out

    def bias(self, name: str, out: Any) -> Any:
        """A module's bias (n,), in ``out`` as in ``rows``.

        Raises:
            WhetValueError, WhetTypeError: as ``rows``; the module has no bias.
        """
        place = self._place(name, "PackedBase.bias")
        if place.bias is None:
            raise WhetValueError(f"PackedBase.bias: {name} has no bias.")
        return self._read("PackedBase.bias", name, place, place.bias, out, 0)

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
        place = self._place(name, where)
        slot = self._weight_slot(place)
        if self._shapes[slot] != place.shape or place.module.cut is not whole:
            raise WhetValueError(f"{where}: {name} is no embedding. Read its rows with rows().")
        try:
            found = self.core.gather(slot, ids, out)
        except IndexError:
            raise WhetValueError(f"{where}: ids of {name} lie outside 0 ... {place.shape[0] - 1}.") from None
        if found is NotImplemented:
            expected = f"ids int64 (m,), and out contiguous float32 or bfloat16 (m, {place.shape[-1]})"
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

    def _place(self, name: str, where: str) -> Place:
        return find_place(self.targets, name, where)

    def _weight_slot(self, place: Place) -> str:
        return place.weight if place.weight in self._shapes else "embedding"  # of a tied head

    def _read(self, where: str, name: str, place: Place, slot: str, out: Any, first: int) -> Any:
        if not getattr(out, "shape", ()):
            raise WhetTypeError(f"{where}: out is {_describe(out)}, expected an array of NumPy or torch.")
        n_rows, n = place.shape[0], len(out)
        if not 0 <= first <= n_rows - n:
            raise WhetValueError(
                f"{where}: {name} has {n_rows} rows, and rows {first} ... {first + n - 1} are asked for."
            )
        if place.module.cut is not whole and n != n_rows:
            raise WhetValueError(f"{where}: {name} is read whole: {n_rows} rows, not {n}. Pass an out for all of them.")
        for begin, view in place.module.cut(self.config, out):
            if self.core.rows(slot, place.first_row + first + begin, len(view), view) is NotImplemented:
                shape = (n_rows, *self._shapes[slot][1:])
                raise WhetTypeError(
                    f"{where}: out is {_describe(out)}, expected contiguous float32 or bfloat16 {shape}, or fewer "
                    f"rows, on the CPU and without gradient."
                )
        return out


def pack_base(
    source: Source,
    *,
    weights: str | None = None,
    embedding: str | None = None,
    head: str | None = None,
    where: str = "pack_base",
) -> PackedBase:
    """Pack a model's weights once, for engines and trainers to share.

    Args:
        source: a model that ``open_pretrained``, ``open_gguf`` or ``describe_module`` gives; LoRA adapters that it
            tells apart are no part of the base.
        weights, embedding, head: formats, as in ``Engine``; None keeps those of a GGUF file, and takes floats as bf16.
        where: begins the errors.

    Raises:
        WhetValueError: a format that there is not, weights that hold NaN or infinity, or a model on a packed base.
    """
    if source.base is not None:
        raise WhetValueError(f"{where}: the model's weights are packed already. Share its base, which is source.base.")
    base = PackedBase(source, choose_formats(source, weights, embedding, head, where))
    base._asked = {"weights": weights, "embedding": embedding, "head": head}
    load(base.core, checked(all_pieces(source, where), where))
    return base


def write_record(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Leave what ``PackedBase.record`` gave beside the adapters that were trained on that base."""
    replace_text(Path(folder) / _RECORD, json.dumps(record, indent=1) + "\n")


def read_record(folder: str | os.PathLike[str], where: str) -> dict[str, Any] | None:
    """The record in a folder of adapters; None: they were trained beside floats, or by something else than Whet.

    Raises:
        CheckpointError: it is damaged.
    """
    path = Path(folder) / _RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        for name, kind in (("formats", str), ("is_quantised", bool), ("digest", str)):
            if not isinstance(record[name], kind):
                raise ValueError(f"{name} is {record[name]!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: {path} is no record of a base: {error}. Save the adapters again.") from None
    return record


def read_binding(folder: str | os.PathLike[str], source: Source, is_named: bool, where: str) -> dict[str, Any] | None:
    """The record of the only base that a folder of adapters goes with; None: they go with the model in any format.

    Adapters make up for the rounding of a quantised base. Those of a float one go with any format that is named, or
    that a file is stored in.

    Args:
        source: the model that they are for.
        is_named: whether its format was asked for.
        where: begins the errors.

    Raises:
        CheckpointError: the record is damaged.
    """
    record = read_record(folder, where)
    if record is None or record["is_quantised"]:
        return record
    return None if is_named or is_quantised(source) else record


def pack_recorded(source: Source, record: Mapping[str, Any], where: str, adapters: str) -> PackedBase:
    """The base that a record is of, packed from a source.

    Raises:
        CheckpointError: the source has other weights.
    """
    asked = {name: record.get(name) for name in ("weights", "embedding", "head")}
    check_formats(source, asked, record, where, adapters)
    base = pack_base(source, **asked, where=where)
    check_record(record, base, where, adapters)
    return base


def check_formats(
    source: Source, asked: Mapping[str, str | None], record: Mapping[str, Any], where: str, adapters: str
) -> None:
    """Raise where a model packed as ``asked`` is in other formats than a record's base; nothing is packed.

    Raises:
        CheckpointError: naming the formats of both.
    """
    if source.base is not None:
        formats = source.base.summary
    else:
        weights, embedding, head = (asked.get(name) for name in ("weights", "embedding", "head"))
        formats = summarise(choose_formats(source, weights, embedding, head, where))
    if formats != record["formats"]:
        raise CheckpointError(
            f"{where}: {adapters} was trained on a base in {record['formats']}, and this one is in {formats}. Leave "
            f"the format out, and name the model that it was trained on."
        )


def check_record(record: Mapping[str, Any] | None, base: PackedBase | None, where: str, adapters: str) -> None:
    """Raise where adapters were trained on another base than the one they are for.

    Args:
        record: what ``PackedBase.record`` gave; None: there was no packed base.
        base: of the model; None: its weights are floats.
        where: begins the error.
        adapters: their checkpoint or folder.

    Raises:
        CheckpointError: naming the formats of both.
    """
    then, now = record and record["digest"], base and base.digest()
    if then != now:
        names = [
            f"a base in {known['formats']} ({known['digest'][:12]})" if known else "floats"
            for known in (record, base and base.record())
        ]
        raise CheckpointError(
            f"{where}: {adapters} was trained on {names[0]}, and this model is on {names[1]}. Make it of the same "
            f"weights in the same format."
        )


def _describe(array: Any) -> str:
    shape = getattr(array, "shape", None)
    return type(array).__name__ if shape is None else f"{getattr(array, 'dtype', 'of no dtype')} {tuple(shape)}"
