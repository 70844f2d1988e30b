"""Group Relative Policy Optimization: sample G completions per prompt, reinforce completions above the group mean.

Per token t of completion i, with its group-relative advantage A_i and the probability ratio
rho = exp(log pi - log pi_old) (Shao et al. 2024, eq. 3):

    l_it = -min(rho A_i, clip(rho, 1 - epsilon, 1 + epsilon_high) A_i) + beta KL_it

The losses of the family differ in l and in how tokens are summed (see ``grpo_loss``). Assumes that every completion
of a group answers the same prompt, and that log-probs are computed at the sampling temperature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from whet.algorithms.loss_terms import (
    check_float_tensor,
    check_shapes,
    count_rows,
    denominator,
    importance_weights,
    logprob_difference,
    masked,
    token_kl,
)
from whet.algorithms.online import OnlineTrainer
from whet.config.fields import reject_ineffective
from whet.config.settings import (
    GRPOConfig,
    GRPOLossType,
    KLEstimator,
    RatioLevel,
    SamplerCorrection,
    check_grpo_options,
)
from whet.errors import WhetTypeError, WhetValueError
from whet.nn.causal_lm import completion_logprobs
from whet.nn.frozen import base_of
from whet.nn.modules import module_device
from whet.ops import compute_batch_group_advantages
from whet.rewards.functions import RewardFn, RewardFunctions
from whet.rewards.metrics import group_std, reward_metrics
from whet.rollout.choose import reward_functions
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
        reward_fn: one reward function, several, or ``whet.rewards.RewardFunctions``.
        kl_coef: alias of ``beta``.
        **arguments: further arguments of ``Trainer`` and ``OnlineTrainer``.
    """

    config_class = GRPOConfig
    rewards: RewardFunctions

    def __init__(
        self,
        model: torch.nn.Module,
        ref_model: torch.nn.Module | None = None,
        reward_fn: RewardFn | None = None,
        *,
        kl_coef: float | None = None,
        **arguments: Any,
    ) -> None:
        if kl_coef is not None:
            if "beta" in arguments:
                raise WhetTypeError("GRPO: kl_coef and beta are one setting. Pass one of them.")
            arguments["beta"] = kl_coef
        super().__init__(model, ref_model, **arguments)
        why = "sampler_correction is 'auto', and without a quantised base the sampler matches the policy"
        may_correct = self._correction() is not None or not self._is_own_engine  # a custom engine may lag behind
        reject_ineffective(self.config, ["sampler_cap"], may_correct, why)
        self.rewards = reward_functions(self.config, reward_fn)
        self._in_progress: _Step | None = None

    def complete_config(self, config: GRPOConfig, ref_model: torch.nn.Module | None) -> GRPOConfig:
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
        base = base_of(self.model)
        sampled = [] if rollout is None else rollout.completions
        is_older = any(completion.policy_version < self.engine.policy_version for completion in sampled)
        if self.config.sampler_correction == "auto" and (is_older or (base is not None and base.is_quantised)):
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
            ``sampler/logprob_difference_max`` (of |log pi_old - log pi_sampler| per token), ``grpo_loss`` metrics
            and the metrics of every step; averages over ``num_iterations`` updates.

        Raises:
            RewardError: a reward function failed.
        """
        self._in_progress = step = self._resume(prompt_batch) or self._begin(prompt_batch)
        while step.counts.n_tokens and len(step.updates) < self.config.num_iterations:
            with self.update() as update:
                for batch in update.shard(step.batches, [batch.rows() for batch in step.batches]):
                    loss, metrics = self._loss(batch, step)
                    known = batch.sampler_logprobs is not None
                    maxima = {"sampler/logprob_difference_max": batch.logprob_difference[1]} if known else None
                    update.add(loss, metrics, maxima)
            step.updates.append(update.metrics)
            step.maxima = update.maxima
        self._in_progress = None
        metrics = step.all_metrics()
        if step.batches and step.batches[0].correction is None:
            fix = "Set sampler_correction, or train adapters that generate and forward compute alike."
            self.warn_if_mismatched(metrics.get("sampler/logprob_difference", 0.0), fix)
        return metrics

    def _resume(self, prompt_batch: Any) -> _Step | None:
        """Return the step on these prompts that was interrupted between two of its updates, if any."""
        step = self._in_progress
        if step is None or not step.updates or step.number != self.step:
            return None
        return step if self.prepare(prompt_batch).ids == step.prompt_ids else None

    def _begin(self, prompt_batch: Any) -> _Step:
        """Sample completions and score them."""
        config, size = self.config, self.config.group_size
        rollout = self.sample(prompt_batch, size)
        with phase("reward"):
            scored = self.ranks.broadcast_from_first(lambda: rollout.score(self.rewards))
        with phase("advantages"):
            options = {"scale": config.scale_rewards, "ddof": config.advantage_ddof, "eps": config.advantage_eps}
            advantages = compute_batch_group_advantages(scored.rewards, size, **options)
        spread = group_std(scored.rewards.reshape(-1, size))
        excluded = np.zeros(len(advantages), dtype=bool)
        if config.filter_zero_variance:
            excluded |= np.repeat(spread < 1e-8, size)
        if config.mask_truncated_completions:
            excluded |= rollout.truncated
        extra = {"advantage": advantages.tolist()}
        self.last_completions = completion_table(self.step + 1, rollout, scored, extra)
        rows = np.flatnonzero(~excluded).tolist()
        batches = self._micro_batches(rollout, advantages, rows) if rows else []
        return _Step(
            number=self.step,
            prompt_ids=rollout.prompt_ids[::size],
            batches=batches,
            n_sampled=sum(len(ids) for batch in batches for ids in batch.completion_ids),
            counts=_Counts(
                n_tokens=sum(int(batch.mask.sum()) for batch in batches),
                n_rows=sum(batch.n_rows for batch in batches),
                max_completion_length=config.max_new_tokens,
            ),
            metrics={
                **reward_metrics(scored),
                "reward_std": float(spread.mean()),
                "frac_reward_zero_std": float((spread < 1e-8).mean()),
                **rollout.metrics(),
            },
        )

    def _micro_batches(self, rollout: Rollout, advantages: np.ndarray, rows: list[int]) -> list[_MicroBatch]:
        """Return some completions of a rollout as micro-batches, with everything known before the first update."""
        config = self.config
        prompts = [rollout.prompt_ids[i] for i in rows]
        completions = [rollout.completions[i].token_ids for i in rows]
        reference = old = None
        if self.config.uses_reference_model():
            reference = self.reference_logprobs(prompts, completions, config.temperature)
        sampler, correction = rollout.sampler_logprobs(rows), self._correction(rollout)
        if correction and sampler is None and config.sampler_correction != "auto":
            raise WhetValueError(
                "GRPO: sampler_correction needs log-probs, which the engine does not record. Set it to 'off'."
            )
        # A mask changes the number of tokens that the loss is divided by; dropout would add noise to the weights.
        if correction and sampler is not None and (correction.endswith("mask") or config.training_mode):
            old = self.logprobs(self.model, prompts, completions, config.temperature)
        batches = []
        for part in self.micro_batches(list(zip(prompts, completions, strict=True))):
            lengths = torch.tensor([len(completions[i]) for i in part], device=module_device(self.model))
            mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
            ref_logprobs, sampler_logprobs, old_logprobs = (
                None if table is None else table[part, : mask.shape[1]].to(mask.device)
                for table in (reference, sampler, old)
            )
            batch = _MicroBatch(
                prompt_ids=[prompts[i] for i in part],
                completion_ids=[completions[i] for i in part],
                advantages=torch.from_numpy(advantages[[rows[i] for i in part]]),
                mask=mask,
                n_rows=len(part),
                ref_logprobs=ref_logprobs,
                sampler_logprobs=sampler_logprobs,
                correction=correction,
            )
            if old_logprobs is not None:
                batch.set_old_logprobs(old_logprobs, config.sampler_cap)
            batches.append(batch)
        return batches

    def _loss(self, batch: _MicroBatch, step: _Step) -> tuple[Tensor, dict[str, float]]:
        """Return loss and metrics of a micro-batch, as its share of the batch."""
        config = self.config
        with phase("forward"):
            logprobs, entropy, _ = completion_logprobs(
                self.model, batch.prompt_ids, batch.completion_ids, temperature=config.temperature, return_entropy=True
            )
        with phase("loss"):
            if batch.old_logprobs is None:  # the policy of the first update is the policy that sampled
                batch.set_old_logprobs(logprobs.detach(), config.sampler_cap)
            old = cast(Tensor, batch.old_logprobs)
            loss, metrics = _masked_loss(
                logprobs, old, batch.advantages, batch.mask, batch.weights, batch.ref_logprobs, config, step.counts
            )
        metrics["entropy"] = cast(Tensor, entropy).sum().item() / step.n_sampled
        if batch.sampler_logprobs is not None:
            metrics["sampler/logprob_difference"] = batch.logprob_difference[0] / step.n_sampled
        return loss, metrics


@dataclass
class _Step:
    """State of a step after sampling.

    Attributes:
        number: number of steps before this one.
        prompt_ids: prompts of the batch.
        batches: the completions that count, in micro-batches.
        n_sampled: tokens of these completions.
        counts: divisors of the loss.
        metrics: metrics of the completions.
        updates: metrics of each update so far.
        maxima: maxima over all micro-batches, by name.
    """

    number: int
    prompt_ids: list[list[int]]
    batches: list[_MicroBatch]
    n_sampled: int
    counts: _Counts
    metrics: dict[str, float]
    updates: list[dict[str, float]] = field(default_factory=list)
    maxima: dict[str, float] = field(default_factory=dict)

    def all_metrics(self) -> dict[str, float]:
        """Return means over the updates, and the metrics of the completions."""
        if not self.updates:
            return {"loss": 0.0, "grad_norm": 0.0, **self.metrics}
        means = {name: sum(update[name] for update in self.updates) / len(self.updates) for name in self.updates[0]}
        return {**means, **self.maxima, **self.metrics}


class _Counts(NamedTuple):
    """Divisors for a batch: tokens and rows that count, except those rejected by the correction; dr_grpo's constant."""

    n_tokens: float
    n_rows: float
    max_completion_length: int | None


