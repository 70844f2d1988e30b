"""Attention tables: prefill and decode, and the rows of RuvLLM's document that are decode under other names.

Bytes count q, K, V and the result once each; operations are 4 D per query and visible key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import whet
from whet.bench.case import BenchOptions, Call, Case, Provider, Table, to_array
from whet.bench.prepare import ITEM_BYTES, Dtype, in_dtype, in_float64, normal, resolve, tensor
from whet.ops.attention import naive_attention, naive_decode_attention

_SDPA = "scaled_dot_product_attention, enable_gqa"
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7 * 6}  # bfloat16: of the greatest |v|, under 6


@dataclass(frozen=True)
class Shape:
    """Shape of one call; ``decode``: one query per sequence over ``tokens`` keys, else causal prefill."""

    decode: bool
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Dtype = "float32"

    @property
    def n_bytes(self) -> float:
        queries = 1 if self.decode else self.tokens
        rows = 2 * queries * self.heads + 2 * self.tokens * self.kv_heads
        return float(self.batch * rows * self.head_dim * ITEM_BYTES[self.dtype])

    @property
    def n_flops(self) -> float:
        pairs = self.tokens if self.decode else self.tokens * (self.tokens + 1) // 2
        return 4.0 * self.batch * self.heads * self.head_dim * pairs

    def inputs(self, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Draw q (B, T, H, D), K, V (B, T, H_kv, D); for decode q (B, H, D), K, V and their lengths (B,)."""
        token_axis = () if self.decode else (self.tokens,)
        kv = (self.batch, self.tokens, self.kv_heads, self.head_dim)
        shapes = ((self.batch, *token_axis, self.heads, self.head_dim), kv, kv)
        lengths = (np.full(self.batch, self.tokens),) if self.decode else ()
        return (*(normal(rng, shape, self.dtype) for shape in shapes), *lengths)


def _naive(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.stack([naive_attention(*row) for row in zip(q, k, v, strict=True)])


def _error(answer: Any, reference: np.ndarray) -> float:
    return float(np.abs(to_array(answer) - reference).max())


def _torch(dtype: Dtype, inputs: Sequence[np.ndarray]) -> Call:
    """Call torch with heads before tokens in memory, its native order; return a view in Whet's order."""
    attend = resolve("torch.nn.functional:scaled_dot_product_attention")
    q, k, v = (tensor(x, dtype) for x in inputs[:3])
    decode, gqa = q.ndim == 3, q.shape[-2] != k.shape[-2]
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q.unsqueeze(1) if decode else q, k, v))

    def call() -> Any:
        out = attend(q, k, v, is_causal=not decode, enable_gqa=gqa).transpose(1, 2)
        return out[:, 0] if decode else out

    return call


def _numpy(inputs: Sequence[np.ndarray]) -> Call:
    """Decode as two batched products and a softmax, over all heads of a KV group at once."""
    queries, k, v, _ = inputs
    batch, _, kv_heads, head_dim = k.shape
    q, scale = queries.reshape(batch, kv_heads, -1, head_dim), np.float32(head_dim**-0.5)
    k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)

    def call() -> np.ndarray:
        scores = q @ k * scale
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (p @ v / p.sum(axis=-1, keepdims=True)).reshape(queries.shape)

    return call


def _case(name: str, shape: Shape, published: float = 0.0, note: str = "", thread_scaling: bool = False) -> Case:
    return Case(
        name,
        shape.inputs,
        in_float64(naive_decode_attention if shape.decode else _naive),
        _TOLERANCE[shape.dtype],
        n_bytes=shape.n_bytes,
        n_flops=shape.n_flops,
        flop_dtype=shape.dtype,
        n_items=shape.batch * (1 if shape.decode else shape.tokens),
        size=shape.tokens,
        thread_scaling=thread_scaling,
        published={"RuvLLM (M4 Pro)": published} if published else {},
        note=note,
    )


def _table(title: str, cases: list[Case], dtype: Dtype, decode: bool, torch_note: str = _SDPA, **words: Any) -> Table:
    """Create a table of Whet and torch, with NumPy for float32 decode."""
    providers = [
        Provider("whet", in_dtype(whet.decode_attention if decode else whet.attention, dtype)),
        Provider("torch", partial(_torch, dtype), note=torch_note),
    ]
    if decode and dtype == "float32":
        providers.append(Provider("NumPy", _numpy))
    inside = "inside: the result is a new array"
    return Table(title, cases, providers, inside, item="tokens", error=_error, **words)


def _prefill(dtype: Dtype, tokens: tuple[int, ...]) -> Table:
    shapes = [Shape(False, 1, n, 9, 3, 64, dtype) for n in tokens]
    cases = [_case(f"{s.tokens} tokens", s, thread_scaling=s.tokens == max(tokens)) for s in shapes]
    note = "One causal sequence, 9 query heads over 3 KV heads, head_dim 64; operations count the lower triangle."
    return _table(f"Attention, prefill, {dtype}", cases, dtype, decode=False, note=note, size_label="tokens")


def _decode(dtype: Dtype, tokens: tuple[int, ...]) -> Table:
    cases = [_case(f"{n} keys", Shape(True, 8, n, 32, 8, 128, dtype)) for n in tokens]
    note = "One query for each of 8 sequences, 32 query heads over 8 KV heads, head_dim 128: bound by reading K and V."
    return _table(f"Attention, decode, {dtype}", cases, dtype, decode=True, note=note, size_label="keys per sequence")


_MISLABELLED = "1 query, 1 head, head_dim 64; in RuvLLM's document the flash benchmark under another name"
_FLASH = "1 query, 1 head, head_dim 128: a decode step"
_BANDWIDTH = "not a bandwidth test: the attention of the flash row over as many keys as the label has KB"
_GQA = "RuvLLM's timing includes copies of K and V for each head"

# (name, shape, published seconds, the actual workload)
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
    return _table(
        "Attention, rows of the RuvLLM document",
        [_case(*row) for row in rows],
        "float32",
        decode=True,
        torch_note="",
        note="Float32, one query, warm cache; times include the call from Python, RuvLLM's a call from Rust. "
        'RuvLLM\'s "840 us for 256 tokens" is GQA with 32 query and 4 KV heads at 512 keys.',
        size_label="keys",
    )


def tables(options: BenchOptions) -> list[Table]:
    """Create the tables of prefill and decode in both dtypes, and of RuvLLM's document."""
    prefill = (256, 1024) if options.quick else (256, 512, 1024, 2048)
    decode = (512,) if options.quick else (512, 1024, 2048, 4096)
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    return [
        *(_prefill(dtype, prefill) for dtype in dtypes),
        *(_decode(dtype, decode) for dtype in dtypes),
        _document(options.quick),
    ]
