"""Odds Ratio Preference Optimization: supervised fine-tuning on the chosen completions, away from the rejected ones.

With p the probability per token of a completion, exp of its mean log-prob, and odds(p) = p / (1 - p) (Hong et al. 2024,
eq. 6 and 7):

    l = NLL(chosen) - beta log sigmoid(log(odds(p_chosen) / odds(p_rejected)))

No reference and no separate SFT stage: it starts from a base model. Assumes chosen completions worth imitating.
"""

from __future__ import annotations

import numpy as np

from whet.algorithms.offline_pairs import OfflinePairs
from whet.algorithms.pairs import Pairs
from whet.config.preferences import ORPOConfig
from whet.losses.closed_form import Loss
from whet.losses.reference_free import orpo_loss


class ORPO(OfflinePairs):
    """Odds Ratio Preference Optimization. Takes the arguments of ``Trainer``."""

    config_class = ORPOConfig

    def pair_loss(self, pairs: Pairs, policy: tuple[np.ndarray, np.ndarray], *, n_pairs: int, n_tokens: int) -> Loss:
        """Return ``orpo_loss``."""
        chosen_lengths, rejected_lengths = pairs.lengths()
        return orpo_loss(
            *policy, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths, beta=self.config.beta,
            n_pairs=n_pairs, n_tokens=n_tokens,
        )  # fmt: skip
