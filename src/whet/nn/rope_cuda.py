"""Rotary position embedding of CUDA tensors, in Triton. It needs Triton, which torch brings for CUDA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from whet.errors import WhetTypeError, WhetValueError
from whet.ops.inputs import as_positive_int, check_memory
from whet.ops.rope import check_heads, check_rotary_dim

_NAME = "apply_rope_cuda"
_PAIRS = 1024
"""Pairs of a program, four for each thread of its warps."""
_WARPS = 8
_ALIGNMENT = 16
"""Bytes: Triton compiles one kernel for pointers that are multiples of it and another for other pointers."""
_MAX_LAUNCHES = 4096


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


@dataclass
class _Launch:
    """The launch for tensors of one layout, so that their checks and Triton's search for the kernel are made once."""

    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    constants: tuple[Any, ...]
    kernel: Any = None

    def __call__(self, *pointers: Any) -> None:
        if self.kernel is None:  # Triton's interpreter compiles none
            rotate: Any = _rotate
            self.kernel = rotate[self.grid](*pointers, *self.sizes, *self.constants, num_warps=_WARPS)
        else:
            self.kernel[self.grid](*pointers, *self.sizes, *self.constants)


_launches: dict[tuple[Any, ...], _Launch] = {}


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
    tensors = {"query": query, "positions": positions, "cos_sin_cache": cos_sin_cache}
    if key is not None:
        tensors["key"] = key
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise WhetTypeError(f"{_NAME}: {name} is a {type(x).__name__}, expected a torch tensor.")
        check_memory(_NAME, name, x)
    head_size, is_neox, inverse = as_positive_int(_NAME, "head_size", head_size), bool(is_neox), bool(inverse)
    layout = (head_size, is_neox, inverse, *map(_layout, tensors.values()))
    launch = _launches.get(layout)
    if launch is None:
        if len(_launches) == _MAX_LAUNCHES:
            _launches.clear()
        launch = _launches[layout] = _plan(tensors, head_size, is_neox, inverse)
    if 0 in launch.grid:
        return
    with torch.cuda.device_of(query):
        launch(query, query if key is None else key, positions.contiguous(), cos_sin_cache.contiguous())


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    """Return everything of a tensor that checks and kernels depend on."""
    return x.dtype, x.device, x.shape, x.stride(), x.requires_grad, x.is_neg(), x.data_ptr() % _ALIGNMENT


def _plan(tensors: dict[str, torch.Tensor], head_size: int, is_neox: bool, inverse: bool) -> _Launch:
    """Check the tensors of ``apply_rope_cuda`` and return their launch."""
    query, positions, table = tensors["query"], tensors["positions"], tensors["cos_sin_cache"]
    for name, x in tensors.items():
        if x.device != query.device:
            raise WhetValueError(f"{_NAME}: {name} is on {x.device}, expected {query.device}, as query.")
    if table.dtype != torch.float32 or table.ndim != 2:
        raise WhetTypeError(
            f"{_NAME}: cos_sin_cache is {table.dtype} of shape {tuple(table.shape)}, expected torch.float32 "
            "(max_position, rotary_dim)."
        )
    check_rotary_dim(_NAME, table.shape[1], head_size)
    if positions.dtype not in (torch.int32, torch.int64):
        raise WhetTypeError(f"{_NAME}: positions has dtype {positions.dtype}, expected torch.int64 or torch.int32.")
    strides, heads = [], []
    for name in ("query", "key"):
        x = _as_heads(name, tensors[name], positions, head_size) if name in tensors else query.new_empty(0, 0, 1)
        strides += x.stride()[:2]
        heads.append(x.shape[1])
    half = table.shape[1] // 2
    pairs = triton.next_power_of_2(half)
    block = min(triton.next_power_of_2(max(*heads, 1)), max(1, _PAIRS // pairs))
    grid = (positions.numel(), sum(math.ceil(n / block) for n in heads), 1)
    return _Launch(grid, (*strides, *heads, len(table)), (is_neox, inverse, half, pairs, block))


def _as_heads(name: str, x: torch.Tensor, positions: torch.Tensor, head_size: int) -> torch.Tensor:
    """View x as (tokens, heads, head_size)."""
    check_heads(_NAME, name, x, tuple(positions.shape), head_size, x.device.type)
    try:
        return x.view(positions.numel(), x.numel() // max(1, positions.numel()) // head_size, head_size)
    except RuntimeError:
        raise WhetValueError(
            f"{_NAME}: {name} has strides {tuple(x.stride())}, but its tokens need one stride. Pass a contiguous copy."
        ) from None
