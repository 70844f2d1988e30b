"""Workloads of the engine suites, and the error of their answers.

An answer is the first completion with the contender's log-probs of its tokens. They are compared with the log-probs of
the Hugging Face model in float32, computed in one pass over the whole sequence, which reveals errors of caches, batches
and positions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.contenders.engine.models import ModelFiles, ModelShape

_MAX_LOADED = 4
_loaded: dict[Any, Any] = {}


@functools.lru_cache(1)
def files_of(shape: ModelShape) -> ModelFiles:
    """Create the model of a shape once; a call with another shape frees it and all models loaded from it."""
    _loaded.clear()
    return shape.files()


def load_once(key: Any, load: Callable[[], Any]) -> Any:
    """Return the result of ``load``, cached under ``key`` until four other keys have been used since.

    An evicted model is not closed, since an earlier prepared call may still use it; its last reference frees it.
    """
    if key in _loaded:
        _loaded[key] = _loaded.pop(key)
    else:
        while len(_loaded) >= _MAX_LOADED:
            _loaded.pop(next(iter(_loaded)))
        _loaded[key] = load()
    return _loaded[key]


def close(model: Any) -> None:
    """Close a model that has a ``close`` method."""
    if hasattr(model, "close"):
        model.close()


@dataclass(frozen=True)
class Workload:
    """Prompts of equal length, ``n_samples`` completions of each, ``n_steps`` steps after each first token."""

    files: ModelFiles
    prompts: Sequence[Sequence[int]]
    n_samples: int = 1
    n_steps: int = 32
    calls: Any = field(default_factory=itertools.count)

    @property
    def model(self) -> Any:
        """Model whose log-probs are the reference."""
        return self.files.model

    @property
    def n_tokens(self) -> int:
        """Number of tokens of each completion."""
        return 1 + self.n_steps

    @property
    def n_rows(self) -> int:
        """Total number of completions."""
        return len(self.prompts) * self.n_samples

    @property
    def prompt_length(self) -> int:
        """Number of tokens of each prompt."""
        return len(self.prompts[0])

    def fresh(self) -> list[list[int]]:
        """Change the prompts' first tokens, so that no prefix cache has them."""
        shift, vocab_size = 1 + next(self.calls), self.files.shape.config.vocab_size
        return [[(first + shift) % vocab_size, *rest] for first, *rest in self.prompts]


def random_workload(
    rng: np.random.Generator, shape: ModelShape, n_prompts: int, length: int, n_samples: int = 1, n_steps: int = 32
) -> Workload:
    """Create a workload from a shape's prompts: random tokens, or the model's text."""
    return Workload(files_of(shape), shape.prompts(rng, n_prompts, length), n_samples, n_steps)


class Sample(NamedTuple):
    """A completion and the contender's log-prob of each of its tokens."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


def greedy_sample(prompt_ids: Sequence[int], logits: Sequence[np.ndarray]) -> Sample:
    """Create the completion of the argmax tokens of these logits, (V,) each."""
    rows = np.asarray(logits, np.float64)
    tokens = rows.argmax(axis=1)
    top = rows.max(axis=1, keepdims=True)
    logprobs = -np.log(np.exp(rows - top).sum(axis=1))
    return Sample(prompt_ids, tokens.tolist(), logprobs.tolist())


def sample_error(answer: Sample | float, expected: Any) -> float:
    """Compute the RMS error of a sample's log-probs / the standard deviation of log-probs over the vocabulary.

    An unrelated model has an error above 1; a sample of another length, infinity. A number is returned as is.

    Args:
        answer: a contender's answer.
        expected: an object with ``model``, a Hugging Face model, and ``n_tokens``, the length of a completion.
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
    """Compute a Hugging Face model's log-probs of the vocabulary at each of ``token_ids``, (N, V)."""
    import torch

    ids = torch.tensor([[*prompt_ids, *token_ids]])
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=len(token_ids) + 1).logits[0, :-1]
    return logits.double().log_softmax(-1).numpy()
