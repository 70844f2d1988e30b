"""Callbacks of a training run: evaluation, early stopping, checkpoints, a log of the completions.

A callback is called before the first step, after every step and after the last. It is independent of the algorithm, and
accesses the trainer through the ``Trainer`` protocol below.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from whet.checkpoint.folder import preserved_rng, prune_checkpoints, step_folder
from whet.errors import DiskFullError, WhetTypeError, WhetValueError, check_integer, is_number
from whet.files import FolderLock
from whet.training.distributed import join_ranks
from whet.training.loggers import JSONLLogger, as_number


class Trainer(Protocol):
    """Interface of a trainer to callbacks."""

    step: int
    """Number of completed steps; 0 before the first, k in a run that resumes after step k."""

    should_stop: bool
    """Set by a callback to end the run after this step."""

    last_completions: Sequence[Mapping[str, Any]]
    """Completions of the last step, one row each: prompt, completion, reward, ..."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics at the current step."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint."""
        ...


class Callback:
    """Base class whose methods are no-ops; subclasses override some.

    Under torchrun callbacks run on every rank, since ranks share an evaluation; a callback that writes should do so
    only if ``trainer.ranks.is_first``.

    A callback with state returns it from ``state_dict``, as plain values, so that a checkpoint can save it and a
    resumed run continues as if it had never stopped.
    """

    def on_train_begin(self, trainer: Trainer, total_steps: int) -> None:
        """Run before the first step of a new or resumed run that ends with step ``total_steps``."""

    def on_step_end(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        """Run after each step. Later callbacks see metrics added here.

        The default calls ``on_train_batch``.
        """
        self.on_train_batch(**metrics)

    def on_train_batch(self, **metrics: float) -> None:
        """Run after each step with its metrics, as in rlox."""

    def on_train_end(self, trainer: Trainer) -> None:
        """Run after the last step, also if the run was stopped early."""

    def on_train_failure(self, trainer: Trainer, error: Exception) -> None:
        """Run if an error ends the run and the trainer is in its state after the last completed step."""

    def on_train_exit(self, trainer: Trainer) -> None:
        """Run at the end in every case, also after an exception: release resources of ``on_train_begin``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state_dict``."""


class RloxCallback(Callback):
    """Adapter that calls an rlox callback as rlox does: at the beginning, after each step, and at the end.

    Args:
        callback: has some of ``on_training_start()``, ``on_train_batch(**metrics)``, ``on_step(reward=, step=)``, which
            ends the run by returning False, and ``on_training_end()``.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def on_train_begin(self, trainer: Trainer, total_steps: int) -> None:
        self._call("on_training_start")

    def on_step_end(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        self._call("on_train_batch", **metrics)
        if self._call("on_step", reward=metrics.get("mean_reward", 0.0), step=trainer.step) is False:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer) -> None:
        self._call("on_training_end")

    def _call(self, name: str, **arguments: Any) -> Any:
        method = getattr(self.callback, name, None)
        return None if method is None else method(**arguments)


def as_callback(callback: Any) -> Any:
    """Return the callback, wrapped in an ``RloxCallback`` if it has no ``on_step_end``."""
    return callback if hasattr(callback, "on_step_end") else RloxCallback(callback)


