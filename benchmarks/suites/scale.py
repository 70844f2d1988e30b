"""More than one process: ranks that train together, and a pool of sampling workers, beside one process.

A row is a run whose processes all start and end with it; its first step is no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.contenders import scale
from benchmarks.contenders.engine.models import LLAMA_135M
from benchmarks.contenders.scale import SIMULATED_WORKERS, WORKERS, Sampling, run_alone, wrong_steps
from benchmarks.contenders.training import native
from benchmarks.contenders.training.contender import RankedContender
from benchmarks.contenders.training.lora import RANK, Work, lora_step_flops, n_adapter_parameters, run_error, run_steps
from benchmarks.contenders.training.workload import GRPOShape
from benchmarks.suites.grpo import QUICK_STEP, TINY
from benchmarks.suites.lora import contender, weights_of, work_case
from whet.bench.case import BenchOptions, Call, Case, NotMeasured, Provider, Suite, Table
from whet.bench.machine import cpus
from whet.errors import WhetValueError

_RANKS = 2
_RANDOM = "Random weights of the true shape, prompts of random tokens; completions have all their tokens."
_TRAINING = (
    f"{_RANDOM} Ranks are joined as torchrun joins them, on this machine, and share its processors and memory "
    "bandwidth: they show what ranks cost, not what further machines bring. Peak memory is of one rank, the fullest."
)
_POOL = f"{_RANDOM} Everybody's tokens and log-probs are those of one engine, to the bit."


@dataclass(frozen=True)
class ScaleOptions(BenchOptions):
    """Settings of the suite."""

    steps: int = 5
    """Steps of a run, at least 2, as the first does not count."""


def ranked(name: str, base: str, note: str = "", **settings: Any) -> Provider:
    """Whet's trainer on ranks, which have the threads of one process between them."""

    def prepare(work: Work) -> Call:
        if len(cpus()) % _RANKS:
            raise NotMeasured(f"{_RANKS} ranks need twice as many threads as one, and there are {len(cpus())}")
        start = partial(RankedContender, _RANKS, len(cpus()) // _RANKS, native.serve_lora)
        return partial(run_steps, start, work, {"base": base, **settings})

    return Provider(name, prepare, note=note)


def training_table(title: str, shape: GRPOShape, options: ScaleOptions, providers: Sequence[Provider]) -> Table:
    """GRPO steps by one process and by ranks."""

    def make(seed: int) -> Work:
        return Work.of_shape("grpo", weights_of(shape.model), shape, n_steps=options.steps, seed=seed)

    is_lora = title.startswith("LoRA")
    case = work_case(
        _sizes(shape), make, shape.n_tokens, lora_step_flops(shape, quantised=False) if is_lora else shape.n_flops
    )
    return Table(
        title,
        [case],
        providers,
        allocation="inside: all that a step allocates",
        note=_TRAINING,
        item="tokens",
        error=run_error,
    )


def sampling_table(
    title: str, cases: Sequence[Case], providers: Sequence[Provider], item: str, note: str = ""
) -> Table:
    """Batches that are sampled again and again."""
    return Table(title, cases, providers, allocation="", note=f"{_POOL} {note}".strip(), item=item, error=wrong_steps)


def sampling_case(name: str, shape: GRPOShape, options: ScaleOptions, n_items: float, base: str = "") -> Case:
    """A batch; every row samples the same one."""
    return Case(
        name,
        inputs=lambda rng: Sampling(shape, options.steps, base),
        reference=lambda work: work,
        tolerance=0.0,
        n_items=n_items,
    )


def pool(name: str, serve: Callable[..., None], *settings: Any, note: str = "") -> Provider:
    """Something that a pool does, in a process of its own."""
    return Provider(name, run_alone(serve, *settings), note=note)


def _sizes(shape: GRPOShape) -> str:
    return f"{shape.n_prompts} x {shape.group_size}, {shape.prompt_length} + {shape.completion_length}"


def tables(options: ScaleOptions) -> list[Table]:
    """All of it; with a tiny model if it has to be quick.

    Raises:
        WhetValueError: fewer than two steps.
    """
    if options.steps < 2:
        raise WhetValueError(f"whet bench scale: steps is {options.steps}, expected at least 2.")
    model = TINY if options.quick else LLAMA_135M
    step = QUICK_STEP if options.quick else GRPOShape(model)
    lora_mb = 4e-6 * n_adapter_parameters(model)
    weights_mb = 2e-6 * model.config.n_parameters
    one_prompt = GRPOShape(model, n_prompts=1, group_size=WORKERS, prompt_length=16)
    # Lengths by chance, so that calls do not end all at once.
    killed, control = step, GRPOShape(model, 24, 8, prompt_length=64, completion_length=256, mean_length=64)
    if options.quick:  # long enough that the worker is killed among them; few groups
        killed = replace(step, completion_length=2000)
        control = replace(control, n_prompts=4, group_size=32, completion_length=32, mean_length=8)
    groups = scale.n_control_groups(control)
    return [
        training_table(
            f"GRPO, {model.name}",
            step,
            options,
            [
                contender("whet", native.serve_lora, base=""),
                ranked("whet, 2 ranks", "", "gradients travel in float32"),
                ranked("whet, 2 ranks, bfloat16 all-reduce", "", reduce_dtype="bfloat16"),
            ],
        ),
        training_table(
            f"LoRA by GRPO, {model.name}",
            step,
            options,
            [contender("whet", native.serve_lora, base="bf16"), ranked("whet, 2 ranks", "bf16")],
        ),
        training_table(
            f"Deterministic reduction by 2 ranks, GRPO, {model.name}",
            step,
            options,
            [
                ranked("whet", "", "the plain sum, float32 all-reduce"),
                ranked("whet, deterministic", "", deterministic_reduction=True),
            ],
        ),
        sampling_table(
            f"Sampling by {WORKERS} workers of one thread, {model.name}",
            [sampling_case(_sizes(step), step, options, step.n_completions * step.completion_length)],
            [
                pool("whet", scale.serve_sampling, False, note="the engine in the process, on all threads"),
                pool("whet, pool", scale.serve_sampling, True),
            ],
            "tokens",
        ),
        sampling_table(
            f"New weights to {WORKERS} workers, {model.name}",
            [
                sampling_case(f"all, bfloat16, {weights_mb:,.3g} MB", one_prompt, options, weights_mb),
                *(
                    sampling_case(f"LoRA r={RANK}, {what} base, {lora_mb:,.3g} MB", one_prompt, options, lora_mb, base)
                    for base, what in (("bf16", "packed"), ("none", "float32"))
                ),
            ],
            [pool("whet", scale.serve_weights)],
            "MB",
            "From the call of sync until every worker could sample: checks for NaN, or that a float32 base is as it "
            "was, the object in Ray's store, and packing in the workers.",
        ),
        sampling_table(
            f"Time lost by a worker killed, {model.name}",
            [sampling_case(_sizes(killed), killed, options, 1)],
            [pool("whet", scale.serve_killed)],
            "workers lost",
            "One of two is killed (SIGKILL) when half of the batch is done. The time is what the batch then takes "
            "longer than undisturbed; the other two parts are what a batch and a group on each worker take "
            "undisturbed.",
        ),
        sampling_table(
            f"Control plane, {model.name}",
            [sampling_case(f"{SIMULATED_WORKERS} simulated workers, {groups:,} groups", control, options, groups)],
            [pool("whet", scale.serve_control)],
            "groups",
            "The pool is real, and workers sleep: as long as calls of a real one of one thread on this machine took "
            "before, with as many at once, and they return what it returned. The driver's share of one core is its "
            "CPU time over the whole.",
        ),
    ]


SUITE = Suite(
    name="scale",
    title="More than one process",
    summary="What ranks and a pool of sampling workers cost beside one process on the same cores, what weights take on "
    "their way, and what a killed worker costs.",
    tables=tables,
    options=ScaleOptions,
)
