"""Deferral of signal handlers during a change that must not be left half done, such as of all weights of a model."""

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
    """A context that can defer Python's signal handlers, from ``hold`` to ``release`` or to its end.

    Ctrl-C then raises no KeyboardInterrupt in the middle of a change, nor does the handler of a timer or of a
    scheduler's signal. Python runs handlers in the main thread only: in other threads this is a no-op. Default actions
    of the system, such as termination by SIGTERM, are not deferred.
    """

    def __init__(self) -> None:
        self._is_open = self._is_holding = False
        self._handlers: dict[int, Handler] = {}
        self._deferred: list[Callable[[], Any]] = []

    def __enter__(self) -> DeferredSignals:
        self._is_open = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_open = False
        self.release()

    def hold(self) -> None:
        """Defer handlers from now on; a no-op outside of the context or if they are deferred already."""
        if not self._is_open or self._is_holding or threading.current_thread() is not threading.main_thread():
            return
        self._is_holding, self._deferred = True, []
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, partial(self._handle, handler))

    def release(self) -> None:
        """Restore the handlers and run the deferred ones in the order of their signals."""
        self._is_holding = False
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        deferred, self._deferred = self._deferred, []
        _run(deferred)

    def _handle(self, handler: Handler, number: int, frame: Any) -> None:
        if self._is_holding:
            self._deferred.append(partial(handler, number, frame))
        else:
            handler(number, frame)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer Python's signal handlers while the context is open."""
    with DeferredSignals() as signals:
        signals.hold()
        yield


def _run(handlers: list[Callable[[], Any]]) -> None:
    """Run all handlers, even if one of them raises."""
    if handlers:
        try:
            handlers[0]()
        finally:
            _run(handlers[1:])
