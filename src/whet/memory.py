"""Memory of this process: its size, its breakdown by owner, and the memory that is still available.

Large memory consumers, engines and trainers, register themselves and list their blocks on request. The memory retained
by the C library's allocator is read from the C library and the kernel. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from whet.errors import WhetError

PARTS = {
    "interpreter": "Python, its libraries and their data",
    "weights": "trained weights, and frozen weights next to them",
    "reference": "weights of the reference model, or initial values of adapters",
    "copies": "rounded or dequantised copy of the current weight",
    "gradients": "gradients",
    "moments": "the optimizer's moments, and its float32 master weights of 16-bit parameters",
    "sampler_weights": "weights of the sampler",
    "kv_cache": "keys and values of the sampler",
    "workspace": "workspace of the sampler",
    "activations": "activations of a training step",
    "allocator": "freed memory that the allocator retains for the next step",
}
"""Descriptions of the parts of a process's memory."""


class MemoryReport(NamedTuple):
    """Memory of the process at one moment, in bytes.

    Attributes:
        parts: bytes by the names in ``PARTS``; they add up to ``resident``.
        resident: physical memory of the process (RSS).
        peak: highest ``resident`` since the process started.
    """

    parts: dict[str, int]
    resident: int
    peak: int

    def __str__(self) -> str:
        rows = [(PARTS[name], n_bytes) for name, n_bytes in self.parts.items()]
        rows += [("total", self.resident), ("peak so far", self.peak)]
        return "\n".join(f"{n_bytes / 1e6:12,.1f} MB  {words}" for words, n_bytes in rows)


class Holder(Protocol):
    """Owner of memory."""

    def memory_blocks(self) -> Iterable[tuple[str, Hashable, int]]:
        """Yield (part, key, bytes) of each current block; a block shared by owners has one key and counts once."""
        ...


_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def register_holder(holder: Holder) -> None:
    """Include this object in ``memory_report`` for as long as it lives."""
    _holders.add(holder)


def tensor_memory(part: str, tensors: Iterable[Any]) -> Iterator[tuple[str, Hashable, int]]:
    """Yield the blocks of CPU tensors, as ``Holder.memory_blocks`` does; views of one storage are one block."""
    for tensor in tensors:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            yield part, storage.data_ptr(), storage.nbytes()


def memory_report(activations: int = 0) -> MemoryReport:
    """Break down the memory of this process by owner, in bytes.

    weights, reference, copies, gradients and moments belong to the live trainers; sampler_weights, kv_cache and
    workspace to the engines (only committed pages of the KV cache and workspace count). allocator is freed memory that
    the C library retains: the heap's resident memory minus its allocated bytes. interpreter is the rest: Python, code
    and data of libraries, and other objects of the program, such as a model that no trainer uses.

    Args:
        activations: bytes of activations of the step in progress, reported by its trainer.

    Returns:
        The parts that are not empty, and their sum, the resident memory.

    Raises:
        WhetError: the system is not Linux.
    """
    blocks: dict[Hashable, tuple[str, int]] = {}
    for holder in list(_holders):
        for part, key, n_bytes in holder.memory_blocks():
            blocks.setdefault(key, (part, n_bytes))
    parts = dict.fromkeys(PARTS, 0)
    for part, n_bytes in blocks.values():
        parts[part] += n_bytes
    status = _read_status()
    parts["activations"] = activations
    parts["allocator"] = max(0, _heap_bytes() - _allocated_bytes().heap)
    parts["interpreter"] = max(0, status["VmRSS"] - sum(parts.values()))
    return MemoryReport({n: size for n, size in parts.items() if size}, status["VmRSS"], status["VmHWM"])


class MemoryWatch:
    """Highest memory of training steps, sampled after each forward pass and each backward pass.

    Attributes:
        fullest: report of the highest sample so far; None before the first sample, or if the system is not Linux.
    """

    def __init__(self) -> None:
        self.fullest: MemoryReport | None = None
        self._before = self._most = 0

    def begin(self) -> None:
        """Call before the first forward pass of a step."""
        self._before = allocated_bytes() if sys.platform == "linux" else 0

    def sample(self, gradients: int) -> None:
        """Sample after a forward or a backward pass; ``gradients``: bytes of this step's gradients."""
        if sys.platform != "linux":
            return
        allocated = allocated_bytes()
        if allocated > 1.01 * self._most:
            self._most = allocated
            self.fullest = memory_report(max(0, allocated - self._before - gradients))


def resident_bytes() -> int:
    """Return the physical memory of this process (RSS).

    Raises:
        WhetError: the system is not Linux.
    """
    return _read_status()["VmRSS"]


def allocated_bytes() -> int:
    """Return the bytes that are allocated from the C library now; 0 if it does not report them."""
    return sum(_allocated_bytes())


def machine_bytes() -> int:
    """Return this machine's memory, or the lowest limit of this process's control groups."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(group.limit for group in _control_groups())])


def available_bytes() -> int:
    """Return the most memory that this process can have: its own plus what machine and control groups have left.

    Raises:
        WhetError: the system is not Linux.
    """
    left = [_read_kilobytes("/proc/meminfo")["MemAvailable"]]
    left += [group.limit - group.used for group in _control_groups()]
    return resident_bytes() + max(0, min(left))


# --- the kernel ---------------------------------------------------------------------------------------------


def _read_status() -> dict[str, int]:
    return _read_kilobytes("/proc/self/status")


def _read_kilobytes(path: str) -> dict[str, int]:
    """Parse lines ``Name: 12 kB`` of a file in /proc, into bytes."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise WhetError(f"memory_report: {path} cannot be read ({error.strerror}); it exists on Linux only.") from None
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _heap_bytes() -> int:
    """Return the resident memory of the allocator's heap."""
    found = 0
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        in_heap = False
        for line in lines:
            if "-" in line.partition(" ")[0]:  # a mapping's addresses
                in_heap = line.endswith("[heap]\n")
            elif in_heap and line.startswith("Rss:"):
                found += 1024 * int(line.split()[1])
    return found


class _ControlGroup(NamedTuple):
    """Memory limit, and the bytes that count towards it except reclaimable file pages."""

    limit: int
    used: int


_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controller -> files of its limit and usage, and the name of reclaimable file pages: cgroup v2, and v1."""


def _control_groups(root: Path = Path("/")) -> Iterator[_ControlGroup]:
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


def _read_group(folder: Path, limit: str, current: str, reclaimable: str) -> _ControlGroup | None:
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        used = int((folder / current).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    if not most.isdigit() or int(most) >= 1 << 60:  # "max", or its numeric equivalent in version 1
        return None
    reclaimed = int(stat[stat.index(reclaimable) + 1]) if reclaimable in stat else 0
    return _ControlGroup(int(most), used - reclaimed)


# --- the C library ------------------------------------------------------------------------------------------


class _Allocated(NamedTuple):
    """Allocated bytes: in the heap, and in separate mappings."""

    heap: int
    mapped: int


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


@lru_cache
def _mallinfo2() -> Any:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallInfo
    return function


def _allocated_bytes() -> _Allocated:
    function = _mallinfo2()  # of glibc 2.33 and later
    if function is None:
        return _Allocated(_heap_bytes(), 0)
    info = function()
    return _Allocated(info.uordblks, info.hblkhd)


def format_bytes(n_bytes: int) -> str:
    """Format a size: 21.45 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes} B"


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector, for imports: it takes a quarter of the import time of torch and transformers.

    Their objects are frozen, so that later collections do not scan them either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
