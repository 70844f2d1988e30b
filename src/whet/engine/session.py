"""Calls on the engine, each from its first page to its last, whatever ends it.

A ``Session`` owns the requests of one call. It ends with the call: at its normal end, in an error, by Ctrl-C, when its
stream is closed or dropped. An interrupt can fall between any two lines, so that nothing here relies on a line that
must come after another one: a session is known to ``Calls`` before it has a request, a ``with`` that names it twice
ends it even where the first end was interrupted, and one that nobody holds is ended before the core's next use.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from whet.errors import WhetError, WhetValueError
from whet.sampling import Completion


class EngineBusyError(WhetError, RuntimeError):
    """The engine is asked to change its weights while a completion is under way."""


class Calls:
    """The core of an engine, the lock around it, and the calls that are under way.

    Attributes:
        core: None once closed.
        lock: whoever uses the core holds it; reentrant, as an object may be dropped at any line.
        adapters: those that ``add_adapter`` gave out.
        own_adapter: the model's own; 0: none.
        torn: whether the weights are half those before and half those after a ``sync``.
    """

    def __init__(self, core: Any) -> None:
        self.core: Any = core
        self.lock = threading.RLock()
        self.adapters: set[int] = set()
        self.own_adapter = 0
        self.torn = False
        self._numbers = itertools.count(1)
        self._open: dict[weakref.ref[Session], int] = {}
        self._dropped: deque[weakref.ref[Session]] = deque()

    def reference(self, session: Session) -> weakref.ref[Session]:
        """The name of a session that does not keep it alive; its callback is no Python code, which could fail."""
        return weakref.ref(session, self._dropped.append)

    def use(self, where: str, *, torn: bool = False) -> Any:
        """The core, rid of what ended without a word; under the lock.

        Args:
            torn: also where the weights are torn.

        Raises:
            WhetValueError: the engine is closed.
            WhetError: the weights are torn.
        """
        if self.core is None:
            raise WhetValueError(f"{where}: the engine is closed. Make a new one.")
        if self.torn and not torn:
            raise WhetError(
                f"{where}: a sync was stopped among the weights, which are neither those before nor those after. Call "
                f"sync again, or make a new engine."
            )
        while self._dropped:
            self.end(self._dropped[0])
            self._dropped.popleft()
        if not self._open:  # no request names an adapter
            self.core.retain_adapters([*self.adapters, *([self.own_adapter] if self.own_adapter else [])])
        return self.core

    def use_alone(self, where: str) -> Any:
        """The core, where no call is under way; under the lock.

        Raises:
            EngineBusyError: one is.
        """
        core = self.use(where, torn=True)
        if self._open:
            raise EngineBusyError(
                f"{where}: {len(self._open)} calls are under way, and their tokens have to come from one version of "
                f"the weights. Finish or close them first."
            )
        return core

    def begin(self, reference: weakref.ref[Session]) -> None:
        """Under the lock, after ``use``."""
        self._open[reference] = next(self._numbers)

    def number(self, reference: weakref.ref[Session], where: str) -> int:
        """Under the lock, after ``use``."""
        if reference not in self._open:
            raise WhetValueError(f"{where}: the call has ended.")
        return self._open[reference]

    def end(self, reference: weakref.ref[Session]) -> None:
        """Nothing of this session is left; nothing happens where it has ended."""
        with self.lock:
            number = self._open.get(reference)
            if number is None:
                return
            if self.core is not None:
                self.core.end_session(number)
            del self._open[reference]

    def close(self) -> None:
        """Give the memory back."""
        with self.lock:
            self.core = None
            self._open.clear()


class Session:
    """One call: ``with (session := Session(calls, where)), session:``, twice for the sake of interrupts."""

    def __init__(self, calls: Calls, where: str) -> None:
        self._calls, self._where = calls, where
        self._reference = calls.reference(self)

    def begin(self) -> None:
        """From here on the weights stay as they are, until ``end``."""
        with self._calls.lock:
            self._calls.use(self._where)
            self._calls.begin(self._reference)

    def end(self) -> None:
        """Idempotent."""
        self._calls.end(self._reference)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def add(self, kind: str, name: str, hint: str, *request: Any) -> int:
        """The number of a new request: ``kind`` is "prompt" or "score"; ``name`` and ``hint`` explain a refusal.

        Raises:
            WhetValueError: it can never run, for lack of pages.
        """
        with self._calls.lock:
            core = self._calls.use(self._where)
            number = self._calls.number(self._reference, self._where)
            try:
                return getattr(core, f"add_{kind}")(number, *request)
            except ValueError as error:
                raise WhetValueError(f"{self._where}: {name}: {error}. {hint}") from None

    def run(self, jobs: Sequence[int]) -> None:
        """Step until these are done. Between two steps, other threads and Ctrl-C have their turn."""
        for job in jobs:
            running = True
            while running:
                with self._calls.lock:
                    core = self._calls.use(self._where)
                    running = not core.done(job)
                    if running:
                        core.step()
                    else:
                        self._check_logits(core, job)

    def completion(self, job: int, sample: int, policy_version: int) -> Completion:
        """What became of a sample."""
        with self._calls.lock:
            tokens, logprobs, finish = self._calls.use(self._where).sample(job, sample, 0)
        return Completion(tokens.tolist(), logprobs.tolist(), finish, policy_version)

    def scores(self, job: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(log-probs, entropies, logits) of a sequence."""
        with self._calls.lock:
            return self._calls.use(self._where).scores(job)

    def token(self, job: int, i: int) -> tuple[Token | None, str]:
        """Token i of a job's only sample, computed if need be, or None past its end; and the finish reason so far."""
        while True:
            with self._calls.lock:
                core = self._calls.use(self._where)
                self._calls.number(self._reference, self._where)
                tokens, logprobs, finish = core.sample(job, 0, i)
                if len(tokens):
                    return Token(int(tokens[0]), float(logprobs[0])), finish
                self._check_logits(core, job)
                if finish != "running":
                    return None, finish
                core.step()

    def _check_logits(self, core: Any, job: int) -> None:
        if error := core.error(job):
            raise WhetValueError(f"{self._where}: {error}. Look for NaN in the model's weights.")


class Token(NamedTuple):
    """One token of a stream."""

    token_id: int
    logprob: float


class TokenStream(Iterator[Token], AsyncIterator[Token]):
    """The tokens of one completion, from ``Engine.stream``. An error or an interrupt closes it.

    Attributes:
        finish_reason: "running", then "stop", "length" or "cancelled".
    """

    def __init__(self, session: Session, job: int) -> None:
        self._session, self._job = session, job
        self._taken = 0
        self.finish_reason = "running"

    def __next__(self) -> Token:
        if self.finish_reason != "running":
            raise StopIteration
        try:
            token, finish = self._session.token(self._job, self._taken)
            if token is not None:
                self._taken += 1
                return token
            self.finish_reason = finish
            self.close()
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def __iter__(self) -> TokenStream:
        return self

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        token = await asyncio.to_thread(next, self, None)
        if token is None:
            raise StopAsyncIteration
        return token

    def close(self) -> None:
        """End the completion where it is, and forget it. Idempotent."""
        if self.finish_reason == "running":
            self.finish_reason = "cancelled"
        self._session.end()

    cancel = close

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
