"""The loop of a trainer over a dataset: batches are prepared a few steps ahead and trained once, also after errors."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from whet.data.batches import Place, Rewindable, batch_stream, batches_in_order, is_batch, is_sequence
from whet.errors import WhetTypeError, WhetValueError, check_integer
from whet.training.prefetch import PREFETCH, Prefetcher, check_forms, is_in_memory, locate_error
from whet.training.state import Snapshot

if TYPE_CHECKING:
    from whet.training.trainer import Trainer


class DatasetReader:
    """State of a trainer's datasets between steps and calls.

    Attributes:
        upcoming: within ``train``, the prepared batches of the trainer's ``lookahead`` steps after the next, fewer at
            the end; else None.

    Methods take the trainer as an argument, so that no reference cycle delays the release of its memory.
    """

    def __init__(self) -> None:
        self._after_batch: Place | None = None
        """Place in the dataset after the batch drawn by ``take`` and not yet counted as a step."""
        self._iterator = Rewindable(iter(()))
        """The last iterator dataset, with the items not yet counted as a step."""
        self._prepared: tuple[tuple[Any, ...], Any] | None = None
        self.upcoming: list[Any] | None = None
        self._checked: tuple[Any, int] = None, 0
        """Dataset whose rows were checked, and their number."""

    def open(self, trainer: Trainer, dataset: Any) -> tuple[Prefetcher[Any], int | None, int | None]:
        """Return the batches from the trainer's place on, the steps left in the epoch, and the steps per epoch."""
        if isinstance(dataset, Iterator) and not is_sequence(dataset):
            if self._iterator.source is not dataset:
                self._iterator = Rewindable(dataset)
            dataset = self._iterator
        config, place = trainer.config, Place(trainer.epoch, trainer.position)
        batches, n_left, per_epoch = batch_stream(
            dataset, config.batch_size, config.seed, place, trainer.row_fields, trainer.as_row
        )
        self.check_forms(trainer, dataset)
        depth = max(PREFETCH, 1 + trainer.lookahead)
        return Prefetcher(batches, lambda drawn: _prepare(trainer, dataset, drawn[0]), depth), n_left, per_epoch

    def take(self, trainer: Trainer, batches: Prefetcher[Any], n_left: int) -> tuple[Any, ...] | None:
        """Return the arguments of the next step; None at the end."""
        taken = batches.take(n_left)
        if taken is None:
            return None
        (arguments, self._after_batch), prepared = taken
        self._prepared = arguments, prepared
        self.upcoming = batches.upcoming(trainer.lookahead)
        return arguments

    def count(self, trainer: Trainer) -> None:
        """Advance the trainer's place past the batch of a completed step, if ``take`` has drawn it."""
        if self._after_batch is not None:
            self._iterator.forget(self._after_batch.item - trainer.position)
            trainer.epoch, trainer.position = self._after_batch
            self._after_batch = None

    def close(self) -> None:
        """Return the batches not counted as a step to their iterator."""
        self._after_batch = self._prepared = self.upcoming = None
        self._iterator.rewind()

    def get_prepared(self, trainer: Trainer, batch: tuple[Any, ...]) -> Any:
        """Return ``trainer.prepare(*batch)``, reusing the result for the batch of ``take`` or ``iter_batches``."""
        known, self._prepared = self._prepared, None
        given = [argument for argument in batch if argument is not None]
        if known is not None and len(known[0]) == len(given) and all(map(operator.is_, known[0], given)):
            return known[1]
        return trainer.prepare(*batch)

    def iter_batches(self, trainer: Trainer, dataset: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of ``train_step`` for one pass over a dataset, in order."""
        where = f"{type(trainer).__name__}.evaluate"
        size = trainer.config.batch_size
        for batch in batches_in_order(dataset, size, trainer.row_fields, trainer.as_row, where):
            self._prepared = batch, _prepare(trainer, dataset, batch)
            yield batch

    def check_forms(self, trainer: Trainer, dataset: Any) -> None:
        """Check the form of all rows of an in-memory dataset, once."""
        if not is_in_memory(dataset) or is_batch(dataset[0], trainer.row_fields):
            return
        if self._checked[0] is not dataset or self._checked[1] != len(dataset):
            check_forms(dataset, trainer.tokenize_row, trainer.as_row, trainer.tokenizer is not None)
            self._checked = dataset, len(dataset)


def _prepare(trainer: Trainer, dataset: Any, batch: tuple[Any, ...]) -> Any:
    try:
        return trainer.prepare(*batch)
    except (WhetValueError, WhetTypeError) as error:
        located = locate_error(error, dataset, batch[0], trainer.prepare, trainer.as_row, trainer.step + 1)
        if located is error:
            raise
        raise located from error


def run_steps(trainer: Trainer, dataset: Any, steps: int | None, n_epochs: int | None) -> dict[str, float]:
    """Run ``Trainer.train``."""
    if steps is not None and n_epochs is not None:
        raise WhetTypeError(f"train: steps is {steps} and n_epochs {n_epochs}. Pass one of them.")
    steps = check_integer("train", "steps", steps, 0, optional=True)
    n_epochs = check_integer("train", "n_epochs", n_epochs, 1, optional=True)
    reader = trainer.reader
    batches, n_left, per_epoch = reader.open(trainer, dataset)
    if steps is None:
        if n_left is None or per_epoch is None:
            raise WhetValueError(
                "train: the dataset has no length, so that the end of an epoch is unknown. Pass steps."
            )
        steps = n_left + ((n_epochs or 1) - 1) * per_epoch
    last_step = trainer.step + steps
    trainer.extend_schedule(last_step)
    if trainer.ranks.size > 1:
        facts = {**dataclasses.asdict(trainer.config), "step": trainer.step}
        facts |= {"position": (trainer.epoch, trainer.position), "last step": last_step}
        facts["the sum of the weights"] = trainer.policy.checksum()
        trainer.ranks.check_same("train", facts)
    trainer.should_stop = False
    for logger in trainer.loggers:
        if getattr(logger, "total_steps", 0) is None:
            logger.total_steps = last_step
    metrics: dict[str, float] = {}
    before = None
    try:
        for callback in trainer.callbacks:
            callback.on_train_begin(trainer, last_step)
        while trainer.step < last_step and not trainer.should_stop:
            before = Snapshot(trainer) if trainer.callbacks else None
            arguments = reader.take(trainer, batches, last_step - trainer.step)
            if arguments is None:
                break
            metrics = trainer.train_step(*arguments)
            trainer.should_stop = trainer.ranks.any(trainer.should_stop)
        for callback in trainer.callbacks:
            callback.on_train_end(trainer)
    except Exception as error:
        if before is not None and before.restore(trainer) and trainer.can_save():
            with suppress(OSError):  # from a checkpoint: ``error`` ended the run
                for callback in trainer.callbacks:
                    callback.on_train_failure(trainer, error)
        raise
    finally:
        reader.close()
        for callback in trainer.callbacks:
            callback.on_train_exit(trainer)
    return metrics
