"""The products of a low-rank adapter (LoRA) of rank 1 to 8: its delta and its gradients.

A linear layer y = W x gets a correction of rank r. Rows are samples; A is stored (r, in) and B (r, out), both float32,
so that forward and backward read memory in order, and s = alpha / r:

    forward     y += s (x A^T) B                               the delta is added to y, in place
    gradients   G_A += s (g B^T)^T x,   G_B += s (x A^T)^T g   g = dL/dy
    merge       W += s B^T A                                   W (out, in), as torch.nn.Linear stores it

Sums are float32 in a fixed order: results do not depend on threads or on the other rows. Not differentiable by torch.
``whet.ops.micro_lora`` is an adapter with an optimizer. ``whet.Engine`` has its own products for adapters, of any rank.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs

MAX_RANK = 8
_DTYPES = ("float32", "bfloat16")


# --- definitions ------------------------------------------------------------------------------------------


def naive_lora_forward(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Reference implementation of ``lora_forward``, in the arrays' own precision; returns a new array."""
    return y + scale * (x @ a.T) @ b


def naive_lora_gradients(
    x: np.ndarray, grad_y: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Reference implementation of the gradients that ``lora_accumulate`` adds, for rows (N, in) and (N, out)."""
    return scale * (grad_y @ b.T).T @ x, scale * (x @ a.T).T @ grad_y


# --- functions --------------------------------------------------------------------------------------------


def lora_forward(x: Any, y: Any, a: Any, b: Any, scale: float) -> Any:
    """Add scale (x a^T) b to y, in place.

    Args:
        x: (..., in), float32 or bfloat16, NumPy or torch (CPU); any row stride.
        y: (..., out), float32 or bfloat16, written to. A bfloat16 y is rounded once. It may be x itself, but not a
            shifted view of it.
        a: (r, in) float32, r in [1, 8].
        b: (r, out) float32.
        scale: s, usually alpha / r.

    Returns:
        y.

    Raises:
        WhetValueError: shapes disagree, r is not in [1, 8], y is read-only, or a tensor requires grad or is not on
            the CPU.
        WhetTypeError: another dtype, or y is not an array.
    """
    if _core.lora_forward(x, y, a, b, scale) is NotImplemented:
        name = "lora_forward"
        a, b = check_factors(name, a, b)
        rows = check_rows(name, "x", x, "a", a.shape[1])
        check_target(name, "y", y, (*np.shape(x)[:-1], b.shape[1]))
        rows, a, b = inputs.copy_overlapping(y, rows, a, b)
        factor = inputs.as_number(name, "scale", scale)
        run_on_copy(name, y, b.shape[1], lambda flat: _core.lora_forward(rows, flat, a, b, factor))
    return y


def lora_accumulate(x: Any, grad_y: Any, a: Any, b: Any, scale: float, grad_a: np.ndarray, grad_b: np.ndarray) -> None:
    """Add scale (g b^T)^T x to grad_a and scale (x a^T)^T g to grad_b, with g = grad_y = dL/dy, in place.

    Args:
        x: (..., in), float32 or bfloat16, NumPy or torch (CPU): the input of the layer.
        grad_y: (..., out), float32 or bfloat16.
        a: (r, in) float32, r in [1, 8].
        b: (r, out) float32.
        scale: s, as in ``lora_forward``.
        grad_a: (r, in) float32, contiguous, added to.
        grad_b: (r, out) float32, contiguous, added to.

    Raises:
        As ``lora_forward``.
    """
    if _core.lora_accumulate(x, grad_y, a, b, scale, grad_a, grad_b) is NotImplemented:
        name = "lora_accumulate"
        a, b = check_factors(name, a, b)
        rows = check_rows(name, "x", x, "a", a.shape[1])
        gradients = check_rows(name, "grad_y", grad_y, "b", b.shape[1])
        if tuple(np.shape(x)[:-1]) != tuple(np.shape(grad_y)[:-1]):
            raise WhetValueError(
                f"{name}: x has shape {tuple(np.shape(x))} and grad_y {tuple(np.shape(grad_y))}. "
                "Give both the same rows."
            )
        for which, grad, like in (("grad_a", grad_a, a), ("grad_b", grad_b, b)):
            check_target(name, which, grad, tuple(like.shape), ("float32",))
        # All or nothing: accumulate in copies, and copy back at the end.
        sums = [np.array(grad, np.float32, order="C") for grad in (grad_a, grad_b)]
        factor = inputs.as_number(name, "scale", scale)
        inputs.check_computed(name, _core.lora_accumulate(rows, gradients, a, b, factor, *sums))
        for grad, total in zip((grad_a, grad_b), sums, strict=True):
            assign(grad, total)


# --- the slow path ----------------------------------------------------------------------------------------


def check_factors(function: str, a: Any, b: Any) -> tuple[Any, Any]:
    a, b = (inputs.as_plain_array(function, name, x, ("float32",)) for name, x in (("a", a), ("b", b)))
    for name, x in (("a", a), ("b", b)):
        if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_RANK or x.shape[1] < 1:
            raise WhetValueError(
                f"{function}: {name} has shape {tuple(x.shape)}, expected (r, features) with r from 1 to {MAX_RANK}."
            )
    if a.shape[0] != b.shape[0]:
        raise WhetValueError(f"{function}: a has {a.shape[0]} rows and b {b.shape[0]}. Both must have the rank.")
    return a, b


def check_rows(function: str, name: str, x: Any, other: str, columns: int) -> Any:
    """Return x as contiguous rows (N, columns)."""
    is_array = inputs.is_tensor(x) or hasattr(x, "__array__")
    x = inputs.as_plain_array(function, name, x, _DTYPES if is_array else ("float32",))
    if x.ndim == 0 or x.shape[-1] != columns:
        raise WhetValueError(f"{function}: {name} has shape {tuple(x.shape)}, expected (..., {columns}) as {other}.")
    return x.reshape(math.prod(x.shape[:-1]), columns)


def check_target(function: str, name: str, y: Any, shape: tuple[int, ...], dtypes: tuple[str, ...] = _DTYPES) -> None:
    """Raise unless y is a writable array of this shape."""
    if not (inputs.is_tensor(y) or isinstance(y, np.ndarray)):
        raise WhetTypeError(
            f"{function}: {name} is a {type(y).__name__}, but is written to. Pass an array or a tensor."
        )
    inputs.as_plain_array(function, name, y, dtypes)
    if tuple(y.shape) != shape:
        raise WhetValueError(f"{function}: {name} has shape {tuple(y.shape)}, expected {shape}.")
    if isinstance(y, np.ndarray):
        if not y.flags.writeable:
            raise WhetValueError(f"{function}: {name} is read-only, but is written to. Pass a copy.")
    elif any(step == 0 and size > 1 for step, size in zip(y.stride(), y.shape, strict=True)):
        raise WhetValueError(f"{function}: {name} is expanded: its rows share memory. Pass {name}.contiguous().")


def run_on_copy(function: str, y: Any, columns: int, run: Callable[[Any], Any]) -> None:
    """Call ``run`` on a contiguous copy of y, (N, columns), and copy the result back."""
    flat = (
        y.resolve_neg().clone().contiguous()
        if inputs.is_tensor(y)
        else np.array(y, y.dtype.newbyteorder("="), order="C")
    )
    inputs.check_computed(function, run(flat.reshape(math.prod(y.shape[:-1]), columns)))
    assign(y, flat)


def assign(y: Any, values: Any) -> None:
    if inputs.is_tensor(y):
        y.copy_(values if inputs.is_tensor(values) else y.new_tensor(values))
    else:
        y[...] = values
