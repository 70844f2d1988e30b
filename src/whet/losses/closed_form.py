"""A loss has one definition: its value and its gradient in closed form, in float64, over NumPy arrays.

``accepts_tensors`` lets the same function take torch tensors and return a scalar that autograd differentiates. torch is
not imported here.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from whet.ops.inputs import is_tensor, tensor_to_numpy


class Loss(NamedTuple):
    """A loss of NumPy arrays.

    Attributes:
        value: the loss.
        metrics: by name.
        gradients: d value / d argument, float64, by the argument's name; absent arguments have gradient 0.
    """

    value: float
    metrics: dict[str, float]
    gradients: dict[str, np.ndarray]


def accepts_tensors(*differentiable: str) -> Callable[[Callable[..., Loss]], Callable[..., Any]]:
    """Decorate a loss of NumPy arrays to also take torch tensors, of any device and floating-point dtype.

    Args:
        differentiable: arguments that the loss is differentiated in; the first one is required, and gives a tensor loss
            its dtype and device.

    Returns:
        A function that returns ``(loss, metrics)`` with a scalar tensor if any argument is a tensor, and ``Loss``
        otherwise. The second derivative is not defined.
    """

    def decorate(compute: Callable[..., Loss]) -> Callable[..., Any]:
        signature = inspect.signature(compute)

        @functools.wraps(compute)
        def loss(*args: Any, **options: Any) -> Any:
            arguments = signature.bind(*args, **options).arguments
            tensors = {name: value for name, value in arguments.items() if is_tensor(value)}
            if not tensors:
                return compute(**arguments)
            arrays = {name: tensor_to_numpy(compute.__name__, name, value) for name, value in tensors.items()}
            found = compute(**{**arguments, **arrays})
            at = [tensors[name] for name in differentiable if name in tensors]
            return _apply(found, at, [found.gradients.get(name) for name in differentiable if name in tensors])

        return loss

    return decorate


def _apply(found: Loss, at: list[Any], gradients: list[np.ndarray | None]) -> tuple[Any, dict[str, float]]:
    return _function().apply(found.value, gradients, *at), found.metrics


@functools.cache
def _function() -> Any:
    torch = sys.modules["torch"]

    class ClosedForm(torch.autograd.Function):
        """The scalar ``value``, with ``gradients`` with respect to ``tensors``; None: independent of it."""

        @staticmethod
        def forward(ctx: Any, value: float, gradients: list[np.ndarray | None], *tensors: Any) -> Any:
            ctx.gradients = [
                None if gradient is None else torch.from_numpy(gradient).to(tensor)
                for gradient, tensor in zip(gradients, tensors, strict=True)
            ]
            return tensors[0].new_tensor(value)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            [grad] = grad_outputs
            return None, None, *(None if gradient is None else grad * gradient for gradient in ctx.gradients)

    return ClosedForm
