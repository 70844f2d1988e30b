"""Evaluation on tasks: accuracy with its interval, pass@k, comparison of two models. Does not import torch."""

from __future__ import annotations

from whet.evaluation.episodes import EpisodesResult, evaluate_episodes
from whet.evaluation.evaluate import Items, TaskResult, compare, evaluate, read_items
from whet.evaluation.rewarded import EmptyRows, RewardedRows
from whet.evaluation.statistics import Estimate, mean, pass_at_k, proportion, proportion_difference, sign_test

__all__ = [
    "EmptyRows",
    "EpisodesResult",
    "Estimate",
    "Items",
    "RewardedRows",
    "TaskResult",
    "compare",
    "evaluate",
    "evaluate_episodes",
    "mean",
    "pass_at_k",
    "proportion",
    "proportion_difference",
    "read_items",
    "sign_test",
]
