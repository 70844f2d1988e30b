"""The five algorithms and their losses. Torch is imported only for models of torch.

Each algorithm is one file that begins with its equation and assumptions; each loss is a pure function of named tensors
that works without a trainer.
"""

from __future__ import annotations

from whet.algorithms.best_of_n import BestOfN
from whet.algorithms.dpo import DPO
from whet.algorithms.grpo import GRPO
from whet.algorithms.online_dpo import OnlineDPO
from whet.algorithms.sft import SFT
from whet.config.settings import BestOfNConfig, DPOConfig, GRPOConfig, OnlineDPOConfig, SFTConfig
from whet.losses import dpo_loss, grpo_loss, sft_loss

__all__ = [
    "DPO",
    "GRPO",
    "SFT",
    "BestOfN",
    "BestOfNConfig",
    "DPOConfig",
    "GRPOConfig",
    "OnlineDPO",
    "OnlineDPOConfig",
    "SFTConfig",
    "dpo_loss",
    "grpo_loss",
    "sft_loss",
]
