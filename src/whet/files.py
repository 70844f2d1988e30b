"""Crash-safe files: atomic writes, torn lines, digests, and locks on folders.

A file or folder is replaced as a whole: new content is written to a temporary next to it, forced to disk, and renamed.
The writer locks its temporary, which distinguishes leftovers of killed processes from writes in progress.

The system releases a lock when its process ends, however it ends (``whet.system.files``). Needs only the standard
library.
"""

from __future__ import annotations

import contextlib
import errno
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import DiskFullError, FolderInUseError, WhetValueError
from whet.system.files import Lock, force_to_disk, replace, set_direct
from whet.system.processes import call_in_forked_children

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
        replace(temporary, path)


@contextlib.contextmanager
def temporary_next_to(path: Path, purpose: str, folder: bool = False) -> Iterator[Path]:
    """Yield an empty hidden file or folder for the new content of ``path``, to be renamed to ``path``.

    ``.NAME.TOKEN.PURPOSE`` is locked by this writer until the context ends, and removed then unless it was renamed.
    Leftovers of killed writers of the same path and purpose are removed first.
    """
    remove_abandoned(path.parent, f".{glob.escape(path.name)}.*{purpose}")
    made: list[Path] = []
    lock = None
    try:
        temporary, lock = _make_locked(path, purpose, folder, made)
        yield temporary
    finally:
        for each in made:
            if folder:
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)
        if lock is not None:
            lock.close()


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove the files and folders of ``temporary_next_to`` in ``folder`` whose writers have died."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # removed already, locked by its writer, or a file system without locks
            lock = Lock(path)
            try:
                lock.acquire(wait=False)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                lock.close()


def _make_locked(path: Path, purpose: str, folder: bool, made: list[Path]) -> tuple[Path, Lock]:
    """Create a locked temporary; its path is in ``made`` before it exists, so an interrupt at any moment leaks none."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.{purpose}")
        made.append(temporary)
        if folder:
            temporary.mkdir()
        else:
            temporary.touch(exist_ok=False)
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            lock = Lock(temporary)
            with contextlib.suppress(OSError):  # on a file system without locks no process removes it either
                lock.acquire(wait=True)
            if lock.is_at(temporary):
                return temporary, lock
            lock.close()


def replace_folder(temporary: Path, path: Path) -> None:
    """Force a folder of ``temporary_next_to`` to disk and rename it to ``path``, replacing any folder there.

    The old folder is renamed to ``previous_of(path)`` first and removed last: at every moment the old or the new folder
    exists at one of the two paths. Concurrent replacements of one folder are serialised by a lock on its parent.
    """
    force_to_disk(temporary)
    previous = previous_of(path)
    lock = Lock(path.parent)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            lock.acquire(wait=True)
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)  # left by a kill after the last rename: obsolete
            replace(path, previous)
        replace(temporary, path)
        force_to_disk(path.parent)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        lock.close()


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
        set_direct(stream, True)
        for filled in _blocks(chunks, block):
            with memoryview(block)[:filled] as rest:
                if filled < len(block):  # the end of the file is not a whole number of sectors
                    set_direct(stream, False)
                digest.update(rest)
                size_bytes += filled
                written = 0
                while written < filled:  # a disk that is almost full accepts a part
                    try:
                        written += stream.write(rest[written:])
                    except OSError as error:
                        if error.errno != errno.EINVAL or not set_direct(stream, False):
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
            lock, _ = _locked.pop(key)
            if lock.is_at(key / _LOCK_FILE):  # the folder may have been removed and created again
                (key / _LOCK_FILE).unlink()
            lock.close()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _lock(file: Path) -> Lock:
    """Lock a file, new or left by a killed process."""
    while True:
        lock = Lock(file, create=True)
        try:
            lock.acquire(wait=False)
        except BlockingIOError:
            lock.close()
            raise FolderInUseError(
                f"{file.parent} is in use by {_read_holder(file)}. Two runs in one folder would overwrite each other: "
                f"wait for that one or end it, or choose another folder."
            ) from None
        except OSError as error:
            warnings.warn(
                f"FolderLock: the file system of {file.parent} has no locks ({error.strerror}), so a second "
                f"run in this folder is not prevented.",
                stacklevel=4,
            )
        if lock.is_at(file):  # its previous holder may have just removed it
            with contextlib.suppress(OSError):  # a full disk: the lock works without its holder's name
                file.write_text(_holder(), encoding="utf-8")
            return lock
        lock.close()


def _read_holder(file: Path) -> str:
    with contextlib.suppress(OSError):  # it has just been removed
        return file.read_text(encoding="utf-8", errors="replace") or "another process"
    return "another process"


def _holder() -> str:
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {since} ({json.dumps(command)[1:-1]:.300})"


_locked: dict[Path, list[Any]] = {}
"""Locked folders of this process: [lock, number of FolderLocks]."""
call_in_forked_children(_locked.clear)


def open_output(path: str, where: str) -> Any:
    """Open the file that a command writes, and create its folder; "": standard output, which is not closed.

    Raises:
        WhetValueError: the file cannot be written.
    """
    if not path:
        return contextlib.nullcontext(sys.stdout)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise WhetValueError(f"{where}: output {path!r} cannot be written: {error}.") from error
