"""Losses of the algorithms: value, metrics and gradient in closed form, over NumPy arrays or torch tensors."""

from __future__ import annotations

from whet.losses.closed_form import Loss
from whet.losses.dpo import dpo_loss
from whet.losses.grpo import grpo_loss
from whet.losses.sft import sft_loss

__all__ = ["Loss", "dpo_loss", "grpo_loss", "sft_loss"]
