"""Attention on a CPU: many queries over their sequences (prefill), and one query per sequence over its cache (decode).

    out_i = sum_j p_ij v_j,   p_i = softmax_j(scale q_i . k_j) over the keys j that query i attends to

Groups of query heads share the heads of K and V (MHA, GQA and MQA: query head h reads KV head h // (H / H_kv)) without
copies; a block of keys is read once for its whole group. Softmax is online, in float32, over blocks of keys
(FlashAttention-2, Dao 2023). Not differentiable, no dropout, no additive mask, CPU only.

A query without keys returns zeros. Masked keys and values are ignored, even NaN. The bits of a result depend on its own
sequence and on block_size, not on the batch, the threads or the instruction set (except for bfloat16 numbers below
2^-126, which processors with bfloat16 products flush to 0).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs

_DTYPES = ("float32", "bfloat16")


def naive_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> np.ndarray:
    """Reference implementation of ``attention`` for q (T, H, D) and k, v (T_k, H_kv, D), in their own precision."""
    if cu_seqlens is not None:
        keys = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        parts = [
            naive_attention(q[a:b], k[c:d], v[c:d], causal=causal, window=window, scale=scale)
            for a, b, c, d in zip(cu_seqlens, cu_seqlens[1:], keys, keys[1:], strict=False)
        ]
        return np.concatenate([np.zeros_like(q[:0]), *parts])
    kv_group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, kv_group, 1), np.repeat(v, kv_group, 1)
    position = np.arange(len(q))[:, None] + len(k) - len(q)
    key = np.arange(len(k))[None, :]
    mask = np.ones((len(q), len(k)), bool)
    if causal:
        mask &= key <= position
    if window is not None:
        mask &= key > position - window
    out = np.zeros_like(q)
    scores = np.einsum("ihd,jhd->hij", q, k) * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
    for h, i in np.ndindex(scores.shape[:2]):
        s = scores[h, i, mask[i]]
        if len(s):
            p = np.exp(s - s.max())
            out[i, h] = p @ v[mask[i], h] / p.sum()
    return out


def naive_decode_attention(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    lengths: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    """Reference implementation of ``decode_attention``, in the arrays' own precision."""
    rows = [
        naive_attention(q[b : b + 1], k_cache[b, :n], v_cache[b, :n], window=window, scale=scale)
        for b, n in enumerate(lengths)
    ]
    return np.concatenate([np.zeros_like(q[:0]), *rows])


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    block_size: int | None = None,
    out: Any = None,
) -> Any:
    """Compute attention of every query of one sequence, of packed sequences, or of a batch.

    Queries are aligned with the end of the keys: with causal=True query i of T attends to keys up to T_k - T + i.

    Args:
        q: (T, H, D) or (B, T, H, D), float32 or bfloat16, NumPy or torch (CPU). D is a multiple of 8 from 32 to 512.
            Any strides with a contiguous last axis (otherwise a copy is made).
        k: (T_k, H_kv, D) or (B, T_k, H_kv, D) of the dtype of q; H is a multiple of H_kv.
        v: as k.
        cu_seqlens: (n_seq + 1,) integers from 0 up to T: sequence s is q[cu_seqlens[s]:cu_seqlens[s + 1]]. None: one
            sequence. Not with a batch.
        cu_seqlens_k: the offsets of k and v; None: cu_seqlens.
        causal: whether keys after a query's own are masked.
        window: the number of last keys a query attends to, including its own; causal only. None: all.
        scale: of the scores; None: D^-1/2.
        block_size: keys per block, a multiple of 32 up to 256; None: chosen by D.
        out: output with the shape, dtype and kind of q. It may be q; it must not overlap k or v.

    Returns:
        An array with the shape, dtype and kind of q, or ``out``. Sums are float32. Products of two bfloat16 numbers are
        exact; weights are rounded to bfloat16 before they multiply v, and the result is rounded once: the error stays
        within 2^-7 of the greatest |v| that the query attends to.

    Raises:
        WhetValueError: shapes disagree, an unsupported D or block_size, H is not a multiple of H_kv, the offsets do not
            cover the tokens in order, a window without causal, ``out`` does not fit, or a tensor requires grad or is
            not on the CPU.
        WhetTypeError: a dtype is not float32 or bfloat16, or they differ.
    """
    result = _core.attention(q, k, v, cu_seqlens, cu_seqlens_k, bool(causal), window, scale, block_size, out)
    if result is not NotImplemented:
        return result
    name = "attention"
    q, k, v = _operands(name, q=q, k=k, v=v)
    if len(q.shape) not in (3, 4) or len(k.shape) != len(q.shape) or q.shape[: len(q.shape) - 3] != k.shape[:-3]:
        raise WhetValueError(
            f"{name}: q has shape {tuple(q.shape)} and k {tuple(k.shape)}, expected (T, H, D) and (T_k, H_kv, D), "
            "or both with a leading batch axis B."
        )
    _check_heads(name, "k", q, k)
    if window is not None:
        window = min(inputs.as_positive_int(name, "window", window), 1 << 62)
        if not causal:
            raise WhetValueError(
                f"{name}: window is {window}, but causal is False. A window ends at the query's own key."
            )
    if block_size is not None:
        block_size = inputs.as_positive_int(name, "block_size", block_size)
        if block_size % 32 or block_size > 256:
            raise WhetValueError(f"{name}: block_size is {block_size}, expected a multiple of 32 up to 256, or None.")
    if cu_seqlens is None and cu_seqlens_k is not None:
        raise WhetValueError(f"{name}: cu_seqlens_k was given without cu_seqlens. Pass both.")
    if cu_seqlens is not None:
        if len(q.shape) == 4:
            raise WhetValueError(f"{name}: q is a batch of shape {tuple(q.shape)}; with cu_seqlens pass (T, H, D).")
        given = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        cu_seqlens = _offsets(name, "cu_seqlens", cu_seqlens, "q", q.shape[0])
        cu_seqlens_k = _offsets(name, "cu_seqlens" if cu_seqlens_k is None else "cu_seqlens_k", given, "k", k.shape[0])
        if len(cu_seqlens) != len(cu_seqlens_k):
            raise WhetValueError(
                f"{name}: cu_seqlens has {len(cu_seqlens)} offsets and cu_seqlens_k {len(cu_seqlens_k)}. "
                "Both need one per sequence, and one more."
            )
    _check_out(name, out, q)
    result = _core.attention(
        q, k, v, cu_seqlens, cu_seqlens_k, bool(causal), window, _scale(name, scale), block_size, out
    )
    return inputs.check_computed(name, result)


def decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    out: Any = None,
) -> Any:
    """Compute attention of one query per sequence over the first ``lengths[b]`` keys of its cache: a decoding step.

    For contiguous caches; ``whet.Engine`` has pages that sequences share, and a separate kernel.

    Args:
        q: (B, H, D), float32 or bfloat16, NumPy or torch (CPU). D is a multiple of 8 from 32 to 512.
        k_cache: (B, T_max, H_kv, D) of the dtype of q; H is a multiple of H_kv. Any strides, last axis contiguous.
        v_cache: as k_cache.
        lengths: (B,) integers in [0, T_max]. Positions from a length on are not read.
        scale: of the scores; None: D^-1/2.
        window: attend only to the last ``window`` keys; None: all.
        out: output with the shape, dtype and kind of q. It may be q.

    Returns:
        (B, H, D) with the dtype and kind of q, or ``out``. Sums and weights are float32; a bfloat16 result is rounded
        once. Keys are summed in chunks of 256, whose results are merged in order.

    Raises:
        WhetValueError, WhetTypeError: as ``attention``; a length outside [0, T_max].
    """
    result = _core.decode_attention(q, k_cache, v_cache, lengths, scale, window, out)
    if result is not NotImplemented:
        return result
    name = "decode_attention"
    q, k_cache, v_cache = _operands(name, q=q, k_cache=k_cache, v_cache=v_cache)
    if len(q.shape) != 3 or len(k_cache.shape) != 4 or q.shape[0] != k_cache.shape[0]:
        raise WhetValueError(
            f"{name}: q has shape {tuple(q.shape)} and k_cache {tuple(k_cache.shape)}, expected (B, H, D) and "
            "(B, T_max, H_kv, D)."
        )
    _check_heads(name, "k_cache", q, k_cache)
    lengths = inputs.as_integers(name, "lengths", lengths, "one axis of integers")
    if lengths.shape != (q.shape[0],):
        raise WhetValueError(f"{name}: lengths has shape {lengths.shape}, expected ({q.shape[0]},): one per sequence.")
    bad = np.flatnonzero((lengths < 0) | (lengths > k_cache.shape[1]))
    if len(bad):
        raise WhetValueError(
            f"{name}: lengths[{bad[0]}] is {lengths[bad[0]]}, expected 0 to T_max={k_cache.shape[1]} "
            "(the keys in the cache, including the query's own)."
        )
    if window is not None:
        window = min(inputs.as_positive_int(name, "window", window), 1 << 62)
    _check_out(name, out, q)
    result = _core.decode_attention(q, k_cache, v_cache, lengths, _scale(name, scale), window, out)
    return inputs.check_computed(name, result)


