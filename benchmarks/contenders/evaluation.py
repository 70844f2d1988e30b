"""Contenders of the suite "evaluation": a model from a GGUF file answers the items of a task, and answers are scored.

Prompts, stop tokens and scoring are equal. For transformers, items are sorted by length and batched with padding on the
left, which makes ``generate`` fastest. Both start from the same weights: transformers in its dtype, Whet in its format.
"""

# The task's package is an extra; without it nothing is measured.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from whet.bench.case import Call
from whet.config.sampling import SamplingParams
from whet.evaluation import Items, evaluate, read_items
from whet.evaluation.evaluate import score_completions
from whet.tasks import open_task

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Evaluation:
    """A model and items of a task, loaded lazily.

    Attributes:
        find_model: returns the path of a GGUF file with a chat template.
        task: task in the form of ``open_task``.
        n_items: number of held-out items.
        max_new_tokens: maximum tokens of a completion.
    """

    find_model: Callable[[], Path]
    task: str
    n_items: int
    max_new_tokens: int

    @cached_property
    def tokenizer(self) -> Any:
        from whet.models.tokenizers import read_tokenizer

        return read_tokenizer(self.find_model())

    @cached_property
    def items(self) -> Items:
        return read_items(open_task(self.task, split="eval", size=self.n_items), self.tokenizer)

    @property
    def sampling(self) -> SamplingParams:
        """Greedy sampling up to the model's stop tokens."""
        stops = self.tokenizer.stop_token_ids
        return SamplingParams(temperature=0, max_new_tokens=self.max_new_tokens, stop_token_ids=stops)


def whet(weights: str, x: Evaluation) -> Call:
    """Score all items by ``whet.evaluation.evaluate``."""
    from whet.engine import Engine

    engine = Engine.from_gguf(x.find_model(), weights=weights)
    return lambda: evaluate(engine, x.items, x.tokenizer, sampling=x.sampling, timeout_s=TIMEOUT_S).scores[:, 0]


def transformers(dtype: str, batch_size: int, x: Evaluation) -> Call:
    """Score all items by transformers' ``generate`` in batches."""
    import torch
    from transformers import GenerationConfig

    from whet.models.sources.gguf_model import load_gguf_model

    model, _ = load_gguf_model(x.find_model(), dtype)
    stops, prompts = list(x.sampling.stop_token_ids), x.items.prompt_ids
    config = GenerationConfig(
        do_sample=False, max_new_tokens=x.max_new_tokens, eos_token_id=stops, pad_token_id=stops[0], bos_token_id=None
    )

    def answer(rows: list[int]) -> list[str]:
        longest = max(len(prompts[i]) for i in rows)
        n_pad = [longest - len(prompts[i]) for i in rows]
        ids = torch.tensor([[stops[0]] * n + list(prompts[i]) for i, n in zip(rows, n_pad, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in n_pad])
        with torch.inference_mode():
            found: Any = model.generate(ids, attention_mask=mask, generation_config=config)
        return [x.tokenizer.decode(row, skip_special_tokens=True) for row in found[:, longest:].tolist()]

    def call() -> np.ndarray:
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        texts: list[list[str]] = [[] for _ in prompts]
        for start in range(0, len(prompts), batch_size):
            rows = by_length[start : start + batch_size]
            for i, text in zip(rows, answer(rows), strict=True):
                texts[i] = [text]
        return score_completions(x.items.task, x.items.rows, texts, TIMEOUT_S)[0][:, 0]

    return call


def share_of_other_scores(answer: np.ndarray, reference: np.ndarray) -> float:
    """Return the share of items whose scores differ; infinity if the numbers of items differ."""
    return float(np.mean(answer != reference)) if answer.shape == reference.shape else float("inf")
