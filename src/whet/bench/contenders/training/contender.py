"""A trainer in a process of its own, which takes a step when it is asked to.

Its threads, its allocator and its memory are then its own: what one contender keeps or spins on does not show in the
next one's figures, and the peak of its memory is its own peak.
"""

from __future__ import annotations

import multiprocessing
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from whet.bench import machine
from whet.bench.case import Timed

ADAM_BYTES = 12
"""Bytes that every contender keeps of a parameter: float32 weight and AdamW's two moments."""
_GRACE_S = 5.0


class Contender:
    """The call that a provider returns: one step of a trainer, which is ready for it when this returns.

    Args:
        serve: runs in the process, with a ``Session`` and ``arguments``, and takes a step whenever it is asked to; a
            function that a fresh interpreter can import.

    Raises:
        RuntimeError: the process died.
        Exception: whatever the trainer raised.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(serve, theirs, arguments), daemon=True)
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
