"""Contrastive Preference Optimization: preference pairs without a reference, and the likelihood of the chosen.

With c and r the policy's log-probs, summed over the chosen and the rejected completion (Xu et al. 2024, eq. 3 to 5):

    l = -log sigmoid(beta (c - r)) + nll_weight NLL(chosen)

Assumes chosen completions that are worth imitating: without a reference, only the second term keeps the policy there.
"""

from __future__ import annotations

import numpy as np

from whet.algorithms.offline_pairs import OfflinePairs
from whet.algorithms.pairs import Pairs
from whet.config.preferences import CPOConfig
from whet.losses.closed_form import Loss
from whet.losses.reference_free import cpo_loss


class CPO(OfflinePairs):
    """Contrastive Preference Optimization. Takes the arguments of ``Trainer``."""

    config_class = CPOConfig

    def pair_loss(self, pairs: Pairs, policy: tuple[np.ndarray, np.ndarray], *, n_pairs: int, n_tokens: int) -> Loss:
        """Return ``cpo_loss``."""
        config, (chosen_lengths, rejected_lengths) = self.config, pairs.lengths()
        return cpo_loss(
            *policy, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths, beta=config.beta,
            loss_type=config.loss_type, label_smoothing=config.label_smoothing, nll_weight=config.nll_weight,
            n_pairs=n_pairs, n_tokens=n_tokens,
        )  # fmt: skip
