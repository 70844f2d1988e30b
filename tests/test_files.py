"""Files and locks against real kills, forks, second processes and full disks."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from tests.processes import printed_by
from tests.raising import mentions

from whet.errors import DiskFullError, FolderInUseError
from whet.files import (
    FolderLock,
    disk_full_errors,
    drop_torn_line,
    fingerprint,
    remove_abandoned,
    replace_bytes,
    replace_folder,
    replace_text,
    temporary_next_to,
    write_new,
)


class Process:
    """Python code in a separate process, started up to its first output; it ends with its standard input or a kill."""

    def __init__(self, code: str, *arguments: object) -> None:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        self.first_line = self.popen.stdout.readline().strip()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


HOLDER = """
import sys
from whet.files import FolderLock
FolderLock(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- locks ----------------------------------------------------------------------------------------------


def test_folder_in_use_error_names_the_holder_until_it_is_killed(tmp_path):
    folder = tmp_path / "run"
    with Process(HOLDER, folder) as holder:
        assert holder.first_line == "held"
        facts = (f"process {holder.popen.pid} on {os.uname().nodename} since 2", f"-c {folder}", "another folder")
        with pytest.raises(FolderInUseError, match=mentions(folder, *facts)):
            FolderLock(folder).acquire()
        holder.kill()
        with FolderLock(folder):
            assert Process(HOLDER, folder).first_line == ""  # the other process is rejected now
    assert names(folder) == []


def test_locks_of_one_process_share_a_folder(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path / "." / "x" / "..")
    (tmp_path / "x").mkdir()
    with first:
        with second:
            first.acquire()
        assert Process(HOLDER, tmp_path).first_line == ""
    first.release()
    with Process(HOLDER, tmp_path) as holder:
        assert holder.first_line == "held"


FORKER = """
import os, signal, sys
from whet.files import FolderLock
lock = FolderLock(sys.argv[1])
lock.acquire()
ours, theirs = os.pipe()
child = os.fork()
if child == 0:
    sys.stdin.close(), os.close(0), os.close(1), os.close(2)
    try:
        lock.acquire()
    except ValueError:
        os.write(theirs, b"refused")
    signal.alarm(60)
    signal.pause()
print(os.read(ours, 7).decode(), child, flush=True)
sys.stdin.read()
"""


def test_forked_child_does_not_inherit_the_folder_lock(tmp_path):
    with Process(FORKER, tmp_path) as parent:
        refused, child = parent.first_line.split()
        assert refused == "refused"
        parent.kill()
        with FolderLock(tmp_path):
            os.kill(int(child), signal.SIGKILL)  # it lived until now


def test_release_of_a_removed_lock_file_does_not_affect_the_next_lock(tmp_path):
    lock = FolderLock(tmp_path)
    lock.acquire()
    (tmp_path / ".lock").unlink()
    with Process(HOLDER, tmp_path) as holder:
        assert holder.first_line == "held"
        lock.release()
        assert Process(HOLDER, tmp_path).first_line == ""


def test_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match=mentions(tmp_path, "No locks available", "second run")):
        FolderLock(tmp_path).acquire()
    replace_text(tmp_path / "file", "x")  # works without locks
    assert (tmp_path / "file").read_text() == "x"


