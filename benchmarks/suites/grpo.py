"""A GRPO step beside TRL's GRPOTrainer: the same model, prompts, settings and number of tokens, split into its parts.

Every contender has a process of its own and trains a model of a true shape with random weights. Its first step is
compared with the same step written out by hand (``benchmarks.contenders.training.workload``); the steps after it are
timed.
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
"""Of loss, gradient norm and what moved, by the dtype of the products."""

_NOTE = (
    "Random weights of the true shape, float32 masters, AdamW, {kl}; a reward that costs nothing; prompts that nobody "
    "has seen. Completions have all their tokens; those of about 64 end by chance, at 256 at the latest. Peak memory "
    "is that of the contender's process less its libraries, its weights and AdamW's moments (12 bytes a parameter): "
    "gradients, activations, and whatever copies it makes."
)
NOTE = _NOTE.format(kl="no KL term")
KL_NOTE = _NOTE.format(kl=f"a KL term (beta = {GRPO_BETA}) whose reference is a model of its own")
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
    """A trainer with these settings of its own."""

    def prepare(shape: Any) -> Call:
        return Contender(serve, shape, settings)

    note = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return Provider(name, prepare, tolerance=tolerance, note=note)


WHET = provider("whet", native.serve_grpo, TOLERANCE["bfloat16"])
WHET_FLOAT32 = provider("whet float32", native.serve_grpo, TOLERANCE["float32"], compute="float32")


def trl_provider(name: str, serve: Callable[..., None], dtype: str, **settings: Any) -> Provider:
    """TRL's trainer: with autocast to bfloat16 or without, and no gradients recomputed unless settings say so."""
    settings = {"bf16": dtype == "bfloat16", "gradient_checkpointing": False, **settings}
    return provider(name, serve, TOLERANCE[dtype], **settings)


TRL = trl_provider("TRL bf16", trl.serve_grpo, "bfloat16", micro_batch=2)
"""The fastest of ``TRL_SETTINGS``, and the leanest."""
TRL_FLOAT32 = trl_provider("TRL float32", trl.serve_grpo, "float32", micro_batch=2)
TRL_AT_ONCE = trl_provider("TRL bf16, one batch", trl.serve_grpo, "bfloat16")
TRL_SETTINGS = (
    TRL,
    trl_provider("TRL micro-batch 8", trl.serve_grpo, "bfloat16", micro_batch=8),
    trl_provider("TRL checkpointing", trl.serve_grpo, "bfloat16", micro_batch=8, gradient_checkpointing=True),
    trl_provider("TRL static cache", trl.serve_grpo, "bfloat16", micro_batch=8, cache_implementation="static"),
)


def step_case(name: str, shape: Any, size: float | None = None) -> Case:
    """A step of this shape."""
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
    """Steps by these contenders."""
    return Table(
        title,
        cases,
        providers,
        allocation="inside: all that a step allocates",
        note=note,
        item="tokens",
        size_label=size_label,
        error=error,
    )


def tables(options: BenchOptions) -> list[Table]:
    """All of it; a step of a tiny model if it has to be quick."""
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
    # Two trainers a table: both stay in memory, and three would not fit into 24 GiB beside TRL's peak.
    return [
        step_table("A GRPO step", [usual], [WHET, TRL_AT_ONCE]),
        step_table("A GRPO step beside TRL's best", [usual], [WHET, TRL]),
        step_table("A GRPO step with a KL term", [with_kl], [WHET, TRL], note=KL_NOTE),
        step_table("A GRPO step by lengths", lengths, [WHET, TRL]),
        step_table("A GRPO step beside TRL in float32", [usual], [WHET, TRL_FLOAT32]),
        step_table("A GRPO step in float32", [usual], [WHET, WHET_FLOAT32]),
        step_table("A GRPO step by prompts", by_prompts, [WHET], "tokens of prompts and completions"),
        step_table("A GRPO step by group size", by_group, [WHET], "completions per prompt"),
        step_table(f"A GRPO step, {QWEN2_500M.name}", [qwen], [WHET]),
        *(step_table(f"TRL's settings: {peer.name}", [group], [WHET, peer]) for peer in TRL_SETTINGS),
    ]


SUITE = Suite(
    name="grpo",
    title="A GRPO step beside TRL",
    summary="Whole steps of trainers that sample, score and update the same model, each split into its parts, with the "
    "peak of its memory.",
    tables=tables,
)
