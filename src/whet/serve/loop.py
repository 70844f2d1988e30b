"""The thread that steps the engine for all requests of a server.

A request is a ``Ticket``: the event loop submits it and awaits its updates; the thread begins its calls on the engine,
runs steps while any call is open, and sends what each step added. One message to the event loop per step carries the
updates of all requests.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from whet.engine.session import Call, Drawn, Scores
from whet.serve.errors import ApiError
from whet.serve.gate import Gate

_SEND_S = 0.02
"""Time between updates of a stream: more of them take the processors from the engine, and people see no difference."""


@dataclass(eq=False)
class Ticket:
    """A request of the server: a call on the engine and the updates of its results.

    Attributes:
        begin: opens the call; runs on the engine's thread.
        n: number of samples; 0: the call only scores.
        streams: whether tokens are sent while they are sampled, or when the call is complete.
        is_scored: whether the call scores the prompt.
        ended: called with the complete call, on the engine's thread, before its last update is sent.
        updates: receives the ticket's updates; several tickets may share it.
        submitted_s: when it was submitted, by ``time.perf_counter``.
        started_s: when its first token or its scores arrived; 0: not yet.
    """

    begin: Callable[[], Call]
    n: int
    streams: bool = False
    is_scored: bool = False
    ended: Callable[[Call], None] | None = None
    submitted_s: float = field(default_factory=time.perf_counter)
    started_s: float = 0.0
    sent_s: float = 0.0  # when its last update was sent
    updates: asyncio.Queue[tuple[Ticket, Update | BaseException]] = field(default_factory=asyncio.Queue)
    call: Call | None = None
    is_cancelled: bool = False
    n_sent: list[int] = field(default_factory=list)  # tokens of each sample
    is_running: list[bool] = field(default_factory=list)  # each sample


@dataclass(frozen=True)
class Update:
    """Results of a request since its last update.

    Attributes:
        drawn: sample -> its new tokens and state.
        scores: of the prompt, in the first update of a scored one; else None.
        n_cached: prompt tokens found in the prefix cache.
        is_last: whether the request is complete.
    """

    drawn: dict[int, Drawn]
    scores: Scores | None
    n_cached: int
    is_last: bool


_Updates = list[tuple[Ticket, Update | BaseException]]


async def updates_of(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[Ticket, Update]]:
    """Yield the updates of tickets that share a queue, until all are complete; errors are raised."""
    n_left = len(tickets)
    while n_left:
        ticket, update = await tickets[0].updates.get()
        if isinstance(update, BaseException):
            raise update
        yield ticket, update
        n_left -= update.is_last


class EngineLoop:
    """Runs the calls of all tickets on one thread.

    Attributes:
        gate: pauses the loop, and changes the engine between its steps.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self.gate = Gate(self._wake)
        self._inbox: deque[Ticket] = deque()
        self._active: list[Ticket] = []
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; called within the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="whet-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all calls and the thread."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def n_waiting(self) -> int:
        """Return the number of tickets without a first token."""
        return sum(not ticket.started_s for ticket in [*self._active, *self._inbox])

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket; ``release`` must follow."""
        with self._wake:
            self._inbox.append(ticket)
            self._wake.notify()

    def release(self, ticket: Ticket) -> None:
        """End a ticket: what is left of its call is cancelled before the next step."""
        ticket.is_cancelled = True
        with self._wake:
            if ticket in self._inbox:
                self._inbox.remove(ticket)
            self._wake.notify()

    def n_running(self) -> int:
        """Return the number of tickets whose calls are open."""
        return len(self._active)

    async def abort(self) -> None:
        """End all calls with the tokens that they have."""
        await self.gate.change(self._abort)

    # --- the engine's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._advance():
            pass
        for ticket in list(self._active):
            self._end(ticket)
        with self._wake:
            self.gate.close()

    def _has_work(self) -> bool:
        gate, active = self.gate, self._active
        if gate.can_change(not active) or (self._inbox and gate.admits()):
            return True
        return bool(active) and (gate.steps() or any(ticket.is_cancelled for ticket in active))

    def _abort(self) -> None:
        updates: _Updates = []
        for ticket in list(self._active):
            call = self._call_of(ticket)
            running = [i for i in range(ticket.n) if ticket.is_running[i]]
            drawn = {i: call.drawn(i, ticket.n_sent[i])._replace(finish="abort") for i in running}
            has_scores = not ticket.is_scored or ticket.started_s
            error = None if drawn and has_scores else ApiError(503, "The request was aborted by /pause.")
            updates.append((ticket, error or self._make_update(ticket, call, drawn, time.perf_counter(), True)))
            self._end(ticket)
        self._send(updates)

    def _advance(self) -> bool:
        """Wait for work, and run a step; return False once the loop is stopping.

        Its variables do not outlive the step, so that an idle server holds no request.
        """
        with self._wake:
            while not (self._has_work() or self._is_stopping):
                self._wake.wait()
            if self._is_stopping:
                return False
            new = [self._inbox.popleft() for _ in range(len(self._inbox) if self.gate.admits() else 0)]
            change, steps = self.gate.take(not self._active), self.gate.steps()
        updates: _Updates = []
        if change is not None:
            change.apply()
        for ticket in new:
            if not ticket.is_cancelled:
                self._begin(ticket, updates)
        for ticket in [ticket for ticket in self._active if ticket.is_cancelled]:
            self._end(ticket)
        if steps:
            self._step(updates)
        self._send(updates)
        return True

    def _begin(self, ticket: Ticket, updates: _Updates) -> None:
        try:
            ticket.call = ticket.begin()
        except BaseException as error:
            updates.append((ticket, error))
            return
        ticket.n_sent, ticket.is_running = [0] * ticket.n, [True] * ticket.n
        self._active.append(ticket)

    def _step(self, updates: _Updates) -> None:
        """Run a step, and collect what it added to each ticket."""
        failure: BaseException | None = None
        for ticket in self._active[:1]:
            try:
                self._call_of(ticket).step()
            except BaseException as error:
                failure = error
        now = time.perf_counter()
        for ticket in list(self._active):
            update: Update | BaseException | None
            try:
                update = failure or self._collect(ticket, self._call_of(ticket), now)
            except BaseException as error:
                update = error
            if update is not None:
                updates.append((ticket, update))
            if isinstance(update, BaseException) or (update is not None and update.is_last):
                self._end(ticket)

    def _collect(self, ticket: Ticket, call: Call, now: float) -> Update | None:
        if (is_done := call.is_done()) and ticket.ended is not None:
            ticket.ended(call)
        call.constrain()
        sends = is_done or (ticket.streams and now >= ticket.sent_s + _SEND_S)
        if ticket.started_s and not sends:  # most steps of most tickets
            return None
        drawn = {}
        for i in range(ticket.n):
            if ticket.is_running[i]:
                new = call.drawn(i, ticket.n_sent[i])
                if len(new.token_ids) and not ticket.started_s:
                    ticket.started_s = now
                if sends:
                    ticket.n_sent[i] += len(new.token_ids)
                    ticket.is_running[i] = new.finish == "running"
                    if len(new.token_ids) or not ticket.is_running[i]:
                        drawn[i] = new
        if not (drawn or is_done):
            return None
        return self._make_update(ticket, call, drawn, now, is_done)

    @staticmethod
    def _make_update(ticket: Ticket, call: Call, drawn: dict[int, Drawn], now: float, is_last: bool) -> Update:
        is_first = not ticket.sent_s
        ticket.started_s, ticket.sent_s = ticket.started_s or now, now
        return Update(drawn, call.scores() if ticket.is_scored and is_first else None, call.n_reused, is_last)

    @staticmethod
    def _call_of(ticket: Ticket) -> Call:
        assert ticket.call is not None, "a ticket is active once its call has begun"
        return ticket.call

    def _end(self, ticket: Ticket) -> None:
        self._call_of(ticket).close()
        self._active.remove(ticket)

    def _send(self, updates: _Updates) -> None:
        def deliver() -> None:
            for ticket, update in updates:
                ticket.updates.put_nowait((ticket, update))

        if updates and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)
