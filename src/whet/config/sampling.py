"""Sampling settings and sampled completions, shared by engines and algorithms."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

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
    reject_ineffective,
)
from whet.config.kept_tokens import KeptTokens
from whet.errors import WhetTypeError, WhetValueError

_Mass = Annotated[float, Range("a number in (0, 1]", lambda p: 0 < p <= 1)]

_Alternatives = Annotated[int, Range("an integer from 0 to 20", lambda n: 0 <= n <= 20)]

ENGINE_MAX_NEW_TOKENS, TEXT_MAX_NEW_TOKENS, ROLLOUT_MAX_NEW_TOKENS, CHAT_MAX_NEW_TOKENS = 128, 256, 512, 1024
"""Defaults of ``max_new_tokens``: calls of an engine, ``whet generate`` and ``eval``, rollouts, ``whet chat``."""

DISTRIBUTION_SETTINGS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "min_new_tokens",
)  # fmt: skip
"""Settings that modify the distribution that tokens are drawn from; their defaults are no-ops."""

GRAMMAR_SETTINGS = ("schema", "regex", "lark")
"""Settings that constrain the text of a completion; at most one is set."""


@dataclass(frozen=True)
class SamplingParams:
    """The distribution that tokens are drawn from, and the end of a completion.

    Logits are processed in this order: min_new_tokens, logit_bias, repetition_penalty, frequency_penalty,
    presence_penalty, temperature, top_k, top_p, min_p. With z the logit of a token, p its count in the sequence so far
    (prompt included) and c its count in the completion:

        z = z + logit_bias;  if p > 0: z = z / repetition_penalty if z > 0 else z * repetition_penalty
        z = z - frequency_penalty c - presence_penalty [c > 0];  z = z / temperature

    Settings follow vLLM, with these differences: min_p applies after top_k and top_p, not before; a bias out of range
    is rejected, not clipped; log-probs are of the modified distribution unless ``logprobs_mode`` is set; top_logprobs
    excludes tokens of probability 0 and does not add the sampled token; of several stop strings in a text, the string
    whose last byte occurs first ends it, not the first of the list; and stop strings are searched in the completion
    decoded separately from its prompt, where SentencePiece drops a leading space.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token (greedy).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 keeps all.
        min_p: drop tokens less probable than min_p times the maximum probability; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens already in the
            sequence (Keskar et al. 2019); 1: no penalty.
        presence_penalty: subtracted from the logits of tokens in the completion, from -2 to 2.
        frequency_penalty: subtracted from a token's logit per occurrence in the completion, from -2 to 2.
        logit_bias: token id -> number added to its logit, from -100 (which practically bans the token) to 100.
        min_new_tokens: neither a stop token nor the end of a stop string among this many first tokens.
        max_new_tokens: maximum length of a completion, including the stop token.
        stop_token_ids: a completion ends with, and includes, the first of these tokens.
        stop: a string or several; the text of a completion ends before the first match, regardless of token boundaries.
            If two matches end with the same byte, the longer one counts. Special tokens have no text; the name of a
            special token, such as "<|im_end|>", makes it a stop token. The engine needs a tokenizer.
        schema: a JSON schema, as a dict: the text of a completion is JSON that follows it. Grammars need the extra
            ``serve`` (llguidance), a tokenizer, and stop_token_ids, which are drawn only where the text may end. Only
            the native engine follows grammars.
        regex: a regular expression that matches the text of a completion.
        lark: a grammar of the text in llguidance's dialect of Lark.
        grammar_after: text of the completion behind which the grammar begins, such as "</think>" if the prompt opens
            the thinking; empty: it begins at once.
        top_logprobs: number of most probable tokens to report with each token, from 0 to 20.
        kept_tokens: report the tokens that bans, grammar and filters left to draw each token from.
        experts: report the experts of each token of a mixture, prompts included. Only the native engine does.
        seed: completions depend only on (seed, prompt index, sample index, position); from 0 to 2^64 - 1.

    Raises:
        WhetTypeError: a value has the wrong type; NumPy integers and floats are accepted.
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
    max_new_tokens: Positive = ENGINE_MAX_NEW_TOKENS
    stop_token_ids: TokenIds = ()
    stop: StopStrings = ()
    schema: dict | bool | None = field(default=None, hash=False)
    regex: str = ""
    lark: str = ""
    grammar_after: str = ""
    top_logprobs: _Alternatives = 0
    kept_tokens: bool = False
    experts: bool = False
    seed: Seed = 0

    @classmethod
    def from_settings(cls, settings: Any, **others: Any) -> SamplingParams:
        """Build from any object with attributes of these names, except those in ``others``; default: the field's."""
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
        chosen = self.grammar_settings()
        if len(chosen) > 1:
            raise WhetValueError(f"SamplingParams: {' and '.join(chosen)} are set, expected at most one of them.")
        no_grammar = f"none of {', '.join(GRAMMAR_SETTINGS)} is set"
        reject_ineffective(self, ["grammar_after"], bool(chosen), no_grammar)

    def grammar_settings(self) -> list[str]:
        """Return the names of the settings that constrain the text."""
        return [name for name in GRAMMAR_SETTINGS if getattr(self, name) not in (None, "")]

    def penalties(self) -> list[str]:
        """Return the names of the penalties that are set."""
        none = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return [name for name, value in none.items() if getattr(self, name) != value]

    def drops_tokens(self) -> bool:
        """Whether the settings exclude tokens: by bans, a grammar or filters."""
        drops = self.min_new_tokens > 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return drops or bool(self.grammar_settings())


