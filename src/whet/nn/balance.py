"""The balance loss of mixtures of experts (Switch Transformer, Fedus et al. 2021, equations 4 to 6; transformers).

    L = E sum over e of f_e P_e,   f_e = assignments to expert e / tokens,   P_e = mean probability of expert e

Both are means over the tokens of all layers together, so that f sums to the experts of a token, and L is that number if
experts are equally used. The choice has no gradient: dL / dP_e = E f_e.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whet.errors import WhetValueError
from whet.learner.batch import PackedBatch
from whet.nn.modules import inner_module
from whet.nn.replay import routers_of


def balance_coefficient(model: nn.Module, setting: float | None, where: str) -> float:
    """Return the factor of a model's balance loss: the setting, else its config's; 0 without mixtures.

    Raises:
        WhetValueError: a setting for a model whose routers have no balance loss.
    """
    config: Any = getattr(inner_module(model), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    has_routers = getattr(config, "num_local_experts", None) != 0
    own = getattr(config, "router_aux_loss_coef", None) if has_routers else None
    if own is None and setting:
        raise WhetValueError(
            f"{where}: router_aux_loss_coef is {setting} and has no effect, because the model has no routers with a "
            f"balance loss. Omit it."
        )
    return float(own or 0.0) if setting is None else setting


@contextmanager
def record_router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Context that provides the logits of all routers, (tokens, E) each, of the forward passes within it."""
    logits: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
        for module in routers_of(model)
    ]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(model: nn.Module, logits: Sequence[Tensor], counts: Tensor) -> Tensor:
    """Return the balance loss of a batch.

    Args:
        model: of the routers.
        logits: (N, E) of the routers of all layers.
        counts: (N,): how many rows have each token of the batch; 0 for padding.
    """
    counts = counts.float()
    config: Any = inner_module(model).config
    n_experts, n_used = logits[0].shape[1], config.get_text_config().num_experts_per_tok
    assigned, mean = logits[0].new_zeros(n_experts, dtype=torch.float32), torch.zeros(())
    for z in logits:
        p = z.float().softmax(-1)
        chosen = p.detach().topk(n_used).indices
        assigned.index_add_(0, chosen.flatten(), counts.repeat_interleave(n_used))
        mean = mean + counts @ p
    n = counts.sum() * len(logits)
    return n_experts * (assigned / n) @ (mean / n)


def count_rows(batch: PackedBatch) -> Tensor:
    """Return how many rows have each token of a packed batch, (N,): a prompt's are in several."""
    counts = torch.ones(len(batch.input_ids))
    ends, rows = batch.hidden_rows[batch.steps == 0].unique(return_counts=True)
    for end, n in zip(ends.tolist(), rows.tolist(), strict=True):
        counts[end - int(batch.position_ids[end]) : end + 1] = n
    return counts
