"""Matrix products: ``gemm`` and ``gemv`` on plain arrays, ``linear`` on weights packed once.

float32 products are fused multiply-adds; bfloat16 products are exact and accumulated in float32. A result does not
depend on the instruction set, the number of threads, or the other rows of a batch.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs
from whet.ops.quant import CORE_FORMATS, CORE_TABLE, FORMATS, Quantized, check_finite, check_format

ROW_TYPES = {
    "float32": _core.RowType.FLOAT32,
    "bfloat16": _core.RowType.BFLOAT16,
    "float16": _core.RowType.FLOAT16,
}
"""Dtypes of arrays that the core packs."""
_MAX_NUMBERS = 1 << 46
"""More than any memory holds, and small enough that the size in bytes does not overflow."""


def naive_gemm(a: np.ndarray, b: np.ndarray, alpha: float = 1.0, beta: float = 0.0, c: Any = 0.0) -> np.ndarray:
    """Reference implementation of ``gemm``: alpha a b + beta c, in the arrays' own precision."""
    return alpha * (a @ b) + beta * c


def naive_linear(x: np.ndarray, weight: np.ndarray, bias: Any = 0.0) -> np.ndarray:
    """Reference implementation of ``linear``: x weight^T + bias, in the arrays' own precision."""
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
    """Return alpha a b + beta out for matrices of float32 or bfloat16, summed in float32 over k in order.

    Args:
        a: (M, K), or (K, M) with ``transpose_a``; any strides.
        b: (K, N), or (N, K) with ``transpose_b``, like the weight of a linear layer; any strides, a's dtype.
        transpose_a: use the transpose of a, without a copy.
        transpose_b: use the transpose of b, without a copy.
        alpha: scales the product.
        beta: scales the old content of ``out``; 0 does not read it.
        out: (M, N) of a's dtype with contiguous rows, written in place; None: a new array. Inputs that share its memory
            are copied first.

    Returns:
        (M, N), with the kind and dtype of a; bfloat16 is rounded once, to nearest even.

    Raises:
        WhetValueError: shapes that disagree, beta without ``out``, or an ``out`` that cannot hold the result.
        WhetTypeError: another dtype, or two different dtypes.
    """
    if beta != 0 and out is None:
        raise WhetValueError(f"gemm: beta is {beta} but out is None. Pass the array to add to, or beta=0.")
    result = _core.gemm(a, b, out, transpose_a, transpose_b, alpha, beta)
    if result is NotImplemented:
        a, b = (_matrix("gemm", name, x) for name, x in (("a", a), ("b", b)))
        inputs.check_same_dtype("gemm", a=a, b=b)
        (m, k), (k_b, n) = (x.shape[::-1] if t else x.shape for x, t in ((a, transpose_a), (b, transpose_b)))
        if k != k_b:
            raise WhetValueError(
                f"gemm: a is ({m}, {k}) and b ({k_b}, {n}) after transposition; the inner sizes must be equal."
            )
        _check_out("gemm", out, a, (m, n))
        a, b = inputs.copy_overlapping(out, a, b)
        alpha, beta = inputs.as_number("gemm", "alpha", alpha), inputs.as_number("gemm", "beta", beta)
        result = _core.gemm(a, b, out, bool(transpose_a), bool(transpose_b), alpha, beta)
        result = inputs.check_computed("gemm", result)
    return result


