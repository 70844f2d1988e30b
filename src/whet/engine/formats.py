"""Which format each matrix of a model is packed in."""

from __future__ import annotations

from whet.engine.pieces import Source
from whet.errors import WhetValueError
from whet.ops.quant import CORE_FORMATS

_ALIASES = {"bf16": "bfloat16", "int4": "q4_0"}
_BLOCKS = {"q8_0": 32, "q4_0": 32, "q4_k": 256}
_NEXT = {"q4_k": "q4_0", "q4_0": "int8", "q8_0": "int8"}


def choose_formats(
    source: Source, weights: str | None, embedding: str | None, head: str | None, where: str
) -> dict[str, str]:
    """Slot -> format of every matrix; see ``Engine`` for the rules.

    Raises:
        WhetValueError: a format that there is not.
    """
    stored = _stored_formats(source) if weights is None else {}
    base = _known(weights or "bf16", "weights", where)
    outer = "q8_0" if base in ("q4_0", "q4_k") else base
    own = {
        "embedding": _known(embedding, "embedding", where) if embedding else None,
        "head": _known(head, "head", where) if head else None,
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


def _known(name: str, argument: str, where: str) -> str:
    format = _ALIASES.get(name, name)
    if format not in CORE_FORMATS:
        known = ", ".join([*CORE_FORMATS, *_ALIASES])
        raise WhetValueError(f"{where}: {argument} is {name!r}, expected one of {known}.")
    return format


def _fitting(format: str, k: int) -> str:
    """The format, or the next one whose blocks divide rows of k."""
    while k % _BLOCKS.get(format, 1):
        format = _NEXT[format]
    return format


def _stored_formats(source: Source) -> dict[str, str]:
    """The quantised formats of slots that are stored in one alone."""
    found: dict[str, set[str]] = {}
    for piece in source.pieces():
        found.setdefault(piece.slot, set()).add(piece.format)
    return {slot: one for slot, (one, *more) in found.items() if not more and one in _BLOCKS}