@dataclass
class _MicroBatch:
    """Completions of one forward pass, and the data that all updates on them share.

    Attributes:
        prompt_ids: b rows of token ids.
        completion_ids: b rows of token ids.
        advantages: (b,) float64.
        mask: (b, t) bool, True for tokens that count: not rejected by the correction.
        n_rows: number of completions that count.
        ref_logprobs: (b, t); None: no KL term.
        sampler_logprobs: (b, t), recorded by the engine; None: not recorded.
        correction: importance correction; None: off.
        old_logprobs: (b, t), log-probs of the policy that sampled; None until the first update computes them.
        weights: (b, t), importance weights; None without a correction.
        logprob_difference: sum and maximum of |old_logprobs - sampler_logprobs|.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    advantages: Tensor
    mask: Tensor
    n_rows: int
    ref_logprobs: Tensor | None
    sampler_logprobs: Tensor | None
    correction: SamplerCorrection | None
    old_logprobs: Tensor | None = None
    weights: Tensor | None = None
    logprob_difference: tuple[float, float] = (0.0, 0.0)

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """Return prompts and completions."""
        return list(zip(self.prompt_ids, self.completion_ids, strict=True))

    def set_old_logprobs(self, logprobs: Tensor, cap: float) -> None:
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


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    loss_type: GRPOLossType = "dapo",
    level: RatioLevel = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_bias_correction: bool = True,
    sapo_tau_positive: float = 1.0,
    sapo_tau_negative: float = 1.05,
    sampler_correction: SamplerCorrection = "sequence_mask",
    sampler_cap: float = 3.0,
    n_tokens: float | None = None,
    n_rows: float | None = None,
    max_completion_length: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss of the GRPO family over a batch of completions.

    With m the mask, A the advantages, w the importance weights (1 without correction), and rho =
    exp(logprobs - old_logprobs) per token, or the exponential of its mean per sequence (GSPO):

        cispo:       l = -w stopgrad(min(rho, epsilon_high)) A logprobs
        sapo:        l = -w A 4 sigmoid(tau (rho - 1)) / tau
        others:      l = -w min(min(rho, delta) A, clip(rho, 1 - epsilon, 1 + epsilon_high) A)
        beta != 0:   l += beta KL

        grpo, sapo:         mean over rows of (sum l m / sum m)
        bnpo, dapo, cispo:  sum l m / n_tokens
        dr_grpo:            sum l m / (n_rows max_completion_length)
        luspo:              mean over rows of (sum l m)

    KL estimates KL(policy || reference) from the policy's samples (Schulman 2020), with d = ref - policy:
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. ``kl_bias_correction`` multiplies k3 by rho, so that its
    gradient is the gradient of the KL, as k2's is; the gradient of k1 is zero in expectation.

    A masked position contributes nothing to value and gradient, even if it is NaN. Losses and metrics of
    micro-batches add up to the whole batch's if each call gets the whole batch's ``n_tokens`` and
    ``n_rows``. (bnpo is dapo with the tokens of one update as n_tokens.)

    Args:
        logprobs: (B, T) float, log-probs of the policy, differentiable. The loss has its dtype.
        old_logprobs: (B, T), log-probs of the policy that sampled; None: ``logprobs``, detached, which is
            correct for the first update after sampling.
        advantages: (B,) or (B, T).
        completion_mask: (B, T) bool, True on the tokens that count.
        ref_logprobs: (B, T), log-probs of the reference; required if beta != 0, else only for metrics.
        sampler_logprobs: (B, T), recorded by an engine that may differ from the policy; None: no
            importance correction.
        loss_type: see above.
        level: level of rho: token or sequence.
        epsilon: clip the ratio below at 1 - epsilon.
        epsilon_high: clip the ratio above at 1 + epsilon_high; None: ``epsilon``. In cispo the cap of rho (usually 5).
        delta: cap of rho where A < 0 (two-sided clipping); None: no cap.
        beta: weight of the KL term.
        kl_estimator: estimator of the KL.
        kl_bias_correction: multiply k3 by rho.
        sapo_tau_positive: tau where A > 0.
        sapo_tau_negative: tau where A <= 0.
        sampler_correction: computation of w, see ``importance_weights``.
        sampler_cap: maximum of w, see ``importance_weights``.
        n_tokens: tokens of the whole batch, without those that a "mask" correction rejects; None: of this batch.
        n_rows: rows of the whole batch, without those that it rejects entirely; None: of this batch.
        max_completion_length: dr_grpo's constant, in tokens; None: T, the width of this batch.

    Returns:
        The scalar loss, and metrics as floats: ``clip_ratio/{low,high,region}`` (share of tokens with a
        clipped ratio), ``kl`` (mean per token) and ``mean_kl`` (mean of the sums per row), and
        ``sampler/{logprob_difference,importance_weight}`` (means of |old - sampler| and w).

    Raises:
        WhetTypeError: an argument is not a tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ, a name is unknown, a setting is out of range, or beta != 0 without
            a reference.

    Source: as in TRL 1.16 (grpo: Shao et al. 2024, dr_grpo: Liu et al. 2025, dapo: Yu et al. 2025, GSPO:
        Zheng et al. 2025, cispo: MiniMax 2025, luspo and sapo: TRL). Departure: rejected tokens are
        also excluded from the denominators.
    """
    settings = SimpleNamespace(
        loss_type=loss_type, level=level, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta, beta=beta,
        kl_estimator=kl_estimator, kl_bias_correction=kl_bias_correction,
        sapo_tau_positive=sapo_tau_positive, sapo_tau_negative=sapo_tau_negative,
    )  # fmt: skip
    check_grpo_options("grpo_loss", settings)
    check_float_tensor("grpo_loss", "logprobs", logprobs, n_axes=2)
    optional = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    optional["sampler_logprobs"] = sampler_logprobs
    check_shapes("grpo_loss", "logprobs", logprobs, {"completion_mask": completion_mask}, optional)
    per_row = getattr(advantages, "ndim", 2) == 1
    rows_or_tokens = logprobs.new_empty(len(logprobs)) if per_row else logprobs
    check_shapes("grpo_loss", "logprobs", rows_or_tokens, {"advantages": advantages})
    if beta != 0 and ref_logprobs is None:
        raise WhetValueError(f"grpo_loss: beta is {beta} but ref_logprobs is None. Pass it, or beta=0.")

    old = (logprobs if old_logprobs is None else old_logprobs).detach().to(logprobs)
    weights, mask = None, completion_mask
    if sampler_logprobs is not None:
        weights, mask = importance_weights(old, sampler_logprobs, mask, correction=sampler_correction, cap=sampler_cap)
    counts = _Counts(
        denominator("grpo_loss", "n_tokens", mask.sum() if n_tokens is None else n_tokens),
        denominator("grpo_loss", "n_rows", count_rows(completion_mask, mask) if n_rows is None else n_rows),
        max_completion_length,
    )
    loss, metrics = _masked_loss(logprobs, old, advantages, mask, weights, ref_logprobs, settings, counts)
    if sampler_logprobs is not None:
        difference = masked((old - sampler_logprobs.to(old)).abs(), mask)
        metrics["sampler/logprob_difference"] = (difference.sum() / counts.n_tokens).item()
    return loss, metrics


