"""A DPO step beside TRL's DPOTrainer: the same model, reference, pairs and settings, split into its parts.

As ``whet bench grpo`` does it: every contender in a process of its own, and its first step compared with the same step
written out by hand.
"""

from __future__ import annotations

from functools import partial

from benchmarks.contenders.training import native, trl
from benchmarks.contenders.training.workload import DPOShape, dpo_error
from benchmarks.suites.grpo import TINY, TOLERANCE, provider, step_case, step_table, trl_provider
from whet.bench.case import BenchOptions, Suite, Table

NOTE = (
    "Random weights of the true shape, float32 masters, AdamW; the reference is a model of its own, a little way off, "
    "and its log-probs are part of the step. Peak memory is that of the contender's process less its libraries, its "
    "weights and AdamW's moments (12 bytes a parameter): the reference, gradients, activations, and whatever copies it "
    "makes."
)
WHET = provider("whet", native.serve_dpo, TOLERANCE["bfloat16"])
WHET_FLOAT32 = provider("whet float32", native.serve_dpo, TOLERANCE["float32"], compute="float32")
TRL = trl_provider("TRL bf16", trl.serve_dpo, "bfloat16")
TRL_FLOAT32 = trl_provider("TRL float32", trl.serve_dpo, "float32", micro_batch=1)
TRL_SETTINGS = tuple(trl_provider(f"TRL micro-batch {n}", trl.serve_dpo, "bfloat16", micro_batch=n) for n in (4, 1))


def tables(options: BenchOptions) -> list[Table]:
    """All of it; a step of a tiny model if it has to be quick."""
    table = partial(step_table, note=NOTE, error=dpo_error)
    if options.quick:
        cases = [step_case("4 pairs, 16 + 16", DPOShape(TINY, n_pairs=4, prompt_length=16, completion_length=16))]
        return [table("A DPO step", cases, [WHET, TRL])]
    cases = [step_case("8 pairs, 256 + 128", DPOShape())]
    pairs = [step_case(f"{n} pairs, 256 + 128", DPOShape(n_pairs=n), n) for n in (4, 8, 16)]
    # Two trainers a table, as three do not fit into 24 GiB.
    return [
        table("A DPO step", cases, [WHET, TRL]),
        *(table(f"TRL's settings: {peer.name}", cases, [WHET, peer]) for peer in TRL_SETTINGS),
        table("A DPO step beside TRL in float32", cases, [WHET, TRL_FLOAT32]),
        table("A DPO step in float32", cases, [WHET, WHET_FLOAT32]),
        table("A DPO step by pairs", pairs, [WHET], "pairs"),
    ]


SUITE = Suite(
    name="dpo",
    title="A DPO step beside TRL",
    summary="Whole steps of trainers that compare a policy with a reference on the same pairs, each split into its "
    "parts, with the peak of its memory.",
    tables=tables,
)
