"""On-policy distillation: the student samples, and every token moves towards the probability that a teacher gives it.

    A_t = log p_teacher(y_t | x, y_<t) - log pi(y_t | x, y_<t),    l_t = -w_t rho_t A_t,    y ~ pi(. | x)

with the probability ratio rho = exp(log pi - log pi_old), 1 in the one update of a batch, and truncated importance
weights w between sampler and policy. The gradient estimates the gradient of the reverse KL divergence of each token
(Agarwal et al. 2023, beta = 1). No rewards are needed. Assumes that student and teacher have one vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from whet.algorithms.online import OnlineTrainer
from whet.config.fields import reject_ineffective
from whet.config.settings import REWARD_SETTINGS, DistillationConfig, DistillConfig
from whet.engine import Engine
from whet.errors import WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.learner.batch import Divergences
from whet.losses.distillation import distillation_loss
from whet.losses.terms import logprob_difference, masked
from whet.memory import unregister_holder
from whet.rewards.functions import RewardBatch, RewardFn, RewardFunctions
from whet.rewards.metrics import reward_metrics
from whet.rollout.choose import reward_functions
from whet.rollout.rollout import Rollout, completion_table, pad_rows
from whet.rollout.teacher import Teacher, open_learner, open_teacher, score_tokens
from whet.training.phases import phase
from whet.training.trainer import training_step


class _Part(NamedTuple):
    """Arguments of ``Update.add`` for a micro-batch."""

    loss: float
    gradient: np.ndarray
    metrics: dict[str, float]
    maxima: dict[str, float]


class Distillation(OnlineTrainer):
    """Base of the algorithms that learn the log-probs of a teacher on samples of the student.

    Attributes:
        config: the settings.
    """

    config: DistillationConfig
    rewards: RewardFunctions | None

    def check_divergence(self) -> None:
        """Raise a WhetValueError unless the model computes the divergence of the settings."""
        if self.config.divergence == "full" and not isinstance(self.model, Learner):
            raise WhetValueError(
                f"{type(self).__name__}: divergence is 'full', which a whet.Learner computes, and the model is a "
                f"{type(self.model).__name__}. Train adapters of a Learner, or set divergence to 'sampled'."
            )

    def replays_experts(self) -> bool:
        """Whether an update gives tokens to the experts that the sampler chose; whole distributions are the model's."""
        return self.config.divergence == "sampled" and self.can_replay_experts()

    def score(self, rollout: Rollout) -> RewardBatch | None:
        """Return the rewards of completions; None without reward functions."""
        if (rewards := self.rewards) is None:
            return None
        with phase("reward"):
            return self.ranks.broadcast_from_first(lambda: rollout.score(rewards))

    def learn(
        self,
        rollout: Rollout,
        teacher: np.ndarray | Callable[[list[int]], Divergences],
        prompt_ids: list[list[int]] | None = None,
    ) -> dict[str, float]:
        """Make an update on completions, and return its metrics.

        Args:
            rollout: N completions.
            teacher: (N, T), the teacher's log-probs of their tokens; or a function that returns the divergences of
                some of them, by indices, whose backward follows.
            prompt_ids: prompts whose tokens are counted for the micro-batches; None: the student's.
        """
        rows = list(zip(prompt_ids or rollout.prompt_ids, rollout.completion_ids, strict=True))
        n_tokens = sum(map(len, rollout.completion_ids))
        compute = partial(self._full, teacher) if callable(teacher) else partial(self._sampled, teacher, rollout)
        with self.update() as update:
            for part in self.shard(update, rows, self.micro_batches(rows)):
                update.add(*compute(part, n_tokens))
        return {**update.metrics, **update.maxima}

    def _sampled(self, teacher: np.ndarray, rollout: Rollout, part: list[int], n_tokens: int) -> _Part:
        """Return the loss of some completions from the sampled tokens, and the gradient of their log-probs.

        Args:
            teacher: (N, T), log-probs of all completions.
            rollout: N completions.
            part: indices of completions.
            n_tokens: of all completions.
        """
        experts, sampler = rollout.experts(part), rollout.sampler_logprobs(part)
        with phase("forward"):
            result = self.policy.logprobs(
                [rollout.prompt_ids[i] for i in part], [rollout.completion_ids[i] for i in part],
                temperature=self.config.temperature, return_entropy=True, experts=experts,
            )  # fmt: skip
        logprobs, mask = result.logprobs, result.mask
        teacher = teacher[part, : mask.shape[1]]
        with phase("loss"):
            loss = distillation_loss(
                logprobs, teacher, mask, sampler_logprobs=sampler, sampler_cap=self.config.sampler_cap,
                n_tokens=n_tokens,
            )  # fmt: skip
        metrics, maxima = dict(loss.metrics), {}
        metrics["teacher_logprob"] = float(masked(teacher, mask).sum()) / n_tokens
        metrics["entropy"] = float(cast(np.ndarray, result.entropy).sum(dtype=np.float64)) / n_tokens
        if sampler is not None:
            total, maxima["sampler/logprob_difference_max"] = logprob_difference(logprobs, sampler, mask)
            metrics["sampler/logprob_difference"] = total / n_tokens
        return _Part(loss.value, loss.gradients["logprobs"], metrics, maxima)

    def _full(self, divergence: Callable[[list[int]], Divergences], part: list[int], n_tokens: int) -> _Part:
        """Return the loss of some completions from whole distributions, and the gradient of their divergences."""
        with phase("forward"):
            found = divergence(part)
        value = float(found.values.sum(dtype=np.float64)) / n_tokens
        return _Part(value, found.mask / n_tokens, {"divergence": value}, {})

    def _check_truncation(self, rollout: Rollout) -> Rollout:
        """Return the rollout: tokens of a truncated completion teach as well as others."""
        return rollout

    def own_divergence(self, rollout: Rollout, rows: list[int], teacher: Learner, **options: Any) -> Divergences:
        """Return the divergences of the tokens of some completions from a teacher, see ``Learner.divergence``."""
        return self.model.divergence(
            [rollout.prompt_ids[i] for i in rows], [rollout.completion_ids[i] for i in rows], teacher,
            beta=self.config.beta, temperature=self.config.temperature, **options,
        )  # fmt: skip


