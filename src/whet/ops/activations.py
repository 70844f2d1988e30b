"""softmax and log_softmax along the last axis, the activations silu, gelu, relu2 and swiglu, and softcap.

Arithmetic is float32, with float64 sums; a bfloat16 result is rounded once. Results do not depend on the instruction
set, the number of threads, or the other rows. Not differentiable. ``out`` may be an input, for in-place operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetValueError
from whet.ops import inputs, rowwise

_SILU = _core.Activation.silu  # looked up once: a short row takes half a microsecond
_GELU_KINDS = {"none": _core.Activation.gelu, "tanh": _core.Activation.gelu_tanh}


def naive_softmax(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Reference implementation of ``softmax``, in the array's own precision."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(scale * (x - x.max(-1, keepdims=True)))
    return weights / weights.sum(-1, keepdims=True)


def naive_log_softmax(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Reference implementation of ``log_softmax``, in the array's own precision."""
    with np.errstate(invalid="ignore"):
        z = scale * (x - x.max(-1, keepdims=True))
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def naive_silu(x: np.ndarray) -> np.ndarray:
    """Reference implementation of ``silu``, in the array's own precision."""
    return x / (1 + np.exp(-x))


def naive_gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    """Reference implementation of ``gelu``, in the array's own precision."""
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * np.vectorize(math.erfc, otypes=[x.dtype])(-x / math.sqrt(2))


def naive_relu2(x: np.ndarray) -> np.ndarray:
    """Reference implementation of ``relu2``, in the array's own precision."""
    return np.maximum(x, 0) ** 2


def naive_swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Reference implementation of ``swiglu``, in the arrays' own precision."""
    return naive_silu(gate) * up


def naive_softcap(x: np.ndarray, cap: float) -> np.ndarray:
    """Reference implementation of ``softcap``, in the array's own precision."""
    return cap * np.tanh(x / cap)


def softmax(x: Any, *, scale: float = 1.0, out: Any = None) -> Any:
    """Return exp(scale x_i) / sum_j exp(scale x_j) over the last axis.

    Within 3 ULP of the exact value (of 1e-36, if that is larger), for any length and spread of the row.

    Args:
        x: (..., n) float32 or bfloat16, NumPy or torch (CPU).
        scale: multiplies x, rounded to float32; above 0. (1 / temperature, or 1 / sqrt(head_dim).)
        out: like x, written in place, x itself allowed; None: a new array.

    Returns:
        The shape, kind and dtype of x. -inf gives 0; a row with NaN or inf, or of only -inf, gives NaN.

    Raises:
        WhetValueError: scale is not a finite number above 0, ``out`` cannot take the result, or a tensor requires grad
            or is not on the CPU.
        WhetTypeError: another dtype.
    """
    return _softmax("softmax", x, scale, False, out)


def log_softmax(x: Any, *, scale: float = 1.0, out: Any = None) -> Any:
    """Return scale x_i - log sum_j exp(scale x_j) over the last axis.

    Within 2 ULP of the exact value, or 1e-15 if it is close to 0. Arguments and errors as ``softmax``.

    Returns:
        The shape, kind and dtype of x, in nats. -inf gives -inf; a row with NaN or inf, or of only -inf, gives NaN.
    """
    return _softmax("log_softmax", x, scale, True, out)


def silu(x: Any, *, out: Any = None) -> Any:
    """Return x / (1 + exp(-x)) element-wise, within 4 ULP (of 1e-36, if that is larger).

    Args:
        x: (..., n) float32 or bfloat16, NumPy or torch (CPU).
        out: like x, written in place, x itself allowed; None: a new array.

    Returns:
        The shape, kind and dtype of x. -inf gives -0 and inf gives inf, the limits; NaN gives NaN.

    Raises:
        WhetValueError: ``out`` cannot take the result, or a tensor requires grad or is not on the CPU.
        WhetTypeError: another dtype.
    """
    return _activation("silu", x, _SILU, out)


def gelu(x: Any, approximate: str = "none", *, out: Any = None) -> Any:
    """Return x P(N <= x) for a standard normal N, element-wise (Hendrycks & Gimpel 2016).

    ``approximate="tanh"``: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as in GPT-2. The exact form is within
    8 ULP everywhere: the tail for negative x is computed directly instead of as 1 + erf, which cancels. The tanh form
    is as accurate for x > -1; below, rounding its exponent u costs |u| ULP more.

    Arguments, result and errors as ``silu``; also WhetValueError for another ``approximate``.
    """
    kind = _GELU_KINDS.get(approximate)
    if kind is None:
        raise WhetValueError(f'gelu: approximate is {approximate!r}, expected "none" or "tanh".')
    return _activation("gelu", x, kind, out)


