"""The gain of faster primitives in a whole GRPO step: the shares of group advantages and token KL in the step of the
suite ``grpo``, with a KL term."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.contenders.engine.models import QWEN2_500M
from benchmarks.suites.grpo import KL_NOTE, KL_STEP, QUICK_STEP, WHET, step_case, step_table
from whet.bench.case import BenchOptions, Suite, Table

NOTE = (
    f"{KL_NOTE} Making only the primitives faster, by whatever factor, saves at most the parts advantages and kl of a "
    "step. rlox's benchmark page says of a Llama-8B-class model: generation 60-80%, backward 15-25%, forward 5-10%, "
    "advantages and KL < 0.01% each. Here the reward is one comparison per token; checking answers takes longer."
)


def tables(options: BenchOptions) -> list[Table]:
    """Steps by group size; and, unless it has to be quick, of a larger model."""
    shape = replace(QUICK_STEP, beta=KL_STEP.beta) if options.quick else KL_STEP
    lengths = f"{shape.prompt_length} + {shape.completion_length}"
    groups = [
        step_case(f"{shape.n_prompts} x {n}, {lengths}", replace(shape, group_size=n), shape.n_prompts * n)
        for n in (2, 4, 8)
    ]
    by_group = step_table("A GRPO step, by group size", groups, [WHET], "completions per step", NOTE)
    if options.quick:
        return [by_group]
    qwen = step_case(f"2 x 8, {lengths}", replace(shape, model=QWEN2_500M, n_prompts=2))
    return [by_group, step_table(f"A GRPO step, {QWEN2_500M.name}", [qwen], [WHET], note=NOTE)]


SUITE = Suite(
    name="impact",
    title="Where the time of a GRPO step goes",
    summary="Whole steps of Whet's trainer, split into their phases: what share of a step the primitives are, and what "
    "the rest is.",
    tables=tables,
)
