"""A DPO step compared with TRL's DPOTrainer, by part: the same model, reference, pairs and settings.

As in ``whet bench grpo``, every contender runs in a separate process, and its first step is compared with a reference
written out by hand.
"""

from __future__ import annotations

from functools import partial

from benchmarks.contenders.training import native, trl
from benchmarks.contenders.training.workload import DPOShape, dpo_error
from benchmarks.suites.grpo import TINY, TOLERANCE, provider, step_case, step_table, trl_provider
from whet.bench.case import BenchOptions, Suite, Table

NOTE = (
    "Random weights of the real shape, float32 master weights, AdamW; the reference is a separate model with slightly "
    "different weights, and its log-probs are part of the step. Peak memory is the peak of the contender's process "
    "minus libraries, weights and AdamW's moments (12 bytes per parameter): reference, gradients, activations, copies."
)
WHET = provider("whet", native.serve_dpo, TOLERANCE["bfloat16"])
WHET_FLOAT32 = provider("whet float32", native.serve_dpo, TOLERANCE["float32"], compute="float32")
TRL = trl_provider("TRL bf16", trl.serve_dpo, "bfloat16")
TRL_FLOAT32 = trl_provider("TRL float32", trl.serve_dpo, "float32", micro_batch=1)
TRL_SETTINGS = tuple(trl_provider(f"TRL micro-batch {n}", trl.serve_dpo, "bfloat16", micro_batch=n) for n in (4, 1))


def tables(options: BenchOptions) -> list[Table]:
    """Create all tables; if quick, a step of a tiny model."""
    table = partial(step_table, note=NOTE, error=dpo_error)
    if options.quick:
        cases = [step_case("4 pairs, 16 + 16", DPOShape(TINY, n_pairs=4, prompt_length=16, completion_length=16))]
        return [table("A DPO step", cases, [WHET, TRL])]
    cases = [step_case("8 pairs, 256 + 128", DPOShape())]
    pairs = [step_case(f"{n} pairs, 256 + 128", DPOShape(n_pairs=n), n) for n in (4, 8, 16)]
    # Two trainers per table, since three do not fit into 24 GiB.
    return [
        table("A DPO step", cases, [WHET, TRL]),
        *(table(f"TRL's settings: {peer.name}", cases, [WHET, peer]) for peer in TRL_SETTINGS),
        table("A DPO step, TRL in float32", cases, [WHET, TRL_FLOAT32]),
        table("A DPO step in float32", cases, [WHET, WHET_FLOAT32]),
        table("A DPO step by pairs", pairs, [WHET], "pairs"),
    ]


SUITE = Suite(
    name="dpo",
    title="A DPO step, and TRL",
    summary="Whole steps of trainers with a policy and a reference on the same pairs, by part, with peak memory.",
    tables=tables,
)
