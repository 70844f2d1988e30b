"""A model's weights as named arrays, on their way between processes: what a trainer sends, and what an engine takes.

The names are those of the parameters in the Hugging Face model; an adapter's is its module's. An array is NumPy's, of
float32, float16, float64, or uint16 that holds bfloat16. Torch is needed only where the model is one of its modules.
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
    StoredTensor,
    WeightLocation,
    factor_values,
    find_location,
    iter_slices,
    locate_lora,
)

if TYPE_CHECKING:
    from whet.models.packed_base import PackedBase

_FORMATS = {"uint16": "bfloat16"} | {name: name for name in FLOAT_FORMATS if name != "bfloat16"}


def named_arrays(model: Any, *, adapters_only: bool = False, bfloat16_slots: Collection[str] = ()) -> dict[str, Any]:
    """The parameters of a live Hugging Face model, and its active LoRA adapters, copied.

    Args:
        model: as ``whet.Engine.from_model`` takes it. Of one on a packed base there are only the adapters.
        adapters_only: leave the weights out, which the engine has already.
        bfloat16_slots: whose weights are rounded to bfloat16 here, for an engine that would do it there.

    Returns:
        Name -> array, and for each adapter module name -> (A (r, k), B (n, r), scaling): what ``Engine.sync`` takes.

    Raises:
        WhetValueError: as ``open_module``; or ``adapters_only`` of a model without adapters.
    """
    from whet.models.sources.live import open_module

    source = open_module(model)
    found: dict[str, Any] = {}
    if source.base is None and not adapters_only:
        found |= weight_arrays(model, source, bfloat16_slots)
    found |= adapter_arrays(model, source)
    if not found:
        raise WhetValueError("named_arrays: the model has no active LoRA adapter. Send its weights too.")
    return found


def weight_arrays(model: Any, source: ModelSource, bfloat16_slots: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Of ``named_arrays``, the weights of a model that ``source`` describes."""
    from whet.models.sources.live import live_parameters

    return {
        name: _array(tensor, narrow=slot in bfloat16_slots) for name, slot, tensor in live_parameters(model, source)
    }


def adapter_arrays(model: Any, source: ModelSource) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """Of ``named_arrays``, the adapters."""
    from whet.models.sources.live import live_adapters

    return {
        name: (factor_values(a).copy(), factor_values(b).copy(), scaling)
        for name, a, b, scaling in live_adapters(model, source)
    }


def open_arrays(
    arrays: Mapping[str, Any],
    config: ModelConfig,
    targets: Mapping[str, WeightLocation],
    base: PackedBase | None,
    where: str,
) -> ModelSource:
    """Named arrays as a source for the engine of this config: all weights, or none, and any adapters.

    Args:
        targets: where modules go, as in ``ModelSource``.
        base: the packed weights that the engine shares; its weights do not come as arrays then.
        where: prefix of error messages.

    Raises:
        WhetTypeError: a value that is neither an array nor an adapter, or an array's dtype.
        WhetValueError: a weight that is missing, has another shape, or that the model does not have.
    """
    if not arrays:
        raise WhetValueError(f"{where}: there are no arrays. Send weights, adapters, or both.")
    weights = {name: value for name, value in arrays.items() if hasattr(value, "ndim")}
    adapters = [_adapter(config, targets, name, value, where) for name, value in arrays.items() if name not in weights]
    if weights and base is not None:
        name = next(iter(weights))
        raise WhetValueError(f"{where}: {name} is among the arrays, and the engine's weights are a packed base, which "
                             "does not change. Send the adapters alone.")  # fmt: skip
    used: set[str] = set()

    def tensor(names: Sequence[str], suffix: str) -> StoredTensor:
        name = next((found for each in names if (found := f"{each}.{suffix}") in weights), None)
        if name is None:
            raise WhetValueError(
                f"{where}: there is no array {names[0]}.{suffix}. Send all weights, or adapters alone."
            )
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
        raise WhetValueError(f"{where}: the model has no parameter {unknown[0]}; it is another model's.")
    return ModelSource(config, lambda: iter(slices), dict(targets), tuple(adapters), base=base)


def _adapter(config: ModelConfig, targets: Mapping[str, WeightLocation], name: str, value: Any, where: str) -> LoRA:
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise WhetTypeError(
            f"{where}: {name} is a {type(value).__name__}, expected an array, or (A, B, scaling) of an adapter."
        )
    a, b, scaling = value
    return locate_lora(config, find_location(targets, name, where), factor_values(a), factor_values(b), scaling, where)


def _array(tensor: Any, narrow: bool) -> np.ndarray:
    """A copy of a torch tensor; bfloat16 as uint16."""
    import torch

    narrow = narrow and tensor.dtype == torch.float32
    own = torch.empty_like(tensor, dtype=torch.bfloat16 if narrow else None, memory_format=torch.contiguous_format)
    own.copy_(tensor)
    return own.view(torch.int16).numpy().view(np.uint16) if own.dtype == torch.bfloat16 else own.numpy()
