"""Advantages of completions relative to their group, by the name of the setting ``advantage``.

With the scores s_i of the G completions of a prompt, of which only scored ones count:

    group            (s_i - mean) / std                        GRPO, see ``compute_batch_group_advantages``
    leave_one_out    s_i - mean of the others                  RLOO (Ahmadian et al. 2024, eq. 6); with scale "batch"
                     then divided by their deviation, after subtracting their mean, over the batch
    max_rl           (s_i - mean) / mean                       MaxRL (2602.02710), for scores >= 0
    pass_k           s_max - s_second for the best, else 0     (2503.19595, k = G)
    per_reward       each reward function's scores as in "group", weighted and summed, then the sums divided by their
                     deviation after subtracting their mean, over the batch: GDPO (2601.05242)

leave_one_out is unbiased: a baseline that contains s_i scales the gradient by (G - 1) / G. max_rl weighs hard prompts
up: a success among many failures has a large advantage. pass_k trains the best of G answers, not their mean. per_reward
keeps rewards of different scales apart: in a sum the one with the largest variance decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.config.settings import Advantage
from whet.errors import WhetValueError, check_choice
from whet.ops import compute_batch_group_advantages
from whet.rewards.functions import RewardBatch


def relative_advantages(
    scored: RewardBatch,
    group_size: int,
    advantage: Advantage = "group",
    weights: Sequence[float] | np.ndarray = (),
    options: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Return the advantages of completions, (N,) float64; 0 for completions that are not scored.

    Args:
        scored: the rewards of N completions, whole groups.
        group_size: completions per group.
        advantage: see above.
        weights: of the functions of ``scored.by_name``, for "per_reward".
        options: ``scale``, ``ddof`` and ``eps`` of ``compute_batch_group_advantages``, for "group"; "per_reward" uses
            ``ddof`` and ``eps``, and "leave_one_out" too with the scale "batch".

    Raises:
        WhetValueError: an unknown name, N is not a multiple of group_size, or a negative reward in "max_rl".
    """
    check_choice("relative_advantages", "advantage", advantage, Advantage)
    given = dict(options or {})
    if advantage == "group":
        return compute_batch_group_advantages(scored.rewards, group_size, **given)
    if advantage == "per_reward":
        given["scale"] = "group"
        parts = [compute_batch_group_advantages(each, group_size, **given) for each in scored.by_name.values()]
        total = np.tensordot(np.asarray(weights, np.float64), np.stack(parts), 1)
        total[np.isnan(scored.rewards)] = np.nan
        return compute_batch_group_advantages(total, len(total), **given)
    centred = compute_batch_group_advantages(scored.rewards, group_size, scale="none").reshape(-1, group_size)
    rewards = scored.rewards.reshape(-1, group_size)
    if advantage == "leave_one_out":
        count = (~np.isnan(rewards)).sum(1, keepdims=True)
        found = centred * (count / np.maximum(count - 1, 1))
        if given.get("scale") == "batch":
            found[np.isnan(rewards) | (count < 2)] = np.nan  # without a baseline
            return compute_batch_group_advantages(found.reshape(-1), found.size, **given)
    elif advantage == "max_rl":
        if (lowest := np.nanmin(rewards, initial=0.0)) < 0:
            raise WhetValueError(
                f"relative_advantages: 'max_rl' divides by the mean reward, and a reward is {lowest:g}. Shift the "
                f"rewards to be >= 0, or choose another advantage."
            )
        mean = np.nansum(rewards, 1, keepdims=True) / np.maximum((~np.isnan(rewards)).sum(1, keepdims=True), 1)
        found = np.divide(centred, mean, out=np.zeros_like(centred), where=mean > 0)
    else:
        ranked = np.sort(np.where(np.isnan(rewards), -np.inf, rewards), 1)
        gap = np.subtract(ranked[:, -1], ranked[:, -2], out=np.zeros(len(ranked)), where=np.isfinite(ranked[:, -2]))
        found = np.where(rewards == ranked[:, -1:], gap[:, None], 0.0)
    return found.reshape(-1)
