"""Quantised weights: definitions of the formats, quantisation and dequantisation.

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
    mxfp4      2^(e - 128) q q twice an E2M1    8-bit e per 32                        4.25
                             number

All formats except int8 are GGUF block types, byte for byte: ``Quantized.data`` can be read from and written to GGUF
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
        block_length: weights per block; rows are whole blocks.
        block_bytes: bytes per block.
        row_scale_bytes: bytes after a row's blocks.
        is_quantised: False for float formats.
    """

    name: str
    block_length: int
    block_bytes: int
    row_scale_bytes: int
    is_quantised: bool

    def row_bytes(self, k: int) -> int:
        """Return the bytes of one row of k weights."""
        return k // self.block_length * self.block_bytes + self.row_scale_bytes

    def row_length(self, n_bytes: int) -> int:
        """Return the number of weights in a row of n_bytes."""
        return (n_bytes - self.row_scale_bytes) // self.block_bytes * self.block_length


CORE_TABLE = {format.name: format for format in (CoreFormat(*row) for row in _core.weight_formats())}
CORE_FORMATS = {name: i for i, name in enumerate(CORE_TABLE)}
"""Format name -> the core's number."""
FORMATS = tuple(name for name, format in CORE_TABLE.items() if format.is_quantised)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantised matrix. Equal if format, shape and bytes are; not hashable.

    Attributes:
        format: of ``FORMATS``.
        shape: (N, K).
        data: (N, bytes per row) uint8: GGUF's blocks; for int8, K numbers and then the four bytes of the scale.

    Raises:
        WhetValueError: an unknown format, a K that is not a multiple of the block length, or data of another size.
        WhetTypeError: data is not a uint8 array.
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
        """Bits per weight, including scales."""
        return 8 * self.data.size / max(1, self.shape[0] * self.shape[1])

    def dequantize(self) -> np.ndarray:
        """Return the dequantised weights, (N, K) float32."""
        out = np.empty(self.shape, np.float32)
        _core.dequantize(CORE_FORMATS[self.format], *self.shape, self.data.ctypes.data, out.ctypes.data)
        return out


def quantize(weight: Any, format: str) -> Quantized:
    """Quantise weights, with scales chosen to minimise the sum of (w - quantised w)^2 over the weights of a scale.

    - int8, q8_0: scale max|w| / 127 of the row or block, and rounding.
    - q4_0, q5_0, q6_k: several trial scales map the largest |w| to the wider end of the range; for each resulting q
      the optimal scale is sum(q w) / sum(q^2), and the best trial is used. Scales of q6_k are then rounded to multiples
      of d, the largest / 128.
    - q4_1, q5_1, q4_k, q5_k: 9 trial ranges of about [min, max]; for each, scale and min are fitted twice by regression
      of w on q, and the best trial is used; min is at most 0. Scales and mins of q4_k and q5_k are then rounded to
      multiples of d and e, each the largest / 63, and min is refitted to the rounded scale.

    q is computed from the stored scales. Packing from floats (``pack_weight``, ``Engine``) gives the same bits.

    Args:
        weight: (N, K) float32 or bfloat16, finite.
        format: of ``FORMATS``.

    Raises:
        WhetValueError: an unknown format, another shape, a K that is not a multiple of the block length, NaN or
            infinity.
        WhetTypeError: another dtype.
    """
    values = _float32(weight)
    n, k = values.shape
    check_format("quantize", format, k)
    check_finite("quantize", values)
    data = np.empty((n, CORE_TABLE[format].row_bytes(k)), np.uint8)
    packed = _core.PackedWeight(CORE_FORMATS[format], n, k)
    packed.pack_rows(0, n, rows=values.ctypes.data, source=_core.RowType.FLOAT32, row_stride=k, column_stride=1)
    packed.unpack(data.ctypes.data, data.strides[0])
    return Quantized(format, (n, k), data)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Return the bit patterns (uint16) of float32 numbers rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16).astype(np.uint16) | 0x40, rounded)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float32(weight: Any) -> np.ndarray:
    dtypes = ("float32", "bfloat16") if hasattr(weight, "dtype") else ("float32",)
    weight = inputs.as_plain_array("quantize", "weight", weight, dtypes)
    if weight.ndim != 2:
        raise WhetValueError(f"quantize: weight has shape {tuple(weight.shape)}, expected two axes.")
    if inputs.is_tensor(weight):
        return weight.float().numpy()
    return weight if weight.dtype == np.float32 else bf16_values(weight.view(np.uint16))


def check_format(where: str, format: str, k: int) -> None:
    """Raise unless ``format`` is a quantised format that supports rows of k weights."""
    if format not in FORMATS:
        raise WhetValueError(f"{where}: format is {format!r}, expected one of {', '.join(FORMATS)}.")
    block = CORE_TABLE[format].block_length
    if k % block:
        raise WhetValueError(
            f"{where}: weight has rows of {k}, not a multiple of the block length {block} of {format}. "
            f"Choose int8, or pad the inputs."
        )


def check_finite(where: str, weight: Any) -> None:
    """Raise if an element of a matrix (NumPy or torch) is NaN or infinite."""
    finite = weight.isfinite() if inputs.is_tensor(weight) else np.isfinite(weight)
    if not finite.all():
        row, column = np.argwhere(~np.asarray(finite))[0]
        raise WhetValueError(
            f"{where}: weight[{row}, {column}] is {float(weight[row, column])}, expected finite weights."
        )


def _kind(x: Any) -> str:
    return f"{type(x).__name__} of {x.dtype}" if hasattr(x, "dtype") else type(x).__name__