def _masked_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    ref_logprobs: Tensor | None,
    settings: Any,
    counts: _Counts,
) -> tuple[Tensor, dict[str, float]]:
    """Return ``grpo_loss`` of validated arguments, with tokens in ``mask`` and importance weights (None: 1).

    ``settings`` has the options of ``grpo_loss`` as attributes, such as a ``GRPOConfig``.
    """
    logprobs, old = masked(logprobs, mask), masked(old.detach().to(logprobs), mask)
    advantages = advantages.detach().to(logprobs)
    advantages = advantages[:, None] if advantages.ndim == 1 else masked(advantages, mask)
    log_ratio = logprobs - old
    if settings.level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()
    epsilon, epsilon_high = settings.epsilon, settings.epsilon_high
    epsilon_high = epsilon if epsilon_high is None else epsilon_high

    if settings.loss_type == "sapo":
        bounds = None
        loss = _sapo_loss(ratio, advantages, settings.sapo_tau_positive, settings.sapo_tau_negative)
    elif settings.loss_type == "cispo":
        bounds = -math.inf, epsilon_high
        loss = _cispo_loss(logprobs, ratio, advantages, epsilon_high)
    else:
        bounds = 1 - epsilon, 1 + epsilon_high
        loss = _clipped_loss(ratio, advantages, bounds, settings.delta)
    if weights is not None:
        loss = loss * weights

    def total(values: Tensor) -> Tensor:
        return masked(values.detach().to(logprobs), mask).sum()

    metrics: dict[str, Tensor] = {}
    if bounds is not None:
        low, high = (ratio < bounds[0]) & (advantages < 0), (ratio > bounds[1]) & (advantages > 0)
        for name, clipped in {"low": low, "high": high, "region": low | high}.items():
            metrics[f"clip_ratio/{name}"] = total(clipped) / counts.n_tokens
    if weights is not None:
        metrics["sampler/importance_weight"] = total(weights) / counts.n_tokens
    if ref_logprobs is not None:
        with phase("kl"):
            kl = token_kl(logprobs, masked(ref_logprobs.detach().to(logprobs), mask), settings.kl_estimator)
            metrics["kl"], metrics["mean_kl"] = total(kl) / counts.n_tokens, total(kl) / counts.n_rows
            if settings.beta != 0:
                corrected = settings.kl_bias_correction and settings.kl_estimator == "k3"
                loss = loss + settings.beta * (kl * ratio if corrected else kl)
    loss = _reduce(masked(loss, mask), mask, settings.loss_type, counts)
    return loss, {name: value.item() for name, value in metrics.items()}


def _clipped_loss(ratio: Tensor, advantages: Tensor, bounds: tuple[float, float], delta: float | None) -> Tensor:
    """Loss of grpo, bnpo, dr_grpo, dapo and luspo, which differ in how tokens are summed."""
    capped = ratio if delta is None else ratio.clamp(max=delta)
    return -torch.min(capped * advantages, ratio.clamp(*bounds) * advantages)


def _cispo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, cap: float) -> Tensor:
    return -ratio.clamp(max=cap).detach() * advantages * logprobs


def _sapo_loss(ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -advantages * 4 * torch.sigmoid(tau * (ratio - 1)) / tau


def _reduce(loss: Tensor, mask: Tensor, loss_type: GRPOLossType, counts: _Counts) -> Tensor:
    if loss_type in ("grpo", "sapo"):
        return (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / counts.n_rows
    if loss_type == "luspo":
        return loss.sum() / counts.n_rows
    if loss_type == "dr_grpo":
        return loss.sum() / (counts.n_rows * (counts.max_completion_length or mask.shape[1]))
    return loss.sum() / counts.n_tokens
