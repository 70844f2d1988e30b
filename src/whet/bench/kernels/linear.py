"""Tables of matrix products: gemm, gemv, and the linear layer on packed and quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import matmul
from typing import Any, Literal, NamedTuple

import numpy as np

import whet
from whet.bench.case import BenchOptions, Call, Case, Provider, Table, to_array
from whet.bench.prepare import (
    ITEM_BYTES,
    Dtype,
    Function,
    in_dtype,
    in_float64,
    normal,
    on_arrays,
    on_tensors,
    resolve,
    tensor,
)
from whet.ops.quant import CORE_TABLE, FORMATS, bf16_values

# RuvLLM 2.0's document: an Apple M4 Pro, float32.
_RUVLLM_GEMM = {128: 216.89e-6, 256: 1.76e-3, 512: 16.71e-3}
_RUVLLM_GEMV = {256: 3.12e-6, 512: 13.83e-6, 1024: 58.09e-6, 2048: 263.76e-6, 4096: 1.36e-3}
_ONE_THREAD = "RuvLLM's figure is for one thread"
_INSIDE = "inside: the result is a new array"
_ERROR = {"float32": 2e-5, "bfloat16": 0.03}  # relative to a typical element; bfloat16 rounds the largest by 2^-9


def product_error(answer: Any, reference: np.ndarray) -> float:
    """Return the largest difference relative to a typical element of the product (its root mean square)."""
    return float(np.abs(to_array(answer) - reference).max() / np.sqrt(np.mean(reference**2)))


def _providers(dtype: Dtype, ours: Function, plain: Function, **options: Any) -> list[Provider]:
    """Create providers of Whet's function, and of a plain one for torch and, if it has the dtype, NumPy."""
    numpy_ = [Provider("NumPy", on_arrays(plain))] if dtype == "float32" else []
    return [
        Provider("whet", in_dtype(ours, dtype, **options)),
        Provider("torch", on_tensors(plain, dtype)),
        *numpy_,
    ]


def _times_transposed(x: Any, w: Any) -> Any:
    return x @ w.T


def _gemm(dtype: Dtype, sizes: list[int], published: Mapping[int, float]) -> Table:
    cases = [
        Case(
            f"{n} x {n} x {n}",
            lambda rng, n=n: (normal(rng, (n, n), dtype), normal(rng, (n, n), dtype)),
            in_float64(_times_transposed),
            _ERROR[dtype],
            n_bytes=3 * n * n * ITEM_BYTES[dtype],
            n_flops=2 * n**3,
            flop_dtype=dtype,
            size=n,
            thread_scaling=n == 1024,
            published={"RuvLLM": published[n]} if n in published else {},
            note=_ONE_THREAD if n in published else "",
        )
        for n in sizes
    ]
    return Table(
        f"GEMM, {dtype}",
        cases,
        _providers(dtype, whet.gemm, _times_transposed, transpose_b=True),
        allocation=_INSIDE,
        note="C = A B^T with B stored like the weight of a linear layer; the timing includes packing B; 2 m n k "
        "operations.",
        size_label="size of the square matrices",
        error=product_error,
    )


def _gemv(dtype: Dtype, shapes: list[tuple[int, int]], published: Mapping[int, float]) -> Table:
    def case(n: int, k: int) -> Case:
        def inputs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
            x = normal(rng, (k,), dtype)
            return normal(rng, (n, k), dtype), x

        matrix_bytes = n * k * ITEM_BYTES[dtype]
        note = _ONE_THREAD if n < 4096 else "RuvLLM's 35.9 GFLOP/s are 24.7 by its own time"
        return Case(
            f"{n} x {k}",
            inputs,
            in_float64(matmul),
            _ERROR[dtype],
            n_bytes=matrix_bytes,
            n_flops=2 * n * k,
            size=matrix_bytes,
            thread_scaling=(n, k) == (4096, 4096),
            published={"RuvLLM": published[n]} if n in published else {},
            note=note if n in published else "",
        )

    return Table(
        f"GEMV, {dtype}",
        [case(*shape) for shape in shapes],
        _providers(dtype, whet.gemv, matmul),
        allocation=_INSIDE,
        note="y = A x with the matrix unpacked, row-major.",
        size_label="bytes of the matrix",
        error=product_error,
    )


