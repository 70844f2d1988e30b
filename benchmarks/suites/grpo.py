"""A GRPO step compared with TRL's GRPOTrainer, by part: the same model, prompts, settings and number of tokens.

Every contender trains a model with random weights in a real shape, in a separate process. Its first step is compared
with a reference written out by hand (``benchmarks.contenders.training.workload``); later steps are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.contenders.engine.models import LLAMA_135M, QWEN2_500M
from benchmarks.contenders.training import native, trl
from benchmarks.contenders.training.contender import Contender
from benchmarks.contenders.training.workload import GRPO_BETA, GRPOShape, grpo_error
from whet.bench.case import BenchOptions, Call, Case, Provider, Suite, Table

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Tolerance of loss, gradient norm and update, by the dtype of the products."""

_NOTE = (
    "Random weights of the real shape, float32 master weights, AdamW, {kl}; a reward of negligible cost; new prompts "
    "in each step. Completions have full length, except in the row of about 64 tokens, where they end randomly, at "
    "most at 256. Peak memory is the peak of the contender's process minus libraries, weights and AdamW's moments (12 "
    "bytes per parameter): gradients, activations and copies."
)
NOTE = _NOTE.format(kl="no KL term")
KL_NOTE = _NOTE.format(kl=f"a KL term (beta = {GRPO_BETA}) with a separate reference model")
TINY = LLAMA_135M.resized(
    "tiny Llama",
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=160,
    vocab_size=512,
)


KL_STEP = GRPOShape(beta=GRPO_BETA)
QUICK_STEP = GRPOShape(TINY, n_prompts=2, group_size=4, prompt_length=16, completion_length=16)


def provider(name: str, serve: Callable[..., None], tolerance: float, **settings: Any) -> Provider:
    """Create the provider of a trainer with its own settings."""

    def prepare(shape: Any) -> Call:
        return Contender(serve, shape, settings)

    note = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return Provider(name, prepare, tolerance=tolerance, note=note)


WHET = provider("whet", native.serve_grpo, TOLERANCE["bfloat16"])
WHET_FLOAT32 = provider("whet float32", native.serve_grpo, TOLERANCE["float32"], compute="float32")


def trl_provider(name: str, serve: Callable[..., None], dtype: str, **settings: Any) -> Provider:
    """Create a provider of TRL's trainer: no gradient checkpointing by default, autocast if ``dtype`` is bfloat16."""
    settings = {"bf16": dtype == "bfloat16", "gradient_checkpointing": False, **settings}
    return provider(name, serve, TOLERANCE[dtype], **settings)


TRL = trl_provider("TRL bf16", trl.serve_grpo, "bfloat16", micro_batch=2)
"""The fastest of ``TRL_SETTINGS``, with the lowest peak memory."""
TRL_FLOAT32 = trl_provider("TRL float32", trl.serve_grpo, "float32", micro_batch=2)
TRL_ONE_BATCH = trl_provider("TRL bf16, one batch", trl.serve_grpo, "bfloat16")
TRL_SETTINGS = (
    TRL,
    trl_provider("TRL micro-batch 8", trl.serve_grpo, "bfloat16", micro_batch=8),
    trl_provider("TRL checkpointing", trl.serve_grpo, "bfloat16", micro_batch=8, gradient_checkpointing=True),
    trl_provider("TRL static cache", trl.serve_grpo, "bfloat16", micro_batch=8, cache_implementation="static"),
)


def step_case(name: str, shape: Any, size: float | None = None) -> Case:
    """Create the case of a step of this shape."""
    return Case(
        name,
        inputs=lambda rng: replace(shape, seed=int(rng.integers(2**31))),
        reference=lambda inputs: inputs,
        tolerance=TOLERANCE["bfloat16"],
        n_flops=shape.n_flops,
        flop_dtype="bfloat16",
        n_items=shape.n_tokens,
        size=size,
    )


def step_table(
    title: str,
    cases: Sequence[Case],
    providers: Sequence[Provider],
    size_label: str = "",
    note: str = NOTE,
    error: Callable[[Any, Any], float] = grpo_error,
) -> Table:
    """Create a table of steps by these contenders."""
    return Table(
        title,
        cases,
        providers,
        allocation="inside: all allocations of a step",
        note=note,
        item="tokens",
        size_label=size_label,
        error=error,
    )


def tables(options: BenchOptions) -> list[Table]:
    """Create all tables; if quick, a step of a tiny model."""
    if options.quick:
        return [step_table("A GRPO step", [step_case("2 x 4, 16 + 16", QUICK_STEP)], [WHET, TRL])]
    shape, long = GRPOShape(), GRPOShape(prompt_length=512, completion_length=64)
    usual = step_case("4 x 8, 128 + 128", shape)
    by_prompts = [step_case(f"{n} x 8, 128 + 128", replace(shape, n_prompts=n), n * 256 * 8) for n in (2, 4, 8)]
    by_group = [step_case(f"2 x {n}, 512 + 64", replace(long, n_prompts=2, group_size=n), n) for n in (4, 8, 16)]
    with_kl = step_case("4 x 8, 128 + 128", KL_STEP)
    lengths = [
        step_case("4 x 8, 128 + about 64", replace(shape, completion_length=256, mean_length=64)),
        step_case("4 x 8, 512 + 64", long),
    ]
    group = step_case("1 x 8, 128 + 128", replace(shape, n_prompts=1))
    qwen = step_case("2 x 8, 128 + 128", replace(shape, model=QWEN2_500M, n_prompts=2))
    # Two trainers per table: both stay in memory, and three would not fit into 24 GiB with TRL's peak.
    return [
        step_table("A GRPO step", [usual], [WHET, TRL_ONE_BATCH]),
        step_table("A GRPO step, TRL tuned", [usual], [WHET, TRL]),
        step_table("A GRPO step with a KL term", [with_kl], [WHET, TRL], note=KL_NOTE),
        step_table("A GRPO step by lengths", lengths, [WHET, TRL]),
        step_table("A GRPO step, TRL in float32", [usual], [WHET, TRL_FLOAT32]),
        step_table("A GRPO step in float32", [usual], [WHET, WHET_FLOAT32]),
        step_table("A GRPO step by prompts", by_prompts, [WHET], "tokens of prompts and completions"),
        step_table("A GRPO step by group size", by_group, [WHET], "completions per prompt"),
        step_table(f"A GRPO step, {QWEN2_500M.name}", [qwen], [WHET]),
        *(step_table(f"TRL's settings: {peer.name}", [group], [WHET, peer]) for peer in TRL_SETTINGS),
    ]


SUITE = Suite(
    name="grpo",
    title="A GRPO step, and TRL",
    summary="Whole steps of trainers that sample, score and update the same model, by part, with peak memory.",
    tables=tables,
)