class Distill(Distillation):
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
    teacher: Any = None
    _is_own_teacher = False

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
        reject_ineffective(self.config, REWARD_SETTINGS, reward_fn is not None, "there is no reward function")
        self.rewards = None if reward_fn is None else reward_functions(self.config, reward_fn)
        self.check_divergence()
        if self.config.divergence == "sampled":
            self.teacher = open_teacher(teacher, self.tokenizer, "Distill")
        else:
            self.teacher = open_learner(teacher, self.tokenizer, model, "Distill")
        self._is_own_teacher = self.teacher is not teacher
        if isinstance(self.teacher, Engine) and self._is_own_teacher:
            unregister_holder(self.teacher)

    @training_step
    def train_step(self, prompt_batch: Any) -> dict[str, float]:
        """Sample completions for a batch of prompts, score their tokens with the teacher, and update the student.

        Args:
            prompt_batch: as for ``GRPO.train_step``.

        Returns:
            Metrics: ``loss`` and ``reverse_kl`` (estimates of KL(student || teacher) per token, with and without the
            importance weights), ``teacher_logprob`` (mean per token), ``entropy``, ``sampler/logprob_difference``; of
            whole distributions instead ``divergence``; ``completions/...``; with reward functions ``mean_reward`` and
            ``rewards/NAME/{mean,std}``; and the metrics of every step.
        """
        rollout = self.sample_step(prompt_batch, self.config.n, for_update=True)
        scored = self.score(rollout)
        is_full = self.config.divergence == "full"
        teacher = partial(self._divergence, rollout, keep=True) if is_full else self._score(rollout)
        self.last_completions = completion_table(self.step + 1, rollout, scored, {})
        found = reward_metrics(scored) if scored is not None else {}
        return {**self.learn(rollout, teacher), **found, **rollout.metrics()}

    def _divergence(self, rollout: Rollout, part: list[int], *, keep: bool) -> Divergences:
        """Return the divergences of the tokens of some completions from the teacher."""
        adapters = not self._is_own_teacher and self.teacher is not self.model
        return self.own_divergence(rollout, part, cast(Learner, self.teacher), teacher_adapters=adapters, keep=keep)

    def _score(self, rollout: Rollout) -> np.ndarray:
        """Return the teacher's log-probs of all completions, (N, T); every rank scores its share of the rows."""
        prompts, completions, ranks = rollout.prompt_ids, rollout.completion_ids, self.ranks
        own = range(ranks.rank, len(prompts), ranks.size)

        def score() -> list[np.ndarray]:
            rows = [prompts[i] for i in own], [completions[i] for i in own]
            return score_tokens(cast(Teacher, self.teacher), *rows, self.config.temperature)

        with phase("teacher"):
            shares = ranks.gather_results(score)
        if self._is_own_teacher and isinstance(self.teacher, Engine):
            self.teacher.release_memory()
        return pad_rows([shares[i % ranks.size][i // ranks.size] for i in range(len(prompts))])

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory held by the trainer, and of a teacher that it has loaded."""
        yield from super().memory_blocks()
        if self._is_own_teacher and isinstance(self.teacher, (Engine, Learner)):
            holder = self.teacher if isinstance(self.teacher, Engine) else self.teacher.base
            for _, key, n_bytes in holder.memory_blocks():
                yield "teacher", key, n_bytes

    def evaluation_metrics(
        self, dataset: Any, *, reward_fn: RewardFn | None = None, temperature: float | None = None
    ) -> dict[str, float]:
        """Return ``mean_reward``, as in GRPO, if there are reward functions, and ``reverse_kl`` or ``divergence``, of
        one completion per prompt that is sampled at the trainer's temperature.
        """
        found, batches = {}, [batch for (batch,) in self.iter_batches(dataset)]  # an iterator is read once
        if reward_fn is not None or self.rewards is not None:
            found = super().evaluation_metrics(batches, reward_fn=reward_fn, temperature=temperature)
        total, n_tokens, name = 0.0, 0, "divergence" if self.config.divergence == "full" else "reverse_kl"
        for i, batch in enumerate(batches):
            with self._synced_engine():
                rollout = self._sample(batch, 1, i, for_update=True)
            total += self._total(rollout)
            n_tokens += sum(map(len, rollout.completion_ids))
        return {**found, name: total / max(1, n_tokens)}

    def _total(self, rollout: Rollout) -> float:
        """Return the sum of the divergences of all tokens."""
        rows = list(zip(rollout.prompt_ids, rollout.completion_ids, strict=True))
        if self.config.divergence == "full":
            parts = self.micro_batches(rows)
            return sum(float(self._divergence(rollout, part, keep=False).values.sum()) for part in parts)
        experts = rollout.experts(range(len(rows)))
        own = self.logprobs(rollout.prompt_ids, rollout.completion_ids, self.config.temperature, experts=experts)
        return float(own.sum(dtype=np.float64)) - float(self._score(rollout).sum(dtype=np.float64))
