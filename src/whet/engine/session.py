"""Sessions: each owns the requests of one call on the engine, and frees their pages however the call ends.

A ``Session`` ends with its call: normally, by an error or Ctrl-C, or when its stream is closed or garbage-collected.
The core's methods are atomic and serialised, so no lock is held here. An interrupt can occur between any two lines, so
no cleanup relies on a later line: a ``with`` that names a session twice ends it even if the first end is interrupted,
and an unreferenced session is ended before the next use of the core.
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

from whet.config.kept_tokens import KeptTokens
from whet.config.sampling import Completion, SamplingParams
from whet.engine.grammar import Constraint
from whet.errors import WhetError, WhetTypeError, WhetValueError
from whet.models.architecture import ModelConfig
from whet.models.tokenizers.token_texts import TextStream, TokenTexts

_POLL_S = 1e-3


class EngineBusyError(WhetError, RuntimeError):
    """The engine cannot change its weights while a completion is in progress."""


class CoreHandle:
    """The core of an engine, its open sessions and its adapters.

    Attributes:
        core: None after ``close``.
        numbers: yields the number of the next session.
        adapter_numbers: yields the number of the next adapter.
        adapters: numbers returned by ``add_adapter``.
        own_adapter: number of the model's adapter; 0: none.
        unusable: why the weights cannot be used until the next ``sync``; "": they can.
    """

    def __init__(self, core: Any) -> None:
        self.core: Any = core
        self.numbers, self.adapter_numbers = itertools.count(1), itertools.count(1)
        self.adapters: set[int] = set()
        self.own_adapter = 0
        self.unusable = ""
        # The weak references' callback, deque.append, runs no Python code, which an interrupt could stop.
        self._sessions: dict[int, weakref.KeyedRef[int, Session]] = {}
        self._dropped: deque[weakref.KeyedRef[int, Session]] = deque()

    def use(self, where: str) -> Any:
        """Return the core, after ending abandoned sessions.

        Raises:
            WhetValueError: the engine is closed.
        """
        core = self.core
        if core is None:
            raise WhetValueError(f"{where}: the engine is closed. Make a new one.")
        for reference in list(self._dropped) if self._dropped else ():
            core.end_session(reference.key)
            self._sessions.pop(reference.key, None)
            if reference in self._dropped:
                self._dropped.remove(reference)
        return core

    def begin(self, session: Session, where: str, exclusive: bool) -> None:
        """Open a session, after waiting for any exclusive one to end.

        Raises:
            WhetValueError: the engine is closed.
            WhetError: the weights are unusable, and the session is not exclusive.
            EngineBusyError: the session is exclusive, and others are open.
        """
        self._sessions[session.number] = weakref.KeyedRef(session, self._dropped.append, session.number)
        while n_others := self.use(where).begin_session(session.number, exclusive):
            if exclusive:
                raise EngineBusyError(
                    f"{where}: {n_others} calls are in progress, and their tokens have to come from one version of the "
                    f"weights. Finish or close them first."
                )
            time.sleep(_POLL_S)
        if self.unusable and not exclusive:
            raise WhetError(f"{where}: {self.unusable}.")

    def end(self, number: int) -> None:
        """End a session and free its pages. Idempotent."""
        core = self.core
        if core is not None:
            core.end_session(number)
        self._sessions.pop(number, None)

    def close(self) -> None:
        """Free the core after the current step."""
        self.core = None
        self._sessions.clear()


class Session:
    """One call on the engine: ``with (session := Session(calls, where)), session:``, twice because of interrupts.

    Args:
        calls: the engine's core.
        where: prefix of error messages.
    """

    def __init__(self, calls: CoreHandle, where: str) -> None:
        self._calls, self._where = calls, where
        self.number = next(calls.numbers)

    def begin(self, *, exclusive: bool = False) -> None:
        """Lock the weights until ``end``; an ``exclusive`` session may change them."""
        self._calls.begin(self, self._where, exclusive)

    def end(self) -> None:
        """End the session. Idempotent."""
        self._calls.end(self.number)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def add(self, kind: str, name: str, hint: str, **request: Any) -> int:
        """Add a "prompt" or "score" request and return its number; ``name`` and ``hint`` are for error messages.

        Raises:
            WhetValueError: the request needs more pages than the cache has.
        """
        try:
            return getattr(self._core(), f"add_{kind}")(self.number, **request)
        except ValueError as error:
            raise WhetValueError(f"{self._where}: {name}: {error}. {hint}") from None
        except IndexError:
            raise self._make_ended_error() from None

    def run(self, jobs: Sequence[int]) -> None:
        """Step until these jobs are done. Other threads and Ctrl-C are served between steps."""
        for job in jobs:
            while not self.step(job):
                pass
            self.check_logits(job)

    def run_calls(self, calls: Sequence[Call]) -> Iterator[Call]:
        """Step all calls of the session, and yield each as soon as it is complete, in their order."""
        constrained = [call for call in calls if call.constraints]
        for call in calls:
            while not self.step(call.job):
                for each in constrained:
                    each.constrain()
            self.check_logits(call.job)
            yield call

    def completion(
        self,
        job: int,
        sample: int,
        policy_version: int,
        texts: TokenTexts | None,
        sampling: SamplingParams,
        config: ModelConfig,
    ) -> Completion:
        """Return a sample as a ``Completion``.

        Args:
            texts: texts of all tokens, to include the completion's; None: without.
            sampling: the settings; some include more.
            config: of the model.
        """
        drawn = self.sample(job, sample, 0)
        token_ids = drawn.token_ids.tolist()
        text = None if texts is None else texts.text_of(token_ids, drawn.n_withheld[-1])
        kept = experts = None
        if sampling.kept_tokens:
            offsets, words = self._core().kept_tokens(job, sample)
            kept = KeptTokens(offsets, words, config.vocab_size)
        if sampling.experts:
            n_mixtures = sum(map(config.is_moe, range(config.n_layers)))
            found = self._core().experts(job, sample).astype(np.uint16)
            experts = found.reshape(-1, n_mixtures, config.n_used_experts)
        return Completion(
            token_ids,
            drawn.logprobs.tolist(),
            drawn.finish,
            policy_version,
            text,
            drawn.alternatives() or None,
            kept,
            experts,
        )

    def scores(self, job: int) -> Scores:
        """Return the results of a score request."""
        logprobs, entropies, logits, ids, top_logprobs, hidden = self._core().scores(job)
        return Scores(logprobs, entropies, logits, _pair(ids, top_logprobs, len(logprobs)), hidden)

    def n_reused(self, job: int) -> int:
        """Return the number of prompt tokens whose keys and values were reused, once the prompt has started."""
        return self._core().reused(job)

    def sample(self, job: int, sample: int, start: int) -> Drawn:
        """Return the tokens of a sample so far, from ``start`` on."""
        try:
            return Drawn(*self._core().sample(job, sample, start))
        except IndexError:
            raise self._make_ended_error() from None

    def _core(self) -> Any:
        return self._calls.use(self._where)

    def step(self, job: int) -> bool:
        """Return whether a job is done; run a step if it is not."""
        try:
            return self._core().step(job)
        except IndexError:
            raise self._make_ended_error() from None

    def _make_ended_error(self) -> WhetValueError:
        return WhetValueError(f"{self._where}: the call has ended.")

    def allow(self, job: int, sample: int, tokens: np.ndarray) -> None:
        """Set the tokens that a sample of a constrained request may draw next."""
        self._core().allow(job, sample, tokens)

    def is_done(self, job: int) -> bool:
        """Return whether a job is done."""
        return self._core().is_done(job)

    def check_logits(self, job: int) -> None:
        """Raise a WhetValueError if a job ended because of invalid logits."""
        if error := self._core().error(job):
            raise WhetValueError(f"{self._where}: {error}. Check the model's weights for NaN.")


class Drawn(NamedTuple):
    """T tokens of a sample, in the core's arrays.

    Attributes:
        token_ids: (T,).
        logprobs: (T,).
        n_withheld: (T,), bytes withheld at the end of the text after each token; (0,) without ``stop``.
        top_ids: (T * n,), alternatives; -1: none.
        top_logprobs: (T * n,), log-probs of the alternatives.
        finish: current state of the sample.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    n_withheld: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    finish: Any

    def alternatives(self) -> list[list[tuple[int, float]]]:
        """Return the alternatives of each token; empty if not requested."""
        return _pair(self.top_ids, self.top_logprobs, len(self.token_ids))


