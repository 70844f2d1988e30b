"""Loggers of a run's metrics: the console, a progress bar, JSONL, CSV, TensorBoard, Weights & Biases.

A logger records the metrics of a step. It does not choose or compute them. Importing this module does not import torch,
rich, tensorboard or wandb; each is imported by the logger that needs it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from whet.errors import WhetError, WhetTypeError, WhetValueError, check_installed, check_integer, is_number
from whet.files import disk_full_errors, drop_torn_line, replace_text

if TYPE_CHECKING:
    from typing import Self


class Logger(Protocol):
    """Interface of a logger: ``log`` and ``close``.

    Loggers that can remove later steps, so that a resumed run does not log them twice, also have
    ``truncate_after(step)``.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics (name -> number) of a step. A step may be logged several times."""
        ...

    def close(self) -> None:
        """Write pending output. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# --- terminals ------------------------------------------------------------------------------------------

_MAIN_METRICS: dict[str, tuple[str, ...]] = {
    "loss": ("loss",),
    "reward": ("mean_reward", "reward"),
    "kl": ("mean_kl", "kl"),
    "entropy": ("entropy",),
    "accuracy": ("accuracy", "rewards/accuracies"),
    "margin": ("rewards/margins",),
    "length": ("completions/mean_length",),
    "lr": ("learning_rate", "lr"),
    "tokens/s": ("tokens_per_second", "tokens_per_s", "tokens/s"),
}
"""Labels of a line, in order, with the candidate metric names of each: the first that is present is shown."""


