"""TRL's losses of a model, computed by the methods of its trainers, in float64."""

from __future__ import annotations

import collections
import contextlib
from types import SimpleNamespace
from typing import Any

import torch


class ForTRL(torch.nn.Module):
    """A model with the outputs that TRL's trainers read."""

    is_gradient_checkpointing = False

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, labels: Any, **_: Any) -> Any:
        log_probs = self.model(input_ids)[:, :-1].log_softmax(-1)
        found = log_probs.gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
        found = found.masked_fill(labels[:, 1:] == -100, 0.0)
        others = {name: torch.zeros_like(found) for name in ("entropy", "mean_logits")}
        squares = (2 * log_probs).logsumexp(-1)
        return SimpleNamespace(log_probs=found, is_top1=found < 0, log_sum_sq_probs=squares, **others)


def trainer_of(model: Any, ref_model: Any, **settings: Any) -> Any:
    """The attributes that ``_compute_loss`` of TRL's trainers reads."""
    return SimpleNamespace(
        model=ForTRL(model), ref_model=ForTRL(ref_model), aux_loss_enabled=False, precompute_ref_logps=False,
        accelerator=SimpleNamespace(
            device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x, reduce=lambda x, reduction: x,
            process_index=0, is_main_process=False, autocast=contextlib.nullcontext,
        ),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), _total_train_tokens=0, _tp_size=1,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)), **settings,
    )  # fmt: skip


def grad_norm(loss: torch.Tensor, model: torch.nn.Module) -> float:
    """2-norm of the gradients of a loss."""
    loss.backward()
    return torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm().item()
