"""Token ids of any common shape as rows, and fields with one value per token. Needs only NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np

from whet.errors import WhetTypeError, WhetValueError


def token_rows(x: Any, attention_mask: Any = None) -> list[list[int]]:
    """Return token ids of any common shape as rows without padding.

    Args:
        x: a (B, T) or (T,) integer tensor or array; a sequence of 1-D tensors, arrays or lists; one
            flat list of ints; or a mapping with ``input_ids`` and perhaps ``attention_mask``.
        attention_mask: the shape of x, nonzero where a token counts; padding on either side is stripped. None: every
            token counts.

    Raises:
        WhetTypeError: ids are not integers.
        WhetValueError: x has more than two axes or negative ids, or the mask has another shape or a hole.
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
    """Return one array per row."""
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
    """Return a list, or a torch tensor on any device, as an array; an empty input gives integers."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().tolist() if x.numel() else np.zeros(tuple(x.shape), dtype=np.int64)
    try:
        array = np.asarray(x)
    except ValueError as error:  # lists of different lengths
        raise WhetTypeError(f"token_rows: {x!r:.60} is not an array: {error}.") from error
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


# --- fields with one value per token ----------------------------------------------------------------

MASKS = ("labels", "completion_mask", "assistant_masks")
"""Masks: fields that mark which tokens of ``input_ids`` are learnt."""
_POSITIONS = ("position_ids", "seq_lengths", "token_type_ids")
_WITHOUT_EFFECT = ("input_ids", "attention_mask", "special_tokens_mask")


def check_positions(where: str, row: Mapping[str, Any], n_tokens: int) -> None:
    """Reject a tokenised row that is not one sequence of ``n_tokens`` tokens of one type.

    Raises:
        WhetValueError: ``position_ids`` are not 0..n-1, ``seq_lengths`` not n, or ``token_type_ids`` not 0; ``where``
            is the caller's name.
    """
    sequence = (list(range(n_tokens)), [n_tokens], [0] * n_tokens)
    for name, expected in zip(_POSITIONS, sequence, strict=True):
        if row.get(name) is None:
            continue
        values = _array(row[name]).ravel() if name == "seq_lengths" else _per_token(where, row, name)
        if values.tolist() != expected:
            raise WhetValueError(
                f"{where}: {name} is {values.tolist()!s:.60}, expected {expected!s:.40}: a row is one sequence. Give "
                f"each sequence its own row, or remove {name}."
            )


def counted_tokens(where: str, row: Mapping[str, Any], ids: Sequence[int]) -> list[bool]:
    """Return whether each token of a row's ``input_ids`` is learnt: all of its ``MASKS`` mark it, or it has none.

    Args:
        where: the caller's name, for errors.
        row: ``labels`` holds the token itself if it is learnt, else -100, not shifted; ``completion_mask`` and
            ``assistant_masks`` hold 1 or 0.
        ids: the row's token ids without padding.

    Raises:
        WhetValueError: a mask has another length or other values; or another field has one number per token, such as
            weights, which would have no effect.
    """
    counted = np.ones(len(ids), bool)
    for name, value in row.items():
        if name in MASKS and value is not None:
            counted &= _read_mask(where, name, _per_token(where, row, name), np.asarray(ids, np.int64))
        elif name not in (*MASKS, *_POSITIONS, *_WITHOUT_EFFECT) and _has_numbers(value, len(row["input_ids"])):
            raise WhetValueError(
                f"{where}: {name} holds one number per token, which would have no effect. Remove it; the "
                f"learnt tokens are read from {', '.join(MASKS)}."
            )
    return counted.tolist()


def _read_mask(where: str, name: str, values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return whether the values of one of ``MASKS`` mark each token."""
    allowed = (ids, np.int64(-100)) if name == "labels" else (np.int64(1), np.int64(0))
    marked, wrong = values == allowed[0], np.flatnonzero((values != allowed[0]) & (values != allowed[1]))
    if wrong.size:
        i = wrong[0]
        expected = f"the token itself, {ids[i]}, or -100" if name == "labels" else "0 or 1"
        raise WhetValueError(f"{where}: {name} has {values[i]} at token {i}, expected {expected}.")
    return marked


def _per_token(where: str, row: Mapping[str, Any], name: str) -> np.ndarray:
    """Return the values of a field at the row's tokens, without padding."""
    values, n_tokens, mask = _flat(row[name]), len(_flat(row["input_ids"])), row.get("attention_mask")
    if values.shape != (n_tokens,):
        raise WhetValueError(f"{where}: {name} has {values.size} values, expected one for each of {n_tokens} tokens.")
    return values if mask is None else values[_flat(mask) != 0]


def _flat(value: Any) -> np.ndarray:
    """Return the array of a row, which may be a batch of one."""
    array = _array(value)
    return array[0] if array.ndim == 2 and len(array) == 1 else array


def _has_numbers(value: Any, n: int) -> bool:
    """Whether ``value`` is n numbers, at least two."""
    if hasattr(value, "ndim"):
        return value.ndim == 1 and len(value) == n > 1 and _array(value).dtype.kind in "biuf"
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return is_list and len(value) == n > 1 and isinstance(value[0], Number)
