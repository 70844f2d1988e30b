"""The memory of this process: what it holds, who holds it, and what the system would still give it.

Who holds much memory, an engine or a trainer, registers itself, and says when asked what it holds. What the C library's
allocator keeps is read from the C library and the kernel. Knows no part by more than its name. Linux only.
"""

from __future__ import annotations

import ctypes
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
    "weights": "weights that are trained, and frozen ones beside them",
    "reference": "weights of the reference model, or the first values of adapters",
    "copies": "the weight that is multiplied, rounded or dequantised",
    "gradients": "gradients",
    "moments": "the optimizer's moments, and its float32 master weights of 16-bit parameters",
    "sampler_weights": "weights of the sampler",
    "kv_cache": "keys and values of the sampler",
    "workspace": "workspace of the sampler",
    "activations": "activations of a training step",
    "allocator": "freed memory that the allocator keeps for the next step",
}
"""The parts of a process's memory, in words."""


class MemoryReport(NamedTuple):
    """The memory of the process at one moment, in bytes.

    Attributes:
        parts: by the names in ``PARTS``; they add up to ``resident``.
        resident: physical memory of the process.
        peak: the most that it ever was.
    """

    parts: dict[str, int]
    resident: int
    peak: int

    def __str__(self) -> str:
        rows = [(PARTS[name], n_bytes) for name, n_bytes in self.parts.items()]
        rows += [("in all", self.resident), ("at most so far", self.peak)]
        return "\n".join(f"{n_bytes / 1e6:12,.1f} MB  {words}" for words, n_bytes in rows)


class Holder(Protocol):
    """Something that holds memory."""

    def memory_blocks(self) -> Iterable[tuple[str, Hashable, int]]:
        """(part, key, bytes) of each block, as it is now; a block that several hold has one key, and counts once."""
        ...


_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def register_holder(holder: Holder) -> None:
    """Have ``memory_report`` ask this object as long as it lives."""
    _holders.add(holder)


def tensor_memory(part: str, tensors: Iterable[Any]) -> Iterator[tuple[str, Hashable, int]]:
    """The memory of torch tensors, for ``Holder.memory_blocks``; those of a GPU are left out, and views are one block."""
    for tensor in tensors:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            yield part, storage.data_ptr(), storage.nbytes()


def memory_report(activations: int = 0) -> MemoryReport:
    """Who holds the memory of this process now, counted in bytes.

    weights, reference, copies, gradients and moments are those of the trainers that there are; sampler_weights,
    kv_cache and workspace those of the engines, of pages and workspace only what the system has given memory for.
    allocator is what was freed and the C library keeps: the heap's resident memory without what is allocated in it.
    interpreter is the rest: Python, the code and data of libraries, and whatever else the program holds, such as a
    model that no trainer has.

    Args:
        activations: of a step that is under way, which its trainer knows.

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
    """The memory of the process where training steps have most: after a forward pass, or after its backward.

    Attributes:
        fullest: the report of the fullest moment so far; None: there was none, or the system is not Linux.
    """

    def __init__(self) -> None:
        self.fullest: MemoryReport | None = None
        self._before = self._most = 0

    def begin(self) -> None:
        """Call before the first forward pass of a step."""
        self._before = allocated_bytes() if sys.platform == "linux" else 0

    def sample(self, gradients: int) -> None:
        """Call after a forward pass, and after a backward; ``gradients``: their bytes, of this step."""
        if sys.platform != "linux":
            return
        allocated = allocated_bytes()
        if allocated > 1.01 * self._most:
            self._most = allocated
            self.fullest = memory_report(max(0, allocated - self._before - gradients))


def resident_bytes() -> int:
    """Physical memory of this process.

    Raises:
        WhetError: the system is not Linux.
    """
    return _read_status()["VmRSS"]


def allocated_bytes() -> int:
    """Bytes that are allocated in the C library now; 0 where that does not tell."""
    return sum(_allocated_bytes())


def machine_bytes() -> int:
    """This machine's memory, or what the control groups of this process may use of it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(group.limit for group in _control_groups())])


def available_bytes() -> int:
    """The most that this process may hold: what it holds, and what machine and control groups have left.

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
    """The lines ``Name: 12 kB`` of a file of the kernel's, in bytes."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise WhetError(f"memory_report: {path} cannot be read ({error.strerror}), which Linux has.") from None
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _heap_bytes() -> int:
    """Resident memory of the allocator's heap."""
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
    """limit, and what counts towards it but for file pages that the kernel drops when memory is needed."""

    limit: int
    used: int


_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controller -> the files of its limit and its use, and the name of droppable file pages: of version 2, and of 1."""


def _control_groups(root: Path = Path("/")) -> Iterator[_ControlGroup]:
    """The groups of this process that have a limit, those around them too."""
    file = root / "proc/self/cgroup"
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        _, controllers, path = line.split(":", 2)
        for controller in {"", "memory"} & set(controllers.split(",")):
            top = root / "sys/fs/cgroup" / controller
            inner = top / path.lstrip("/")
            # Within a container, the path may be the host's, and its own group is at the top.
            for folder in dict.fromkeys([*(p for p in (inner, *inner.parents) if p.is_relative_to(top)), top]):
                group = _read_group(folder, *_GROUP_FILES[controller])
                if group is not None:
                    yield group


def _read_group(folder: Path, limit: str, current: str, droppable: str) -> _ControlGroup | None:
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        used = int((folder / current).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    if not most.isdigit() or int(most) >= 1 << 60:  # "max", or the number that stands for it in version 1
        return None
    dropped = int(stat[stat.index(droppable) + 1]) if droppable in stat else 0
    return _ControlGroup(int(most), used - dropped)


# --- the C library ------------------------------------------------------------------------------------------


class _Allocated(NamedTuple):
    """Bytes that are allocated: in the heap, and in mappings of their own."""

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
