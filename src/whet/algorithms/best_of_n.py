"""Best of N: sample N completions per prompt and keep the one with the highest reward.

    y* = argmax_i r(x, y_i),    y_1 ... y_N ~ pi(. | x)

No training. Assumes that the rewards of one prompt's completions are comparable; ties go to the first completion.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from whet.config.fields import make_config
from whet.config.sampling import Completion
from whet.config.settings import BestOfNConfig, EngineName
from whet.data.batches import batches_in_order
from whet.errors import RewardError, check_installed, check_integer
from whet.learner import Learner
from whet.models.stop_tokens import base_stop_ids
from whet.rewards.functions import RewardFn
from whet.rollout.choose import check_lengths, ensure_capacity, make_engine, reward_functions
from whet.rollout.protocol import RolloutEngine
from whet.rollout.rollout import Prompts, Rollout, as_prompt_row, read_prompts, sample, warn_if_truncated

if TYPE_CHECKING:
    from torch import Tensor


class BestOfNResult(NamedTuple):
    """Result of ``BestOfN.generate`` with scores or candidates.

    Attributes:
        sequences: (B, P+T) int64, each prompt followed by its best completion, padded on the right.
        scores: (B, N) float64, the reward of each candidate, NaN if unscored; or None.
        candidates: N completions per prompt; or None.
    """

    sequences: Tensor
    scores: Tensor | None
    candidates: list[list[Completion]] | None


class BestOfN:
    """Rejection sampling at inference time.

    Args:
        model: the model to sample from; a module with ``generate``, any module from token ids to logits, or a
            ``whet.Learner``.
        reward_fn: one reward function, several, or ``RewardFunctions``.
        config: settings; None: the defaults.
        tokenizer: for text prompts; reward functions then get text.
        engine: the engine that samples; "auto", "native" or "torch" set ``config.engine``; None: ``config.engine``.
        **settings: fields of ``BestOfNConfig``, such as ``n`` and ``max_new_tokens``.
    """

    def __init__(
        self,
        model: Any,
        reward_fn: RewardFn | None = None,
        *,
        config: BestOfNConfig | None = None,
        tokenizer: Any = None,
        engine: RolloutEngine | EngineName | None = None,
        **settings: Any,
    ) -> None:
        check_installed("BestOfN", "torch")
        if isinstance(engine, str):
            settings["engine"], engine = engine, None
        self.config = make_config(BestOfNConfig, config, settings)
        self.rewards = reward_functions(self.config, reward_fn)
        self.model = model
        self.tokenizer = tokenizer
        chosen = self.config.engine if engine is None else engine
        config = self.config
        pool = {"workers": config.rollout_workers, "address": config.ray_address, "device": config.rollout_device}
        make = partial(make_engine, chosen, model, self.config.rollout_weights, "BestOfN", tokenizer=tokenizer, **pool)
        self.engine = make(self.config.kv_bytes)
        self._make_engine = make if isinstance(chosen, str) and not self.config.kv_bytes else None
        self._warned_of_truncation = False

    def generate(
        self, prompts: Any, *, return_scores: bool = False, return_all: bool = False
    ) -> Tensor | BestOfNResult:
        """Return the best of N completions for each prompt, reproducibly for a given seed.

        Args:
            prompts: a (B, P) tensor; a dict of input_ids and attention_mask; ragged lists of token ids;
                texts or rows, with a tokenizer.
            return_scores: also return every candidate's reward.
            return_all: also return every candidate.

        Returns:
            (B, P+T) int64: each prompt, its best completion, and padding on the right. With either flag a
            ``BestOfNResult``.

        Raises:
            RewardError: a reward function failed, or scored none of a prompt's candidates.
        """
        import torch

        config, batch = self.config, read_prompts(prompts, self.tokenizer, "BestOfN.generate")
        rollout, scores = self._candidates(batch, config.seed, "BestOfN.generate")
        best = np.where(np.isnan(scores), -np.inf, scores).argmax(axis=1)
        candidates = [rollout.completions[i : i + config.n] for i in range(0, scores.size, config.n)]
        rows = [
            torch.tensor([*prompt, *group[i].token_ids])
            for prompt, group, i in zip(batch.ids, candidates, best, strict=True)
        ]
        sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self._pad_token_id())
        if not return_scores and not return_all:
            return sequences
        return BestOfNResult(
            sequences, torch.from_numpy(scores) if return_scores else None, candidates if return_all else None
        )

    def evaluate(self, prompts: Any, *, batch_size: int = 8) -> float:
        """Return the mean over prompts of the best reward among N completions.

        Args:
            prompts: as for ``generate``; or a dataset as for ``GRPO.train``, read once in order.
            batch_size: prompts per batch, unless the dataset is batched already.

        Raises:
            RewardError: as ``generate``.
        """
        where, best = "BestOfN.evaluate", []
        batch_size = check_integer(where, "batch_size", batch_size, 1)
        for i, (batch,) in enumerate(batches_in_order(prompts, batch_size, ("prompt",), as_prompt_row, where)):
            seed = int(np.random.SeedSequence([self.config.seed % 2**64, i]).generate_state(1)[0])
            _, scores = self._candidates(read_prompts(batch, self.tokenizer, where), seed, where)
            best += np.nanmax(scores, axis=1).tolist()
        return sum(best) / len(best)

    def _candidates(self, prompts: Prompts, seed: int, where: str) -> tuple[Rollout, np.ndarray]:
        """Return N completions per prompt and their rewards (B, N), at least one reward per prompt."""
        self.engine.sync(self.model)
        check_lengths(self.model, prompts.ids, self.config.max_new_tokens, where)
        self.engine = ensure_capacity(self.engine, self._make_engine, prompts.ids, self.config.max_new_tokens)
        stop_ids = self._stop_token_ids()
        sampling = self.config.sampling(stop_ids, seed)
        rollout = sample(self.engine, prompts, self.config.n, sampling, self.tokenizer)
        if not self._warned_of_truncation:
            self._warned_of_truncation = warn_if_truncated(rollout, self.config.max_new_tokens, where)
        scores = rollout.score(self.rewards).rewards.reshape(len(prompts.ids), self.config.n)
        unscored = np.isnan(scores).all(axis=1)
        if unscored.any():
            raise RewardError(
                f"{where}: no candidate for prompt {int(unscored.argmax())} was scored. Score at least one "
                f"candidate of each prompt."
            )
        return rollout, scores

    def _stop_token_ids(self) -> list[int]:
        if isinstance(self.model, Learner):
            return base_stop_ids(self.model.base, self.tokenizer, self.config.stop_token_ids)
        from whet.nn.modules import stop_token_ids

        return stop_token_ids(self.model, self.tokenizer, self.config.stop_token_ids)

    def _pad_token_id(self) -> int:
        if self.config.pad_token_id is not None:
            return self.config.pad_token_id
        return getattr(self.tokenizer, "pad_token_id", None) or 0
