"""Penalties as reward functions: for long completions and for repetitions.

Each is a class of options whose objects score token ids, such as ``--reward
whet.rewards.penalties:SoftOverlong,max_length=512,buffer=128``, or ``SoftOverlong(max_length=512, buffer=128)`` among
the reward functions. Scores are 0 or below, and are added to the rewards with their weight in ``reward_weights``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from whet.config.fields import Positive, Range, check_range, check_types

_Penalty = Annotated[float, Range("a finite number <= 0", lambda x: -float("inf") < x <= 0)]


@dataclass(frozen=True, kw_only=True)
class SoftOverlong:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), as TRL's ``get_soft_overlong_punishment``.

    With the length T of a completion in tokens, 0 up to max_length - buffer, then falling to -1 at max_length::

        0                                   T <= max_length - buffer
        (max_length - buffer - T) / buffer  max_length - buffer < T <= max_length
        -1                                  T > max_length
    """

    max_length: Positive
    """Tokens at which the score is -1, usually max_new_tokens."""
    buffer: Positive
    """Tokens before max_length over which the score falls."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "buffer", self.buffer <= self.max_length, f"at most max_length={self.max_length}")

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        start = self.max_length - self.buffer
        return [max(-1.0, min(0.0, (start - len(ids)) / self.buffer)) for ids in completion_ids]


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Penalty of repeated n-grams of tokens (Yeo et al. 2025, appendix C.2), as TRL's
    ``get_repetition_penalty_reward``: max_penalty (1 - number of distinct n-grams / number of n-grams).
    """

    ngram_size: Positive = 3
    """Tokens of an n-gram; shorter completions score 0."""
    max_penalty: _Penalty = -1.0
    """Limit of the score of a completion that repeats one n-gram."""

    def __post_init__(self) -> None:
        check_types(self)

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return list(map(self._score, completion_ids))

    def _score(self, ids: Sequence[int]) -> float:
        grams = list(zip(*(ids[i:] for i in range(self.ngram_size)), strict=False))
        return self.max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0
