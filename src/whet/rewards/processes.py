"""Call a user's functions and collect their results or exceptions: in this process, or in killable children.

Does not know what the functions compute; ``whet.rewards`` does. A child process sends its
parent JSON only. No child outlives its parent, not even one that is killed: see ``_Guard``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from whet.files import keep_from_children, release_to_children


class CallTimeout(Exception):
    """A call in a child process timed out."""


class RaisedInChild(Exception):
    """An exception of the child process; its text is the traceback there."""

    def __init__(self, summary: str, text: str) -> None:
        super().__init__(text)
        self.summary = summary


def summary(error: BaseException) -> str:
    """``"ZeroDivisionError: division by zero"``, also for an exception of a child process."""
    return error.summary if isinstance(error, RaisedInChild) else f"{type(error).__name__}: {error}"


def call_here(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of the calls, or the exceptions they raised, in order.

    Awaitable results are awaited together, on an event loop in a thread of its own: this works where a
    loop is already running, and a client bound to the loop stays usable across calls.
    """
    results: list[Any] = []
    for call in calls:
        try:
            results.append(call())
        except (Exception, SystemExit) as error:
            results.append(error)
    waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        future = asyncio.run_coroutine_threadsafe(_all([results[i] for i in waiting]), _event_loop())
        try:
            for i, result in zip(waiting, future.result(), strict=True):
                results[i] = result
        finally:
            future.cancel()
    return results


async def _all(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    async def settled(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return error

    return await asyncio.gather(*map(settled, awaitables))


_loop_of_process: dict[int, asyncio.AbstractEventLoop] = {}


def _event_loop() -> asyncio.AbstractEventLoop:
    """The running loop of this process: one inherited by a fork has no thread that runs it."""
    loop = _loop_of_process.get(os.getpid())
    if loop is None:
        loop = _loop_of_process[os.getpid()] = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="whet-calls", daemon=True).start()
    return loop


def call_in_children(calls: Sequence[Callable[[], Any]], to_json: Callable[[Any], Any], timeout_s: float) -> list[Any]:
    """Like ``call_here``, but each call in a forked process, all at once, killed after ``timeout_s``.

    Args:
        calls: functions without arguments.
        to_json: applied to a result in the child; its result is sent as JSON.
        timeout_s: seconds, from the start of a call.

    Returns:
        Per call the decoded JSON, a ``RaisedInChild``, or a ``CallTimeout``.
    """
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(_Guard())
        children = [stack.enter_context(_Child(call, to_json, timeout_s, guard)) for call in calls]
        return [child.outcome() for child in children]


class _Child:
    """One call in a process and process group of its own, both killed when the context ends."""

    def __init__(self, call: Callable[[], Any], to_json: Callable[[Any], Any], timeout_s: float, guard: _Guard) -> None:
        context = multiprocessing.get_context("fork")
        self.receiver, sender = context.Pipe(duplex=False)
        entrance = guard.entrance()
        self.process = context.Process(target=_child_main, args=(call, to_json, sender, entrance, os.getpid()))
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        with warnings.catch_warnings():
            # Python warns of forking beside threads, whose locks stay locked in the child: the timeout ends a wait.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        sender.close()
        os.close(entrance)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self.process.pid is not None
        self.process.kill()
        with contextlib.suppress(ProcessLookupError):  # killed before it had a group of its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.receiver.close()

    def outcome(self) -> Any:
        if not self.receiver.poll(max(0.0, self.deadline - time.monotonic())):
            return CallTimeout(f"it did not return within timeout_s={self.timeout_s}")
        try:
            message = json.loads(self.receiver.recv_bytes())
        except EOFError:
            self.process.join()
            return RaisedInChild(f"its process died with exit code {self.process.exitcode}", "no traceback")
        if "result" in message:
            return message["result"]
        return RaisedInChild(message["summary"], "\n" + message["traceback"])


class _Guard:
    """Kills process groups when this process dies, for any reason: a shell that waits for the end of a pipe.

    The system can kill a child with its parent (``die_with``), but not the child's own children. So a child puts its
    group under guard by the pipe's ``entrance``, before it can have any.
    """

    def __init__(self) -> None:
        script = 'groups=; while read -r group; do groups="$groups -$group"; done; kill -KILL $groups'
        nothing = subprocess.DEVNULL
        # A session of its own: Ctrl-C at the terminal, or a kill of the whole group, must not reach the guard.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
        )
        assert self._shell.stdin is not None
        self._pipe = self._shell.stdin
        keep_from_children(self._pipe.fileno())

    def entrance(self) -> int:
        """A descriptor for one child: it writes its group's number and closes it, as the caller does."""
        return os.dup(self._pipe.fileno())

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._shell.kill()
        self._shell.wait()
        release_to_children(self._pipe.fileno())
        self._pipe.close()


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: the loader's lock may be held at a fork
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have Linux kill this process when ``parent``, which started it, dies; at once if that is dead already."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _child_main(
    call: Callable[[], Any], to_json: Callable[[Any], Any], sender: Any, entrance: int, parent: int
) -> None:
    os.setsid()
    die_with(parent)
    os.write(entrance, f"{os.getpid()}\n".encode())
    os.close(entrance)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the parent's worker threads do not exist here
    [result] = call_here([call])
    if isinstance(result, BaseException):
        text = "".join(traceback.format_exception(type(result), result, result.__traceback__))
        message = {"summary": summary(result), "traceback": text}
    else:
        message = {"result": to_json(result)}
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(json.dumps(message).encode())
