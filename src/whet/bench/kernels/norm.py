"""Tables of norms, softmax, activations and the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import whet
from whet.bench.case import BenchOptions, Call, Case, Provider, Table
from whet.bench.prepare import Prepare, in_float64, normal, on_arrays, on_tensors, resolve, tensor
from whet.ops.activations import naive_log_softmax, naive_softcap, naive_softmax, naive_swiglu
from whet.ops.kv_cache import naive_kv_append
from whet.ops.norm import naive_layer_norm, naive_rms_norm

# RuvLLM 2.0's document: an Apple M4 Pro, float32, one vector.
_RUVLLM_RMS = {768: 143.65e-9, 1024: 179.06e-9, 2048: 342.72e-9, 4096: 620.40e-9, 8192: 1.19e-6}
_RUVLLM_LAYER = {768: 192.06e-9, 1024: 252.64e-9, 2048: 489.09e-9, 4096: 938.30e-9}
_WITH_COPY = "the timing of RuvLLM's document includes a copy of x"
_NOT_AN_APPEND = "the row of RuvLLM's document is its attention over this many tokens, not an append"
_RUVLLM_KV = {256: 6e-6, 512: 12e-6, 1024: 24e-6, 2048: 48e-6}

_INSIDE = "inside: the result is a new array"
_OUTSIDE = "outside: the result is written to a given array"
_ERROR = 2e-6
_EPS = 1e-6


def tables(options: BenchOptions) -> list[Table]:
    """Create all tables of this family."""
    norms = [_one_row("rms_norm", naive_rms_norm, _RUVLLM_RMS), _one_row("layer_norm", naive_layer_norm, _RUVLLM_LAYER)]
    softmaxes = [_softmax("softmax", naive_softmax), _softmax("log_softmax", naive_log_softmax)]
    return [*norms, _matrix(), *softmaxes, _swiglu(), _softcap(), _kv_append()]


def _inputs(*shapes: tuple[int, ...], scale: float = 1) -> Callable[[np.random.Generator], list[np.ndarray]]:
    return lambda rng: [scale * normal(rng, shape) for shape in shapes]


def _providers(name: str, torch_: Prepare, naive: Any, note: str = "", **options: Any) -> list[Provider]:
    """Create providers of Whet's function ``name``, torch, and the NumPy definition."""
    return [
        Provider("whet", on_arrays(getattr(whet, name), **options)),
        Provider("torch", torch_, note=note),
        Provider("NumPy", on_arrays(naive, **options)),
    ]


# ---------------------------------------------------------------- norms


def _torch_norm(name: str, inputs: Sequence[np.ndarray]) -> Call:
    x, *parameters = map(tensor, inputs)
    return partial(resolve(f"torch.nn.functional:{name}"), x, x.shape[-1:], *parameters, eps=_EPS)


def _one_row(name: str, naive: Any, published: dict[int, float]) -> Table:
    n_parameters = 1 if name == "rms_norm" else 2
    cases = [
        Case(
            f"1 x {n}",
            _inputs((1, n), *[(n,)] * n_parameters),
            in_float64(naive, eps=_EPS),
            _ERROR,
            n_bytes=4.0 * n * (2 + n_parameters),
            size=n,
            published={"RuvLLM": published[n]} if n in published else {},
            note=_WITH_COPY if n in published else "",
        )
        for n in (768, 1024, 2048, 4096, 8192)
    ]
    note = "One row in cache: dominated by call overhead."
    providers = _providers(name, partial(_torch_norm, name), naive, eps=_EPS)
    return Table(f"{name}, one row, float32", cases, providers, _INSIDE, note, size_label="elements per row")


def _matrix() -> Table:
    n, naive = 4096, naive_rms_norm
    inputs, reference = _inputs((n, n), (n,)), in_float64(naive, eps=_EPS)
    case = Case(f"{n} x {n}", inputs, reference, _ERROR, n_bytes=8.0 * n * n, thread_scaling=True)
    providers = [
        Provider("whet", lambda v: partial(whet.rms_norm, *v, _EPS, out=np.empty_like(v[0]))),
        Provider("torch", partial(_torch_norm, "rms_norm"), note="torch has no out= here: its result is a new array"),
        Provider("NumPy", on_arrays(naive), note="its result is a new array"),
    ]
    return Table("rms_norm, matrix, float32", [case], providers, _OUTSIDE)


# ---------------------------------------------------------------- softmax and swiglu


