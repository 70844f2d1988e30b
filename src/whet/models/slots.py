"""The way of a tensor from a model's file or module to the engine's slots.

    ModelSource     a live module, a folder or a GGUF file: its config and its weights
    ModuleSpec      a row of a family's table: a module's names in the source, and the slot that its weight belongs to
    WeightLocation  a ``ModuleSpec`` in one layer: shape, and the rows of the slot
    StoredTensor    the tensor under one of these names, in the format of the source
    RowSlice        a view of rows of it in the slot's order, which the core packs

Shapes and formats are checked against the config. Nothing is copied or converted, except norms to whose weights the
model adds an offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whet.errors import WhetValueError
from whet.models.architecture import ModelConfig, RowSlice
from whet.models.formats import FLOAT_FORMATS
from whet.models.reference import slice_values

if TYPE_CHECKING:
    from whet.models.packed_base import PackedBase

PARTS = ("q", "k", "v", "gate", "up")


class StoredTensor(NamedTuple):
    """A tensor as a source keeps it: ``RowSlice.tensor``, ``RowSlice.format``, and the shape in numbers, not bytes."""

    tensor: Any
    format: str
    shape: tuple[int, ...]


def keep_order(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """The rows as they are."""
    yield 0, rows


def split_heads(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """GPT-NeoX's query_key_value: per head its q, k and v; to all q, then all k, then all v."""
    dim, n_heads = config.head_dim, config.n_heads
    for head in range(n_heads):
        for part in range(3):
            first = (3 * head + part) * dim
            yield (part * n_heads + head) * dim, rows[first : first + dim]


