"""Group Relative Policy Optimization: sample G completions per prompt, reinforce completions above the group mean.

Per token t of completion i, with its group-relative advantage A_i and the probability ratio
rho = exp(log pi - log pi_old) (Shao et al. 2024, eq. 3):

    l_it = -min(rho A_i, clip(rho, 1 - epsilon, 1 + epsilon_high) A_i) + beta KL_it

The losses of the family differ in l and in how tokens are summed (see ``grpo_loss``). Assumes that every completion
of a group answers the same prompt, and that log-probs are computed at the sampling temperature. Where bans, a grammar
or filters (top_k, top_p, min_p) excluded tokens, all log-probs are of the distribution over the others, which the
engine records (the sampling mask of DeepSeek-V3.2; DeepSeek-AI 2025).

With ``echo_alpha``, the tokens that an environment or tools answered between the turns of episodes, N of an update, add
the mean of their cross-entropy (ECHO, as prime-rl's algorithm of this name):

    loss += echo_alpha / N sum -log pi(o | everything before o)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from whet.algorithms.online import OnlineTrainer
from whet.config.episodes import check_episode_settings
from whet.config.fields import check_range, reject_ineffective
from whet.config.kept_tokens import KeptTokens
from whet.config.settings import GRPOConfig, SamplerCorrection
from whet.errors import WhetTypeError, WhetValueError
from whet.losses.closed_form import Loss
from whet.losses.grpo import Counts, Tokens, masked_loss
from whet.losses.sft import sft_loss
from whet.losses.terms import count_rows, importance_weights, logprob_difference, top_entropy_masks
from whet.rewards.advantages import relative_advantages
from whet.rewards.functions import RewardBatch, RewardFn, RewardFunctions
from whet.rewards.metrics import group_std, reward_metrics
from whet.rewards.turns import begins_of_turns, token_advantages, turn_advantages
from whet.rollout.choose import reward_functions
from whet.rollout.episodes import environment_reward
from whet.rollout.rollout import Rollout, completion_table
from whet.training.distributed import join_ranks
from whet.training.phases import phase
from whet.training.trainer import training_step

_DEFAULT_BETA = 0.1
"""Default ``beta`` with a ref_model: a reference without effect is never intended."""


class GRPO(OnlineTrainer):
    """Group Relative Policy Optimization.

    Args:
        model: the policy.
        ref_model: the reference. If it is passed, beta defaults to 0.1, which is printed; TRL's default is 0.
        reward_fn: one reward function, several, or ``whet.rewards.RewardFunctions``. With an environment, which rewards
            its turns, others are optional, and get lists of messages; with tools, they are required.
        kl_coef: alias of ``beta``.
        **arguments: further arguments of ``Trainer`` and ``OnlineTrainer``.
    """

    config_class = GRPOConfig
    plays_episodes = True
    rewards: RewardFunctions
    _in_progress: _Step | None = None

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        reward_fn: RewardFn | None = None,
        *,
        kl_coef: float | None = None,
        **arguments: Any,
    ) -> None:
        if kl_coef is not None:
            if "beta" in arguments:
                where = type(self).__name__
                raise WhetTypeError(f"{where}: kl_coef and beta are one setting. Pass one of them.")
            arguments["beta"] = kl_coef
        super().__init__(model, ref_model, **arguments)
        why = "sampler_correction is 'auto', and without a quantised base the sampler matches the policy"
        may_correct = self._correction() is not None or not self._is_own_engine  # a custom engine may lag behind
        may_correct |= self.config.async_lag > 0
        reject_ineffective(self.config, ["sampler_cap"], may_correct, why)
        if self.rewards_turns and not isinstance(reward_fn, RewardFunctions):
            others = [reward_fn] if callable(reward_fn) else list(reward_fn or ())
            reward_fn = [environment_reward, *others]
        is_agent = bool(arguments.get("agent"))
        reject_ineffective(self.config, ["serve_port"], is_agent, "there is no agent")
        reject_ineffective(self.config, ["max_read_tokens"], not is_agent, "an agent reads what it sends itself")
        has_tools = bool(arguments.get("tools"))
        has_turns = self.rewards_turns and not is_agent
        answers = has_turns or has_tools
        why = "there are no environment and no tools" if not is_agent else "the messages of an agent are not known"
        reject_ineffective(self.config, ["echo_alpha"], answers, why)
        episode = "'episode': no environment rewards turns"
        check_range(self.config, "advantage_level", has_turns or self.config.advantage_level == "episode", episode)
        check_episode_settings(self.config, has_environment=self.rewards_turns, has_tools=has_tools)
        self.rewards = reward_functions(self.config, reward_fn)

    def complete_config(self, config: GRPOConfig, ref_model: Any) -> GRPOConfig:
        """Return the config with ``beta`` resolved; its default depends on ref_model."""
        if config.beta is not None:
            return config
        beta = 0.0 if ref_model is None else _DEFAULT_BETA
        if beta and join_ranks().is_first:
            print(
                f"GRPO: beta is {beta}, the default with a ref_model. Pass beta (or kl_coef) to change it.", flush=True
            )
        return replace(config, beta=beta)

    def _correction(self, rollout: Rollout | None = None) -> SamplerCorrection | None:
        """Return the correction of the config. "auto" also corrects on a quantised base, where only the sampler rounds
        inputs to 8 bits, and for completions sampled by an older policy.
        """
        sampled = [] if rollout is None else rollout.completions
        version = self.step if self.config.async_lag else self.engine.policy_version
        is_older = any(completion.policy_version < version for completion in sampled)
        if self.config.sampler_correction == "auto" and (is_older or self.policy.rounds_samples):
            return "token_truncate"
        return self.config.correction()

    @training_step
    def train_step(self, prompt_batch: Any) -> dict[str, float]:
        """Sample completions for a batch of prompts, score them, and update the policy.

        Args:
            prompt_batch: a (B, P) tensor; a dict of input_ids and attention_mask, padded on either side;
                ragged lists of token ids; with a tokenizer texts, or rows (dicts) with ``prompt`` as text, messages or
                ids. Reward functions get the other fields of rows.

        Returns:
            Metrics: ``loss``, ``mean_reward``, ``reward_std`` (mean over groups), ``frac_reward_zero_std``,
            ``rewards/NAME/{mean,std}``, ``entropy``, ``completions/...``, ``sampler/logprob_difference`` and
            ``sampler/logprob_difference_max`` (of |log pi_old - log pi_sampler| per token), ``grpo_loss`` metrics,
            with ``echo_alpha`` ``echo/nll`` (in nats per token) and ``echo/num_tokens``,
            and the metrics of every step; averages over the ``num_iterations`` times ``steps_per_generation`` updates.

        Raises:
            RewardError: a reward function failed.
        """
        self._in_progress = step = self._resume(prompt_batch) or self._begin(prompt_batch)
        while (n_done := len(step.updates)) < self.config.num_iterations * len(step.mini_batches):
            mini = step.mini_batches[n_done % len(step.mini_batches)]
            with self.update() as update:
                for batch in update.shard(mini.batches, [batch.rows() for batch in mini.batches]):
                    loss = self._loss(batch, mini)
                    known = batch.sampler_logprobs is not None
                    maxima = {"sampler/logprob_difference_max": batch.logprob_difference[1]} if known else None
                    of_entropy = loss.gradients.get("entropies")
                    update.add(loss.value, loss.gradients["logprobs"], loss.metrics, maxima, of_entropy)
            step.updates.append(update.metrics)
            step.maxima = {name: max(x, step.maxima.get(name, x)) for name, x in update.maxima.items()}
        self._in_progress = None
        metrics = step.all_metrics()
        if step.mini_batches and step.mini_batches[0].batches[0].correction is None:
            fix = "Set sampler_correction, or train adapters that generate and forward compute alike."
            self.warn_if_mismatched(metrics.get("sampler/logprob_difference", 0.0), fix)
        return metrics

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory held by the trainer, and of a step in progress the kept tokens."""
        yield from super().memory_blocks()
        minis = [] if self._in_progress is None else self._in_progress.mini_batches
        kept = [
            each for mini in minis for batch in mini.batches for each in batch.kept_tokens or () if each is not None
        ]
        yield "kept_tokens", id(self), sum(each.offsets.nbytes + each.words.nbytes for each in kept)

    def replays_experts(self) -> bool:
        """Whether an update gives tokens to the experts that the sampler chose."""
        return self.config.router_replay and self.can_replay_experts()

    def _resume(self, prompt_batch: Any) -> _Step | None:
        """Return the step on these prompts that was interrupted between two of its updates, if any."""
        step = self._in_progress
        if step is None or not step.updates or step.number != self.step:
            return None
        prompts = self.prepare(prompt_batch)
        return step if (prompts.ids or prompts.decoded) == step.prompts else None

    def _begin(self, prompt_batch: Any) -> _Step:
        """Sample completions and score them."""
        config, size = self.config, self.config.group_size
        rollout = self.sample_step(prompt_batch, size, for_update=True)
        with phase("reward"):
            scored = self.ranks.broadcast_from_first(lambda: rollout.score(self.rewards))
        shaped, kl = scored, {}
        if config.reward_clip:
            shaped = replace(shaped, rewards=shaped.rewards.clip(*config.reward_clip))
        if config.kl_in_reward and config.beta:
            shaped, kl = self._subtract_kl(rollout, shaped)
        with phase("advantages"):
            options = {"scale": config.scale_rewards, "ddof": config.advantage_ddof, "eps": config.advantage_eps}
            advantages = relative_advantages(shaped, size, config.advantage, self.rewards.weights, options)
            turns = self._turn_advantages(rollout, scored, options) if config.advantage_level == "turn" else None
        spread = group_std(shaped.rewards.reshape(-1, size))
        excluded = np.zeros(len(advantages), dtype=bool)
        if config.filter_zero_variance:
            is_flat = spread < 1e-8
            if turns is not None:
                is_flat = ~np.array([each.any() for each in turns]).reshape(-1, size).any(axis=1)
            excluded |= np.repeat(is_flat, size)
        if config.mask_truncated_completions:
            excluded |= rollout.truncated
        if self.player is not None:
            excluded |= np.isnan(scored.rewards)
        extra = {"advantage": advantages.tolist() if turns is None else [each.tolist() for each in turns]}
        self.last_completions = completion_table(self.step + 1, rollout, scored, extra)
        groups = np.arange(len(advantages)).reshape(-1, size)
        shares = np.array_split(groups, config.steps_per_generation)
        parts = [[i for i in share.ravel().tolist() if not excluded[i]] for share in shares]
        given = advantages if turns is None else turns
        minis = [_MiniBatch(self._micro_batches(rollout, given, rows), config.max_new_tokens) for rows in parts if rows]
        return _Step(
            number=self.step,
            prompts=rollout.prompt_ids[::size] if self.player is None else self.prepare(prompt_batch).decoded,
            mini_batches=[mini for mini in minis if mini.counts.n_tokens],
            metrics={
                **reward_metrics(scored),
                **kl,
                "reward_std": float(spread.mean()),
                "frac_reward_zero_std": float((spread < 1e-8).mean()),
                **rollout.metrics(),
            },
        )

    def _subtract_kl(self, rollout: Rollout, scored: RewardBatch) -> tuple[RewardBatch, dict[str, float]]:
        """Return the rewards minus beta times log pi - log ref of the completions, and the metrics of this KL."""
        rows = np.flatnonzero(~np.isnan(scored.rewards)).tolist()
        if not rows:
            return scored, {}
        owners, branches = rollout.split_branches(rows)
        texts, recorded = (branches.prompt_ids, branches.completion_ids), _recorded(branches)
        policy, reference = (
            self.logprobs(*texts, self.config.temperature, **recorded, reference=of_reference).sum(1, dtype=np.float64)
            for of_reference in (False, True)
        )
        kl = np.bincount(owners, policy - reference, minlength=len(scored.rewards))
        n_tokens = sum(completion.n_sampled for completion in branches.completions)
        metrics = {"kl": float(kl.sum()) / max(1, n_tokens), "mean_kl": float(kl.sum()) / len(rows)}
        return replace(scored, rewards=scored.rewards - self.config.beta * kl), metrics

    def _turn_advantages(self, rollout: Rollout, scored: RewardBatch, options: dict[str, Any]) -> list[np.ndarray]:
        """Return the advantages of each episode's turns. The other rewards count as rewards of the last turn."""
        weights = dict(zip(self.rewards.names, self.rewards.weights, strict=True))
        weight, rewards = weights.get(environment_reward.__name__, 0.0), []
        for i, of_turns in enumerate(rollout.details["turn_rewards"]):
            n_turns = sum(int(begins_of_turns(sampled).sum()) for sampled in rollout.sampled_by_branch(i))
            # A turn that max_new_tokens ended has no reward.
            rewards.append([weight * reward for reward in [*of_turns, 0.0][:n_turns]])
        return turn_advantages(rewards, scored.rewards, self.config.group_size, **options)

    def _micro_batches(
        self, rollout: Rollout, advantages: np.ndarray | list[np.ndarray], rows: list[int]
    ) -> list[_MicroBatch]:
        """Return some completions of a rollout as micro-batches, with everything known before the first update.

        Each branch of an episode is a row, with the episode's advantage, or with the advantages of its turns.

        Args:
            rollout: all completions.
            advantages: of completions, or of the turns of each.
            rows: the completions that count.
        """
        config = self.config
        of_tokens = None
        if isinstance(advantages, list):
            by_row = (token_advantages(advantages[i], rollout.sampled_by_branch(i)) for i in rows)
            of_tokens = [row for branches in by_row for row in branches]
        owners, rollout = rollout.split_branches(rows)
        rows = list(range(len(owners)))
        prompts, completions = rollout.prompt_ids, rollout.completion_ids
        reference = old = entropies = None
        recorded = _recorded(rollout)
        kept, experts, sampled = recorded["kept_tokens"], recorded["experts"], recorded["completion_mask"]
        if config.uses_reference_model() and not config.kl_in_reward:
            reference = self.logprobs(prompts, completions, config.temperature, **recorded, reference=True)
        sampler, correction = rollout.sampler_logprobs(rows), self._correction(rollout)
        if correction and sampler is None and config.sampler_correction != "auto":
            raise WhetValueError(
                f"{type(self).__name__}: sampler_correction needs log-probs, which the engine does not record. Set it "
                f"to 'off'."
            )
        # The first updates change the policy before it computes the later mini-batches.
        needs_old = config.steps_per_generation > 1
        if correction and sampler is not None:  # a mask changes the divisor of the loss, dropout adds noise to weights
            needs_old |= correction.endswith("mask") or config.training_mode
        if config.top_entropy_quantile < 1:  # of the whole mini-batch
            old, entropies = self.logprobs(prompts, completions, config.temperature, **recorded, return_entropy=True)
        elif needs_old:
            old = self.logprobs(prompts, completions, config.temperature, **recorded)
        batches, of_batches = [], []
        for part in self.micro_batches(list(zip(prompts, completions, strict=True))):
            lengths = np.array([len(completions[i]) for i in part])
            exists = np.arange(lengths.max()) < lengths[:, None]
            mask, computed, echo_mask = exists.copy(), None, None
            if sampled is not None:
                computed = [sampled[i] for i in part]
                mask[exists] = np.concatenate(computed)
            if config.learns_answers():
                echo_mask = np.zeros_like(mask)
                echo_mask[exists] = np.concatenate(rollout.answered(part))
                computed = [row[:n].tolist() for row, n in zip(mask | echo_mask, lengths, strict=True)]
            ref_logprobs, sampler_logprobs, old_logprobs = (
                None if table is None else table[part, : mask.shape[1]] for table in (reference, sampler, old)
            )
            if of_tokens is None:
                own = np.array([advantages[owners[i]] for i in part])
            else:
                own = np.stack([np.pad(of_tokens[i], (0, mask.shape[1] - len(of_tokens[i]))) for i in part])
            batch = _MicroBatch(
                prompt_ids=[prompts[i] for i in part],
                completion_ids=[completions[i] for i in part],
                kept_tokens=None if kept is None else [kept[i] for i in part],
                experts=None if experts is None else [experts[i] for i in part],
                completion_mask=computed,
                advantages=own,
                mask=mask,
                echo_mask=echo_mask,
                n_sampled=int(mask.sum()),
                n_rows=len(part),
                ref_logprobs=ref_logprobs,
                sampler_logprobs=sampler_logprobs,
                correction=correction,
            )
            if old_logprobs is not None:
                batch.set_old_logprobs(old_logprobs, config.sampler_cap)
            batches.append(batch)
            if entropies is not None:
                of_batches.append(entropies[part, : mask.shape[1]])
        if of_batches:
            chosen = top_entropy_masks(of_batches, [batch.mask for batch in batches], config.top_entropy_quantile)
            for batch, entropy_mask in zip(batches, chosen, strict=True):
                batch.entropy_mask = entropy_mask
        return batches

    def _loss(self, batch: _MicroBatch, mini: _MiniBatch) -> Loss:
        """Return the loss of a micro-batch, as its share of the mini-batch."""
        config = self.config
        with phase("forward"):
            result = self.policy.logprobs(
                batch.prompt_ids, batch.completion_ids, completion_mask=batch.completion_mask,
                kept_tokens=batch.kept_tokens, temperature=config.temperature, return_entropy=True,
                experts=batch.experts, differentiable_entropy=config.entropy_coef != 0,
            )  # fmt: skip
        logprobs, entropy = result.logprobs, cast(np.ndarray, result.entropy)
        with phase("loss"):
            if batch.old_logprobs is None:  # the policy of the first update is the policy that sampled
                batch.set_old_logprobs(logprobs, config.sampler_cap)
            old = cast(np.ndarray, batch.old_logprobs)
            tokens = Tokens(
                logprobs, old, batch.advantages, batch.mask, batch.weights, batch.ref_logprobs, batch.sampler_logprobs,
                entropy, batch.entropy_mask,
            )  # fmt: skip
            loss = masked_loss(tokens, config, mini.counts)
            if batch.echo_mask is not None and mini.n_echo:
                loss = self._add_echo(loss, logprobs, batch.echo_mask, mini.n_echo)
        own = entropy if batch.echo_mask is None else np.where(batch.echo_mask, 0.0, entropy)
        loss.metrics["entropy"] = float(own.sum(dtype=np.float64)) / mini.n_sampled
        if result.replaced_experts is not None:
            loss.metrics["sampler/replaced_experts"] = float(result.replaced_experts * batch.n_sampled / mini.n_sampled)
        if batch.sampler_logprobs is not None:
            loss.metrics["sampler/logprob_difference"] = batch.logprob_difference[0] / mini.n_sampled
        return loss

    def _add_echo(self, loss: Loss, logprobs: np.ndarray, echo_mask: np.ndarray, n_echo: int) -> Loss:
        """Return the loss with the cross-entropy of what the environment answered, of n_echo tokens in the update."""
        echo, alpha = sft_loss(logprobs, echo_mask, n_tokens=n_echo), self.config.echo_alpha
        gradient = loss.gradients["logprobs"] + alpha * echo.gradients["logprobs"]
        found = {"echo/nll": echo.value, "echo/num_tokens": float(echo_mask.sum())}
        gradients = {**loss.gradients, "logprobs": gradient}
        return Loss(loss.value + alpha * echo.value, {**loss.metrics, **found}, gradients)


