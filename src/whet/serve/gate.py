"""Pauses and changes of an engine that serves: decides what its thread may do.

A change of the weights or of the prefix cache needs an engine without calls: new requests wait while one is queued,
and the running ones end on the old weights.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple, get_args

from whet.serve.errors import ApiError

PauseMode = Literal["abort", "wait", "keep"]
"""vLLM's: running requests end at once, end normally, or continue after the pause."""


class Change(NamedTuple):
    """A call of the engine that is not a request.

    Attributes:
        run: makes the change; runs on the engine's thread.
        is_exclusive: whether no request may be running.
        done: receives the result or the error.
        loop: the event loop of ``done``.
    """

    run: Callable[[], Any]
    is_exclusive: bool
    done: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop

    def apply(self) -> None:
        """Make the change."""
        try:
            self._settle(self.run(), None)
        except BaseException as error:
            self._settle(None, error)

    def refuse(self) -> None:
        """End without the change, because the server ends."""
        self._settle(None, ApiError(503, "The server is shutting down."))

    def _settle(self, result: Any, error: BaseException | None) -> None:
        def settle() -> None:
            if self.done.cancelled():
                return
            if error is None:
                self.done.set_result(result)
            else:
                self.done.set_exception(error)

        with suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(settle)


class Gate:
    """The pause and the queued changes of one engine.

    Args:
        wake: condition on which the engine's thread waits.

    Attributes:
        paused: mode of the pause; "": requests run.
    """

    def __init__(self, wake: threading.Condition) -> None:
        self._wake = wake
        self._changes: deque[Change] = deque()
        self._is_closed = False
        self.paused: PauseMode | Literal[""] = ""

    # --- the event loop -----------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """Stop the admission of requests at once; with "keep", the steps of running ones too.

        Raises:
            ApiError: 400: an unknown mode.
        """
        if mode not in get_args(PauseMode):
            raise ApiError(400, f"mode is {mode!r:.40}, expected {', '.join(get_args(PauseMode))}.", "mode")
        self._set(mode)

    def resume(self) -> None:
        """End the pause."""
        self._set("")

    def _set(self, mode: Any) -> None:
        with self._wake:
            self.paused = mode
            self._wake.notify()

    async def change(self, run: Callable[[], Any], *, is_exclusive: bool = False) -> Any:
        """Make a change on the engine's thread, and return its result; an exclusive one waits for running requests.

        Raises:
            ApiError: 503: the server ends.
        """
        loop = asyncio.get_running_loop()
        change = Change(run, is_exclusive, loop.create_future(), loop)
        with self._wake:
            self._changes.append(change)
            self._wake.notify()
            if self._is_closed:
                self.close()
        return await change.done

    # --- the engine's thread, which holds ``wake`` --------------------------------------------------------

    def admits(self) -> bool:
        """Whether waiting requests may begin."""
        return not self.paused and not any(change.is_exclusive for change in self._changes)

    def steps(self) -> bool:
        """Whether running requests continue."""
        return self.paused != "keep"

    def take(self, is_idle: bool) -> Change | None:
        """Return the first change if it can be made now; ``is_idle``: no request is running."""
        return self._changes.popleft() if self.can_change(is_idle) else None

    def can_change(self, is_idle: bool) -> bool:
        """Whether ``take`` would return a change."""
        return bool(self._changes) and (is_idle or not self._changes[0].is_exclusive)

    def close(self) -> None:
        """Refuse the changes that are left, and all later ones."""
        self._is_closed = True
        while self._changes:
            self._changes.popleft().refuse()
