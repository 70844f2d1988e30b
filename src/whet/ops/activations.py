"""softmax and log_softmax along the last axis, the activations silu, gelu and swiglu, and softcap.

Arithmetic is float32, with float64 sums; a bfloat16 result is rounded once. Results do not depend on the instruction
set, on the number of threads, or on the other rows. Not differentiated through. Each takes ``out``, which may be an
input: then it works in place.
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
    """The definition of ``softmax``, in the array's own precision."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(scale * (x - x.max(-1, keepdims=True)))
    return weights / weights.sum(-1, keepdims=True)


def naive_log_softmax(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """The definition of ``log_softmax``, in the array's own precision."""
    with np.errstate(invalid="ignore"):
        z = scale * (x - x.max(-1, keepdims=True))
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def naive_silu(x: np.ndarray) -> np.ndarray:
    """The definition of ``silu``, in the array's own precision."""
    return x / (1 + np.exp(-x))


def naive_gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    """The definition of ``gelu``, in the array's own precision."""
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * np.vectorize(math.erfc, otypes=[x.dtype])(-x / math.sqrt(2))


def naive_swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The definition of ``swiglu``, in the arrays' own precision."""
    return naive_silu(gate) * up


def naive_softcap(x: np.ndarray, cap: float) -> np.ndarray:
    """The definition of ``softcap``, in the array's own precision."""
    return cap * np.tanh(x / cap)


def softmax(x: Any, *, scale: float = 1.0, out: Any = None) -> Any:
    """exp(scale x_i) / sum_j exp(scale x_j) over the last axis.

    Within 3 ULP of the exact value (of 1e-36, where it is smaller), whatever the length and the spread of the row.

    Args:
        x: (..., n) float32 or bfloat16, NumPy or torch (CPU).
        scale: multiplies x, rounded to float32; above 0. (1 / temperature, or 1 / sqrt(head_dim).)
        out: like x, written in place, x itself allowed; None: a new array.

    Returns:
        The shape, kind and dtype of x. -inf gives 0; a row that holds NaN or inf, or nothing but -inf, gives NaN.

    Raises:
        WhetValueError: scale is not a finite number above 0, ``out`` cannot take the result, or a tensor requires grad
            or is not on the CPU.
        WhetTypeError: another dtype.
    """
    return _softmax("softmax", x, scale, False, out)


def log_softmax(x: Any, *, scale: float = 1.0, out: Any = None) -> Any:
    """scale x_i - log sum_j exp(scale x_j) over the last axis.

    Within 2 ULP of the exact value, or 1e-15 where it is close to 0. Arguments and errors as ``softmax``.

    Returns:
        The shape, kind and dtype of x, in nats. -inf gives -inf; a row that holds NaN or inf, or nothing but -inf,
        gives NaN.
    """
    return _softmax("log_softmax", x, scale, True, out)


def silu(x: Any, *, out: Any = None) -> Any:
    """x / (1 + exp(-x)), element by element, within 4 ULP (of 1e-36, where it is smaller).

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
    """x P(N <= x) for a standard normal N, element by element (Hendrycks & Gimpel 2016).

    ``approximate="tanh"``: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as GPT-2 has it. The exact form is within
    8 ULP everywhere: the tail for negative x is computed itself and not as 1 + erf, which cancels. The tanh form is as
    close for x > -1; below, rounding of its exponent u costs |u| ULP more.

    Arguments, result and errors as ``silu``; also WhetValueError for another ``approximate``.
    """
    kind = _GELU_KINDS.get(approximate)
    if kind is None:
        raise WhetValueError(f'gelu: approximate is {approximate!r}, expected "none" or "tanh".')
    return _activation("gelu", x, kind, out)


def swiglu(gate: Any, up: Any = None, *, out: Any = None) -> Any:
    """silu(gate) * up, element by element (Shazeer 2020).

    Args:
        gate: (..., n) float32 or bfloat16, NumPy or torch (CPU); without ``up``: (..., 2 n) with the gate in the first
            half of the last axis and up in the second, as one fused projection gives them.
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
    gate = rowwise.rows(name, "gate", gate)
    shape = tuple(gate.shape)
    if up is None:
        if shape[-1] % 2:
            raise WhetValueError(
                f"{name}: gate has shape {shape} and no up was given, so that its last axis must hold two halves, "
                "and be even. Pass up, or both side by side."
            )
        shape = (*shape[:-1], shape[-1] // 2)
    else:
        up = rowwise.rows(name, "up", up)
        inputs.same_shape(name, gate=gate, up=up)
        inputs.same_dtype(name, gate=gate, up=up)
    if out is not None:
        rowwise.check_target(name, "out", out, shape, gate)
    result = inputs.computed(name, _core.swiglu(rowwise.flat(gate), None if up is None else rowwise.flat(up), None))
    return rowwise.finish(name, result, shape, out)


def softcap(x: Any, cap: float, *, out: Any = None) -> Any:
    """cap tanh(x / cap), element by element: Gemma 2's bound of attention scores and logits.

    Within 6 ULP, but where x / cap is below 1e-37.

    Args:
        x: (..., n) float32 or bfloat16, NumPy or torch (CPU).
        cap: what no result is beyond; rounded to float32, above 0.
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
        factor = inputs.float32_factor("softcap", "cap", cap)
        result = _slow("softcap", x, lambda rows: _core.softcap(rows, factor, None), out)
    return result


def _softmax(name: str, x: Any, scale: float, log: bool, out: Any) -> Any:
    result = _core.softmax(x, scale, log, out)
    if result is NotImplemented:
        factor = inputs.float32_factor(name, "scale", scale)
        result = _slow(name, x, lambda rows: _core.softmax(rows, factor, log, None), out)
    return result


def _activation(name: str, x: Any, kind: _core.Activation, out: Any) -> Any:
    result = _core.activation(x, kind, out)
    if result is NotImplemented:
        result = _slow(name, x, lambda rows: _core.activation(rows, kind, None), out)
    return result


def _slow(name: str, x: Any, core: Callable[[Any], Any], out: Any) -> Any:
    x = rowwise.rows(name, "x", x)
    shape = tuple(x.shape)
    if out is not None:
        rowwise.check_target(name, "out", out, shape, x)
    return rowwise.finish(name, inputs.computed(name, core(rowwise.flat(x))), shape, out)
