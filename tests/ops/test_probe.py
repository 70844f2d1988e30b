"""The probes return plausible rates for caches, kinds of loop, threads and dtypes."""

import ctypes
import os
import time

import numpy as np
import pytest
from tests.processes import printed_by
from tests.raising import assert_raises, mentions
from tests.threads import threads as on_threads
from tests.timed import timed

import whet
from whet.ops import probe

SHORT = 0.002


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    with on_threads(request.param):
        yield request.param


@pytest.mark.parametrize("rate", [probe.read_rate, probe.copy_rate, probe.scale_rate])
@pytest.mark.parametrize("n_bytes", [1, 24 * 1024, 1_000_001])
def test_memory_rates_are_plausible(rate, n_bytes, threads):
    # Any machine reaches 100 kB/s, even busy; a core moves at most 256 bytes a cycle at 10 GHz.
    assert 1e5 < rate(n_bytes, SHORT) < threads * 2.56e12


@pytest.mark.parametrize("dtype", probe.FMA_DTYPES)
def test_fma_rates_are_plausible(dtype, threads):
    # At most 4 instructions a cycle of 64 bytes at 10 GHz, with 2 operations for each byte.
    assert 1e6 < probe.fma_rate(dtype, SHORT) < threads * 5.12e12


def fastest_copy_by_numpy(n_bytes):
    x, out, best = np.ones(n_bytes // 2, np.uint8), np.zeros(n_bytes // 2, np.uint8), np.inf
    for _ in range(50):
        start = time.perf_counter()
        np.copyto(out, x)
        best = min(best, time.perf_counter() - start)
    return n_bytes / best


@timed
def test_copy_rate_is_not_below_numpys():
    # NumPy's copy is a memcpy, so a ceiling cannot be half of it. Both are the best of many runs on a busy machine.
    n_bytes = 1 << 19
    assert probe.copy_rate(n_bytes, 0.1) > 0.5 * fastest_copy_by_numpy(n_bytes)


@timed
def test_fma_rates_of_dtypes_have_plausible_ratios():
    if whet.isa() != "avx512bf16":
        pytest.skip("only avx512bf16 has one vector instruction per dtype")
    with on_threads(1):
        rate = {dtype: max(probe.fma_rate(dtype, 0.01) for _ in range(3)) for dtype in probe.FMA_DTYPES}
    # A vector holds twice as many floats as doubles. Per cycle, Zen 4 does one dot product of bfloat16, 64 operations;
    # Sapphire Rapids does half of one, and two float FMAs of 32 operations.
    assert 1.5 < rate["float32"] / rate["float64"] < 2.7
    assert rate["bfloat16"] > 0.4 * rate["float32"] and rate["int8"] > 1.4 * rate["float32"]


@timed
def test_duration_is_respected():
    start = time.perf_counter()
    probe.fma_rate("float32", 0.2)
    assert 0.2 <= time.perf_counter() - start < 2.0


EVICT = """
import os, sys, whet
from whet.ops import probe

def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

whet._core.set_num_threads(int(sys.argv[1]), oversubscribe=True)
probe.evict(48 << 20)
probe.read_rate(1 << 20, 0.002)
before = resident_bytes()
for _ in range(3):
    probe.evict(48 << 20)
    probe.evict(1)
    probe.read_rate(32 << 20, 0.002)
print(resident_bytes() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc")
@pytest.mark.parametrize("n_threads", ["1", "3"])
def test_evict_keeps_its_memory_and_rates_free_theirs(n_threads):
    """Runs in a separate process, because other tests allocate and free memory in this one."""
    assert abs(int(printed_by(EVICT, n_threads))) < 16 << 20


@timed
def test_evict_flushes_the_first_level_cache():
    """Reading 16 KiB takes longer after evict than a second time, in the median of many runs."""
    x = np.ones(16 * 1024, np.uint8)
    read = ctypes.CDLL(None).memchr  # reads every byte, since none is 0
    read.restype, read.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

    def seconds():
        start = time.perf_counter()
        assert read(x.ctypes.data, 0, x.size) is None
        return time.perf_counter() - start

    cold, warm = [], []
    for _ in range(15):
        probe.evict(64 << 20)
        cold.append(seconds())
        warm.append(seconds())
    assert np.median(cold) > 1.2 * np.median(warm)


@pytest.mark.parametrize("function", [probe.read_rate, probe.copy_rate, probe.scale_rate, probe.evict])
def test_invalid_sizes_are_named(function):
    name = function.__name__
    for bad, error, facts in (
        (0, whet.WhetValueError, ("n_bytes is 0", "at least 1")),
        (-5, whet.WhetValueError, ("n_bytes is -5", "at least 1")),
        (1 << 60, whet.WhetValueError, ("at most 2^48",)),
        (1.5, whet.WhetTypeError, ("n_bytes is 1.5", "integer")),
    ):
        assert_raises(error, (name, *facts), function, bad)


@pytest.mark.parametrize(
    "rate",
    [
        lambda seconds: probe.read_rate(1024, seconds),
        lambda seconds: probe.copy_rate(1024, seconds),
        lambda seconds: probe.scale_rate(1024, seconds),
        lambda seconds: probe.fma_rate("float32", seconds),
    ],
)
def test_invalid_durations_are_named(rate):
    for bad in (0, -1.0, float("nan"), float("inf"), 3601):
        assert_raises(whet.WhetValueError, ("_rate", "seconds is", "above 0 and at most 3600"), rate, bad)
    for bad in (None, "soon"):
        assert_raises(whet.WhetTypeError, ("_rate", "seconds is", "number"), rate, bad)


@pytest.mark.parametrize("bad", ["float16", np.float32, None])
def test_invalid_dtypes_are_named(bad):
    with pytest.raises(whet.WhetValueError, match=mentions("float32, float64, bfloat16, int8")):
        probe.fma_rate(bad)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_page_bytes_are_64_tokens(dtype, size):
    pages = probe.kv_pages(3, 2, 32, dtype)
    assert pages.take_and_release() == pages.take_and_release() == 64 * 3 * 2 * 32 * 2 * size
    assert probe.malloc_and_free(12345, True) == probe.malloc_and_free(12345, False) == 12345


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ((0, 1, 1, "float32"), ("kv_pages", "n_layers is 0", "at least 1")),
        ((1, 1.5, 1, "float32"), ("kv_pages", "n_kv_heads is 1.5", "integer")),
        ((1, 1, 1 << 17, "float32"), ("size is 131072", "at most 65536")),
        ((1, 1, 1, "int8"), ("dtype is 'int8'", "float32, bfloat16, q8")),
    ],
)
def test_invalid_page_sizes_are_rejected(arguments, facts):
    assert_raises(whet.WhetError, facts, probe.kv_pages, *arguments)
