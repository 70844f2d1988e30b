"""Runs requests on the engine: prompts become tickets, and their updates become choices."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from whet.config.sampling import SamplingParams
from whet.engine.session import Scores
from whet.errors import WhetError
from whet.serve.choices import Alternatives, Choice
from whet.serve.errors import ApiError
from whet.serve.loop import EngineLoop, Ticket, updates_of
from whet.serve.metrics import Metrics
from whet.serve.model import ServedModel
from whet.serve.schema import Request
from whet.text.grammar import Constraint


@dataclass(kw_only=True)
class Prompt:
    """A prompt of a request and its results.

    Attributes:
        token_ids: the prompt.
        text: of the prompt, for ``echo``.
        choices: samples.
        logprobs: of the prompt's tokens, if they were asked for; the first is None.
        alternatives: the most probable tokens at the place of each prompt token, if they were asked for.
        n_cached: prompt tokens found in the prefix cache.
    """

    token_ids: list[int]
    text: str = ""
    choices: list[Choice] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    n_cached: int = 0

    @property
    def n_completion(self) -> int:
        """Number of sampled tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


class Part(NamedTuple):
    """New tokens of a choice.

    Attributes:
        prompt: the prompt of the choice.
        choice: with all tokens so far.
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
        loop: steps its engine.
        metrics: counts complete requests.
    """

    def __init__(self, model: ServedModel, loop: EngineLoop, metrics: Metrics) -> None:
        self.model, self._loop, self._metrics = model, loop, metrics

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
    ) -> AsyncGenerator[Part]:
        """Sample prompts, and yield what is added to their choices.

        Args:
            prompts: receive the results.
            sampling: of each prompt; None: nothing is sampled, and its choices are empty.
            n: choices per prompt.
            model: name of the model or adapter.
            n_scored: alternatives of each prompt token whose log-probs are computed, before the first part; None: no
                log-probs of prompts.
            shown: special token -> its text in the choices; others have none.
            constrain: makes the constraint of a choice; None: there is none.
            streams: whether parts are yielded as they are sampled; otherwise there is one per choice.

        Raises:
            ApiError: 429: the queue is full; 400: the engine refuses a prompt.
        """
        adapter = self.model.adapter_of(model)
        sampled: dict[Ticket, Prompt] = {}
        scored: dict[Ticket, Prompt] = {}
        for i, (prompt, settings) in enumerate(zip(prompts, sampling, strict=True)):
            if settings is None:
                prompt.choices = [Choice(self.model, i * n + j) for j in range(n)]
            else:
                begin = partial(
                    self.model.engine.open_prompt, prompt.token_ids, n, settings, adapter=adapter,
                    logprobs_mode="model", keep=True, constrained=constrain is not None,
                )  # fmt: skip
                sampled[Ticket(begin, n, streams, constrain)] = prompt
                prompt.choices = [Choice(self.model, i * n + j, settings.stop_token_ids, shown) for j in range(n)]
        for prompt in () if n_scored is None else prompts:
            begin = partial(
                self.model.engine.open_score, prompt.token_ids, top_logprobs=n_scored or 0, adapter=adapter
            )  # fmt: skip
            scored[Ticket(begin, 0)] = prompt
        tickets, scores = list(sampled), list(scored)
        for group in (tickets, scores):
            for ticket in group:
                ticket.updates = group[0].updates
        if self._loop.n_open + len(tickets) + len(scores) > self._loop.max_tickets:
            raise ApiError(
                429, f"The queue is full: {self._loop.n_open} requests are open. Try again.", None, "queue_full"
            )
        for ticket in (*scores, *tickets):
            self._loop.submit(ticket)
        try:
            async for ticket, update in updates_of(scores):
                _set_scores(scored[ticket], update.scores)
            for prompt, settings in zip(prompts, sampling, strict=True):
                for choice in prompt.choices if settings is None else ():
                    choice.finish = "length"
                    yield Part(prompt, choice, 0, "")
            async for ticket, update in updates_of(tickets):
                prompt = sampled[ticket]
                prompt.n_cached = update.n_cached
                for j, drawn in update.drawn.items():
                    choice = prompt.choices[j]
                    start = len(choice.token_ids)
                    text = choice.add(drawn)
                    yield Part(prompt, choice, start, text)
                if update.is_last:
                    reasons = [choice.finish for choice in prompt.choices]
                    self._metrics.end(ticket, len(prompt.token_ids), prompt.n_cached, prompt.n_completion, reasons)
        except WhetError as error:
            raise ApiError(400, str(error)) from None
        finally:
            for ticket in (*scores, *tickets):
                self._loop.release(ticket)


def _set_scores(prompt: Prompt, scores: Scores | None) -> None:
    assert scores is not None, "a score request ends with its scores"
    prompt.logprobs = [None, *scores.logprobs.tolist()]
    prompt.alternatives = [(), *scores.alternatives] if scores.alternatives else []
