"""The processors of this machine, and the libraries of this process."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path


def processor_name() -> str:
    """Return the processor's name."""
    if sys.platform == "darwin":
        found = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True).stdout
    else:
        found = "".join(re.findall(r"model name\s*: (.*)", _read("/proc/cpuinfo"))[:1])
    return found.strip() or platform.processor() or platform.machine()


def processors() -> list[int]:
    """List the processors that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pinning(processors: list[int]) -> Callable[[], None] | None:
    """Return a function that pins its process to these processors; None on systems other than Linux."""
    return partial(os.sched_setaffinity, 0, processors) if sys.platform == "linux" else None


def caches() -> dict[str, int]:
    """Return the sizes of the data caches: L1 and L2 per core, L3 in total; empty if the system reports none."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = (_read(index / name).strip() for name in ("type", "level", "size"))
        if kind != "Instruction":
            number, unit = re.fullmatch(r"(\d+)([KMG]?)", size).groups()  # type: ignore[union-attr]
            sizes[f"L{level}"] = int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]
    return sizes


def load_average() -> list[float]:
    """Return the load averages of the last 1, 5 and 15 minutes; an empty list on Windows."""
    return [round(load, 2) for load in os.getloadavg()] if sys.platform != "win32" else []


def machine_cpu_seconds() -> float | None:
    """Return the CPU seconds of all processes and interrupts since boot; None if the system does not report them."""
    fields = _read("/proc/stat").partition("\n")[0].split()[1:9]
    if not fields:
        return None
    user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, fields)
    return (user + nice + system + irq + softirq + stolen) / _ticks_per_second()


def cpu_seconds_of(processes: Iterable[int]) -> float:
    """Return the CPU seconds of the live processes with these ids, as far as the system reports them."""
    return sum(_cpu_seconds(f"/proc/{process}/stat") for process in processes)


def main_thread_cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a live process's main thread; 0 if the system does not report them."""
    return _cpu_seconds(f"/proc/{process}/task/{process}/stat")


def _cpu_seconds(path: str) -> float:
    fields = _read(path).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _ticks_per_second() if fields else 0.0


def descendants(process: int) -> list[int]:
    """List the live processes that a process and its children have started, as far as the system reports them."""
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, _read(path).split()):
            found += [child, *descendants(child)]
    return found


def may_have_gpu() -> bool:
    """Whether a driver of a GPU is installed, as far as the system reports it at once; True on Windows."""
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, Windows' subsystem for Linux, AMD
    return sys.platform == "win32" or any(map(os.path.exists, drivers))


def mapped_files() -> set[str]:
    """Return the paths of the files that this process maps, such as libraries; empty if the system reports none."""
    return set(re.findall(r"/\S+$", _read("/proc/self/maps"), re.MULTILINE))


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK") if sys.platform != "win32" else 0


def _read(path: str | Path) -> str:
    """Read a file of the kernel; "" on systems without it."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""
