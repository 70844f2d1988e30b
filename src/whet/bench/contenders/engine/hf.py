"""Transformers' ``generate``, in float32 or bfloat16, with nothing in its generation config but lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whet.bench.case import Call, Timed
from whet.bench.contenders.engine.workload import Sample, Workload, greedy_sample, load_once


class _Watch:
    """A logits processor that changes nothing: when each step's logits were there, and those of row 0."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.logits: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.times.append(time.perf_counter())
        self.logits.append(scores[0].float().clone())
        return scores


def hf_model(workload: Workload, dtype: str) -> Any:
    """The workload's model in a dtype."""
    import copy

    import torch

    if dtype == "float32":
        return workload.model
    key = (workload.files.shape, "transformers", dtype)
    return load_once(key, lambda: copy.deepcopy(workload.model).to(getattr(torch, dtype)))


def generate(
    model: Any, prompts: Sequence[Sequence[int]], n_tokens: int, n_samples: int = 1
) -> tuple[Sample, list[float]]:
    """Run ``generate``: greedy, or sampled at temperature 1 where a prompt has several completions.

    Returns:
        The first completion, and for each of its tokens the time at which the logits that it came from were there.
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
            logits_processor=LogitsProcessorList([watch]),  # type: ignore[list-item]  # it is called, and no more
        )
    tokens = ids[0, input_ids.shape[1] :].tolist()
    if n_samples == 1:
        return greedy_sample(prompts[0], [row.numpy() for row in watch.logits]), watch.times
    every = torch.stack(watch.logits).log_softmax(-1)
    return Sample(prompts[0], tokens, every[range(len(tokens)), tokens].tolist()), watch.times


def hf_decode(dtype: str) -> Callable[[Workload], Call]:
    """``n_steps`` steps, from the first token's logits to the last one's."""

    def prepare(x: Workload) -> Call:
        model = hf_model(x, dtype)

        def call() -> Timed:
            sample, times = generate(model, x.prompts, x.n_tokens)
            return Timed(sample, {"decode": times[-1] - times[0]}, "decode")

        return call

    return prepare


def hf_prefill(dtype: str) -> Callable[[Workload], Call]:
    """Prompts, to the first token of each."""

    def prepare(x: Workload) -> Call:
        model = hf_model(x, dtype)
        return lambda: generate(model, x.fresh(), 1)[0]

    return prepare


def hf_group(dtype: str) -> Callable[[Workload], Call]:
    """A prompt and all its completions."""

    def prepare(x: Workload) -> Call:
        model = hf_model(x, dtype)
        return lambda: generate(model, x.fresh(), x.n_tokens, x.n_samples)[0]

    return prepare


def load_folder(folder: Path) -> Any:
    """The model of a folder, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def hf_load(x: Workload) -> Call:
    """``from_pretrained``; that it can generate is seen outside the time."""
    folder = x.files.folder

    def call() -> Timed:
        started = time.perf_counter()
        model = load_folder(folder)
        load_s = time.perf_counter() - started
        return Timed(generate(model, x.prompts[:1], x.n_tokens)[0], {"load": load_s}, "load")

    return call


def hf_lifetime(x: Workload) -> Call:
    """Load, generate, forget."""
    folder = x.files.folder
    return lambda: generate(load_folder(folder), x.prompts, x.n_tokens)[0]
