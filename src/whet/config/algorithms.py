"""Registry of the training algorithms: ``whet train``, ``whet estimate``, model cards and help texts derive from it.

It is not in ``whet.algorithms``, which imports torch: help texts need the registry without torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

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
    DistillConfig,
    GRPOConfig,
    KDConfig,
    RAFTConfig,
    RLOOConfig,
    SDPOConfig,
    SFTConfig,
    TrainerConfig,
)

if TYPE_CHECKING:
    from whet.training.trainer import Trainer


@dataclass(frozen=True)
class Algorithm:
    """A training algorithm.

    Attributes:
        name: its METHOD in ``whet train METHOD``.
        config: its settings, which declare whether it samples and scores completions (``samples``), trains on pairs
            (``is_paired``) and uses a reference (``has_reference``).
        path: module and class, separated by a colon.
        title: full name and source, for model cards.
        summary: a few words, for ``whet --help``.
        rows: what it does and what its rows need, for ``whet train --help``.
    """

    name: str
    config: type[TrainerConfig]
    path: str
    title: str
    summary: str
    rows: str

    @property
    def class_name(self) -> str:
        """Name of the class."""
        return self.path.partition(":")[2]

    def load(self) -> type[Trainer]:
        """Import the class."""
        module, _, name = self.path.partition(":")
        return cast("type[Trainer]", getattr(importlib.import_module(module), name))


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "sft",
            SFTConfig,
            "whet.algorithms.sft:SFT",
            title="supervised fine-tuning",
            summary="supervised fine-tuning",
            rows="supervised fine-tuning; rows have prompt and completion, messages, or text",
        ),
        Algorithm(
            "dpo",
            DPOConfig,
            "whet.algorithms.dpo:DPO",
            title="Direct Preference Optimization (Rafailov et al. 2023)",
            summary="train on preference pairs",
            rows="direct preference optimization; rows have prompt, chosen and rejected",
        ),
        Algorithm(
            "simpo",
            SimPOConfig,
            "whet.algorithms.simpo:SimPO",
            title="Simple Preference Optimization (Meng et al. 2024)",
            summary="pairs by log-probs per token",
            rows="preference optimization by log-probs per token, without a reference; rows as for dpo",
        ),
        Algorithm(
            "cpo",
            CPOConfig,
            "whet.algorithms.cpo:CPO",
            title="Contrastive Preference Optimization (Xu et al. 2024)",
            summary="pairs, and SFT on the chosen",
            rows="contrastive preference optimization, without a reference; rows as for dpo",
        ),
        Algorithm(
            "orpo",
            ORPOConfig,
            "whet.algorithms.orpo:ORPO",
            title="Odds Ratio Preference Optimization (Hong et al. 2024)",
            summary="SFT and preferences in one stage",
            rows="odds ratio preference optimization, without a reference; rows as for dpo",
        ),
        Algorithm(
            "kto",
            KTOConfig,
            "whet.algorithms.kto:KTO",
            title="Kahneman-Tversky Optimization (Ethayarajh et al. 2024)",
            summary="completions labelled good or bad",
            rows="learn from single completions; rows have prompt, completion and label (true: desirable)",
        ),
        Algorithm(
            "reward",
            RewardConfig,
            "whet.algorithms.reward:Reward",
            title="reward model (Bradley & Terry 1952; Ouyang et al. 2022)",
            summary="a reward model from pairs",
            rows="train a reward model; rows as for dpo, and optionally a margin",
        ),
        Algorithm(
            "grpo",
            GRPOConfig,
            "whet.algorithms.grpo:GRPO",
            title="Group Relative Policy Optimization (Shao et al. 2024)",
            summary="reinforcement learning on rewards",
            rows="group relative policy optimization; rows have a prompt, reward functions score; or tasks, by name",
        ),
        Algorithm(
            "rloo",
            RLOOConfig,
            "whet.algorithms.rloo:RLOO",
            title="REINFORCE Leave-One-Out (Ahmadian et al. 2024)",
            summary="rewards, against the other completions",
            rows="REINFORCE with a leave-one-out baseline; rows and rewards as for grpo",
        ),
        Algorithm(
            "online-dpo",
            OnlineDPOConfig,
            "whet.algorithms.online_dpo:OnlineDPO",
            title="online Direct Preference Optimization (Guo et al. 2024)",
            summary="sample pairs, judge, train",
            rows="online DPO; rows have a prompt, reward functions or a preference function judge; or tasks, by name",
        ),
        Algorithm(
            "raft",
            RAFTConfig,
            "whet.algorithms.raft:RAFT",
            title="reward-ranked fine-tuning (Dong et al. 2023)",
            summary="SFT on the best of own samples",
            rows="reward-ranked fine-tuning; rows have a prompt, reward functions score; or tasks, by name",
        ),
        Algorithm(
            "distill",
            DistillConfig,
            "whet.algorithms.distill:Distill",
            title="on-policy distillation (Agarwal et al. 2023)",
            summary="learn from a teacher's log-probs",
            rows="on-policy distillation from a teacher of the same vocabulary; rows have a prompt; or tasks, by name",
        ),
        Algorithm(
            "sdpo",
            SDPOConfig,
            "whet.algorithms.sdpo:SDPO",
            title="self-distillation (Hübotter et al. 2026)",
            summary="learn from own right answers, as read",
            rows="self-distillation; rows have a prompt, reward functions score, or feedback or demonstrations teach",
        ),
        Algorithm(
            "kd",
            KDConfig,
            "whet.algorithms.kd:KD",
            title="knowledge distillation (Hinton et al. 2015)",
            summary="learn from a file of log-probs",
            rows="off-policy distillation; rows have a teacher's top_logprobs, which whet score writes",
        ),
    )
}
"""Training algorithms by name."""
