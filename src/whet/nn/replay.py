"""Router replay on modules of torch (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv 2510.11370): the update gives tokens to the experts that the sampler chose.

The weights of the given experts K are the router's own probabilities p of them, with gradient: scale p_j / S, where
S = sum over K of p + eps if the family normalises, else 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.learner.batch import OWN_CHOICE
from whet.models.architecture import ModelConfig


def is_router(module: nn.Module) -> bool:
    """Whether a module of transformers is the router of a mixture."""
    return type(module).__name__.lower().endswith("topkrouter")


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of the mixtures of a model of transformers, in the order of the layers."""
    return [module for module in model.modules() if is_router(module)]


@contextmanager
def replay_experts(model: nn.Module, config: ModelConfig, given: np.ndarray) -> Iterator[list[int]]:
    """Context in which the routers choose the given experts, (N, mixtures, k), for the N tokens of forward passes.

    Tokens with ``OWN_CHOICE`` keep their own. Provides, for each mixture computed, the number of tokens whose given
    experts are others than the model's own choice.
    """
    replaced: list[int] = []

    def choose(layer: int, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, own = output
        ids = torch.from_numpy(given[:, layer].astype(np.int64)).to(own.device)
        is_given = ids[:, :1] != OWN_CHOICE
        chosen = torch.where(is_given, ids, own)
        replaced.append(int((chosen.sort(-1).values != own.sort(-1).values).any(-1).sum()))
        p = logits.softmax(-1) if config.router == "softmax" else logits.sigmoid()
        p = p.gather(-1, chosen)
        if config.router_normalised:
            p = p / (p.sum(-1, keepdim=True) + config.router_eps)
        return logits, torch.where(is_given, config.router_scale * p, weights).to(weights.dtype), chosen

    def hook(layer: int) -> Any:
        return lambda module, inputs, output: choose(layer, output)

    hooks = [router.register_forward_hook(hook(layer)) for layer, router in enumerate(routers_of(model))]
    try:
        yield replaced
    finally:
        for each in hooks:
            each.remove()
