"""Convert LoRA adapters of every kind to the core's form: rows of slots, with the scaling folded into B."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from whet import _core
from whet.engine.checks import check_same_model
from whet.errors import WhetTypeError, WhetValueError
from whet.learner.learner import Learner
from whet.models.adapter_files import describe_special
from whet.models.architecture import ModelConfig
from whet.models.lora import core_matrix
from whet.models.slots import LoRA, WeightLocation, factor_values, find_location, locate_lora
from whet.models.sources.live import open_module
from whet.ops.micro_lora import MicroLoRA


def adapter_parts(
    targets: Mapping[str, WeightLocation], config: ModelConfig, adapter: Any, where: str
) -> Iterator[tuple[Any, ...]]:
    """Yield (layer, target, first row, A, B) of every matrix that an adapter changes; see ``Engine.add_adapter``.

    Lazily, so that copies of factors reuse each other's memory.

    Raises:
        WhetValueError: an unknown module, wrong shapes, or more than plain LoRA.
        WhetTypeError: not an adapter.
    """
    return (_convert(lora, where) for lora in _list_lora(targets, config, adapter, where))


def _list_lora(targets: Mapping[str, WeightLocation], config: ModelConfig, adapter: Any, where: str) -> Iterable[LoRA]:
    if isinstance(adapter, Sequence) and not isinstance(adapter, str) and all(isinstance(x, LoRA) for x in adapter):
        return adapter
    if isinstance(adapter, Learner):
        source = adapter.source()
        check_same_model(config, source.config, where)
        return source.adapters
    if hasattr(adapter, "named_modules"):
        source = open_module(adapter)
        if source.config != config:
            raise WhetValueError(f"{where}: the adapter belongs to another model.")
        if not source.adapters:
            raise WhetValueError(f"{where}: the model has no active LoRA adapter.")
        _check_plain(adapter, where)
        return source.adapters
    if isinstance(adapter, (str, os.PathLike)):
        from whet.models.adapter_files import read_peft

        adapter = read_peft(adapter)
    if not isinstance(adapter, Mapping) or not adapter:
        raise WhetTypeError(
            f"{where}: adapter is a {type(adapter).__name__}, expected a PEFT model, a Learner, a PEFT folder, or "
            f"module names with a MicroLoRA or (A, B, scaling) each."
        )
    return [_locate(targets, config, name, value, where) for name, value in adapter.items()]


def _check_plain(model: Any, where: str) -> None:
    """Raise if the active adapters of a PEFT model change more than their factors."""
    active = model.active_adapters  # a method of transformers' models
    for name in cast("list[str]", active() if callable(active) else active):
        if special := describe_special(model.peft_config[name].to_dict(), f"{where}: adapter {name!r}", whole=True):
            raise WhetValueError(
                f"{where}: adapter {name!r} has {special}, which changes more than the factors. Make an engine "
                f"of the model: Engine.from_model(model)."
            )


def _locate(targets: Mapping[str, WeightLocation], config: ModelConfig, name: str, value: Any, where: str) -> LoRA:
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


def _convert(lora: LoRA, where: str) -> tuple[int, _core.Target, int, np.ndarray, np.ndarray]:
    matrix = core_matrix(lora.slot)
    if matrix is None:
        raise WhetValueError(
            f"{where}: an adapter of the {lora.slot.rpartition('.')[2]} cannot be kept separate. Merge it: "
            f"merge_adapters=True; or, on a packed base, sample with torch: engine='torch'."
        )
    a, b = factor_values(lora.a), factor_values(lora.b)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.ascontiguousarray(np.float32(lora.scaling) * b)
    if not (np.isfinite(a).all() and np.isfinite(scaled).all()):
        raise WhetValueError(f"{where}: the adapter of {lora.slot} holds NaN or infinity, in A or in scaling B.")
    return *matrix, lora.first_row, np.ascontiguousarray(a), scaled
