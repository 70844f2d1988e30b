"""Which format each matrix of a model is packed in."""

from __future__ import annotations

from collections.abc import Mapping

from whet.errors import WhetValueError
from whet.models.slots import Source
from whet.ops.quant import BLOCK_LENGTHS, CORE_FORMATS

_ALIASES = {"bf16": "bfloat16", "int4": "q4_0"}
PAGE_TOKENS = 64
"""Tokens of a page of the KV cache: the core's kPageTokens."""
FORMATS = tuple({core: name for name, core in _ALIASES.items()}.get(core, core) for core in CORE_FORMATS)
"""What ``weights`` may be, by the names that documents use."""
_NEXT = {"q4_k": "q4_0", "q4_0": "int8", "q8_0": "int8"}


def choose_formats(
    source: Source, weights: str | None, embedding: str | None, head: str | None, where: str
) -> dict[str, str]:
    """Slot -> format of every matrix; see ``Engine`` for the rules.

    Raises:
        WhetValueError: a format that there is not.
    """
    stored = _stored_formats(source) if weights is None else {}
    base = core_format("bf16" if weights is None else weights, "weights", where)
    outer = "q8_0" if base in ("q4_0", "q4_k") else base
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
    if format not in CORE_FORMATS:
        known = ", ".join([*CORE_FORMATS, *_ALIASES])
        raise WhetValueError(f"{where}: {argument} is {name!r}, expected one of {known}.")
    return format


def _fitting(format: str, k: int) -> str:
    """The format, or the next one whose blocks divide rows of k."""
    while k % BLOCK_LENGTHS.get(format, 1):
        format = _NEXT[format]
    return format


def _stored_formats(source: Source) -> dict[str, str]:
    """The quantised formats of slots that are stored in one alone."""
    found: dict[str, set[str]] = {}
    for piece in source.pieces():
        found.setdefault(piece.slot, set()).add(piece.format)
    return {slot: one for slot, (one, *more) in found.items() if not more and one in BLOCK_LENGTHS}
