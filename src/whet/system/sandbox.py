"""Runs Python programs in child processes without network, home or other files, by bubblewrap (``bwrap``), on Linux.

A program gets the system's libraries and this interpreter, read-only, and a separate temporary folder.
Whether bubblewrap works is tried once: containers often forbid namespaces. Without it, a program runs only with
``unsafe_local``: with the same limits, but as any process of this user.

Limits on processes do not apply to root. As root, a program therefore runs with a user id that no one else has.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from whet.errors import WhetValueError
from whet.system.processes import CAN_FORK, kill_group

_SET_LIMITS = """
import os, resource, sys
memory, processes, size, uid = map(int, sys.argv[1:5])
for name, value in ("AS", memory), ("NPROC", processes), ("FSIZE", size), ("CORE", 0):
    try:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    except (ValueError, OSError):  # macOS does not limit memory
        pass
if uid:
    os.setgroups([]), os.setgid(uid), os.setuid(uid)
os.execv(sys.executable, [sys.executable, "-I", *sys.argv[5:]])
"""
_PROBE = """
import os, time
for n in range(64):
    try:
        if not os.fork():
            time.sleep(60)
    except OSError:
        break
print(n)
"""
_FIRST_UID = 1 << 30
_TAIL_BYTES = 256
_counter = itertools.count()


class Run(NamedTuple):
    """A program that has ended.

    Attributes:
        output: the first bytes of standard output and standard error, decoded.
        tail: its last bytes.
        n_bytes: length of the output.
        status: exit status, negative for a signal; None: the time limit ended it.
    """

    output: str
    tail: str
    n_bytes: int
    status: int | None


@dataclass(frozen=True)
class Sandbox:
    """Limits of programs.

    Attributes:
        timeout_s: seconds.
        memory_bytes: address space of each process.
        n_processes: number of processes and threads.
        folder_bytes: size of the temporary folder; unsafe_local: of each file.
        output_bytes: output that is kept.
        unsafe_local: run programs without a sandbox: they can read and change what this user can, and use the network.
    """

    timeout_s: float = 5.0
    memory_bytes: int = 512 << 20
    n_processes: int = 16
    folder_bytes: int = 64 << 20
    output_bytes: int = 20_000
    unsafe_local: bool = False

    def check(self) -> None:
        """Raise a WhetValueError if programs cannot run here."""
        if self.unsafe_local and not CAN_FORK:
            raise WhetValueError("Sandbox: programs cannot be limited on this system. Use Linux or macOS.")
        if not self.unsafe_local and (reason := _find_way()[1]):
            raise WhetValueError(
                f"Sandbox: programs of the model need bubblewrap, and {reason}. Install it (apt-get install "
                f"bubblewrap), allow user namespaces, or run them without a sandbox, with the rights of this user "
                f"(--unsafe-local, Sandbox(unsafe_local=True))."
            )

    def run(self, code: str) -> Run:
        """Run a program; its descendants are killed when it ends.

        Raises:
            WhetValueError: as for ``check``.
        """
        self.check()
        return self._run(code, drops_root=False if self.unsafe_local else _find_way()[0])

    def _run(self, code: str, *, drops_root: bool) -> Run:
        with tempfile.TemporaryDirectory(prefix="whet-code-", ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "main.py"
            file.write_text(code, encoding="utf-8", errors="replace")
            file.chmod(0o644)
            uid = _FIRST_UID + (os.getpid() << 6 | next(_counter) % 64) if drops_root else 0
            limits = map(str, (self.memory_bytes, self.n_processes, self.folder_bytes, uid))
            wrapper = [] if self.unsafe_local else _wrapper(file, self.folder_bytes, drops_root)
            command = [*wrapper, sys.executable, "-I", "-c", _SET_LIMITS, *limits, "main.py"]
            process = subprocess.Popen(
                command, cwd=folder, env=_environment(folder if self.unsafe_local else "/tmp"),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=self.unsafe_local,
            )  # fmt: skip
            with process:
                try:
                    return self._read(process)
                finally:
                    process.kill()
                    if self.unsafe_local:
                        kill_group(process.pid)

    def _read(self, process: subprocess.Popen[bytes]) -> Run:
        """Read the output until the program has ended or its time is over."""
        assert process.stdout is not None
        pipe, deadline = process.stdout.fileno(), time.monotonic() + self.timeout_s
        kept, tail, n_bytes, has_ended = bytearray(), b"", 0, False
        while not has_ended and (left := deadline - time.monotonic()) > 0:
            # A descendant may hold the pipe of a program that has ended.
            has_ended = process.poll() is not None
            if not select.select([pipe], [], [], 0 if has_ended else min(left, 0.1))[0]:
                continue
            found = os.read(pipe, 1 << 16)
            has_ended = not found
            kept += found[: self.output_bytes - len(kept)]
            tail, n_bytes = (tail + found)[-_TAIL_BYTES:], n_bytes + len(found)
        status = None
        if has_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(max(0.1, deadline - time.monotonic()))
        return Run(kept.decode(errors="replace"), tail.decode(errors="replace"), n_bytes, status)


def _environment(folder: str) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **threads}


def _wrapper(file: Path, folder_bytes: int, drops_root: bool) -> list[str]:
    """Return the command that runs another one in a sandbox."""
    prefixes = dict.fromkeys([Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]])
    own = [path for path in prefixes if not path.is_relative_to("/usr")]
    system = [Path(path) for path in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")]
    parents = dict.fromkeys(parent for path in (*system, *own) for parent in reversed(path.parents[:-1]))
    namespaces = ("ipc", "pid", "net", "uts", *(() if drops_root else ("user",)))
    rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if drops_root else []
    return [
        shutil.which("bwrap") or "bwrap", *(f"--unshare-{name}" for name in namespaces), "--unshare-cgroup-try",
        *rights, "--die-with-parent", "--new-session",
        *(part for path in parents for part in ("--perms", "0755", "--dir", str(path))),  # otherwise of mode 0700
        *(part for path in (*system, *own) for part in ("--ro-bind-try", str(path), str(path))),
        "--proc", "/proc", "--dev", "/dev", "--size", "4096", "--tmpfs", "/dev/shm", "--remount-ro", "/dev",
        "--perms", "1777", "--size", str(folder_bytes), "--tmpfs", "/tmp", "--remount-ro", "/",
        "--ro-bind", str(file), "/tmp/main.py", "--chdir", "/tmp",
    ]  # fmt: skip


@functools.cache
def _find_way() -> tuple[bool, str]:
    """Return whether a program has to drop root's rights, and why there is no sandbox; empty: there is one."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        return False, "there is none on this system"
    trial, reason = replace(Sandbox(), timeout_s=20.0), ""
    for drops_root in (False, True):
        found = trial._run(_PROBE, drops_root=drops_root)
        if found.output.strip().isdigit() and int(found.output) < trial.n_processes:
            return drops_root, ""
        reason = reason or f"it does not work here ({found.output.strip()[-200:] or 'no output'})"
    return False, reason