def main_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return main metrics and evaluations by label, as text; all metrics if there are none of these."""
    known = {
        label: next(metrics[name] for name in names if name in metrics)
        for label, names in _MAIN_METRICS.items()
        if any(name in metrics for name in names)
    }
    shown = (known | _evaluations(metrics)) or metrics
    return {label: _text(label, number) for label, number in shown.items()}


def _text(label: str, value: Any) -> str:
    number = as_number(value, label)
    if label == "tokens/s" or isinstance(number, int):
        return f"{number:,.0f}" if math.isfinite(number) else str(number)
    if label == "lr" or (number != 0 and not 1e-3 <= abs(number) < 1e5):
        return f"{number:.2e}"
    return f"{number:.4f}" if abs(number) < 100 else f"{number:.1f}"


def _line(texts: Mapping[str, str]) -> str:
    return "  ".join(f"{label} {text}" for label, text in texts.items())


def _evaluations(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}


class ConsoleLogger(Logger):
    """Print a line of main metrics for the first step, every ``log_interval`` steps, and the last.

    Evaluations (metrics named ``eval/...``) always get a line.

    Raises:
        WhetValueError: log_interval is not an integer above 0.
    """

    def __init__(self, log_interval: int = 100) -> None:
        self.log_interval = check_integer("ConsoleLogger", "log_interval", log_interval, 1)
        self._printed_step: int | None = None
        self._pending: tuple[Mapping[str, float], int] | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if _evaluations(metrics):
            print(f"step {step:>6}  {_line(main_metrics(metrics))}", flush=True)
            return
        self._pending = (dict(metrics), step)
        if self._printed_step is None or step // self.log_interval > self._printed_step // self.log_interval:
            self._print_pending()

    def _print_pending(self) -> None:
        if self._pending is not None:
            metrics, step = self._pending
            print(f"step {step:>6}  {_line(main_metrics(metrics))}", flush=True)
            self._printed_step, self._pending = step, None

    def close(self) -> None:
        self._print_pending()


class ProgressLogger(Logger):
    """Progress bar with the main metrics and the remaining time.

    If standard output is not a terminal (a pipe, a file, a notebook), prints a plain line every ``interval_s`` seconds,
    without escape codes. The remaining time is the number of remaining steps times the mean time per step.

    Args:
        total_steps: the number of the last step; a trainer may set the attribute later. None: unknown.
        description: label in front of the bar.
        interval_s: seconds between plain lines without a terminal.

    Raises:
        WhetValueError: total_steps is not an integer >= 0, or interval_s is not a number >= 0.
        MissingExtraError: on a terminal, if rich is not installed.
    """

    def __init__(self, total_steps: int | None = None, description: str = "train", *, interval_s: float = 10.0) -> None:
        self.total_steps = check_integer("ProgressLogger", "total_steps", total_steps, 0, optional=True)
        if not (is_number(interval_s) and interval_s >= 0):
            raise WhetValueError(f"ProgressLogger: interval_s is {interval_s!r}, expected seconds >= 0.")
        self.description = description
        self.interval_s = interval_s
        self._start: tuple[int, float] | None = None  # the first logged step and its time
        self._printed_s = -math.inf
        self._pending = ""
        self._metrics: dict[str, str] = {}
        self._last_step: int | None = None
        self._bar: Any = None
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            self._bar = _make_bar(description)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now_s = time.monotonic()
        if self._start is None:
            self._start = (step, now_s)
        # A step's metrics and its evaluation may be logged in two calls; the bar keeps the latest of each.
        kept = self._metrics if self._bar is not None or step == self._last_step else {}
        self._metrics, self._last_step = kept | main_metrics(metrics), step
        if self._bar is not None:
            self._show(step, now_s)
            return
        total = f"/{self.total_steps}" if self.total_steps else ""
        texts = _line(self._metrics)
        self._pending = f"{self.description} {step}{total}  {texts}  {self._time(step, now_s)}".rstrip()
        if _evaluations(metrics) or now_s - self._printed_s >= self.interval_s:
            self._printed_s = now_s
            self._print_pending()

    def _print_pending(self) -> None:
        if self._pending:
            print(self._pending, flush=True)
            self._pending = ""

    def _show(self, step: int, now_s: float) -> None:
        wanted = ("reward", "kl") if "reward" in self._metrics else ("loss",)
        evaluation = next((name for name in self._metrics if name.startswith("eval/")), "")
        names = [name for name in (*wanted, "tokens/s", evaluation) if name in self._metrics]
        texts = [f"{name.removeprefix('eval/')} {self._metrics[name]}" for name in names]
        used = len(self.description) + 2 * len(str(self.total_steps)) + len("  eta 0:00:00  ") + _MIN_BAR_WIDTH
        while texts and used + len("  ".join(texts)) > self._bar.console.width:
            texts.pop()
        text = "  ".join(texts)
        task = self._bar.task_ids[0]
        clock = self._time(step, now_s)
        self._bar.update(task, completed=step, total=self.total_steps, figures=text, clock=clock, refresh=True)

    def _time(self, step: int, now_s: float) -> str:
        """Return the remaining time, or at the end the elapsed time."""
        if self._start is None or self.total_steps is None or step <= self._start[0]:
            return ""
        elapsed_s = now_s - self._start[1]
        if step >= self.total_steps:
            return f"in {_clock(elapsed_s)}"
        return f"eta {_clock(elapsed_s / (step - self._start[0]) * (self.total_steps - step))}"

    def close(self) -> None:
        self._print_pending()
        if self._bar is not None and self._bar.live.is_started:
            if self._start is not None:  # also after early stopping
                clock = f"in {_clock(time.monotonic() - self._start[1])}"
                self._bar.update(self._bar.task_ids[0], clock=clock, refresh=True)
            self._bar.stop()


_MIN_BAR_WIDTH = 8
"""Minimum columns of the bar; narrow terminals show fewer metrics."""


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _make_bar(description: str) -> Any:
    check_installed("ProgressLogger", "rich")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        MofNCompleteColumn(),
        TextColumn(" {task.fields[figures]} "),
        TextColumn("{task.fields[clock]}", style="dim"),
    )
    # No refresh thread: a reward function may fork, which must not happen while rich's lock is held.
    bar = Progress(*columns, auto_refresh=False)
    bar.add_task(description, total=None, figures="", clock="")
    bar.start()
    return bar


# --- files ----------------------------------------------------------------------------------------------


def as_number(value: Any, name: str) -> int | float:
    """Convert a metric to a Python number; 0-dimensional arrays and tensors are numbers.

    Raises:
        WhetTypeError: value is not a number.
    """
    if not isinstance(value, (str, bytes)):
        for convert in (operator.index, float):
            try:
                return convert(value)
            except (TypeError, ValueError, RuntimeError):
                continue
    raise WhetTypeError(f"log: the metric {name!r} is {value!r}, expected a number. Log numbers only.")


def _standard_json(value: Any, name: str) -> Any:
    """Convert a value to standard JSON. NaN and infinities become strings that float() parses."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _standard_json(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_standard_json(item, name) for item in value]
    number = as_number(value, name)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


