"""``whet demo``: post-training in small. Builds a model, warms it up with SFT and trains it with GRPO.

It needs no network and no input files. The task is in ``arithmetic``.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from whet.algorithms.grpo import GRPO
from whet.algorithms.sft import SFT
from whet.cli.arithmetic import Row, exact_match, make_model, make_problems, make_tokenizer
from whet.config.fields import PathText, Positive, Range, Seed, check_types, reject_ineffective
from whet.config.sampling import SamplingParams
from whet.config.settings import Compute, EngineName, GRPOConfig, RolloutWeights, SFTConfig
from whet.config.toml import write_toml
from whet.report.run import write_report
from whet.rollout.choose import make_engine
from whet.rollout.protocol import RolloutEngine
from whet.runs.settings import lock_folder
from whet.training.callbacks import (
    CheckpointCallback,
    CompletionsCallback,
    EarlyStoppingCallback,
    EvaluationCallback,
)
from whet.training.loggers import JSONLLogger, ProgressLogger
from whet.training.trainer import Trainer

Accuracy = Annotated[float, Range("an accuracy in [0, 1]", lambda share: 0 <= share <= 1)]

_LONGEST_ANSWER = 5
"""Tokens: three digits, EOS and one spare token for wrong answers."""


@dataclass(kw_only=True)
class DemoConfig:
    """Settings of the demo."""

    output_dir: PathText = "runs/demo"
    """Folder for the run."""
    seed: Seed = 0
    """Seed of weights, problems, their order and sampling: the same seed repeats the run."""
    n_held_out: Positive = 400
    """Held-out problems, only used to measure accuracy."""
    sft_until: Accuracy = 0.42
    """Held-out accuracy at which SFT ends."""
    sft_max_steps: Positive = 500
    """Maximum number of SFT steps."""
    grpo_until: Accuracy = 0.9
    """Held-out accuracy at which GRPO ends."""
    grpo_max_steps: Positive = 450
    """Maximum number of GRPO steps."""
    engine: EngineName = "auto"
    """Engine that samples for GRPO and for the held-out accuracy; auto: the native engine."""
    rollout_weights: RolloutWeights = "bf16"
    """Weight format of the engine."""
    compute: Compute = "auto"
    """Kernels of the updates; torch: without Whet's kernels."""

    def __post_init__(self) -> None:
        check_types(self)
        reject_ineffective(
            self, ["rollout_weights"], self.engine != "torch", "engine is 'torch', which samples from the trained model"
        )


def sft_config(config: DemoConfig) -> SFTConfig:
    """Return the settings of SFT."""
    return SFTConfig(
        learning_rate=2e-3,
        warmup_steps=30,
        batch_size=128,
        weight_decay=0.01,
        compute=config.compute,
        seed=config.seed,
    )


def grpo_config(config: DemoConfig) -> GRPOConfig:
    """Return the settings of GRPO."""
    return GRPOConfig(
        learning_rate=3e-4,
        lr_schedule="linear",
        warmup_steps=5,
        batch_size=128,
        group_size=4,
        max_new_tokens=_LONGEST_ANSWER,
        epsilon_high=0.28,
        adam_beta2=0.95,
        filter_zero_variance=True,
        engine=config.engine,
        rollout_weights="auto" if config.engine == "torch" else config.rollout_weights,
        compute=config.compute,
        seed=config.seed,
    )


class HeldOut:
    """Greedy exact-match accuracy on the held-out problems; stores the latest completions."""

    def __init__(self, rows: Sequence[Row], tokenizer: Any, engine: RolloutEngine) -> None:
        self.rows = rows
        self.engine = engine
        self.tokenizer = tokenizer
        self.prompt_ids = [tokenizer(row["prompt"])["input_ids"] for row in rows]
        self.completions: list[str] = []

    def __call__(self, trainer: Any) -> dict[str, float]:
        sampling = SamplingParams(
            temperature=0.0, max_new_tokens=_LONGEST_ANSWER, stop_token_ids=[self.tokenizer.eos_token_id]
        )
        self.engine.sync(trainer.model)
        groups = self.engine.generate(self.prompt_ids, 1, sampling)
        self.completions = [
            self.tokenizer.decode(completion.token_ids, skip_special_tokens=True) for [completion] in groups
        ]
        return {"accuracy": sum(self.scores()) / len(self.rows)}

    def scores(self) -> list[float]:
        """Return 1 for each problem that the latest completion solves, otherwise 0."""
        return exact_match(self.completions, [row["answer"] for row in self.rows])

    def samples(self, n: int) -> list[dict[str, Any]]:
        """Return the first n problems with their completions, for display."""
        return [
            {"prompt": row["prompt"], "completion": completion, "reward": score}
            for row, completion, score in list(zip(self.rows, self.completions, self.scores(), strict=True))[:n]
        ]


@dataclass
class Phase:
    """A phase of the demo: its trainer and results.

    Attributes:
        accuracy: held-out accuracy at the end of the phase.
        elapsed_s: training time.
        samples: held-out problems with completions at the end of the phase.
    """

    trainer: Trainer
    accuracy: float
    elapsed_s: float
    samples: list[dict[str, Any]]

    def duration(self) -> str:
        return f"{self.elapsed_s:.0f} s, {self.trainer.step} steps"


