"""The algorithms and their losses. Torch is imported only for models of torch.

Each algorithm is one file that begins with its equation and assumptions; each loss is a pure function of named tensors
that works without a trainer.
"""

from __future__ import annotations

from whet.algorithms.best_of_n import BestOfN
from whet.algorithms.cpo import CPO
from whet.algorithms.distill import Distill
from whet.algorithms.dpo import DPO
from whet.algorithms.grpo import GRPO
from whet.algorithms.kd import KD
from whet.algorithms.kto import KTO
from whet.algorithms.online_dpo import OnlineDPO
from whet.algorithms.orpo import ORPO
from whet.algorithms.raft import RAFT
from whet.algorithms.reward import Reward
from whet.algorithms.rloo import RLOO
from whet.algorithms.sdpo import SDPO
from whet.algorithms.sft import SFT
from whet.algorithms.simpo import SimPO
from whet.config.preferences import (
    CPOConfig,
    DPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    ORPOConfig,
    RewardConfig,
    SimPOConfig,
)
from whet.config.settings import (
    BestOfNConfig,
    DistillConfig,
    GRPOConfig,
    KDConfig,
    RAFTConfig,
    RLOOConfig,
    SDPOConfig,
    SFTConfig,
)
from whet.losses import (
    cpo_loss,
    distillation_loss,
    dpo_loss,
    grpo_loss,
    kto_loss,
    orpo_loss,
    reward_loss,
    sft_loss,
    simpo_loss,
    top_k_loss,
)

__all__ = [
    "CPO",
    "DPO",
    "GRPO",
    "KD",
    "KTO",
    "ORPO",
    "RAFT",
    "RLOO",
    "SDPO",
    "SFT",
    "BestOfN",
    "BestOfNConfig",
    "CPOConfig",
    "DPOConfig",
    "Distill",
    "DistillConfig",
    "GRPOConfig",
    "KDConfig",
    "KTOConfig",
    "ORPOConfig",
    "OnlineDPO",
    "OnlineDPOConfig",
    "RAFTConfig",
    "RLOOConfig",
    "Reward",
    "RewardConfig",
    "SDPOConfig",
    "SFTConfig",
    "SimPO",
    "SimPOConfig",
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
