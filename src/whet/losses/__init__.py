"""Losses of the algorithms: value, metrics and gradient in closed form, over NumPy arrays or torch tensors."""

from __future__ import annotations

from whet.losses.closed_form import Loss
from whet.losses.distillation import distillation_loss, top_k_loss
from whet.losses.dpo import dpo_loss
from whet.losses.grpo import grpo_loss
from whet.losses.kto import kto_loss
from whet.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
from whet.losses.reward import reward_loss
from whet.losses.sft import sft_loss

__all__ = [
    "Loss",
    "cpo_loss",
    "distillation_loss",
    "dpo_loss",
    "grpo_loss",
    "kto_loss",
    "orpo_loss",
    "reward_loss",
    "sft_loss",
    "simpo_loss",
    "top_k_loss",
]
