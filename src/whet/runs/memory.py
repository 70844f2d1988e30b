"""Memory prediction of a ``whet train`` from its settings and some rows, and settings with which it would fit."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from whet.data.rows import tokenize_example, tokenize_preference, tokenize_prompt
from whet.errors import WhetError
from whet.memory import format_bytes
from whet.models.slots import ModelSource
from whet.runs.estimate import estimate_run_memory
from whet.system.memory import available_bytes, resident_bytes
from whet.training.sizes import Lengths, RunMemory

_N_SAMPLED_ROWS = 64
"""Number of rows whose lengths are measured before the run."""
_MIN_TOKENS_PER_PASS = 256
"""Fewer tokens per pass save hardly any memory."""


def predict_memory(
    run: Any, source: ModelSource, weights: int, tokenizer: Any, rows: Sequence[Any]
) -> RunMemory | None:
    """Predict the memory of a run whose model is loaded; warn if it exceeds the available memory.

    Args:
        run: the settings.
        source: the model, without adapters.
        weights: bytes of its weights, which this process holds.
        tokenizer: of the model.
        rows: training rows, of which some are measured.

    Returns:
        The prediction; None if the system does not report memory or the run does not use Whet's kernels.
    """
    try:
        lengths = measure_lengths(run, tokenizer, rows[:_N_SAMPLED_ROWS])
        settings = {"interpreter": max(0, resident_bytes() - weights)}
        predicted = estimate_run_memory(run, source, lengths, **settings)
    except WhetError:  # the run raises it again
        return None
    available = available_bytes()
    if predicted.total > available:
        hint = suggest_settings(run, source, lengths, available, **settings)
        warnings.warn(
            f"whet train {run.method()}: the run needs about {format_bytes(predicted.total)} of memory, but only "
            f"{format_bytes(available)} are available. {hint}",
            stacklevel=2,
        )
    return predicted


def suggest_settings(run: Any, source: ModelSource, lengths: Lengths, available: int, *, interpreter: int) -> str:
    """Return advice: the first settings with which the run fits, smallest change first."""
    for change in _list_reductions(run):
        smaller = dataclasses.replace(run, **change)
        try:
            total = estimate_run_memory(smaller, source, lengths, interpreter=interpreter).total
        except WhetError:  # not supported by the model
            continue
        if total <= available:
            flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())
            return f"With {flags} it needs {format_bytes(total)}."
    return "No setting makes it fit: use a smaller model, or a machine with more memory."


def _list_reductions(run: Any) -> list[dict[str, Any]]:
    """Return changes that reduce a run's memory: first fewer tokens per pass, which do not change results."""
    n_halvings = int(math.log2(max(1, run.max_tokens_per_step / _MIN_TOKENS_PER_PASS)))
    passes = [{"max_tokens_per_step": run.max_tokens_per_step >> i} for i in range(1, n_halvings + 1)]
    if run.micro_batch_size:
        passes = [{"micro_batch_size": 1}] if run.micro_batch_size > 1 else []
    elif not run.max_tokens_per_step:
        passes = [{"max_tokens_per_step": _MIN_TOKENS_PER_PASS}]
    smallest = passes[-1] if passes else {}
    references = [{"precompute_reference": True}] if _can_precompute_reference(run) else []
    packed = [{"base": "q8_0"}] if run.base in ("auto", "float32", "bf16") and run.dtype == "float32" else []
    adapters = [{"lora_rank": 16}, {"lora_rank": 16, "base": "q8_0"}] if not run.has_adapters() else packed
    combined = [{**change, **smallest} for change in (*references, *adapters)]
    changes = [*passes, *references, *adapters, *combined]
    kept = {"activation_bytes": 0}
    return [kept, *({**kept, **change} for change in changes)]


def _can_precompute_reference(run: Any) -> bool:
    if run.has_adapters() or not run.has_reference():
        return False
    return not getattr(run, "precompute_reference", True)


def measure_lengths(run: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> Lengths:
    """Return the mean numbers of prompt and completion tokens of rows, truncated to ``max_length``."""
    longest = getattr(run, "max_length", 0) or sys.maxsize
    if run.samples:
        prompts = [len(tokenize_prompt(row, tokenizer)) for row in rows]
        completions = [run.max_new_tokens]
    elif run.is_paired:
        pairs = [tokenize_preference(row, tokenizer) for row in rows]
        prompts = [len(prompt) for prompt, _, _ in pairs]
        completions = [min(len(ids), max(0, longest - len(prompt))) for prompt, *both in pairs for ids in both]
    else:
        whole = [tokenize_example(row, tokenizer, getattr(run, "loss_on", "last_turn")) for row in rows]
        examples = [(prompt, ids, mask[: max(0, longest - len(prompt))]) for prompt, ids, mask in whole]
        completions = [sum(mask) for _, _, mask in examples]
        prompts = [len(prompt) + len(mask) - sum(mask) for prompt, _, mask in examples]
    return Lengths(*(math.ceil(sum(lengths) / len(lengths)) for lengths in (prompts, completions)))