def _operands(function: str, **arrays: Any) -> list[Any]:
    """Return arrays that the core reads, with one dtype; k and v with one shape."""
    plain = {
        name: inputs.as_plain_array(
            function, name, x, _DTYPES if inputs.is_tensor(x) or hasattr(x, "__array__") else _DTYPES[:1]
        )
        for name, x in arrays.items()
    }
    inputs.check_same_dtype(function, **plain)
    inputs.check_same_shape(function, **dict(list(plain.items())[1:]))
    return list(plain.values())


def _check_heads(function: str, k_name: str, q: Any, k: Any) -> None:
    heads, head_dim = q.shape[-2:]
    kv_heads = k.shape[-2]
    if head_dim != k.shape[-1]:
        raise WhetValueError(
            f"{function}: q has head_dim {head_dim}, but {k_name} has {k.shape[-1]}. They must be equal."
        )
    if head_dim % 8 or not 32 <= head_dim <= 512:
        raise WhetValueError(
            f"{function}: head_dim is {head_dim}, expected a multiple of 8 from 32 to 512. Pad q, k and v with zeros "
            "on the last axis, and pass scale=head_dim**-0.5 of the unpadded size."
        )
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise WhetValueError(
            f"{function}: q has {heads} heads and {k_name} {kv_heads}: expected a multiple, H = group * H_kv."
        )


def _scale(function: str, scale: Any) -> float | None:
    if scale is None:
        return None
    value = inputs.as_number(function, "scale", scale)
    if not abs(value) < 1e38:
        raise WhetValueError(f"{function}: scale is {scale!r}, expected a finite float32 number.")
    return value


def _offsets(function: str, name: str, x: Any, of: str, n_tokens: int) -> np.ndarray:
    offsets = inputs.as_integers(function, name, x, "one axis of integers")
    if np.ndim(x) != 1:
        raise WhetTypeError(f"{function}: {name} has shape {np.shape(x)}, expected one axis of integers.")
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != n_tokens or np.any(np.diff(offsets) < 0):
        raise WhetValueError(
            f"{function}: {name} is {offsets.tolist()[:8]}{'...' if len(offsets) > 8 else ''}, expected non-decreasing "
            f"offsets from 0 to the {n_tokens} tokens of {of}."
        )
    return offsets


def _check_out(function: str, out: Any, q: Any) -> None:
    if out is None:
        return
    is_tensor = inputs.is_tensor(out)
    if is_tensor != inputs.is_tensor(q) or not (is_tensor or hasattr(out, "__array_interface__")):
        raise WhetTypeError(f"{function}: out is a {type(out).__name__}, but q a {type(q).__name__}; both must agree.")
    inputs.check_same_dtype(function, q=q, out=out)
    inputs.check_same_shape(function, q=q, out=out)
    if is_tensor and out.device.type == "cpu":
        inputs.check_memory(function, "out", out)
    writable = not out.requires_grad and out.device.type == "cpu" if is_tensor else out.flags.writeable
    stride = out.stride(-1) if is_tensor else out.strides[-1] // out.itemsize
    if not writable or (stride != 1 and 0 not in out.shape):
        raise WhetValueError(
            f"{function}: out cannot be written to: expected writable CPU memory without gradient, contiguous on its "
            "last axis."
        )
