"""The table of weight formats, and the choice of formats for each matrix of a model.

Names, GGUF's names and numbers, and block sizes come from the core's tables (cpp/engine/formats.h, stored_rows.h); this
one adds the settings. Every list of formats derives from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from whet import _core
from whet.errors import WhetValueError, check_choice
from whet.models.architecture import TABLE_SLOT
from whet.ops.quant import CORE_TABLE

if TYPE_CHECKING:
    from whet.models.architecture import ModelConfig
    from whet.models.slots import ModelSource, WeightLocation

Weights = Literal[
    "float32",
    "bf16",
    "int8",
    "int4",
    "q8_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q4_k",
    "q5_k",
    "q6_k",
    "mxfp4",
    "q4_k_m",
    "q5_k_m",
]
"""``FORMATS``, for type checkers and the command line."""
FileType = Literal[
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "mxfp4_moe"
]
"""``FILE_TYPES``, for type checkers and the command line."""
PAGE_TOKENS = 64
"""Tokens of a page of the KV cache, the core's kPageTokens."""


class Format(NamedTuple):
    """A storage format of tensors; ``CORE_TABLE`` has the formats that the core packs.

    Attributes:
        name: the name in ``RowSlice`` and in the core.
        gguf_type: GGUF's number of the type; None: not read from GGUF files.
        gguf_name: GGUF's name of the type; for floats also safetensors'.
        block_length: numbers of a block; 1: plain numbers.
        block_bytes: bytes of a block.
        packed_as: the format in which the engine packs it: the same, or one that holds the same integers.
        alias: the name in settings, if different.
        embedding_format: format of the embedding and the head of a model in this format. Default: the same.
        bound: error bound of a weight in ``packed_as``, if conversion is lossy (cpp/engine/quantize.h).
        next: fallback for a matrix whose row length is not a multiple of the block; for K-quants as in llama.cpp.
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
        """Name in settings."""
        return self.alias or self.name

    @property
    def is_float(self) -> bool:
        return self.name in _DTYPES

    @property
    def dtype(self) -> str:
        """NumPy dtype of the elements of a stored row: numbers, the bits of bfloat16, bytes of blocks."""
        return _DTYPES.get(self.name, "|u1")


class Mixture(NamedTuple):
    """A file type of llama.cpp: the formats of a model's matrices. Others are float32: ``is_wide``.

    Attributes:
        file_type: llama.cpp's number, ``general.file_type``.
        base: format of most matrices.
        high_bits: format of the value and down projections in layers that get more bits.
        head: format of the head, or of a tied embedding.
        use_more_bits: more bits in the layers chosen by llama.cpp's ``use_more_bits``; else in the first layers.
        experts: format of the experts' matrices; "": as other matrices.

    Source: llama.cpp, src/llama-quant.cpp.
    """

    file_type: int
    base: str
    high_bits: str
    head: str
    use_more_bits: bool = True
    experts: str = ""

    @classmethod
    def make(
        cls, file_type: int, base: str, high_bits: str = "", head: str = "", use_more_bits: bool = True
    ) -> Mixture:
        """Make a mixture. Default of the other formats: ``base``."""
        return cls(file_type, base, high_bits or base, head or base, use_more_bits)

    def end_format(self, slot: str, tied_head: bool) -> str:
        """Return the format of the embedding or the head."""
        return self.head if slot == "head" or tied_head else self.base

    def layer_format(self, matrix: str, i: int, n_layers: int, n_experts: int = 0) -> str:
        """Return the format of a matrix of layer i: "values" (or q, k and v fused), "keys", "o", "down", or another."""
        if n_experts == 8 and not TABLE[self.base].is_float:  # llama-quantize's rule for Mixtral 8x7B
            if matrix in ("keys", "values"):
                return "q8_0"
            if matrix == "o" and self.base == "q4_k":
                return "q5_k"
        if matrix not in ("values", "down"):
            return self.base
        if self.use_more_bits:
            gets_more = i < n_layers // 8 or i >= 7 * n_layers // 8 or (i - n_layers // 8) % 3 == 2
        else:
            gets_more = i < (4 if matrix == "values" else n_layers // 8)
        return self.high_bits if gets_more else self.base


class FormatSpan(NamedTuple):
    """Consecutive rows of a matrix that are packed in one format of the core."""

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
    "mxfp4": {"embedding_format": "q8_0", "next": "q8_0"},
    "q2_k": {"bound": "within 1/254 of the largest of 32 weights and 2^-11 of each"},
    "iq4_xs": {"bound": "within 2^-11 of each weight"},
}
_ROWS = [*_core.stored_types(), ("int8",)]
TABLE = {row[0]: Format(*row, **_SETTINGS.get(row[0], {})) for row in _ROWS}
if wrong := [n for n, c in CORE_TABLE.items() if n not in TABLE or TABLE[n][3:5] != (c.block_length, c.block_bytes)]:
    raise ImportError(f"whet.models.formats: the tables of the core disagree on {', '.join(wrong)}. Rebuild it.")
FILE_TYPES = {
    "f32": Mixture.make(0, "float32"),
    "f16": Mixture.make(1, "float16"),
    "bf16": Mixture.make(32, "bfloat16"),
    "q8_0": Mixture.make(7, "q8_0"),
    "q4_0": Mixture.make(2, "q4_0", head="q6_k"),
    "q4_1": Mixture.make(3, "q4_1", head="q6_k"),
    "q5_0": Mixture.make(8, "q5_0", head="q6_k"),
    "q4_k_s": Mixture.make(14, "q4_k", "q5_k", "q6_k", use_more_bits=False),
    "q4_k_m": Mixture.make(15, "q4_k", "q6_k", "q6_k"),
    "q5_k_s": Mixture.make(16, "q5_k", head="q6_k"),
    "q5_k_m": Mixture.make(17, "q5_k", "q6_k", "q6_k"),
    "q6_k": Mixture.make(18, "q6_k"),
    "mxfp4_moe": Mixture.make(38, "q8_0")._replace(experts="mxfp4"),
}
"""Mixtures of the GGUF files that Whet writes, by their names in llama-quantize."""
MIXTURES = {name: FILE_TYPES[name] for name in ("q4_k_m", "q5_k_m")}
"""The mixtures that are valid as ``weights``."""
FLOAT_FORMATS = tuple(name for name, format in TABLE.items() if format.is_float)
FORMATS = (*(TABLE[name].display_name for name in CORE_TABLE), *MIXTURES)
"""Values of ``weights``, by their names in the documentation."""
_ALIASES = {format.alias: name for name, format in TABLE.items() if format.alias}


def choose_formats(
    source: ModelSource, weights: str | None, embedding: str | None, head: str | None, where: str
) -> dict[str, tuple[FormatSpan, ...]]:
    """Return the formats of every matrix by slot, in the order of its rows; see ``Engine`` for the rules.

    Raises:
        WhetValueError: an unknown format.
    """
    config = source.config
    mixture = MIXTURES.get(weights or "")
    base = mixture.base if mixture else core_format("bf16" if weights is None else weights, "weights", where)
    embedding_format = TABLE[base].embedding_format or base
    stored = _stored_spans(source, base) if weights is None else {}
    chosen = {
        "embedding": core_format(embedding, "embedding", where) if embedding is not None else None,
        "head": core_format(head, "head", where) if head is not None else None,
    }
    if config.tied_head:
        chosen["embedding"] = chosen["head"] or chosen["embedding"]
    formats = {}
    for slot, shape in config.slots().items():
        if len(shape) != 2 or slot == TABLE_SLOT:
            continue
        if format := "float32" if is_wide(slot) else chosen.get(slot):
            spans = [FormatSpan(shape[0], format)]
        elif mixture:
            spans = _mixed_spans(mixture, source, slot, shape[0])
        else:
            default = embedding_format if slot in ("embedding", "head") else base
            spans = stored.get(slot, [FormatSpan(shape[0], default)])
        formats[slot] = _merge(FormatSpan(n, _fit(format, shape[1])) for n, format in spans)
    return formats


def check_fits(source: ModelSource, weights: str, where: str) -> None:
    """Reject a format whose blocks do not divide the rows of any matrix in a model's layers.

    Raises:
        WhetValueError: naming the formats that would replace it.
    """
    mixture = MIXTURES.get(weights)
    wanted = {mixture.base, mixture.high_bits} if mixture else {core_format(weights, "base", where)}
    formats = choose_formats(source, weights, None, None, where)
    layers = {slot: spans for slot, spans in formats.items() if slot.startswith("layers.")}
    if not any(span.format in wanted for spans in layers.values() for span in spans):
        length = TABLE[min(wanted)].block_length
        rows = sorted({source.config.slots()[slot][1] for slot in layers})
        raise WhetValueError(
            f"{where}: base is {weights!r}, whose blocks have {length} numbers, and the rows of the model's matrices "
            f"have {' and '.join(map(str, rows))}: no matrix would use it. Pass "
            f"{summarise(layers).replace(', ', ' or ')}."
        )


def is_quantised(source: ModelSource) -> bool:
    """Whether a model is stored or packed quantised."""
    if source.base is not None:
        return source.base.is_quantised
    formats = choose_formats(source, None, None, None, "is_quantised")
    return not all(TABLE[span.format].is_float for spans in formats.values() for span in spans)


def kv_format(formats: Mapping[str, tuple[FormatSpan, ...]]) -> str:
    """Return the format of keys and values: float32 with float32 weights, else bfloat16."""
    spans = next(spans for slot, spans in formats.items() if slot.endswith((".o", ".conv_out", ".delta_out")))
    return "float32" if {span.format for span in spans} == {"float32"} else "bfloat16"


KvDtype = Literal["float32", "bfloat16", "q8"]
KV_DTYPES = get_args(KvDtype)
"""Formats of keys and values; q8 is described in cpp/kernels/cached_attention_int8.h."""


def check_kv_dtype(where: str, value: str | None, default: str) -> str:
    """Return a format of keys and values; None: ``default``.

    Raises:
        WhetValueError: an unknown format.
    """
    if value is not None:
        check_choice(where, "kv_dtype", value, KvDtype)
    return value or default


def describe_spans(spans: Iterable[FormatSpan]) -> str:
    """Describe the formats of a matrix: "q4_k", or "q4_k, q6_k"."""
    return ", ".join(dict.fromkeys(span.format for span in spans))


def summarise(formats: Mapping[str, tuple[FormatSpan, ...]]) -> str:
    """List the formats of a model's matrices by their names in settings, each once: "q4_k, q8_0"."""
    return ", ".join(dict.fromkeys(TABLE[span.format].display_name for spans in formats.values() for span in spans))


