"""Copies of live sources, which later updates of the model do not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whet.models.architecture import RowSlice
from whet.models.slots import LoRA, ModelSource, factor_values


def freeze_source(source: ModelSource, slices: Sequence[RowSlice]) -> ModelSource:
    """Copy the adapters of a source, and some of its slices: all, or none if an engine already has the weights."""
    copies = [row_slice._replace(tensor=_copy(row_slice.tensor)) for row_slice in slices]
    adapters = tuple(
        each._replace(**{name: factor_values(factor).copy() for name, factor in each.factors().items()})
        if isinstance(each, LoRA)
        else each._replace(values=each.values.copy())
        for each in source.adapters
    )
    return source._replace(slices=lambda: iter(copies), adapters=adapters)


def source_bytes(source: ModelSource) -> int:
    """Return the bytes of the slices and adapters of a frozen source."""
    arrays = [row_slice.tensor for row_slice in source.slices()]
    for each in source.adapters:
        arrays += each.factors().values() if isinstance(each, LoRA) else [each.values]
    return sum(array.nbytes for array in arrays)


def _copy(tensor: Any) -> Any:
    return tensor.detach().clone() if hasattr(tensor, "detach") else np.array(tensor)
