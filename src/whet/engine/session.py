"""Calls on the engine, each from its first page to its last, whatever ends it.

A ``Session`` owns the requests of one call. It ends with the call: at its normal end, in an error, by Ctrl-C, when its
stream is closed or dropped. Every method of the core is atomic, and threads take turns at them, so that nothing here
holds a lock. An interrupt can fall between any two lines, so that nothing relies on a line that must come after
another one: a ``with`` that names a session twice ends it even where the first end was interrupted, and a session that
nobody holds is ended before the core's next use.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from whet.config.sampling import Completion
from whet.errors import WhetError, WhetTypeError, WhetValueError
from whet.models.tokenizers.token_texts import TextStream, TokenTexts

_TURN_S = 1e-3


class EngineBusyError(WhetError, RuntimeError):
    """The engine is asked to change its weights while a completion is under way."""


class Calls:
    """The core of an engine, and the calls that are under way on it.

    Attributes:
        core: None once closed.
        numbers, adapter_numbers: of the next session and adapter.
        adapters: those that ``add_adapter`` gives out.
        own_adapter: the model's own; 0: none.
        unusable: what is wrong with the weights until the next ``sync``; "": nothing.
    """

    def __init__(self, core: Any) -> None:
        self.core: Any = core
        self.numbers, self.adapter_numbers = itertools.count(1), itertools.count(1)
        self.adapters: set[int] = set()
        self.own_adapter = 0
        self.unusable = ""
        # Held by weak references, which are put among the dropped ones by no Python code: that could be interrupted.
        self._sessions: dict[int, weakref.KeyedRef[int, Session]] = {}
        self._dropped: deque[weakref.KeyedRef[int, Session]] = deque()

    def use(self, where: str) -> Any:
        """The core, rid of sessions that were dropped.

        Raises:
            WhetValueError: the engine is closed.
        """
        core = self.core
        if core is None:
            raise WhetValueError(f"{where}: the engine is closed. Make a new one.")
        for reference in list(self._dropped):
            core.end_session(reference.key)
            self._sessions.pop(reference.key, None)
            if reference in self._dropped:
                self._dropped.remove(reference)
        return core

    def begin(self, session: Session, where: str, exclusive: bool) -> None:
        """Wait until no exclusive session is under way.

        Raises:
            WhetValueError: the engine is closed.
            WhetError: the weights are unusable, and the session is for requests.
            EngineBusyError: the session is to be exclusive, and others are under way.
        """
        self._sessions[session.number] = weakref.KeyedRef(session, self._dropped.append, session.number)
        while n_others := self.use(where).begin_session(session.number, exclusive):
            if exclusive:
                raise EngineBusyError(
                    f"{where}: {n_others} calls are under way, and their tokens have to come from one version of the "
                    f"weights. Finish or close them first."
                )
            time.sleep(_TURN_S)
        if self.unusable and not exclusive:
            raise WhetError(f"{where}: {self.unusable}.")

    def end(self, number: int) -> None:
        """Nothing of this session is left; nothing happens where it has ended."""
        core = self.core
        if core is not None:
            core.end_session(number)
        self._sessions.pop(number, None)

    def close(self) -> None:
        """Give the memory back, when the last step that runs is over."""
        self.core = None
        self._sessions.clear()


class Session:
    """One call: ``with (session := Session(calls, where)), session:``, twice for the sake of interrupts.

    Args:
        calls: of the engine.
        where: begins its errors.
    """

    def __init__(self, calls: Calls, where: str) -> None:
        self._calls, self._where = calls, where
        self.number = next(calls.numbers)

    def begin(self, *, exclusive: bool = False) -> None:
        """Hold the weights fixed until ``end``; an ``exclusive`` session may change them."""
        self._calls.begin(self, self._where, exclusive)

    def end(self) -> None:
        """Idempotent."""
        self._calls.end(self.number)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def add(self, kind: str, name: str, hint: str, **request: Any) -> int:
        """The number of a new request: ``kind`` is "prompt" or "score"; ``name`` and ``hint`` explain a refusal.

        Raises:
            WhetValueError: it can never run, for lack of pages.
        """
        try:
            return getattr(self._core(), f"add_{kind}")(self.number, **request)
        except ValueError as error:
            raise WhetValueError(f"{self._where}: {name}: {error}. {hint}") from None
        except IndexError:
            raise self._make_ended_error() from None

    def run(self, jobs: Sequence[int]) -> None:
        """Step until these are done. Between two steps, other threads and Ctrl-C have their turn."""
        for job in jobs:
            while not self._step(job):
                pass
            self._check_logits(job)

    def completion(self, job: int, sample: int, policy_version: int, texts: TokenTexts | None) -> Completion:
        """The outcome of a sample; with ``texts`` what is shown of its own."""
        drawn = _Drawn(*self._core().sample(job, sample, 0))
        token_ids = drawn.token_ids.tolist()
        text = None if texts is None else texts.text_of(token_ids, drawn.held[-1])
        return Completion(
            token_ids, drawn.logprobs.tolist(), drawn.finish, policy_version, text, drawn.alternatives() or None
        )

    def scores(self, job: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(log-probs, entropies, logits) of a sequence."""
        return self._core().scores(job)

    def n_reused(self, job: int) -> int:
        """Tokens of the prompt that were not computed for it, once it is under way."""
        return self._core().reused(job)

    def drawn(self, job: int, i: int) -> _Drawn:
        """The tokens of a job's only sample from i on, computed if need be; none past its end."""
        while True:
            try:
                drawn = _Drawn(*self._core().sample(job, 0, i))
            except IndexError:
                raise self._make_ended_error() from None
            if len(drawn.token_ids):
                return drawn
            if drawn.finish != "running":
                self._check_logits(job)
                return drawn
            self._step(job)

    def _core(self) -> Any:
        return self._calls.use(self._where)

    def _step(self, job: int) -> bool:
        try:
            return self._core().step(job)
        except IndexError:
            raise self._make_ended_error() from None

    def _make_ended_error(self) -> WhetValueError:
        return WhetValueError(f"{self._where}: the call has ended.")

    def _check_logits(self, job: int) -> None:
        if error := self._core().error(job):
            raise WhetValueError(f"{self._where}: {error}. Look for NaN in the model's weights.")