def core_format(name: str, argument: str, where: str) -> str:
    """Return the core's name of a format.

    Raises:
        WhetValueError: an unknown format.
    """
    format = _ALIASES.get(name, name)
    if format not in CORE_TABLE:
        known = ", ".join([*CORE_TABLE, *_ALIASES, *(MIXTURES if argument == "weights" else ())])
        raise WhetValueError(f"{where}: {argument} is {name!r}, expected one of {known}.")
    return format


def display_name(weights: str, where: str) -> str:
    """Return the name in ``FORMATS`` of any name of a value of ``weights``: "bf16" for "bfloat16".

    Raises:
        WhetValueError: an unknown format.
    """
    return weights if weights in MIXTURES else TABLE[core_format(weights, "weights", where)].display_name


def file_format(mixture: Mixture, config: ModelConfig, location: WeightLocation) -> str:
    """Return the format of a tensor of a GGUF file; float16, as in llama-quantize, if no blocks divide its rows."""
    if len(location.shape) == 1 or is_wide(location.weight):
        return "float32"
    _, number, name = location.weight.split(".") if "." in location.weight else ("", "", location.weight)
    if name == "layer_inputs":  # llama-quantize does not quantise it
        format = mixture.base if TABLE[mixture.base].is_float else "bfloat16"
    elif not number:
        format = mixture.end_format(name, config.tied_head)
    else:
        part = location.module.part
        is_value = (name == "qkv" and part in ("", "v")) or (name == "delta_in" and part == "qkv")
        matrix = "values" if is_value else "keys" if name == "qkv" and part == "k" else name
        format = _layer_format(mixture, config, matrix, int(number))
    format = _fit(format, location.shape[-1])
    return format if TABLE[format].gguf_type is not None else "float16"


