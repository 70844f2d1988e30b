"""Assertions on autograd functions: value and gradients against a definition in float64."""

from __future__ import annotations

import torch
from torch import Tensor

GENERATOR = torch.Generator().manual_seed(11)
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Bound of the norm of a difference, relative to the norm of the exact value plus a tenth of the norm of the incoming
gradient, because some gradients are sums that cancel. The inputs are exact in both dtypes."""


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).bfloat16().to(dtype)


def compare(function, definition, inputs: list[Tensor], bound: float) -> None:
    """Assert that value and gradients of ``function`` equal those that ``definition`` has in float64."""
    given = [x.clone().requires_grad_() for x in inputs]
    doubles = [x.double().requires_grad_() for x in inputs]
    got, right = function(*given), definition(*doubles)
    assert got.shape == right.shape
    grad = normal(*got.shape).to(got.dtype)
    got.backward(grad)
    right.backward(grad.double())
    pairs = [(got, right), *((x.grad, y.grad) for x, y in zip(given, doubles, strict=True))]
    for i, (value, exact) in enumerate(pairs):
        error = (value.double() - exact).norm() / (exact.norm() + 0.1 * grad.double().norm())
        assert error < bound, f"{'value' if i == 0 else f'gradient {i - 1}'}: {error:.2g}"


def capped(logits: Tensor, cap: float) -> Tensor:
    return cap * (logits / cap).tanh() if cap else logits
