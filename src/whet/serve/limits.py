"""Limits of the requests of a server: of all, of each API key, and in time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from whet.serve.errors import ApiError
from whet.serve.loop import Ticket

key_of_request: ContextVar[str] = ContextVar("key_of_request", default="")
"""Digest of the API key of the request that is being handled; "": it has none."""


@dataclass
class Limits:
    """Counts open tickets.

    Attributes:
        max_requests: tickets that may be open at once.
        max_requests_per_key: tickets of one API key; None: as many.
        max_seconds: time that tickets may be open; None: any.
    """

    max_requests: int
    max_requests_per_key: int | None = None
    max_seconds: float | None = None
    _n_open: Counter[str] = field(default_factory=Counter)

    @property
    def n_open(self) -> int:
        """Number of open tickets."""
        return self._n_open.total()

    @contextmanager
    def hold(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """Count tickets as open until the block ends; those that are open for too long receive an error.

        Raises:
            ApiError: 400: there are more tickets than may ever be open; 429: than may be open now.
        """
        key = key_of_request.get()
        limits = [(self.max_requests, self.n_open, "of the server")]
        if key and self.max_requests_per_key is not None:
            limits.append((self.max_requests_per_key, self._n_open[key], "of this API key"))
        for most, n_open, whose in limits:
            if len(tickets) > most:
                raise ApiError(
                    400,
                    f"The request takes {len(tickets)} places in the queue, and the limit {whose} is {most}. Send "
                    f"fewer prompts at once.",
                )
            if n_open + len(tickets) > most:
                raise ApiError(
                    429,
                    f"The queue is full: {n_open} requests {whose} are open, at most {most}. Try again.",
                    None,
                    "queue_full",
                )
        self._n_open[key] += len(tickets)
        timer = None
        if self.max_seconds is not None:
            timer = asyncio.get_running_loop().call_later(self.max_seconds, self._expire, tickets)
        try:
            yield
        finally:
            self._n_open[key] -= len(tickets)
            if not self._n_open[key]:
                del self._n_open[key]
            if timer is not None:
                timer.cancel()

    def _expire(self, tickets: Sequence[Ticket]) -> None:
        error = ApiError(504, f"The request took longer than {self.max_seconds:g} s, the limit.", None, "timeout")
        for ticket in tickets:
            ticket.updates.put_nowait((ticket, error))