def is_wide(slot: str) -> bool:
    """Whether a matrix is float32 in every format: learned positions, the taps of convolutions, and routers."""
    return slot == "positions" or slot.endswith((".conv", "router"))


def _layer_format(mixture: Mixture, config: ModelConfig, matrix: str, layer: int) -> str:
    if matrix.startswith("experts_") and mixture.experts:
        return mixture.experts
    matrix = matrix.removeprefix("experts_")
    return mixture.layer_format(matrix, *_place(config, matrix, layer), config.n_experts)


def _place(config: ModelConfig, matrix: str, layer: int) -> tuple[int, int]:
    """Return the index of a matrix's layer among the layers that have this matrix, and their number."""
    if matrix != "values":
        return layer, config.n_layers
    has_values = [config.mixer(i) != "conv" and config.kv_layer(i) == i for i in range(config.n_layers)]
    return sum(has_values[:layer]), sum(has_values)


def _fit(format: str, k: int) -> str:
    """Return the format, or the next fallback whose blocks divide rows of k."""
    while k % TABLE[format].block_length:
        format = TABLE[format].next
    return format


def _merge(spans: Iterable[FormatSpan]) -> tuple[FormatSpan, ...]:
    """Merge adjacent spans of one format."""
    merged: list[FormatSpan] = []
    for span in spans:
        if merged and merged[-1].format == span.format:
            span = FormatSpan(merged.pop().n_rows + span.n_rows, span.format)
        merged.append(span)
    return tuple(merged)


