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
    """Python code in a process of its own, up to where it prints; it ends with its standard input, or is killed."""

    def __init__(self, code: str, *arguments: object) -> None:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        self.said = self.popen.stdout.readline().strip()

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


def test_a_second_process_is_told_who_holds_the_folder_until_that_one_is_killed(tmp_path):
    folder = tmp_path / "run"
    with Process(HOLDER, folder) as holder:
        assert holder.said == "held"
        who = rf"run is in use by process {holder.popen.pid} on {os.uname().nodename} since \d{{4}}-.* \(-c .*run\)"
        with pytest.raises(FolderInUseError, match=rf"{who}\. .* choose another folder\."):
            FolderLock(folder).acquire()
        holder.kill()
        with FolderLock(folder):
            assert Process(HOLDER, folder).said == ""  # and now the other one is refused
    assert names(folder) == []


def test_locks_of_one_process_share_a_folder(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path / "." / "x" / "..")
    (tmp_path / "x").mkdir()
    with first:
        with second:
            first.acquire()
        assert Process(HOLDER, tmp_path).said == ""
    first.release()
    with Process(HOLDER, tmp_path) as holder:
        assert holder.said == "held"


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


def test_a_forked_child_neither_holds_the_folder_nor_keeps_it_after_its_parent(tmp_path):
    with Process(FORKER, tmp_path) as parent:
        refused, child = parent.said.split()
        assert refused == "refused"
        parent.kill()
        with FolderLock(tmp_path):
            os.kill(int(child), signal.SIGKILL)  # it lived until now


def test_a_lock_that_was_removed_with_its_folder_leaves_the_next_one_alone(tmp_path):
    lock = FolderLock(tmp_path)
    lock.acquire()
    (tmp_path / ".lock").unlink()
    with Process(HOLDER, tmp_path) as holder:
        assert holder.said == "held"
        lock.release()
        assert Process(HOLDER, tmp_path).said == ""


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="has no locks .No locks available., so nothing keeps a second run out"):
        FolderLock(tmp_path).acquire()
    replace_text(tmp_path / "file", "x")  # works all the same
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
def test_what_another_process_writes_is_left_alone_and_what_a_killed_one_wrote_is_removed(tmp_path, folder):
    with Process(WRITER, tmp_path / "a[b]", folder) as writer:
        with temporary_next_to(tmp_path / "a[b]", "writing", folder) as own:
            assert own != Path(writer.said) and names(tmp_path) == sorted([own.name, Path(writer.said).name])
        remove_abandoned(tmp_path, ".*.writing")
        assert names(tmp_path) == [Path(writer.said).name]
        writer.kill()
        with temporary_next_to(tmp_path / "a[b]", "writing", folder) as own:
            assert names(tmp_path) == [own.name]
    assert names(tmp_path) == []


def test_replaced_texts_and_folders_are_whole_for_readers_while_several_write(tmp_path):
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


def test_a_file_keeps_the_permissions_that_the_umask_gives(tmp_path):
    (tmp_path / "plain").write_text("")
    replace_bytes(tmp_path / "file", b"x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            errno.ENOSPC,
            r"file was not written: the disk is full \(7 bytes needed, [\d,]+ free\)\. .* Free space there, th",
        ),
        (errno.EDQUOT, r"quota of the disk is used up .* have the quota raised, then try again\."),
        (errno.EFBIG, r"may write no file so large .* Raise the limit \(ulimit -f\)"),
    ],
)
def test_a_lack_of_space_is_told_with_the_fix(tmp_path, number, message):
    with pytest.raises(DiskFullError, match=message), disk_full_errors(tmp_path / "file", 7):
        raise OSError(number, os.strerror(number))
    with pytest.raises(PermissionError), disk_full_errors(tmp_path / "file", 7):
        raise OSError(errno.EACCES, "not mine")


def test_a_torn_line_goes_and_digests_are_of_the_bytes(tmp_path):
    file = tmp_path / "rows"
    file.write_bytes(b"a\nb\nc")
    drop_torn_line(file)
    assert file.read_bytes() == b"a\nb\n"
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing
    file.write_bytes(b"")
    assert fingerprint(file) == {"size_bytes": 0, "sha256": empty}


def test_the_module_needs_the_standard_library_alone():
    code = "import sys, whet.errors; before = set(sys.modules); import whet.files; print(set(sys.modules) - before)"
    packages = {name.split(".")[0] for name in eval(printed_by(code))}
    assert packages <= set(sys.stdlib_module_names) | {"whet"}


@pytest.mark.parametrize("folder", ["disk", "memory"])
@pytest.mark.parametrize("size", [0, 1, 511, 4096, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (9 << 20) + 13])
def test_files_written_past_the_cache_are_those_of_the_chunks(tmp_path, folder, size):
    data = random.Random(size).randbytes(size)
    cuts = sorted([0, size, *(random.Random(size + 1).randrange(size + 1) for _ in range(5))])
    chunks = [data[a:b] for a, b in itertools.pairwise(cuts)]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if folder == "memory" else tmp_path) as where:
        path = Path(where) / "file"
        print_of_it = write_new(path, chunks)
        assert path.read_bytes() == data
        assert print_of_it == fingerprint(path)
        with pytest.raises(FileExistsError):
            write_new(path, chunks)


def test_a_file_that_takes_no_direct_writes_is_written_through_the_cache(tmp_path, monkeypatch):
    """As one on a file system whose sectors are wider than the page: its writes end with EINVAL."""
    monkeypatch.setattr("whet.files._BLOCK_BYTES", 1000)
    data = bytes(range(256)) * 100
    assert write_new(tmp_path / "file", [data]) == fingerprint(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == data
