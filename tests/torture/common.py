"""Shared parts of torture: a tally of cases, a small model with data, ``whet`` commands in separate processes.

Commands are forked from a process that has imported everything, which starts them in milliseconds instead of seconds;
``started`` starts a command as a shell does, for tests of the process itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import WHET

ROOT = Path(__file__).parents[2]
REWARD = f"{Path(__file__).with_name('functions.py')}:share"
N_STEPS = 6


@dataclass
class Tally:
    """A row of the table: number of cases, and the failed cases."""

    what: str
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Run one case; an exception is a failure and does not stop the next case."""
        start_s = time.monotonic()
        try:
            yield
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[-1500:]} ({last.name}:{last.lineno})")
            print(f"FAILED {self.what}: {self.failures[-1]}", flush=True)
        self.cases += 1
        self.seconds += time.monotonic() - start_s


def require(holds: object, what: str) -> None:
    """Fail the current case unless ``holds``."""
    if not holds:
        raise AssertionError(what)


def scaled(n: int, scale: float) -> int:
    """Return the number of cases at a scale: ``n`` at 1, and at least one."""
    return max(1, round(n * scale))


# --- a small model and its data -------------------------------------------------------------------------


def make_model(folder: Path, **settings: Any) -> Path:
    """Save a Llama of 30,000 random parameters with a vocabulary of digits and its tokenizer."""
    import torch
    from tests.tiny import tiny_llama

    from whet.cli.arithmetic import make_tokenizer

    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }  # fmt: skip
    tiny_llama(**{**sizes, **settings}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_data(folder: Path) -> tuple[Path, Path]:
    """Write sums, and pairs of a right and a wrong answer."""
    from whet.cli.arithmetic import make_problems

    rows = make_problems(0, 0)[0][:24]
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"} for row in rows]
    for name, content in (("rows.jsonl", rows), ("pairs.jsonl", pairs)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder / "rows.jsonl", folder / "pairs.jsonl"


@dataclass
class Workshop:
    """A folder with a model and data, and commands that train on them."""

    folder: Path
    model: Path
    rows: Path
    pairs: Path

    def command(self, method: str, output_dir: Path, **settings: Any) -> list[str]:
        """Return the arguments of ``whet`` for a run of ``N_STEPS`` steps with a checkpoint every two steps."""
        data = self.pairs if method == "dpo" else self.rows
        given: dict[str, Any] = {
            "model": self.model, "data": data, "eval_data": data, "output_dir": output_dir, "batch_size": 4,
            "steps": N_STEPS, "checkpoint_every": 2, "eval_every": 3, "learning_rate": 1e-3, "seed": 3,
        }  # fmt: skip
        if method == "grpo":
            given |= {"reward": REWARD, "reward_timeout_s": 60, "group_size": 4, "max_new_tokens": 6, "beta": 0.01}
        given = {name: value for name, value in (given | settings).items() if value is not None}
        return ["train", method, *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())]


@contextlib.contextmanager
def workshop() -> Iterator[Workshop]:
    """Create a workshop in a temporary folder and import all modules of training."""
    import matplotlib.pyplot  # noqa: F401

    import whet.runs.training  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="whet-torture-") as name:
        folder = Path(name)
        yield Workshop(folder, make_model(folder / "model"), *make_data(folder))


# --- commands -------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """Result of a command: its exit status, negative for a signal, and its output."""

    status: int
    text: str


def forked(argv: list[str], before: Callable[[], None] = lambda: None, timeout_s: float = 120.0) -> Ended:
    """Run ``whet ARGV`` in a separate process and session, after ``before()`` in that process."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            _be_whet(argv, before, output.fileno())
        _adopt_orphans()
        status = _waited(pid, timeout_s)
        _require_no_orphans()
        output.seek(0)
        return Ended(status, output.read().decode(errors="replace"))


def _be_whet(argv: list[str], before: Callable[[], None], output: int) -> None:
    status = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        from tqdm import tqdm

        from whet.cli import main

        tqdm.set_lock(
            threading.RLock()
        )  # the default is a semaphore of all forked processes, which a killed one may hold
        before()
        status = main(argv)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _waited(pid: int, timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline_s:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"the command did not end in {timeout_s:.0f} s")
        time.sleep(0.005)


def _adopt_orphans() -> None:
    """Become the parent of processes whose parent dies."""
    set_child_subreaper = 36  # linux/prctl.h
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def _require_no_orphans() -> None:
    """Require that all processes of a command end within seconds."""
    deadline_s = time.monotonic() + 10.0
    with contextlib.suppress(ChildProcessError):  # there are none
        while time.monotonic() < deadline_s:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        left = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80] for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        require(not left, f"leaked processes: {commands}")


def started(argv: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start ``whet ARGV`` as a shell does, with its output in a pipe."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*WHET, *argv], cwd=ROOT, **pipes, **options)


# --- output of a run ------------------------------------------------------------------------------------


def results(folder: Path) -> dict[str, str]:
    """Return digests of a finished run's output: weights, checkpoints with optimizer state, metrics without times, and
    completions."""
    found: dict[str, str] = {}
    for path in sorted([*folder.glob("checkpoints/*/*"), *folder.glob("model/*.safetensors")]):
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    for name in ("metrics.jsonl", "completions.jsonl"):
        path = folder / name
        if path.exists():
            rows = [_without_times(json.loads(line)) for line in path.read_text().splitlines()]
            found[name] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return found


def _without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in ("step_time_s", "tokens_per_s") and not k.startswith("time/")}


def require_same(folder: Path, expected: Mapping[str, str]) -> None:
    """Require that a run's output is bit-identical to another run's."""
    found = results(folder)
    different = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    require(not different, f"differ from the undisturbed run: {', '.join(different)}")


def finished(workshop: Workshop, method: str, **settings: Any) -> dict[str, str]:
    """Return the results of an undisturbed run."""
    folder = workshop.folder / f"undisturbed-{method}"
    end = forked(workshop.command(method, folder, **settings))
    require(end.status == 0, f"the undisturbed run failed: {end.text}")
    found = results(folder)
    require(f"checkpoints/step-{N_STEPS:06d}/manifest.json" in found and "metrics.jsonl" in found, str(found))
    return found
