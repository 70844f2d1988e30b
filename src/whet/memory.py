"""Memory of this process: its size, its breakdown by owner, and the memory that is still available.

Large memory consumers, engines and trainers, register themselves and list their blocks on request. The memory retained
by the C library's allocator is known on Linux only.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from whet.system.memory import heap_bytes, peak_bytes, read_allocated, resident_bytes

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
    "teacher": "weights of the teacher",
    "reward_models": "reward models and judges, with their keys and values",
    "kept_versions": "weights of earlier steps that wait for the sampler",
    "kept_tokens": "sets of tokens that the sampled tokens were drawn from, where filters or a grammar excluded others",
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


def unregister_holder(holder: Holder) -> None:
    """Exclude an object whose memory another holder lists."""
    _holders.discard(holder)


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
        activations: bytes of activations of the step in progress, reported by its trainer, except those that a learner
            keeps.

    Returns:
        The parts that are not empty, and their sum, the resident memory.

    Raises:
        WhetError: the system does not report the memory of a process.
    """
    blocks: dict[Hashable, tuple[str, int]] = {}
    for holder in list(_holders):
        for part, key, n_bytes in holder.memory_blocks():
            blocks.setdefault(key, (part, n_bytes))
    parts = dict.fromkeys(PARTS, 0)
    for part, n_bytes in blocks.values():
        parts[part] += n_bytes
    resident = resident_bytes()
    parts["activations"] += activations
    parts["allocator"] = max(0, heap_bytes() - read_allocated().heap)
    parts["interpreter"] = max(0, resident - sum(parts.values()))
    return MemoryReport({n: size for n, size in parts.items() if size}, resident, peak_bytes())


class MemoryWatch:
    """Highest memory of training steps, sampled after each forward pass and each backward pass.

    Attributes:
        fullest: report of the highest sample so far; None before the first sample, and on systems that do not
            report allocated memory.
    """

    def __init__(self) -> None:
        self.fullest: MemoryReport | None = None
        self._before = self._peak = 0

    def begin(self) -> None:
        """Call before the first forward pass of a step."""
        self._before = allocated_bytes()

    def sample(self, gradients: int) -> None:
        """Sample after a forward or a backward pass; ``gradients``: bytes of this step's gradients."""
        allocated = allocated_bytes()
        if allocated > 1.01 * self._peak:
            self._peak = allocated
            self.fullest = memory_report(max(0, allocated - self._before - gradients))


def allocated_bytes() -> int:
    """Return the bytes that are allocated from the C library now; 0 if it does not report them."""
    return sum(read_allocated())


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
