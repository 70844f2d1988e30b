"""Impact of primitives on a GRPO step: shares of group advantages and token KL in the KL step of the suite ``grpo``."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.contenders.engine.models import QWEN2_500M
from benchmarks.suites.grpo import KL_NOTE, KL_STEP, QUICK_STEP, WHET, step_case, step_table
from whet.bench.case import BenchOptions, Suite, Table

NOTE = (
    f"{KL_NOTE} Faster primitives save at most the parts advantages and kl of a step. rlox's benchmark page gives for "
    "a Llama-8B-class model: generation 60-80%, backward 15-25%, forward 5-10%, advantages and KL < 0.01% each. The "
    "reward here is one comparison per token; verifying answers takes longer."
)


def tables(options: BenchOptions) -> list[Table]:
    """Create the tables of steps by group size and, unless quick, of a larger model."""
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
    title="Breakdown of a GRPO step",
    summary="Whole steps of Whet's trainer by phase: the share of the primitives and of everything else.",
    tables=tables,
)
