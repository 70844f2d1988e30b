"""Tables of low-rank adapters: forward pass and gradients of one row, and batches with an adapter per row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import whet
from whet.bench.case import BenchOptions, Call, Case, Provider, Table
from whet.bench.kernels.linear import product_error
from whet.bench.prepare import normal, tensor

ALPHA = 4.0
# (features, rank) -> seconds in RuvLLM 2.0's document, an Apple M4 Pro: compiled Rust, scalar and SIMD.
_FORWARD = {
    (768, 1): (954.09e-9, 306.88e-9), (768, 2): (1.58e-6, 484.19e-9), (2048, 1): (2.52e-6, 822.57e-9),
    (2048, 2): (4.31e-6, 1.33e-6), (4096, 1): (5.07e-6, 1.65e-6), (4096, 2): (8.56e-6, 2.61e-6),
}  # fmt: skip
_GRADIENT = {768: 2.6e-6, 2048: 6.5e-6, 4096: 21.9e-6}


class Inputs(NamedTuple):
    """Rows x and y (or dL/dy) of a square layer, and adapters whose B is not zero."""

    x: np.ndarray
    y: np.ndarray
    adapters: list[whet.MicroLoRA]


def _inputs(n_rows: int, n: int, rank: int, n_adapters: int = 1) -> Callable[[np.random.Generator], Inputs]:
    def adapter(rng: np.random.Generator) -> whet.MicroLoRA:
        a, b = normal(rng, (rank, n)) / np.float32(np.sqrt(n)), normal(rng, (rank, n))
        return whet.MicroLoRA.from_arrays(a, b, ALPHA)

    def make(rng: np.random.Generator) -> Inputs:
        adapters = [adapter(rng) for _ in range(n_adapters)]
        return Inputs(normal(rng, (n_rows, n)), normal(rng, (n_rows, n)), adapters)

    return make


def _forward_case(name: str, n_rows: int, n: int, rank: int, n_adapters: int = 1, **fields: Any) -> Case:
    """Create a forward case; rows cycle through the adapters."""
    return Case(
        name,
        _inputs(n_rows, n, rank, n_adapters),
        _forward_reference,
        1e-4,
        n_bytes=4 * (3 * n_rows * n + 2 * rank * n * n_adapters),
        n_flops=4 * n_rows * rank * n,
        n_items=n_rows,
        **fields,
    )


# --- forward ----------------------------------------------------------------------------------------------
# Every call adds the delta again to the provider's copy of y. Only the first call is checked.


def _forward_reference(inputs: Inputs) -> np.ndarray:
    x, n = inputs.x.astype(np.float64), len(inputs.adapters)
    chosen = [inputs.adapters[i % n] for i in range(len(x))]
    return inputs.y + np.stack([a.scale * (row @ a.A.T) @ a.B for row, a in zip(x, chosen, strict=True)])


def _whet_forward(inputs: Inputs) -> Call:
    return partial(inputs.adapters[0].forward, inputs.x, inputs.y.copy())


def _torch_forward(inputs: Inputs) -> Call:
    import torch

    adapter = inputs.adapters[0]
    a = tensor(np.ascontiguousarray(adapter.A.T))  # (in, r): the faster of the two layouts
    x, y, b = map(tensor, (inputs.x, inputs.y.copy(), adapter.B))
    scale = adapter.scale

    def call() -> Any:
        with torch.inference_mode():
            return y.add_((x @ a) @ b, alpha=scale)

    return call


def _numpy_forward(inputs: Inputs) -> Call:
    x, y, adapter = inputs.x, inputs.y.copy(), inputs.adapters[0]
    a, b, scale = adapter.A.T, adapter.B, np.float32(adapter.scale)

    def call() -> np.ndarray:
        nonlocal y
        y += (scale * (x @ a)) @ b
        return y

    return call


def _forward(sizes: list[int], ranks: list[int], n_rows: int = 1) -> Table:
    def case(n: int, rank: int) -> Case:
        name = f"{n} x {n}, rank {rank}"
        if n_rows > 1 or (n, rank) not in _FORWARD:
            return _forward_case(name, n_rows, n, rank)
        published = dict(zip(("RuvLLM scalar", "RuvLLM SIMD"), _FORWARD[n, rank], strict=True))
        return _forward_case(name, n_rows, n, rank, published=published, note="RuvLLM's B was all zero.")

    return Table(
        f"MicroLoRA forward, {n_rows} row{'s' if n_rows > 1 else ''}",
        [case(n, rank) for n in sizes for rank in ranks],
        [Provider("whet", _whet_forward), Provider("torch", _torch_forward), Provider("NumPy", _numpy_forward)],
        allocation="none for Whet: y is written in place; inside for torch and NumPy: intermediate arrays",
        note="y += s (x A) B, float32, including the call from Python. RuvLLM's figures are for compiled Rust.",
        item="rows",
    )


# --- gradients --------------------------------------------------------------------------------------------


def _gradient_reference(inputs: Inputs) -> np.ndarray:
    x, g, adapter = inputs.x.astype(np.float64), inputs.y.astype(np.float64), inputs.adapters[0]
    return adapter.scale * np.stack([(g @ adapter.B.T).T @ x, (x @ adapter.A.T).T @ g])


def _whet_gradient(inputs: Inputs) -> Call:
    adapter = whet.MicroLoRA.from_arrays(inputs.adapters[0].A, inputs.adapters[0].B, ALPHA)
    x, g = inputs.x, inputs.y

    def call() -> Any:
        adapter.accumulate(x, g)
        return adapter.gradients

    return call


def _torch_gradient(inputs: Inputs) -> Call:
    import torch

    adapter = inputs.adapters[0]
    x, g, a, b = map(tensor, (inputs.x, inputs.y, adapter.A, adapter.B))
    grad_a, grad_b, scale = torch.zeros_like(a), torch.zeros_like(b), adapter.scale

    def call() -> Any:
        with torch.inference_mode():
            grad_a.addmm_((g @ b.T).T, x, alpha=scale)
            grad_b.addmm_((x @ a.T).T, g, alpha=scale)
        return grad_a, grad_b

    return call


def _numpy_gradient(inputs: Inputs) -> Call:
    x, g, adapter = inputs.x, inputs.y, inputs.adapters[0]
    a, b, scale = adapter.A, adapter.B, np.float32(adapter.scale)
    grad_a, grad_b = np.zeros_like(a), np.zeros_like(b)

    def call() -> Any:
        nonlocal grad_a, grad_b
        grad_a += (scale * (g @ b.T)).T @ x
        grad_b += (scale * (x @ a.T)).T @ g
        return grad_a, grad_b

    return call


def _gradient(sizes: list[int], rank: int = 2) -> Table:
    cases = [
        Case(
            f"{n} x {n}, rank {rank}",
            _inputs(1, n, rank),
            _gradient_reference,
            2e-5,
            n_bytes=4 * (2 * n + 6 * rank * n),
            n_flops=8 * rank * n,
            n_items=1,
            published={"RuvLLM": _GRADIENT[n]},
        )
        for n in sizes
    ]
    return Table(
        "MicroLoRA gradient accumulation, 1 row",
        cases,
        [Provider("whet", _whet_gradient), Provider("torch", _torch_gradient), Provider("NumPy", _numpy_gradient)],
        allocation="none for Whet: gradients accumulate in place",
        note="G_A += s (g B^T)^T x and G_B += s (x A)^T g, from a real gradient g.",
        item="rows",
        error=product_error,
    )


# --- an adapter per row -----------------------------------------------------------------------------------


def _whet_batch(inputs: Inputs) -> Call:
    index = np.arange(len(inputs.x)) % len(inputs.adapters)
    return partial(whet.lora_batch, inputs.x, inputs.y.copy(), whet.LoRAStack(inputs.adapters), index)


def _torch_batch(inputs: Inputs) -> Call:
    import torch

    adapters, scale = inputs.adapters, inputs.adapters[0].scale
    a, b = np.stack([adapter.A.T for adapter in adapters]), np.stack([adapter.B for adapter in adapters])
    x, y, a, b = map(tensor, (inputs.x, inputs.y.copy(), a, b))
    index = torch.arange(len(x)) % len(adapters)

    def call() -> Any:
        with torch.inference_mode():
            return y.add_(torch.bmm(torch.bmm(x[:, None], a[index]), b[index])[:, 0], alpha=scale)

    return call


def _batch(n: int, rank: int, rows: list[int], n_adapters: int = 4) -> Table:
    cases = [
        _forward_case(f"{count} rows, {n} x {n}, rank {rank}", count, n, rank, n_adapters, size=count) for count in rows
    ]
    return Table(
        f"MicroLoRA forward, cycling {n_adapters} adapters",
        cases,
        [Provider("whet", _whet_batch), Provider("torch", _torch_batch, note="gathers each row's adapter, then bmm")],
        allocation="none for Whet: y is written in place; inside for torch: intermediate arrays",
        note="Each row has its own adapter, as in a batch of sequences of several users.",
        item="rows",
        size_label="rows",
    )


def tables(options: BenchOptions) -> list[Table]:
    """Create the tables of RuvLLM's document, and of batches with many rows and adapters, which it lacks."""
    sizes = [768, 4096] if options.quick else [768, 2048, 4096]
    return [
        _forward(sizes, [1, 2] if options.quick else [1, 2, 8]),
        _forward([2048], [2, 8], n_rows=64),
        _gradient(sizes),
        _batch(2048, 2, [8] if options.quick else [1, 8, 64]),
    ]