def _recorded(rollout: Rollout) -> dict[str, Any]:
    """Return what the engine recorded of all completions, as arguments of ``Trainer.logprobs``."""
    rows = range(len(rollout.completions))
    return {
        "kept_tokens": rollout.kept_tokens(rows),
        "experts": rollout.experts(rows),
        "completion_mask": rollout.sampled(rows),
    }


@dataclass
class _Step:
    """State of a step after sampling.

    Attributes:
        number: number of steps before this one.
        prompts: token ids of the batch's prompts; with an environment, its rows.
        mini_batches: the completions that count, in the mini-batches of ``steps_per_generation``.
        metrics: metrics of the completions.
        updates: metrics of each update so far.
        maxima: maxima over all micro-batches, by name.
    """

    number: int
    prompts: list[Any]
    mini_batches: list[_MiniBatch]
    metrics: dict[str, float]
    updates: list[dict[str, float]] = field(default_factory=list)
    maxima: dict[str, float] = field(default_factory=dict)

    def all_metrics(self) -> dict[str, float]:
        """Return means over the updates, and the metrics of the completions."""
        if not self.updates:
            return {"loss": 0.0, "grad_norm": 0.0, **self.metrics}
        names = [name for name in self.updates[0] if all(name in update for update in self.updates)]
        means = {name: sum(update[name] for update in self.updates) / len(self.updates) for name in names}
        return {**means, **self.maxima, **self.metrics}


