"""Calls user functions in this process or in killable child processes, and collects their results or exceptions.

The functions are opaque here. A child process sends only JSON to its parent. No child outlives its parent, even if the
parent is killed: see ``Guard``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Self

from whet.errors import WhetValueError, is_number
from whet.system.processes import (
    CAN_FORK,
    keep_from_children,
    kill_group,
    release_to_children,
    set_parent_death_signal,
    start_group,
)


class CallTimeout(Exception):
    """A call in a child process timed out."""


class RaisedInChild(Exception):
    """An exception in a child process; its text is the child's traceback."""

    def __init__(self, summary: str, text: str) -> None:
        super().__init__(text)
        self.summary = summary


def summary(error: BaseException) -> str:
    """Return ``"ZeroDivisionError: division by zero"``, also for an exception in a child process."""
    return error.summary if isinstance(error, RaisedInChild) else f"{type(error).__name__}: {error}"


def call_here(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of the calls, or their exceptions, in order.

    Awaitables run concurrently on an event loop in a separate thread: this works even if the caller runs a loop, and
    clients bound to the loop stay usable across calls.
    """
    results: list[Any] = []
    for call in calls:
        try:
            results.append(call())
        except (Exception, SystemExit) as error:
            results.append(error)
    waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        future = asyncio.run_coroutine_threadsafe(_gather([results[i] for i in waiting]), _event_loop())
        try:
            for i, result in zip(waiting, future.result(), strict=True):
                results[i] = result
        finally:
            future.cancel()
    return results


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*map(settle, awaitables))


async def settle(result: Any) -> Any:
    """Return a result, of an awaitable what it returns, or its exception."""
    try:
        return await result if inspect.isawaitable(result) else result
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return error


_loop_of_process: dict[int, asyncio.AbstractEventLoop] = {}


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop of this process: a loop inherited by a fork has no thread."""
    loop = _loop_of_process.get(os.getpid())
    if loop is None:
        loop = _loop_of_process[os.getpid()] = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="whet-calls", daemon=True).start()
    return loop


TIMEOUT_S = 10.0 if CAN_FORK else None
"""Default time limit of scorers."""


def check_timeout(where: str, name: str, timeout_s: Any) -> None:
    """Raise a WhetValueError unless a call can be limited to ``timeout_s`` seconds; None: no limit."""
    if timeout_s is None:
        return
    if not (is_number(timeout_s) and timeout_s > 0):
        raise WhetValueError(f"{where}: {name} is {timeout_s!r}, expected seconds > 0, or None.")
    if not CAN_FORK:
        raise WhetValueError(
            f"{where}: {name} is {timeout_s!r}, but only systems with fork (Linux, macOS) can end a call. Pass None."
        )


def call_in_children(calls: Sequence[Callable[[], Any]], to_json: Callable[[Any], Any], timeout_s: float) -> list[Any]:
    """Like ``call_here``, but run each call in a separate forked process, all in parallel, killed after ``timeout_s``.

    Args:
        calls: functions without arguments.
        to_json: applied to a result in the child; its result is sent as JSON.
        timeout_s: seconds from the start of a call.

    Returns:
        The decoded JSON, a ``RaisedInChild`` or a ``CallTimeout`` per call.
    """
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(Guard())
        children = [stack.enter_context(_Child(call, to_json, timeout_s, guard)) for call in calls]
        return [child.outcome() for child in children]


