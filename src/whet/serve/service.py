"""Runs requests on the engine: prompts become tickets, and their updates become choices."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from whet.config.sampling import SamplingParams, StreamKey
from whet.engine.grammar import Constraint
from whet.engine.session import Call, Scores
from whet.errors import WhetError
from whet.serve.choices import Alternatives, Choice
from whet.serve.errors import ApiError
from whet.serve.inputs import render_messages
from whet.serve.limits import Limits
from whet.serve.loop import EngineLoop, Ticket, updates_of
from whet.serve.metrics import Metrics
from whet.serve.model import ServedModel
from whet.serve.schema import Request

_GROUP = 32
"""Rows of a score request that are queued at once."""


@dataclass(kw_only=True)
class Prompt:
    """A prompt of a request and its results.

    Attributes:
        token_ids: the prompt.
        text: the prompt's text, for ``echo``.
        choices: samples.
        logprobs: log-probs of the prompt's tokens, if requested; the first is None.
        alternatives: the most probable tokens in place of each prompt token, if requested.
        n_cached: prompt tokens found in the prefix cache.
        fingerprint: of the weights that sample it; "": it waits.
    """

    token_ids: list[int]
    text: str = ""
    choices: list[Choice] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    n_cached: int = 0
    fingerprint: str = ""

    @property
    def n_completion(self) -> int:
        """Number of sampled tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


class Part(NamedTuple):
    """New tokens of a choice.

    Attributes:
        prompt: the prompt of the choice.
        choice: the choice, with all its tokens so far.
        start: the first new token.
        text: the new text.
    """

    prompt: Prompt
    choice: Choice
    start: int
    text: str


