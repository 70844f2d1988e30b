"""LoRA adapters, from wherever they come, as the core takes them: parts of slots, the scaling in B."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.models.adapter_files import describe_special
from whet.models.architecture import ModelConfig
from whet.models.slots import LoRA, WeightLocation, factor_values, find_location, locate_lora
from whet.models.sources.live import open_module
from whet.ops.micro_lora import MicroLoRA

_TARGETS = {
    "qkv": _core.Target.QKV,
    "o": _core.Target.O,
    "gate_up": _core.Target.UP,
    "up": _core.Target.UP,
    "down": _core.Target.DOWN,
}


def adapter_parts(
    targets: Mapping[str, WeightLocation], config: ModelConfig, adapter: Any, where: str
) -> Iterator[tuple[Any, ...]]:
    """(layer, target, first row, A, B) of every matrix that an adapter changes; see ``Engine.add_adapter``.

    One after another, so that their copies take each other's memory.

    Raises:
        WhetValueError: a module that the model does not have, other shapes, or more than plain LoRA.
        WhetTypeError: it is no adapter.
    """
    return (_part(lora, where) for lora in _lora(targets, config, adapter, where))


def _lora(targets: Mapping[str, WeightLocation], config: ModelConfig, adapter: Any, where: str) -> Iterable[LoRA]:
    if isinstance(adapter, Sequence) and not isinstance(adapter, str) and all(isinstance(x, LoRA) for x in adapter):
        return adapter
    if hasattr(adapter, "named_modules"):
        source = open_module(adapter)
        if source.config != config:
            raise WhetValueError(f"{where}: the adapter is of another model.")
        if not source.adapters:
            raise WhetValueError(f"{where}: the model has no active LoRA adapter.")
        _check_alone(adapter, where)
        return source.adapters
    if isinstance(adapter, (str, os.PathLike)):
        from whet.models.adapter_files import read_peft

        adapter = read_peft(adapter)
    if not isinstance(adapter, Mapping) or not adapter:
        raise WhetTypeError(
            f"{where}: adapter is a {type(adapter).__name__}, expected a model in PEFT, PEFT's folder, or module names "
            f"with a MicroLoRA or (A, B, scaling) each."
        )
    return [_of_module(targets, config, name, value, where) for name, value in adapter.items()]


def _check_alone(model: Any, where: str) -> None:
    """Raise where the active adapters of a model in PEFT change more of it than their factors hold."""
    active = model.active_adapters  # of transformers' own models a method
    for name in cast("list[str]", active() if callable(active) else active):
        if special := describe_special(model.peft_config[name].to_dict(), f"{where}: adapter {name!r}", whole=True):
            raise WhetValueError(
                f"{where}: adapter {name!r} has {special}, which changes the model next to its factors. Make an engine "
                f"of the whole: Engine.from_model(model)."
            )


def _of_module(targets: Mapping[str, WeightLocation], config: ModelConfig, name: str, value: Any, where: str) -> LoRA:
    location = find_location(targets, name, where)
    if isinstance(value, MicroLoRA):
        a, b, scaling = value.A, value.B.T, value.alpha / value.rank
    else:
        try:
            a, b, scaling = value
            a, b, scaling = factor_values(a), factor_values(b), float(scaling)
        except (TypeError, ValueError, RuntimeError) as error:
            raise WhetTypeError(
                f"{where}: adapter[{name!r}] is {value!r:.60}, expected a MicroLoRA or (A, B, scaling) with two arrays "
                f"and a number ({error})."
            ) from None
    return locate_lora(config, location, a, b, scaling, where)


def _part(lora: LoRA, where: str) -> tuple[int, _core.Target, int, np.ndarray, np.ndarray]:
    _, layer, kind = lora.slot.split(".") if lora.slot.count(".") == 2 else ("", "", lora.slot)
    if kind not in _TARGETS:
        raise WhetValueError(
            f"{where}: an adapter of the {kind} cannot be kept apart. Merge it: merge_adapters=True; or, of a model on "
            f"a packed base, let torch sample: engine='torch'."
        )
    a, b = factor_values(lora.a), factor_values(lora.b)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.ascontiguousarray(np.float32(lora.scaling) * b)
    if not (np.isfinite(a).all() and np.isfinite(scaled).all()):
        raise WhetValueError(f"{where}: the adapter of {lora.slot} holds NaN or infinity, in A or in scaling B.")
    return int(layer), _TARGETS[kind], lora.first_row, np.ascontiguousarray(a), scaled
