"""Tables of the matrix products: gemm, gemv, and the linear layer on packed and quantised weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import whet
from whet.bench.case import BenchOptions, Call, Case, Provider, Table
from whet.ops.quant import FORMATS, bf16_bits, bf16_values

# RuvLLM 2.0's document: an Apple M4 Pro, float32.
_RUVLLM_GEMM = {128: 216.89e-6, 256: 1.76e-3, 512: 16.71e-3}
_RUVLLM_GEMV = {256: 3.12e-6, 512: 13.83e-6, 1024: 58.09e-6, 2048: 263.76e-6, 4096: 1.36e-3}
_ONE_THREAD = "RuvLLM's figure is of one thread"
_INSIDE = "inside: the result is a new array"
_FLOAT32_ERROR, _BFLOAT16_ERROR = 2e-5, 0.03  # of a typical element; bfloat16 rounds the largest at 2^-9


class Product(NamedTuple):
    """x (M, K) and a weight w (N, K), whose product is x w^T; ``packed`` is the weight as the linear layer takes it."""

    x: np.ndarray
    w: np.ndarray
    packed: whet.PackedWeight | None = None


def _normal(m: int, n: int, k: int, dtype: str) -> Callable[[np.random.Generator], Product]:
    def make(rng: np.random.Generator) -> Product:
        x, w = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (n, k)))
        # Numbers that bfloat16 represents exactly: every provider starts from the same.
        return Product(x, w) if dtype == "float32" else Product(bf16_values(bf16_bits(x)), bf16_values(bf16_bits(w)))

    return make


def _for_linear(m: int, n: int, k: int, format: str) -> Callable[[np.random.Generator], Product]:
    """Inputs that int8 in blocks of 32 represents exactly, and the weight as the format stores it."""

    def make(rng: np.random.Generator) -> Product:
        x = rng.integers(-127, 128, (m, k)).astype(np.float32)
        x[:, ::32] = 127
        packed = whet.pack_weight(rng.standard_normal((n, k), np.float32), format)
        unpacked: Any = packed.unpack()
        held = (
            unpacked.dequantize() if format in FORMATS else bf16_values(unpacked) if format == "bfloat16" else unpacked
        )
        return Product(x, held, packed)

    return make


def _exact(product: Product) -> np.ndarray:
    return product.x.astype(np.float64) @ product.w.T.astype(np.float64)


def product_error(answer: Any, reference: np.ndarray) -> float:
    """The largest difference, in units of a typical element of the product (the root of the mean square)."""
    got = answer.float().numpy() if hasattr(answer, "float") else answer
    return float(np.abs(got - reference).max() / np.sqrt(np.mean(reference**2)))


def _tensors(product: Product, dtype: str) -> tuple[Any, Any]:
    import torch

    return tuple(torch.from_numpy(a).to(getattr(torch, dtype)) for a in product[:2])  # type: ignore[return-value]


def _whet_gemm(dtype: str) -> Callable[[Product], Call]:
    def prepare(product: Product) -> Call:
        x, w = product[:2] if dtype == "float32" else _tensors(product, dtype)
        return lambda: whet.gemm(x, w, transpose_b=True)

    return prepare


def _torch_gemm(dtype: str) -> Callable[[Product], Call]:
    def prepare(product: Product) -> Call:
        x, w = _tensors(product, dtype)
        return lambda: x @ w.T

    return prepare


def _numpy_gemm(product: Product) -> Call:
    return lambda: product.x @ product.w.T


def _gemm(dtype: str, sizes: list[int]) -> Table:
    cases = [
        Case(
            f"{n} x {n} x {n}",
            _normal(n, n, n, dtype),
            _exact,
            _FLOAT32_ERROR if dtype == "float32" else _BFLOAT16_ERROR,
            n_bytes=3 * n * n * (4 if dtype == "float32" else 2),
            n_flops=2 * n**3,
            flop_dtype="float32" if dtype == "float32" else "bfloat16",
            size=n,
            thread_scaling=n == 1024,
            published={"RuvLLM": _RUVLLM_GEMM[n]} if dtype == "float32" and n in _RUVLLM_GEMM else {},
            note=_ONE_THREAD if dtype == "float32" and n in _RUVLLM_GEMM else "",
        )
        for n in sizes
    ]
    providers = [Provider("whet", _whet_gemm(dtype)), Provider("torch", _torch_gemm(dtype))]
    if dtype == "float32":
        providers.append(Provider("NumPy", _numpy_gemm))
    return Table(
        f"GEMM, {dtype}",
        cases,
        providers,
        allocation=_INSIDE,
        note="C = A B^T with B as a linear layer keeps its weight; packing B is inside the timing; 2 m n k operations.",
        size_label="size of the square matrices",
        error=product_error,
    )


def _whet_gemv(dtype: str) -> Callable[[Product], Call]:
    def prepare(product: Product) -> Call:
        x, w = product[:2] if dtype == "float32" else _tensors(product, dtype)
        vector = x[0]
        return lambda: whet.gemv(w, vector)

    return prepare


def _torch_gemv(dtype: str) -> Callable[[Product], Call]:
    def prepare(product: Product) -> Call:
        x, w = _tensors(product, dtype)
        vector = x[0]
        return lambda: w @ vector

    return prepare


def _numpy_gemv(product: Product) -> Call:
    vector = product.x[0]
    return lambda: product.w @ vector


def _gemv(dtype: str, shapes: list[tuple[int, int]]) -> Table:
    width = 4 if dtype == "float32" else 2
    cases = [
        Case(
            f"{n} x {k}",
            _normal(1, n, k, dtype),
            lambda product: _exact(product)[0],
            _FLOAT32_ERROR if dtype == "float32" else _BFLOAT16_ERROR,
            n_bytes=n * k * width,
            n_flops=2 * n * k,
            flop_dtype="float32",
            size=n * k * width,
            thread_scaling=(n, k) == (4096, 4096),
            published={"RuvLLM": _RUVLLM_GEMV[n]} if dtype == "float32" and n == k and n in _RUVLLM_GEMV else {},
            note=(_ONE_THREAD if n < 4096 else "RuvLLM's 35.9 GFLOP/s are 24.7 at its own time")
            if dtype == "float32" and n == k
            else "",
        )
        for n, k in shapes
    ]
    providers = [Provider("whet", _whet_gemv(dtype)), Provider("torch", _torch_gemv(dtype))]
    if dtype == "float32":
        providers.append(Provider("NumPy", _numpy_gemv))
    return Table(
        f"GEMV, {dtype}",
        cases,
        providers,
        allocation=_INSIDE,
        note="y = A x on the matrix as it lies in memory, row by row.",
        size_label="bytes of the matrix",
        error=product_error,
    )


def _whet_linear(product: Product) -> Call:
    packed = product.packed
    assert packed is not None
    return lambda: whet.linear(product.x, packed)


def _torch_linear(product: Product) -> Call:
    import torch

    x, w = _tensors(product, "bfloat16")
    return lambda: torch.nn.functional.linear(x, w)


def _linear(m: int, formats: list[str], shapes: list[tuple[int, int]]) -> Table:
    flop_dtypes: dict[str, Any] = {"float32": "float32", "bfloat16": "bfloat16"}
    bits = {"float32": 32, "bfloat16": 16, "int8": 8, "q8_0": 8.5, "q4_0": 4.5, "q4_k": 4.5}
    cases = [
        Case(
            f"{format} {n} x {k}",
            _for_linear(m, n, k, format),
            _exact,
            1e-4 if format in FORMATS else _FLOAT32_ERROR,
            n_bytes=n * k * bits[format] / 8,
            n_flops=2 * m * n * k,
            flop_dtype=flop_dtypes.get(format, "int8"),
            n_items=m,
            thread_scaling=(n, k) == (4096, 4096) and format in ("bfloat16", "int8"),
        )
        for format in formats
        for n, k in shapes
    ]
    return Table(
        f"Linear layer, {m} row{'s' if m > 1 else ''}",
        cases,
        [
            Provider("whet", _whet_linear),
            Provider(
                "torch bfloat16",
                _torch_linear,
                tolerance=_BFLOAT16_ERROR,
                note="torch bfloat16: on the same weights rounded to bfloat16.",
            ),
        ],
        allocation=_INSIDE,
        note="x W^T on a packed weight; rounding x to bfloat16 or int8 is inside the timing. Bytes are the format's "
        "own, scales counted.",
        item="rows",
        error=product_error,
    )


def tables(options: BenchOptions) -> list[Table]:
    """The products, only small ones where it has to be quick."""
    large = [(4096, 4096), (11008, 4096)]
    formats = ["float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_k"]
    if options.quick:
        return [
            _gemm("float32", [128, 256, 512]),
            _gemm("bfloat16", [512]),
            _gemv("float32", [(256, 256), (1024, 1024)]),
            _linear(1, ["bfloat16", "int8", "q4_k"], [(1536, 768)]),
            _linear(32, ["bfloat16", "int8"], [(1536, 768)]),
        ]
    return [
        _gemm("float32", [128, 256, 512, 1024, 2048]),
        _gemm("bfloat16", [512, 1024, 2048]),
        _gemv("float32", [(n, n) for n in _RUVLLM_GEMV] + large[1:]),
        _gemv("bfloat16", large),
        _linear(1, formats, large),
        _linear(32, ["float32", "bfloat16", "int8", "q8_0", "q4_0"], [(1536, 576), (576, 1536), (4096, 4096)]),
    ]
