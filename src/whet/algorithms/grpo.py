"""Group Relative Policy Optimization: sample G completions per prompt, push the better ones up.

Per token t of completion i, with its group-relative advantage A_i and the probability ratio
rho = exp(log pi - log pi_old) (Shao et al. 2024, eq. 3):

    l_it = -min(rho A_i, clip(rho, 1 - epsilon, 1 + epsilon_high) A_i) + beta KL_it

The members of the family differ in l and in how tokens are summed (see ``grpo_loss``). Assumes that
every completion of a group answers the same prompt, and that log-probs are taken at the sampling
temperature.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from whet.algorithms.loss_terms import (
    check_float_tensor,
    check_shapes,
    count_rows,
    denominator,
    importance_weights,
    masked,
    sampler_gap,
    token_kl,
)
from whet.algorithms.online import OnlineTrainer
from whet.config import (
    GRPOConfig,
    GRPOLossType,
    KLEstimator,
    RatioLevel,
    SamplerCorrection,
    check_grpo_options,
)
from whet.errors import WhetTypeError, WhetValueError
from whet.nn.causal_lm import completion_logprobs
from whet.ops import compute_batch_group_advantages
from whet.phases import phase
from whet.rewards.functions import RewardFn, RewardFunctions, reward_functions
from whet.rewards.metrics import group_std, reward_metrics
from whet.rollout.rollout import Rollout, completion_table

_LOSS_SETTINGS = (
    "loss_type", "level", "epsilon", "epsilon_high", "delta", "beta", "kl_estimator", "kl_bias_correction",
    "sapo_tau_positive", "sapo_tau_negative", "sampler_cap",
)  # fmt: skip


class GRPO(OnlineTrainer):
    """Group Relative Policy Optimization.

    Args:
        model, ref_model, **arguments: of ``Trainer`` and ``OnlineTrainer``. beta = 0 needs no reference.
        reward_fn: one reward function, several, or ``whet.rewards.RewardFunctions``.
        kl_coef: another name for ``beta``.
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
        self.rewards = reward_functions(self.config, reward_fn)

    def train_step(self, prompt_batch: Any) -> dict[str, float]:
        """Sample completions for a batch of prompts, score them, and update the policy on them.

        Args:
            prompt_batch: a (B, P) tensor; a dict of input_ids and attention_mask, padded on either side;
                ragged lists of token ids; with a tokenizer texts, or rows (dicts) with ``prompt`` as text,
                messages or ids. The other fields of rows reach the reward functions.

        Returns:
            Metrics: ``loss``, ``mean_reward``, ``reward_std`` (mean of the groups'), ``frac_reward_zero_std``,
            ``rewards/NAME/{mean,std}``, ``entropy``, ``completions/...``, ``sampler/log_ratio`` and its ``_max`` (of
            |log pi_old - log pi_sampler| per token), those of ``grpo_loss``, and those of every step. Those of several
            iterations are averaged.

        Raises:
            RewardError: a reward function failed.
        """
        return self.take_step(lambda: self._learn(self.sample(prompt_batch, self.config.group_size)))

    def _learn(self, rollout: Rollout) -> dict[str, float]:
        config, size = self.config, self.config.group_size
        scored = rollout.score(self.rewards)
        with phase("advantages"):
            advantages = compute_batch_group_advantages(
                scored.rewards,
                size,
                scale=config.scale_rewards,
                ddof=config.advantage_ddof,
                eps=config.advantage_eps,
            )
        spread = group_std(scored.rewards.reshape(-1, size))
        left_out = np.zeros(len(advantages), dtype=bool)
        if config.drop_zero_spread:
            left_out |= np.repeat(spread < 1e-8, size)
        if config.mask_truncated_completions:
            left_out |= rollout.truncated
        extra = {"advantage": advantages.tolist()}
        self.last_completions = completion_table(self.step + 1, rollout, scored, extra)
        return {
            **self._updates(rollout, advantages, np.flatnonzero(~left_out).tolist()),
            **reward_metrics(scored),
            "reward_std": float(spread.mean()),
            "frac_reward_zero_std": float((spread < 1e-8).mean()),
            **rollout.metrics(),
        }

    def _updates(self, rollout: Rollout, advantages: np.ndarray, rows: list[int]) -> dict[str, float]:
        """``num_iterations`` updates on some rows of a rollout; the means of their metrics."""
        config = self.config
        if not rows:
            return {"loss": 0.0, "grad_norm": 0.0}
        prompts = [rollout.prompt_ids[i] for i in rows]
        completions = [rollout.completions[i].token_ids for i in rows]
        per_row, sampler = torch.from_numpy(advantages[rows]), rollout.sampler_logprobs(rows)
        old = reference = None
        if self.uses_reference():
            reference = self.reference_logprobs(prompts, completions, config.temperature)
        n_tokens, n_rows = sum(map(len, completions)), len(rows)
        n_sampled = max(1, n_tokens)
        correction = config.correction()
        if correction and sampler is None:
            if config.sampler_correction != "auto":
                raise WhetValueError(
                    "GRPO: sampler_correction needs log-probs, and the engine tells none. Set it to 'off'."
                )
            correction = None
        # What a mask rejects has to be known before the first micro-batch; dropout has no place in the weights.
        if correction and sampler is not None and (correction.endswith("mask") or config.training_mode):
            old = self.logprobs(self.model, prompts, completions, config.temperature)
            mask = torch.arange(old.shape[1]) < torch.tensor([[len(row)] for row in completions])
            _, kept = importance_weights(old.cpu(), sampler, mask, correction=correction, cap=config.sampler_cap)
            n_tokens, n_rows = int(kept.sum()), count_rows(mask, kept)
        if not n_tokens:
            return {"loss": 0.0, "grad_norm": 0.0}
        settings = {name: getattr(config, name) for name in _LOSS_SETTINGS}
        if correction:
            settings["sampler_correction"] = correction
        worst: list[float] = []
        first: dict[int, Tensor] = {}

        def loss_of(part: list[int]) -> tuple[Tensor, dict[str, float]]:
            with phase("forward"):
                logprobs, entropy, mask = completion_logprobs(
                    self.model,
                    [prompts[i] for i in part],
                    [completions[i] for i in part],
                    temperature=config.temperature,
                    return_entropy=True,
                )

            def cut(values: Tensor) -> Tensor:
                return values[part, : mask.shape[1]].to(mask.device)

            # The first update starts from the policy that sampled: its log-probs are the old ones.
            before = first.setdefault(part[0], logprobs.detach()) if old is None else cut(old)
            with phase("loss"):
                loss, metrics = grpo_loss(
                    logprobs,
                    before,
                    per_row[part],
                    mask,
                    ref_logprobs=None if reference is None else cut(reference),
                    sampler_logprobs=cut(sampler) if correction and sampler is not None else None,
                    n_tokens=n_tokens,
                    n_rows=n_rows,
                    max_completion_length=config.max_new_tokens,
                    **settings,
                )
            metrics["entropy"] = cast(Tensor, entropy).sum().item() / n_sampled
            if sampler is not None:
                total, largest = sampler_gap(before, cut(sampler), mask)
                metrics["sampler/log_ratio"] = total / n_sampled
                worst.append(largest)
            return loss, metrics

        pairs = list(zip(prompts, completions, strict=True))
        history = [self.update(pairs, loss_of) for _ in range(config.num_iterations)]
        means = {name: sum(h[name] for h in history) / len(history) for name in history[0]}
        return {**means, **({"sampler/log_ratio_max": max(worst)} if worst else {})}


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
    """The loss of the GRPO family over a batch of completions.

    With m the mask, A the advantages, w the sampler's importance weights (1 without), and rho =
    exp(logprobs - old_logprobs) per token, or exp of that difference's mean per sequence (GSPO)::

        cispo:       l = -w stopgrad(min(rho, epsilon_high)) A logprobs
        sapo:        l = -w A 4 sigmoid(tau (rho - 1)) / tau
        the others:  l = -w min(min(rho, delta) A, clip(rho, 1 - epsilon, 1 + epsilon_high) A)
        beta != 0:   l += beta KL

        grpo, sapo:         mean over rows of (sum l m / sum m)
        bnpo, dapo, cispo:  sum l m / n_tokens
        dr_grpo:            sum l m / (n_rows max_completion_length)
        luspo:              mean over rows of (sum l m)

    KL estimates KL(policy || reference) from the policy's own samples (Schulman 2020), with d = ref -
    policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. ``kl_bias_correction`` multiplies k3 by rho, which
    makes its gradient that of the KL; that of k2 is so already, that of k1 is zero in the mean.

    A masked position counts nothing, in value and gradient, whatever it holds. The losses of
    micro-batches add up to that of the whole batch if each is given the whole batch's ``n_tokens`` and
    ``n_rows``, and so do the metrics. (bnpo is dapo with the tokens of one update as n_tokens.)

    Args:
        logprobs: (B, T) float, of the policy, differentiable. The loss has its dtype.
        old_logprobs: (B, T), of the policy that sampled; None: ``logprobs``, detached, which is the same
            in the first update after sampling.
        advantages: (B,) or (B, T).
        completion_mask: (B, T) bool, True on the tokens that count.
        ref_logprobs: (B, T), of the reference; needed if beta != 0, only measured otherwise.
        sampler_logprobs: (B, T), as recorded by an engine that may disagree with the policy; None: no
            importance correction.
        loss_type: see above.
        level: whether rho is per token or per sequence.
        epsilon: how far below 1 the ratio may fall before it is clipped.
        epsilon_high: how far above 1; None: as ``epsilon``. In cispo it caps rho itself (usually at 5).
        delta: cap of rho where A < 0 (two-sided clipping); None: no cap.
        beta: weight of the KL term.
        kl_estimator, kl_bias_correction: see above.
        sapo_tau_positive, sapo_tau_negative: tau where A > 0, and elsewhere.
        sampler_correction, sampler_cap: how w is made, see ``importance_weights``.
        n_tokens, n_rows: of the whole batch; None: of this one. Tokens that a "mask" correction rejects,
            and rows of which it leaves nothing, are not counted.
        max_completion_length: dr_grpo's constant, in tokens; None: T, the width of this batch.

    Returns:
        The scalar loss, and metrics as floats: ``clip_ratio/{low,high,region}`` (share of tokens whose
        ratio is clipped), ``kl`` (mean per token) and ``mean_kl`` (mean of the sums per row), and
        ``sampler/{log_ratio,weight}`` (means of |old - sampler| and w).

    Raises:
        WhetTypeError: an argument that is no tensor of the right kind.
        WhetValueError: shapes that disagree, an unknown name, a setting out of range, beta != 0 without
            a reference.

    Source: as in TRL 1.16 (grpo: Shao et al. 2024, dr_grpo: Liu et al. 2025, dapo: Yu et al. 2025, GSPO:
        Zheng et al. 2025, cispo: MiniMax 2025, luspo and sapo: TRL). Departure: a rejected token leaves
        the denominators too.
    """
    check_grpo_options("grpo_loss", loss_type, level, kl_estimator, epsilon, epsilon_high, delta)
    check_float_tensor("grpo_loss", "logprobs", logprobs, n_axes=2)
    optional = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    optional["sampler_logprobs"] = sampler_logprobs
    check_shapes("grpo_loss", "logprobs", logprobs, {"completion_mask": completion_mask}, optional)
    per_row = getattr(advantages, "ndim", 2) == 1
    rows_or_tokens = logprobs.new_empty(len(logprobs)) if per_row else logprobs
    check_shapes("grpo_loss", "logprobs", rows_or_tokens, {"advantages": advantages})
    if beta != 0 and ref_logprobs is None:
        raise WhetValueError(f"grpo_loss: beta is {beta} but ref_logprobs is None. Pass it, or beta=0.")

    mask = completion_mask
    old = (logprobs if old_logprobs is None else old_logprobs).detach().to(logprobs)
    weights = torch.ones_like(old)
    if sampler_logprobs is not None:
        weights, mask = importance_weights(old, sampler_logprobs, mask, correction=sampler_correction, cap=sampler_cap)
    n_tokens = denominator("grpo_loss", "n_tokens", mask.sum() if n_tokens is None else n_tokens)
    n_rows = denominator("grpo_loss", "n_rows", count_rows(completion_mask, mask) if n_rows is None else n_rows)

    def total(values: Tensor) -> Tensor:
        return masked(values.detach().to(logprobs), mask).sum()

    logprobs, old = masked(logprobs, mask), masked(old, mask)
    advantages = advantages.detach().to(logprobs)
    advantages = advantages[:, None] if per_row else masked(advantages, mask)
    log_ratio = logprobs - old
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()

    metrics: dict[str, Tensor] = {}
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    if loss_type == "sapo":
        tau = torch.full_like(advantages, sapo_tau_negative).masked_fill(advantages > 0, sapo_tau_positive)
        loss = -advantages * 4 * torch.sigmoid(tau * (ratio - 1)) / tau
    else:
        if loss_type == "cispo":
            lower, upper = -torch.inf, epsilon_high
            loss = -ratio.clamp(max=upper).detach() * advantages * logprobs
        else:
            lower, upper = 1 - epsilon, 1 + epsilon_high
            two_sided = ratio if delta is None else ratio.clamp(max=delta)
            loss = -torch.min(two_sided * advantages, ratio.clamp(lower, upper) * advantages)
        low, high = (ratio < lower) & (advantages < 0), (ratio > upper) & (advantages > 0)
        for name, clipped in {"low": low, "high": high, "region": low | high}.items():
            metrics[f"clip_ratio/{name}"] = total(clipped) / n_tokens
    loss = loss * weights
    if sampler_logprobs is not None:
        metrics["sampler/log_ratio"] = total((old - sampler_logprobs.to(old)).abs()) / n_tokens
        metrics["sampler/weight"] = total(weights) / n_tokens
    if ref_logprobs is not None:
        with phase("kl"):
            kl = token_kl(logprobs, masked(ref_logprobs.detach().to(logprobs), mask), kl_estimator)
            metrics["kl"], metrics["mean_kl"] = total(kl) / n_tokens, total(kl) / n_rows
            if beta != 0:
                loss = loss + beta * (kl * ratio if kl_bias_correction and kl_estimator == "k3" else kl)
    loss = _reduce(masked(loss, mask), mask, loss_type, n_tokens, n_rows, max_completion_length)
    return loss, {name: value.item() for name, value in metrics.items()}


def _reduce(
    loss: Tensor, mask: Tensor, loss_type: GRPOLossType, n_tokens: float, n_rows: float, length: int | None
) -> Tensor:
    if loss_type in ("grpo", "sapo"):
        return (loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / n_rows
    if loss_type == "luspo":
        return loss.sum() / n_rows
    if loss_type == "dr_grpo":
        return loss.sum() / (n_rows * (length or mask.shape[1]))
    return loss.sum() / n_tokens