def deinterleave(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """llama.cpp's order of Llama's q and k: row 2i + p of a head was row i + p head_dim / 2."""
    dim = config.head_dim
    for first in range(0, rows.shape[0], dim):
        for parity in range(2):
            yield first + parity * (dim // 2), rows[first + parity : first + dim : 2]


RowOrder = Callable[[ModelConfig, Any], Iterator[tuple[int, Any]]]


@dataclass(frozen=True)
class ModuleSpec:
    """A layer of the source with .weight and perhaps .bias; ``{i}`` in the names is the layer's number.

    Attributes:
        names: what it is called; the first that is there counts.
        slot: which weight it is, or a part of.
        part: "q", "k" or "v" of qkv, "gate" or "up" of gate_up: its rows of the slot; "": all.
        row_order: how its rows lie in the slot's.
        transposed: the source keeps (inputs, outputs).
        offset: the model computes with its weight and this.
    """

    names: tuple[str, ...]
    slot: str
    part: str = ""
    row_order: RowOrder = keep_order
    transposed: bool = False
    offset: float = 0.0


class WeightLocation(NamedTuple):
    """The place of one module of one layer: ``shape`` (outputs, inputs) of its weight; its first row in the slot."""

    names: tuple[str, ...]
    weight: str
    bias: str | None
    first_row: int
    shape: tuple[int, ...]
    module: ModuleSpec


class LoRA(NamedTuple):
    """An adapter of some rows of a slot: W[first_row : first_row + n] += scaling b a, with a (r, k) and b (n, r)."""

    slot: str
    first_row: int
    a: Any
    b: Any
    scaling: float


def factor_values(factor: Any) -> np.ndarray:
    """A factor of an adapter, NumPy's or torch's, as float32."""
    return np.asarray(factor.detach().float() if hasattr(factor, "detach") else factor, np.float32)


class ModelSource(NamedTuple):
    """A model and its weights.

    Attributes:
        config: what it computes.
        slices: the rows of every slot, each once. Every call reads again: a live module's values at that time.
        targets: where each module of the Hugging Face model goes, by its name there; for ``locate_lora``.
        adapters: LoRA adapters, not part of the slices.
        short_position: see ``families.short_position``; the config's frequencies are resolved for its max_position.
        base: the packed weights that the model's modules share; there are no slices then.
        path: of the folder or file that the slices are read from, absolute; empty: they are in memory.
    """

    config: ModelConfig
    slices: Callable[[], Iterator[RowSlice]]
    targets: dict[str, WeightLocation]
    adapters: tuple[LoRA, ...] = ()
    short_position: int | None = None
    base: PackedBase | None = None
    path: str = ""


def untie_adapted(source: ModelSource) -> ModelSource:
    """The source with a head apart from the embedding, where the head is the embedding and an adapter changes it.

    Merged into the matrix that they share, the adapter would change both.
    """
    if not source.config.tied_head or not any(adapter.slot in ("embedding", "head") for adapter in source.adapters):
        return source

    def slices() -> Iterator[RowSlice]:
        for row_slice in source.slices():
            yield row_slice
            if row_slice.slot == "embedding":
                yield row_slice._replace(slot="head")

    return source._replace(config=replace(source.config, tied_head=False), slices=slices)


def iter_locations(config: ModelConfig, modules: Sequence[ModuleSpec]) -> Iterator[WeightLocation]:
    """Every module of every layer that the config has."""
    slots = config.slots()
    for module in modules:
        for i in range(config.n_layers if "{i}" in module.slot else 1):
            slot = module.slot.replace("{i}", str(i))
            # A tied head has no weight of its own, but it may have a bias or an adapter.
            weight = slot if slot in slots or slot == "head" else f"{slot}.weight"
            if weight not in slots and slot != "head":
                continue
            bias = f"{slot}.bias" if f"{slot}.bias" in slots else None
            names = tuple(name.replace("{i}", str(i)) for name in module.names)
            rows, *rest = slots.get(weight, slots["embedding"])
            first, count = _part(config, module.part) if module.part else (0, rows)
            yield WeightLocation(names, weight, bias, first, (count, *rest), module)


def iter_slices(
    config: ModelConfig,
    modules: Sequence[ModuleSpec],
    get_tensor: Callable[[Sequence[str], str], StoredTensor],
    where: str,
) -> Iterator[RowSlice]:
    """The pieces of a model.

    Args:
        get_tensor: (names, "weight" or "bias") -> the tensor of the first of these modules that is there; raises
            WhetValueError if none is.
        where: begins the errors.

    Raises:
        WhetValueError: a tensor's shape or format is not the config's.
    """
    slots = config.slots()
    for location in iter_locations(config, modules):
        for suffix, slot in (("weight", location.weight), ("bias", location.bias)):
            if slot is None or slot not in slots:
                continue
            shape = location.shape if suffix == "weight" else location.shape[:1]
            stored = get_tensor(location.names, suffix)
            transposed = location.module.transposed and len(shape) == 2
            expected = shape[::-1] if transposed else shape
            label = f"{where}: {location.names[0]}.{suffix}"
            if tuple(stored.shape) != expected:
                raise WhetValueError(
                    f"{label} has shape {tuple(stored.shape)}, expected {expected}. The config is another model's, or "
                    f"the file is damaged."
                )
            if len(shape) == 1 and stored.format not in FLOAT_FORMATS:
                raise WhetValueError(
                    f"{label} is {stored.format}, expected floats: norms and biases are not quantised."
                )
            if location.module.offset and suffix == "weight":
                numbers = slice_values(RowSlice(slot, location.first_row, stored.tensor, stored.format))
                yield RowSlice(
                    slot, location.first_row, numbers + np.float32(location.module.offset), numbers.dtype.name
                )
                continue
            rows = stored.tensor.T if transposed else stored.tensor
            for first, view in location.module.row_order(config, rows):
                yield RowSlice(slot, location.first_row + first, view, stored.format)


def find_location(targets: Mapping[str, WeightLocation], name: str, where: str) -> WeightLocation:
    """The place of a module, by its name in the Hugging Face model.

    Raises:
        WhetValueError: there is no such module.
    """
    if name not in targets:
        raise WhetValueError(f"{where}: the model has no module {name!r}; it has {', '.join(sorted(targets)[:4])}, ...")
    return targets[name]


def locate_lora(config: ModelConfig, location: WeightLocation, a: Any, b: Any, scaling: float, where: str) -> LoRA:
    """A module's adapter W += scaling b a as one of its slot; b's rows are reordered where the weight's are.

    Raises:
        WhetValueError: the shapes are not those of the module, or it is no matrix.
    """
    if len(location.shape) != 2 or a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != location.shape:
        raise WhetValueError(
            f"{where}: the adapter of {location.names[0]} has shapes {tuple(a.shape)} and {tuple(b.shape)}, expected "
            f"(r, k) and (n, r) for a module of shape (n, k) = {location.shape}."
        )
    if a.shape[0] != b.shape[1]:
        raise WhetValueError(f"{where}: the adapter of {location.names[0]} has ranks {a.shape[0]} and {b.shape[1]}.")
    if location.module.row_order is not keep_order:
        rows = b.clone() if hasattr(b, "clone") else b.copy()
        for first, view in location.module.row_order(config, b):
            rows[first : first + len(view)] = view
        b = rows
    return LoRA(location.weight, location.first_row, a, b, scaling)


def _part(config: ModelConfig, part: str) -> tuple[int, int]:
    q, kv, ffn = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim, config.ffn_dim
    return {"q": (0, q), "k": (q, kv), "v": (q + kv, kv), "gate": (0, ffn), "up": (ffn, ffn)}[part]
