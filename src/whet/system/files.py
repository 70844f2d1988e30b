"""Locks on paths, and flushing, renaming and direct writing of files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import sys
import time
from io import FileIO
from pathlib import Path

from whet.system.processes import keep_from_children, release_to_children

_POLL_S = 0.01
_PATIENCE_S = 2.0
"""Time limit of a rename while programs have the file open."""

if sys.platform == "win32":
    _ALREADY_EXISTS = 183
    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel.CreateEventW.restype = ctypes.c_void_p
    _kernel.CreateEventW.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_wchar_p)
    _kernel.CloseHandle.argtypes = (ctypes.c_void_p,)

    class Lock:
        """Exclusive lock on a file or folder, from ``acquire`` to ``close`` or to the end of the process.

        The lock is a named event, whose name is a hash of the path and which ends with its process: a lock on the file
        itself would keep the file from being renamed and removed, and folders cannot be locked.

        Raises:
            FileNotFoundError: there is nothing at ``path``, and ``create`` is False.
        """

        def __init__(self, path: Path, create: bool = False) -> None:
            if create:
                path.touch()
            path.stat()
            place = os.path.normcase(path.resolve())
            self._name = f"Global\\whet-{hashlib.sha256(place.encode()).hexdigest()}"
            self._handle: int | None = None

        def acquire(self, wait: bool) -> None:
            """Take the lock.

            Raises:
                BlockingIOError: another process holds the lock, and ``wait`` is False.
                OSError: the system refuses.
            """
            while not self._create_event():
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                time.sleep(_POLL_S)

        def is_at(self, path: Path) -> bool:
            """Whether the locked file is at ``path``: it may have been removed."""
            return path.exists()

        def close(self) -> None:
            """Release the lock."""
            if self._handle is not None:
                _kernel.CloseHandle(self._handle)
                self._handle = None

        def _create_event(self) -> bool:
            handle = _kernel.CreateEventW(None, 1, 0, self._name)
            error = ctypes.get_last_error()
            if not handle:
                raise ctypes.WinError(error)
            if error == _ALREADY_EXISTS:
                _kernel.CloseHandle(handle)
                return False
            self._handle = handle
            return True

else:
    try:
        import fcntl
    except ImportError:  # not on every system
        fcntl = None

    class Lock:
        """Exclusive lock on a file or folder, from ``acquire`` to ``close`` or to the end of the process (``flock``).

        It belongs to the open file, which may be renamed. A forked child does not hold its parent's locks.

        Raises:
            FileNotFoundError: there is nothing at ``path``, and ``create`` is False.
        """

        def __init__(self, path: Path, create: bool = False) -> None:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY, 0o666)
            keep_from_children(self._descriptor)

        def acquire(self, wait: bool) -> None:
            """Take the lock.

            Raises:
                BlockingIOError: another process holds the lock, and ``wait`` is False.
                OSError: the system or the file system has no locks.
            """
            if fcntl is None:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

        def is_at(self, path: Path) -> bool:
            """Whether the locked file is at ``path``: it may have been removed, renamed or replaced."""
            with contextlib.suppress(FileNotFoundError):
                return os.path.samestat(os.fstat(self._descriptor), path.stat())
            return False

        def close(self) -> None:
            """Release the lock."""
            release_to_children(self._descriptor)
            os.close(self._descriptor)


def force_to_disk(path: Path) -> None:
    """Flush a file, or a folder's entries, to the storage device (fsync). Windows flushes entries itself."""
    is_windows = sys.platform == "win32"
    if is_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, which is replaced.

    Windows refuses while a program has one of them open: virus scanners and indexers do so for a moment.
    """
    end = time.monotonic() + (_PATIENCE_S if sys.platform == "win32" else 0.0)
    while True:
        try:
            return os.replace(source, target)
        except PermissionError:
            if time.monotonic() >= end:
                raise
        time.sleep(_POLL_S)


def set_direct(stream: FileIO, wanted: bool) -> bool:
    """Make writes bypass the page cache (``O_DIRECT`` of Linux), or use it; return whether that is a change."""
    if sys.platform != "linux" or fcntl is None:
        return False
    flags = fcntl.fcntl(stream, fcntl.F_GETFL)
    changed = (flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT) ^ flags
    try:
        fcntl.fcntl(stream, fcntl.F_SETFL, flags ^ changed)
    except OSError:  # not on this file system
        return False
    return bool(changed)
