"""LoRA on a packed base compared with TRL and PEFT: whole runs, each in a separate process.

A sample is a step, except the first of a run. A run is correct if it did the work: the same rows, tokens and number of
trained parameters for all contenders. Tests compare gradients with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from benchmarks.contenders.engine.models import (
    LFM2_350M,
    OLMOE_4_LAYERS,
    QWEN2_500M,
    QWEN3_5_800M,
    SMOLLM2_135M,
    ModelShape,
)
from benchmarks.contenders.training import native, trl
from benchmarks.contenders.training.lora import (
    CALCULATOR,
    LONG_SUMS,
    RANK,
    Method,
    Weights,
    Work,
    is_paired,
    lora_step_flops,
    run_error,
    run_whole,
)
from benchmarks.contenders.training.workload import DPOShape, GRPOShape
from benchmarks.suites.grpo import TINY
from whet.bench.case import BenchOptions, Call, Case, Provider, Suite, Table
from whet.config.algorithms import ALGORITHMS
from whet.errors import WhetValueError
from whet.models.sizes import PRESETS

QWEN2_1500M = ModelShape("1.5 B Qwen2", {**QWEN2_500M.hf_config, **PRESETS["qwen2-1.5b"]})
NOTE = (
    f"Each row is a whole process: the median time of the steps after the first, the time from the start of the "
    f"process to its first step, and its memory peak. LoRA has rank {RANK} on all linear layers except the head; rows, "
    "order and settings are equal for all contenders. TRL and PEFT multiply in bfloat16 (autocast), except where the "
    "row is named float32, without gradient checkpointing, in micro-batches of {micro_batch}."
)
_LONG = "Random weights of the real shape, prompts of random letters; completions have full length."
_NOTES: Mapping[Method, str] = {
    "simpo": "TRL: CPOTrainer with loss_type simpo and cpo_alpha 0.",
    "kto": "Each pair is two rows.",
    "reward": "Both begin with a head of zeros.",
    "rloo": "The reward has a KL term to the model without adapters, beta 0.05.",
    "distill": "Both compute the reverse KL divergence over the whole vocabulary; the teacher has the same shape.",
}


@dataclass(frozen=True)
class LoraOptions(BenchOptions):
    """Settings of the LoRA suites."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file. Default: random weights of its shape and a byte tokenizer, and no table of
    GRPO with a tool."""
    steps: int = 5
    """Steps of a run, at least 2, since the first step does not count."""


def contender(name: str, serve: Callable[..., None], note: str = "", **settings: Any) -> Provider:
    """Create the provider of a trainer with its own settings."""

    def prepare(work: Work) -> Call:
        return partial(run_whole, serve, work, settings)

    return Provider(name, prepare, note=note)


def whet(name: str, base: str, *, is_native: bool = True, **settings: Any) -> Provider:
    """Create a provider of Whet's trainer on a base in a format; "": all weights are trained.

    Args:
        name: of the provider.
        base: format of the base.
        is_native: whether a learner trains adapters, or modules of torch.
        **settings: of the trainer.
    """
    is_native = is_native and base != ""
    notes = [f"the base is packed in {base}", "without torch" if is_native else "PEFT's modules"] if base else []
    if "activation_bytes" in settings:
        notes.append(f"activations of layers in at most {settings['activation_bytes'] / 1e9:g} GB")
    return contender(name, native.serve_lora, "; ".join(notes), base=base, is_native=is_native, **settings)


def recomputed(base: str, name: str = "whet", **settings: Any) -> Provider:
    """Create a provider of a trainer that computes every layer again in the backward pass."""
    return whet(f"{name}, recomputed", base, activation_bytes=0, **settings)


def all_weights(name: str) -> list[Provider]:
    """Create providers of trainers of all weights, from the fastest to the smallest."""
    moments = {"optimizer": "adamw_8bit"}
    return [whet(name, ""), recomputed("", name), recomputed("", f"{name}, 8-bit moments", **moments)]


def peer(name: str, base: str = "float32", note: str = "", **settings: Any) -> Provider:
    """Create a provider of TRL's trainer on PEFT adapters of a frozen model in a dtype; "": all weights are trained."""
    return contender(
        name, trl.serve_lora, note, base=base, **{"bf16": True, "gradient_checkpointing": False, **settings}
    )


