"""Rotary position embedding of CUDA tensors, in Triton. It needs Triton, which torch brings for CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from whet.errors import WhetTypeError, WhetValueError
from whet.ops.inputs import as_positive_int
from whet.ops.rope import check_heads, check_rotary_dim

_PAIRS = 1024
"""Pairs of a program, eight for each thread of its four warps."""


@triton.jit
def _rotate_heads(
    x,
    stride_head,
    n_heads,
    first_head,
    cos,
    sin,
    IS_NEOX: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate HEADS heads of the token at ``x`` by its cosines and sines, (PAIRS,), of which the first HALF count."""
    pair = tl.arange(0, PAIRS)
    head = first_head + tl.arange(0, HEADS)
    if IS_NEOX:
        first, second = pair, pair + HALF
    else:
        first, second = 2 * pair, 2 * pair + 1
    rows = x + head[:, None] * stride_head
    inside = (head < n_heads)[:, None] & (pair < HALF)[None, :]
    a = tl.load(rows + first[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(rows + second[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(rows + first[None, :], (a * cos[None, :] - b * sin[None, :]).to(x.dtype.element_ty), mask=inside)
    tl.store(rows + second[None, :], (b * cos[None, :] + a * sin[None, :]).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    query,
    key,
    positions,
    table,
    query_token,
    query_head,
    key_token,
    key_head,
    n_query_heads,
    n_key_heads,
    max_position,
    IS_NEOX: tl.constexpr,
    INVERSE: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate query and key in one launch: program (t, b) has HEADS heads of token t, first of query, then of key."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    position = tl.load(positions + token).to(tl.int64)
    in_table = (pair < HALF) & (position >= 0) & (position < max_position)
    angles = table + position * (2 * HALF) + pair
    cos = tl.load(angles, mask=in_table, other=float("nan"))
    sin = tl.load(angles + HALF, mask=in_table, other=float("nan"))
    if INVERSE:
        sin = -sin
    query_blocks = tl.cdiv(n_query_heads, HEADS)
    if block < query_blocks:
        at = query + token * query_token
        _rotate_heads(at, query_head, n_query_heads, block * HEADS, cos, sin, IS_NEOX, HALF, PAIRS, HEADS)
    else:
        at, head = key + token * key_token, (block - query_blocks) * HEADS
        _rotate_heads(at, key_head, n_key_heads, head, cos, sin, IS_NEOX, HALF, PAIRS, HEADS)


def _as_heads(name: str, x: Any, positions: Any, head_size: int) -> Any:
    """View x as (tokens, heads, head_size)."""
    check_heads("apply_rope_cuda", name, x, tuple(positions.shape), head_size, x.device.type)
    try:
        return x.view(positions.numel(), -1, head_size)
    except RuntimeError:
        raise WhetValueError(
            f"apply_rope_cuda: {name} has strides {tuple(x.stride())}, but its tokens need one stride. Pass a "
            "contiguous copy."
        ) from None


def apply_rope_cuda(
    positions: Any,
    query: Any,
    key: Any,
    head_size: int,
    cos_sin_cache: Any,
    is_neox: bool = True,
    *,
    inverse: bool = False,
) -> None:
    """Rotate query and key of a CUDA device in place, in one launch: ``whet.apply_rope`` for tensors of a GPU.

    float32 arithmetic, one rounding for bfloat16. The host does not read the positions, which would wait for the
    device: a position outside the table gives NaN.

    Args:
        positions: (T,) or (B, T) int32 or int64.
        query: (*positions.shape, H * head_size) or (*positions.shape, H, head_size), float32 or bfloat16.
        key: like query with its own number of heads, or None.
        head_size: elements of a head.
        cos_sin_cache: (max_position, rotary_dim) float32: rotary_dim / 2 cosines, then as many sines.
        is_neox: the pairing, NeoX or GPT-J.
        inverse: rotate by the negative angle.

    Raises:
        WhetValueError: shapes, strides or devices do not fit, or a tensor requires grad.
        WhetTypeError: an argument is not a tensor of these dtypes.
    """
    name = "apply_rope_cuda"
    for argument, x in (("query", query), ("positions", positions), ("cos_sin_cache", cos_sin_cache), ("key", key)):
        if x is None and argument == "key":
            continue
        if not isinstance(x, torch.Tensor):
            raise WhetTypeError(f"{name}: {argument} is a {type(x).__name__}, expected a torch tensor.")
        if x.device != query.device:
            raise WhetValueError(f"{name}: {argument} is on {x.device}, expected {query.device}, as query.")
    head_size = as_positive_int(name, "head_size", head_size)
    table = cos_sin_cache.contiguous()
    if table.dtype != torch.float32 or table.ndim != 2:
        raise WhetTypeError(
            f"{name}: cos_sin_cache is {table.dtype} of shape {tuple(table.shape)}, expected torch.float32 "
            "(max_position, rotary_dim)."
        )
    check_rotary_dim(name, table.shape[1], head_size)
    if positions.dtype not in (torch.int32, torch.int64):
        raise WhetTypeError(f"{name}: positions has dtype {positions.dtype}, expected torch.int64 or torch.int32.")
    if not positions.numel() or not query.numel():
        return
    half = table.shape[1] // 2
    pairs = triton.next_power_of_2(half)
    query = _as_heads("query", query, positions, head_size)
    key = query[:, :0] if key is None else _as_heads("key", key, positions, head_size)
    heads = min(triton.next_power_of_2(max(query.shape[1], key.shape[1])), max(1, _PAIRS // pairs))
    blocks = triton.cdiv(query.shape[1], heads) + triton.cdiv(key.shape[1], heads)
    with torch.cuda.device_of(query):
        _rotate[(positions.numel(), blocks)](  # pyright: ignore[reportIndexIssue]
            query,
            key,
            positions.contiguous(),
            table,
            *(query.stride(0), query.stride(1), key.stride(0), key.stride(1)),
            *(query.shape[1], key.shape[1], len(table)),
            IS_NEOX=is_neox,
            INVERSE=inverse,
            HALF=half,
            PAIRS=pairs,
            HEADS=heads,
        )