class EvaluationCallback(Callback):
    """Evaluate the model every ``every`` steps, and after the last step.

    The results are logged as ``eval/NAME`` and added to the step's metrics. Random states are restored after each
    evaluation, so that evaluations do not change a run.

    Args:
        evaluate: function of the trainer that returns name -> number.
        every: steps between evaluations.
        at_start: also evaluate before the first step (not in a resumed run).

    Attributes:
        history: the results so far, such as ``{"step": 100, "accuracy": 0.41}``.

    Raises:
        WhetValueError: every is not an integer above 0.
        WhetTypeError: evaluate is not callable, or did not return numbers by name.
    """

    def __init__(self, evaluate: Callable[[Any], Mapping[str, float]], every: int, at_start: bool = True) -> None:
        if not callable(evaluate):
            raise WhetTypeError(f"EvaluationCallback: evaluate is {evaluate!r:.60}, expected a callable.")
        self.evaluate = evaluate
        self.every = check_integer("EvaluationCallback", "every", every, 1)
        self.at_start = at_start
        self.history: list[dict[str, float]] = []

    def on_train_begin(self, trainer: Trainer, total_steps: int) -> None:
        if self.at_start and trainer.step == 0:
            self._run(trainer)

    def on_step_end(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        if trainer.step % self.every == 0:
            metrics.update(self._run(trainer))

    def on_train_end(self, trainer: Trainer) -> None:
        if not self.history or self.history[-1]["step"] != trainer.step:
            self._run(trainer)

    def _run(self, trainer: Trainer) -> dict[str, float]:
        with preserved_rng():
            result = self.evaluate(trainer)
        if not isinstance(result, Mapping):
            raise WhetTypeError(
                f"EvaluationCallback: evaluate returned {result!r}, expected a dict of numbers by name."
            )
        numbers = {str(name): as_number(value, str(name)) for name, value in result.items()}
        self.history.append({"step": trainer.step, **numbers})
        logged = {f"eval/{name}": number for name, number in numbers.items()}
        trainer.log(logged)
        return logged

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = [dict(row) for row in state["history"]]


class EarlyStoppingCallback(Callback):
    """Stop the run when a metric reaches its target or stops improving.

    Reads the metrics of each step, including metrics of an ``EvaluationCallback`` earlier in the list. Steps without
    the metric are ignored; NaN does not count as an improvement.

    Args:
        metric: name of the metric, such as "eval/accuracy" or "mean_reward".
        patience: stop after this many consecutive values without improvement over the best.
        mode: "max" or "min", the direction of improvement.
        min_delta: smallest improvement that counts.
        target: stop as soon as the metric reaches this value; None: no target.

    Attributes:
        reason: reason why the run was stopped; None if it was not.

    Raises:
        WhetValueError: patience is not an integer above 0, min_delta or target is not a finite number, min_delta is
            negative, or mode is neither "max" nor "min".
    """

    def __init__(
        self,
        metric: str,
        patience: int,
        mode: Literal["max", "min"] = "max",
        min_delta: float = 0.0,
        target: float | None = None,
    ) -> None:
        if mode not in ("max", "min"):
            raise WhetValueError(f"EarlyStoppingCallback: mode is {mode!r}, expected 'max' or 'min'.")
        if not (is_number(min_delta) and min_delta >= 0):
            raise WhetValueError(f"EarlyStoppingCallback: min_delta is {min_delta!r}, expected a finite number >= 0.")
        if target is not None and not is_number(target):
            raise WhetValueError(f"EarlyStoppingCallback: target is {target!r}, expected a finite number, or None.")
        self.metric = metric
        self.patience = check_integer("EarlyStoppingCallback", "patience", patience, 1)
        self.min_delta = min_delta
        self.target = target
        self.reason: str | None = None
        self._sign = 1.0 if mode == "max" else -1.0
        self._best = -math.inf  # maximum of sign * metric
        self._n_worse = 0
        self._n_seen = 0
        self._names: set[str] = set()

    def on_step_end(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        if self.metric not in metrics:
            self._names.update(metrics)
            return
        self._n_seen += 1
        value = self._sign * float(metrics[self.metric])
        if value > self._best + self.min_delta:
            self._best, self._n_worse = value, 0
        else:
            self._n_worse += 1
        if self.target is not None and value >= self._sign * self.target:
            self._stop(trainer, f"{self.metric} reached {metrics[self.metric]:.4g} (target {self.target:.4g})")
        elif self._n_worse >= self.patience:
            best = self._sign * self._best
            self._stop(trainer, f"{self.metric} was not better than {best:.4g} {self._n_worse} times in a row")

    def _stop(self, trainer: Trainer, reason: str) -> None:
        self.reason = f"{reason} at step {trainer.step}"
        trainer.should_stop = True

    def on_train_end(self, trainer: Trainer) -> None:
        if not self._n_seen and self._names:
            warnings.warn(
                f"EarlyStoppingCallback: no step had the metric {self.metric!r}, so nothing could stop the "
                f"run. Steps had {', '.join(sorted(self._names))}.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "n_worse": self._n_worse, "n_seen": self._n_seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._n_worse, self._n_seen = state["best"], state["n_worse"], state["n_seen"]


class CheckpointCallback(Callback):
    """Save ``folder/step-000100`` every ``every`` steps, after the last step, and if an error ends the run.

    Keeps the newest checkpoints; an older one is removed only after the new one is complete. Put this callback last:
    the checkpoint does not include effects of later callbacks in the same step.

    During a run the process locks the folder (``whet.files.FolderLock``).

    Args:
        folder: created if missing; ``latest_checkpoint(folder)`` finds the checkpoint to resume from.
        every: steps between checkpoints.
        keep: number of checkpoints to keep.

    Raises:
        WhetValueError: every or keep is not an integer above 0.
        FolderInUseError: at the beginning of a run, another process uses this folder.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int, keep: int = 2) -> None:
        self.folder = Path(folder)
        self._lock = FolderLock(folder)
        self.every = check_integer("CheckpointCallback", "every", every, 1)
        self.keep = check_integer("CheckpointCallback", "keep", keep, 1)
        self._saved_step = 0

    def on_train_begin(self, trainer: Trainer, total_steps: int) -> None:
        if join_ranks().is_first:
            self._lock.acquire()
        self._saved_step = trainer.step

    def on_step_end(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        if trainer.step % self.every == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer) -> None:
        if trainer.step != self._saved_step:
            self._save(trainer)

    def on_train_failure(self, trainer: Trainer, error: Exception) -> None:
        if trainer.step != self._saved_step and not isinstance(error, DiskFullError):
            self._save(trainer)

    def on_train_exit(self, trainer: Trainer) -> None:
        self._lock.release()

    def _save(self, trainer: Trainer) -> None:
        path = step_folder(self.folder, trainer.step)
        trainer.save(path)
        self._saved_step = trainer.step
        if join_ranks().is_first:
            prune_checkpoints(self.folder, newest=path, keep=self.keep)


class CompletionsCallback(Callback):
    """Append every completion of every step, with its step, to a JSONL file.

    A resumed run removes the rows of later steps and writes them again.

    Args:
        path: the file, such as ``completions.jsonl``.

    Raises:
        WhetTypeError: the trainer does not sample completions.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._rows = JSONLLogger(path)

    def on_train_begin(self, trainer: Trainer, total_steps: int) -> None:
        if not hasattr(trainer, "last_completions"):
            raise WhetTypeError(
                f"CompletionsCallback: {type(trainer).__name__} has no last_completions: it does not sample. "
                f"Remove the callback."
            )
        if join_ranks().is_first:
            self._rows.truncate_after(trainer.step)

    def on_step_end(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        for row in trainer.last_completions if join_ranks().is_first else []:
            self._rows.write({"step": trainer.step, **row})
