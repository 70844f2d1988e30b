"""Token ids of any common shape as rows. Needs NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.errors import WhetTypeError, WhetValueError


def token_rows(x: Any, attention_mask: Any = None) -> list[list[int]]:
    """Token ids of any common shape as rows without padding.

    Args:
        x: a (B, T) or (T,) integer tensor or array; a sequence of 1-D tensors, arrays or lists; one
            flat list of ints; or a mapping with ``input_ids`` and perhaps ``attention_mask``.
        attention_mask: of x's shape, nonzero where a token counts; padding on either side is
            stripped. None: every token counts.

    Raises:
        WhetTypeError: ids that are no integers.
        WhetValueError: more than two axes, negative ids, a mask of another shape, or one with a hole.
    """
    if isinstance(x, Mapping):
        if "input_ids" not in x:
            raise WhetValueError(f"token_rows: x has the keys {sorted(x)}, expected input_ids among them.")
        mask = x.get("attention_mask") if attention_mask is None else attention_mask
        return token_rows(x["input_ids"], mask)
    rows = _split_rows(x)
    masks = [None] * len(rows) if attention_mask is None else _split_rows(attention_mask)
    if len(masks) != len(rows):
        raise WhetValueError(f"token_rows: attention_mask has {len(masks)} rows and x has {len(rows)}.")
    return [_strip_padding(i, row, mask) for i, (row, mask) in enumerate(zip(rows, masks, strict=True))]


def _split_rows(x: Any) -> list[np.ndarray]:
    """One array per row."""
    is_array = hasattr(x, "ndim")
    if not is_array and (isinstance(x, (str, bytes)) or not isinstance(x, Sequence)):
        raise WhetTypeError(f"token_rows: x is {x!r:.60}, expected token ids in a tensor, array or list.")
    ragged = not is_array and any(_is_row(item) for item in x)
    rows = [_array(row) for row in x] if ragged else [_array(x)]
    if not ragged and rows[0].ndim == 2:
        rows = list(rows[0])
    for i, row in enumerate(rows):
        if row.ndim != 1:
            raise WhetValueError(f"token_rows: row {i} has {row.ndim} axes, expected (B, T), (T,) or a list of (T,).")
    return rows


def _is_row(item: Any) -> bool:
    return hasattr(item, "__len__") and not isinstance(item, str) and getattr(item, "ndim", 1) > 0


def _array(x: Any) -> np.ndarray:
    """A list, or a torch tensor on any device, as an array; an empty one of integers."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().tolist() if x.numel() else np.zeros(tuple(x.shape), dtype=np.int64)
    array = np.asarray(x)
    return array if array.size else array.astype(np.int64)


def _strip_padding(i: int, row: np.ndarray, mask: np.ndarray | None) -> list[int]:
    if row.dtype.kind not in "iu":
        raise WhetTypeError(f"token_rows: row {i} holds {row.dtype} values, expected integer token ids.")
    if mask is not None:
        if mask.shape != row.shape:
            raise WhetValueError(
                f"token_rows: row {i} has {len(row)} tokens and its attention_mask {len(mask)} values."
            )
        counted = np.flatnonzero(mask)
        start, stop = (counted[0], counted[-1] + 1) if counted.size else (0, 0)
        if stop - start != counted.size:
            hole = start + int(np.flatnonzero(mask[start:stop] == 0)[0])
            raise WhetValueError(
                f"token_rows: the attention_mask of row {i} has a hole at position {hole}. Only padding on "
                f"the left or right can be stripped."
            )
        row = row[start:stop]
    if row.size and row.min() < 0:
        raise WhetValueError(
            f"token_rows: row {i} holds {row.min()}, expected token ids >= 0. Mark padding in an attention_mask."
        )
    return row.tolist()