def gemv(a: Any, x: Any, *, transpose: bool = False, alpha: float = 1.0, beta: float = 0.0, out: Any = None) -> Any:
    """Return alpha a x + beta out for a matrix and a vector of float32 or bfloat16, summed in float32; reads a once.

    Args:
        a: (M, N), or (N, M) with ``transpose``; its rows or its columns contiguous.
        x: (N,), of a's dtype.
        transpose: use the transpose of a, without a copy.
        alpha: scales the product.
        beta: scales the old content of ``out``; 0 does not read it.
        out: (M,) of a's dtype, written in place; None: a new array. Inputs that share its memory are copied first.

    Returns:
        (M,), with the kind and dtype of a.

    Raises:
        WhetValueError: shapes that disagree, beta without ``out``, or an ``out`` that cannot hold the result.
        WhetTypeError: another dtype, or two different dtypes.
    """
    if beta != 0 and out is None:
        raise WhetValueError(f"gemv: beta is {beta} but out is None. Pass the vector to add to, or beta=0.")
    result = _core.gemv(a, x, out, transpose, alpha, beta)
    if result is NotImplemented:
        a = _matrix("gemv", "a", a)
        x = inputs.as_plain_array("gemv", "x", x, _dtypes(x))
        inputs.check_same_dtype("gemv", a=a, x=x)
        m, n = a.shape[::-1] if transpose else a.shape
        if tuple(x.shape) != (n,):
            raise WhetValueError(
                f"gemv: a is ({m}, {n}) after transposition and x has shape {tuple(x.shape)}, expected ({n},)."
            )
        _check_out("gemv", out, a, (m,))
        a, x = inputs.copy_overlapping(out, a, x)
        alpha, beta = inputs.as_number("gemv", "alpha", alpha), inputs.as_number("gemv", "beta", beta)
        result = inputs.check_computed("gemv", _core.gemv(a, x, out, bool(transpose), alpha, beta))
    return result