def run_phase(
    trainer: Trainer, rows: Sequence[Row], steps: int, until: float, held_out: HeldOut, folder: Path, console: Console
) -> Phase:
    """Train to a held-out accuracy, for at most ``steps``; write metrics and model to ``folder``."""
    name = type(trainer).__name__
    evaluation = EvaluationCallback(held_out, every=5)
    trainer.callbacks[:0] = [evaluation, EarlyStoppingCallback("eval/accuracy", patience=steps, target=until)]
    started_s = time.perf_counter()
    with ProgressLogger(steps, description=f"{name:4}") as progress:
        trainer.loggers = [JSONLLogger(folder / "metrics.jsonl"), progress]
        trainer.train(rows, steps=steps)
    elapsed_s = time.perf_counter() - started_s
    trainer.save_pretrained(folder / "model")
    phase = Phase(trainer, evaluation.history[-1]["accuracy"], elapsed_s, held_out.samples(8))
    print_samples(console, f"\nHeld-out problems after {name}", phase.samples)
    return phase


def print_samples(console: Console, title: str, samples: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of problems and completions."""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("prompt", justify="right")
    table.add_column("completion")
    table.add_column("reward", justify="right")
    for row in samples:
        table.add_row(row["prompt"], row["completion"] or "(nothing)", f"{row['reward']:.0f}")
    console.print(table)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSONL for ``whet train``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(config: DemoConfig) -> int:
    """Run the demo; return 0 if GRPO reached its accuracy, otherwise 1."""
    with lock_folder(config.output_dir):
        return _run(config)


def _run(config: DemoConfig) -> int:
    started_s = time.perf_counter()
    console, folder = Console(), Path(config.output_dir)
    disable_progress_bar()
    remove_earlier_run(folder)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, config.seed)
    rows, held_out_rows = make_problems(config.seed, config.n_held_out)
    held_out = HeldOut(held_out_rows, tokenizer, make_engine(config.engine, model, config.rollout_weights, "whet demo"))
    write_rows(folder / "data" / "train.jsonl", rows)
    write_rows(folder / "data" / "held_out.jsonl", held_out_rows)
    settings = {"demo": asdict(config), "sft": asdict(sft_config(config)), "grpo": asdict(grpo_config(config))}
    write_toml(folder / "config.toml", settings)
    n_parameters = sum(p.numel() for p in model.parameters())
    console.print(f"Training a Llama of {n_parameters:,} random parameters to add. Seed {config.seed}.\n")

    trainer = SFT(model, config=sft_config(config), tokenizer=tokenizer)
    sft = run_phase(trainer, rows, config.sft_max_steps, config.sft_until, held_out, folder / "sft", console)
    console.print()
    callbacks = [
        CompletionsCallback(folder / "completions.jsonl"),
        CheckpointCallback(folder / "checkpoints", every=100, keep=1),
    ]
    trainer = GRPO(
        model, reward_fn=exact_match, engine=held_out.engine, config=grpo_config(config), tokenizer=tokenizer,
        callbacks=callbacks,
    )  # fmt: skip
    grpo = run_phase(trainer, rows, config.grpo_max_steps, config.grpo_until, held_out, folder, console)
    report(config, sft, grpo, n_parameters, folder)
    total_s = time.perf_counter() - started_s
    times = f"SFT {sft.elapsed_s:.0f} s, GRPO {grpo.elapsed_s:.0f} s, total {total_s:.0f} s"
    print(f"held-out accuracy: {sft.accuracy:.1%} -> {grpo.accuracy:.1%} ({times})")
    return 0 if grpo.accuracy >= config.grpo_until else 1


def report(config: DemoConfig, sft: Phase, grpo: Phase, n_parameters: int, folder: Path) -> None:
    """Write the report, and print the files and whether GRPO reached its accuracy."""
    write_report(
        folder,
        title="Whet demo: GRPO teaches a small model to add",
        summary=f"A Llama of {n_parameters:,} parameters, trained from scratch on sums of two numbers below 100; "
        f"exact match on {config.n_held_out} held-out problems.",
        headline={
            "held-out accuracy": f"{sft.accuracy:.1%} → {grpo.accuracy:.1%}",
            "SFT": sft.duration(),
            "GRPO": grpo.duration(),
        },
        samples_before=sft.samples,
        samples_after=grpo.samples,
    )
    print(f"\n{folder}/ contains report.html, model/, checkpoints/, metrics.jsonl, completions.jsonl and config.toml")
    if grpo.accuracy < config.grpo_until:
        print(
            f"whet demo: {config.grpo_max_steps} steps of GRPO did not reach {config.grpo_until:.0%}. "
            "Raise --grpo-max-steps or try another --seed.",
            file=sys.stderr,
        )


def remove_earlier_run(folder: Path) -> None:
    """Delete the files of an earlier demo, and nothing else."""
    for name in ("data", "sft", "model", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("metrics.jsonl", "completions.jsonl", "config.toml", "report.html", "curve.svg"):
        (folder / name).unlink(missing_ok=True)
