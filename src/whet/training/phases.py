"""Wall-clock time of a step by named phases, each without the phases inside it.

    with record() as seconds:
        with phase("loss"):
            ...
    seconds  # {"other": 0.002, "loss": 0.113}

At every moment of a record exactly one name is running, "other" where there is no phase, so the seconds add up to the
record's whole time. Times the thread that opened the record and no other. Does not wait for a GPU: work that one still
does when a phase ends is counted where the thread next waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

_NOTHING = nullcontext()


class _Record:
    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.seconds: dict[str, float] = {}
        self.running = ["other"]
        self.since_s = time.perf_counter()

    def charge(self) -> None:
        """Add the time since the last charge to the innermost name."""
        now_s = time.perf_counter()
        name = self.running[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self.since_s
        self.since_s = now_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.charge()
        self.running.append(name)
        try:
            yield
        finally:
            self.charge()
            self.running.pop()


_current: ContextVar[_Record | None] = ContextVar("whet_phases", default=None)


@contextmanager
def record() -> Iterator[dict[str, float]]:
    """Record the phases that run inside; a record within a record is its own, and both count its time.

    Yields:
        Seconds by phase, "other" for what is in none; complete once the record is closed, also by an exception.
    """
    opened = _Record()
    token = _current.set(opened)
    try:
        yield opened.seconds
    finally:
        opened.charge()
        _current.reset(token)


def phase(name: str) -> AbstractContextManager[None]:
    """Count the time inside as ``name``, and not as the phase around it; nothing without a record in this thread."""
    current = _current.get()
    if current is None or current.thread != threading.get_ident():
        return _NOTHING
    return current.phase(name)
