"""Physical memory of this process and of the machine, and memory that the C library has allocated; all in bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from whet import _core
from whet.errors import WhetError


def resident_bytes() -> int:
    """Return the physical memory of this process (RSS).

    Raises:
        WhetError: the system does not report it.
    """
    return _process_memory()[0]


def peak_bytes() -> int:
    """Return the highest ``resident_bytes`` since the process started.

    Raises:
        WhetError: the system does not report it.
    """
    return _process_memory()[1]


def machine_bytes() -> int:
    """Return this machine's memory, or the lowest limit of this process's control groups."""
    return min([_core.read_machine_memory()[0], *(group.limit for group in control_groups())])


def available_bytes() -> int:
    """Return the most memory that this process can have: its own plus what machine and control groups have left.

    Raises:
        WhetError: the system does not report it.
    """
    return resident_bytes() + unused_bytes()


def unused_bytes() -> int:
    """Return the memory that machine and control groups have left; 0 if the system does not report it."""
    left = [_core.read_machine_memory()[1], *(group.limit - group.used for group in control_groups())]
    return max(0, min(left))


def choose_activation_bytes(setting: int | None, unused: int) -> int:
    """Return the memory in which a forward pass keeps activations of layers for the backward pass.

    None: a quarter of the unused memory, which the ranks of torchrun on this machine share.
    """
    if setting is not None:
        return setting
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return unused // 4 // max(1, int(ranks) if ranks.isdecimal() else 1)


def _process_memory() -> tuple[int, int]:
    resident, peak = _core.read_process_memory()
    if not resident:
        raise WhetError("memory_report: the system does not report the memory of this process. On Linux, mount /proc.")
    return resident, peak


def drop_pages(mapping: mmap.mmap, begin: int, n_bytes: int) -> None:
    """Return pages of a mapped file to the system, which reads them again when they are used; a no-op on Windows."""
    if sys.platform != "win32":
        mapping.madvise(mmap.MADV_DONTNEED, begin, n_bytes)


def heap_bytes() -> int:
    """Return the resident memory of the C library's heap; 0 if the system does not report it."""
    found, in_heap = 0, False
    maps = Path("/proc/self/smaps")
    for line in maps.read_text(encoding="ascii", errors="replace").splitlines() if maps.exists() else []:
        if "-" in line.partition(" ")[0]:  # a mapping's addresses
            in_heap = line.endswith("[heap]")
        elif in_heap and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


# --- control groups of Linux ----------------------------------------------------------------------------


class ControlGroup(NamedTuple):
    """Memory limit, and the bytes that count towards it except reclaimable file pages."""

    limit: int
    used: int


_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controller -> files of its limit and usage, and the name of reclaimable file pages: cgroup v2, and v1."""


def control_groups(root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the control groups of this process that have a limit, including their ancestors."""
    file = root / "proc/self/cgroup"
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        _, controllers, path = line.split(":", 2)
        for controller in {"", "memory"} & set(controllers.split(",")):
            top = root / "sys/fs/cgroup" / controller
            inner = top / path.lstrip("/")
            # In a container the path may be the host's, while the container's group is mounted at the top.
            for folder in dict.fromkeys([*(p for p in (inner, *inner.parents) if p.is_relative_to(top)), top]):
                group = _read_group(folder, *_GROUP_FILES[controller])
                if group is not None:
                    yield group


def _read_group(folder: Path, limit: str, current: str, reclaimable: str) -> ControlGroup | None:
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        used = int((folder / current).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    if not most.isdigit() or int(most) >= 1 << 60:  # "max", or its numeric equivalent in version 1
        return None
    reclaimed = int(stat[stat.index(reclaimable) + 1]) if reclaimable in stat else 0
    return ControlGroup(int(most), used - reclaimed)


# --- the C library --------------------------------------------------------------------------------------


class Allocated(NamedTuple):
    """Allocated bytes: in the heap, and in separate mappings."""

    heap: int
    mapped: int


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


@lru_cache
def _of_libc(name: str) -> Any:
    """Return a function of glibc; None in other C libraries and older versions."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def read_allocated() -> Allocated:
    """Return the bytes allocated from the C library; the resident heap where the library does not count them."""
    mallinfo2 = _of_libc("mallinfo2")  # of glibc 2.33 and later
    if mallinfo2 is None:
        return Allocated(heap_bytes(), 0)
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return Allocated(info.uordblks, info.hblkhd)


def trim_heap() -> None:
    """Return freed memory to the system; glibc only."""
    if (malloc_trim := _of_libc("malloc_trim")) is not None:
        malloc_trim(0)


def reset_peak() -> None:
    """Reset ``peak_bytes`` to the current size.

    Raises:
        OSError: the system does not support it.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
