"""Weights in few bits: what the formats mean, and the way to them and back.

               w =                                        scales              bits per weight
    int8       scale q       q in [-127, 127]   float32 scale per row (output)        8 + 32 / K
    q8_0       d q           q in [-127, 127]   float16 d per 32                      8.5
    q4_0       d (q - 8)     q in [0, 15]       float16 d per 32                      4.5
    q5_0       d (q - 16)    q in [0, 31]       float16 d per 32                      5.5
    q4_1       d q + m       q in [0, 15]       float16 d, m per 32                   5
    q5_1       d q + m       q in [0, 31]       float16 d, m per 32                   6
    q4_k       d s q - e m   q in [0, 15]       6-bit s, m per 32, float16 d, e
                                                per 256                               4.5
    q5_k       d s q - e m   q in [0, 31]       as q4_k                               5.5
    q6_k       d s (q - 32)  q in [0, 63]       8-bit s per 16, float16 d per 256     6.5625

All but int8 are the GGUF format's block types, byte for byte: ``Quantized.data`` can be read from and written to such
files. The products are in ``whet.ops.linear``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs


class CoreFormat(NamedTuple):
    """A row of the core's table of formats (cpp/engine/formats.h).

    Attributes:
        block_length: weights of a block; a row is a whole number of blocks.
        block_bytes: bytes of a block.
        row_scale_bytes: bytes after a row's blocks.
        is_quantised: not plain numbers.
    """

    name: str
    block_length: int
    block_bytes: int
    row_scale_bytes: int
    is_quantised: bool

    def row_bytes(self, k: int) -> int:
        """Bytes of one row of k weights."""
        return k // self.block_length * self.block_bytes + self.row_scale_bytes

    def row_length(self, n_bytes: int) -> int:
        """Weights of a row of so many bytes."""
        return (n_bytes - self.row_scale_bytes) // self.block_bytes * self.block_length


CORE_TABLE = {format.name: format for format in (CoreFormat(*row) for row in _core.weight_formats())}
CORE_FORMATS = {name: i for i, name in enumerate(CORE_TABLE)}
"""Name -> the core's number."""
FORMATS = tuple(name for name, format in CORE_TABLE.items() if format.is_quantised)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantised matrix. Two are equal if format, shape and bytes are; not hashable.

    Attributes:
        format: of ``FORMATS``.
        shape: (N, K).
        data: (N, bytes per row) uint8: GGUF's blocks; of int8 K numbers and then the scale's four bytes.

    Raises:
        WhetValueError: an unknown format, a K that the blocks do not divide, or data of another size.
        WhetTypeError: data is no uint8 array.
    """

    format: str
    shape: tuple[int, int]
    data: np.ndarray

    def __post_init__(self) -> None:
        check_format("Quantized", self.format, self.shape[1])
        if not isinstance(self.data, np.ndarray) or self.data.dtype != np.uint8:
            raise WhetTypeError(f"Quantized: data is {_kind(self.data)}, expected a uint8 array.")
        expected = (self.shape[0], CORE_TABLE[self.format].row_bytes(self.shape[1]))
        if self.data.shape != expected:
            raise WhetValueError(
                f"Quantized: data has shape {self.data.shape}, expected {expected} for {self.shape} in {self.format}."
            )
        object.__setattr__(self, "data", np.ascontiguousarray(self.data))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Quantized):
            return NotImplemented
        return (self.format, self.shape) == (other.format, other.shape) and np.array_equal(self.data, other.data)

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, scales counted."""
        return 8 * self.data.size / max(1, self.shape[0] * self.shape[1])

    def dequantize(self) -> np.ndarray:
        """(N, K) float32: the numbers that the products multiply by."""
        out = np.empty(self.shape, np.float32)
        _core.dequantize(CORE_FORMATS[self.format], *self.shape, self.data.ctypes.data, out.ctypes.data)
        return out


def quantize(weight: Any, format: str) -> Quantized:
    """Weights in a format, with scales chosen for a small sum of (w - quantised w)^2 over those that share a scale.

    - int8, q8_0: max|w| / 127 of the row or block, and rounding.
    - q4_0, q5_0, q6_k: q is rounded with several trial scales that put the largest |w| near the wider end of the range;
      for each q, the scale with the least error is sum(q w) / sum(q^2), and the best of these is kept. Those of q6_k
      are then rounded to multiples of d, the largest / 128.
    - q4_1, q5_1, q4_k, q5_k: 9 trial lines from min to max or nearly so; for each, scale and lowest value are fitted by
      the regression of w on q, twice, and the best is kept; the lowest value is not above 0. Those of q4_k and q5_k are
      then rounded to multiples of d and e, each the largest / 63, and the lowest value is fitted again to the rounded
      scale.

    q follows from the stored scales. Packing from numbers (``pack_weight``, ``Engine``) gives the same bits.

    Args:
        weight: (N, K) float32 or bfloat16, finite.
        format: of ``FORMATS``.

    Raises:
        WhetValueError: an unknown format, another shape, a K that the format's blocks do not divide, NaN or infinity.
        WhetTypeError: another dtype.
    """
    values = _float32(weight)
    n, k = values.shape
    check_format("quantize", format, k)
    check_finite("quantize", values)
    data = np.empty((n, CORE_TABLE[format].row_bytes(k)), np.uint8)
    _core.quantize(CORE_FORMATS[format], n, k, values.ctypes.data, data.ctypes.data)
    return Quantized(format, (n, k), data)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """The bit patterns (uint16) of float32 numbers rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16).astype(np.uint16) | 0x40, rounded)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers that bit patterns (uint16) of bfloat16 stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float32(weight: Any) -> np.ndarray:
    dtypes = ("float32", "bfloat16") if hasattr(weight, "dtype") else ("float32",)
    weight = inputs.plain("quantize", "weight", weight, dtypes)
    if weight.ndim != 2:
        raise WhetValueError(f"quantize: weight has shape {tuple(weight.shape)}, expected two axes.")
    if inputs.is_tensor(weight):
        return weight.float().numpy()
    return weight if weight.dtype == np.float32 else bf16_values(weight.view(np.uint16))


def check_format(where: str, format: str, k: int) -> None:
    """Raises unless it is a quantised format that takes rows of k."""
    if format not in FORMATS:
        raise WhetValueError(f"{where}: format is {format!r}, expected one of {', '.join(FORMATS)}.")
    block = CORE_TABLE[format].block_length
    if k % block:
        raise WhetValueError(
            f"{where}: weight has rows of {k}, not a multiple of the {block} that {format} quantises together. "
            f"Choose int8, or pad the inputs."
        )


def check_finite(where: str, weight: Any) -> None:
    """Raises if a number of a matrix, NumPy's or torch's, is NaN or infinite."""
    finite = weight.isfinite() if inputs.is_tensor(weight) else np.isfinite(weight)
    if not finite.all():
        row, column = np.argwhere(~np.asarray(finite))[0]
        raise WhetValueError(
            f"{where}: weight[{row}, {column}] is {float(weight[row, column])}. Quantize finite weights."
        )


def _kind(x: Any) -> str:
    return f"{type(x).__name__} of {x.dtype}" if hasattr(x, "dtype") else type(x).__name__