@dataclass(kw_only=True)
class SamplingSettings:
    """Settings of ``SamplingParams`` that configs of algorithms and commands share, with the same meaning."""

    max_new_tokens: int = ENGINE_MAX_NEW_TOKENS
    temperature: float = SamplingParams.temperature
    top_k: int = SamplingParams.top_k
    top_p: float = SamplingParams.top_p
    min_p: float = SamplingParams.min_p
    repetition_penalty: float = SamplingParams.repetition_penalty
    presence_penalty: Penalty = SamplingParams.presence_penalty
    frequency_penalty: Penalty = SamplingParams.frequency_penalty
    logit_bias: TokenBias = field(default_factory=dict)
    min_new_tokens: Count = SamplingParams.min_new_tokens
    stop: StopStrings = ()
    seed: Seed = 0


# Flags take their help texts from docstrings of the class and its bases.
SamplingSettings.__doc__ = re.sub(
    r"^( +\w+: )(\w)", lambda entry: entry[1] + entry[2].upper(), SamplingParams.__doc__ or "", flags=re.MULTILINE
)


class StreamKey(NamedTuple):
    """Key of the random numbers of a prompt's completions, in addition to the seed.

    Completion j of n is drawn with the key (prompt_index, first_sample + j), so that splitting a batch or a group among
    calls and engines does not change any completion.
    """

    prompt_index: int
    first_sample: int = 0


def stream_keys(keys: Sequence[StreamKey] | None, n_prompts: int, where: str) -> list[StreamKey]:
    """Validate ``keys``; None: the keys of prompts 0, 1, 2, ...

    Raises:
        WhetValueError: the number of keys is not ``n_prompts``, or a number is outside 0 ... 2**63 - 1.
    """
    if keys is None:
        return [StreamKey(i) for i in range(n_prompts)]
    if len(keys) != n_prompts:
        raise WhetValueError(f"{where}: keys has {len(keys)} entries, expected one for each of {n_prompts} prompts.")
    return [_check_key(key, f"keys[{i}]", where) for i, key in enumerate(keys)]


def _check_key(key: StreamKey, name: str, where: str) -> StreamKey:
    numbers = tuple(key) if isinstance(key, tuple) else ()
    if not 1 <= len(numbers) <= 2 or not all(isinstance(n, Integral) and 0 <= n < 2**63 for n in numbers):
        raise WhetValueError(
            f"{where}: {name} is {key!r:.80}, expected StreamKey(prompt_index, first_sample) of integers from 0 to "
            f"2**63 - 1."
        )
    return StreamKey(*map(int, numbers))


@dataclass
class Completion:
    """One sampled completion, without its prompt and without padding; or an episode, the turns of a model and what it
    read between them.

    Attributes:
        token_ids: the sampled tokens, including a final stop token and the tokens of a stop string.
        logprobs: per token, the log-probability under the distribution it was drawn from, 0 if it was not sampled; None
            if the source does not provide them (a module's own ``generate``).
        finish_reason: "stop" after a stop token or a stop string, "length" after max_new_tokens.
        policy_version: number of weight syncs of the engine before it was sampled; with ``async_lag``, number of steps
            of the weights that sampled it, or its last tokens.
        text: with ``SamplingParams.stop``, the decoded text up to the stop string, or all of it, without special
            tokens; else None. (In runs of SentencePiece byte tokens only bytes that are not UTF-8 become U+FFFD; the
            tokenizer's ``decode`` replaces the whole run.)
        top_logprobs: per token, its alternatives as (token id, log-prob), most probable first: at most
            ``SamplingParams.top_logprobs`` tokens of nonzero probability in the distribution of ``logprobs``; None if
            that setting is 0.
        kept_tokens: per token, the tokens that it was drawn from; None unless ``SamplingParams.kept_tokens`` is set, or
            if the source does not provide them.
        experts: with ``SamplingParams.experts``, the experts of the tokens of prompt and completion except the last,
            which is not computed: (tokens, mixture layers, experts of a token) uint16, the most probable first. Else
            None.
        sampled: per token, whether the model sampled it; None: it sampled all. Others, of an environment and of the
            chat template between turns, are context: only ``echo_alpha`` trains some of them.
        answered: per token, whether it holds content of a message between turns; None: unknown, or there is none.
        policy_versions: per token, the version that sampled it, if there were several; None: ``policy_version``.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: Literal["stop", "length"]
    policy_version: int = 0
    text: str | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    kept_tokens: KeptTokens | None = None
    experts: np.ndarray | None = field(default=None, compare=False)
    sampled: list[bool] | None = None
    answered: list[bool] | None = None
    policy_versions: list[int] | None = None

    @property
    def n_sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids) if self.sampled is None else sum(self.sampled)