def peers(micro_batch: int) -> list[Provider]:
    """Create providers of TRL and PEFT, of which the fastest depends on the CPU: bfloat16 needs its instructions."""
    return [
        peer("TRL + PEFT", micro_batch=micro_batch, note="base in float32"),
        peer("TRL + PEFT bf16 base", "bfloat16", micro_batch=micro_batch),
        peer("TRL + PEFT float32", micro_batch=micro_batch, note="products in float32", bf16=False),
    ]


def real_providers() -> list[Provider]:
    """Create all providers of the real task."""
    return [
        whet("whet", "bf16"),
        whet("whet, modules", "bf16", is_native=False),
        whet("whet float32", "float32"),
        whet("whet float32, modules", "float32", is_native=False),
        whet("whet q8_0", "q8_0"),
        whet("whet q4_k_m", "q4_k_m"),
        recomputed("bf16"),
        *(recomputed(base, f"whet {base}") for base in ("q8_0", "q4_k_m")),
        *all_weights("whet all weights"),
        *peers(16),
        peer("TRL + PEFT 4 bits", "nf4", "bitsandbytes' nf4 on the CPU, adapters in bfloat16", micro_batch=16),
        peer("TRL all weights", "", micro_batch=16),
    ]


def budgets(base: str) -> list[Provider]:
    """Create providers of a learner with more and more memory for activations: time and peak are a curve."""
    sizes = (0, 500_000_000, 1_000_000_000)
    limited = [whet(f"whet {size / 1e9:g} GB", base, activation_bytes=size) for size in sizes]
    return [whet("whet", base), *limited]


def settings_of_trl() -> list[Provider]:
    """Create providers of TRL + PEFT in settings other than the fastest."""
    return [
        whet("whet", "bf16"),
        *(peer(f"TRL + PEFT micro-batch {n}", micro_batch=n) for n in (4, 64)),
        peer("TRL + PEFT checkpointing", micro_batch=16, gradient_checkpointing=True),
    ]


@lru_cache(maxsize=1)
def weights_of(shape: ModelShape, given: str = "") -> Weights:
    """Return a model's weights, from a GGUF file or random; the last result stays on disk."""
    return Weights.of_file(given) if given else Weights.random(shape)


def work_case(name: str, make: Callable[[int], Work], n_items: float, n_flops: float = 0, note: str = "") -> Case:
    """Create the case of a run; ``make`` gets a seed."""
    return Case(
        name,
        inputs=lambda rng: make(int(rng.integers(2**31))),
        reference=lambda work: work,
        tolerance=0.0,
        n_flops=n_flops,
        flop_dtype="bfloat16",
        n_items=n_items,
        note=note,
    )


def work_table(title: str, cases: Sequence[Case], providers: Sequence[Provider], note: str, micro_batch: int) -> Table:
    """Create a table of runs by these contenders."""
    return Table(
        title,
        cases,
        providers,
        allocation="inside: all allocations of a step",
        note=f"{note} {NOTE.format(micro_batch=micro_batch)}",
        item="tokens",
        error=run_error,
    )


def sums_case(shape: ModelShape, options: LoraOptions, **settings: Any) -> Case:
    """Create the case of GRPO on sums of two terms, the real task, with real weights if given."""

    def make(seed: int) -> Work:
        return Work.on_sums(weights_of(shape, options.smollm2), shape, n_steps=options.steps, seed=seed, **settings)

    n_prompts, group_size = settings.get("n_prompts", 8), settings.get("group_size", 8)
    name = f"{n_prompts} x {group_size}, at most {settings.get('max_new_tokens', 24)} tokens"
    return work_case(name, make, n_prompts * group_size)


@lru_cache(maxsize=1)
def weights_after_calls(gguf: str) -> Weights:
    """Return the weights of SmolLM2 after SFT on calls of the calculator."""
    return Weights.of_calls(gguf)


