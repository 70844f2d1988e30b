"""Tables of norms, softmax, activations and the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import whet
from whet.bench.case import BenchOptions, Call, Case, Provider, Table
from whet.ops.activations import naive_log_softmax, naive_softmax, naive_swiglu
from whet.ops.kv_cache import naive_kv_append
from whet.ops.norm import naive_layer_norm, naive_rms_norm

# RuvLLM 2.0's document: an Apple M4 Pro, float32, one vector.
_RUVLLM_RMS = {768: 143.65e-9, 1024: 179.06e-9, 2048: 342.72e-9, 4096: 620.40e-9, 8192: 1.19e-6}
_RUVLLM_LAYER = {768: 192.06e-9, 1024: 252.64e-9, 2048: 489.09e-9, 4096: 938.30e-9}
_WITH_COPY = "the timing of RuvLLM's document includes a copy of x"
_NOT_AN_APPEND = "the row of RuvLLM's document is its attention over this many tokens, not an append"
_RUVLLM_KV = {256: 6e-6, 512: 12e-6, 1024: 24e-6, 2048: 48e-6}

_INSIDE = "inside: the result is a new array"
_OUTSIDE = "outside: the result goes into a given array"
_ERROR = 2e-6
_EPS = 1e-6
Make = Callable[[np.random.Generator], Any]
Prepare = Callable[[Any], Call]


class Vectors(NamedTuple):
    """x (..., n), and weight and bias (n,)."""

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray


class Tokens(NamedTuple):
    """A cache (B, T_max, H_kv, D), new tokens (B, T, H_kv, D) and where they go (B,)."""

    cache: np.ndarray
    new: np.ndarray
    positions: np.ndarray


def tables(options: BenchOptions) -> list[Table]:
    """All tables of this family."""
    norms = [_one_row("rms_norm", _RUVLLM_RMS), _one_row("layer_norm", _RUVLLM_LAYER), _matrix()]
    return [*norms, _softmax("softmax"), _softmax("log_softmax"), _swiglu(), _kv_append()]


# ---------------------------------------------------------------- norms


def _vectors(*shape: int) -> Make:
    def make(rng: np.random.Generator) -> Vectors:
        n = shape[-1]
        return Vectors(*(rng.standard_normal(size, np.float32) for size in (shape, n, n)))

    return make


def _norm_reference(name: str) -> Callable[[Vectors], np.ndarray]:
    def reference(v: Vectors) -> np.ndarray:
        x = v.x.astype(np.float64)
        return naive_rms_norm(x, v.weight) if name == "rms_norm" else naive_layer_norm(x, v.weight, v.bias, _EPS)

    return reference


def _whet_norm(name: str, v: Vectors) -> Call:
    if name == "rms_norm":
        return lambda: whet.rms_norm(v.x, v.weight, _EPS)
    return lambda: whet.layer_norm(v.x, v.weight, v.bias, _EPS)


def _torch_norm(name: str, v: Vectors) -> Call:
    import torch

    x, weight, bias = (torch.from_numpy(a) for a in v)
    size, f = x.shape[-1:], torch.nn.functional
    if name == "rms_norm":
        return lambda: f.rms_norm(x, size, weight, _EPS)
    return lambda: f.layer_norm(x, size, weight, bias, _EPS)


def _numpy_norm(name: str, v: Vectors) -> Call:
    if name == "rms_norm":
        return lambda: naive_rms_norm(v.x, v.weight)
    return lambda: naive_layer_norm(v.x, v.weight, v.bias, _EPS)


def _one_row(name: str, published: dict[int, float]) -> Table:
    n_vectors = 3 if name == "rms_norm" else 4
    cases = [
        Case(
            f"1 x {n}",
            _vectors(1, n),
            _norm_reference(name),
            _ERROR,
            n_bytes=4.0 * n * n_vectors,
            size=n,
            published={"RuvLLM": published[n]} if n in published else {},
            note=_WITH_COPY if n in published else "",
        )
        for n in (768, 1024, 2048, 4096, 8192)
    ]
    providers = [
        Provider("whet", partial(_whet_norm, name)),
        Provider("torch", partial(_torch_norm, name)),
        Provider("NumPy", partial(_numpy_norm, name)),
    ]
    note = "One row from the caches: what counts is the call itself."
    return Table(f"{name}, one row, float32", cases, providers, _INSIDE, note, size_label="elements per row")


def _matrix() -> Table:
    def whet_(v: Vectors) -> Call:
        out = np.empty_like(v.x)
        return lambda: whet.rms_norm(v.x, v.weight, _EPS, out=out)

    def torch_(v: Vectors) -> Call:
        return _torch_norm("rms_norm", v)

    def numpy_(v: Vectors) -> Call:
        return lambda: naive_rms_norm(v.x, v.weight)

    n = 4096
    case = Case(
        f"{n} x {n}", _vectors(n, n), _norm_reference("rms_norm"), _ERROR, n_bytes=8.0 * n * n, thread_scaling=True
    )
    providers = [
        Provider("whet", whet_),
        Provider("torch", torch_, note="torch has no out= here: its result is a new array"),
        Provider("NumPy", numpy_, note="its result is a new array"),
    ]
    return Table("rms_norm, matrix, float32", [case], providers, _OUTSIDE)


# ---------------------------------------------------------------- softmax and swiglu


def _softmax(name: str) -> Table:
    function = getattr(whet, name)
    naive = naive_softmax if name == "softmax" else naive_log_softmax

    def torch_(x: np.ndarray) -> Call:
        import torch

        tensor, f = torch.from_numpy(x), getattr(torch, name)
        return lambda: f(tensor, -1)

    cases = [
        Case(
            f"{rows} x {n}",
            partial(_normal, rows, n),
            lambda x: naive(x.astype(np.float64)),
            5e-6,
            n_bytes=8.0 * rows * n,
            n_items=rows,
        )
        for rows, n in ((1, 4096), (32, 2048), (8, 49_152), (64, 128_256))
    ]
    providers = [
        Provider("whet", lambda x: lambda: function(x)),
        Provider("torch", torch_),
        Provider("NumPy", lambda x: lambda: naive(x)),
    ]
    return Table(f"{name}, float32", cases, providers, _INSIDE, item="rows")


def _normal(rows: int, n: int, rng: np.random.Generator) -> np.ndarray:
    return 4 * rng.standard_normal((rows, n), np.float32)


def _swiglu() -> Table:
    def torch_(v: Sequence[np.ndarray]) -> Call:
        import torch

        gate, up = (torch.from_numpy(a) for a in v)
        return lambda: torch.nn.functional.silu(gate) * up

    cases = [
        Case(
            f"{tokens} x {n}",
            partial(_pair, tokens, n),
            lambda v: naive_swiglu(*(a.astype(np.float64) for a in v)),
            5e-6,
            n_bytes=12.0 * tokens * n,
            n_items=tokens,
        )
        for tokens, n in ((1, 1536), (1, 11_008), (32, 1536), (512, 11_008))
    ]
    providers = [
        Provider("whet", lambda v: lambda: whet.swiglu(*v)),
        Provider("torch", torch_, note="silu(gate) * up, two kernels"),
        Provider("NumPy", lambda v: lambda: naive_swiglu(*v)),
    ]
    return Table("swiglu, float32", cases, providers, _INSIDE, item="tokens")


def _pair(rows: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return _normal(rows, n, rng), _normal(rows, n, rng)


# ---------------------------------------------------------------- KV cache

_KV_HEADS, _HEAD_DIM, _T_MAX = 8, 128, 4096


def _tokens(batch: int, t_max: int, n_tokens: int, rng: np.random.Generator) -> Tokens:
    cache = np.zeros((batch, t_max, _KV_HEADS, _HEAD_DIM), np.float32)
    new = rng.standard_normal((batch, n_tokens, _KV_HEADS, _HEAD_DIM), np.float32)
    return Tokens(cache, new, rng.integers(0, t_max - n_tokens + 1, batch))


def _kv_append() -> Table:
    def whet_(t: Tokens) -> Call:
        cache = t.cache.copy()
        return lambda: whet.kv_append(cache, t.new, t.positions)

    def torch_(t: Tokens) -> Call:
        import torch

        cache, new, positions = (torch.from_numpy(a) for a in (t.cache.copy(), t.new, t.positions))
        rows = torch.arange(len(positions))[:, None]
        columns = positions[:, None] + torch.arange(new.shape[1])
        return lambda: cache.index_put_((rows, columns), new)

    def numpy_(t: Tokens) -> Call:
        cache = t.cache.copy()
        return lambda: naive_kv_append(cache, t.new, t.positions)

    token_bytes = 4 * _KV_HEADS * _HEAD_DIM
    shapes = ((8, _T_MAX, 1), (32, 1024, 1), *((1, _T_MAX, n) for n in _RUVLLM_KV))
    cases = [
        Case(
            f"{batch} x {n_tokens} tokens",
            partial(_tokens, batch, t_max, n_tokens),
            lambda t: naive_kv_append(t.cache.copy(), t.new, t.positions),
            0.0,
            n_bytes=2.0 * batch * n_tokens * token_bytes,
            n_items=batch * n_tokens,
            published={"RuvLLM": _RUVLLM_KV[n_tokens]} if n_tokens in _RUVLLM_KV else {},
            note=_NOT_AN_APPEND if n_tokens in _RUVLLM_KV else "",
        )
        for batch, t_max, n_tokens in shapes
    ]
    providers = [
        Provider("whet", whet_),
        Provider("torch", torch_, note="index_put_, its indices made before"),
        Provider("NumPy", numpy_, note="a slice assignment for each sequence"),
    ]
    note = (
        f"{_KV_HEADS} KV heads of {_HEAD_DIM} in float32: a token's keys are {token_bytes} bytes, its values as many. "
        "Bytes are those read and written, of the keys only."
    )
    return Table("KV append, float32", cases, providers, _OUTSIDE, note, item="tokens")
