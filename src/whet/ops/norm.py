"""Normalisation along the last axis, with a fused residual addition: RMSNorm and LayerNorm.

Sums are float32 within blocks of 256 elements and float64 across them: their relative error stays below 1e-6 at any
length. The rest is float32; a bfloat16 result is rounded once. A square beyond float32's range (|x| > 1.8e19) is
infinite, and its row becomes 0 or NaN. Results do not depend on the instruction set, the number of threads, or the
other rows. Not differentiable.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetValueError
from whet.ops import inputs, rowwise


def naive_rms_norm(x: np.ndarray, weight: Any = 1.0, eps: float = 1e-6) -> np.ndarray:
    """Reference implementation of ``rms_norm``, in the arrays' own precision."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def naive_layer_norm(x: np.ndarray, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-5) -> np.ndarray:
    """Reference implementation of ``layer_norm``, in the arrays' own precision."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight + bias


def rms_norm(x: Any, weight: Any = None, eps: float = 1e-6, *, residual: Any = None, out: Any = None) -> Any:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019).

    With ``residual``, first compute residual += x in place, rounded to its dtype, then norm that sum: the result equals
    two separate steps.

    Args:
        x: (..., n) float32 or bfloat16, NumPy or torch (CPU).
        weight: (n,) of x's dtype or float32; None: ones. (A Gemma checkpoint stores weight - 1: pass 1 + weight.)
        eps: added to the mean square; 0 or more.
        residual: like x, written in place; None: no residual.
        out: like x, written in place, x itself allowed; None: a new array.

    Returns:
        The shape, kind and dtype of x. A row of zeros with eps = 0, or with NaN, gives NaN.

    Raises:
        WhetValueError: shapes disagree, eps is negative or not finite, an output is not writable, ``out`` shares
            memory with ``residual``, or a tensor requires grad or is not on the CPU.
        WhetTypeError: another dtype.
    """
    result = _core.rms_norm(x, weight, eps, residual, out)
    if result is not NotImplemented:
        return result
    return _slow("rms_norm", _core.rms_norm, x, {"weight": weight}, eps, residual, out)


def layer_norm(
    x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, residual: Any = None, out: Any = None
) -> Any:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis (Ba, Kiros & Hinton 2016).

    var is the mean of the squares of x - mean(x), computed without cancellation if the mean is large.

    Args:
        x: (..., n) float32 or bfloat16, NumPy or torch (CPU).
        weight: (n,) of x's dtype or float32; None: ones.
        bias: (n,) of x's dtype or float32; None: zeros.
        eps: added to the variance; 0 or more.
        residual: as for ``rms_norm``: residual += x in place first, then norm the sum.
        out: like x, written in place, x itself allowed; None: a new array.

    Returns:
        The shape, kind and dtype of x.

    Raises:
        As ``rms_norm``.
    """
    result = _core.layer_norm(x, weight, bias, eps, residual, out)
    if result is not NotImplemented:
        return result
    return _slow("layer_norm", _core.layer_norm, x, {"weight": weight, "bias": bias}, eps, residual, out)


def _slow(name: str, core: Any, x: Any, vectors: dict[str, Any], eps: Any, residual: Any, out: Any) -> Any:
    if not 0 <= inputs.as_number(name, "eps", eps) < math.inf:
        raise WhetValueError(f"{name}: eps is {eps!r}, expected a finite number of at least 0.")
    x = rowwise.as_rows(name, "x", x)
    shape, n = tuple(x.shape), x.shape[-1]
    vectors = {key: _vector(name, key, v, x, n) for key, v in vectors.items()}
    if len({rowwise.dtype_name(v) for v in vectors.values() if v is not None}) == 2:
        vectors = {key: v.float() if inputs.is_tensor(v) else v.astype(np.float32) for key, v in vectors.items()}
    if out is not None:
        rowwise.check_target(name, "out", out, shape, x)
    total: Any = None
    if residual is not None:
        rowwise.check_target(name, "residual", residual, shape, x)
        if out is not None and _share_memory(out, residual):
            raise WhetValueError(f"{name}: out shares memory with residual, which holds the sum. Pass another out.")
        # A copy, so that an x that shares some of its memory is read before it is changed.
        total = rowwise.flatten(residual.clone() if inputs.is_tensor(residual) else residual.copy("C"))
    result = inputs.check_computed(name, core(rowwise.flatten(x), *vectors.values(), float(eps), total, None))
    if residual is not None:
        residual[...] = total.reshape(shape)
    return rowwise.store_result(name, result, shape, out)


def _vector(name: str, key: str, v: Any, x: Any, n: int) -> Any:
    if v is None:
        return None
    v = rowwise.as_rows(name, key, v)
    if tuple(v.shape) != (n,):
        raise WhetValueError(f"{name}: {key} has shape {tuple(v.shape)}, expected ({n},), the last axis of x.")
    if rowwise.dtype_name(v) not in (rowwise.dtype_name(x), "float32"):
        raise WhetValueError(f"{name}: {key} is {rowwise.dtype_name(v)}, but x is {rowwise.dtype_name(x)}.")
    return v


def _share_memory(a: Any, b: Any) -> bool:
    if inputs.is_tensor(a):
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return np.shares_memory(a, b)
