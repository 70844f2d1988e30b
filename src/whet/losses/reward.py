"""Loss of a reward model on preference pairs, see ``whet.algorithms.reward``."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.errors import WhetValueError, is_number
from whet.losses.closed_form import Loss, accepts_tensors
from whet.losses.dpo import log_sigmoid, sigmoid
from whet.losses.terms import check_float_array, check_shapes, denominator

SIDES = ("chosen_rewards", "rejected_rewards")


@accepts_tensors(*SIDES)
def reward_loss(
    chosen_rewards: Any,
    rejected_rewards: Any,
    margins: Any = None,
    *,
    center_rewards_coefficient: float = 0.0,
    n_pairs: float | None = None,
) -> Loss:
    """Return the Bradley-Terry loss of the rewards of pairs, the mean over pairs of

        -logsig(c - r - m) + center_rewards_coefficient (c + r)^2

    with c and r the rewards of the chosen and the rejected completion, m the margin and logsig the logarithm of the
    sigmoid. Rewards are defined up to a constant; the second term centres them at 0.

    Args:
        chosen_rewards: (B,) float, NumPy or torch, differentiable.
        rejected_rewards: (B,), as chosen_rewards.
        margins: (B,) float, least differences of the rewards; None: 0.
        center_rewards_coefficient: see above.
        n_pairs: pairs of the whole batch, so that losses and metrics of micro-batches add up; None: B.

    Returns:
        The loss, and metrics as floats: ``accuracy`` (share of pairs with c > r), ``margin`` (mean of c - r) and
        ``mean_reward`` (over both sides). ``Loss`` of arrays, with gradients in float64; of tensors a pair of a scalar,
        in the dtype of chosen_rewards, and the metrics.

    Raises:
        WhetTypeError: an argument is neither array nor tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ, there are no pairs, or a coefficient or count is out of range.

    Source: Bradley & Terry 1952; margins: Touvron et al. 2023, https://arxiv.org/abs/2307.09288, eq. 2; centring:
        Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244, eq. 2.
    """
    if not (is_number(center_rewards_coefficient) and center_rewards_coefficient >= 0):
        raise WhetValueError(
            f"reward_loss: center_rewards_coefficient is {center_rewards_coefficient!r}, expected a finite number >= 0."
        )
    check_float_array("reward_loss", SIDES[0], chosen_rewards, n_axes=1)
    others, optional = {SIDES[1]: rejected_rewards}, {"margins": margins}
    check_shapes("reward_loss", SIDES[0], chosen_rewards, others, optional)
    if not len(chosen_rewards):
        raise WhetValueError("reward_loss: chosen_rewards is empty. Pass at least one pair.")
    n_pairs = denominator("reward_loss", "n_pairs", len(chosen_rewards) if n_pairs is None else n_pairs)
    c, r = chosen_rewards.astype(np.float64), rejected_rewards.astype(np.float64)
    x = c - r - (0.0 if margins is None else margins)
    total = c + r
    value = -log_sigmoid(x) + center_rewards_coefficient * total**2
    slope, pull = -sigmoid(-x), 2 * center_rewards_coefficient * total
    metrics = {"accuracy": (c > r).sum(), "margin": (c - r).sum(), "mean_reward": total.sum() / 2}
    return Loss(
        float(value.sum() / n_pairs),
        {name: float(each / n_pairs) for name, each in metrics.items()},
        {SIDES[0]: (pull + slope) / n_pairs, SIDES[1]: (pull - slope) / n_pairs},
    )