# --- the linear layer ---------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """x (M, K), a weight w (N, K), whose product is x w^T, and the packed weight."""

    x: np.ndarray
    w: np.ndarray
    packed: whet.PackedWeight


def _layer(m: int, n: int, k: int, format: str) -> Callable[[np.random.Generator], Layer]:
    """Make inputs that int8 in blocks of 32 represents exactly, and the weight with the format's rounding."""

    def make(rng: np.random.Generator) -> Layer:
        x = rng.integers(-127, 128, (m, k)).astype(np.float32)
        x[:, ::32] = 127
        packed = whet.pack_weight(rng.standard_normal((n, k), np.float32), format)
        w: Any = packed.unpack()
        w = w.dequantize() if format in FORMATS else bf16_values(w) if format == "bfloat16" else w
        return Layer(x, w, packed)

    return make


def _torch_linear(layer: Layer) -> Call:
    return partial(resolve("torch.nn.functional:linear"), *(tensor(a, "bfloat16") for a in layer[:2]))


def _linear(
    m: int, formats: list[str], shapes: list[tuple[int, int]], cold_shapes: Sequence[tuple[int, int]] = ()
) -> Table:
    """Create the table of the linear layer: for each format, shapes whose rows are whole blocks, warm and cold."""
    flop_dtypes: dict[str, Any] = {"float32": "float32", "bfloat16": "bfloat16"}
    caches: dict[Literal["warm", "cold"], Sequence[tuple[int, int]]] = {"warm": shapes, "cold": cold_shapes}
    cases = [
        Case(
            f"{format} {n} x {k}{', cold' if cache == 'cold' else ''}",
            _layer(m, n, k, format),
            lambda layer: in_float64(_times_transposed)(layer[:2]),
            1e-4 if format in FORMATS else _ERROR["float32"],
            n_bytes=n * CORE_TABLE[format].row_bytes(k),
            n_flops=2 * m * n * k,
            flop_dtype=flop_dtypes.get(format, "int8"),
            cache=cache,
            n_items=m,
            thread_scaling=cache == "warm" and (n, k) == (4096, 4096) and format in ("bfloat16", "int8"),
        )
        for format in formats
        for cache, some in caches.items()
        for n, k in some
        if k % CORE_TABLE[format].block_length == 0
    ]
    rounded = "torch bfloat16: the same weights rounded to bfloat16."
    return Table(
        f"Linear layer, {m} row{'s' if m > 1 else ''}",
        cases,
        [
            Provider("whet", lambda layer: partial(whet.linear, layer.x, layer.packed)),
            Provider("torch bfloat16", _torch_linear, tolerance=_ERROR["bfloat16"], note=rounded),
        ],
        allocation=_INSIDE,
        note="x W^T with a packed weight; the timing includes rounding x to bfloat16 or int8. Bytes count the format's "
        "blocks with their scales.",
        item="rows",
        error=product_error,
    )


def tables(options: BenchOptions) -> list[Table]:
    """Create the tables of products; if quick, only small ones."""
    large = [(4096, 4096), (11008, 4096)]
    if options.quick:
        return [
            _gemm("float32", [128, 256, 512], _RUVLLM_GEMM),
            _gemm("bfloat16", [512], {}),
            _gemv("float32", [(256, 256), (1024, 1024)], _RUVLLM_GEMV),
            _linear(1, ["bfloat16", "int8", "q4_k"], [(1536, 768)]),
            _linear(32, ["bfloat16", "int8"], [(1536, 768)]),
        ]
    return [
        _gemm("float32", [128, 256, 512, 1024, 2048], _RUVLLM_GEMM),
        _gemm("bfloat16", [512, 1024, 2048], {}),
        _gemv("float32", [(n, n) for n in _RUVLLM_GEMV] + large[1:], _RUVLLM_GEMV),
        _gemv("bfloat16", large, {}),
        _linear(1, list(CORE_TABLE), large, cold_shapes=large[:1]),
        _linear(32, list(CORE_TABLE), [(1536, 576), (576, 1536), (4096, 4096)]),
    ]
