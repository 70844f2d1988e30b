"""Trainers in separate processes, which take steps on request.

A separate process isolates threads, allocator and memory: spinning threads or retained memory of one contender do not
affect the next one, and the peak of its memory is exact.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from typing import Any

from whet.bench import machine
from whet.bench.case import Timed, WholeRun
from whet.system import memory

ADAM_BYTES = 12
"""Bytes per parameter of every contender: float32 weight and AdamW's two moments."""
_GRACE_S = 5.0


class Contender:
    """Provider's call that takes one step of a trainer; the trainer is ready once the constructor returns.

    Args:
        serve: runs in the process with a ``Session`` and ``arguments`` and takes steps on request; must be importable.
        environment: additional environment variables of the process.

    Raises:
        RuntimeError: the process died.
        Exception: any exception of the trainer.
    """

    def __init__(
        self, serve: Callable[..., None], *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon, which could not start the processes of episodes.
        self._process = context.Process(target=_run, args=(serve, theirs, arguments), daemon=False)
        with _environment(environment or {}):
            self._process.start()
        theirs.close()
        # Before multiprocessing waits for the process at exit.
        Finalize(self, _end, (self._connection, self._process), exitpriority=1)
        self._answer()

    def __call__(self) -> Timed:
        """Take a step. Raises as the class does."""
        with suppress(OSError):  # if the process is gone, there may still be an answer with its error
            self._connection.send("step")
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise RuntimeError(f"the trainer's process ended with status {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


_start_lock = threading.Lock()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes started in this context, before they load their first library."""
    with _start_lock:
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


class RankedContender:
    """Call of a trainer on several ranks, each a ``Contender``, which take steps together.

    Args:
        n: number of ranks.
        threads: threads of each rank.

    Raises:
        RuntimeError: the process of a rank died, or losses or gradient norms of the ranks are not bit-identical.
        Exception: any exception of a trainer.
    """

    def __init__(self, n: int, threads: int, serve: Callable[..., None], *arguments: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = machine.environment(threads)
        shared |= {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._each = ThreadPoolExecutor(n)
        start = partial(Contender, serve, *arguments)
        self._ranks = list(self._each.map(lambda rank: start(environment={**shared, "RANK": str(rank)}), range(n)))

    def __call__(self) -> Timed:
        """Take a step; return the answer of rank 0 with the highest memory peak of all ranks."""
        answers: list[Timed] = list(self._each.map(lambda rank: rank(), self._ranks))
        if len(found := {(answer.value.loss, answer.value.grad_norm) for answer in answers}) > 1:
            raise RuntimeError(f"the ranks differ in loss or gradient norm: {sorted(found)}")
        peaks = [answer.peak_bytes for answer in answers if answer.peak_bytes is not None]
        return replace(answers[0], peak_bytes=max(peaks, default=None))


def whole_run(start: Callable[[], Callable[[], Timed]], n_steps: int) -> WholeRun:
    """Run a contender from start to end; each step's value has ``seconds``, and the first step is not a sample."""
    started_s = time.perf_counter()
    contender = start()
    start_s = time.perf_counter() - started_s
    timed = [contender() for _ in range(n_steps)]
    counted = timed[1:]
    names = dict.fromkeys(name for step in counted for name in step.parts)
    return WholeRun(
        [step.value for step in timed],
        samples_s=[step.value.seconds for step in counted],
        start_s=start_s,
        parts={name: [step.parts.get(name, 0.0) for step in counted] for name in names},
        peak_bytes=timed[-1].peak_bytes,
    )


def _end(connection: Connection, process: SpawnProcess) -> None:
    connection.close()
    process.join(_GRACE_S)  # it exits and releases its locks, unless it is within a step
    process.terminate()
    process.join()


def _run(serve: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]) -> None:
    try:
        serve(Session(connection), *arguments)
    except (KeyboardInterrupt, SystemExit):
        return
    except Exception as error:
        with suppress(OSError):  # the other process no longer listens
            connection.send(error)


class Session:
    """Trainer's side of the connection to the measuring process: waits for step requests and reports their results."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_ready = False
        self._excluded_bytes = 0
        self._started_s = 0.0

    def build(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``make(*arguments)``, the model, and count memory from here on; the libraries must be loaded.

        Its weights and AdamW's moments, equal for all contenders, are excluded. Without this call all memory of the
        process counts.
        """
        with suppress(OSError):
            self._excluded_bytes = memory.resident_bytes()
        model = make(*arguments)
        if self._excluded_bytes:
            self._excluded_bytes += ADAM_BYTES * sum(parameter.numel() for parameter in model.parameters())
        return model

    def begin(self) -> None:
        """Wait for the request of a step.

        Raises:
            SystemExit: there are no more requests.
        """
        try:
            if not self._is_ready:
                self._is_ready = True
                self._connection.send("ready")
            self._connection.recv()
        except (EOFError, OSError):
            raise SystemExit from None
        if self._excluded_bytes:
            with suppress(OSError):
                memory.reset_peak()
        self._started_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started_s

    def end(self, value: Any, parts: Mapping[str, float]) -> None:
        """Send the answer of a step and the seconds of its parts."""
        note, peak_bytes = "", None
        with suppress(OSError):
            peak = memory.peak_bytes()
            peak_bytes, note = max(0, peak - self._excluded_bytes), f"peak of its process: {peak / 1e9:.1f} GB"
        self._connection.send(Timed(value, dict(parts), note=note, peak_bytes=peak_bytes))
