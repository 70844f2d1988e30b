"""Writes the results of a run: model, card, report and memory."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from whet.errors import MissingExtraError
from whet.files import disk_full_errors, force_to_disk, replace_text, temporary_next_to
from whet.memory import MemoryReport
from whet.models.written_folder import copy_predicting
from whet.report.run import write_report
from whet.runs.card import render_run_card
from whet.system.files import replace
from whet.training.sizes import RunMemory
from whet.training.trainer import Trainer


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Turn errors of safetensors and tokenizers into OSErrors with the error number in their message.

    Raises:
        OSError: instead of a SafetensorError, or of the plain Exception that tokenizers raises.
    """
    try:
        yield
    except Exception as error:
        number = re.search(r"os error (\d+)", str(error))
        if not isinstance(error, SafetensorError) and (type(error) is not Exception or number is None):
            raise
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error


def _save_model(trainer: Trainer, folder: Path, base: Path) -> None:
    """Write model and tokenizer via a temporary folder, so that a full disk leaves the existing files intact.

    ``base``: the model before training, of which blocks that predict further tokens are kept.
    """
    with (
        disk_full_errors(folder, trainer.policy.saved_bytes()),
        temporary_next_to(folder, "saving", folder=True) as temporary,
    ):
        with system_errors():
            trainer.save_pretrained(temporary)
        if all((each / "config.json").is_file() for each in (base, temporary)):
            copy_predicting(base, temporary)
        for file in (path for path in sorted(temporary.rglob("*")) if path.is_file()):
            target = folder / file.relative_to(temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            force_to_disk(file)
            replace(file, target)


def write_memory(file: Path, fullest: MemoryReport, predicted: RunMemory | None) -> None:
    """Write the memory of the step with the highest use, by part in bytes, and its prediction."""
    parts = {} if predicted is None else predicted.at_peak()
    figures = {"measured": fullest.parts, "resident": fullest.resident, "peak": fullest.peak, "predicted": parts}
    replace_text(file, json.dumps(figures, indent=2) + "\n")


def write_results(trainer: Trainer, run: Any, folder: Path, n_rows: int, evaluations: list[dict[str, float]]) -> str:
    """Write model, card and report; return a summary."""
    name = type(trainer).__name__
    card = render_run_card(name, run, n_rows, trainer.num_tokens, evaluations)
    _save_model(trainer, folder / "model", Path(run.model))
    for path in (folder / "README.md", folder / "model" / "README.md"):
        replace_text(path, card)
    summary = f"{name} of {run.model} on {run.trained_on()}, {run.steps:,} steps"
    report = f"the report in {folder / 'report.html'}"
    try:
        write_report(folder, title=f"{name}: {folder.resolve().name}", summary=f"{summary}.")
    except MissingExtraError as error:  # a wheel without extras trains adapters
        report = f"and there is no report ({error})"
    if evaluations:
        metric = next(name for name in evaluations[-1] if name != "step")
        summary += f", held-out {metric} {evaluations[0][metric]:.4g} -> {evaluations[-1][metric]:.4g}"
    return f"{summary}: the model is in {folder / 'model'}, {report}"
