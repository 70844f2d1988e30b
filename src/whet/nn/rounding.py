"""Quantisation-aware training: matrices as a GGUF file will store them, in place of a model's own.

With Q the numbers of a matrix after encoding and decoding in its format in the file, by the export's own encoder:

    all weights train:  W' = Q(W),                    dL/dW = dL/dW'  (straight-through estimator, Bengio et al. 2013)
    LoRA trains:        W' = Q(W + s B A) - s B A,    so that the layer computes Q(W + s B A) x, what a merge exports,
                                                      with LoRA's gradients of A and B

Norms, biases, and matrices that the file stores in floats of at least 16 bits are rounded to these, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from whet.errors import WhetValueError
from whet.models.architecture import RowSlice
from whet.models.formats import FILE_TYPES, FileType, file_format
from whet.models.reference import slice_values
from whet.models.row_reader import encode
from whet.models.slots import WeightLocation
from whet.models.sources.live import live_matrices, open_module
from whet.nn.forwards import is_lora
from whet.nn.frozen import base_of, special_adapters
from whet.signals import deferred_signals


class RoundedWeights:
    """The matrices of a model, rounded to their formats in a GGUF file.

    Args:
        model: a Hugging Face causal model that the engine supports, on the CPU, with or without LoRA adapters.
        file_type: of the file.
        where: the caller's name, for errors.

    Raises:
        WhetValueError: the model's weights are packed, or the engine does not support it; or its adapters are more than
            LoRA.
    """

    def __init__(self, model: nn.Module, file_type: FileType, where: str) -> None:
        if base_of(model) is not None:
            raise WhetValueError(
                f"{where}: qat is {file_type!r}, and the model's weights are packed, on which qat has no effect. Train "
                f"the adapters of a model in floats (whet train: --base none)."
            )
        kinds = [kind for module in model.modules() if is_lora(module) for kind in special_adapters(module)]
        if kinds:
            raise WhetValueError(
                f"{where}: qat is {file_type!r}, which rounds with plain LoRA, not with {kinds[0]}. Omit it."
            )
        self._model, self._mixture, self._where = model, FILE_TYPES[file_type], where
        self._source = open_module(model)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model computes with rounded weights. Gradients are of the weights themselves."""
        rounded = [
            (weight, weight.data, self._round(location, weight.data, delta))
            for location, weight, delta in live_matrices(self._model, self._source)
        ]
        with deferred_signals():
            for weight, _, values in rounded:
                weight.data = values
        try:
            yield
        finally:
            with deferred_signals():
                for weight, own, _ in rounded:
                    weight.data = own

    def _round(self, location: WeightLocation, weight: Tensor, delta: Tensor | None) -> Tensor:
        """Return W' in the shape and dtype of the weight."""
        format = file_format(self._mixture, self._source.config, location)
        if format == "float32":
            return weight
        exact = weight.float() if delta is None else weight.float() + delta
        rows = exact.mT if location.module.transposed else exact
        values = rows.reshape(-1, rows.shape[-1]).contiguous().numpy()
        decoded = torch.from_numpy(_decode(encode(values, format, f"{self._where}: {location.names[0]}"), format))
        rounded = decoded.view(rows.shape)
        rounded = rounded.mT if location.module.transposed else rounded
        return (rounded if delta is None else rounded - delta).to(weight.dtype).contiguous()


def _decode(stored: np.ndarray, format: str) -> np.ndarray:
    return np.array(slice_values(RowSlice("", 0, stored, format)), np.float32)