class _FileLogger(Logger):
    """Unbuffered file of lines. Creates its folder, and removes an incomplete last line."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        drop_torn_line(self.path)

    def _append(self, text: str) -> None:
        # Opened for every row: nothing is lost if the process is killed, shared with a fork, or left open.
        with disk_full_errors(self.path, len(text)), self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)


class JSONLLogger(_FileLogger):
    """Log a JSON object per line: ``{"step": 3, "loss": 0.69}``. Lines are written immediately.

    NaN and infinities, which JSON lacks, are written as "NaN", "Infinity" and "-Infinity".

    Args:
        path: the file; its folder is created, and an incomplete last line is removed.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        numbers = {name: as_number(value, name) for name, value in metrics.items()}
        self.write({**numbers, "step": step})

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row of JSON values, with its "step" first."""
        row = {"step": row["step"], **row}
        self._append(json.dumps(_standard_json(row, "row"), allow_nan=False) + "\n")

    def truncate_after(self, step: int) -> None:
        """Remove the rows of later steps, for a run that resumes at ``step``.

        Raises:
            WhetValueError: a line is not an object with a "step"; the file is unchanged.
        """
        kept = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError) as error:
                raise WhetValueError(
                    f"truncate_after: {self.path}:{number} is not a JSON object with a step. Repair or remove the line."
                ) from error
        replace_text(self.path, "".join(kept))


class CSVLogger(_FileLogger):
    """Log a table with "step" first and a column per metric. Rows are written immediately.

    A new metric adds a last column: the file is rewritten atomically, with empty cells above. A step that is logged
    twice has two rows.

    Args:
        path: the file; its folder is created, and an incomplete last row is removed.

    Raises:
        WhetValueError: the file exists and does not begin with a "step" column.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        rows = self._read()
        self._columns = rows[0] if rows else ["step"]
        if self._columns[:1] != ["step"]:
            raise WhetValueError(
                f"CSVLogger: {self.path} begins with {self._columns[:1]}, expected a column named step. "
                f"Pass the path of a file of CSVLogger, or of a new file."
            )
        if not rows:
            replace_text(self.path, _csv_text([self._columns]))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        row = {name: as_number(value, name) for name, value in metrics.items()} | {"step": step}
        new = [name for name in row if name not in self._columns]
        if new:
            self._rewrite([*self._columns, *new], self._read()[1:])
        self._append(_csv_text([[row.get(name, "") for name in self._columns]]))

    def truncate_after(self, step: int) -> None:
        """Remove the rows of later steps, for a run that resumes at ``step``."""
        self._rewrite(self._columns, [row for row in self._read()[1:] if int(row[0]) <= step])

    def _read(self) -> list[list[str]]:
        with self.path.open(encoding="utf-8", newline="") as file:
            return list(csv.reader(file))

    def _rewrite(self, columns: list[str], rows: list[list[str]]) -> None:
        self._columns = columns
        padded = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
        replace_text(self.path, _csv_text([columns, *padded]))


def _csv_text(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


# --- services -------------------------------------------------------------------------------------------


class TensorBoardLogger(Logger):
    """Log scalars to TensorBoard.

    Args:
        log_dir: the folder for ``tensorboard --logdir``.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        check_installed("TensorBoardLogger", "tensorboard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer = SummaryWriter
        self.log_dir = os.fspath(log_dir)
        self._writer = SummaryWriter(self.log_dir)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, as_number(value, name), step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Make TensorBoard hide later steps, for a run that resumes at ``step``."""
        self._writer.close()
        self._writer = self._make_writer(self.log_dir, purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()


class WandbLogger(Logger):
    """Log metrics to Weights & Biases.

    Args:
        project: name of the project.
        **init: passed to ``wandb.init``: name, config, mode="offline", resume, ...

    Raises:
        MissingExtraError: wandb is not installed.
        WhetError: no API key, or no connection.
    """

    def __init__(self, project: str, **init: Any) -> None:
        check_installed("WandbLogger", "wandb", extra="wandb")
        import wandb  # pyright: ignore[reportMissingImports]

        try:
            self._run = wandb.init(project=project, **init)
        except wandb.errors.Error as error:  # pyright: ignore[reportAttributeAccessIssue]
            raise WhetError(
                f"WandbLogger: {str(error).strip()} Run `wandb login`, or set WANDB_MODE=offline and upload the run "
                "later."
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({name: as_number(value, name) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._run.finish()
