"""The formats of weights, a row each, and the choice of one for each matrix of a model, or for parts of it.

The core's own tables (cpp/engine/formats.h, stored_rows.h) have the names, GGUF's names and numbers, and the sizes of
blocks; this one adds what settings say of them. Every list of formats derives from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from whet import _core
from whet.errors import WhetValueError
from whet.ops.quant import CORE_TABLE

if TYPE_CHECKING:
    from whet.models.architecture import ModelConfig
    from whet.models.slots import ModelSource, WeightLocation

Weights = Literal[
    "float32", "bf16", "int8", "int4", "q8_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "q4_k_m", "q5_k_m"
]
"""``FORMATS``, for type checkers and the command line."""
FileType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"]
"""``FILE_TYPES``, for type checkers and the command line."""
PAGE_TOKENS = 64
"""Tokens of a page of the KV cache: the core's kPageTokens."""


class Format(NamedTuple):
    """A format that tensors are stored in; the core packs those that its own table has too.

    Attributes:
        name: that of pieces, and of the core.
        gguf_type: GGUF's number of the type; None: GGUF files in it are not read.
        gguf_name: GGUF's name of the type; of floats also safetensors'.
        block_length: numbers of a block; 1: plain numbers.
        block_bytes: bytes of a block.
        packed_as: the format that the engine takes it as: itself, or one that holds the same integers.
        alias: its name in settings, where that is another.
        embedding_format: format of the embedding and the head of a model in this format. Default: the same.
        bound: the error of a weight in ``packed_as`` where that holds other numbers (cpp/engine/quantize.h).
        next: the format of a matrix whose rows its blocks do not divide; for K-quants that of llama.cpp.
    """

    name: str
    gguf_name: str = ""
    gguf_type: int | None = None
    block_length: int = 1
    block_bytes: int = 1
    packed_as: str = ""
    alias: str | None = None
    embedding_format: str | None = None
    next: str = "int8"
    bound: str = ""

    @property
    def display_name(self) -> str:
        """The name in settings."""
        return self.alias or self.name

    @property
    def is_float(self) -> bool:
        return self.name in _DTYPES

    @property
    def dtype(self) -> str:
        """NumPy's, of the elements that a stored row has: numbers, the bits of bfloat16, bytes of blocks."""
        return _DTYPES.get(self.name, "|u1")


