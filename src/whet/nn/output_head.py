"""The LM head of a Hugging Face model, computed apart from the model: only logits that are needed, when they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import WhetValueError
from whet.models.families import model_config
from whet.nn.modules import inner_module

_PROBE = (1.0, -2.0, 30.0)
"""Logits whose images show what a model computes from the product of its head."""


class OutputHead:
    """z = c tanh(s (W h + b) / c), or s (W h + b) without a soft cap c, of hidden states h.

    Attributes:
        module: the linear layer of W and b.
        scale: s.
        softcap: c; 0: none.
    """

    def __init__(self, module: nn.Linear, scale: float, softcap: float) -> None:
        self.module, self.scale, self.softcap = module, scale, softcap

    def logits(self, states: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the logits (n, V) of hidden states (n, K), in float32 at least, and dz / d(W h + b).

        Products are in the dtype of the weight.
        """
        weight, bias = self.module.weight, self.module.bias
        product = states.to(weight.dtype) @ weight.t()
        product = product.to(torch.promote_types(product.dtype, torch.float32))
        return self._image(product if bias is None else product.add_(bias))

    def _image(self, product: Tensor) -> tuple[Tensor, Tensor | float]:
        if not self.softcap:
            return product * self.scale if self.scale != 1 else product, self.scale
        bounded = product.mul_(self.scale / self.softcap).tanh_()
        return bounded * self.softcap, (1 - bounded * bounded) * self.scale

    @contextmanager
    def taken_apart(self) -> Iterator[list[Tensor]]:
        """Context in which the model computes no logits: its head returns a probe, and its inputs are listed."""
        inputs: list[Tensor] = []

        def forward(input: Tensor) -> Tensor:
            inputs.append(input)
            return input.new_tensor(_PROBE).expand(*input.shape[:-1], -1)

        self.module.forward = forward
        try:
            yield inputs
        finally:
            del self.module.forward

    def gives(self, logits: Any) -> bool:
        """Whether the model made the logits from the probe as this head does."""
        expected = self._image(logits.new_tensor(_PROBE, dtype=torch.float32))[0]
        found = logits[0, 0].float()
        return found.shape == expected.shape and torch.allclose(found, expected, rtol=0.01, atol=0.01)


def output_head(model: nn.Module) -> OutputHead | None:
    """Return the head of a model, or None: it is not a plain linear layer, or a wrapper or hook may read its result."""
    inner: Any = inner_module(model)
    module = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if not isinstance(module, nn.Linear) or type(module) is not nn.Linear or hasattr(model, "_orig_mod"):
        return None
    if "forward" in vars(module) or _has_hooks(module):
        return None
    try:
        config = model_config(getattr(inner, "config", None), where="output_head")
    except WhetValueError:  # another family: taken_apart() shows whether it computes logits in another way
        return OutputHead(module, 1.0, 0.0)
    return OutputHead(module, config.logits_scale, config.logits_softcap)


def _has_hooks(module: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)
