"""Resuming a run: its newest checkpoint, the settings that it may change, and its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from whet.checkpoint.folder import latest_checkpoint
from whet.config.settings import learning_rate_at
from whet.config.toml import read_toml
from whet.errors import WhetValueError
from whet.runs.settings import ADAPTER_SETTINGS
from whet.training.trainer import Trainer

Notify = Callable[[str], object]

_IDENTITY = (
    "model", "data", "columns", "task", "seed", "dtype", "base", "adapter", "lora_rank", *ADAPTER_SETTINGS,
    "chat_template", "optimizer",
)  # fmt: skip
"""Settings that a resumed run cannot change. Changes of others are printed, except those in _SILENT."""

_SILENT = (
    "output_dir", "steps", "resume", "loggers", "wandb_project", "checkpoint_every", "keep_checkpoints",
    "eval_data", "eval_items", "eval_every", "eval_temperature", "activation_bytes",
)  # fmt: skip
"""Settings that do not affect a step, whose changes are not printed; for steps, see ``_report_schedule``."""


def find_checkpoint(run: Any, folder: Path, notify: Notify) -> Path | None:
    """Return the newest complete checkpoint if the run resumes; check the settings against the saved ones."""
    file = folder / "config.toml"
    if not _has_steps(folder):  # an error before the first step, such as an invalid row
        return None
    if not run.resume:
        if file.exists():
            raise WhetValueError(
                f"{folder} contains a run, and resume is off. Choose another output_dir, or remove the folder."
            )
        return None
    checkpoint = latest_checkpoint(folder / "checkpoints")
    now = dataclasses.asdict(run)
    # Runs from before packed bases had none. "auto" is resolved once, when the run begins.
    saved = {"base": "none" if run.has_adapters() else "auto", **_read_settings(file, now)} if file.exists() else now
    if run.base == "auto":
        run.base = now["base"] = saved["base"]
    # Settings that the run's version of Whet lacked have their default.
    before = {**dataclasses.asdict(type(run)()), **saved}
    changed = [name for name in now if name not in _SILENT and before[name] != _normalise(now[name])]
    for name in changed:
        if name in _IDENTITY:
            raise WhetValueError(
                f"{folder} contains a run with {name} = {before[name]!r}, but {name} is now {now[name]!r}. Choose "
                f"another output_dir, or restore {name}."
            )
    for name in changed if checkpoint else []:
        notify(f"{name} changes from {before[name]!r} to {now[name]!r}")
    return checkpoint


def _has_steps(folder: Path) -> bool:
    """Whether a run in the folder has finished a step: there are checkpoints, or metrics of a step."""
    if any((folder / "checkpoints").glob("step-*")):
        return True
    metrics = folder / "metrics.jsonl"
    return metrics.is_file() and '"learning_rate"' in metrics.read_text(encoding="utf-8")


def _read_settings(file: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings of a run; a single path may be a string instead of a list."""
    saved = read_toml(file)
    return {
        name: [value] if isinstance(now.get(name), list) and isinstance(value, str) else value
        for name, value in saved.items()
    }


def _normalise(value: Any) -> Any:
    """Return a setting as TOML stores it: the keys of tables are strings."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


def last_step_of_pass(trainer: Trainer, n_rows: int) -> int:
    """Return the last step of the first pass over the rows, which may have begun with another batch size."""
    n_remaining = n_rows - trainer.position if trainer.epoch == 0 else 0
    return trainer.step + max(0, n_remaining // trainer.config.batch_size)


def check_steps(trainer: Trainer, checkpoint: Path, steps: int, notify: Notify) -> None:
    if trainer.step > steps:
        raise WhetValueError(f"{checkpoint} is beyond steps = {steps}. Choose another output_dir, or more steps.")
    notify(f"resuming from {checkpoint}")
    _report_schedule(trainer, steps, notify)


def _report_schedule(trainer: Trainer, steps: int, notify: Notify) -> None:
    """Print a note if a decaying learning rate ends at other steps than the run (at the most steps so far)."""
    end, config = trainer.schedule_end, trainer.config
    if config.lr_schedule == "constant" or config.schedule_steps or end == steps:
        return
    effect = "the rate does not reach 0"
    if steps > end:
        before, now = (learning_rate_at(trainer.step, config, last) for last in (end, steps))
        effect = f"the next learning rate is {now:.3g} instead of {before:.3g}"
    notify(
        f"the {config.lr_schedule} schedule was made for {end} steps, and steps is {steps}: {effect}. To keep it, set "
        f"schedule_steps"
    )