def calculator_table(options: LoraOptions) -> Table:
    """Create the table of GRPO with a tool, which needs real weights."""

    def make(seed: int) -> Work:
        return Work.on_sums(
            weights_after_calls(options.smollm2),
            SMOLLM2_135M,
            n_steps=options.steps,
            seed=seed,
            n_prompts=4,
            max_new_tokens=96,
            task=LONG_SUMS,
            tools=(f"{CALCULATOR}/calculator.py:calculate",),
        )

    note = (
        "SmolLM2-135M-Instruct after the SFT of docs/tools-guide.md on calls of a calculator, merged. GRPO on "
        "reasoning-gym's chain_sum, four terms of three digits, with the tool; items are episodes. TRL's limit of 96 "
        "tokens includes the results of the tool."
    )
    case = work_case("4 x 8 episodes, at most 96 tokens", make, 32)
    return work_table(
        "GRPO with a tool, LoRA, SmolLM2-135M",
        [case],
        [whet("whet", "bf16"), whet("whet float32", "float32"), whet("whet q8_0", "q8_0"), *peers(16)],
        note,
        16,
    )


def sums_note(options: LoraOptions) -> str:
    """Describe the model of the sums."""
    source = (
        "SmolLM2-135M-Instruct from the given GGUF file, dequantised to float32 for TRL."
        if options.smollm2
        else "Random weights of SmolLM2-135M's shape and a byte tokenizer: no GGUF file was given (--smollm2)."
    )
    return f"{source} GRPO on reasoning-gym's chain_sum, two terms of one or two digits; items are completions."


def shape_case(
    name: str, method: Method, shape: GRPOShape | DPOShape, options: LoraOptions, *, quantised: bool = False
) -> Case:
    """Create a case of random rows of these sizes.

    Operations are counted of dense models of attention, which sample from a quantised base or not.
    """

    def make(seed: int) -> Work:
        return Work.of_shape(method, weights_of(shape.model), shape, n_steps=options.steps, seed=seed)

    config = shape.model.config
    is_plain = not config.n_experts and all(config.mixer(i) == "attention" for i in range(config.n_layers))
    n_flops = lora_step_flops(shape, method, quantised=quantised) if is_plain else 0.0
    return work_case(name, make, shape.n_tokens, n_flops)


def pair_tables(
    model: ModelShape, n_pairs: int, options: LoraOptions, methods: Sequence[Method] = ("dpo", "sft")
) -> list[Table]:
    """Create the tables of methods on pairs, or on their rows."""
    shape = DPOShape(model, n_pairs=n_pairs)
    lengths = f"{shape.prompt_length} + {shape.completion_length}"

    def name(method: Method) -> str:
        return f"{n_pairs} pairs, {lengths}" if is_paired(method) else f"{2 * n_pairs} rows, {lengths}"

    return [
        work_table(
            f"{ALGORITHMS[method].class_name}, LoRA, {model.name}",
            [shape_case(name(method), method, shape, options)],
            [
                whet("whet", "bf16"),
                *([] if method == "reward" else [whet("whet, modules", "bf16", is_native=False)]),
                whet("whet q8_0", "q8_0"),
                recomputed("bf16"),
                *peers(4),
                *([] if method in ("dpo", "sft") else other_micro_batches(2, 8)),
            ],
            f"{_LONG} {_NOTES.get(method, '')}".strip(),
            4,
        )
        for method in methods
    ]


def sampling_tables(model: ModelShape, options: LoraOptions) -> list[Table]:
    """Create the tables of RLOO and of distillation, with as many completions per step."""
    shapes: Mapping[Method, GRPOShape] = {"rloo": GRPOShape(model), "distill": GRPOShape(model, 32, 1)}
    return [
        work_table(
            f"{ALGORITHMS[method].class_name}, LoRA, {model.name}",
            [shape_case(f"{shape.n_prompts} x {shape.group_size}, 128 + 128", method, shape, options)],
            [
                whet("whet", "bf16"),
                whet("whet q8_0", "q8_0"),
                recomputed("bf16"),
                *peers(4),
                *other_micro_batches(2, 8),
            ],
            f"{_LONG} {_NOTES[method]}",
            4,
        )
        for method, shape in shapes.items()
    ]