# --- atomic writes --------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from whet.files import temporary_next_to
with temporary_next_to(Path(sys.argv[1]), "writing", folder=sys.argv[2] == "True") as temporary:
    print(temporary, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("folder", [False, True])
def test_temporaries_of_live_writers_are_kept_and_of_killed_writers_removed(tmp_path, folder):
    with Process(WRITER, tmp_path / "a[b]", folder) as writer:
        with temporary_next_to(tmp_path / "a[b]", "writing", folder) as own:
            assert own != Path(writer.first_line) and names(tmp_path) == sorted(
                [own.name, Path(writer.first_line).name]
            )
        remove_abandoned(tmp_path, ".*.writing")
        assert names(tmp_path) == [Path(writer.first_line).name]
        writer.kill()
        with temporary_next_to(tmp_path / "a[b]", "writing", folder) as own:
            assert names(tmp_path) == [own.name]
    assert names(tmp_path) == []


def test_concurrent_replacements_are_atomic_for_readers(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    contents = [letter * 50_000 for letter in "abcd"]
    errors: list[BaseException] = []

    def write(content: str) -> None:
        try:
            for _ in range(20):
                replace_text(file, content)
                with temporary_next_to(folder, "saving", folder=True) as temporary:
                    (temporary / "content").write_text(content)
                    replace_folder(temporary, folder)
        except BaseException as error:
            errors.append(error)

    replace_text(file, contents[0])
    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert file.read_text() in contents
    assert not errors and (folder / "content").read_text() in contents
    assert names(tmp_path) == ["file", "folder"]


def test_replaced_file_has_the_permissions_of_the_umask(tmp_path):
    (tmp_path / "plain").write_text("")
    replace_bytes(tmp_path / "file", b"x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("number", "facts"),
    [
        (errno.ENOSPC, ("disk is full", "7 bytes", "free", "Free space", "try again")),
        (errno.EDQUOT, ("quota", "quota raised", "try again")),
        (errno.EFBIG, ("file size limit", "ulimit -f")),
    ],
)
def test_disk_full_names_the_fix(tmp_path, number, facts):
    with (
        pytest.raises(DiskFullError, match=mentions(tmp_path / "file", *facts)),
        disk_full_errors(tmp_path / "file", 7),
    ):
        raise OSError(number, os.strerror(number))
    with pytest.raises(PermissionError), disk_full_errors(tmp_path / "file", 7):
        raise OSError(errno.EACCES, "not permitted")


def test_torn_line_is_dropped_and_fingerprint_is_sha256(tmp_path):
    file = tmp_path / "rows"
    file.write_bytes(b"a\nb\nc")
    drop_torn_line(file)
    assert file.read_bytes() == b"a\nb\n"
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing
    file.write_bytes(b"")
    assert fingerprint(file) == {"size_bytes": 0, "sha256": empty}


def test_module_needs_only_the_standard_library():
    code = "import sys, whet.errors; before = set(sys.modules); import whet.files; print(set(sys.modules) - before)"
    packages = {name.split(".")[0] for name in eval(printed_by(code))}
    assert packages <= set(sys.stdlib_module_names) | {"whet"}


def test_address_space_limit_is_a_memory_error():
    code = (
        "import resource, whet.files as f\nf.require_address_space(1 << 20)\n"
        "n = 4096 * int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (n + (32 << 20), n + (32 << 20)))\nf.require_address_space(1 << 20)\n"
        "try: f.require_address_space(64 << 20)\nexcept MemoryError as error: print(error)"
    )
    assert "67,108,864 bytes" in printed_by(code)


@pytest.mark.parametrize("folder", ["disk", "memory"])
@pytest.mark.parametrize("size", [0, 1, 511, 4096, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (9 << 20) + 13])
def test_direct_writes_equal_the_chunks(tmp_path, folder, size):
    data = random.Random(size).randbytes(size)
    cuts = sorted([0, size, *(random.Random(size + 1).randrange(size + 1) for _ in range(5))])
    chunks = [data[a:b] for a, b in itertools.pairwise(cuts)]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if folder == "memory" else tmp_path) as where:
        path = Path(where) / "file"
        written = write_new(path, chunks)
        assert path.read_bytes() == data
        assert written == fingerprint(path)
        with pytest.raises(FileExistsError):
            write_new(path, chunks)


def test_file_without_direct_writes_is_written_through_the_page_cache(tmp_path, monkeypatch):
    """Emulate a file system whose sectors are larger than a page: direct writes end with EINVAL."""
    monkeypatch.setattr("whet.files._BLOCK_BYTES", 1000)
    data = bytes(range(256)) * 100
    assert write_new(tmp_path / "file", [data]) == fingerprint(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == data
