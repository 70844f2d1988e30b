"""A trainer in a process of its own, which takes a step when it is asked to.

Its threads, its allocator and its memory are then its own: what one contender keeps or spins on does not show in the
next one's figures, and the peak of its memory is its own peak.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from whet.bench import machine
from whet.bench.case import Timed, WholeRun

ADAM_BYTES = 12
"""Bytes that every contender keeps of a parameter: float32 weight and AdamW's two moments."""
_GRACE_S = 5.0


class Contender:
    """The call that a provider returns: one step of a trainer, which is ready for it when this returns.

    Args:
        serve: runs in the process, with a ``Session`` and ``arguments``, and takes a step whenever it is asked to; a
            function that a fresh interpreter can import.
        environment: variables of that process beside those of this one.

    Raises:
        RuntimeError: the process died.
        Exception: whatever the trainer raised.
    """

    def __init__(
        self, serve: Callable[..., None], *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(serve, theirs, arguments), daemon=True)
        with _environment(environment or {}):
            self._process.start()
        theirs.close()
        weakref.finalize(self, _end, self._connection, self._process)
        self._answer()

    def __call__(self) -> Timed:
        """A step. Raises what the class does."""
        with suppress(OSError):  # it is gone, and there may be an answer that says why
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


_starting = threading.Lock()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A process that is started within has these, before it loads its first library."""
    with _starting:
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


class RankedContender:
    """The call of a trainer that trains on several ranks: each a ``Contender``, all of which take a step together.

    Args:
        n: how many ranks.
        threads: of each.

    Raises:
        RuntimeError: the process of a rank died, or the ranks' losses or gradients differ in a bit.
        Exception: whatever a trainer raised.
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
        """A step: rank 0's, with the memory of the rank that had most of it."""
        answers: list[Timed] = list(self._each.map(lambda rank: rank(), self._ranks))
        if len(found := {(answer.value.loss, answer.value.grad_norm) for answer in answers}) > 1:
            raise RuntimeError(f"the ranks differ in loss or norm of the gradient: {sorted(found)}")
        peaks = [answer.peak_bytes for answer in answers if answer.peak_bytes is not None]
        return replace(answers[0], peak_bytes=max(peaks, default=None))


def whole_run(start: Callable[[], Callable[[], Timed]], n_steps: int) -> WholeRun:
    """The steps of a contender from its start to its end, a value with ``seconds`` each; the first is no sample."""
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
    process.join(_GRACE_S)  # it ends by itself, and takes its locks with it, unless it is within a step
    process.terminate()
    process.join()


def _run(serve: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]) -> None:
    try:
        serve(Session(connection), *arguments)
    except (KeyboardInterrupt, SystemExit):
        return
    except Exception as error:
        with suppress(OSError):  # nobody is waiting any more
            connection.send(error)


class Session:
    """A trainer's connection to the process that measures it: told when to begin a step, it says when it has ended."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_ready = False
        self._kept_bytes = 0
        self._begun_s = 0.0

    def build(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """The model that ``make`` returns. Memory counts from here: the libraries have to be loaded.

        What its weights and AdamW's moments take, the same for everybody, is not the step's. Where nothing is built
        so, all memory of the process counts, from its start to the end of the step.
        """
        with suppress(OSError):
            self._kept_bytes = machine.resident_bytes()
        model = make(*arguments)
        if self._kept_bytes:
            self._kept_bytes += ADAM_BYTES * sum(parameter.numel() for parameter in model.parameters())
        return model

    def begin(self) -> None:
        """Return when a step is asked for.

        Raises:
            SystemExit: none will be.
        """
        try:
            if not self._is_ready:
                self._is_ready = True
                self._connection.send("ready")
            self._connection.recv()
        except (EOFError, OSError):
            raise SystemExit from None
        if self._kept_bytes:
            with suppress(OSError):
                machine.reset_peak()
        self._begun_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._begun_s

    def end(self, value: Any, parts: Mapping[str, float]) -> None:
        """The step has been taken: its answer, and the seconds of its parts."""
        note, peak_bytes = "", None
        with suppress(OSError):
            peak = machine.resident_bytes(peak=True)
            peak_bytes, note = max(0, peak - self._kept_bytes), f"its process at its peak: {peak / 1e9:.1f} GB"
        self._connection.send(Timed(value, dict(parts), note=note, peak_bytes=peak_bytes))