class Mixture(NamedTuple):
    """A file type of llama.cpp: the formats of a model's matrices. Norms, biases and positions are float32.

    Attributes:
        file_type: llama.cpp's number, ``general.file_type``.
        base: the format of most matrices.
        more: that of attention's values and the MLP's way down in the layers that need it.
        head: that of the head, or of the embedding where it is the head.
        is_spread: whether ``more`` is for layers all over the model; else for the first.

    Source: llama.cpp, src/llama-quant.cpp.
    """

    file_type: int
    base: str
    more: str
    head: str
    is_spread: bool = True

    @classmethod
    def of(cls, file_type: int, base: str, more: str = "", head: str = "", is_spread: bool = True) -> Mixture:
        """A mixture whose formats are ``base`` where they are not given."""
        return cls(file_type, base, more or base, head or base, is_spread)

    def end_format(self, slot: str, tied_head: bool) -> str:
        """The format of the embedding or the head."""
        return self.head if slot == "head" or tied_head else self.base

    def layer_format(self, matrix: str, i: int, n_layers: int) -> str:
        """The format of a matrix of layer i: "values" (or q, k and v in one), "down", or another."""
        if matrix not in ("values", "down"):
            return self.base
        if self.is_spread:
            needs_more = i < n_layers // 8 or i >= 7 * n_layers // 8 or (i - n_layers // 8) % 3 == 2
        else:
            needs_more = i < (4 if matrix == "values" else n_layers // 8)
        return self.more if needs_more else self.base


class FormatSpan(NamedTuple):
    """Rows of a matrix, and the core's format that they are packed in."""

    n_rows: int
    format: str


_DTYPES = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2", "float64": "<f8"}
_SETTINGS: dict[str, dict[str, str]] = {
    "bfloat16": {"alias": "bf16"},
    "q4_0": {"alias": "int4", "embedding_format": "q8_0"},
    "q4_1": {"embedding_format": "q8_0"},
    "q5_0": {"embedding_format": "q8_0"},
    "q5_1": {"embedding_format": "q8_0"},
    "q4_k": {"embedding_format": "q8_0", "next": "q5_0"},
    "q5_k": {"embedding_format": "q8_0", "next": "q5_1"},
    "q6_k": {"next": "q8_0"},
    "q2_k": {"bound": "within 1/254 of the largest of 32 weights and 2^-11 of each"},
    "iq4_xs": {"bound": "within 2^-11 of each weight"},
}
_ROWS = [*_core.stored_types(), ("int8",)]
TABLE = {row[0]: Format(*row, **_SETTINGS.get(row[0], {})) for row in _ROWS}
if wrong := [n for n, c in CORE_TABLE.items() if n not in TABLE or TABLE[n][3:5] != (c.block_length, c.block_bytes)]:
    raise ImportError(f"whet.models.formats: the core's tables do not agree on {', '.join(wrong)}. Build it again.")
FILE_TYPES = {
    "f32": Mixture.of(0, "float32"),
    "f16": Mixture.of(1, "float16"),
    "bf16": Mixture.of(32, "bfloat16"),
    "q8_0": Mixture.of(7, "q8_0"),
    "q4_0": Mixture.of(2, "q4_0", head="q6_k"),
    "q4_1": Mixture.of(3, "q4_1", head="q6_k"),
    "q5_0": Mixture.of(8, "q5_0", head="q6_k"),
    "q4_k_s": Mixture.of(14, "q4_k", "q5_k", "q6_k", is_spread=False),
    "q4_k_m": Mixture.of(15, "q4_k", "q6_k", "q6_k"),
    "q5_k_s": Mixture.of(16, "q5_k", head="q6_k"),
    "q5_k_m": Mixture.of(17, "q5_k", "q6_k", "q6_k"),
    "q6_k": Mixture.of(18, "q6_k"),
}
"""The mixtures that GGUF files are written in, by the names that llama-quantize has."""
MIXTURES = {name: FILE_TYPES[name] for name in ("q4_k_m", "q5_k_m")}
"""Of these the values of ``weights`` that are no format."""
FLOAT_FORMATS = tuple(name for name, format in TABLE.items() if format.is_float)
FORMATS = (*(TABLE[name].display_name for name in CORE_TABLE), *MIXTURES)
"""Values of ``weights``, by the names that documents use."""
_ALIASES = {format.alias: name for name, format in TABLE.items() if format.alias}


def choose_formats(
    source: ModelSource, weights: str | None, embedding: str | None, head: str | None, where: str
) -> dict[str, tuple[FormatSpan, ...]]:
    """Slot -> formats of every matrix, from its first row on; see ``Engine`` for the rules.

    Raises:
        WhetValueError: a format that there is not.
    """
    config = source.config
    mixture = MIXTURES.get(weights or "")
    base = mixture.base if mixture else core_format("bf16" if weights is None else weights, "weights", where)
    embedding_format = TABLE[base].embedding_format or base
    stored = _stored_parts(source, base) if weights is None else {}
    own = {
        "embedding": core_format(embedding, "embedding", where) if embedding is not None else None,
        "head": core_format(head, "head", where) if head is not None else None,
        "positions": "float32",
    }
    if config.tied_head:
        own["embedding"] = own["head"] or own["embedding"]
    formats = {}
    for slot, shape in config.slots().items():
        if len(shape) != 2:
            continue
        if format := own.get(slot):
            parts = [FormatSpan(shape[0], format)]
        elif mixture:
            parts = _mixed_parts(mixture, source, slot, shape[0])
        else:
            default = embedding_format if slot in ("embedding", "head") else base
            parts = stored.get(slot, [FormatSpan(shape[0], default)])
        formats[slot] = _merge(FormatSpan(n, _fit(format, shape[1])) for n, format in parts)
    return formats


def check_fits(source: ModelSource, weights: str, where: str) -> None:
    """Refuse a format whose blocks divide the rows of no matrix of a model's layers.

    Raises:
        WhetValueError: naming the formats that would be taken in its place.
    """
    mixture = MIXTURES.get(weights)
    wanted = {mixture.base, mixture.more} if mixture else {core_format(weights, "base", where)}
    formats = choose_formats(source, weights, None, None, where)
    layers = {slot: parts for slot, parts in formats.items() if slot.startswith("layers.")}
    if not any(part.format in wanted for parts in layers.values() for part in parts):
        length = TABLE[min(wanted)].block_length
        rows = sorted({source.config.slots()[slot][1] for slot in layers})
        raise WhetValueError(
            f"{where}: base is {weights!r}, whose blocks have {length} numbers, and the rows of the model's matrices "
            f"have {' and '.join(map(str, rows))}: none would be in it. Pass {summarise(layers).replace(', ', ' or ')}."
        )


def is_quantised(source: ModelSource) -> bool:
    """Whether a model is stored, or packed, in blocks of integers."""
    if source.base is not None:
        return source.base.is_quantised
    formats = choose_formats(source, None, None, None, "is_quantised")
    return not all(TABLE[part.format].is_float for parts in formats.values() for part in parts)


def kv_format(formats: Mapping[str, tuple[FormatSpan, ...]]) -> str:
    """The format of keys and values: float32 with float32 weights, else bfloat16."""
    return "float32" if {part.format for part in formats["layers.0.o"]} == {"float32"} else "bfloat16"


def describe_spans(parts: Iterable[FormatSpan]) -> str:
    """The formats of a matrix: "q4_k", or "q4_k, q6_k" of one in several."""
    return ", ".join(dict.fromkeys(part.format for part in parts))


def summarise(formats: Mapping[str, tuple[FormatSpan, ...]]) -> str:
    """The formats of a model's matrices by their names in settings, each once: "q4_k, q8_0"."""
    return ", ".join(dict.fromkeys(TABLE[part.format].display_name for parts in formats.values() for part in parts))


def core_format(name: str, argument: str, where: str) -> str:
    """The core's name of a format.

    Raises:
        WhetValueError: there is no such format.
    """
    format = _ALIASES.get(name, name)
    if format not in CORE_TABLE:
        known = ", ".join([*CORE_TABLE, *_ALIASES, *(MIXTURES if argument == "weights" else ())])
        raise WhetValueError(f"{where}: {argument} is {name!r}, expected one of {known}.")
    return format


def display_name(weights: str, where: str) -> str:
    """The name in ``FORMATS`` of a value of ``weights`` by any of its names: "bf16" for "bfloat16".

    Raises:
        WhetValueError: there is no such format.
    """
    return weights if weights in MIXTURES else TABLE[core_format(weights, "weights", where)].display_name


def file_format(mixture: Mixture, config: ModelConfig, location: WeightLocation) -> str:
    """The format of a tensor of a GGUF file; of rows that no blocks divide float16, as llama-quantize has it."""
    if len(location.shape) == 1 or location.weight == "positions":
        return "float32"
    _, number, name = location.weight.split(".") if "." in location.weight else ("", "", location.weight)
    if not number:
        format = mixture.end_format(name, config.tied_head)
    else:
        matrix = "values" if name == "qkv" and location.module.part in ("", "v") else name
        format = mixture.layer_format(matrix, int(number), config.n_layers)
    format = _fit(format, location.shape[-1])
    return format if TABLE[format].gguf_type is not None else "float16"


def _fit(format: str, k: int) -> str:
    """The format, or the next one whose blocks divide rows of k."""
    while k % TABLE[format].block_length:
        format = TABLE[format].next
    return format


def _merge(parts: Iterable[FormatSpan]) -> tuple[FormatSpan, ...]:
    """Neighbours of one format become one part."""
    merged: list[FormatSpan] = []
    for part in parts:
        if merged and merged[-1].format == part.format:
            part = FormatSpan(merged.pop().n_rows + part.n_rows, part.format)
        merged.append(part)
    return tuple(merged)


def _stored_parts(source: ModelSource, base: str) -> dict[str, list[FormatSpan]]:
    """The parts of slots of which some are stored quantised; their floats are taken as ``base``."""
    found: dict[str, list[tuple[int, FormatSpan]]] = {}
    for row_slice in source.slices():
        format = TABLE[row_slice.format]
        part = FormatSpan(len(row_slice.tensor), base if format.is_float else format.packed_as)
        found.setdefault(row_slice.slot, []).append((row_slice.first_row, part))
    parts = {slot: [part for _, part in sorted(rows)] for slot, rows in found.items()}
    return {slot: rows for slot, rows in parts.items() if any(format != base for _, format in rows)}


def _mixed_parts(mixture: Mixture, source: ModelSource, slot: str, n_rows: int) -> list[FormatSpan]:
    """The parts of a matrix in a mixture, before it is seen whether blocks divide its rows."""
    config = source.config
    if slot in ("embedding", "head"):
        return [FormatSpan(n_rows, mixture.end_format(slot, config.tied_head))]
    _, number, name = slot.split(".")
    format = mixture.layer_format("values" if name == "qkv" else name, int(number), config.n_layers)
    if name != "qkv":
        return [FormatSpan(n_rows, format)]
    if any(location.weight == slot and not location.module.part for location in source.targets.values()):
        return [FormatSpan(n_rows, format)]  # the model stores q, k and v as one matrix
    n_values = config.n_kv_heads * config.head_dim
    return [FormatSpan(n_rows - n_values, mixture.base), FormatSpan(n_values, format)]
