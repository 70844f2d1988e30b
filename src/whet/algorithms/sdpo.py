"""Self-distillation: a model that reads a right answer, or what was wrong, teaches the same model that does not.

    c_i = a sample y_j of the prompt that succeeded, j != i, and feedback on y_i, if there is some
    A_it = log pi(y_it | x, c_i, y_i,<t) - log pi(y_it | x, y_i,<t),    l_it = -w_it rho_it A_it,    y_i ~ pi(. | x)

averaged over the tokens of the samples that have a c_i (SDPO, Hübotter et al. 2026, arXiv 2601.20802; with a
demonstration of the row as c, SDFT, Shenfeld et al. 2026, arXiv 2601.19897). The loss is ``Distill``'s: the teacher is
constant, and the gradient estimates the gradient of KL(pi(. | x) || pi(. | x, c)) of each token. Assumes that the model
answers better if it reads c.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from whet.algorithms.distill import Distillation
from whet.config.fields import check_range, reject_ineffective
from whet.config.settings import REWARD_SETTINGS, SDPOConfig
from whet.data.messages import is_messages, text_of
from whet.data.rows import tokenize_prompt
from whet.data.thinking import OPENING_TAG
from whet.errors import WhetTypeError, WhetValueError
from whet.learner.batch import Divergences
from whet.rewards.functions import RewardBatch, RewardFn, call_feedback
from whet.rewards.metrics import reward_metrics
from whet.rollout.choose import reward_functions
from whet.rollout.rollout import Prompts, Rollout, completion_table
from whet.training.phases import phase
from whet.training.trainer import training_step


class _Lessons(NamedTuple):
    """Samples that are taught.

    Attributes:
        rows: their indices.
        prompt_ids: the teacher's prompt of each.
        metrics: shares of samples and prompts.
    """

    rows: list[int]
    prompt_ids: list[list[int]]
    metrics: dict[str, float]


class SDPO(Distillation):
    """Self-distillation from samples that succeed, from feedback, or from demonstrations.

    Args:
        model: student and teacher.
        ref_model: with ``teacher_weights`` "reference", the teacher; None: the model before training.
        reward_fn: one reward function, several, or ``whet.rewards.RewardFunctions``, whose reward decides which samples
            succeeded; optional with ``feedback_fn`` or ``demonstration``.
        feedback_fn: returns a text or None for each completion, such as the error message of a test; declares its
            arguments by name, as a reward function.
        **arguments: further arguments of ``Trainer`` and ``OnlineTrainer``; tokenizer is required.
    """

    config_class = SDPOConfig
    config: SDPOConfig

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        reward_fn: RewardFn | None = None,
        feedback_fn: Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(model, ref_model, **arguments)
        config, has_rewards = self.config, reward_fn is not None
        if self.tokenizer is None:
            raise WhetTypeError("SDPO: tokenizer is missing, which renders the teacher's prompts. Pass it.")
        if feedback_fn is not None and not callable(feedback_fn):
            raise WhetTypeError(f"SDPO: feedback_fn is {feedback_fn!r:.60}, expected a function.")
        if not (has_rewards or feedback_fn or config.demonstration):
            raise WhetTypeError(
                "SDPO: nothing teaches. Pass reward_fn, with which samples teach each other, feedback_fn, or "
                "demonstration."
            )
        self.check_divergence()
        mines = has_rewards and not config.demonstration
        if mines and feedback_fn is None:
            check_range(config, "n", config.n > 1, "2 or more: the samples of a prompt teach each other")
        why = "there is no reward function"
        reject_ineffective(config, [*REWARD_SETTINGS, "taught"], has_rewards, why)
        why = "no reward decides which samples teach or are taught"
        reject_ineffective(config, ["success_threshold"], mines or config.taught == "failed", why)
        reject_ineffective(config, ["feedback_template"], feedback_fn is not None, "there is no feedback_fn")
        has_solutions = mines or bool(config.demonstration)
        reject_ineffective(config, ["solution_template"], has_solutions, "there are no solutions")
        self.rewards = reward_functions(config, reward_fn) if has_rewards else None
        self.feedback_fn = feedback_fn
        self._warned_of_length = False

    @training_step
    def train_step(self, prompt_batch: Any) -> dict[str, float]:
        """Sample completions for a batch of prompts, and teach those that have a solution or feedback.

        Args:
            prompt_batch: texts, messages or rows as for ``GRPO.train_step``, but no token ids.

        Returns:
            Metrics: the update's, as of ``Distill.train_step``; ``taught/frac`` (share of the samples),
            ``taught/too_long_frac`` (not taught, as the teacher's prompt and the completion exceed the model's
            positions), with feedback ``taught/feedback_frac``, and with reward functions ``taught/solved_frac`` (share
            of the prompts with a sample that succeeded), ``mean_reward`` and ``rewards/NAME/{mean,std}``;
            ``completions/...``; and the metrics of every step. A batch of which nothing is taught has loss and gradient
            norm 0, and makes no update.

        Raises:
            RewardError: a reward or feedback function failed.
            WhetValueError: a prompt is token ids, or does not end with the user's message.
        """
        config = self.config
        rollout = self.sample_step(prompt_batch, config.n, for_update=True)
        scored = self.score(rollout)
        lessons = self._lessons(rollout, scored)
        is_taught = np.isin(np.arange(len(rollout.completions)), lessons.rows).tolist()
        self.last_completions = completion_table(self.step + 1, rollout, scored, {"taught": is_taught})
        found = {} if scored is None else reward_metrics(scored)
        metrics = {**lessons.metrics, **found, **rollout.metrics()}
        if not lessons.rows:
            return {"loss": 0.0, "grad_norm": 0.0, **metrics}
        _, taught = rollout.split_branches(lessons.rows)
        if config.divergence == "full":
            teacher = partial(self._divergence, taught, lessons.prompt_ids)
            return {**self.learn(taught, teacher, lessons.prompt_ids), **metrics}
        return {**self.learn(taught, self._teacher_logprobs(taught, lessons)), **metrics}

    def _divergence(self, taught: Rollout, teacher_prompts: list[list[int]], part: list[int]) -> Divergences:
        return self.own_divergence(taught, part, self.model, teacher_prompt_ids=[teacher_prompts[i] for i in part])

    def _teacher_logprobs(self, taught: Rollout, lessons: _Lessons) -> np.ndarray:
        """Return the log-probs (N, T) of the tokens of completions behind the teacher's prompts."""
        return self.logprobs(
            lessons.prompt_ids, taught.completion_ids, self.config.temperature, reference=self.config.has_reference()
        )

    def _lessons(self, rollout: Rollout, scored: RewardBatch | None) -> _Lessons:
        """Return the samples that are taught."""
        n_samples, threshold = len(rollout.completions), self.config.success_threshold
        rewards = None if scored is None else scored.rewards
        solutions, feedback = self._solutions(rollout, rewards), self._feedback(rollout)
        rows, prompts, n_too_long = [], [], 0
        for i, (solution, text) in enumerate(zip(solutions, feedback, strict=True)):
            may_learn = self.config.taught == "all" or (rewards is not None and rewards[i] < threshold)
            if not may_learn or not (solution or text):
                continue
            ids = self._teacher_prompt(rollout, i, solution or "", text or "")
            if len(ids) + len(rollout.completion_ids[i]) > (self.policy.position_limit or np.inf):
                n_too_long += 1
                continue
            rows.append(i)
            prompts.append(ids)
        if n_too_long and not rows and self.ranks.is_first and not self._warned_of_length:
            self._warned_of_length = True
            warnings.warn(
                f"SDPO: no sample of the batch is taught, as {n_too_long} prompts of the teacher and their completions "
                f"exceed the model's {self.policy.position_limit} positions. Lower max_new_tokens, or shorten the "
                f"templates.",
                stacklevel=3,
            )
        metrics = {"taught/frac": len(rows) / n_samples, "taught/too_long_frac": n_too_long / n_samples}
        if self.feedback_fn is not None:
            metrics["taught/feedback_frac"] = sum(map(bool, feedback)) / n_samples
        if rewards is not None:
            metrics["taught/solved_frac"] = float((rewards >= threshold).reshape(-1, self.config.n).any(1).mean())
        return _Lessons(rows, prompts, metrics)

    def _solutions(self, rollout: Rollout, rewards: np.ndarray | None) -> list[str | None]:
        """Return for each sample the demonstration of its row, or the first other sample that succeeded."""
        n, name = self.config.n, self.config.demonstration
        if name:
            column = rollout.columns.get(name)
            wrong = next((value for value in column or [3] if not (value is None or isinstance(value, str))), None)
            if column is None or wrong is not None:
                got = "rows have no such column" if column is None else f"a row has {wrong!r:.60}"
                raise WhetValueError(f"SDPO: demonstration is {name!r}, a column of texts, but {got}.")
            return column
        if rewards is None:
            return [None] * len(rollout.completions)
        succeeded = rewards >= self.config.success_threshold
        tags = rollout.columns[OPENING_TAG]
        found: list[str | None] = []
        for i in range(len(rewards)):
            group = range(i // n * n, (i // n + 1) * n)
            j = next((j for j in group if j != i and succeeded[j]), None)
            found.append(None if j is None else f"{tags[j]}{rollout.decoded[j]}")
        return found

    def _feedback(self, rollout: Rollout) -> list[str | None]:
        """Return the text of ``feedback_fn`` for each sample."""
        if (function := self.feedback_fn) is None:
            return [None] * len(rollout.completions)
        given = {"prompts": rollout.prompts, "completions": rollout.decoded, "completion_ids": rollout.completion_ids}
        with phase("reward"):
            return self.ranks.broadcast_from_first(lambda: call_feedback(function, columns=rollout.columns, **given))

    def _teacher_prompt(self, rollout: Rollout, i: int, solution: str, feedback: str) -> list[int]:
        """Return the token ids of a prompt with a solution, feedback, or both ("": none)."""
        prompt, config = rollout.prompts[i], self.config
        parts = {
            "solution": _fill(config.solution_template, {"solution": solution}) if solution else "",
            "feedback": _fill(config.feedback_template, {"feedback": feedback}) if feedback else "",
        }
        text = text_of(prompt[-1]) if is_messages(prompt) else prompt
        text = _fill(config.reprompt_template, {"prompt": text, **parts})
        if is_messages(prompt):
            text = [*prompt[:-1], {**prompt[-1], "content": text}]
        columns = {name: values[i] for name, values in rollout.columns.items()}
        return _tokenize(text, columns, self.tokenizer)

    def prepare(self, batch: Any) -> Prompts:
        """Return the prompts of a batch as token ids; reject prompts of which no teacher's prompt can be rendered."""
        prompts = super().prepare(batch)
        for i, (ids, prompt) in enumerate(zip(prompts.ids, prompts.decoded, strict=True)):
            columns = {name: values[i] for name, values in prompts.columns.items()}
            if is_messages(prompt) and prompt[-1]["role"] != "user":
                raise WhetValueError(
                    f"SDPO: a prompt ends with a message of the role {prompt[-1]['role']!r}, and the teacher's prompt "
                    f"extends the user's message. Give prompts that end with it."
                )
            if _tokenize(prompt, columns, self.tokenizer) != list(ids):
                raise WhetValueError(
                    f"SDPO: prompt {prompt!r:.60} was given as token ids, and the teacher's prompt extends its text. "
                    f"Give prompts as texts or messages."
                )
        return prompts

    def evaluation_metrics(
        self, dataset: Any, *, reward_fn: RewardFn | None = None, temperature: float | None = None
    ) -> dict[str, float]:
        """Return ``mean_reward``, as in GRPO, if there are reward functions, and with ``demonstration`` ``reverse_kl``,
        in nats per token, of one completion per prompt that is sampled at the trainer's temperature.
        """
        found, batches = {}, [batch for (batch,) in self.iter_batches(dataset)]  # an iterator is read once
        if reward_fn is not None or self.rewards is not None:
            found = super().evaluation_metrics(batches, reward_fn=reward_fn, temperature=temperature)
        if not self.config.demonstration:
            return found
        total, n_tokens = 0.0, 0
        for i, batch in enumerate(batches):
            with self._synced_engine():
                rollout = self._sample(batch, 1, i)
            columns = zip(self._solutions(rollout, None), range(len(rollout.completions)), strict=True)
            rows = {j: self._teacher_prompt(rollout, j, solution, "") for solution, j in columns if solution}
            if not rows:
                continue
            _, taught = rollout.split_branches(list(rows))
            own = self.logprobs(taught.prompt_ids, taught.completion_ids, self.config.temperature)
            teacher = self._teacher_logprobs(taught, _Lessons(list(rows), list(rows.values()), {}))
            total += float(own.sum(dtype=np.float64) - teacher.sum(dtype=np.float64))
            n_tokens += sum(map(len, taught.completion_ids))
        return {**found, "reverse_kl": total / max(1, n_tokens)}


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Return a template with its parts; braces in their texts have no meaning."""
    return re.sub("|".join(rf"{{{name}}}" for name in values), lambda found: values[found[0][1:-1]], template)


def _tokenize(prompt: Any, columns: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt, a text or messages, of a row with these columns."""
    options = {name: columns[name] for name in ("tools", "chat_template_kwargs") if columns.get(name) is not None}
    return list(tokenize_prompt({**options, "prompt": prompt}, tokenizer))
