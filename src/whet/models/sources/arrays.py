"""Model weights as named arrays, for transfer from a trainer to an engine in another process.

Names are the parameter names of the Hugging Face model; for adapters, module names. Arrays are NumPy float32, float16,
float64, or uint16 with the bits of bfloat16. Only reading a live module needs torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.errors import WhetTypeError, WhetValueError
from whet.models.architecture import ModelConfig
from whet.models.formats import FLOAT_FORMATS
from whet.models.slots import (
    LoRA,
    ModelSource,
    NormValues,
    StoredTensor,
    WeightLocation,
    factor_values,
    find_location,
    iter_slices,
    locate_lora,
    locate_norm,
)

if TYPE_CHECKING:
    from whet.models.packed_base import PackedBase

_FORMATS = {"uint16": "bfloat16"} | {name: name for name in FLOAT_FORMATS if name != "bfloat16"}


def named_arrays(model: Any, *, adapters_only: bool = False, bfloat16_slots: Collection[str] = ()) -> dict[str, Any]:
    """Copy the parameters and the active LoRA adapters of a live Hugging Face model.

    Args:
        model: see ``whet.Engine.from_model``. A model on a packed base has only adapters.
        adapters_only: exclude the weights, if the engine already has them.
        bfloat16_slots: slots whose weights are rounded to bfloat16 before the transfer instead of in the engine.

    Returns:
        For ``Engine.sync``: name -> array, and module name -> (A (r, k), B (n, r), scaling) for each adapter; without
        weights, also module name -> its weight and bias for each norm in PEFT's ``modules_to_save``.

    Raises:
        WhetValueError: as ``open_module``, or ``adapters_only`` for a model without adapters.
    """
    from whet.models.sources.live import open_module

    source = open_module(model)
    found: dict[str, Any] = {}
    if source.base is None and not adapters_only:
        found |= weight_arrays(model, source, bfloat16_slots)
    found |= adapter_arrays(model, source, norms=not found)
    if not found:
        raise WhetValueError("named_arrays: the model has no active LoRA adapter. Send its weights too.")
    return found


def weight_arrays(model: Any, source: ModelSource, bfloat16_slots: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Copy the weights of a model with this ``source``; see ``named_arrays``."""
    from whet.models.sources.live import live_parameters

    return {
        name: _array(tensor, narrow=slot in bfloat16_slots) for name, slot, tensor in live_parameters(model, source)
    }


def adapter_arrays(model: Any, source: ModelSource, norms: bool) -> dict[str, Any]:
    """Copy the adapters of a model, and, with ``norms``, its trained norms; see ``named_arrays``."""
    from whet.models.sources.live import live_adapters, live_norms

    found: dict[str, Any] = {
        name: (factor_values(a).copy(), factor_values(b).copy(), scaling)
        for name, a, b, scaling in live_adapters(model, source)
    }
    for name, vectors in live_norms(model, source) if norms else ():
        found[name] = {part: factor_values(vector).copy() for part, vector in vectors.items()}
    return found


def open_arrays(
    arrays: Mapping[str, Any],
    config: ModelConfig,
    targets: Mapping[str, WeightLocation],
    base: PackedBase | None,
    where: str,
) -> ModelSource:
    """Open named arrays as a source for an engine with this config: all weights or none, and any adapters.

    Args:
        targets: see ``ModelSource``.
        base: the packed weights that the engine shares; the arrays may then contain only adapters.
        where: prefix of error messages.

    Raises:
        WhetTypeError: a value is neither an array nor an adapter, or has an unsupported dtype.
        WhetValueError: a weight is missing, has the wrong shape, or is unknown to the model.
    """
    if not arrays:
        raise WhetValueError(f"{where}: there are no arrays. Send weights, adapters, or both.")
    weights = {name: value for name, value in arrays.items() if hasattr(value, "ndim")}
    adapters: list[LoRA | NormValues] = []
    for name, value in arrays.items():
        if name not in weights:
            adapters += _locate(config, targets, name, value, where)
    if weights and base is not None:
        name = next(iter(weights))
        raise WhetValueError(f"{where}: {name} is among the arrays, and the engine's weights are a packed base, which "
                             "is immutable. Send only the adapters.")  # fmt: skip
    used: set[str] = set()

    def tensor(names: Sequence[str], suffix: str) -> StoredTensor:
        name = next((full for name in names if (full := f"{name}.{suffix}") in weights), None)
        if name is None:
            raise WhetValueError(f"{where}: array {names[0]}.{suffix} is missing. Send all weights, or only adapters.")
        used.add(name)
        array = weights[name]
        if not isinstance(array, np.ndarray) or str(array.dtype) not in _FORMATS:
            kind = f"{type(array).__name__} of {getattr(array, 'dtype', None)}"
            raise WhetTypeError(
                f"{where}: {name} is a {kind}, expected a NumPy array of {', '.join(_FORMATS)}, bfloat16 as uint16."
            )
        return StoredTensor(array, _FORMATS[str(array.dtype)], array.shape)

    modules = list(dict.fromkeys(location.module for location in targets.values()))
    slices = list(iter_slices(config, modules, tensor, where)) if weights else []
    if unknown := sorted(weights.keys() - used):
        raise WhetValueError(f"{where}: the model has no parameter {unknown[0]}. Send the arrays of the same model.")
    return ModelSource(config, lambda: iter(slices), dict(targets), tuple(adapters), base=base)


def _locate(
    config: ModelConfig, targets: Mapping[str, WeightLocation], name: str, value: Any, where: str
) -> Sequence[LoRA | NormValues]:
    if isinstance(value, Mapping):
        return locate_norm(config, find_location(targets, name, where), value, where)
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise WhetTypeError(
            f"{where}: {name} is a {type(value).__name__}, expected an array, or (A, B, scaling) of an adapter."
        )
    a, b, scaling = value
    location = find_location(targets, name, where)
    return locate_lora(config, location, factor_values(a), factor_values(b), scaling, where)


def _array(tensor: Any, narrow: bool) -> np.ndarray:
    """Copy a torch tensor; bfloat16 becomes uint16."""
    import torch

    narrow = narrow and tensor.dtype == torch.float32
    copy = torch.empty_like(tensor, dtype=torch.bfloat16 if narrow else None, memory_format=torch.contiguous_format)
    copy.copy_(tensor)
    return copy.view(torch.int16).numpy().view(np.uint16) if copy.dtype == torch.bfloat16 else copy.numpy()
