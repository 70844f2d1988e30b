"""Reward model: a scalar score of a completion, learnt from preference pairs.

With r(x, y) = w . h the product of a head w and the final hidden state h of the last token (Bradley & Terry 1952;
Ouyang et al. 2022, eq. 1), and optionally a margin m and a term that centres rewards:

    l = -log sigmoid(r(x, y+) - r(x, y-) - m) + center_rewards_coefficient (r(x, y+) + r(x, y-))^2

Assumes that one number orders the answers to a prompt; rewards of different prompts are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from whet.algorithms.offline_pairs import OfflinePairs
from whet.algorithms.pairs import Pairs
from whet.config.preferences import RewardConfig
from whet.errors import WhetValueError, is_number
from whet.losses.closed_form import Loss
from whet.losses.reward import SIDES, reward_loss
from whet.training.phases import phase


class Reward(OfflinePairs):
    """Training of a reward model. Takes the arguments of ``Trainer``.

    The model is a sequence classifier of transformers with ``num_labels=1`` over a decoder, a PEFT model over one, or a
    ``whet.Learner`` with "score" in ``modules_to_save``. Rows may have a ``margin``, by which the rewards of chosen and
    rejected should differ at least; without one it is 0.
    """

    config_class = RewardConfig

    def pair_loss(
        self, pairs: Pairs, policy: tuple[np.ndarray, np.ndarray], *, n_pairs: int, n_tokens: int = 0
    ) -> Loss:
        """Return ``reward_loss`` of the rewards of chosen and rejected completions, (B,) each."""
        coefficient = self.config.center_rewards_coefficient
        return reward_loss(*policy, pairs.margins, center_rewards_coefficient=coefficient, n_pairs=n_pairs)

    def update_on(self, pairs: Pairs) -> dict[str, float]:
        """Update the model on pairs; metrics: of ``reward_loss``, ``min_reward`` and ``max_reward``."""
        rows, n_pairs = pairs.rows(), len(pairs.prompt_ids)
        if not rows:
            return {"loss": 0.0, "grad_norm": 0.0, "num_tokens": 0}
        with self.update() as update:
            for indices in self.shard(update, rows, self.micro_batches(rows)):
                part = pairs.select(indices)
                with phase("forward"):
                    rewards = self.policy.rewards(part.prompt_ids * 2, part.chosen_ids + part.rejected_ids)
                with phase("loss"):
                    chosen, rejected = np.split(rewards, 2)
                    loss = self.pair_loss(part, (chosen, rejected), n_pairs=n_pairs)
                    gradient = np.concatenate([loss.gradients[side] for side in SIDES])
                extremes = {"max_reward": float(rewards.max()), "min_reward": -float(rewards.min())}
                update.add(loss.value, gradient, loss.metrics, extremes)
        extremes = {"max_reward": update.maxima["max_reward"], "min_reward": -update.maxima["min_reward"]}
        n_tokens = sum(map(len, [*pairs.prompt_ids * 2, *pairs.chosen_ids, *pairs.rejected_ids]))
        return {**update.metrics, **extremes, "num_tokens": n_tokens}

    def rewards(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> np.ndarray:
        """Return the rewards (B,) of completions, in eval mode."""
        rows = list(zip(prompt_ids, completion_ids, strict=True))
        out = np.zeros(len(rows))

        def compute(part: list[int]) -> np.ndarray:
            return self.policy.rewards([prompt_ids[i] for i in part], [completion_ids[i] for i in part], keep=False)

        with phase("logprobs"):
            for part, found in self.compute_on_ranks(rows, compute):
                out[part] = found
        return out

    def evaluation_metrics(self, dataset: Any) -> dict[str, float]:
        """Return ``accuracy``, the share of pairs whose chosen completion has the higher reward, ``margin``,
        ``mean_reward`` and ``loss`` over all pairs except ties.

        Raises:
            WhetValueError: all pairs are ties.
        """
        batches = self.batches_without_ties(dataset)
        margins = np.concatenate([cast(np.ndarray, batch.margins) for batch in batches])
        pairs = Pairs.join(batches)._replace(margins=margins)
        both = self.rewards(pairs.prompt_ids * 2, pairs.chosen_ids + pairs.rejected_ids)
        chosen, rejected = np.split(both, 2)
        loss = self.pair_loss(pairs, (chosen, rejected), n_pairs=len(chosen))
        return {**loss.metrics, "loss": loss.value}

    def prepare(self, prompt: Any, chosen: Any = None, rejected: Any = None) -> Pairs:
        """Return the pairs of a batch, with their margins."""
        pairs, rows = self.read_pairs(prompt, chosen, rejected)
        return pairs._replace(margins=np.array(list(map(_read_margin, rows)), np.float64))


def _read_margin(row: Mapping[str, Any]) -> float:
    value: Any = row.get("margin")
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if plain is None:
        return 0.0
    if not is_number(plain):
        raise WhetValueError(f"Reward: margin of a row is {value!r:.60}, expected a finite number.")
    return float(plain)
