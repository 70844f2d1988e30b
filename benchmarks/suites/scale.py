"""Multiple processes compared with one: training ranks, and a pool of sampling workers.

Each row starts its own processes and ends them after the last step; the first step is not a sample.
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
from whet.errors import WhetValueError
from whet.system.machine import processors

_RANKS = 2
_RANDOM = "Random weights of the real shape, prompts of random tokens; completions have full length."
_TRAINING = (
    f"{_RANDOM} Ranks are joined as by torchrun, on this machine, and share its processors and memory bandwidth: the "
    "table shows the cost of ranks, not the gain from more machines. Peak memory is the highest of one rank."
)
_POOL = f"{_RANDOM} All tokens and log-probs are bit-identical to one engine."


@dataclass(frozen=True)
class ScaleOptions(BenchOptions):
    """Settings of the suite."""

    steps: int = 5
    """Steps of a run, at least 2, since the first step does not count."""


def ranked(name: str, base: str, note: str = "", **settings: Any) -> Provider:
    """Create a provider of Whet's trainer on ranks that share the threads of one process."""

    def prepare(work: Work) -> Call:
        if len(processors()) % _RANKS:
            raise NotMeasured(f"{_RANKS} ranks need twice as many threads as one, and there are {len(processors())}")
        start = partial(RankedContender, _RANKS, len(processors()) // _RANKS, native.serve_lora)
        return partial(run_steps, start, work, {"base": base, **settings})

    return Provider(name, prepare, note=note)


def training_table(title: str, shape: GRPOShape, options: ScaleOptions, providers: Sequence[Provider]) -> Table:
    """Create a table of GRPO steps by one process and by ranks."""

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
        allocation="inside: all allocations of a step",
        note=_TRAINING,
        item="tokens",
        error=run_error,
    )


def sampling_table(
    title: str, cases: Sequence[Case], providers: Sequence[Provider], item: str, note: str = ""
) -> Table:
    """Create a table of batches that are sampled repeatedly."""
    return Table(title, cases, providers, allocation="", note=f"{_POOL} {note}".strip(), item=item, error=wrong_steps)


def sampling_case(name: str, shape: GRPOShape, options: ScaleOptions, n_items: float, base: str = "") -> Case:
    """Create the case of a batch; every row samples the same batch."""
    return Case(
        name,
        inputs=lambda rng: Sampling(shape, options.steps, base),
        reference=lambda work: work,
        tolerance=0.0,
        n_items=n_items,
    )


def pool(name: str, serve: Callable[..., None], *settings: Any, note: str = "") -> Provider:
    """Create a provider of a pool's work in a separate process."""
    return Provider(name, run_alone(serve, *settings), note=note)


def _sizes(shape: GRPOShape) -> str:
    return f"{shape.n_prompts} x {shape.group_size}, {shape.prompt_length} + {shape.completion_length}"


def tables(options: ScaleOptions) -> list[Table]:
    """Create all tables; if quick, with a tiny model.

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
    # Random lengths, so that calls do not end simultaneously.
    killed, control = step, GRPOShape(model, 24, 8, prompt_length=64, completion_length=256, mean_length=64)
    if options.quick:  # completions long enough to kill the worker during the batch; few groups
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
                ranked("whet, 2 ranks", "", "float32 all-reduce"),
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
                ranked("whet", "", "plain sum, float32 all-reduce"),
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
            "From the call of sync until every worker can sample: the check for NaN, or for an unchanged float32 base, "
            "the object in Ray's store, and packing in the workers.",
        ),
        sampling_table(
            f"Time lost by a killed worker, {model.name}",
            [sampling_case(_sizes(killed), killed, options, 1)],
            [pool("whet", scale.serve_killed)],
            "workers lost",
            "One of two workers is killed (SIGKILL) halfway through the batch. The time is the batch's additional time "
            "compared with an undisturbed batch; the other two parts are the times of an undisturbed batch and of a "
            "group on each worker.",
        ),
        sampling_table(
            f"Control plane, {model.name}",
            [sampling_case(f"{SIMULATED_WORKERS} simulated workers, {groups:,} groups", control, options, groups)],
            [pool("whet", scale.serve_control)],
            "groups",
            "The pool is real; its workers sleep as long as calls of a real single-threaded worker took on this "
            "machine, at the same concurrency, and return its results. The driver's share of one core is its CPU time "
            "/ the total time.",
        ),
    ]


SUITE = Suite(
    name="scale",
    title="Multiple processes",
    summary="Cost of ranks and of a pool of sampling workers compared with one process on the same cores, of weight "
    "transfers, and of a killed worker.",
    tables=tables,
    options=ScaleOptions,
)
