"""Hardware ceilings of this machine (bandwidths, multiply-adds), the cost of allocation, and traces of jobs.

Rates of loops that only load, copy, scale, or multiply and add, on the kernels' instruction set (``whet.isa()``) and
threads (``whet.get_num_threads()``). A rate is the fastest of at least 3 timed batches, after one warm-up batch; a
batch starts on all threads together and lasts a millisecond or more. Not exported at top level.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs

FMA_DTYPES = ("float32", "float64", "bfloat16", "int8")


def read_rate(n_bytes: int, seconds: float = 0.05) -> float:
    """Measure the bytes read per second from n_bytes of memory: repeated loads of 64-byte vectors, or-ed to a register.

    The memory is split into one contiguous part per thread, in steps of 512 bytes: to measure a per-core cache, pass
    an n_bytes that fits in this cache times the number of threads.

    Args:
        n_bytes: bytes in all, at least 1; rounded up to 512 for each thread.
        seconds: duration of the measurement, above 0 and at most 3600; at least three batches run.

    Returns:
        Bytes per second of all threads together.

    Raises:
        WhetValueError: n_bytes is below 1, or seconds is not in (0, 3600].
        WhetTypeError: n_bytes is not an integer, or seconds is not a number.
        MemoryError: the memory cannot be allocated.
    """
    return _core.read_rate(_size("read_rate", n_bytes), _duration("read_rate", seconds))


def copy_rate(n_bytes: int, seconds: float = 0.05) -> float:
    """Measure the bytes read plus written per second by a copy of one half of n_bytes of memory to the other half.

    The faster of ordinary stores and streaming stores (which bypass the caches), each measured for half of
    ``seconds``. The read for ownership of ordinary stores is not counted. Arguments and errors as for ``read_rate``.
    """
    return _core.copy_rate(_size("copy_rate", n_bytes), _duration("copy_rate", seconds))


def scale_rate(n_bytes: int, seconds: float = 0.05) -> float:
    """Measure the bytes read plus written per second by ``x *= factor`` in place, x float32 of n_bytes.

    Arguments and errors as for ``read_rate``.
    """
    return _core.scale_rate(_size("scale_rate", n_bytes), _duration("scale_rate", seconds))


def fma_rate(dtype: str, seconds: float = 0.05) -> float:
    """Measure operations per second in registers on all threads; a multiply-add counts as two.

    ``sums[c] += a * b`` for independent vectors of sums. "float32" and "float64" are fused multiply-adds of that dtype.
    "bfloat16" sums products of pairs in float32, and "int8" products of four, unsigned times signed, in int32. Only
    "avx512bf16" has instructions for these two. On other instruction sets the rate is of the kernels' fastest method:
    float32 multiply-adds for "bfloat16" where they are faster, and on "avx2" 7-bit products with sums of 16 bits, as
    in formats of up to 6 bits, for "int8".

    Raises:
        WhetValueError: an unknown dtype, or seconds not in (0, 3600].
        WhetTypeError: seconds is not a number.
    """
    if dtype not in FMA_DTYPES:
        raise WhetValueError(f"fma_rate: dtype is {dtype!r}, expected one of {', '.join(FMA_DTYPES)}, as a string.")
    return _core.fma_rate(dtype, _duration("fma_rate", seconds))


def evict(n_bytes: int) -> None:
    """Flush the caches by reading at least n_bytes of other memory.

    Pass at least twice the size of the last-level cache. Each thread reads a separate part and thereby flushes the
    caches of its core. The memory stays allocated for the next call.

    Raises:
        WhetValueError: n_bytes is below 1.
        WhetTypeError: n_bytes is not an integer.
        MemoryError: the memory cannot be allocated.
    """
    _core.evict(_size("evict", n_bytes))


def kv_pages(n_layers: int, n_kv_heads: int, head_dim: int, dtype: str) -> Any:
    """Return an engine's KV cache of these sizes, with 8 pages of 64 tokens, in "float32", "bfloat16" or "q8".

    ``take_and_release()`` of the cache allocates a zeroed page, frees it, and returns the page's bytes: the same page
    each time, because the page freed last is allocated first.

    Raises:
        WhetValueError: a size is below 1, or another dtype.
        WhetTypeError: a size is not an integer.
        MemoryError: the memory cannot be allocated.
    """
    given = {"n_layers": n_layers, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    sizes = [inputs.as_positive_int("kv_pages", name, size) for name, size in given.items()]
    if dtype not in _core.KvType.__members__:
        raise WhetValueError(f"kv_pages: dtype is {dtype!r}, expected one of {', '.join(_core.KvType.__members__)}.")
    if max(sizes) > 1 << 16:
        raise WhetValueError(f"kv_pages: a size is {max(sizes)}, expected at most 65536.")
    n_layers, n_kv_heads, head_dim = sizes
    return _core.KvPages(n_layers, n_kv_heads, head_dim, _core.KvType[dtype])


def malloc_and_free(n_bytes: int, zeroed: bool) -> int:
    """Call ``malloc`` and ``free`` of the C library once; if ``zeroed``, write n_bytes of zeros in between.

    Returns:
        n_bytes.

    Raises:
        WhetValueError, WhetTypeError, MemoryError: as ``read_rate``.
    """
    return _core.malloc_and_free(_size("malloc_and_free", n_bytes), bool(zeroed))


class Trace(NamedTuple):
    """The work of a call in the jobs of the thread pool.

    Attributes:
        jobs: of each job the processor time of its tasks, in seconds, in the order in which threads claim them.
        serial_s: processor time of the process outside of the tasks, in seconds.
    """

    jobs: list[list[float]]
    serial_s: float


def trace_jobs(call: Callable[[], object], threads: int) -> Trace:
    """Run ``call`` with every task on its calling thread, with jobs divided as for ``threads`` threads.

    The trace shows how work is divided among more threads than this machine has processors, undisturbed by other
    load. Not for concurrent calls: the trace is of the whole process.

    Raises:
        WhetValueError: threads is not in [1, 1024].
        WhetTypeError: threads is not an integer.
    """
    threads = inputs.as_positive_int("trace_jobs", "threads", threads)
    if threads > 1024:
        raise WhetValueError(f"trace_jobs: threads is {threads}, expected at most 1024.")
    _core.begin_job_trace(threads)
    started_s = time.process_time()
    try:
        call()
    finally:
        elapsed_s = time.process_time() - started_s
        jobs, clock_s = _core.end_job_trace()
    return Trace(jobs, elapsed_s - clock_s - sum(map(sum, jobs)))


def _size(function: str, n_bytes: Any) -> int:
    size = inputs.as_positive_int(function, "n_bytes", n_bytes)
    if size > 1 << 48:
        raise WhetValueError(f"{function}: n_bytes is {size}, expected at most 2^48. It counts bytes, not bits.")
    return size


def _duration(function: str, seconds: Any) -> float:
    try:
        value = float(seconds)
    except (TypeError, ValueError):
        raise WhetTypeError(f"{function}: seconds is {seconds!r}, expected a number, such as 0.05.") from None
    if not 0.0 < value <= 3600.0:
        raise WhetValueError(f"{function}: seconds is {value}, expected above 0 and at most 3600, such as 0.05.")
    return value
