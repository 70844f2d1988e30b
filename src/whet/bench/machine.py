"""The machine of a benchmark: its description, its processors and threads, and its performance ceilings.

Independent of suites. Ceilings are measured by Whet's probes (``whet.ops.probe``) in the same run as the rows.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import whet
from whet.bench import cuda
from whet.ops import probe
from whet.system import memory
from whet.system.machine import caches, cpu_seconds_of, descendants, machine_cpu_seconds, processor_name, processors

Ceilings = Mapping[str, Mapping[str, float]]
"""``read``, ``copy`` and ``scale``: cache level -> bytes per second; ``flops``: dtype -> operations per second."""

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS", "WHET_NUM_THREADS",
)  # fmt: skip
_PACKAGES = (
    "numpy", "torch", "transformers", "rlox", "trl", "llama-cpp-python", "openvino-genai", "flashinfer-python", "vllm"
)  # fmt: skip


def environment(threads: int) -> dict[str, str]:
    """Return an environment in which every library uses ``threads`` threads; set it before loading any of them."""
    return {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}


def used_threads(asked: int) -> dict[str, Any]:
    """Collect the number of threads that each library reports, and the processors that all of them share."""
    used: dict[str, Any] = {"asked": asked, "cpus": processors(), "whet": whet.get_num_threads()}
    if torch := sys.modules.get("torch"):
        used["torch"] = torch.get_num_threads()
    used["Rayon (RAYON_NUM_THREADS)"] = os.environ.get("RAYON_NUM_THREADS", "not set")
    from threadpoolctl import threadpool_info

    for pool in threadpool_info():
        used[f"{pool['internal_api']} ({Path(pool['filepath']).name})"] = pool["num_threads"]
    return used


def describe() -> dict[str, Any]:
    """Describe processor, number of processors, caches, memory and operating system."""
    return {
        "processor": processor_name(),
        "cpus": len(processors()),
        "caches": caches(),
        "memory_bytes": memory.machine_bytes(),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Whet, Python and the installed contenders."""
    found = {"whet": whet.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of the running source, with "(modified)" if files changed; empty outside of a repository."""
    here = Path(whet.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):  # installed below another repository
            return ""
        return git("rev-parse", "--short", "HEAD") + (" (modified)" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


@contextlib.contextmanager
def watch_others() -> Iterator[dict[str, float]]:
    """Yield a dict that has ``cpus`` afterwards: the processors used by other processes; empty if unknown."""
    found: dict[str, float] = {}
    before, started_s = _others_busy_s(), time.perf_counter()
    yield found
    after, elapsed_s = _others_busy_s(), time.perf_counter() - started_s
    if before is not None and after is not None and elapsed_s > 0:
        found["cpus"] = max(0.0, (after - before) / elapsed_s)


def _others_busy_s() -> float | None:
    """Return the CPU seconds of all other processes and interrupts since boot."""
    used = machine_cpu_seconds()
    return None if used is None else used - cpu_seconds()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its live descendants, such as servers and browsers."""
    return time.process_time() + cpu_seconds_of(descendants(os.getpid()))


# --- ceilings -------------------------------------------------------------------------------------------


def measure_ceilings(quick: bool, device: str = "cpu") -> dict[str, dict[str, float]]:
    """Measure how fast a device or this process's threads can read, copy and scale at each level, and multiply-add."""
    if device != "cpu":
        return cuda.measure_ceilings(device, quick)
    seconds = 0.03 if quick else 0.15
    threads, sizes = whet.get_num_threads(), {}
    for level, size in caches().items():
        sizes[level] = int(size * (0.5 if level == "L3" else 0.6 * threads))
    sizes["memory"] = max(256 << 20, 4 * caches().get("L3", 0))
    rates = {"read": probe.read_rate, "copy": probe.copy_rate, "scale": probe.scale_rate}
    found = {name: {level: rate(size, seconds) for level, size in sizes.items()} for name, rate in rates.items()}
    dtypes = ("float32", "float64", "bfloat16", "int8")
    return {**found, "flops": {dtype: probe.fma_rate(dtype, seconds) for dtype in dtypes}}


def highest(first: Ceilings, second: Ceilings) -> dict[str, dict[str, float]]:
    """Merge two measurements of the ceilings: the higher figure of each."""
    return {name: {key: max(value, second[name][key]) for key, value in rates.items()} for name, rates in first.items()}


def fastest_possible(case: Any, ceilings: Ceilings, threads: int) -> tuple[float, str]:
    """Return the minimum seconds of a case on this machine and its bottleneck; (0, "") without bytes and operations.

    Data that fits into a cache is assumed to be there, and to stream at the highest of the read, copy and scale rates:
    no mixture of loads and stores is faster.
    """
    rates = {level: max(ceilings[kind][level] for kind in ("read", "copy", "scale")) for level in ceilings["read"]}
    footprint = case.footprint or case.n_bytes
    left, bounds = footprint, {}
    for level, size in _cache_levels(case.device, threads).items() if case.cache == "warm" else ():
        cached = min(left, size)
        bounds[f"{level} bandwidth"] = cached / rates[level] * case.n_bytes / footprint if footprint else 0.0
        left -= cached
    bounds["memory bandwidth"] = left / rates["memory"] * case.n_bytes / footprint if footprint else 0.0
    moving, computing = sum(bounds.values()), case.n_flops / ceilings["flops"][case.flop_dtype]
    if computing >= moving:
        return computing, f"{case.flop_dtype} FMA" if computing else ""
    return moving, max(bounds, key=lambda name: bounds[name])


def _cache_levels(device: str, threads: int) -> dict[str, int]:
    """Return the total bytes of each cache level for this number of threads, or of a device."""
    if device != "cpu":
        return cuda.cache_levels(device)
    return {level: size if level == "L3" else size * threads for level, size in caches().items()}


# --- memory ---------------------------------------------------------------------------------------------


def peak_bytes(call: Any) -> int | None:
    """Return the rise of the process's memory while ``call`` runs; None if the system does not report it.

    Memory that an allocator retained from earlier calls is not counted.
    """
    try:
        gc.collect()
        memory.trim_heap()
        memory.reset_peak()
    except OSError:
        return None
    before = memory.resident_bytes()
    call()
    return max(0, memory.peak_bytes() - before)