class _Process:
    """A forked process and its process group, both killed on exit of the context.

    Args:
        main: gets the child's end of a pipe; runs in the child.
    """

    def __init__(self, main: Callable[[Any], None], guard: Guard) -> None:
        context: Any = multiprocessing.get_context("fork")  # typed only on systems that fork
        self.pipe, childs_pipe = context.Pipe()
        guard_pipe = guard.write_end()
        self._process = context.Process(
            target=_child_main, args=(main, childs_pipe, self.pipe, guard_pipe, os.getpid())
        )
        with warnings.catch_warnings():
            # Python warns of forking with threads, whose locks stay locked in the child: the timeout ends a deadlock.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        childs_pipe.close()
        os.close(guard_pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.pid is not None
        self._process.kill()
        kill_group(self._process.pid)
        self._process.join()
        self.pipe.close()

    def receive(self, deadline: float, timeout_s: float) -> Any:
        """Return the result that the child sends next, a ``RaisedInChild``, or a ``CallTimeout`` after the deadline."""
        if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            return CallTimeout(f"it did not return within timeout_s={timeout_s}")
        try:
            message = json.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self._process.join()
            return RaisedInChild(f"its process died with exit code {self._process.exitcode}", "no traceback")
        if "result" in message:
            return message["result"]
        return RaisedInChild(message["summary"], "\n" + message["traceback"])


class _Child(_Process):
    """A call in a separate process."""

    def __init__(self, call: Callable[[], Any], to_json: Callable[[Any], Any], timeout_s: float, guard: Guard) -> None:
        super().__init__(lambda pipe: _send_result(pipe, call, to_json), guard)
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s

    def outcome(self) -> Any:
        return self.receive(self.deadline, self.timeout_s)


class ChildObject(_Process):
    """An object in a separate process. Its methods are called one at a time, each with a time limit.

    Args:
        make: makes the object, in the child.
        to_json: applied to a result in the child; its result is sent as JSON.
        timeout_s: seconds from the start of a call.
        guard: kills the child if this process dies.
    """

    def __init__(self, make: Callable[[], Any], to_json: Callable[[Any], Any], timeout_s: float, guard: Guard) -> None:
        super().__init__(lambda pipe: _serve_object(pipe, make, to_json), guard)
        self._timeout_s, self.deadline = timeout_s, 0.0

    def start(self, method: str, *arguments: Any) -> None:
        """Start the call of a method with arguments that are JSON values."""
        self.deadline = time.monotonic() + self._timeout_s
        with contextlib.suppress(ConnectionError):  # the child died, which the outcome reports
            self.pipe.send_bytes(json.dumps([method, arguments]).encode())

    def is_ready(self) -> bool:
        """Whether the outcome of the call is known."""
        return self.pipe.poll() or time.monotonic() >= self.deadline

    def outcome(self) -> Any:
        """Wait for the call; return the decoded JSON, a ``RaisedInChild`` or a ``CallTimeout``."""
        return self.receive(self.deadline, self._timeout_s)


def wait_for_any(objects: Sequence[ChildObject], at_most_s: float = math.inf) -> None:
    """Wait until the outcome of one of the started calls is known, or for ``at_most_s`` seconds."""
    left = min(at_most_s, min(each.deadline for each in objects) - time.monotonic())
    multiprocessing.connection.wait([each.pipe for each in objects], max(0.0, left))


class Guard:
    """A shell that waits for EOF of a pipe, to kill process groups when this process dies for any reason.

    Linux can kill a child with its parent (``set_parent_death_signal``), but not the child's descendants. Therefore a
    child first registers its process group by writing to the pipe (``write_end``).
    """

    def __init__(self) -> None:
        script = 'groups=; while read -r group; do groups="$groups -$group"; done; kill -KILL $groups'
        nothing = subprocess.DEVNULL
        # A separate session: Ctrl-C at the terminal, or a kill of the group, must not reach the guard.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
        )
        assert self._shell.stdin is not None
        self._pipe = self._shell.stdin
        keep_from_children(self._pipe.fileno())

    def write_end(self) -> int:
        """Duplicate the pipe's descriptor for a child, which writes its group's id; child and caller close it."""
        return os.dup(self._pipe.fileno())

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._shell.kill()
        self._shell.wait()
        release_to_children(self._pipe.fileno())
        self._pipe.close()


def _child_main(main: Callable[[Any], None], pipe: Any, parents_pipe: Any, guard_pipe: int, parent: int) -> None:
    parents_pipe.close()  # so that the pipe ends with the parent
    start_group()
    set_parent_death_signal(parent)
    os.write(guard_pipe, f"{os.getpid()}\n".encode())
    os.close(guard_pipe)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the parent's worker threads do not exist here
    main(pipe)


def _send_result(pipe: Any, call: Callable[[], Any], to_json: Callable[[Any], Any]) -> None:
    """Run a call and send its result, or its exception."""
    [result] = call_here([call])
    if not isinstance(result, BaseException):
        [result] = call_here([partial(_encode, to_json, result)])
    if isinstance(result, BaseException):
        text = "".join(traceback.format_exception(type(result), result, result.__traceback__))
        result = json.dumps({"summary": summary(result), "traceback": text}).encode()
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(result)


def _encode(to_json: Callable[[Any], Any], result: Any) -> bytes:
    return json.dumps({"result": to_json(result)}).encode()


def _serve_object(pipe: Any, make: Callable[[], Any], to_json: Callable[[Any], Any]) -> None:
    """Make an object, and run calls of its methods until the pipe ends."""
    made = None

    def call(method: str, arguments: list[Any]) -> Any:
        nonlocal made
        made = made or make()
        return getattr(made, method)(*arguments)

    while True:
        try:
            method, arguments = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        _send_result(pipe, partial(call, method, arguments), to_json)
