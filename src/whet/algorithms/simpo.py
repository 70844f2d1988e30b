"""Simple Preference Optimization: prefer chosen over rejected completions by their log-probs per token.

With c and r the policy's mean log-probs per token of the chosen and the rejected completion (Meng et al. 2024, eq. 6):

    l = -log sigmoid(beta (c - r) - margin)

There is no reference: a step computes a forward and a backward pass, DPO's a forward pass more. Assumes that lengths of
answers carry no preference. Nothing keeps the policy near its start: use small learning rates.
"""

from __future__ import annotations

import numpy as np

from whet.algorithms.offline_pairs import OfflinePairs
from whet.algorithms.pairs import Pairs
from whet.config.preferences import SimPOConfig
from whet.losses.closed_form import Loss
from whet.losses.reference_free import simpo_loss


class SimPO(OfflinePairs):
    """Simple Preference Optimization. Takes the arguments of ``Trainer``."""

    config_class = SimPOConfig

    def pair_loss(self, pairs: Pairs, policy: tuple[np.ndarray, np.ndarray], *, n_pairs: int, n_tokens: int) -> Loss:
        """Return ``simpo_loss``."""
        config, (chosen_lengths, rejected_lengths) = self.config, pairs.lengths()
        return simpo_loss(
            *policy, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths, beta=config.beta,
            margin=config.margin, label_smoothing=config.label_smoothing, n_pairs=n_pairs,
        )  # fmt: skip