class _Drawn(NamedTuple):
    """T tokens of a sample, as the core has them.

    Attributes:
        token_ids, logprobs: (T,).
        held: (T,), how many bytes at the end of the text are not shown, once a token is there; (0,) without ``stop``.
        top_ids, top_logprobs: (T * n,), alternatives; -1 as an id stands for none.
        finish: of the whole sample, so far.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    held: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    finish: Any

    def alternatives(self) -> list[list[tuple[int, float]]]:
        """Those of each token; empty where none were asked for."""
        if not len(self.top_ids):
            return []
        shape = (len(self.token_ids), -1)
        ids, logprobs = self.top_ids.reshape(shape).tolist(), self.top_logprobs.reshape(shape).tolist()
        return [[pair for pair in zip(*row, strict=True) if pair[0] >= 0] for row in zip(ids, logprobs, strict=True)]


class NewAdapter:
    """An adapter that a call brings: ``with (new := NewAdapter(calls)), new:``, as a session.

    What was not made the model's own or given out when the call ends, or does not come to its end, is forgotten.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.number = next(calls.adapter_numbers)

    def __enter__(self) -> NewAdapter:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        calls = self._calls
        if error is not None:
            calls.adapters.discard(self.number)
        if calls.core is not None and self.number not in (calls.own_adapter, *calls.adapters):
            calls.core.remove_adapter(self.number)


def run_to_its_end(action: Callable[[], None]) -> None:
    """An action that can be repeated: where it is interrupted it is run again, and the interrupt raised after it."""
    try:
        action()
    except BaseException:
        action()
        raise


class Token(NamedTuple):
    """One token of a stream.

    Attributes:
        token_id, logprob: as in a ``Completion``.
        text: with ``SamplingParams.stop`` what may be shown now beside what was shown before, perhaps nothing; together
            they are ``Completion.text``. Else None.
        top_logprobs: its alternatives, as in a ``Completion``; None where none were asked for.
    """

    token_id: int
    logprob: float
    text: str | None = None
    top_logprobs: list[tuple[int, float]] | None = None


class TokenStream(Iterator[Token], AsyncIterator[Token]):
    """The tokens of one completion, from ``Engine.stream``. An error or an interrupt closes it.

    One thread or task at a time takes its next token; another one may close it.

    Attributes:
        finish_reason: "running", then "stop", "length" or "cancelled".
        n_reused: tokens of the prompt whose keys and values were there already, from the first token on.
    """

    def __init__(self, session: Session, job: int, texts: TokenTexts | None) -> None:
        self._session, self._job = session, job
        self._text = None if texts is None else TextStream(texts)
        self._taken = 0
        self._taking: dict[str, int] = {}  # "thread": whose call takes a token; setdefault() is atomic
        self.finish_reason = "running"
        self.n_reused = 0

    def __next__(self) -> Token:
        """Return the next token.

        Raises:
            WhetValueError: another thread is waiting for it.
        """
        thread = threading.get_ident()
        if self._taking.setdefault("thread", thread) != thread:
            raise WhetValueError(
                "Engine.stream: another thread or task is waiting for the next token of this stream. Iterate over it "
                "in one, or begin a stream for each."
            )
        try:
            return self._take()
        finally:
            self._taking.clear()

    def __reduce__(self) -> NoReturn:
        raise WhetTypeError("TokenStream: a stream is neither copied nor pickled. Its tokens are: list(stream).")

    def _take(self) -> Token:
        if self.finish_reason != "running":
            raise StopIteration
        try:
            drawn = self._session.drawn(self._job, self._taken)
            if len(drawn.token_ids):
                if self._taken == 0:
                    self.n_reused = self._session.n_reused(self._job)
                self._taken += 1
                return self._make_token(drawn)
            self.finish_reason = drawn.finish
            self.close()
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def _make_token(self, drawn: _Drawn) -> Token:
        token_id, text = int(drawn.token_ids[0]), None
        if self._text is not None:
            is_last = len(drawn.token_ids) == 1 and drawn.finish != "running"
            text = self._text.add(token_id, int(drawn.held[0]), is_last)
        return Token(token_id, float(drawn.logprobs[0]), text, next(iter(drawn.alternatives()), None))

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