class Service:
    """Requests of one model.

    Args:
        model: the served model.
        loop: steps the model's engine.
        metrics: counts completed requests.
        limits: of open requests.
    """

    def __init__(self, model: ServedModel, loop: EngineLoop, metrics: Metrics, limits: Limits) -> None:
        self.model, self._loop, self._metrics, self._limits = model, loop, metrics, limits

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle a request of an endpoint, from its arrival to its response or to the begin of a streamed one."""
        yield

    def render(self, messages: list, request: Any, tools: list) -> list[int]:
        """Return the prompt of a chat, see ``render_messages``."""
        return render_messages(self.model, messages, request, tools)

    def check_length(self, n_prompt: int, n_new: int) -> None:
        """Raise a 400 unless a prompt of ``n_prompt`` tokens has room for ``n_new`` more."""
        if n_prompt + n_new > self.model.context:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.model.context} tokens, but the request needs "
                f"{n_prompt + n_new}: {n_prompt} of the prompt and {n_new} of the completion. Shorten the prompt, or "
                f"lower max_tokens.",
                "messages",
                "context_length_exceeded",
            )

    def sampling_of(self, request: Request, max_new_tokens: int, n_alternatives: int) -> SamplingParams:
        """Return the engine's settings of a request.

        Raises:
            ApiError: 400: a setting is out of range.
        """
        settings = request.sampling_settings()
        stops = [] if request.ignore_eos else self.model.stop_ids
        settings |= {"stop_token_ids": [*stops, *request.stop_token_ids], "top_logprobs": n_alternatives}
        settings["seed"] = secrets.randbits(63) if request.seed is None else request.seed % 2**64
        settings["max_new_tokens"] = max_new_tokens
        try:
            return self.model.sampling(settings)
        except WhetError as error:
            message = str(error).partition(": ")[2].replace("_new_tokens", "_tokens")  # the names in requests
            raise ApiError(400, message, message.partition(" ")[0]) from None

    async def run(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams | None],
        *,
        n: int,
        model: str,
        n_scored: int | None = None,
        shown: Mapping[int, str] | None = None,
        constrain: Callable[[], Constraint] | None = None,
        streams: bool = False,
        key: StreamKey | None = None,
        ended: Callable[[Call], None] | None = None,
    ) -> AsyncGenerator[Part]:
        """Sample prompts, and yield what is added to their choices.

        Args:
            prompts: receive the results.
            sampling: settings of each prompt; None: nothing is sampled, and its choices are empty.
            n: choices per prompt.
            model: name of the model or adapter.
            n_scored: alternatives per prompt token; a prompt is scored before its first part. None: it is not.
            shown: texts of the special tokens that appear in choices, by id; other special tokens are dropped.
            constrain: creates the constraint of a choice; None: choices are unconstrained.
            streams: whether parts are yielded as they are sampled; otherwise each choice is one part.
            key: of the random numbers, see ``Engine.open_prompt``.
            ended: see ``Ticket``.

        Raises:
            ApiError: 429: the queue is full; 400: the engine refuses a prompt.
        """
        sampled: dict[Ticket, Prompt] = {}
        scored: dict[Ticket, Prompt] = {}
        for i, (prompt, settings) in enumerate(zip(prompts, sampling, strict=True)):
            if settings is None:
                prompt.choices = [Choice(self.model, i * n + j) for j in range(n)]
                if n_scored is not None:
                    open_score = self.model.engine.open_score
                    begin = partial(self._open, open_score, model, prompt.token_ids, top_logprobs=n_scored, keep=True)
                    scored[Ticket(begin, 0, is_scored=True)] = prompt
            else:
                begin = partial(
                    self._open_prompt, prompt, self.model.engine.open_prompt, model, prompt.token_ids, n, settings,
                    logprobs_mode=self.model.logprobs_mode, keep=True, constrain=constrain, prompt_logprobs=n_scored,
                    key=key,
                )  # fmt: skip
                sampled[Ticket(begin, n, streams, is_scored=n_scored is not None, ended=ended)] = prompt
                prompt.choices = [Choice(self.model, i * n + j, settings.stop_token_ids, shown) for j in range(n)]
        tickets, scores = list(sampled), list(scored)
        with self._queue(scores, tickets):
            async for ticket, update in updates_of(scores):
                _set_scores(scored[ticket], update.scores)
                scored[ticket].n_cached = update.n_cached
            for prompt, settings in zip(prompts, sampling, strict=True):
                for choice in prompt.choices if settings is None else ():
                    choice.finish = "length"
                    yield Part(prompt, choice, 0, "")
            async for ticket, update in updates_of(tickets):
                prompt = sampled[ticket]
                prompt.n_cached = update.n_cached
                if update.scores is not None:
                    _set_scores(prompt, update.scores)
                self._metrics.add_tokens(sum(len(drawn.token_ids) for drawn in update.drawn.values()))
                for j, drawn in update.drawn.items():
                    choice = prompt.choices[j]
                    start = len(choice.token_ids)
                    text = choice.add(drawn)
                    yield Part(prompt, choice, start, text)
                if update.is_last:
                    reasons = [choice.finish for choice in prompt.choices]
                    self._metrics.end(ticket, len(prompt.token_ids), prompt.n_cached, prompt.n_completion, reasons)

    async def score(
        self, begin: Callable[..., Call], model: str, rows: Sequence[list[int]], **settings: Any
    ) -> list[Scores]:
        """Return the scores of token ids, such as log-probs.

        Args:
            begin: ``open_score`` or ``open_embed`` of the engine.
            model: name of the model or adapter.
            rows: token ids; many rows are queued in groups, so that they leave room for others.
            settings: of ``begin``.

        Raises:
            ApiError: as ``run``.
        """
        found: list[Scores] = []
        n_group = min(_GROUP, self._limits.max_requests, self._limits.max_requests_per_key or _GROUP)
        for first in range(0, len(rows), n_group):
            group = rows[first : first + n_group]
            opens = [partial(self._open, begin, model, row, **settings) for row in group]
            tickets = {Ticket(open_call, 0, is_scored=True): i for i, open_call in enumerate(opens)}
            scores: dict[int, Scores] = {}
            with self._queue(list(tickets)):
                async for ticket, update in updates_of(list(tickets)):
                    assert update.scores is not None, "a score request ends with its scores"
                    scores[tickets[ticket]] = update.scores
                    self._metrics.end(ticket, len(group[tickets[ticket]]), update.n_cached, 0, [])
            found += [scores[i] for i in range(len(group))]
        return found

    @contextmanager
    def _queue(self, *groups: Sequence[Ticket]) -> Iterator[None]:
        """Queue tickets until the block ends; the tickets of a group share their updates."""
        tickets = [ticket for group in groups for ticket in group]
        for group in groups:
            for ticket in group:
                ticket.updates = group[0].updates
        with self._limits.hold(tickets):
            for ticket in tickets:
                self._loop.submit(ticket)
            try:
                yield
            except WhetError as error:
                raise ApiError(400, str(error)) from None
            finally:
                for ticket in tickets:
                    self._loop.release(ticket)

    def _open_prompt(self, prompt: Prompt, *args: Any, **settings: Any) -> Call:
        prompt.fingerprint = self.model.fingerprint
        return self._open(*args, **settings)

    def _open(self, begin: Callable[..., Call], model: str, *args: Any, **settings: Any) -> Call:
        """Begin a call with the adapter that has the name now: it may have been unloaded while the request waited."""
        return begin(*args, adapter=self.model.adapter_of(model), **settings)


def _set_scores(prompt: Prompt, scores: Scores | None) -> None:
    assert scores is not None, "a score request ends with its scores"
    prompt.logprobs = [None, *scores.logprobs.tolist()]
    prompt.alternatives = [(), *scores.alternatives] if scores.alternatives else []