class Scores(NamedTuple):
    """Results of a score request, of T tokens.

    Attributes:
        logprobs: (T,).
        entropies: (T,); (0,) if not requested.
        logits: ((T + 1) * vocab_size,); (0,) if not requested.
        alternatives: the most probable tokens at each token's place, as (token id, log-prob); empty if not requested.
        hidden: ((T + 1) * hidden_dim,), instead of all other results; (0,) if not requested.
    """

    logprobs: np.ndarray
    entropies: np.ndarray
    logits: np.ndarray
    alternatives: list[list[tuple[int, float]]]
    hidden: np.ndarray


def _pair(ids: np.ndarray, logprobs: np.ndarray, n_tokens: int) -> list[list[tuple[int, float]]]:
    """Return the alternatives of each token from flat arrays, in which -1 is none; empty without arrays."""
    if not len(ids):
        return []
    rows = zip(ids.reshape(n_tokens, -1).tolist(), logprobs.reshape(n_tokens, -1).tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[0] >= 0] for row in rows]


class Call:
    """A request whose steps the caller runs, together with the steps of other calls.

    Attributes:
        session: the call's session.
        job: number of its only request.
        texts: texts of all tokens, if there are stop strings.
        constraints: of each sample; empty: the samples are free, or ``allow`` is called for each token.
    """

    def __init__(
        self, session: Session, job: int, texts: TokenTexts | None, constraints: Sequence[Constraint] = ()
    ) -> None:
        self.session, self.job, self.texts, self.constraints = session, job, texts, constraints
        self._n_seen = [0] * len(constraints)  # tokens of each sample that its constraint has seen
        for i, constraint in enumerate(constraints):
            self.allow(i, constraint.allowed())

    def step(self) -> None:
        """Run a step of the engine, which advances every call, unless this call is complete."""
        self.constrain()
        self.session.step(self.job)

    def constrain(self) -> None:
        """Allow the next tokens of samples whose last tokens have not been constrained yet.

        Raises:
            WhetValueError: a grammar exceeds its limits.
        """
        for i, constraint in enumerate(self.constraints):
            new = self.drawn(i, self._n_seen[i])
            self._n_seen[i] += len(new.token_ids)
            if len(new.token_ids) and new.finish == "running":
                constraint.add(new.token_ids)
                self.allow(i, constraint.allowed())

    def next_drawn(self, start: int) -> Drawn:
        """Return the tokens of the only sample from ``start`` on, stepping if necessary; none past its end."""
        while True:
            drawn = self.drawn(0, start)
            if len(drawn.token_ids):
                return drawn
            if drawn.finish != "running":
                self.session.check_logits(self.job)
                return drawn
            self.step()

    def is_done(self) -> bool:
        """Return whether the call is complete.

        Raises:
            WhetValueError: its logits hold NaN or infinity.
        """
        if is_done := self.session.is_done(self.job):
            self.session.check_logits(self.job)
        return is_done

    def drawn(self, sample: int, start: int) -> Drawn:
        """Return the tokens of a sample so far, from ``start`` on."""
        return self.session.sample(self.job, sample, start)

    def allow(self, sample: int, tokens: np.ndarray) -> None:
        """Set the tokens that a constrained sample may draw next.

        Args:
            tokens: (ceil(vocab_size / 32),) int32, a bitmap: bit ``token % 32`` of number ``token // 32``.
        """
        self.session.allow(self.job, sample, tokens)

    def scores(self) -> Scores:
        """Return the results of a score request that is complete, or of a scored prompt that has been computed."""
        return self.session.scores(self.job)

    @property
    def n_reused(self) -> int:
        """Number of prompt tokens found in the prefix cache, once the prompt has started."""
        return self.session.n_reused(self.job)

    def close(self) -> None:
        """Cancel what is left of the call, and free its pages. Idempotent."""
        self.session.end()


