"""Means and standard deviations of rewards over scored samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.rewards.functions import RewardBatch


def reward_metrics(rewards: RewardBatch) -> dict[str, float]:
    """Return the mean reward, and mean and std of each function's scores, over scored samples; NaN without any.

    ``reward_errors`` is ``RewardBatch.n_errors``.
    """
    metrics = {"mean_reward": nan_mean(rewards.rewards), "reward_errors": float(rewards.n_errors)}
    for name, scores in rewards.by_name.items():
        metrics[f"rewards/{name}/mean"] = nan_mean(scores)
        metrics[f"rewards/{name}/std"] = nan_mean((scores - nan_mean(scores)) ** 2) ** 0.5
    return metrics


def mean_rewards(scored: Sequence[RewardBatch]) -> dict[str, float]:
    """Return ``mean_reward`` over all batches and, with several functions, their means as ``rewards/NAME/mean``."""
    mean = nan_mean(np.concatenate([batch.rewards for batch in scored]))
    names = scored[0].by_name
    by_name = {f"rewards/{n}/mean": nan_mean(np.concatenate([batch.by_name[n] for batch in scored])) for n in names}
    return {"mean_reward": mean, **(by_name if len(by_name) > 1 else {})}


def nan_mean(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN without any."""
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if scored.size else float("nan")


def group_std(rewards: np.ndarray) -> np.ndarray:
    """Return the population standard deviation of each row over its scored samples; 0 for a row without any."""
    scored = ~np.isnan(rewards)
    n = np.maximum(scored.sum(axis=1), 1)
    mean = np.where(scored, rewards, 0.0).sum(axis=1) / n
    return np.sqrt(np.where(scored, (rewards - mean[:, None]) ** 2, 0.0).sum(axis=1) / n)
