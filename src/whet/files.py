"""Crash-safe files: atomic writes, torn lines, digests, and locks on folders.

A file or folder is replaced as a whole: new content is written to a temporary next to it, forced to disk, and renamed.
The writer locks its temporary, which distinguishes leftovers of killed processes from writes in progress.

Locks are ``flock``: the kernel releases them when the process ends, however it ends. They belong to the open file
description, which a forked child shares, so every forked child immediately closes its parent's lock descriptors.

Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import mmap
import os
import secrets
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import DiskFullError, FolderInUseError, WhetValueError

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Buffer

_LOCK_FILE = ".lock"
_BLOCK_BYTES = 4 << 20
"""Unit of writing and hashing."""
_FULL = {
    errno.ENOSPC: ("the disk is full", "Free space there"),
    errno.EDQUOT: ("this user's quota of the disk is used up", "Free space there, or have the quota raised"),
    errno.EFBIG: ("the file would exceed this process's file size limit", "Raise the limit (ulimit -f)"),
}
"""Errors that more space fixes: (cause, fix)."""


# --- atomic writes --------------------------------------------------------------------------------------


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace a text file atomically: readers see the old text or the new text, never a part, even after a kill.

    Raises:
        DiskFullError: the disk is full; the previous content of ``path`` is intact.
    """
    replace_bytes(path, text.encode())


def replace_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a binary file atomically, as ``replace_text`` does."""
    path = Path(path)
    with disk_full_errors(path, len(data)), temporary_next_to(path, "writing") as temporary:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


@contextlib.contextmanager
def temporary_next_to(path: Path, purpose: str, folder: bool = False) -> Iterator[Path]:
    """Yield an empty hidden file or folder for the new content of ``path``, to be renamed to ``path``.

    ``.NAME.TOKEN.PURPOSE`` is locked by this writer until the context ends, and removed then unless it was renamed.
    Leftovers of killed writers of the same path and purpose are removed first.
    """
    remove_abandoned(path.parent, f".{glob.escape(path.name)}.*{purpose}")
    made: list[Path] = []
    descriptor = None
    try:
        temporary, descriptor = _make_locked(path, purpose, folder, made)
        yield temporary
    finally:
        for each in made:
            if folder:
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)
        if descriptor is not None:
            _close(descriptor)


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove the files and folders of ``temporary_next_to`` in ``folder`` whose writers have died."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # removed already, locked by its writer, or a file system without locks
            descriptor = _open(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                _close(descriptor)


def _make_locked(path: Path, purpose: str, folder: bool, made: list[Path]) -> tuple[Path, int]:
    """Create a locked temporary; its path is in ``made`` before it exists, so an interrupt at any moment leaks none."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.{purpose}")
        made.append(temporary)
        if folder:
            temporary.mkdir()
        else:
            temporary.touch(exist_ok=False)
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            descriptor = _open(temporary)
            with contextlib.suppress(OSError):  # on a file system without locks no process removes it either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, temporary):
                return temporary, descriptor
            _close(descriptor)


def replace_folder(temporary: Path, path: Path) -> None:
    """Force a folder of ``temporary_next_to`` to disk and rename it to ``path``, replacing any folder there.

    The old folder is renamed to ``previous_of(path)`` first and removed last: at every moment the old or the new folder
    exists at one of the two paths. Concurrent replacements of one folder are serialised by a lock on its parent.
    """
    force_to_disk(temporary)
    previous = previous_of(path)
    descriptor = _open(path.parent)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)  # left by a kill after the last rename: obsolete
            os.replace(path, previous)
        os.replace(temporary, path)
        os.fsync(descriptor)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        _close(descriptor)


def previous_of(path: Path) -> Path:
    """Return the path at which ``replace_folder`` keeps the old folder until the new one is in place."""
    return path.with_name(f".{path.name}.previous")


@contextlib.contextmanager
def disk_full_errors(path: Path, size_bytes: int, then: str = "try again") -> Iterator[None]:
    """Turn "no space left" errors of the system into an error with the path, the bytes needed, and the fix.

    Raises:
        DiskFullError: instead of an OSError that more space fixes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, DiskFullError):
            raise
        what, fix = _FULL[error.errno]
        sizes = f"{size_bytes:,} bytes needed, {shutil.disk_usage(path.parent).free:,} free"
        message = f"{path} was not written: {what} ({sizes}). Its previous content is intact. {fix}, then {then}."
        raise DiskFullError(error.errno, message) from error


def check_folder_of(path: Path, where: str) -> None:
    """Reject an output path before the work if its folder is missing or not writable.

    Raises:
        WhetValueError: the folder is missing or not writable.
    """
    if not path.parent.is_dir():
        raise WhetValueError(f"{where}: there is no folder {path.parent}. Create it first.")
    if not os.access(path.parent, os.W_OK):
        raise _unwritable(path, where, os.strerror(errno.EACCES))


@contextlib.contextmanager
def unwritable_errors(path: Path, where: str) -> Iterator[None]:
    """Turn the system's other write errors into one that names the folder; ``disk_full_errors`` handles a full disk.

    Raises:
        WhetValueError: instead of an OSError.
    """
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        raise _unwritable(path, where, error.strerror or str(error)) from error


def _unwritable(path: Path, where: str, reason: str) -> WhetValueError:
    return WhetValueError(
        f"{where}: nothing can be written to {path.absolute().parent}: {reason}. Choose another folder."
    )


def drop_torn_line(path: Path) -> None:
    """Truncate a file after its last newline: a killed process may have left an incomplete row."""
    if (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def force_to_disk(path: Path) -> None:
    """Flush a file, or a folder's entries, to the storage device (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_address_space(size_bytes: int) -> None:
    """Raise a MemoryError unless the system can map ``size_bytes`` more; nothing is committed.

    Call it before starting threads: ``Thread.start`` waits forever for a thread that fails to allocate (CPython 3.11).
    """
    try:
        mmap.mmap(-1, size_bytes).close()
    except OSError as error:
        raise MemoryError(f"{size_bytes:,} bytes cannot be mapped: {error.strerror}") from error