class NewAdapter:
    """An adapter that a call adds: ``with (new := NewAdapter(calls)), new:``, like a session.

    It is removed at the end unless the call succeeded and registered it.
    """

    def __init__(self, calls: CoreHandle) -> None:
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


def run_uninterruptible(action: Callable[[], None]) -> None:
    """Run an idempotent action; if interrupted, run it again before the interrupt is raised."""
    try:
        action()
    except BaseException:
        action()
        raise


class Token(NamedTuple):
    """One token of a stream.

    Attributes:
        token_id: see ``Completion``.
        logprob: see ``Completion``.
        text: with ``SamplingParams.stop`` the new text, possibly empty; the texts add up to ``Completion.text``.
            Else None.
        top_logprobs: alternatives, see ``Completion``; None if not requested.
    """

    token_id: int
    logprob: float
    text: str | None = None
    top_logprobs: list[tuple[int, float]] | None = None


class TokenStream(Iterator[Token], AsyncIterator[Token]):
    """The tokens of one completion, from ``Engine.stream``. Errors and interrupts close the stream.

    Only one thread or task at a time may iterate; another may close the stream.

    Attributes:
        finish_reason: "running", then "stop", "length" or "cancelled".
        n_reused: prompt tokens found in the prefix cache; valid from the first token on.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._text = None if call.texts is None else TextStream(call.texts)
        self._taken = 0
        self._taking: dict[str, int] = {}  # "thread": the iterating thread; setdefault() is atomic
        self.finish_reason = "running"
        self.n_reused = 0

    def __next__(self) -> Token:
        """Return the next token.

        Raises:
            WhetValueError: another thread is iterating.
        """
        thread = threading.get_ident()
        if self._taking.setdefault("thread", thread) != thread:
            raise WhetValueError(
                "Engine.stream: another thread or task is waiting for the next token of this stream. Iterate in one "
                "thread, or open a stream for each."
            )
        try:
            return self._take()
        finally:
            self._taking.clear()

    def __reduce__(self) -> NoReturn:
        raise WhetTypeError("TokenStream: a stream cannot be copied or pickled. Collect its tokens with list(stream).")

    def _take(self) -> Token:
        if self.finish_reason != "running":
            raise StopIteration
        try:
            drawn = self._call.next_drawn(self._taken)
            if len(drawn.token_ids):
                if self._taken == 0:
                    self.n_reused = self._call.n_reused
                self._taken += 1
                return self._make_token(drawn)
            self.finish_reason = drawn.finish
            self.close()
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def _make_token(self, drawn: Drawn) -> Token:
        token_id, text = int(drawn.token_ids[0]), None
        if self._text is not None:
            is_last = len(drawn.token_ids) == 1 and drawn.finish != "running"
            text = self._text.add(token_id, int(drawn.n_withheld[0]), is_last)
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
        """Cancel the completion. Idempotent."""
        if self.finish_reason == "running":
            self.finish_reason = "cancelled"
        self._call.close()

    cancel = close

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
