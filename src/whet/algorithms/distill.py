"""On-policy distillation: the student samples, and every token moves towards the probability that a teacher gives it.

    A_t = log p_teacher(y_t | x, y_<t) - log pi(y_t | x, y_<t),    l_t = -w_t rho_t A_t,    y ~ pi(. | x)

with the probability ratio rho = exp(log pi - log pi_old), 1 in the one update of a batch, and truncated importance
weights w between sampler and policy. The gradient estimates the gradient of the reverse KL divergence of each token
(Agarwal et al. 2023, beta = 1). No rewards are needed. Assumes that student and teacher have one vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np

from whet.algorithms.online import OnlineTrainer
from whet.config.fields import reject_ineffective
from whet.config.settings import DistillConfig
from whet.engine import Engine
from whet.errors import WhetTypeError
from whet.losses.distillation import distillation_loss
from whet.losses.terms import logprob_difference, masked
from whet.memory import unregister_holder
from whet.rewards.functions import RewardFn
from whet.rewards.metrics import reward_metrics
from whet.rollout.choose import reward_functions
from whet.rollout.rollout import Rollout, completion_table
from whet.rollout.teacher import open_teacher, score_tokens
from whet.training.phases import phase
from whet.training.trainer import training_step


class Distill(OnlineTrainer):
    """On-policy distillation.

    Args:
        model: the student.
        ref_model: not used; pass the other model as ``teacher``.
        teacher: a folder, a .gguf file, the URL of a server that returns log-probs of prompts (``whet serve``, vLLM), a
            ``whet.Engine``, or an object with its ``logprobs``.
        reward_fn: optional: one reward function, several, or ``whet.rewards.RewardFunctions``, for metrics and
            evaluation; they do not change the update.
        **arguments: further arguments of ``Trainer`` and ``OnlineTrainer``.
    """

    config_class = DistillConfig

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        teacher: Any = None,
        reward_fn: RewardFn | None = None,
        **arguments: Any,
    ) -> None:
        if teacher is None:
            raise WhetTypeError("Distill: teacher is missing. Pass a folder, a .gguf file, a URL or a whet.Engine.")
        super().__init__(model, ref_model, **arguments)
        settings = ("reward_weights", "reward_policy", "reward_timeout_s")
        reject_ineffective(self.config, settings, reward_fn is not None, "there is no reward function")
        self.rewards = None if reward_fn is None else reward_functions(self.config, reward_fn)
        self.teacher = open_teacher(teacher, self.tokenizer, "Distill")
        self._is_own_teacher = isinstance(self.teacher, Engine) and self.teacher is not teacher
        if self._is_own_teacher:
            unregister_holder(self.teacher)  # pyright: ignore[reportArgumentType]

    def replays_experts(self) -> bool:
        """Whether an update gives tokens to the experts that the sampler chose."""
        return self.policy.replays_experts and getattr(self.engine, "records_experts", True)

    @training_step
    def train_step(self, prompt_batch: Any) -> dict[str, float]:
        """Sample completions for a batch of prompts, score their tokens with the teacher, and update the student.

        Args:
            prompt_batch: as for ``GRPO.train_step``.

        Returns:
            Metrics: ``loss`` and ``reverse_kl`` (estimates of KL(student || teacher) per token, with and without the
            importance weights), ``teacher_logprob`` (mean per token), ``entropy``, ``completions/...``,
            ``sampler/logprob_difference``, with reward functions ``mean_reward`` and ``rewards/NAME/{mean,std}``, and
            the metrics of every step.
        """
        config = self.config
        rollout = self.sample_step(prompt_batch, config.n, for_update=True)
        scored = None
        if (rewards := self.rewards) is not None:
            with phase("reward"):
                scored = self.ranks.broadcast_from_first(lambda: rollout.score(rewards))
        teacher = self._score(rollout)
        self.last_completions = completion_table(self.step + 1, rollout, scored, {})
        rows, everyone = list(zip(rollout.prompt_ids, rollout.completion_ids, strict=True)), range(len(teacher))
        experts, sampler = rollout.experts(everyone), rollout.sampler_logprobs(everyone)
        n_tokens = sum(map(len, rollout.completion_ids))
        with self.update() as update:
            for part in self.shard(update, rows, self.micro_batches(rows)):
                with phase("forward"):
                    result = self.policy.logprobs(
                        [rollout.prompt_ids[i] for i in part], [rollout.completion_ids[i] for i in part],
                        temperature=config.temperature, return_entropy=True,
                        experts=None if experts is None else [experts[i] for i in part],
                    )  # fmt: skip
                logprobs, mask = result.logprobs, result.mask
                width, recorded, maxima = mask.shape[1], None, None
                if sampler is not None:
                    recorded = sampler[part, :width]
                with phase("loss"):
                    loss = distillation_loss(
                        logprobs, teacher[part, :width], mask, sampler_logprobs=recorded,
                        sampler_cap=config.sampler_cap, n_tokens=n_tokens,
                    )  # fmt: skip
                metrics = dict(loss.metrics)
                metrics["teacher_logprob"] = float(masked(teacher[part, :width], mask).sum()) / n_tokens
                metrics["entropy"] = float(cast(np.ndarray, result.entropy).sum(dtype=np.float64)) / n_tokens
                if recorded is not None:
                    total, largest = logprob_difference(logprobs, recorded, mask)
                    metrics["sampler/logprob_difference"] = total / n_tokens
                    maxima = {"sampler/logprob_difference_max": largest}
                update.add(loss.value, loss.gradients["logprobs"], metrics, maxima)
        found = reward_metrics(scored) if scored is not None else {}
        return {**update.metrics, **update.maxima, **found, **rollout.metrics()}

    def _check_truncation(self, rollout: Rollout) -> Rollout:
        """Return the rollout: tokens of a truncated completion teach as well as others."""
        return rollout

    def _score(self, rollout: Rollout) -> np.ndarray:
        """Return the teacher's log-probs of all completions, (N, T); every rank scores its share of the rows."""
        prompts, completions, ranks = rollout.prompt_ids, rollout.completion_ids, self.ranks
        own = range(ranks.rank, len(prompts), ranks.size)
        score = partial(
            score_tokens, self.teacher, [prompts[i] for i in own], [completions[i] for i in own],
            self.config.temperature,
        )  # fmt: skip
        with phase("teacher"):
            shares = [list(share) for share in ranks.gather_results(lambda: list(score()))]
        if self._is_own_teacher and isinstance(self.teacher, Engine):
            self.teacher.release_memory()
        table = np.zeros((len(completions), max(map(len, completions), default=0)), np.float32)
        for i, row in enumerate(table):
            found = shares[i % ranks.size][i // ranks.size]
            row[: len(completions[i])] = found[: len(completions[i])]
        return table

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory held by the trainer, and of a teacher that it has loaded."""
        yield from super().memory_blocks()
        if self._is_own_teacher and isinstance(self.teacher, Engine):
            for _, key, n_bytes in self.teacher.memory_blocks():
                yield "teacher", key, n_bytes

    def evaluation_metrics(
        self, dataset: Any, *, reward_fn: RewardFn | None = None, temperature: float | None = None
    ) -> dict[str, float]:
        """Return ``mean_reward``, as in GRPO, if there are reward functions, and ``reverse_kl`` of one completion per
        prompt, sampled at the trainer's temperature.
        """
        found = {}
        if reward_fn is not None or self.rewards is not None:
            found = super().evaluation_metrics(dataset, reward_fn=reward_fn, temperature=temperature)
        total = n_tokens = 0
        for i, (batch,) in enumerate(self.iter_batches(dataset)):
            with self._synced_engine():
                rollout = self._sample(batch, 1, i, for_update=True)
            everyone = range(len(rollout.completions))
            own = self.logprobs(
                rollout.prompt_ids, rollout.completion_ids, self.config.temperature, experts=rollout.experts(everyone)
            )
            total += float(own.sum(dtype=np.float64)) - float(self._score(rollout).sum(dtype=np.float64))
            n_tokens += sum(map(len, rollout.completion_ids))
        return {**found, "reverse_kl": total / max(1, n_tokens)}
