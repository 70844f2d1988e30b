"""Convert LoRA adapters of every kind, and trained norms, to the core's form: rows of slots, with the scaling folded
into B, and values of slots.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from whet.engine.checks import check_same_model
from whet.errors import WhetTypeError, WhetValueError
from whet.learner.learner import Learner
from whet.models.adapter_files import REWARD_USE, Dora, describe_special, read_peft_modules
from whet.models.architecture import ModelConfig
from whet.models.lora import core_matrix
from whet.models.slots import (
    LoRA,
    NormValues,
    Rows,
    WeightLocation,
    factor_values,
    find_location,
    locate_lora,
    locate_norm,
    with_expert_modules,
)
from whet.models.sources.live import open_module
from whet.ops.micro_lora import MicroLoRA


def adapter_parts(
    targets: Mapping[str, WeightLocation], config: ModelConfig, adapter: Any, where: str
) -> tuple[Iterator[tuple[Any, ...]], list[tuple[str, np.ndarray]]]:
    """Return what an adapter changes, see ``Engine.add_adapter``: (layer, target, first row, A, B, magnitudes or None)
    of every matrix, and slot and values of every norm.

    Matrices come lazily, so that copies of factors reuse each other's memory.

    Raises:
        WhetValueError: an unknown module, wrong shapes, or more than plain LoRA and norms.
        WhetTypeError: not an adapter.
    """
    found = list(_list_parts(targets, config, adapter, where))
    norms = [(each.slot, _check_norm(each, where)) for each in found if isinstance(each, NormValues)]
    return (_convert(each, where) for each in found if isinstance(each, LoRA)), norms


def _list_parts(
    targets: Mapping[str, WeightLocation], config: ModelConfig, adapter: Any, where: str
) -> Iterable[LoRA | NormValues | Rows]:
    kinds = (LoRA, NormValues)
    if isinstance(adapter, Sequence) and not isinstance(adapter, str) and all(isinstance(x, kinds) for x in adapter):
        return adapter
    if isinstance(adapter, Learner):
        if adapter.head is not None:
            raise WhetValueError(f"{where}: the learner is a reward model, save it in a folder. {REWARD_USE}")
        source = adapter.source()
        check_same_model(config, source.config, where)
        return source.adapters
    if hasattr(adapter, "named_modules"):
        source = open_module(adapter)
        if source.config != config:
            raise WhetValueError(f"{where}: the adapter belongs to another model.")
        if not source.adapters:
            raise WhetValueError(f"{where}: the model has no active LoRA adapter.")
        _check_plain(adapter, where, on_base=source.base is not None)
        return source.adapters
    if isinstance(adapter, (str, os.PathLike)):
        adapter = read_peft_modules(adapter)
    if not isinstance(adapter, Mapping) or not adapter:
        raise WhetTypeError(
            f"{where}: adapter is a {type(adapter).__name__}, expected a PEFT model, a Learner, a PEFT folder, or "
            f"module names with a MicroLoRA or (A, B, scaling) each."
        )
    named = with_expert_modules(targets)
    return [part for name, value in adapter.items() for part in _locate(named, config, name, value, where)]


def _check_plain(model: Any, where: str, on_base: bool) -> None:
    """Raise if the active adapters of a PEFT model change more than their factors, and norms on a packed base."""
    active = model.active_adapters  # a method of transformers' models
    for name in cast("list[str]", active() if callable(active) else active):
        label, except_for = f"{where}: adapter {name!r}", ("modules_to_save",) if on_base else ()
        if special := describe_special(model.peft_config[name].to_dict(), label, except_for):
            raise WhetValueError(
                f"{where}: adapter {name!r} has {special}, which changes more than the factors. Make an engine "
                f"of the model: Engine.from_model(model)."
            )


def _locate(
    targets: Mapping[str, WeightLocation], config: ModelConfig, name: str, value: Any, where: str
) -> Sequence[LoRA | NormValues]:
    location = find_location(targets, name, where)
    if isinstance(value, Mapping):
        return locate_norm(config, location, value, where)
    magnitude = None
    if isinstance(value, Dora):
        value, magnitude = value
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
    return locate_lora(config, location, a, b, scaling, where, magnitude)


def _check_norm(norm: NormValues, where: str) -> np.ndarray:
    if not np.isfinite(norm.values).all():
        raise WhetValueError(f"{where}: the trained {norm.slot} holds NaN or infinity.")
    return norm.values


def _convert(lora: LoRA, where: str) -> tuple[Any, ...]:
    matrix = core_matrix(lora.slot)
    if matrix is None:
        raise WhetValueError(
            f"{where}: an adapter of the {lora.slot.rpartition('.')[2]} cannot be kept separate. Merge it: "
            f"merge_adapters=True; or, on a packed base, sample with torch: engine='torch'."
        )
    a, b = factor_values(lora.a), factor_values(lora.b)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.ascontiguousarray(np.float32(lora.scaling) * b)
    magnitude = None if lora.magnitude is None else np.ascontiguousarray(factor_values(lora.magnitude))
    if not (np.isfinite(a).all() and np.isfinite(scaled).all()):
        raise WhetValueError(f"{where}: the adapter of {lora.slot} holds NaN or infinity, in A or in scaling B.")
    if magnitude is not None and not np.isfinite(magnitude).all():
        raise WhetValueError(f"{where}: the magnitudes of {lora.slot} hold NaN or infinity.")
    return *matrix, lora.first_row, np.ascontiguousarray(a), scaled, magnitude
