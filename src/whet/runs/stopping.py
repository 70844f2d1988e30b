"""Checkpoints of a run that is stopped by a signal or an error."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from whet.checkpoint.folder import step_folder
from whet.runs.resume import Notify
from whet.training.callbacks import CheckpointCallback
from whet.training.launch import is_over


class Stopped(KeyboardInterrupt):
    """A run ended by a signal."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number


class StoppableCheckpoints(CheckpointCallback):
    """Writes checkpoints also when an error ends the run and, within its context, after the current step on Ctrl-C or
    SIGTERM.

    A second signal ends the run at once, without a checkpoint.

    Raises:
        Stopped: when the checkpoint is complete.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, folder: Path, every: int, keep: int, notify: Notify) -> None:
        super().__init__(folder, every, keep)
        self._notify = notify

    def __enter__(self) -> None:
        self._signal: int | None = None
        self._process = os.getpid()
        is_main = threading.current_thread() is threading.main_thread()  # others cannot set handlers
        self._previous_handlers = {number: signal.signal(number, self._stop) for number in self._SIGNALS if is_main}

    def __exit__(self, *exception: object) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: object) -> None:
        if os.getpid() != self._process:  # a fork by a reward function, such as a pool of workers
            self._restore_handlers()
            signal.raise_signal(number)
        elif self._signal is None:
            self._signal = number
            if is_over():  # torchrun ends this rank because of another rank's error
                return
            # Not print, which is not reentrant.
            os.write(2, b"\nstopping after this step, with a checkpoint; repeat the signal to stop at once\n")
        else:
            raise Stopped(number)

    def on_step_end(self, trainer: Any, metrics: MutableMapping[str, float]) -> None:
        super().on_step_end(trainer, metrics)
        self._stop_if_signalled(trainer)

    def on_train_end(self, trainer: Any) -> None:
        super().on_train_end(trainer)
        self._stop_if_signalled(trainer)

    def on_train_failure(self, trainer: Any, error: Exception) -> None:
        super().on_train_failure(trainer, error)
        checkpoint = step_folder(self.folder, trainer.step)
        if checkpoint.is_dir():
            self._notify(f"wrote {checkpoint}; the same command resumes from it once the cause is fixed")

    def _stop_if_signalled(self, trainer: Any) -> None:
        # A signal may reach ranks in different steps, or only one rank: all stop after the same step.
        signals = [number for number in trainer.ranks.all_gather(self._signal) if number is not None]
        if signals:
            super().on_train_end(trainer)
            self._notify(f"wrote {step_folder(self.folder, trainer.step)}; the same command resumes from it")
            raise Stopped(signals[0])
