"""Sampling settings and sampled completions, as engines and algorithms share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple

from whet.config.fields import (
    AboveZero,
    BelowOne,
    Count,
    Penalty,
    Positive,
    Range,
    Seed,
    StopStrings,
    TemperatureOrZero,
    TokenBias,
    TokenIds,
    check_range,
    check_types,
)
from whet.errors import WhetTypeError, WhetValueError

_Mass = Annotated[float, Range("a number in (0, 1]", lambda p: 0 < p <= 1)]

_Alternatives = Annotated[int, Range("an integer from 0 to 20", lambda n: 0 <= n <= 20)]

DISTRIBUTION_SETTINGS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "min_new_tokens",
)  # fmt: skip
"""The settings that change which distribution tokens are drawn from; their defaults leave it the model's."""


@dataclass(frozen=True)
class SamplingParams:
    """The distribution that tokens are drawn from, and when a completion ends.

    A row of logits goes through these in this order: min_new_tokens, logit_bias, repetition_penalty, frequency_penalty,
    presence_penalty, temperature, top_k, top_p, min_p. With z the logit of a token, p of it in the sequence so far, the
    prompt included, and c of it in the completion::

        z = z + logit_bias;  if p > 0: z = z / repetition_penalty if z > 0 else z * repetition_penalty
        z = z - frequency_penalty c - presence_penalty [c > 0];  z = z / temperature

    The meaning of each setting is vLLM's, with these departures: min_p comes after top_k and top_p, not before; a bias
    out of range is refused, not clipped; log-probs are of the distribution drawn from unless ``logprobs_mode`` says
    otherwise; top_logprobs leaves out tokens that cannot be drawn, and does not add the one that was; the first of
    ``stop`` is the one whose last byte comes first, not that which the list has first, and the text that it is found in
    is that of the completion decoded by itself, where SentencePiece leaves out a first space.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token (greedy).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 keeps all.
        min_p: drop tokens less probable than min_p times the most probable one; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the
            sequence (Keskar et al. 2019); 1 changes nothing.
        presence_penalty: subtracted from the logits of tokens that the completion has, from -2 to 2.
        frequency_penalty: the same for each time that it has them, from -2 to 2.
        logit_bias: token id -> number added to its logit, from -100 (which all but bans it) to 100.
        min_new_tokens: no stop token, and no end of a stop string, among so many first tokens.
        max_new_tokens: longest completion, the stop token included.
        stop_token_ids: a completion ends with, and includes, the first of these.
        stop: a string or several; the text of a completion ends before the first of them, wherever its tokens begin and
            end. Of two that end with the same byte the longer one counts. Special tokens have no text; the name of one,
            such as "<|im_end|>", makes it a stop token. The engine needs a tokenizer.
        top_logprobs: how many of the most probable tokens to report with each token, from 0 to 20.
        seed: completions depend only on (seed, prompt index, sample index, position); from 0 to 2^64 - 1.

    Raises:
        WhetTypeError: a value of another type than its field; integers and floats of NumPy do.
        WhetValueError: a field is out of range.
    """

    temperature: TemperatureOrZero = 1.0
    top_k: Count = 0
    top_p: _Mass = 1.0
    min_p: BelowOne = 0.0
    repetition_penalty: AboveZero = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: TokenBias = field(default_factory=dict, hash=False)
    min_new_tokens: Count = 0
    max_new_tokens: Positive = 128
    stop_token_ids: TokenIds = ()
    stop: StopStrings = ()
    top_logprobs: _Alternatives = 0
    seed: Seed = 0

    @classmethod
    def from_settings(cls, settings: Any, **others: Any) -> SamplingParams:
        """Of an object with attributes of these names, but for ``others``; what it does not have is at its default."""
        names = [field.name for field in dataclasses.fields(cls) if field.name not in others]
        return cls(**{name: getattr(settings, name) for name in names if hasattr(settings, name)}, **others)

    def __post_init__(self) -> None:
        stops: Any = self.stop_token_ids
        if not isinstance(stops, Iterable) or isinstance(stops, (str, bytes)):
            raise WhetTypeError(f"SamplingParams: stop_token_ids is {stops!r}, expected a list of token ids.")
        object.__setattr__(self, "stop_token_ids", tuple(getattr(stops, "tolist", lambda: stops)()))
        if isinstance(self.stop, (str, list)):
            object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        check_types(self)
        at_most = f"at most max_new_tokens={self.max_new_tokens}"
        check_range(self, "min_new_tokens", self.min_new_tokens <= self.max_new_tokens, at_most)


class StreamKey(NamedTuple):
    """The random numbers that the completions of a prompt are drawn with, beside the seed.

    Completion j of n has those of (prompt_index, first_sample + j), so that a batch, or a group, may be divided among
    calls and engines, and every completion is the one that the undivided call gives.
    """

    prompt_index: int
    first_sample: int = 0


def stream_keys(keys: Sequence[StreamKey] | None, n_prompts: int, where: str) -> list[StreamKey]:
    """Keys as they were given; None: those of prompts 0, 1, 2, ...

    Raises:
        WhetValueError: not one key for each prompt, or numbers outside 0 ... 2**63 - 1.
    """
    if keys is None:
        return [StreamKey(i) for i in range(n_prompts)]
    if len(keys) != n_prompts:
        raise WhetValueError(f"{where}: keys has {len(keys)} entries, expected one for each of {n_prompts} prompts.")
    return [_checked_key(key, f"keys[{i}]", where) for i, key in enumerate(keys)]


def _checked_key(key: StreamKey, name: str, where: str) -> StreamKey:
    numbers = tuple(key) if isinstance(key, tuple) else ()
    if not 1 <= len(numbers) <= 2 or not all(isinstance(n, Integral) and 0 <= n < 2**63 for n in numbers):
        raise WhetValueError(
            f"{where}: {name} is {key!r:.80}, expected StreamKey(prompt_index, first_sample) of integers from 0 to "
            f"2**63 - 1."
        )
    return StreamKey(*map(int, numbers))


@dataclass
class Completion:
    """One sampled completion, without its prompt and without padding.

    Attributes:
        token_ids: the sampled tokens; the stop token, if one came, is the last. A stop string's are among them.
        logprobs: per token, the log-probability under the distribution it was drawn from; None
            where the source cannot tell (a module's own ``generate``).
        finish_reason: "stop" if a stop token or a stop string came, "length" if max_new_tokens ended it.
        policy_version: how many times the engine's weights had been synced when it was sampled.
        text: of ``SamplingParams.stop`` the text up to the stop string, or, where none came, of all tokens: what the
            tokenizer decodes them to, without special tokens. (Of SentencePiece's tokens of bytes only those that
            are not UTF-8 become U+FFFD; the tokenizer's ``decode`` replaces all of the run.) None without ``stop``.
        top_logprobs: per token its alternatives, (token id, log-prob), the most probable first: those that the
            distribution of ``logprobs`` gives a probability, ``SamplingParams.top_logprobs`` at most; None where that
            is 0.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: Literal["stop", "length"]
    policy_version: int = 0
    text: str | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
