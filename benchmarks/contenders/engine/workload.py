"""The task of the contenders, and how an answer is judged.

An answer is one completion, the first, with the log-probs that the contender itself gave its tokens. It is judged by
the log-probs that Hugging Face's model gives these tokens in float32, in one pass over the whole sequence: a cache, a
batch or a position gone wrong shows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.contenders.engine.models import ModelFiles, ModelShape

_ON_SHELF = 4
_shelf: dict[Any, Any] = {}


@functools.lru_cache(1)
def files_of(shape: ModelShape) -> ModelFiles:
    """The model of a shape, made once; asking for another shape frees it and all that was loaded from it."""
    _shelf.clear()
    return shape.files()


def load_once(key: Any, load: Callable[[], Any]) -> Any:
    """The result of ``load``, kept under ``key`` until four others have been used since.

    It is not closed then: a call that was prepared earlier may hold it, and the last holder frees it.
    """
    if key in _shelf:
        _shelf[key] = _shelf.pop(key)
    else:
        while len(_shelf) >= _ON_SHELF:
            _shelf.pop(next(iter(_shelf)))
        _shelf[key] = load()
    return _shelf[key]


def close(model: Any) -> None:
    """Free a model that has to be told so."""
    if hasattr(model, "close"):
        model.close()


@dataclass(frozen=True)
class Workload:
    """Prompts of one length, ``n_samples`` completions of each, ``n_steps`` steps after a completion's first token."""

    files: ModelFiles
    prompts: Sequence[Sequence[int]]
    n_samples: int = 1
    n_steps: int = 32
    _calls: Any = field(default_factory=itertools.count)

    @property
    def model(self) -> Any:
        """By which answers are judged."""
        return self.files.model

    @property
    def n_tokens(self) -> int:
        """Tokens of each completion."""
        return 1 + self.n_steps

    @property
    def n_rows(self) -> int:
        """Completions in all."""
        return len(self.prompts) * self.n_samples

    @property
    def prompt_length(self) -> int:
        """Tokens of each prompt."""
        return len(self.prompts[0])

    def fresh(self) -> list[list[int]]:
        """The prompts with other first tokens, so that no prefix cache has them."""
        shift, vocab_size = 1 + next(self._calls), self.files.shape.config.vocab_size
        return [[(first + shift) % vocab_size, *rest] for first, *rest in self.prompts]


def random_workload(
    rng: np.random.Generator, shape: ModelShape, n_prompts: int, length: int, n_samples: int = 1, n_steps: int = 32
) -> Workload:
    """A workload of a shape's prompts: of random tokens, but for a model that has a text."""
    return Workload(files_of(shape), shape.prompts(rng, n_prompts, length), n_samples, n_steps)


class Sample(NamedTuple):
    """A completion, and the log-prob of each of its tokens under the model as it was run."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


def greedy_sample(prompt_ids: Sequence[int], logits: Sequence[np.ndarray]) -> Sample:
    """The completion of the tokens at which these logits, (V,) for each, are highest."""
    rows = np.asarray(logits, np.float64)
    tokens = rows.argmax(axis=1)
    top = rows.max(axis=1, keepdims=True)
    logprobs = -np.log(np.exp(rows - top).sum(axis=1))
    return Sample(prompt_ids, tokens.tolist(), logprobs.tolist())


def sample_error(answer: Sample | float, expected: Any) -> float:
    """How far a sample's log-probs are off, relative to how much log-probs differ from token to token.

    The root mean square of the differences over the standard deviation of the model's log-probs over the vocabulary:
    above 1 for a model that has nothing to do with it. Infinite for a sample of another length. A number is taken for
    the error itself.

    Args:
        answer: what a contender returned.
        expected: has ``model``, a Hugging Face model, and ``n_tokens``, the length that a completion should have.
    """
    if not isinstance(answer, Sample):
        return answer
    if len(answer.token_ids) != expected.n_tokens or len(answer.logprobs) != expected.n_tokens:
        return float("inf")
    every = scores(answer.prompt_ids, answer.token_ids, expected.model)
    right = every[np.arange(expected.n_tokens), answer.token_ids]
    differences = np.asarray(answer.logprobs, np.float64) - right
    return float(np.sqrt(np.mean(differences**2)) / every.std(axis=1, ddof=1).mean())


def scores(prompt_ids: Sequence[int], token_ids: Sequence[int], model: Any) -> np.ndarray:
    """The log-probs that a Hugging Face model gives every token at the place of each of ``token_ids``, (N, V)."""
    import torch

    ids = torch.tensor([[*prompt_ids, *token_ids]])
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=len(token_ids) + 1).logits[0, :-1]
    return logits.double().log_softmax(-1).numpy()