def relu2(x: Any, *, out: Any = None) -> Any:
    """Return max(x, 0)^2 element-wise, correctly rounded: the activation of Arcee's and Nemotron's models.

    Source: So et al., "Primer", 2021. Arguments and errors as ``silu``.

    Returns:
        The shape, kind and dtype of x. -inf gives 0 and inf gives inf; NaN gives NaN.
    """
    return _activation("relu2", x, _core.Activation.relu2, out)


def swiglu(gate: Any, up: Any = None, *, out: Any = None) -> Any:
    """Return silu(gate) * up, element-wise (Shazeer 2020).

    Args:
        gate: (..., n) float32 or bfloat16, NumPy or torch (CPU); without ``up``: (..., 2 n) with the gate in the first
            half of the last axis and up in the second, the output of a fused projection.
        up: like gate.
        out: (..., n) of gate's dtype, written in place; gate or up itself allowed. None: a new array.

    Returns:
        (..., n), of the kind and dtype of gate.

    Raises:
        WhetValueError: shapes disagree, an odd last axis without ``up``, ``out`` cannot take the result, or a tensor
            requires grad or is not on the CPU.
        WhetTypeError: another dtype, or two different ones.
    """
    result = _core.swiglu(gate, up, out)
    if result is not NotImplemented:
        return result
    name = "swiglu"
    gate = rowwise.as_rows(name, "gate", gate)
    shape = tuple(gate.shape)
    if up is None:
        if shape[-1] % 2:
            raise WhetValueError(
                f"{name}: gate has shape {shape} and up is None, so the last axis must hold gate and up, and be even. "
                "Pass up, or gate and up concatenated."
            )
        shape = (*shape[:-1], shape[-1] // 2)
    else:
        up = rowwise.as_rows(name, "up", up)
        inputs.check_same_shape(name, gate=gate, up=up)
        inputs.check_same_dtype(name, gate=gate, up=up)
    if out is not None:
        rowwise.check_target(name, "out", out, shape, gate)
    flat_up = None if up is None else rowwise.flatten(up)
    result = inputs.check_computed(name, _core.swiglu(rowwise.flatten(gate), flat_up, None))
    return rowwise.store_result(name, result, shape, out)


def softcap(x: Any, cap: float, *, out: Any = None) -> Any:
    """Return cap tanh(x / cap), element-wise: Gemma 2's bound of attention scores and logits.

    Within 6 ULP, except if x / cap is below 1e-37.

    Args:
        x: (..., n) float32 or bfloat16, NumPy or torch (CPU).
        cap: bound of |result|; rounded to float32, above 0.
        out: like x, written in place, x itself allowed; None: a new array.

    Returns:
        The shape, kind and dtype of x. inf gives cap and -inf gives -cap, the limits; NaN gives NaN.

    Raises:
        WhetValueError: cap is not a finite number above 0, ``out`` cannot take the result, or a tensor requires grad or
            is not on the CPU.
        WhetTypeError: another dtype.
    """
    result = _core.softcap(x, cap, out)
    if result is NotImplemented:
        factor = inputs.as_float32_factor("softcap", "cap", cap)
        result = _slow("softcap", x, lambda rows: _core.softcap(rows, factor, None), out)
    return result


def _softmax(name: str, x: Any, scale: float, log: bool, out: Any) -> Any:
    result = _core.softmax(x, scale, log, out)
    if result is NotImplemented:
        factor = inputs.as_float32_factor(name, "scale", scale)
        result = _slow(name, x, lambda rows: _core.softmax(rows, factor, log, None), out)
    return result


def _activation(name: str, x: Any, kind: _core.Activation, out: Any) -> Any:
    result = _core.activation(x, kind, out)
    if result is NotImplemented:
        result = _slow(name, x, lambda rows: _core.activation(rows, kind, None), out)
    return result


def _slow(name: str, x: Any, core: Callable[[Any], Any], out: Any) -> Any:
    x = rowwise.as_rows(name, "x", x)
    shape = tuple(x.shape)
    if out is not None:
        rowwise.check_target(name, "out", out, shape, x)
    return rowwise.store_result(name, inputs.check_computed(name, core(rowwise.flatten(x))), shape, out)
