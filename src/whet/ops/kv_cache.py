"""Writes to and reads from a contiguous KV cache: the keys, or the values, of a batch of sequences.

A cache is (B, T_max, H_kv, D): sequences, positions, KV heads, head_dim. One token is H_kv * D elements, so a token of
keys and values takes 2 * H_kv * D * element size bytes: 4 KiB for 8 heads of 128 in bfloat16. Only bytes are copied:
every dtype is supported, and nothing is converted. Sequences are split over the thread pool.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs, rowwise


def naive_kv_append(cache: np.ndarray, new: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Reference implementation of ``kv_append``."""
    for sequence, tokens, position in zip(cache, new, positions, strict=True):
        sequence[position : position + len(tokens)] = tokens
    return cache


def naive_kv_gather(cache: np.ndarray, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Reference implementation of ``kv_gather``."""
    parts = [cache[row, :length] for row, length in zip(rows, lengths, strict=True)]
    return np.concatenate([cache[:0].reshape(0, *cache.shape[2:]), *parts])


def kv_append(cache: Any, new: Any, positions: Any) -> Any:
    """Write cache[b, positions[b] + t] = new[b, t] for every sequence b and token t, in place.

    Args:
        cache: (B, T_max, H_kv, D), any dtype, NumPy or torch (CPU), any strides with a contiguous last axis.
        new: (B, T, H_kv, D) of cache's kind and dtype; reads B * T * H_kv * D elements, and writes as many.
        positions: (B,) integers, the position of each sequence's first new token.

    Returns:
        ``cache``.

    Raises:
        WhetValueError: shapes disagree, a position is negative, a sequence would exceed T_max, or the cache cannot be
            written to. Nothing is written in these cases.
        WhetTypeError: dtypes or kinds differ, or positions are not integers.
    """
    positions = inputs.as_integers("kv_append", "positions", positions)
    if _core.kv_append(cache, new, positions) is not NotImplemented:
        return cache
    name = "kv_append"
    _check_cache(name, cache)
    if not hasattr(new, "dtype") or inputs.is_tensor(new) != inputs.is_tensor(cache) or new.dtype != cache.dtype:
        raise WhetTypeError(
            f"{name}: new is {getattr(new, 'dtype', type(new).__name__)}, but cache {cache.dtype}. "
            "Pass tokens of the cache's kind and dtype."
        )
    if inputs.is_tensor(new):
        inputs.check_memory(name, "new", new)
    b, t_max, heads, dim = cache.shape
    if new.ndim != 4 or (new.shape[0], *new.shape[2:]) != (b, heads, dim) or positions.shape != (b,):
        raise WhetValueError(
            f"{name}: cache has shape {tuple(cache.shape)}, new {tuple(new.shape)} and positions {positions.shape}, "
            "expected (B, T_max, H_kv, D), (B, T, H_kv, D) and (B,)."
        )
    n_tokens = new.shape[1]
    for row, position in enumerate(positions.tolist()):
        if position < 0 or position + n_tokens > t_max:
            raise WhetValueError(
                f"{name}: positions[{row}] is {position}, and {n_tokens} tokens from there do not fit in a cache of "
                f"{t_max} positions. Make the cache larger, or drop old tokens first."
            )
    rowwise.check_target(name, "cache", cache, tuple(cache.shape), cache)
    if 0 not in new.shape:
        # A copy, because ``new`` may be a view of the cache.
        new = new.detach().clone().resolve_neg() if inputs.is_tensor(new) else new.copy("C")
        inputs.check_computed(name, _core.kv_append(_bytes(name, cache), _bytes(name, new), positions))
    return cache


def kv_gather(cache: Any, rows: Any, lengths: Any, *, out: Any = None) -> Any:
    """Return the first lengths[i] tokens of cache[rows[i]], one sequence after another, without padding.

    Args:
        cache: (B, T_max, H_kv, D), as for ``kv_append``.
        rows: (R,) integers in [0, B); rows may repeat.
        lengths: (R,) integers in [0, T_max].
        out: (sum of lengths, H_kv, D) of cache's kind and dtype, written in place; None: a new array.

    Returns:
        (sum of lengths, H_kv, D), with the kind and dtype of cache.

    Raises:
        WhetValueError: shapes disagree, a row or a length is out of range, or ``out`` cannot hold the result.
        WhetTypeError: rows or lengths are not integers.
    """
    rows, lengths = inputs.as_integers("kv_gather", "rows", rows), inputs.as_integers("kv_gather", "lengths", lengths)
    result = _core.kv_gather(cache, rows, lengths, out)
    if result is not NotImplemented:
        return result
    name = "kv_gather"
    _check_cache(name, cache)
    if rows.ndim != 1 or rows.shape != lengths.shape:
        raise WhetValueError(f"{name}: rows has shape {rows.shape} and lengths {lengths.shape}, expected (R,) both.")
    for what, values, end in (("rows", rows, cache.shape[0] - 1), ("lengths", lengths, cache.shape[1])):
        bad = np.flatnonzero((values < 0) | (values > end))
        if len(bad):
            raise WhetValueError(
                f"{name}: {what}[{bad[0]}] is {values[bad[0]]}, expected 0 to {end} "
                f"for a cache of shape {tuple(cache.shape)}."
            )
    shape = (int(lengths.sum()), *cache.shape[2:])
    if out is not None:
        rowwise.check_target(name, "out", out, shape, cache)
    packed = inputs.check_computed(name, _core.kv_gather(_bytes(name, cache), rows, lengths, None))
    packed = packed.view(cache.dtype).reshape(shape)
    return rowwise.store_result(name, packed, shape, out)


def _check_cache(function: str, cache: Any) -> None:
    if inputs.is_tensor(cache):
        if cache.requires_grad or cache.device.type != "cpu":
            raise WhetValueError(
                f"{function}: cache requires grad or is on {cache.device}, expected a CPU tensor without gradient."
            )
        inputs.check_memory(function, "cache", cache)
        if cache.is_neg():
            raise WhetValueError(f"{function}: cache is lazily negated. Pass cache.resolve_neg().")
    elif type(cache) is not np.ndarray:
        raise WhetTypeError(f"{function}: cache is a {type(cache).__name__}. Pass a NumPy array or a torch tensor.")
    if cache.ndim != 4:
        raise WhetValueError(f"{function}: cache has {cache.ndim} axes, expected (B, T_max, H_kv, D).")


def _bytes(function: str, x: Any) -> Any:
    """Return a view of x as uint8, for dtypes that the core does not have."""
    try:
        return x.view(np.uint8) if isinstance(x, np.ndarray) else x.view(sys.modules["torch"].uint8)
    except (ValueError, RuntimeError):
        raise WhetValueError(
            f"{function}: the last axis of an array of shape {tuple(x.shape)} is not contiguous. Pass a copy that is."
        ) from None