class PackedWeight:
    """A weight matrix packed in the kernels' order, in one of the formats.

    ``pack_weight`` packs one; the constructor makes a matrix of zeros, for ``update``. The weights are copied: later
    changes of the source array have no effect.

    Attributes:
        format: "float32", "bfloat16", or a format of ``quantize``.
        shape: (N, K), outputs and inputs.
        size_bytes: bytes of memory, with scales and padding to whole panels of 16 outputs.
    """

    def __init__(self, format: str, shape: tuple[int, int]) -> None:
        where = "PackedWeight"
        n, k = (operator.index(size) for size in shape)
        _check_any_format(where, format, k)
        if min(n, k) < 0 or max(n, k, n * k) > _MAX_NUMBERS:
            raise WhetValueError(f"{where}: shape is {(n, k)}, expected sizes >= 0 and at most 2^46 numbers.")
        self.format, self.shape = format, (n, k)
        self._core = _core.PackedWeight(CORE_FORMATS[format], n, k)
        self.size_bytes: int = self._core.size_bytes

    def update(self, weight: Any, first_row: int = 0) -> None:
        """Pack rows again in place, for example after an optimizer step, without allocation or an intermediate copy.

        bfloat16 is rounded to nearest even; the quantised formats give the same numbers as ``quantize``.

        Args:
            weight: (R, K) float32, bfloat16 or float16 with any strides (such as a transposed view), finite for the
                quantised formats; or a ``Quantized`` of this format.
            first_row: the rows packed are [first_row, first_row + R).

        Raises:
            WhetValueError: rows of another length or format, or beyond the last row; NaN or infinity.
            WhetTypeError: another dtype.
        """
        self._pack("PackedWeight.update", weight, first_row)

    def row(self, i: int) -> np.ndarray:
        """Return row i dequantised, (K,) float32: for example a token's embedding from a tied head.

        Raises:
            WhetValueError: i is not a row index.
        """
        i = operator.index(i)
        if not 0 <= i < self.shape[0]:
            raise WhetValueError(f"PackedWeight.row: i is {i}, expected 0 to {self.shape[0] - 1}.")
        out = np.empty(self.shape[1], np.float32)
        self._core.row(i, out.ctypes.data)
        return out

    def _pack(self, where: str, weight: Any, first_row: int = 0) -> None:
        n, k = self.shape
        if isinstance(weight, Quantized):
            if weight.format != self.format:
                raise WhetValueError(
                    f"{where}: weight is quantised as {weight.format}, and format is {self.format!r}. "
                    f"Pass weight.dequantize() to change formats."
                )
            shape, rows, source = weight.shape, weight.data, _core.RowType.PACKED
        else:
            rows = _strided_matrix(where, "weight", weight)
            shape, source = tuple(rows.shape), ROW_TYPES[_dtype_name(rows)]
            if self.format in FORMATS:
                check_finite(where, rows)
        first_row = operator.index(first_row)
        if shape[1] != k or first_row < 0 or first_row + shape[0] > n:
            raise WhetValueError(f"{where}: weight is {shape} at row {first_row}, which does not fit in {self.shape}.")
        self._pack_rows(first_row, rows, source)

    def _pack_rows(self, first_row: int, rows: Any, source: _core.RowType) -> None:
        address, (row_stride, column_stride) = _address_and_strides(rows)
        self._core.pack_rows(
            first_row, len(rows), rows=address, source=source, row_stride=row_stride, column_stride=column_stride
        )

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, with scales and padding."""
        return 8 * self.size_bytes / max(1, self.shape[0] * self.shape[1])

    def unpack(self) -> Any:
        """Return the packed numbers: a float32 array, uint16 bit patterns of bfloat16, or a ``Quantized``."""
        rows = self._unpack_rows()
        if self.format in ("float32", "bfloat16"):
            return rows.view(np.float32 if self.format == "float32" else np.uint16)
        return Quantized(self.format, self.shape, rows)

    def __getstate__(self) -> tuple[str, tuple[int, int], np.ndarray]:
        return self.format, self.shape, self._unpack_rows()

    def __setstate__(self, state: tuple[str, tuple[int, int], np.ndarray]) -> None:
        format, shape, rows = state
        PackedWeight.__init__(self, format, shape)
        numbers = rows.view(np.float32 if format == "float32" else np.uint16 if format == "bfloat16" else np.uint8)
        self._pack_rows(0, numbers, ROW_TYPES.get(format, _core.RowType.PACKED))

    def _unpack_rows(self) -> np.ndarray:
        """Return the rows as bytes, (N, bytes per row) uint8."""
        n, k = self.shape
        rows = np.empty((n, CORE_TABLE[self.format].row_bytes(k)), np.uint8)
        self._core.unpack(rows.ctypes.data, rows.strides[0])
        return rows

    def __repr__(self) -> str:
        return f"PackedWeight({self.format}, {self.shape}, {self.bits_per_weight:.3g} bits per weight)"


def pack_weight(weight: Any, format: str | None = None) -> PackedWeight:
    """Pack a weight for ``linear``: panels of 16 outputs, streamed sequentially for one row and for many.

    Args:
        weight: (N, K) float32, bfloat16 or float16, outputs by inputs, with any strides; or a ``Quantized``.
        format: "float32", "bfloat16", or a format of ``quantize``; None: the weight's format. The format of a
            ``Quantized`` cannot change.

    Raises:
        WhetValueError: an unknown format, another shape, a K that the format's blocks do not divide, NaN or infinity
            in a quantised format.
        WhetTypeError: another dtype.
    """
    where = "pack_weight"
    if isinstance(weight, Quantized):
        own, shape = weight.format, weight.shape
    else:
        weight = _strided_matrix(where, "weight", weight)
        own, shape = _dtype_name(weight), tuple(weight.shape)
    format = own if format is None else format
    _check_any_format(where, format, shape[1])
    packed = PackedWeight(format, shape)
    packed._pack(where, weight)
    return packed


def linear(x: Any, weight: PackedWeight, bias: Any = None, *, out: Any = None) -> Any:
    """Return x weight^T + bias for a packed weight.

    float32 weights multiply float32 inputs (bfloat16 inputs are widened). bfloat16 weights multiply bfloat16 inputs
    (float32 inputs are rounded). Quantised weights multiply inputs quantised to int8 in blocks of 32, with exact
    integer sums within a block; quantisation changes an input by at most max|block| / 254. Sums are float32, over k in
    order.

    Args:
        x: (..., K) float32 or bfloat16, with contiguous rows.
        weight: from ``pack_weight``, (N, K).
        bias: (N,) float32.
        out: (..., N) of x's dtype, written in place; None: a new array. Inputs that share its memory are copied first.

    Returns:
        (..., N), with the kind and dtype of x.

    Raises:
        WhetValueError: shapes that disagree, or an ``out`` that cannot hold the result.
        WhetTypeError: another dtype, or a weight that is not packed.
    """
    if not isinstance(weight, PackedWeight):
        raise WhetTypeError(f"linear: weight is a {type(weight).__name__}. Pass pack_weight(weight).")
    result = _core.linear(weight._core, x, bias, out)
    if result is NotImplemented:
        x = inputs.as_plain_array("linear", "x", x, _dtypes(x))
        n, k = weight.shape
        if x.ndim == 0 or x.shape[-1] != k:
            raise WhetValueError(
                f"linear: x has shape {tuple(x.shape)}, expected (..., {k}) for a weight {weight.shape}."
            )
        if bias is not None:
            bias = inputs.as_plain_array("linear", "bias", bias, ("float32",))
            if tuple(bias.shape) != (n,):
                raise WhetValueError(f"linear: bias has shape {tuple(bias.shape)}, expected ({n},).")
        _check_out("linear", out, x, (*x.shape[:-1], n))
        x, bias = inputs.copy_overlapping(out, x, bias)
        flat_x, flat_out = x.reshape(-1, k), None if out is None else out.reshape(-1, n)
        result = inputs.check_computed("linear", _core.linear(weight._core, flat_x, bias, flat_out))
        result = out if out is not None else result.reshape((*x.shape[:-1], n))
    return result


def _dtypes(x: Any) -> tuple[str, ...]:
    return ("float32", "bfloat16") if hasattr(x, "dtype") else ("float32",)


def _matrix(function: str, name: str, x: Any) -> Any:
    x = inputs.as_plain_array(function, name, x, _dtypes(x))
    if x.ndim != 2:
        raise WhetValueError(f"{function}: {name} has shape {tuple(x.shape)}, expected two axes.")
    return x


def _strided_matrix(function: str, name: str, x: Any) -> Any:
    """Return a matrix with any strides: x itself if it is plain memory, else a copy."""
    if inputs.is_tensor(x):
        is_plain = x.device.type == "cpu" and str(x.layout) == "torch.strided" and not (x.requires_grad or x.is_neg())
        is_plain = is_plain and not x.is_nested
        if is_plain:
            inputs.check_memory(function, name, x)
    else:
        is_plain = type(x) is np.ndarray and x.dtype.isnative and x.flags.aligned
        is_plain = is_plain and all(stride % x.itemsize == 0 for stride in x.strides)
    if not is_plain or _dtype_name(x) not in ROW_TYPES:
        x = inputs.as_plain_array(function, name, x, tuple(ROW_TYPES) if hasattr(x, "dtype") else ("float32",))
    if x.ndim != 2:
        raise WhetValueError(f"{function}: {name} has shape {tuple(x.shape)}, expected two axes.")
    return x


def _dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _address_and_strides(x: Any) -> tuple[int, tuple[int, ...]]:
    """Return the address of the first element, and the strides in elements."""
    if inputs.is_tensor(x):
        return x.data_ptr(), tuple(x.stride())
    return x.ctypes.data, tuple(stride // x.itemsize for stride in x.strides)


def _check_any_format(where: str, format: str, k: int) -> None:
    if format not in CORE_FORMATS:
        raise WhetValueError(f"{where}: format is {format!r}, expected one of {', '.join(CORE_FORMATS)}.")
    if format in FORMATS:
        check_format(where, format, k)


def _check_out(function: str, out: Any, like: Any, shape: tuple[int, ...]) -> None:
    """Raise for an ``out`` that the core cannot write to."""
    if out is None:
        return
    kind = "torch tensor" if inputs.is_tensor(like) else "NumPy array"
    ok = inputs.is_tensor(out) == inputs.is_tensor(like) and getattr(out, "dtype", None) == like.dtype
    if not ok or tuple(out.shape) != shape:
        given = f"{type(out).__name__} {getattr(out, 'dtype', '')} {tuple(getattr(out, 'shape', ()))}"
        raise WhetValueError(f"{function}: out is {given}, expected a {kind} of {like.dtype} and shape {shape}.")
    if inputs.is_tensor(out):
        inputs.check_memory(function, "out", out)
        writeable, strides, unit = not (out.requires_grad or out.is_neg()), out.stride(), 1
    else:
        writeable, strides, unit = out.flags.writeable, out.strides, out.itemsize
    has_distinct_rows = all(step != 0 for n, step in zip(shape, strides, strict=True) if n > 1)
    if not writeable or not has_distinct_rows or (shape[-1] > 1 and strides[-1] != unit):
        raise WhetValueError(
            f"{function}: out is read-only or lazily negated, or its rows are not contiguous or share memory. "
            f"Pass a plain array."
        )
