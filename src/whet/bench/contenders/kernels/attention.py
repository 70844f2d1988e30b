"""Tables of attention: prefill and decode, and the rows of RuvLLM's document that are decode under other names.

Bytes are those of q, K, V and the result, once each; operations are 4 D for each query and each key that it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import whet
from whet.bench.case import BenchOptions, Call, Case, Provider, Table
from whet.ops.attention import naive_decode_attention

_ALLOCATION = "inside: the result is a new array"
_BYTES = {"float32": 4, "bfloat16": 2}
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7 * 6}  # bfloat16: of the greatest |v|, under 6


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; ``decode``: one query per sequence over ``tokens`` keys, else causal prefill."""

    decode: bool
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"

    @property
    def n_bytes(self) -> float:
        queries = 1 if self.decode else self.tokens
        rows = 2 * queries * self.heads + 2 * self.tokens * self.kv_heads
        return float(self.batch * rows * self.head_dim * _BYTES[self.dtype])

    @property
    def n_flops(self) -> float:
        pairs = self.tokens if self.decode else self.tokens * (self.tokens + 1) // 2
        return 4.0 * self.batch * self.heads * self.head_dim * pairs


class Inputs:
    """q (B, T, H, D), or (B, H, D) for decode, and K, V (B, T, H_kv, D) exact in the dtype."""

    def __init__(self, shape: Shape, rng: np.random.Generator) -> None:
        self.shape = shape
        token_axis = () if shape.decode else (shape.tokens,)
        self.q = self._normal(rng, (shape.batch, *token_axis, shape.heads, shape.head_dim))
        self.k = self._normal(rng, (shape.batch, shape.tokens, shape.kv_heads, shape.head_dim))
        self.v = self._normal(rng, self.k.shape)

    def _normal(self, rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        x = rng.standard_normal(size, np.float32)
        return x if self.shape.dtype == "float32" else (x.view(np.uint32) & 0xFFFF0000).view(np.float32)

    @cached_property
    def tensors(self) -> Any:
        import torch

        return [torch.from_numpy(x).to(getattr(torch, self.shape.dtype)) for x in (self.q, self.k, self.v)]


def _reference(inputs: Inputs) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in (inputs.q, inputs.k, inputs.v))
    if inputs.shape.decode:
        return naive_decode_attention(q, k, v, [inputs.shape.tokens] * inputs.shape.batch)
    out = np.empty_like(q)
    group = inputs.shape.heads // inputs.shape.kv_heads
    hidden = np.triu(np.full((inputs.shape.tokens,) * 2, -np.inf), 1)
    for b, h in np.ndindex(inputs.shape.batch, inputs.shape.heads):
        scores = q[b, :, h] @ k[b, :, h // group].T / np.sqrt(inputs.shape.head_dim) + hidden
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[b, :, h] = p @ v[b, :, h // group] / p.sum(axis=1, keepdims=True)
    return out


def _error(answer: Any, reference: np.ndarray) -> float:
    """The largest difference; NumPy has no bfloat16 of its own."""
    got = answer.float().numpy() if hasattr(answer, "float") else np.asarray(answer)
    return float(np.abs(got - reference).max())


def _whet(inputs: Inputs) -> Call:
    q, k, v = (inputs.q, inputs.k, inputs.v) if inputs.shape.dtype == "float32" else inputs.tensors
    if inputs.shape.decode:
        lengths = np.full(inputs.shape.batch, inputs.shape.tokens)
        return lambda: whet.decode_attention(q, k, v, lengths)
    return lambda: whet.attention(q, k, v)


def _torch(inputs: Inputs) -> Call:
    """Heads before tokens in memory, which torch takes as it is; back in Whet's order as a view."""
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = inputs.tensors
    decode = inputs.shape.decode
    q = q.unsqueeze(1) if decode else q
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    gqa = inputs.shape.heads != inputs.shape.kv_heads

    def call() -> Any:
        out = scaled_dot_product_attention(q, k, v, is_causal=not decode, enable_gqa=gqa).transpose(1, 2)
        return out[:, 0] if decode else out

    return call


def _numpy(inputs: Inputs) -> Call:
    """Decode as two einsum products and a softmax, over a group's heads at once."""
    shape = inputs.shape
    q = inputs.q.reshape(shape.batch, shape.kv_heads, -1, shape.head_dim)
    k, v = inputs.k.transpose(0, 2, 3, 1), inputs.v.transpose(0, 2, 1, 3)

    def call() -> np.ndarray:
        scores = q @ k * np.float32(shape.head_dim**-0.5)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (p @ v / p.sum(axis=-1, keepdims=True)).reshape(inputs.q.shape)

    return call


def _inputs(shape: Shape) -> Callable[[np.random.Generator], Inputs]:
    return lambda rng: Inputs(shape, rng)


def _case(name: str, shape: Shape, published: float = 0.0, note: str = "", thread_scaling: bool = False) -> Case:
    return Case(
        name,
        _inputs(shape),
        _reference,
        _TOLERANCE[shape.dtype],
        n_bytes=shape.n_bytes,
        n_flops=shape.n_flops,
        flop_dtype="bfloat16" if shape.dtype == "bfloat16" else "float32",
        n_items=shape.batch * (1 if shape.decode else shape.tokens),
        size=shape.tokens,
        thread_scaling=thread_scaling,
        published={"RuvLLM (M4 Pro)": published} if published else {},
        note=note,
    )


def _prefill(dtype: str, tokens: tuple[int, ...]) -> Table:
    shapes = [Shape(False, 1, n, 9, 3, 64, dtype) for n in tokens]
    return Table(
        f"Attention, prefill, {dtype}",
        [_case(f"{s.tokens} tokens", s, thread_scaling=s.tokens == max(tokens)) for s in shapes],
        [Provider("whet", _whet), Provider("torch", _torch, note="scaled_dot_product_attention, enable_gqa")],
        allocation=_ALLOCATION,
        note="One causal sequence, 9 query heads over 3 KV heads, head_dim 64; operations are the lower triangle's.",
        item="tokens",
        size_label="tokens",
        error=_error,
    )


def _decode(dtype: str, tokens: tuple[int, ...]) -> Table:
    shapes = [Shape(True, 8, n, 32, 8, 128, dtype) for n in tokens]
    providers = [Provider("whet", _whet), Provider("torch", _torch, note="scaled_dot_product_attention, enable_gqa")]
    if dtype == "float32":
        providers.append(Provider("NumPy", _numpy))
    return Table(
        f"Attention, decode, {dtype}",
        [_case(f"{s.tokens} keys", s) for s in shapes],
        providers,
        allocation=_ALLOCATION,
        note="A query for each of 8 sequences, 32 query heads over 8 KV heads, head_dim 128: bound by reading K and V.",
        item="tokens",
        size_label="keys per sequence",
        error=_error,
    )


_MISLABELLED = "1 query, 1 head, head_dim 64; in RuvLLM's document a flash bench under another name"
_FLASH = "1 query, 1 head, head_dim 128: a step of decoding"
_BANDWIDTH = "no bandwidth test: the flash row's attention over as many keys as the label has KB"
_GQA = "in RuvLLM's document K and V are copied for each head inside the timing"

# (name, shape, published seconds, what the row really is)
_DOCUMENT = [
    *[
        (f"Softmax attention {n}", Shape(True, 1, n, 1, 1, 64), s, _MISLABELLED)
        for n, s in ((128, 1.74e-6), (256, 3.17e-6), (512, 6.34e-6))
    ],
    *[
        (f"Flash attention {n}", Shape(True, 1, n, 1, 1, 128), s, _FLASH)
        for n, s in ((128, 3.31e-6), (256, 6.53e-6), (512, 12.84e-6), (4096, 102.38e-6))
    ],
    *[
        (f"GQA ratio {ratio}, {n}", Shape(True, 1, n, 16, 16 // ratio, 128), s, _GQA)
        for ratio, times in ((4, (115.58e-6, 219.99e-6, 417.63e-6)), (8, (112.03e-6, 209.19e-6, 395.51e-6)))
        for n, s in zip((128, 256, 512), times, strict=True)
    ],
    *[
        (f"Memory bandwidth {n} KB", Shape(True, 1, n, 1, 1, 128), s, _BANDWIDTH)
        for n, s in ((256, 6.26e-6), (512, 12.13e-6), (1024, 24.05e-6), (2048, 47.86e-6), (4096, 101.63e-6))
    ],
]


def _document(quick: bool) -> Table:
    rows = _DOCUMENT[::4] if quick else _DOCUMENT
    return Table(
        "Attention, rows of the RuvLLM document",
        [_case(name, shape, published, note) for name, shape, published, note in rows],
        [Provider("whet", _whet), Provider("torch", _torch), Provider("NumPy", _numpy)],
        allocation=_ALLOCATION,
        note=(
            "Float32, one query, warm cache; the call from Python is inside the timing, RuvLLM's are calls from "
            'Rust. RuvLLM\'s "840 us for 256 tokens" is GQA with 32 query and 4 KV heads at 512 keys.'
        ),
        item="tokens",
        size_label="keys",
        error=_error,
    )


def tables(options: BenchOptions) -> list[Table]:
    """Prefill and decode in both dtypes at the sizes of the floors, and the rows of RuvLLM's document."""
    prefill = (256, 1024) if options.quick else (256, 512, 1024, 2048)
    decode = (512,) if options.quick else (512, 1024, 2048, 4096)
    return [
        *[_prefill(dtype, prefill) for dtype in _BYTES],
        *[_decode(dtype, decode) for dtype in _BYTES],
        _document(options.quick),
    ]
