"""The path of a tensor from a model's file or module to the engine's slots.

    ModelSource     a live module, a folder or a GGUF file: its config and its weights
    ModuleSpec      a row of a family's table: a module's names in the source, and the slot that its weight belongs to
    WeightLocation  a ``ModuleSpec`` in one layer: shape, and the rows of the slot
    StoredTensor    the tensor under one of these names, in the format of the source
    RowSlice        a view of rows of it in the slot's order, which the core packs

Shapes and formats are checked against the config. Nothing is copied or converted, except vectors that the model uses
plus an offset, or as -exp.
"""

from __future__ import annotations

import math
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


class StoredTensor(NamedTuple):
    """A tensor of a source: as in ``RowSlice``, and its shape in numbers, not bytes."""

    tensor: Any
    format: str
    shape: tuple[int, ...]


def keep_order(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """Yield the rows unchanged."""
    yield 0, rows


def split_heads(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """Reorder GPT-NeoX's query_key_value, (q, k, v) of each head in turn, to all q, all k, all v."""
    dim, n_heads = config.head_dim, config.n_heads
    for head in range(n_heads):
        for part in range(3):
            first = (3 * head + part) * dim
            yield (part * n_heads + head) * dim, rows[first : first + dim]


def deinterleave(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """Undo llama.cpp's order of Llama's q and k: row 2i + p of a head becomes row i + p head_dim / 2."""
    dim = config.head_dim
    for first in range(0, rows.shape[0], dim):
        for parity in range(2):
            yield first + parity * (dim // 2), rows[first + parity : first + dim : 2]


def split_experts(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """Yield the rows of each expert, unchanged; ``rows`` has them in a third axis, or after another."""
    if len(rows.shape) == 3:
        yield from ((e * rows.shape[1], rows[e]) for e in range(config.n_experts))
        return
    n = rows.shape[0] // config.n_experts
    for first in range(0, rows.shape[0], n):
        yield first, rows[first : first + n]


def split_part_of_experts(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """Reorder the gates, or the up projections, of all experts to gate and up of each expert in turn."""
    for first, view in split_experts(config, rows):
        yield 2 * first, view


def split_pairs_of_experts(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """Reorder the rows of each expert, of which gate and up alternate, to all gates and all up projections."""
    for first, view in split_experts(config, rows):
        yield first, view[::2]
        yield first + view.shape[0] // 2, view[1::2]


def group_heads(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """Reorder the value heads of "delta" as the config has them; stored head h reads key head h // (heads / keys)."""
    return _order_heads(config, rows, is_tiled=False)


def tile_heads(config: ModelConfig, rows: Any) -> Iterator[tuple[int, Any]]:
    """Reorder the value heads of "delta" as the config has them; stored head h reads key head h % keys."""
    return _order_heads(config, rows, is_tiled=True)


def _order_heads(config: ModelConfig, rows: Any, is_tiled: bool) -> Iterator[tuple[int, Any]]:
    """Yield queries and keys, if there are any, and each value head: of delta_dim rows, or of one."""
    n, n_heads, n_keys = rows.shape[0], config.n_delta_heads, config.n_delta_key_heads
    if is_tiled == config.delta_tiled or n_heads == n_keys:
        yield 0, rows
        return
    size = config.delta_dim if n >= config.delta_values else 1
    begin, inner, outer = n - n_heads * size, n_heads // n_keys, n_keys
    if is_tiled:
        inner, outer = outer, inner
    yield 0, rows[:begin]
    for head in range(n_heads):
        place = head % inner * outer + head // inner
        yield begin + place * size, rows[begin + head * size : begin + (head + 1) * size]


RowOrder = Callable[[ModelConfig, Any], Iterator[tuple[int, Any]]]
"""Yields (first row in the slot, view of a tensor's rows)."""


@dataclass(frozen=True)
class ModuleSpec:
    """A module of the source, with .weight and perhaps .bias, or with another parameter that is all of its entry.

    ``{i}`` in the names is the layer's number, ``{e}`` the expert's.

    Attributes:
        names: its names; the first that exists is used.
        slot: the slot of its weight.
        part: the rows of the slot that it fills: "q", "k" or "v" of qkv, "gate" or "up" of gate_up or experts_gate_up,
            "qkv", "z", "b" or "a" of delta_in; "": all.
        row_order: maps its rows to rows of the slot.
        column_order: maps its columns to columns of the slot. A source's own tensors are in the slot's order.
        transposed: the source stores (inputs, outputs).
        offset: constant that the model adds to the weight.
        negative_exp: the slot is -exp(weight).
        parameter: name of the weight in the module.
        expert_parts: names of an expert's modules, below its number, in models that have a module for each expert;
            their rows follow each other in the rows of the expert.
        axes: how the source stores a vector: "column", (n, 1); "by_group", a row for each key head.
        adapted: whether "all-linear" has adapters of it.
        of_mixtures: whether it is of layers with a mixture of experts, or of the others only; None: of all.
    """

    names: tuple[str, ...]
    slot: str
    part: str = ""
    row_order: RowOrder = keep_order
    transposed: bool = False
    offset: float = 0.0
    parameter: str = "weight"
    column_order: RowOrder = keep_order
    negative_exp: bool = False
    expert_parts: tuple[str, ...] = ()
    axes: str = ""
    of_mixtures: bool | None = None
    adapted: bool = True

    @property
    def place(self) -> tuple[str, str, bool | None]:
        """Slot, part and ``of_mixtures``: equal for the modules of two sources that fill the same rows."""
        return self.slot, self.part, self.of_mixtures

    @property
    def is_stored(self) -> bool:
        """Whether the slot has the values of the weight."""
        return not self.offset and not self.negative_exp

    @property
    def bias(self) -> str:
        """Name of the bias in the module."""
        return "bias" if self.parameter == "weight" else f"{self.parameter}_bias"

    def to_slot(self, values: np.ndarray) -> np.ndarray:
        """Return the slot's values for values of the weight; powers are computed in float64."""
        return -np.exp(values, dtype=np.float64).astype(values.dtype) if self.negative_exp else values + self.offset

    def from_slot(self, values: Any) -> Any:
        """Return the inverse of ``to_slot`` for NumPy's or torch's values; logarithms are computed in float64."""
        if not self.negative_exp:
            return values - self.offset
        if hasattr(values, "double"):
            return (-values.double()).log().to(values.dtype)
        return np.log(-values.astype(np.float64)).astype(values.dtype)


class WeightLocation(NamedTuple):
    """The slots and rows of one module of one layer; ``shape`` is (outputs, inputs).

    The rows of the matrices of ``n_experts`` experts follow each other; of other modules, it is 1.
    """

    names: tuple[str, ...]
    weight: str
    bias: str | None
    first_row: int
    shape: tuple[int, ...]
    module: ModuleSpec
    n_experts: int = 1

    @property
    def name(self) -> str:
        """Name of the module, or of its parameter if that is not the weight."""
        parameter = self.module.parameter
        return self.names[0] if parameter == "weight" else f"{self.names[0]}.{parameter}"

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of the matrix, or of an expert's."""
        return self.shape[0] // self.n_experts, *self.shape[1:]


class LoRA(NamedTuple):
    """A LoRA adapter of rows of a slot: W[first_row : first_row + n] += scaling b a, with a (r, k) and b (n, r).

    ``magnitude``: (n,), of DoRA (Liu et al. 2024): each row of the sum is scaled to this length; None: plain LoRA.
    """

    slot: str
    first_row: int
    a: Any
    b: Any
    scaling: float
    magnitude: Any = None

    def factors(self) -> dict[str, Any]:
        """Return A, B, and the magnitudes if there are any, by name."""
        arrays = {"a": self.a, "b": self.b, "magnitude": self.magnitude}
        return {name: array for name, array in arrays.items() if array is not None}


class Rows(NamedTuple):
    """Rows of a slot, or elements of a bias, in place of the model's.

    ``of_tokens``: whether they are rows of the embedding that a tied head has too.
    """

    slot: str
    rows: np.ndarray
    values: np.ndarray
    of_tokens: bool = False


class NormValues(NamedTuple):
    """The weight or bias of a norm in place of a slot's, in its order and with the model's offset."""

    slot: str
    values: np.ndarray


def factor_values(factor: Any) -> np.ndarray:
    """Return a factor of an adapter, NumPy or torch, as float32."""
    return np.asarray(factor.detach().float() if hasattr(factor, "detach") else factor, np.float32)


class ModelSource(NamedTuple):
    """A model and its weights.

    Attributes:
        config: the architecture.
        slices: yields the rows of every slot, each once; for a live module, their values at the time of the call.
        targets: the location of each module of the Hugging Face model by its name there, or by a parameter's if that
            is not the module's weight.
        adapters: LoRA adapters and trained norms, not part of the slices.
        short_position: see ``families.short_position``; the config's frequencies are resolved for its max_position.
        base: the packed weights that the model's modules share; the source has no slices then.
        path: absolute path of the folder or file; empty: the weights are in memory.
    """

    config: ModelConfig
    slices: Callable[[], Iterator[RowSlice]]
    targets: dict[str, WeightLocation]
    adapters: tuple[LoRA | NormValues | Rows, ...] = ()
    short_position: int | None = None
    base: PackedBase | None = None
    path: str = ""


def is_separable(adapter: LoRA | NormValues | Rows) -> bool:
    """Whether an engine may compute the adapter next to the weights: LoRA, DoRA, or a norm."""
    return isinstance(adapter, (LoRA, NormValues))


def untie_adapted(source: ModelSource) -> ModelSource:
    """Give the source a separate head if an adapter changes a tied embedding or head.

    Merged into the shared matrix, the adapter would change both.
    """
    ends = [each for each in source.adapters if each.slot in ("embedding", "head")]
    if not source.config.tied_head or all(isinstance(each, Rows) and each.of_tokens for each in ends):
        return source

    def slices() -> Iterator[RowSlice]:
        for row_slice in source.slices():
            yield row_slice
            if row_slice.slot == "embedding":
                yield row_slice._replace(slot="head")

    return source._replace(config=replace(source.config, tied_head=False), slices=slices)


def iter_locations(config: ModelConfig, modules: Sequence[ModuleSpec]) -> Iterator[WeightLocation]:
    """Yield the location of every module of every layer of a config."""
    slots = config.slots()
    for module in modules:
        for i in range(config.n_layers if "{i}" in module.slot else 1):
            if module.of_mixtures not in (None, config.is_moe(i)):
                continue
            slot = module.slot.replace("{i}", str(i))
            # A tied head has no separate weight, but it may have a bias or an adapter.
            weight = slot if slot in slots or slot == "head" else f"{slot}.weight"
            if weight not in slots and slot != "head":
                continue
            bias = f"{slot}.bias" if f"{slot}.bias" in slots else None
            names = tuple(name.replace("{i}", str(i)) for name in module.names)
            rows, *rest = slots.get(weight, slots["embedding"])
            first, count = part_rows(config, weight, module.part) if module.part else (0, rows)
            if not count:  # the layer reads another's keys and values
                continue
            if "{e}" not in names[0]:
                n_experts = config.n_experts if ".experts_" in slot else 1
                yield WeightLocation(names, weight, bias, first, (count, *rest), module, n_experts)
                continue
            per_expert, shape = rows // config.n_experts, (count // config.n_experts, *rest)
            for e in range(config.n_experts):
                own = tuple(name.replace("{e}", str(e)) for name in names)
                yield WeightLocation(own, weight, bias, first + e * per_expert, shape, module)


def unread_names(config: ModelConfig, modules: Sequence[ModuleSpec]) -> set[str]:
    """Return the names of keys' and values' modules in layers that read another's: files may have them."""
    readers = [i for i in range(config.n_layers) if config.kv_layer(i) != i]
    of_keys = [module for module in modules if module.part in ("k", "v") or module.slot.endswith(".k_norm")]
    return {name.replace("{i}", str(i)) for module in of_keys for name in module.names for i in readers}


def find_stored(
    config: ModelConfig, modules: Sequence[ModuleSpec], others: Sequence[ModuleSpec], exists: Callable[[str], bool]
) -> list[ModuleSpec]:
    """Return the modules; of slots that the source stores in modules of ``others``, these.

    Args:
        exists: whether the source has a tensor of this name.
    """
    stored = {
        location.module.slot
        for location in iter_locations(config, others)
        if any(exists(f"{name}.{location.module.parameter}") for name in location.names)
    }
    return [m for m in modules if m.slot not in stored] + [m for m in others if m.slot in stored]


def iter_slices(
    config: ModelConfig,
    modules: Sequence[ModuleSpec],
    get_tensor: Callable[[Sequence[str], str], StoredTensor],
    where: str,
) -> Iterator[RowSlice]:
    """Yield the slices of a model.

    Args:
        get_tensor: (names, "weight", "bias" or another parameter) -> the tensor of the first of these modules that
            exists; raises WhetValueError if there is none.
        where: prefix of error messages.

    Raises:
        WhetValueError: a tensor's shape or format does not match the config.
    """
    slots = config.slots()
    for location in iter_locations(config, modules):
        first_row, module = location.first_row, location.module
        for suffix, slot in ((module.parameter, location.weight), (module.bias, location.bias)):
            if slot is None or slot not in slots:
                continue
            shape = location.shape if slot == location.weight else location.shape[:1]
            stored = get_tensor(location.names, suffix)
            transposed = module.transposed and len(shape) == 2 and stored.format in FLOAT_FORMATS
            wanted = _by_experts(config, location, shape, transposed)
            stored = _as_matrix(stored, wanted)
            label = f"{where}: {location.names[0]}.{suffix}"
            if tuple(stored.shape) != wanted:
                raise WhetValueError(
                    f"{label} has shape {tuple(stored.shape)}, expected {wanted}. The config belongs to another "
                    f"model, or the file is damaged."
                )
            if len(shape) == 1 and stored.format not in FLOAT_FORMATS:
                raise WhetValueError(
                    f"{label} is {stored.format}, expected floats: norms, biases and sinks are not quantised."
                )
            if slot == location.weight and not module.is_stored:
                numbers = module.to_slot(slice_values(RowSlice(slot, first_row, stored.tensor, stored.format)))
                stored = StoredTensor(numbers, numbers.dtype.name, shape)
            rows = stored.tensor.swapaxes(-1, -2) if transposed else stored.tensor
            rows = rows.reshape(-1) if len(shape) == 1 else rows
            for first, view in module.row_order(config, rows):
                yield RowSlice(slot, first_row + first, view, stored.format)


def _as_matrix(stored: StoredTensor, expected: tuple[int, ...]) -> StoredTensor:
    """Return a convolution's taps without the axis of channels, a matrix of one row, or a vector of more axes; other
    tensors unchanged.
    """
    if len(expected) == 1 and len(stored.shape) == 2 and math.prod(stored.shape) == expected[0]:
        return StoredTensor(stored.tensor.reshape(-1), stored.format, expected)
    is_taps = len(stored.shape) == 3 and stored.shape[1] == 1 and len(expected) == 2
    if not is_taps and (1, *stored.shape) != expected:
        return stored
    tensor = stored.tensor.reshape(-1, stored.tensor.shape[-1])
    return StoredTensor(tensor, stored.format, (len(tensor), stored.shape[-1]))


def stored_shape(config: ModelConfig, location: WeightLocation, is_bias: bool = False) -> tuple[int, ...]:
    """Return the shape of a location's weight or bias in a file: of all experts, with a first axis for them."""
    if is_bias:
        return _by_experts(config, location, location.shape[:1])
    if location.module.axes in ("column", "by_group"):
        n_rows = location.shape[0] if location.module.axes == "column" else config.n_delta_key_heads
        return n_rows, location.shape[0] // n_rows
    return _by_experts(config, location, location.shape, location.module.transposed)


def _by_experts(
    config: ModelConfig, location: WeightLocation, shape: tuple[int, ...], transposed: bool = False
) -> tuple[int, ...]:
    if location.module.row_order in (split_experts, split_part_of_experts, split_pairs_of_experts):
        shape = (config.n_experts, shape[0] // config.n_experts, *shape[1:])
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def to_stored(config: ModelConfig, location: WeightLocation, values: Any) -> Any:
    """Return a weight's values, NumPy's or torch's, a row per output, as the module stores them."""
    values = values.reshape(_by_experts(config, location, location.shape))
    return values.swapaxes(-1, -2) if location.module.transposed else values


def slot_rows(config: ModelConfig, location: WeightLocation) -> np.ndarray:
    """Return (n,), the row of the slot of each row of a module's tensor."""
    return location.first_row + _places(config, location.module.row_order, location.shape[0])


def slot_outputs(config: ModelConfig, location: WeightLocation) -> np.ndarray | None:
    """Return (n,), the row of a module's matrix, or of an expert's, at each of its rows in the slot; None: the same."""
    if location.module.row_order in (keep_order, split_experts):
        return None
    return np.argsort(_places(config, location.module.row_order, location.shape[0])[: location.matrix_shape[0]])


def slot_columns(config: ModelConfig, location: WeightLocation) -> np.ndarray | None:
    """Return (k,), the column of the slot of each column of a module's matrix; None: the same columns."""
    if location.module.column_order is keep_order:
        return None
    columns = _places(config, location.module.column_order, location.shape[1])
    return None if (np.diff(columns) == 1).all() else columns


def _places(config: ModelConfig, order: RowOrder, n: int) -> np.ndarray:
    places = np.empty(n, np.int64)
    for first, view in order(config, np.arange(n)):
        places[view] = first + np.arange(len(view))
    return places


def find_location(targets: Mapping[str, WeightLocation], name: str, where: str) -> WeightLocation:
    """Return the location of a module by its name in the Hugging Face model.

    Raises:
        WhetValueError: there is no such module.
    """
    if name not in targets:
        raise WhetValueError(f"{where}: the model has no module {name!r}; it has {', '.join(sorted(targets)[:4])}, ...")
    return targets[name]


def with_expert_modules(targets: Mapping[str, WeightLocation]) -> dict[str, WeightLocation]:
    """Return ``targets`` and the matrices of each expert, by their names in models with a module for each expert."""
    found = dict(targets)
    for location in dict.fromkeys(targets.values()):
        (rows, *rest), parts = location.matrix_shape, location.module.expert_parts
        for i in range(location.n_experts * len(parts)):
            expert, part = divmod(i, len(parts))
            name, n = f"{location.names[0]}.{expert}.{parts[part]}", rows // len(parts)
            module = replace(location.module, row_order=keep_order, parameter="weight")
            found[name] = WeightLocation((name,), location.weight, None, location.first_row + i * n, (n, *rest), module)
    return found


def locate_lora(
    config: ModelConfig, location: WeightLocation, a: Any, b: Any, scaling: float, where: str, magnitude: Any = None
) -> list[LoRA]:
    """Map a module's adapter W += scaling b a to its slot; b's rows and a's columns are reordered like the weight's.

    Adapters of experts are as PEFT has them: a (n_experts r, k), b (n, r n_experts), in which the columns of an
    expert are n_experts apart.

    Raises:
        WhetValueError: the shapes do not match the module, or its weight is not a matrix.
    """
    n_experts, shape = location.n_experts, location.matrix_shape
    if len(shape) != 2 or a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != shape:
        raise WhetValueError(
            f"{where}: the adapter of {location.name} has shapes {tuple(a.shape)} and {tuple(b.shape)}, expected "
            f"(r, k) and (n, r) for a module of shape (n, k) = {shape}."
        )
    if a.shape[0] != b.shape[1] or a.shape[0] % n_experts:
        raise WhetValueError(
            f"{where}: the adapter of {location.name} has ranks {a.shape[0]} and {b.shape[1]}, expected the same"
            f"{f', a multiple of {n_experts}' if n_experts > 1 else ''}."
        )
    if (outputs := slot_outputs(config, location)) is not None:
        b = b[outputs]
    if (columns := slot_columns(config, location)) is not None:
        a = a[:, np.argsort(columns)]
    rank, first = a.shape[0] // n_experts, location.first_row
    if magnitude is not None:
        magnitude = factor_values(magnitude).reshape(-1)
        if n_experts > 1 or magnitude.shape != shape[:1] or location.weight == "embedding":
            raise WhetValueError(
                f"{where}: the magnitudes of {location.name} have shape {magnitude.shape}, expected {shape[:1]} of a "
                f"linear layer: DoRA of embeddings and experts is not supported."
            )
        magnitude = magnitude if outputs is None else magnitude[outputs]
        return [LoRA(location.weight, first, a, b, scaling, magnitude)]
    return [
        LoRA(location.weight, first + e * shape[0], a[e * rank : (e + 1) * rank], b[:, e::n_experts], scaling)
        for e in range(n_experts)
    ]


def locate_norm(
    config: ModelConfig, location: WeightLocation, vectors: Mapping[str, Any], where: str
) -> list[NormValues]:
    """Map the trained "weight" and "bias" of a norm's module to its slots.

    Raises:
        WhetValueError: the module is not a norm, or has other vectors or shapes.
    """
    slots = {name: slot for name, slot in (("weight", location.weight), ("bias", location.bias)) if slot is not None}
    shapes = {name: tuple(vector.shape) for name, vector in vectors.items()}
    if not is_norm(location) or shapes != dict.fromkeys(slots, location.shape):
        raise WhetValueError(
            f"{where}: the trained {location.names[0]} has {shapes}, expected {', '.join(slots)} of a norm of shape "
            f"{location.shape}."
        )
    found = []
    for name, slot in slots.items():
        rows, values = factor_values(vectors[name]), np.empty(location.shape, np.float32)
        for first, view in location.module.row_order(config, rows):
            values[first : first + len(view)] = view
        found.append(NormValues(slot, location.module.to_slot(values) if name == "weight" else values))
    return found


def locate_rows(
    config: ModelConfig, location: WeightLocation, parts: Mapping[str, np.ndarray], where: str, ids: Any = None
) -> list[Rows]:
    """Map the "weight" and "bias" of a module with a matrix to its slots; with ``ids``, the rows of these tokens.

    Raises:
        WhetValueError: the module has others, or other shapes.
    """
    rows, found = slot_rows(config, location), []
    shape = location.shape if ids is None else (len(ids), location.shape[1])
    shapes = {"weight": (location.weight, shape)} | ({"bias": (location.bias, shape[:1])} if location.bias else {})
    for name, values in parts.items():
        slot, expected = shapes.get(name, (None, ()))
        values = values.T if location.module.transposed and values.ndim == 2 else values
        if slot is None or values.shape != expected or location.module.parameter != "weight":
            raise WhetValueError(
                f"{where}: the trained {location.names[0]}.{name} has shape {values.shape}, expected {expected}."
            )
        if (columns := slot_columns(config, location)) is not None and values.ndim == 2:
            values = values[:, np.argsort(columns)]
        found.append(Rows(slot, rows if ids is None else rows[np.asarray(ids, np.int64)], values, ids is not None))
    if ids is not None and config.tied_head:
        found += [each._replace(slot="head") for each in found]  # of a head that another change unties
    return found


def is_norm(location: WeightLocation) -> bool:
    """Whether a module is a norm."""
    return len(location.shape) == 1 and location.module.parameter == "weight"


PARTS = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "experts_gate_up": ("gate", "up"),
    "delta_in": ("qkv", "z", "b", "a"),
}
"""The parts of matrices that consist of several, in the order of their rows."""


def part_rows(config: ModelConfig, slot: str, part: str) -> tuple[int, int]:
    """Return the first row of a part in its slot, and the number of rows: of experts, in all of them."""
    *_, layer, kind = ("0", *slot.split("."))
    if kind == "experts_gate_up":
        return (config.expert_dim if part == "up" else 0), config.n_experts * config.expert_dim
    sizes = config.part_sizes(int(layer))
    sizes |= dict.fromkeys(("gate", "up"), config.mlp_dim(int(layer)))
    sizes |= {"qkv": config.delta_channels, "z": config.delta_values, **dict.fromkeys("ba", config.n_delta_heads)}
    parts = PARTS[kind]
    return sum(sizes[each] for each in parts[: parts.index(part)]), sizes[part]
