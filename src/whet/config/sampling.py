"""Sampling settings and sampled completions, as engines and algorithms share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from whet.config.fields import AboveZero, BelowOne, Count, NonNegative, Positive, Range, Seed, TokenIds, check_types
from whet.errors import WhetTypeError

_Mass = Annotated[float, Range("a number in (0, 1]", lambda p: 0 < p <= 1)]

DISTRIBUTION = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The settings that change which distribution tokens are drawn from; their defaults leave it the model's."""


@dataclass(frozen=True)
class SamplingParams:
    """The distribution that tokens are drawn from, and when a completion ends.

    Filters apply in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token (greedy).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 keeps all.
        min_p: drop tokens less probable than min_p times the most probable one; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the
            sequence (Keskar et al. 2019); 1 changes nothing.
        max_new_tokens: longest completion, the stop token included.
        stop_token_ids: a completion ends with, and includes, the first of these.
        seed: completions depend only on (seed, prompt index, sample index, position); from 0 to 2^64 - 1.

    Raises:
        WhetTypeError: a value of another type than its field; integers and floats of NumPy do.
        WhetValueError: a field is out of range.
    """

    temperature: NonNegative = 1.0
    top_k: Count = 0
    top_p: _Mass = 1.0
    min_p: BelowOne = 0.0
    repetition_penalty: AboveZero = 1.0
    max_new_tokens: Positive = 128
    stop_token_ids: TokenIds = ()
    seed: Seed = 0

    @classmethod
    def of(cls, settings: Any, **others: Any) -> SamplingParams:
        """Of an object with attributes of these names, but for ``others``."""
        names = [field.name for field in dataclasses.fields(cls) if field.name not in others]
        return cls(**{name: getattr(settings, name) for name in names}, **others)

    def __post_init__(self) -> None:
        stops: Any = self.stop_token_ids
        if not isinstance(stops, Iterable) or isinstance(stops, (str, bytes)):
            raise WhetTypeError(f"SamplingParams: stop_token_ids is {stops!r}, expected a list of token ids.")
        object.__setattr__(self, "stop_token_ids", tuple(getattr(stops, "tolist", lambda: stops)()))
        check_types(self)


@dataclass
class Completion:
    """One sampled completion, without its prompt and without padding.

    Attributes:
        token_ids: the sampled tokens; the stop token, if one came, is the last.
        logprobs: per token, the log-probability under the distribution it was drawn from; None
            where the source cannot tell (a module's own ``generate``).
        finish_reason: "stop" if a stop token came, "length" if max_new_tokens ended it.
        policy_version: how many times the engine's weights had been synced when it was sampled.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: Literal["stop", "length"]
    policy_version: int = 0