def _stored_spans(source: ModelSource, base: str) -> dict[str, list[FormatSpan]]:
    """Return the spans of slots with quantised rows; their floats become ``base``."""
    found: dict[str, list[tuple[int, FormatSpan]]] = {}
    for row_slice in source.slices():
        format = TABLE[row_slice.format]
        span = FormatSpan(len(row_slice.tensor), base if format.is_float else format.packed_as)
        found.setdefault(row_slice.slot, []).append((row_slice.first_row, span))
    spans = {slot: [span for _, span in sorted(rows)] for slot, rows in found.items()}
    return {slot: rows for slot, rows in spans.items() if any(format != base for _, format in rows)}


def _mixed_spans(mixture: Mixture, source: ModelSource, slot: str, n_rows: int) -> list[FormatSpan]:
    """Return the spans of a matrix in a mixture, before fallbacks."""
    config = source.config
    if slot in ("embedding", "head"):
        return [FormatSpan(n_rows, mixture.end_format(slot, config.tied_head))]
    if slot == "layer_inputs":
        return [FormatSpan(n_rows, "bfloat16")]
    _, number, name = slot.split(".")
    matrix = "values" if name in ("qkv", "delta_in") else name
    format = _layer_format(mixture, config, matrix, int(number))
    if name == "delta_in":
        return [FormatSpan(config.delta_channels, format), FormatSpan(n_rows - config.delta_channels, mixture.base)]
    if name != "qkv":
        return [FormatSpan(n_rows, format)]
    if any(location.weight == slot and not location.module.part for location in source.targets.values()):
        return [FormatSpan(n_rows, format)]  # the model stores q, k and v as one matrix
    n_values = config.part_sizes(int(number))["v"]
    if not n_values:
        return [FormatSpan(n_rows, mixture.base)]
    keys = FormatSpan(n_values, _layer_format(mixture, config, "keys", int(number)))
    return [FormatSpan(n_rows - 2 * n_values, mixture.base), keys, FormatSpan(n_values, format)]