class _MiniBatch:
    """Completions of one update.

    Attributes:
        batches: its micro-batches.
        n_sampled: number of sampled tokens.
        n_echo: number of tokens that ``echo_alpha`` trains.
        counts: divisors of the loss.
    """

    def __init__(self, batches: list[_MicroBatch], max_completion_length: int) -> None:
        self.batches = batches
        self.n_sampled = sum(batch.n_sampled for batch in batches)
        self.n_echo = sum(int(batch.echo_mask.sum()) for batch in batches if batch.echo_mask is not None)
        self.counts = Counts(
            n_tokens=sum(int(batch.mask.sum()) for batch in batches),
            n_rows=sum(batch.n_rows for batch in batches),
            max_completion_length=max_completion_length,
            n_entropy_tokens=sum(int(batch.entropy_tokens().sum()) for batch in batches),
        )


@dataclass
class _MicroBatch:
    """Completions of one forward pass, and the data that all updates on them share.

    Attributes:
        prompt_ids: b rows of token ids.
        completion_ids: b rows of token ids.
        kept_tokens: of each completion; None: every token was drawn from the whole vocabulary.
        experts: of the tokens of each row, that the sampler chose; None: the policy's choice.
        completion_mask: per token of each completion, whether it is trained; None: all are.
        advantages: (b,) float64; of turns (b, t).
        mask: (b, t) bool, True for tokens that count: sampled, and not rejected by the correction.
        n_sampled: number of sampled tokens.
        n_rows: number of completions that count.
        ref_logprobs: (b, t); None: no KL term.
        sampler_logprobs: (b, t), recorded by the engine; None: not recorded.
        correction: importance correction; None: off.
        old_logprobs: (b, t), log-probs of the policy that sampled; None until the first update computes them.
        weights: (b, t), importance weights; None without a correction.
        logprob_difference: sum and maximum of |old_logprobs - sampler_logprobs|.
        entropy_mask: (b, t) bool, the tokens of ``top_entropy_quantile``; None: all.
        echo_mask: (b, t) bool, the tokens that ``echo_alpha`` trains; None: none.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    kept_tokens: list[KeptTokens | None] | None
    experts: list[np.ndarray | None] | None
    completion_mask: list[list[bool]] | None
    advantages: np.ndarray
    mask: np.ndarray
    n_sampled: int
    n_rows: int
    ref_logprobs: np.ndarray | None
    sampler_logprobs: np.ndarray | None
    correction: SamplerCorrection | None
    old_logprobs: np.ndarray | None = None
    weights: np.ndarray | None = None
    logprob_difference: tuple[float, float] = (0.0, 0.0)
    entropy_mask: np.ndarray | None = None
    echo_mask: np.ndarray | None = None

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """Return prompts and completions."""
        return list(zip(self.prompt_ids, self.completion_ids, strict=True))

    def entropy_tokens(self) -> np.ndarray:
        """Return the tokens of the entropy bonus, (b, t) bool."""
        return self.mask if self.entropy_mask is None else self.entropy_mask

    def set_old_logprobs(self, logprobs: np.ndarray, cap: float) -> None:
        """Set the log-probs of the policy that sampled; derive the difference, importance weights and mask."""
        self.old_logprobs = logprobs
        if self.sampler_logprobs is None:
            return
        self.logprob_difference = logprob_difference(logprobs, self.sampler_logprobs, self.mask)
        if self.correction:
            self.weights, kept = importance_weights(
                logprobs, self.sampler_logprobs, self.mask, correction=self.correction, cap=cap
            )
            self.mask, self.n_rows = kept, count_rows(self.mask, kept)
