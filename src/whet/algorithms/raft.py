"""Reward-ranked fine-tuning: sample completions, keep the best of each prompt, and maximise their likelihood.

    l = -log pi(y*_t | x, y*_<t),    y* = argmax_i r(x, y_i),    y_1 ... y_n ~ pi(. | x)

averaged over the tokens of the kept completions (RAFT, Dong et al. 2023; the loop of rejection sampling and SFT).
Assumes rewards that compare completions of one prompt; a prompt without one of at least ``min_score`` is excluded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.algorithms.online import OnlineTrainer
from whet.algorithms.sft import update_on_examples
from whet.config.settings import RAFTConfig
from whet.rewards.functions import RewardFn, RewardFunctions
from whet.rewards.metrics import reward_metrics
from whet.rollout.choose import reward_functions
from whet.rollout.rollout import completion_table
from whet.training.phases import phase
from whet.training.trainer import training_step


class RAFT(OnlineTrainer):
    """Reward-ranked fine-tuning.

    Args:
        model: the policy.
        ref_model: None: the loss uses no reference.
        reward_fn: a reward function, several, or ``whet.rewards.RewardFunctions``.
        **arguments: further arguments of ``Trainer`` and ``OnlineTrainer``.
    """

    config_class = RAFTConfig
    rewards: RewardFunctions

    def __init__(self, model: Any, ref_model: Any = None, reward_fn: RewardFn | None = None, **arguments: Any) -> None:
        super().__init__(model, ref_model, **arguments)
        self.rewards = reward_functions(self.config, reward_fn)

    @training_step
    def train_step(self, prompt_batch: Any) -> dict[str, float]:
        """Sample completions for a batch of prompts, and train on the best of each.

        Args:
            prompt_batch: as for ``GRPO.train_step``.

        Returns:
            Metrics: ``loss`` and ``token_probability`` as in ``SFT``, ``mean_reward``, ``kept/mean_reward`` and
            ``kept/frac`` (share of prompts), ``rewards/NAME/{mean,std}``, ``completions/...``, and the metrics of every
            step. A batch of which nothing is kept has loss and gradient norm 0, and makes no update.

        Raises:
            RewardError: a reward function failed.
        """
        rollout = self.sample_step(prompt_batch, self.config.n)
        with phase("reward"):
            scored = self.ranks.broadcast_from_first(lambda: rollout.score(self.rewards))
        kept = self._choose(scored.rewards.reshape(-1, self.config.n))
        is_kept = [i in kept for i in range(len(scored.rewards))]
        self.last_completions = completion_table(self.step + 1, rollout, scored, {"kept": is_kept})
        metrics = {"kept/frac": len(kept) * self.config.n / len(scored.rewards)}
        if kept:
            metrics["kept/mean_reward"] = float(scored.rewards[kept].mean())
        completions = [rollout.completion_ids[i] for i in kept]
        masks = [[True] * len(ids) for ids in completions]
        found = update_on_examples(self, [rollout.prompt_ids[i] for i in kept], completions, masks)
        return {**found, **metrics, **reward_metrics(scored), **rollout.metrics()}

    def _choose(self, rewards: np.ndarray) -> list[int]:
        """Return the index of the best completion of each prompt, by rewards (B, n), the first of equal ones."""
        ranked = np.where(np.isnan(rewards), -np.inf, rewards)
        best, least = ranked.argmax(1), -np.inf if self.config.min_score is None else self.config.min_score
        first = np.arange(len(rewards)) * rewards.shape[1]
        tops = ranked.max(1)
        return (first + best)[(tops > -np.inf) & (tops >= least)].tolist()
