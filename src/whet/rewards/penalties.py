"""Penalties as reward functions: for long completions and for repetitions; and a reward that depends on the length.

Each is a class of options whose objects score token ids, such as ``--reward
whet.rewards.penalties:SoftOverlong,max_length=512,buffer=128``, or ``SoftOverlong(max_length=512, buffer=128)`` among
the reward functions. Scores of penalties are 0 or below, and are added to the rewards with their weight in
``reward_weights``; ``CosineScaled`` replaces the reward of right and wrong answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from whet.config.fields import Positive, Range, check_range, check_types
from whet.errors import WhetTypeError
from whet.rewards.functions import RewardFunctions, load_function

_Finite = Annotated[float, Range("a finite number", math.isfinite)]
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


@dataclass(frozen=True, kw_only=True)
class CosineScaled:
    """Reward of right and wrong answers that depends on their length along a cosine (Yeo et al. 2025, 2502.03373), with
    the names and defaults of open-r1's ``get_cosine_scaled_reward``.

    With the length T of a completion in tokens, p = min(1, T / max_length) and c = (1 + cos(pi p)) / 2, which falls
    from 1 to 0::

        right  min_value_correct + c (max_value_correct - min_value_correct)    the shorter the better
        wrong  max_value_wrong + c (min_value_wrong - max_value_wrong)          the longer the better

    Departures from open-r1: T counts tokens, not characters, and beyond max_length the reward stays, where the cosine
    would rise again. A completion that ``correct`` does not score has no reward.
    """

    correct: Callable | str
    """Reward function, or its name such as file.py:function, whose score is at least 1 for a right answer."""
    max_length: Positive
    """Tokens at which the reward no longer changes, usually max_new_tokens."""
    min_value_wrong: _Finite = -1.0
    """Reward of an empty wrong answer."""
    max_value_wrong: _Finite = -0.5
    """Reward of a wrong answer of max_length tokens."""
    min_value_correct: _Finite = 0.5
    """Reward of a right answer of max_length tokens."""
    max_value_correct: _Finite = 1.0
    """Limit of the reward of a right answer as its length goes to 0."""

    def __post_init__(self) -> None:
        if isinstance(self.correct, str):
            object.__setattr__(self, "correct", load_function(self.correct))
        if not callable(self.correct):
            raise WhetTypeError(
                f"CosineScaled: correct is {self.correct!r:.60}, expected a reward function, or its name such as "
                f"'file.py:function'."
            )
        check_types(self)
        for kind in ("wrong", "correct"):
            least = getattr(self, f"min_value_{kind}")
            high = f"max_value_{kind}"
            check_range(self, high, getattr(self, high) >= least, f"at least min_value_{kind}={least:g}")

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float | None]:
        scored = RewardFunctions(self.correct)(  # pyright: ignore[reportArgumentType]
            prompts=prompts, completions=completions, completion_ids=completion_ids, columns=columns
        )
        return [
            None if math.isnan(score) else self._scale(len(ids), score >= 1)
            for ids, score in zip(completion_ids, scored.rewards.tolist(), strict=True)
        ]

    def _scale(self, n_tokens: int, is_right: bool) -> float:
        share = (1 + math.cos(math.pi * min(1.0, n_tokens / self.max_length))) / 2
        if is_right:
            return self.min_value_correct + share * (self.max_value_correct - self.min_value_correct)
        return self.max_value_wrong + share * (self.min_value_wrong - self.max_value_wrong)
