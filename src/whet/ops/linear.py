"""Matrix products: ``gemm`` and ``gemv`` on arrays as they are, ``linear`` on weights packed once.

Products of float32 are fused multiply-adds; those of bfloat16 are exact and added in float32. A result does not depend
on the instruction set, the number of threads, or on the other rows of a batch.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs
from whet.ops.quant import Quantized, bf16_bits, bf16_values, quantize, row_layout

_FORMATS = ("float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_k")
"""In the order of the core's WeightFormat."""


def naive_gemm(a: np.ndarray, b: np.ndarray, alpha: float = 1.0, beta: float = 0.0, c: Any = 0.0) -> np.ndarray:
    """The definition of ``gemm``: alpha a b + beta c, in the arrays' own precision."""
    return alpha * (a @ b) + beta * c


def naive_linear(x: np.ndarray, weight: np.ndarray, bias: Any = 0.0) -> np.ndarray:
    """The definition of ``linear``: x weight^T + bias, in the arrays' own precision."""
    return x @ weight.T + bias


def gemm(
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Any = None,
) -> Any:
    """alpha a b + beta out for matrices of float32 or bfloat16, summed in float32 over k in order.

    Args:
        a: (M, K), or (K, M) with ``transpose_a``; any strides.
        b: (K, N), or (N, K) with ``transpose_b``, as a linear layer keeps its weight; any strides, a's dtype.
        transpose_a, transpose_b: take the transpose, without a copy.
        alpha, beta: scale the product and the old content of ``out``; beta = 0 does not read it.
        out: (M, N) of a's dtype with contiguous rows, written in place; None: a new array.

    Returns:
        (M, N), of the kind and dtype of a; bfloat16 is rounded once, to nearest even.

    Raises:
        WhetValueError: shapes that disagree, beta without ``out``, or an ``out`` that cannot take the result.
        WhetTypeError: another dtype, or two different ones.
    """
    if beta != 0 and out is None:
        raise WhetValueError(f"gemm: beta is {beta} but out is None. Pass the array to add to, or beta=0.")
    result = _core.gemm(a, b, out, transpose_a, transpose_b, alpha, beta)
    if result is NotImplemented:
        a, b = (_matrix("gemm", name, x) for name, x in (("a", a), ("b", b)))
        inputs.same_dtype("gemm", a=a, b=b)
        (m, k), (k_b, n) = (x.shape[::-1] if t else x.shape for x, t in ((a, transpose_a), (b, transpose_b)))
        if k != k_b:
            raise WhetValueError(
                f"gemm: a is ({m}, {k}) and b ({k_b}, {n}), as transposed; the inner sizes must be equal."
            )
        _check_out("gemm", out, a, (m, n))
        result = _core.gemm(a, b, out, transpose_a, transpose_b, alpha, beta)
    return result


def gemv(a: Any, x: Any, *, transpose: bool = False, alpha: float = 1.0, beta: float = 0.0, out: Any = None) -> Any:
    """alpha a x + beta out for a matrix and a vector of float32 or bfloat16, summed in float32; a is read once.

    Args:
        a: (M, N), or (N, M) with ``transpose``; its rows or its columns contiguous.
        x: (N,), of a's dtype.
        transpose: take the transpose of a, without a copy.
        alpha, beta: scale the product and the old content of ``out``; beta = 0 does not read it.
        out: (M,) of a's dtype, written in place; None: a new array.

    Returns:
        (M,), of the kind and dtype of a.

    Raises:
        WhetValueError: shapes that disagree, beta without ``out``, or an ``out`` that cannot take the result.
        WhetTypeError: another dtype, or two different ones.
    """
    if beta != 0 and out is None:
        raise WhetValueError(f"gemv: beta is {beta} but out is None. Pass the vector to add to, or beta=0.")
    result = _core.gemv(a, x, out, transpose, alpha, beta)
    if result is NotImplemented:
        a = _matrix("gemv", "a", a)
        x = inputs.plain("gemv", "x", x, _dtypes(x))
        inputs.same_dtype("gemv", a=a, x=x)
        m, n = a.shape[::-1] if transpose else a.shape
        if tuple(x.shape) != (n,):
            raise WhetValueError(f"gemv: a is ({m}, {n}), as transposed, and x {tuple(x.shape)}, expected ({n},).")
        _check_out("gemv", out, a, (m,))
        result = _core.gemv(a, x, out, transpose, alpha, beta)
    return result


