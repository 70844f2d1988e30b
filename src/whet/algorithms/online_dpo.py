"""Online DPO: sample two completions per prompt, compare them, and make a DPO update on the pair.

    l = -log sigmoid(beta [(log pi - log ref)(y+) - (log pi - log ref)(y-)]),    y1, y2 ~ pi(. | x)

(Guo et al. 2024, eq. 3; the other losses of the DPO family as well.) Assumes a judge that compares two answers to one
prompt, or reward functions whose higher score wins. Ties carry no preference and are excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from whet.algorithms.online import OnlineTrainer
from whet.algorithms.pairs import Pairs, preference_loss, update_on_pairs
from whet.config.fields import reject_ineffective
from whet.config.preferences import OnlineDPOConfig
from whet.config.settings import REWARD_SETTINGS
from whet.errors import WhetTypeError
from whet.rewards.functions import RewardBatch, RewardFn, call_preference
from whet.rewards.metrics import reward_metrics
from whet.rollout.choose import reward_functions
from whet.rollout.rollout import Rollout, completion_table
from whet.training.phases import phase
from whet.training.trainer import training_step


class OnlineDPO(OnlineTrainer):
    """DPO on completions sampled from the policy.

    Args:
        model: the policy.
        ref_model: the reference.
        preference_fn: function of a list of pairs of completions (text with a tokenizer, else 1-D tensors), and of
            their ``prompts`` if it has a parameter of this name, such as ``Judge.prefer``; returns, per pair, 0 if the
            first completion is preferred, 1 for the second, None for a tie.
        reward_fn: instead of preference_fn: one reward function, several, or ``whet.rewards.RewardFunctions``.
        **arguments: further arguments of ``Trainer`` and ``OnlineTrainer``.
    """

    config_class = OnlineDPOConfig

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        preference_fn: Callable[..., Any] | None = None,
        reward_fn: RewardFn | None = None,
        **arguments: Any,
    ) -> None:
        if (preference_fn is None) == (reward_fn is None):
            raise WhetTypeError("OnlineDPO: pass either preference_fn or reward_fn.")
        super().__init__(model, ref_model, **arguments)
        reject_ineffective(self.config, REWARD_SETTINGS, reward_fn is not None, "preference_fn judges without rewards")
        self.preference_fn = preference_fn
        self.rewards = None if reward_fn is None else reward_functions(self.config, reward_fn)

    @training_step
    def train_step(self, prompt_batch: Any) -> dict[str, float]:
        """Sample two completions per prompt, compare them, and update the policy on the pairs.

        Args:
            prompt_batch: as for ``GRPO.train_step``.

        Returns:
            Metrics: ``loss``, ``frac_ties`` (share of pairs without a winner, including identical
            completions), the metrics of ``DPO.train_step``, ``completions/...``, ``sampler/logprob_difference`` (if
            tokens are sampled from the unmodified distribution: see ``update_on_pairs``), with reward functions
            ``mean_reward`` and ``rewards/NAME/{mean,std}``, and the metrics of every step.

        Raises:
            RewardError: preference_fn or a reward function failed.
        """
        rollout = self.sample_step(prompt_batch, 2)
        with phase("reward"):
            rewards = self.rewards
            scored = None if rewards is None else self.ranks.broadcast_from_first(lambda: rollout.score(rewards))
        ids = rollout.completion_ids
        winners = [
            None if first == second else winner
            for winner, first, second in zip(self._winners(rollout, scored), ids[::2], ids[1::2], strict=True)
        ]
        decided = [(2 * i, winner) for i, winner in enumerate(winners) if winner is not None]
        chosen = [None if winner is None else winner == side for winner in winners for side in (0, 1)]
        self.last_completions = completion_table(self.step + 1, rollout, scored, {"chosen": chosen})
        pairs = Pairs(
            prompt_ids=[rollout.prompt_ids[i] for i, _ in decided],
            chosen_ids=[ids[i + winner] for i, winner in decided],
            rejected_ids=[ids[i + 1 - winner] for i, winner in decided],
            sampler_logprobs=self._sampler_logprobs(rollout, decided),
        )
        metrics = update_on_pairs(self, pairs, partial(preference_loss, self.config))
        self.warn_if_mismatched(
            metrics.get("sampler/logprob_difference", 0.0), "Train adapters that generate and forward compute alike."
        )
        metrics["frac_ties"] = 1 - len(decided) / len(winners)
        return {**metrics, **(reward_metrics(scored) if scored else {}), **rollout.metrics()}

    def _sampler_logprobs(
        self, rollout: Rollout, decided: list[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return log-probs of chosen and rejected tokens, if sampled from the unmodified distribution."""
        if not decided or not self.config.uses_unmodified_distribution():
            return None
        both = [i + winner for i, winner in decided] + [i + 1 - winner for i, winner in decided]
        recorded = rollout.sampler_logprobs(both)
        return None if recorded is None else (recorded[: len(decided)], recorded[len(decided) :])

    def _winners(self, rollout: Rollout, scored: RewardBatch | None) -> Sequence[int | None]:
        """Return the preferred side of each pair, or None; a pair with an unscored completion is a tie."""
        if scored is None:
            pairs = list(zip(rollout.decoded[::2], rollout.decoded[1::2], strict=True))
            judge = self.preference_fn
            assert judge is not None
            with phase("reward"):
                prompts = rollout.prompts[::2]
                return self.ranks.broadcast_from_first(lambda: call_preference(judge, pairs, prompts))
        first, second = scored.rewards[::2].tolist(), scored.rewards[1::2].tolist()
        return [0 if a > b else 1 if b > a else None for a, b in zip(first, second, strict=True)]
