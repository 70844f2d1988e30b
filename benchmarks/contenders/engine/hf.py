"""Transformers' ``generate``, in float32 or bfloat16, with only lengths in its generation config."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders.engine.library import Library
from benchmarks.contenders.engine.models import ModelFiles
from benchmarks.contenders.engine.workload import Sample, Workload, greedy_sample
from whet.bench.case import Call, Timed


class _Watch:
    """A no-op logits processor that records the time of each step and the logits of row 0."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.logits: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.times.append(time.perf_counter())
        self.logits.append(scores[0].float().clone())
        return scores


def generate_watched(
    model: Any, prompts: Sequence[Sequence[int]], n_tokens: int, n_samples: int = 1
) -> tuple[Sample, list[float]]:
    """Run ``generate``: greedy, or sampled at temperature 1 if a prompt has several completions.

    Returns:
        The first completion, and for each of its tokens the time at which its logits were available.
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList

    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if n_samples > 1 else {}
    config = GenerationConfig(
        **sampling,
        max_new_tokens=n_tokens,
        min_new_tokens=n_tokens,
        num_return_sequences=n_samples,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    watch, input_ids = _Watch(), torch.tensor(prompts)
    with torch.inference_mode():
        ids = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            logits_processor=LogitsProcessorList([watch]),  # type: ignore[list-item]  # any callable works
        )
    tokens = ids[0, input_ids.shape[1] :].tolist()
    if n_samples == 1:
        return greedy_sample(prompts[0], [row.numpy() for row in watch.logits]), watch.times
    every = torch.stack(watch.logits).log_softmax(-1)
    return Sample(prompts[0], tokens, every[range(len(tokens)), tokens].tolist()), watch.times


class Transformers(Library):
    """Transformers: in float32 the workload's model itself, in bfloat16 a copy."""

    name = "transformers"

    def of_model(self, files: ModelFiles, weights: str) -> Any:
        import copy

        import torch

        return files.model if weights == "float32" else copy.deepcopy(files.model).to(getattr(torch, weights))

    def load(self, path: Path, weights: str) -> Any:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, weights)).eval()

    def generate(self, model: Any, prompts: Sequence[Sequence[int]], n_tokens: int, n_samples: int = 1) -> Sample:
        return generate_watched(model, prompts, n_tokens, n_samples)[0]

    def decode(self, weights: str, x: Workload) -> Call:
        """Time the steps from the first token's logits to the last token's logits."""
        model = self.model(x, weights)

        def call() -> Timed:
            sample, times = generate_watched(model, x.prompts, x.n_tokens)
            return Timed(sample, {"decode": times[-1] - times[0]}, "decode")

        return call
