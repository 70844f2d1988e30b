"""REINFORCE Leave-One-Out: reinforce completions by their lead over the other completions of the prompt.

With the score s_i of completion i, its log-probs summed over tokens, and the ratio of a sequence
rho_i = exp(log pi(y_i | x) - log pi_old(y_i | x)) (Ahmadian et al. 2024, eq. 4 and 6):

    R_i = s_i - beta (log pi_old(y_i | x) - log ref(y_i | x))
    A_i = R_i - mean of R_j over the others of the group
    l_i = -min(rho_i A_i, clip(rho_i, 1 - epsilon, 1 + epsilon_high) A_i)

It is GRPO with fixed settings: the KL term in the reward, this advantage, and the ratio of whole sequences. Assumes
that a completion is one action, which has one reward and one ratio.
"""

from __future__ import annotations

from whet.algorithms.grpo import GRPO
from whet.config.settings import RLOOConfig


class RLOO(GRPO):
    """REINFORCE Leave-One-Out. Takes the arguments of ``GRPO``."""

    config_class = RLOOConfig