def other_micro_batches(*sizes: int) -> list[Provider]:
    """Create providers of TRL + PEFT in other micro-batches, so that the fastest is among them."""
    return [peer(f"TRL + PEFT micro-batch {size}", micro_batch=size) for size in sizes]


def family_table(model: ModelShape, options: LoraOptions) -> Table:
    """Create the table of a GRPO step of another family. Its experts, if any, are frozen."""
    shape = GRPOShape(model)
    case = shape_case("4 x 8, 128 + 128", "grpo", shape, options)
    return work_table(
        f"GRPO, LoRA, {model.name}", [case], [whet("whet", "bf16"), whet("whet q8_0", "q8_0"), *peers(4)], _LONG, 4
    )


def check(options: Any, suite: str, min_steps: int) -> None:
    """Raise a WhetValueError for settings of a LoRA suite that cannot be measured."""
    if options.steps < min_steps:
        raise WhetValueError(f"whet bench {suite}: steps is {options.steps}, expected at least {min_steps}.")
    if options.smollm2 and not Path(options.smollm2).is_file():
        raise WhetValueError(f"whet bench {suite}: smollm2 is {options.smollm2!r}, and there is no such file.")


def tables(options: LoraOptions) -> list[Table]:
    """Create all tables; if quick, runs of a tiny model.

    Raises:
        WhetValueError: fewer than two steps, or the model is not a file.
    """
    check(options, "lora", min_steps=2)
    if options.quick:
        shape = GRPOShape(TINY, n_prompts=2, group_size=4, prompt_length=16, completion_length=16)
        case = shape_case("2 x 4, 16 + 16", "grpo", shape, options)
        return [work_table("GRPO, LoRA, tiny Llama", [case], [whet("whet", "bf16"), *peers(8)], _LONG, 8)]
    small, large = GRPOShape(QWEN2_500M), GRPOShape(QWEN2_1500M)
    sums = [sums_case(SMOLLM2_135M, options)]
    long = "4 x 8, 128 + 128"
    small_case, large_case = (shape_case(long, "grpo", shape, options, quantised=True) for shape in (small, large))
    two_prompts = shape_case("2 x 8, 128 + 128", "grpo", GRPOShape(QWEN2_500M, n_prompts=2), options)
    return [
        work_table("GRPO on sums, LoRA, SmolLM2-135M", sums, real_providers(), sums_note(options), 16),
        *([calculator_table(options)] if options.smollm2 else []),
        work_table("TRL's settings, GRPO on sums", sums, settings_of_trl(), sums_note(options), 16),
        *pair_tables(SMOLLM2_135M, 8, options, ("dpo", "sft", "simpo", "kto", "reward")),
        *sampling_tables(SMOLLM2_135M, options),
        work_table(
            "GRPO, LoRA, 0.5 B Qwen2",
            [small_case],
            [whet("whet", "q8_0"), recomputed("q8_0"), *peers(2)],
            _LONG,
            2,
        ),
        work_table("GRPO, all weights, 0.5 B Qwen2", [two_prompts], all_weights("whet"), _LONG, 2),
        *pair_tables(QWEN2_500M, 4, options),
        *(family_table(model, options) for model in (LFM2_350M, QWEN3_5_800M, OLMOE_4_LAYERS)),
        work_table("GRPO, LoRA, 1.5 B Qwen2", [large_case], budgets("q4_k_m"), _LONG, 2),
    ]


SUITE = Suite(
    name="lora",
    title="LoRA on a packed base, TRL and PEFT",
    summary="Whole runs on adapters, by GRPO, RLOO, distillation, DPO, SimPO, KTO, SFT and of reward models: time of a "
    "step, time to the first step, and memory peak of the process.",
    tables=tables,
    options=LoraOptions,
)