def _rows(naive: Any, n_arrays: int, shapes: Sequence[tuple[int, int]]) -> list[Case]:
    """Create a case per shape with ``n_arrays`` inputs of normal numbers with a standard deviation of 4."""
    return [
        Case(
            f"{rows} x {n}",
            _inputs(*[(rows, n)] * n_arrays, scale=4),
            in_float64(naive),
            5e-6,
            n_bytes=4.0 * (n_arrays + 1) * rows * n,
            n_items=rows,
        )
        for rows, n in shapes
    ]


def _softmax(name: str, naive: Any) -> Table:
    cases = _rows(naive, 1, ((1, 4096), (32, 2048), (8, 49_152), (64, 128_256)))
    providers = _providers(name, on_tensors(f"torch:{name}", dim=-1), naive)
    return Table(f"{name}, float32", cases, providers, _INSIDE, item="rows")


def _swiglu() -> Table:
    def torch_(inputs: Sequence[np.ndarray]) -> Call:
        gate, up = map(tensor, inputs)
        silu = resolve("torch.nn.functional:silu")
        return lambda: silu(gate) * up

    cases = _rows(naive_swiglu, 2, ((1, 1536), (1, 11_008), (32, 1536), (512, 11_008)))
    providers = _providers("swiglu", torch_, naive_swiglu, note="silu(gate) * up, two kernels")
    return Table("swiglu, float32", cases, providers, _INSIDE, item="tokens")


def _softcap() -> Table:
    def torch_(inputs: Sequence[np.ndarray]) -> Call:
        x = tensor(inputs[0])
        return lambda: 2.0 * (x / 2.0).tanh()

    cases = _rows(partial(naive_softcap, cap=2.0), 1, ((1, 32_768), (64, 32_768)))
    providers = _providers("softcap", torch_, naive_softcap, note="three kernels", cap=2.0)
    return Table("softcap, float32", cases, providers, _INSIDE, item="rows")


# ---------------------------------------------------------------- KV cache

_KV_HEADS, _HEAD_DIM, _T_MAX = 8, 128, 4096


class Tokens(NamedTuple):
    """A cache (B, T_max, H_kv, D), new tokens (B, T, H_kv, D) and their positions (B,)."""

    cache: np.ndarray
    new: np.ndarray
    positions: np.ndarray

    def fresh(self) -> Tokens:
        """Copy the cache, which the call writes."""
        return self._replace(cache=self.cache.copy())


def _tokens(batch: int, t_max: int, n_tokens: int, rng: np.random.Generator) -> Tokens:
    cache = np.zeros((batch, t_max, _KV_HEADS, _HEAD_DIM), np.float32)
    new = rng.standard_normal((batch, n_tokens, _KV_HEADS, _HEAD_DIM), np.float32)
    return Tokens(cache, new, rng.integers(0, t_max - n_tokens + 1, batch))


def _kv_append() -> Table:
    def torch_(t: Tokens) -> Call:
        import torch

        cache, new, positions = map(tensor, t.fresh())
        rows = torch.arange(len(positions))[:, None]
        columns = positions[:, None] + torch.arange(new.shape[1])
        return lambda: cache.index_put_((rows, columns), new)

    token_bytes = 4 * _KV_HEADS * _HEAD_DIM
    shapes = ((8, _T_MAX, 1), (32, 1024, 1), *((1, _T_MAX, n) for n in _RUVLLM_KV))
    cases = [
        Case(
            f"{batch} x {n_tokens} tokens",
            partial(_tokens, batch, t_max, n_tokens),
            lambda t: naive_kv_append(*t.fresh()),
            0.0,
            n_bytes=2.0 * batch * n_tokens * token_bytes,
            n_items=batch * n_tokens,
            published={"RuvLLM": _RUVLLM_KV[n_tokens]} if n_tokens in _RUVLLM_KV else {},
            note=_NOT_AN_APPEND if n_tokens in _RUVLLM_KV else "",
        )
        for batch, t_max, n_tokens in shapes
    ]
    providers = [
        Provider("whet", lambda t: partial(whet.kv_append, *t.fresh())),
        Provider("torch", torch_, note="index_put_ with precomputed indices"),
        Provider("NumPy", lambda t: partial(naive_kv_append, *t.fresh()), note="a slice assignment for each sequence"),
    ]
    note = (
        f"{_KV_HEADS} KV heads of {_HEAD_DIM} in float32: {token_bytes} bytes of keys per token, as many of values. "
        "Bytes count reads and writes of the keys only."
    )
    return Table("KV append, float32", cases, providers, _OUTSIDE, note, item="tokens")
