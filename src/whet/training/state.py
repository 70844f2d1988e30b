"""Save a trainer as a checkpoint folder, and restore it exactly.

``whet.checkpoint`` has the folder format, its integrity checks and the states of random generators.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from whet.checkpoint.folder import capture_rng, load_checkpoint, restore_rng, save_checkpoint
from whet.config.fields import make_config
from whet.errors import CheckpointError, WhetError
from whet.learner import Learner
from whet.training.policy import policy_class

if TYPE_CHECKING:
    from whet.training.trainer import Trainer

AnyTrainer = TypeVar("AnyTrainer", bound="Trainer")

_COUNTERS = (
    "step", "epoch", "position", "num_tokens", "skipped_steps", "n_updates", "_skipped_in_a_row", "_horizon",
)  # fmt: skip


def _counters(trainer: Trainer) -> dict[str, int]:
    return {name: getattr(trainer, name) for name in _COUNTERS}


class Snapshot:
    """Counters and random states of a trainer before a step."""

    def __init__(self, trainer: Trainer) -> None:
        self._counters, self._rng = _counters(trainer), capture_rng()

    def restore(self, trainer: Trainer) -> bool:
        """Undo a partial step since the snapshot, if any; return False if it has changed the weights."""
        before = self._counters
        if trainer.step != before["step"]:
            return True
        if trainer.n_updates != before["n_updates"]:
            return False
        for name, value in before.items():
            setattr(trainer, name, value)
        restore_rng(self._rng)
        return True


def save_trainer(trainer: Trainer, path: str | os.PathLike[str]) -> None:
    """``Trainer.save``."""
    tensors, state = trainer.policy.state()
    if own := trainer.extra_tensors():
        tensors["own"] = own
    state |= {
        "algorithm": type(trainer).__name__,
        "config": dataclasses.asdict(trainer.config),
        "counters": _counters(trainer),
        "callbacks": [[type(c).__name__, c.state_dict()] for c in trainer.callbacks],
        "rng": capture_rng(),
    }
    save_checkpoint(path, tensors, state)


def load_trainer(
    trainer_class: type[AnyTrainer],
    path: str | os.PathLike[str],
    model: Any,
    ref_model: Any,
    arguments: dict[str, Any],
) -> AnyTrainer:
    """``Trainer.from_checkpoint``."""
    where = f"{trainer_class.__name__}.from_checkpoint"
    tensors, state = load_checkpoint(path, as_arrays=isinstance(model, Learner))
    if state.get("algorithm") != trainer_class.__name__:
        raise CheckpointError(f"{where}: {path} was saved by {state.get('algorithm')}. Load it with that class.")
    if model is None and not state.get("whole_model"):
        raise CheckpointError(
            f"{where}: {path} holds only the trained part of its model. Pass model=, constructed as before training."
        )
    # Saved settings may require arguments that the new settings do not, such as a reference.
    with _report_as_malformed(path):
        changed = {n: v for n, v in arguments.items() if n in state["config"] and n != "engine"}
        saved = trainer_class.config_class(**state["config"])
    config = arguments.setdefault("config", make_config(trainer_class.config_class, saved, changed))
    with _report_as_malformed(path):
        build = policy_class(model, where).build_models
        model, ref_model = build(model, ref_model, tensors, state, config, where, str(path))
    trainer = trainer_class(model, ref_model, **arguments)
    with _report_as_malformed(path):
        _restore(trainer, tensors, state, where)
    return trainer


def _restore(trainer: Trainer, tensors: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any], where: str) -> None:
    trainer.policy.load_state(tensors, state, where)
    trainer.load_extra_tensors(tensors.get("own", {}))
    if "position" in state["counters"] and "epoch" not in state["counters"]:
        raise CheckpointError(
            f"{where}: the checkpoint counts its place in the data in batches, as in earlier versions of Whet, not in "
            "rows. Continue it with the version that saved it."
        )
    for name in _COUNTERS:
        setattr(trainer, name, operator.index(state["counters"][name]))
    for callback, (name, callback_state) in zip(trainer.callbacks, state["callbacks"], strict=False):
        if type(callback).__name__ == name:
            callback.load_state_dict(callback_state)
    for logger in trainer.loggers if trainer.ranks.is_first else []:
        if hasattr(logger, "truncate_after"):
            logger.truncate_after(trainer.step)
    restore_rng(state["rng"])


@contextmanager
def _report_as_malformed(path: str | os.PathLike[str]) -> Iterator[None]:
    """Report missing or invalid contents as a malformed checkpoint."""
    try:
        yield
    except WhetError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"from_checkpoint: {path} is malformed: {type(error).__name__}: {error}.") from error
