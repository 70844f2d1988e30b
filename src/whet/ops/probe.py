"""Ceilings of this machine (bandwidths, multiply-adds), to compare other figures with, and the cost of allocation.

The rates of loops that only load, copy, scale, or multiply and add, on the kernels' instruction set (``whet.isa()``)
and threads (``whet.get_num_threads()``). Each is the fastest of several timed batches, at least 3, after one that is
not counted; a batch starts on all threads together and lasts a millisecond or more. Not exported at top level.
"""

from __future__ import annotations

from typing import Any

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs

FMA_DTYPES = ("float32", "float64", "bfloat16", "int8")


def read_rate(n_bytes: int, seconds: float = 0.05) -> float:
    """Bytes read per second from n_bytes of memory: every 64-byte vector loaded and or-ed to a register, over and over.

    The memory is cut into one contiguous part for each thread, in steps of 512 bytes: for the rate of a cache of one
    core, take n_bytes that fits into as many of them as there are threads.

    Args:
        n_bytes: bytes in all, at least 1; rounded up to 512 for each thread.
        seconds: how long to measure, above 0 and at most 3600; three batches are made however short it is.

    Returns:
        Bytes per second of all threads together.

    Raises:
        WhetValueError: n_bytes is below 1, or seconds is not in (0, 3600].
        WhetTypeError: n_bytes is no integer, or seconds is no number.
        MemoryError: the system does not give so much memory.
    """
    return _core.read_rate(_size("read_rate", n_bytes), _duration("read_rate", seconds))


def copy_rate(n_bytes: int, seconds: float = 0.05) -> float:
    """Bytes read plus bytes written per second by a copy of one half of n_bytes of memory to the other half.

    The faster of ordinary stores and of streaming stores (which bypass the caches), each measured for half of
    ``seconds``. What an ordinary store reads before it writes is not counted. Arguments and errors are those of
    ``read_rate``.
    """
    return _core.copy_rate(_size("copy_rate", n_bytes), _duration("copy_rate", seconds))


def scale_rate(n_bytes: int, seconds: float = 0.05) -> float:
    """Bytes read plus bytes written per second by ``x *= factor`` in place, x float32 of n_bytes.

    Arguments and errors are those of ``read_rate``.
    """
    return _core.scale_rate(_size("scale_rate", n_bytes), _duration("scale_rate", seconds))


def fma_rate(dtype: str, seconds: float = 0.05) -> float:
    """Operations per second in registers, a multiplication and an addition counting as two, over all threads.

    ``sums[c] += a * b`` for independent vectors of sums. "float32" and "float64" are fused multiply-adds of that dtype.
    "bfloat16" sums products of pairs in float32 (4 operations a lane), "int8" products of four, unsigned times signed,
    in int32 (8 a lane). These two have instructions of their own only on "avx512bf16"; on any other instruction set
    the figure is that of the emulation which the kernels use there.

    Raises:
        WhetValueError: dtype is none of these, or seconds is not in (0, 3600].
        WhetTypeError: seconds is no number.
    """
    if dtype not in FMA_DTYPES:
        raise WhetValueError(f"fma_rate: dtype is {dtype!r}, expected one of {', '.join(FMA_DTYPES)}, as a string.")
    return _core.fma_rate(dtype, _duration("fma_rate", seconds))


def evict(n_bytes: int) -> None:
    """Reads at least n_bytes of other memory, so that what was in the caches is there no more.

    Take twice the last cache or more. Each thread reads a part of its own and so clears the caches of its own core. The
    memory stays allocated for the next call.

    Raises:
        WhetValueError: n_bytes is below 1.
        WhetTypeError: n_bytes is no integer.
        MemoryError: the system does not give so much memory.
    """
    _core.evict(_size("evict", n_bytes))


def kv_pages(n_layers: int, n_kv_heads: int, head_dim: int, dtype: str) -> Any:
    """A KV cache as an engine of these sizes has it, of 8 pages of 64 tokens, in "float32" or "bfloat16".

    Its ``take_and_release()`` allocates a zeroed page, frees it, and returns the page's bytes. It is the same page each
    time: the page freed last is the first to be allocated again.

    Raises:
        WhetValueError: a size is below 1, or dtype is neither of these.
        WhetTypeError: a size is no integer.
        MemoryError: the system does not give so much memory.
    """
    given = {"n_layers": n_layers, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    sizes = [inputs.positive_size("kv_pages", name, size) for name, size in given.items()]
    if dtype not in ("float32", "bfloat16"):
        raise WhetValueError(f"kv_pages: dtype is {dtype!r}, expected 'float32' or 'bfloat16'.")
    if max(sizes) > 1 << 16:
        raise WhetValueError(f"kv_pages: a size is {max(sizes)}, expected at most 65536.")
    n_layers, n_kv_heads, head_dim = sizes
    return _core.KvPages(n_layers, n_kv_heads, head_dim, dtype == "bfloat16")


def malloc_and_free(n_bytes: int, zeroed: bool) -> int:
    """``malloc`` and ``free`` of the C library, once; between them, where ``zeroed``, n_bytes of zeros are written.

    Returns:
        n_bytes.

    Raises:
        WhetValueError, WhetTypeError, MemoryError: as ``read_rate``.
    """
    return _core.malloc_and_free(_size("malloc_and_free", n_bytes), bool(zeroed))


def _size(function: str, n_bytes: Any) -> int:
    size = inputs.positive_size(function, "n_bytes", n_bytes)
    if size > 1 << 48:
        raise WhetValueError(f"{function}: n_bytes is {size}, expected at most 2^48. It counts bytes, not bits.")
    return size


def _duration(function: str, seconds: Any) -> float:
    try:
        value = float(seconds)
    except (TypeError, ValueError):
        raise WhetTypeError(f"{function}: seconds is {seconds!r}, expected a number. Pass 0.05, say.") from None
    if not 0.0 < value <= 3600.0:
        raise WhetValueError(f"{function}: seconds is {value}, expected above 0 and at most 3600. Pass 0.05, say.")
    return value