def write_new(path: Path, chunks: Iterable[Buffer]) -> dict[str, Any]:
    """Write a new file, force it to disk, and return its ``fingerprint``.

    Whole blocks bypass the page cache if the file system supports it (``O_DIRECT``): the data is not read again soon,
    and would evict as many bytes of pages that are.
    """
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as stream, mmap.mmap(-1, _BLOCK_BYTES) as block:  # aligned to a page
        _set_direct(stream, True)
        for filled in _blocks(chunks, block):
            with memoryview(block)[:filled] as rest:
                if filled < len(block):  # the end of the file is not a whole number of sectors
                    _set_direct(stream, False)
                digest.update(rest)
                size_bytes += filled
                written = 0
                while written < filled:  # a disk that is almost full accepts a part
                    try:
                        written += stream.write(rest[written:])
                    except OSError as error:
                        if error.errno != errno.EINVAL or not _set_direct(stream, False):
                            raise
        os.fsync(stream.fileno())
    return {"size_bytes": size_bytes, "sha256": digest.hexdigest()}


def _blocks(chunks: Iterable[Buffer], block: mmap.mmap) -> Iterator[int]:
    """Copy chunks of any lengths into ``block`` in order; yield its size when it is full, and the rest at the end."""
    filled = 0
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:
            taken = min(len(rest), len(block) - filled)
            block[filled : filled + taken] = rest[:taken]
            filled, rest = filled + taken, rest[taken:]
            if filled == len(block):
                yield filled
                filled = 0
    if filled:
        yield filled


def _set_direct(stream: FileIO, wanted: bool) -> bool:
    """Make writes bypass the page cache, or use it; return whether that is a change."""
    flag = getattr(os, "O_DIRECT", 0)  # not on every system
    flags = fcntl.fcntl(stream, fcntl.F_GETFL)
    changed = (flags | flag if wanted else flags & ~flag) ^ flags
    try:
        fcntl.fcntl(stream, fcntl.F_SETFL, flags ^ changed)
    except OSError:  # not on this file system
        return False
    return bool(changed)


def fingerprint(path: Path) -> dict[str, Any]:
    """Return ``size_bytes`` and ``sha256`` of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
        return {"size_bytes": stream.tell(), "sha256": digest.hexdigest()}


# --- locks ----------------------------------------------------------------------------------------------


class FolderLock:
    """Exclusive use of a folder by this process, from ``acquire`` to ``release`` or to the end of the process.

    Several locks of one process share a folder. A file system without locks gives a warning, and no exclusion.

    Args:
        folder: created when the lock is acquired.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._key: Path | None = None

    def acquire(self) -> None:
        """Lock the folder; a no-op if this lock holds it already.

        Raises:
            FolderInUseError: another process, named in the message, holds the lock.
            OSError: the folder cannot be created or is not writable.
        """
        if self._key is not None and self._key in _locked:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        key = self.folder.resolve()
        if key not in _locked:
            _locked[key] = [_lock(key / _LOCK_FILE), 0]
        _locked[key][1] += 1
        self._key = key

    def release(self) -> None:
        """Unlock the folder; a no-op if this lock does not hold it."""
        key, self._key = self._key, None
        if key is None or key not in _locked:  # never acquired, or acquired by the parent before the fork
            return
        _locked[key][1] -= 1
        if not _locked[key][1]:
            descriptor, _ = _locked.pop(key)
            if _is_at(descriptor, key / _LOCK_FILE):  # the folder may have been removed and created again
                (key / _LOCK_FILE).unlink()
            _close(descriptor)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _lock(file: Path) -> int:
    """Lock a file, new or left by a killed process, and return its descriptor."""
    while True:
        descriptor = _open(file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace") or "another process"
            _close(descriptor)
            raise FolderInUseError(
                f"{file.parent} is in use by {holder}. Two runs in one folder would overwrite each other: wait for "
                f"that one or end it, or choose another folder."
            ) from None
        except OSError as error:
            warnings.warn(
                f"FolderLock: the file system of {file.parent} has no locks ({error.strerror}), so a second "
                f"run in this folder is not prevented.",
                stacklevel=4,
            )
        if _is_at(descriptor, file):  # its previous holder may have just removed it
            with contextlib.suppress(OSError):  # a full disk: the lock works without its holder's name
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _holder().encode(), 0)
            return descriptor
        _close(descriptor)


def _holder() -> str:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {since} ({json.dumps(command)[1:-1]:.300})"


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


# --- descriptors ----------------------------------------------------------------------------------------

_locked: dict[Path, list[int]] = {}
"""Locked folders of this process: [descriptor, number of FolderLocks]."""
_descriptors: set[int] = set()


def _open(path: Path, flags: int = os.O_RDONLY) -> int:
    descriptor = os.open(path, flags, 0o666)
    keep_from_children(descriptor)
    return descriptor


def keep_from_children(descriptor: int) -> None:
    """Close a descriptor in forked children, as ``exec`` does anyway."""
    _descriptors.add(descriptor)


def release_to_children(descriptor: int) -> None:
    """Undo ``keep_from_children``, before the descriptor is closed and its number reused."""
    _descriptors.discard(descriptor)


def _close(descriptor: int) -> None:
    release_to_children(descriptor)
    os.close(descriptor)


def _close_all() -> None:
    _locked.clear()
    while _descriptors:
        with contextlib.suppress(OSError):
            os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_all)
