"""Wall-clock time of a step by named phases, each excluding nested phases.

    with record() as seconds:
        with phase("loss"):
            ...
    seconds  # {"other": 0.002, "loss": 0.113}

At every moment of a record exactly one phase is active, "other" by default, so that the seconds add up to the total
time of the record. Only the thread that opened the record is timed. GPU work is asynchronous: it counts in the phase in
which the thread waits for it.
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
        """Add the time since the last charge to the innermost phase."""
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
    """Record the phases inside the context; nested records are independent, and both count the inner time.

    Yields:
        Seconds by phase, "other" outside of phases; complete when the context exits, also after an exception.
    """
    opened = _Record()
    token = _current.set(opened)
    try:
        yield opened.seconds
    finally:
        opened.charge()
        _current.reset(token)


def phase(name: str) -> AbstractContextManager[None]:
    """Count the time inside as phase ``name``, not as the outer phase; no-op without a record in this thread."""
    current = _current.get()
    if current is None or current.thread != threading.get_ident():
        return _NOTHING
    return current.phase(name)
