"""Log-likelihoods of given rows: by Whet's server, as lm-eval asks for them, and by transformers in batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.contenders.engine.models import ModelFiles
from benchmarks.contenders.engine.workload import load_once, scores
from benchmarks.contenders.serve.loads import file_of
from benchmarks.contenders.serve.servers import Open
from whet.bench.case import Call, Timed, seconds_of

_BATCHES = (1, 8, 32)


class Likelihoods(NamedTuple):
    """Rows of tokens and the log-probs of each row's last tokens."""

    rows: Sequence[Sequence[int]]
    logprobs: Sequence[np.ndarray]


@dataclass(frozen=True)
class Rows:
    """Rows of which the log-probs from token ``start`` on are asked for.

    Attributes:
        files: the model.
        rows: tokens, of different lengths if ``start`` is 1.
        start: the first token whose log-prob counts.
    """

    files: ModelFiles
    rows: Sequence[Sequence[int]]
    start: int = 1
    _calls: Any = field(default_factory=itertools.count)

    def fresh(self) -> list[list[int]]:
        """Change the rows' first tokens, so that no prefix cache has them; rows of one context keep it in common."""
        shift, vocab_size = 1 + next(self._calls), self.files.shape.config.vocab_size
        return [[(first + shift) % vocab_size, *rest] for first, *rest in self.rows]


def likelihood_error(answer: Likelihoods, expected: Rows) -> float:
    """Compute the RMS error of log-probs / the standard deviation of log-probs over the vocabulary.

    The reference is the model in float32, a row at a time.
    """
    squares, deviations = [], []
    for row, logprobs in zip(answer.rows, answer.logprobs, strict=True):
        every = scores(row[: expected.start], row[expected.start :], expected.files.model)
        right = every[np.arange(len(every)), row[expected.start :]]
        if len(logprobs) != len(right):
            return float("inf")
        squares.append((np.asarray(logprobs, np.float64) - right) ** 2)
        deviations.append(every.std(axis=1, ddof=1))
    return float(np.sqrt(np.concatenate(squares).mean()) / np.concatenate(deviations).mean())


def by_server(open_server: Open, x: Rows) -> Call:
    """Ask for every row in its own request, all at the same time."""
    server = open_server(file_of(x.files), len(x.rows), max(map(len, x.rows)), lambda _: 0.0)

    def call() -> Timed:
        rows = x.fresh()
        fields = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        answers, all_s = seconds_of(server.complete, [{"prompt": row, **fields} for row in rows])
        found = [
            np.array(answer.body["choices"][0]["logprobs"]["token_logprobs"][x.start : len(row)])
            for row, answer in zip(rows, answers, strict=True)
        ]
        return Timed(Likelihoods(rows, found), {"all rows": all_s}, "all rows")

    return call


def by_transformers(x: Rows) -> Call:
    """Compute log-probs in bfloat16, in batches of rows sorted by length, of the fastest size."""
    import torch

    model = load_once(
        (x.files.shape, "transformers", "bfloat16"), lambda: copy.deepcopy(x.files.model).to(torch.bfloat16)
    )
    took = {size: seconds_of(_in_batches, model, x.fresh(), x.start, size)[1] for size in _BATCHES}
    size = min(took, key=lambda size: took[size])

    def call() -> Timed:
        rows = x.fresh()
        found, all_s = seconds_of(_in_batches, model, rows, x.start, size)
        return Timed(Likelihoods(rows, found), {"all rows": all_s}, "all rows", f"batches of {size} rows")

    return call


def _in_batches(model: Any, rows: Sequence[Sequence[int]], start: int, size: int) -> list[np.ndarray]:
    import torch

    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found = [np.zeros(0)] * len(rows)
    for first in range(0, len(rows), size):
        batch = by_length[first : first + size]
        longest = len(rows[batch[-1]])
        ids = torch.tensor(
            [[*rows[i], *[0] * (longest - len(rows[i]))] for i in batch]
        )  # padding is masked by causality
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=longest - start + 1).logits[:, :-1].float()
            chosen = logits.gather(-1, ids[:, start:, None])[..., 0] - logits.logsumexp(-1)
        for i, values in zip(batch, chosen.numpy(), strict=True):
            found[i] = values[: len(rows[i]) - start]
    return found
