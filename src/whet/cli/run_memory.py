"""The memory of a ``whet train`` before it starts: from its settings and some of its rows, and what would fit."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from whet.cli.estimate import in_bytes, memory_of
from whet.config.settings import DPOConfig, OnlineConfig, PreferenceConfig
from whet.data.rows import tokenize_example, tokenize_preference, tokenize_prompt
from whet.errors import WhetError
from whet.memory import available_bytes, resident_bytes
from whet.models.slots import ModelSource
from whet.models.sources.live import open_module
from whet.nn.frozen import base_of
from whet.training.sizes import Lengths, RunMemory

_LOOKED_AT = 64
"""Rows whose lengths are known before the run."""
_SMALLEST_PASS = 256
"""Tokens of a pass below which fewer save hardly any memory."""


def predict_memory(method: str, run: Any, model: nn.Module, tokenizer: Any, rows: Sequence[Any]) -> RunMemory | None:
    """The memory of a run whose model is loaded, without its adapters; warns where the process may not have so much.

    None: nothing is known of it, as the system is not Linux, or Whet's kernels do not compute it.
    """
    base = base_of(model)
    weights = sum(parameter.nbytes for parameter in model.parameters()) + (0 if base is None else base.nbytes)
    try:
        if sys.platform != "linux" or any(parameter.dtype != torch.float32 for parameter in model.parameters()):
            return None
        source, lengths = open_module(model), mean_lengths(run, tokenizer, rows[:_LOOKED_AT])
        settings = {"interpreter": max(0, resident_bytes() - weights)}
        predicted = memory_of(run, source, lengths, **settings)
    except WhetError:  # the run says itself what is wrong with it
        return None
    available = available_bytes()
    if predicted.total > available:
        hint = fitting_settings(run, source, lengths, available, **settings)
        warnings.warn(
            f"whet train {method}: the run comes to hold about {in_bytes(predicted.total)}, and "
            f"{in_bytes(available)} are there for it. {hint}",
            stacklevel=2,
        )
    return predicted


def fitting_settings(run: Any, source: ModelSource, lengths: Lengths, available: int, *, interpreter: int) -> str:
    """Advice: the first settings with which the run fits, from those that change the least."""
    for change in _smaller_runs(run):
        smaller = dataclasses.replace(run, **change)
        try:
            total = memory_of(smaller, source, lengths, interpreter=interpreter).total
        except WhetError:  # the model does not take it
            continue
        if total <= available:
            flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())
            return f"With {flags} it is {in_bytes(total)}."
    return "No setting makes it fit: take a smaller model, or a machine with more memory."


def _smaller_runs(run: Any) -> list[dict[str, Any]]:
    """Changes of a run that make it smaller: tokens of a pass first, which change no result."""
    n_halvings = int(math.log2(max(1, run.max_tokens_per_step / _SMALLEST_PASS)))
    passes = [{"max_tokens_per_step": run.max_tokens_per_step >> i} for i in range(1, n_halvings + 1)]
    if run.micro_batch_size:
        passes = [{"micro_batch_size": 1}] if run.micro_batch_size > 1 else []
    elif not run.max_tokens_per_step:
        passes = [{"max_tokens_per_step": _SMALLEST_PASS}]
    smallest = passes[-1] if passes else {}
    references = [{"precompute_reference": True}] if _may_precompute(run) else []
    packed = [{"base": "q8_0"}] if run.base in ("auto", "float32", "bf16") and run.dtype == "float32" else []
    adapters = [{"lora_rank": 16}, {"lora_rank": 16, "base": "q8_0"}] if not run.has_adapters() else packed
    together = [{**change, **smallest} for change in (*references, *adapters)]
    return [*passes, *references, *adapters, *together]


def _may_precompute(run: Any) -> bool:
    if run.has_adapters() or not run.has_reference():
        return False
    return isinstance(run, DPOConfig) and not run.precompute_reference


def mean_lengths(run: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> Lengths:
    """Tokens of prompts and completions, the mean of some rows; of long ones up to ``max_length``."""
    longest = getattr(run, "max_length", 0) or sys.maxsize
    if isinstance(run, OnlineConfig):
        prompts = [len(tokenize_prompt(row, tokenizer)) for row in rows]
        completions = [run.max_new_tokens]
    elif isinstance(run, PreferenceConfig):
        pairs = [tokenize_preference(row, tokenizer) for row in rows]
        prompts = [len(prompt) for prompt, _, _ in pairs]
        completions = [min(len(ids), max(0, longest - len(prompt))) for prompt, *both in pairs for ids in both]
    else:
        whole = [tokenize_example(row, tokenizer, run.loss_on) for row in rows]
        examples = [(prompt, ids, mask[: max(0, longest - len(prompt))]) for prompt, ids, mask in whole]
        completions = [sum(mask) for _, _, mask in examples]
        prompts = [len(prompt) + len(mask) - sum(mask) for prompt, _, mask in examples]
    return Lengths(*(math.ceil(sum(lengths) / len(lengths)) for lengths in (prompts, completions)))
