"""Forks, and processes that end with others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

CAN_FORK = hasattr(os, "fork")
"""Whether this system can fork a process: Linux and macOS can."""
STOP_RANKS: int | None = getattr(signal, "SIGUSR1", None)
"""Signal by which a rank ends its launcher; None on Windows, which has no such signals."""

_KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows ends a process by any signal
# Loaded early: the loader's lock may be held at a fork.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def set_parent_death_signal(parent: int) -> None:
    """Have Linux kill this process when its parent process ``parent`` dies; at once if it is dead already."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, _KILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), _KILL)


def start_group() -> None:
    """Make this process, a forked child, the leader of a new session and process group."""
    if sys.platform != "win32":
        os.setsid()


def kill_group(leader: int) -> None:
    """Kill all processes of the group of ``leader``, which has called ``start_group``."""
    if sys.platform != "win32":
        with contextlib.suppress(ProcessLookupError):  # killed before it created its group
            os.killpg(leader, _KILL)


def has_siblings() -> bool:
    """Whether this process is a worker of multiprocessing, such as one of a pool or of torch's DataLoader."""
    multiprocessing = sys.modules.get("multiprocessing.process")  # imported in every worker
    if multiprocessing is None:
        return False
    # A spawned worker imports the modules of its task before it has a parent process, but with this mark.
    is_starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_starting or multiprocessing.parent_process() is not None


# --- descriptors ----------------------------------------------------------------------------------------

_descriptors: set[int] = set()


def keep_from_children(descriptor: int) -> None:
    """Close a descriptor in forked children, as ``exec`` does anyway."""
    _descriptors.add(descriptor)


def release_to_children(descriptor: int) -> None:
    """Undo ``keep_from_children``, before the descriptor is closed and its number reused."""
    _descriptors.discard(descriptor)


def _close_all() -> None:
    while _descriptors:
        with contextlib.suppress(OSError):
            os.close(_descriptors.pop())


def call_in_forked_children(function: Callable[[], None]) -> None:
    """Call ``function`` in every process that this one forks."""
    if sys.platform != "win32" and CAN_FORK:
        os.register_at_fork(after_in_child=function)


call_in_forked_children(_close_all)