class PackedWeight:
    """A weight matrix in the order in which the kernels read it, in one of the formats.

    Made by ``pack_weight``. Takes its own memory: a later change of the array it was made from does not show.

    Attributes:
        format: "float32", "bfloat16", "int8", "q8_0", "q4_0" or "q4_k".
        shape: (N, K), outputs and inputs.
        size_bytes: bytes of memory, with scales and padding to whole panels of 16 outputs.
    """

    def __init__(self, format: str, shape: tuple[int, int], rows: np.ndarray) -> None:
        self.format, self.shape = format, shape
        self._core = _core.PackedWeight(_FORMATS.index(format), *shape, rows.ctypes.data, rows.strides[0])
        self.size_bytes: int = self._core.size_bytes

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, with scales and padding."""
        return 8 * self.size_bytes / max(1, self.shape[0] * self.shape[1])

    def unpack(self) -> Any:
        """The numbers that were packed: a float32 array, uint16 bit patterns of bfloat16, or a ``Quantized``."""
        n, k = self.shape
        rows = np.empty((n, row_layout(self.format, k)), np.uint8)
        self._core.unpack(rows.ctypes.data, rows.strides[0])
        if self.format in ("float32", "bfloat16"):
            return rows.view(np.float32 if self.format == "float32" else np.uint16)
        return Quantized(self.format, self.shape, rows)

    def __repr__(self) -> str:
        return f"PackedWeight({self.format}, {self.shape}, {self.bits_per_weight:.3g} bits per weight)"


def pack_weight(weight: Any, format: str | None = None) -> PackedWeight:
    """Packs a weight for ``linear``: panels of 16 outputs, which one row and many stream alike.

    Args:
        weight: (N, K) float32 or bfloat16, as a linear layer keeps it, or what ``quantize`` returned.
        format: "float32", "bfloat16", or a format of ``quantize``; None: that of the weight. A quantized weight stays
            in its format.

    Raises:
        WhetValueError: an unknown format, another shape, or a K that the format's blocks do not divide.
        WhetTypeError: another dtype.
    """
    where = "pack_weight"
    if isinstance(weight, Quantized):
        if format not in (None, weight.format):
            raise WhetValueError(
                f"{where}: weight is quantized as {weight.format}, and format is {format!r}. "
                f"Pass weight.dequantize() to change formats."
            )
        return PackedWeight(weight.format, weight.shape, weight.data)
    weight = _matrix(where, "weight", weight)
    own = str(weight.dtype).removeprefix("torch.")
    format = own if format is None else format
    if format not in _FORMATS:
        raise WhetValueError(f"{where}: format is {format!r}, expected one of {', '.join(_FORMATS)}.")
    if format in ("float32", "bfloat16"):
        rows = _as_rows(weight, own, format)
        return PackedWeight(format, tuple(weight.shape), rows)
    quantized = quantize(weight, format)
    return PackedWeight(format, quantized.shape, quantized.data)


def linear(x: Any, weight: PackedWeight, bias: Any = None, *, out: Any = None) -> Any:
    """x weight^T + bias for a packed weight.

    float32 weights multiply float32 inputs (bfloat16 ones are widened). bfloat16 weights multiply bfloat16 inputs
    (float32 ones are rounded). Quantised weights multiply inputs quantised to int8 in blocks of 32, with exact integer
    sums within a block; an input x costs at most max|block| / 254 of error. Sums are float32, over k in order.

    Args:
        x: (..., K) float32 or bfloat16, with contiguous rows.
        weight: from ``pack_weight``, (N, K).
        bias: (N,) float32.
        out: (..., N) of x's dtype, written in place; None: a new array.

    Returns:
        (..., N), of the kind and dtype of x.

    Raises:
        WhetValueError: shapes that disagree, or an ``out`` that cannot take the result.
        WhetTypeError: another dtype, or a weight that is not packed.
    """
    if not isinstance(weight, PackedWeight):
        raise WhetTypeError(f"linear: weight is a {type(weight).__name__}. Pass pack_weight(weight).")
    result = _core.linear(weight._core, x, bias, out)
    if result is NotImplemented:
        x = inputs.plain("linear", "x", x, _dtypes(x))
        n, k = weight.shape
        if x.ndim == 0 or x.shape[-1] != k:
            raise WhetValueError(
                f"linear: x has shape {tuple(x.shape)}, expected (..., {k}) for a weight {weight.shape}."
            )
        if bias is not None:
            bias = inputs.plain("linear", "bias", bias, ("float32",))
            if tuple(bias.shape) != (n,):
                raise WhetValueError(f"linear: bias has shape {tuple(bias.shape)}, expected ({n},).")
        _check_out("linear", out, x, (*x.shape[:-1], n))
        flat = x.reshape(-1, k)
        into = None if out is None else out.reshape(-1, n)
        result = _core.linear(weight._core, flat, bias, into)
        result = out if out is not None else result.reshape((*x.shape[:-1], n))
    return result


def _dtypes(x: Any) -> tuple[str, ...]:
    return ("float32", "bfloat16") if hasattr(x, "dtype") else ("float32",)


def _matrix(function: str, name: str, x: Any) -> Any:
    x = inputs.plain(function, name, x, _dtypes(x))
    if x.ndim != 2:
        raise WhetValueError(f"{function}: {name} has shape {tuple(x.shape)}, expected two axes.")
    return x


def _as_rows(weight: Any, own: str, format: str) -> np.ndarray:
    """The weight as contiguous float32, or as the bit patterns of bfloat16."""
    if inputs.is_tensor(weight):
        torch = sys.modules["torch"]
        weight = weight.to(getattr(torch, format))
        return weight.view(torch.uint16).numpy() if format == "bfloat16" else weight.numpy()
    if own == "bfloat16":
        return weight.view(np.uint16) if format == "bfloat16" else bf16_values(weight.view(np.uint16))
    return weight if format == "float32" else bf16_bits(weight)


def _check_out(function: str, out: Any, like: Any, shape: tuple[int, ...]) -> None:
    """Refuse an ``out`` that the core would not take."""
    if out is None:
        return
    kind = "torch tensor" if inputs.is_tensor(like) else "NumPy array"
    ok = inputs.is_tensor(out) == inputs.is_tensor(like) and getattr(out, "dtype", None) == like.dtype
    if not ok or tuple(out.shape) != shape:
        given = f"{type(out).__name__} {getattr(out, 'dtype', '')} {tuple(getattr(out, 'shape', ()))}"
        raise WhetValueError(f"{function}: out is {given}, expected a {kind} of {like.dtype} and shape {shape}.")
    writeable = out.flags.writeable if isinstance(out, np.ndarray) else not out.requires_grad
    strides = out.strides if isinstance(out, np.ndarray) else out.stride()
    unit = out.itemsize if isinstance(out, np.ndarray) else 1
    if not writeable or (shape[-1] > 1 and strides[-1] != unit):
        raise WhetValueError(f"{function}: out is read-only or its rows are not contiguous. Pass a plain array.")
