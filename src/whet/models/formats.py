"""The formats of weights, a row each, and the choice of one for each matrix of a model.

The core's own table (cpp/engine/formats.cpp) has the sizes of blocks and the order of its formats; this one adds what a
model's files and settings say of them. Every list of formats derives from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from whet.errors import WhetValueError
from whet.ops.quant import CORE_TABLE

if TYPE_CHECKING:
    from whet.models.slots import Source

Weights = Literal["float32", "bf16", "int8", "int4", "q8_0", "q4_k"]
"""``FORMATS``, for type checkers and the command line."""
PAGE_TOKENS = 64
"""Tokens of a page of the KV cache: the core's kPageTokens."""


class Format(NamedTuple):
    """A format that tensors are stored in; the core packs those that its own table has too.

    Attributes:
        name: that of pieces, and of the core.
        dtype: NumPy's, of the elements that a stored row has: numbers, the bits of bfloat16, bytes of blocks.
        gguf_type: GGUF's number of the type; None: GGUF files in it are not read.
        gguf_name: GGUF's name of the type; of floats also safetensors'.
        alias: its name in settings, where that is another.
        outer: the format of the embedding and the head of a model in this one; None: the same.
        next: the format of a matrix whose rows its blocks do not divide.
    """

    name: str
    dtype: str
    gguf_type: int | None = None
    gguf_name: str = ""
    alias: str | None = None
    outer: str | None = None
    next: str = "int8"

    @property
    def usual_name(self) -> str:
        """The name in settings."""
        return self.alias or self.name

    @property
    def is_float(self) -> bool:
        return self.name not in CORE_TABLE or not CORE_TABLE[self.name].is_quantised

    @property
    def block_length(self) -> int:
        """Numbers of a block; 1: plain numbers."""
        return CORE_TABLE[self.name].block_length if self.name in CORE_TABLE else 1

    @property
    def block_bytes(self) -> int:
        return CORE_TABLE[self.name].block_bytes if self.name in CORE_TABLE else np.dtype(self.dtype).itemsize


TABLE = {
    format.name: format
    for format in (
        Format("float32", "<f4", 0, "F32"),
        Format("bfloat16", "<u2", 30, "BF16", alias="bf16"),
        Format("float16", "<f2", 1, "F16"),
        Format("float64", "<f8", None, "F64"),
        Format("int8", "|u1"),
        Format("q8_0", "|u1", 8, "Q8_0"),
        Format("q4_0", "|u1", 2, "Q4_0", alias="int4", outer="q8_0"),
        Format("q4_k", "|u1", 12, "Q4_K", outer="q8_0", next="q4_0"),
    )
}
if unknown := CORE_TABLE.keys() - TABLE.keys():
    raise ImportError(f"whet.models.formats: no row for the core's format {', '.join(unknown)}. Build the core again.")
FLOAT_FORMATS = tuple(name for name, format in TABLE.items() if format.is_float)
FORMATS = tuple(TABLE[name].usual_name for name in CORE_TABLE)
"""Values of ``weights``, by the names that documents use."""
_ALIASES = {format.alias: name for name, format in TABLE.items() if format.alias}


def choose_formats(
    source: Source, weights: str | None, embedding: str | None, head: str | None, where: str
) -> dict[str, str]:
    """Slot -> format of every matrix; see ``Engine`` for the rules.

    Raises:
        WhetValueError: a format that there is not.
    """
    stored = _stored_formats(source) if weights is None else {}
    base = core_format("bf16" if weights is None else weights, "weights", where)
    outer = TABLE[base].outer or base
    own = {
        "embedding": core_format(embedding, "embedding", where) if embedding is not None else None,
        "head": core_format(head, "head", where) if head is not None else None,
        "positions": "float32",
    }
    if source.config.tied_head:
        own["embedding"] = own["head"] or own["embedding"]
    formats = {}
    for slot, shape in source.config.slots().items():
        if len(shape) == 2:
            default = outer if slot in ("embedding", "head") else base
            formats[slot] = _fitting(own.get(slot) or stored.get(slot) or default, shape[1])
    return formats


def kv_format(formats: Mapping[str, str]) -> str:
    """The format of keys and values: float32 with float32 weights, else bfloat16."""
    return "float32" if formats["layers.0.o"] == "float32" else "bfloat16"


def core_format(name: str, argument: str, where: str) -> str:
    """The core's name of a format.

    Raises:
        WhetValueError: there is no such format.
    """
    format = _ALIASES.get(name, name)
    if format not in CORE_TABLE:
        known = ", ".join([*CORE_TABLE, *_ALIASES])
        raise WhetValueError(f"{where}: {argument} is {name!r}, expected one of {known}.")
    return format


def _fitting(format: str, k: int) -> str:
    """The format, or the next one whose blocks divide rows of k."""
    while k % TABLE[format].block_length:
        format = TABLE[format].next
    return format


def _stored_formats(source: Source) -> dict[str, str]:
    """The quantised formats of slots that are stored in one alone."""
    found: dict[str, set[str]] = {}
    for piece in source.pieces():
        found.setdefault(piece.slot, set()).add(piece.format)
    return {slot: only for slot, (only, *more) in found.items() if not more and not TABLE[only].is_float}
