"""Save a trainer as a checkpoint folder, and restore it exactly.

``whet.checkpoint`` has the folder format, its integrity checks and the states of random generators.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from whet.checkpoint.folder import capture_rng, load_checkpoint, restore_rng, save_checkpoint
from whet.checkpoint.modules import build_module, describe_module, load_module_tensors, module_tensors
from whet.checkpoint.unpack import adapter_settings
from whet.config.fields import make_config
from whet.errors import CheckpointError, WhetError
from whet.models.base_record import check_record
from whet.nn.frozen import base_of
from whet.nn.modules import module_device

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
    base = base_of(trainer.model)
    whole = all(parameter.requires_grad for parameter in trainer.model.parameters())
    tensors = {"model": module_tensors(trainer.model) if whole else dict(trainer.policy.trainable), "optimizer": {}}
    for name, parameter in trainer.policy.trainable.items():
        for key, value in trainer.policy.optimizer.state[parameter].items():
            tensors["optimizer"][f"{name}.{key}"] = value
    if own := trainer.extra_tensors():
        tensors["own"] = own
    state = {
        "algorithm": type(trainer).__name__,
        "config": dataclasses.asdict(trainer.config),
        "counters": _counters(trainer),
        "callbacks": [[type(c).__name__, c.state_dict()] for c in trainer.callbacks],
        "rng": capture_rng(),
        "whole_model": whole,
        "model": describe_module(trainer.model),
        "adapter": adapter_settings(trainer.model),
        "base": None if base is None else base.record(),
        "ref_model": None,
        "adapters_off": trainer.policy.reference.adapters_off,
    }
    if first_values := trainer.policy.reference.first_values:
        tensors["reference"] = first_values
    if trainer.ref_model is not None and trainer.config.uses_reference_model():
        tensors["ref_model"] = module_tensors(trainer.ref_model)
        state["ref_model"] = describe_module(trainer.ref_model)
    save_checkpoint(path, tensors, state)


def load_trainer(
    trainer_class: type[AnyTrainer],
    path: str | os.PathLike[str],
    model: nn.Module | None,
    ref_model: nn.Module | None,
    arguments: dict[str, Any],
) -> AnyTrainer:
    """``Trainer.from_checkpoint``."""
    where = f"{trainer_class.__name__}.from_checkpoint"
    tensors, state = load_checkpoint(path)
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
        if model is not None and "base" in state:
            check_record(state["base"], base_of(model), where, str(path))
        model = build_module(state["model"]) if model is None else model
        if state["whole_model"]:
            load_module_tensors(model, tensors["model"])
        undescribed = state["ref_model"] is not None and state["ref_model"]["undescribed"]
        if state["ref_model"] is not None and config.has_reference():
            if ref_model is None and undescribed:
                ref_model = copy.deepcopy(model)
            elif ref_model is None:
                ref_model = build_module(state["ref_model"]).to(module_device(model))
            load_module_tensors(ref_model.requires_grad_(False), tensors["ref_model"])
    trainer = trainer_class(model, ref_model, **arguments)
    with _report_as_malformed(path):
        _restore(trainer, tensors, state, where)
    return trainer


def _restore(
    trainer: Trainer, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], where: str
) -> None:
    if not state["whole_model"]:
        saved, own = ({n: t.shape for n, t in part.items()} for part in (tensors["model"], trainer.policy.trainable))
        if saved != own:
            different = sorted(n for n in {*saved, *own} if saved.get(n) != own.get(n))[:5]
            raise CheckpointError(
                f"{where}: the trained parameters of the checkpoint and of model differ in {', '.join(different)}. "
                f"Pass a model with the same adapters."
            )
        with torch.no_grad():
            for name, parameter in trainer.policy.trainable.items():
                parameter.copy_(tensors["model"][name])
    for name, value in tensors["optimizer"].items():
        name, key = name.rsplit(".", 1)
        parameter = trainer.policy.trainable[name]
        if value.numel() != 1 if key == "step" else value.shape != parameter.shape:
            raise ValueError(f"the optimizer's {key} of {name} has shape {tuple(value.shape)}")
        trainer.policy.optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)
    trainer.policy.reference.load(tensors.get("reference", {}), state.get("adapters_off", True), where)
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
