"""Small facts about a module: where it is, its mode, and what is inside its wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def module_device(model: nn.Module) -> torch.device:
    """Device of the model's parameters; the CPU for a model without any."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def module_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Training or eval mode for a while; every submodule gets back the mode it had."""
    modes = [(member, member.training) for member in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for member, mode in modes:
            member.training = mode


def inner_module(model: nn.Module) -> nn.Module:
    """The module whose signature speaks for ``model``: inside torch.compile and PEFT wrappers."""
    inner = getattr(model, "_orig_mod", model)
    get_base_model = getattr(inner, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else inner  # pyright: ignore[reportReturnType]
