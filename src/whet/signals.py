"""Signals that wait while something is changed that must not be left half done, such as all weights of a model."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

Handler = Callable[[int, Any], Any]
_NUMBERS = tuple(map(int, signal.valid_signals()))


class DeferredSignals:
    """A context in which Python's signal handlers can be put off: from ``hold`` to ``release``, or to its end.

    So Ctrl-C raises no KeyboardInterrupt in the middle of a change, and neither does the handler of a timer or of a
    scheduler's signal. Python runs handlers in the main thread only: in other threads there is nothing to put off.
    What the C library does, such as ending the process by SIGTERM, is not put off.
    """

    def __init__(self) -> None:
        self._is_open = self._is_holding = False
        self._handlers: dict[int, Handler] = {}
        self._came: list[Callable[[], Any]] = []

    def __enter__(self) -> DeferredSignals:
        self._is_open = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_open = False
        self.release()

    def hold(self) -> None:
        """Put handlers off from here on; nothing happens outside of the context, or where they wait already."""
        if not self._is_open or self._is_holding or threading.current_thread() is not threading.main_thread():
            return
        self._is_holding, self._came = True, []
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, partial(self._handle, handler))

    def release(self) -> None:
        """Run the handlers of the signals that came, in their order, and those of others as ever."""
        self._is_holding = False
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        came, self._came = self._came, []
        _run(came)

    def _handle(self, handler: Handler, number: int, frame: Any) -> None:
        if self._is_holding:
            self._came.append(partial(handler, number, frame))
        else:
            handler(number, frame)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """A context in which Python's signal handlers are put off, for a change that is one block."""
    with DeferredSignals() as signals:
        signals.hold()
        yield


def _run(handlers: list[Callable[[], Any]]) -> None:
    """Run all of the handlers, even where one of them raises an exception."""
    if handlers:
        try:
            handlers[0]()
        finally:
            _run(handlers[1:])
