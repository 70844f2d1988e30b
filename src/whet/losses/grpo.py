"""Losses of Group Relative Policy Optimization and its family, see ``whet.algorithms.grpo``."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from whet.config.settings import GRPOLossType, KLEstimator, RatioLevel, SamplerCorrection, check_grpo_options
from whet.errors import WhetValueError
from whet.losses.closed_form import Loss, accepts_tensors
from whet.losses.terms import (
    check_float_array,
    check_shapes,
    count_rows,
    denominator,
    importance_weights,
    logprob_difference,
    masked,
    token_kl,
)
from whet.training.phases import phase

_MAX_DPPO_RATIO = 20.0
"""Cap of the ratio of dppo_tv, as in TRL: a tiny probability may rise by a large factor within the bounds."""


class Counts(NamedTuple):
    """Divisors for a batch: tokens and rows that count, except those rejected by the correction; dr_grpo's constant;
    the tokens of the mean entropy.
    """

    n_tokens: float
    n_rows: float
    max_completion_length: int | None
    n_entropy_tokens: float


class Tokens(NamedTuple):
    """Arrays (B, T) of the tokens of completions, see the arguments of ``grpo_loss``.

    Attributes:
        logprobs: of the policy.
        old: log-probs of the policy that sampled.
        advantages: also (B,).
        mask: the tokens that count.
        weights: importance weights; None: 1.
        ref_logprobs: of the reference, if any.
        sampler_logprobs: recorded by the sampler; None: ``old``.
        entropies: of the policy's distributions; None: there is no bonus.
        entropy_mask: the tokens of high entropy; None: all.
    """

    logprobs: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    weights: np.ndarray | None
    ref_logprobs: np.ndarray | None
    sampler_logprobs: np.ndarray | None
    entropies: np.ndarray | None
    entropy_mask: np.ndarray | None


@accepts_tensors("logprobs", "entropies")
def grpo_loss(
    logprobs: Any,
    old_logprobs: Any | None,
    advantages: Any,
    completion_mask: Any,
    *,
    ref_logprobs: Any | None = None,
    sampler_logprobs: Any | None = None,
    entropies: Any | None = None,
    entropy_mask: Any | None = None,
    loss_type: GRPOLossType = "dapo",
    level: RatioLevel = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    off_policy_mask_threshold: float | None = None,
    entropy_coef: float = 0.0,
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
    n_entropy_tokens: float | None = None,
) -> Loss:
    """Loss of the GRPO family over a batch of completions.

    With m the mask, A the advantages, w the importance weights (1 without correction), and rho =
    exp(logprobs - old_logprobs) per token, per sequence (RLOO), or its geometric mean over a sequence (GSPO):

        cispo:       l = -w stopgrad(min(rho, epsilon_high)) A logprobs
        dppo_tv:     l = -w stopgrad(min(rho, 20)) A logprobs, or 0 if A > 0 and p - q > epsilon_high,
                     or A < 0 and p - q < -epsilon, with the token's probabilities p now and q when it was sampled
        sapo:        l = -w A 4 sigmoid(tau (rho - 1)) / tau
        gmpo:        l = -w rho A, where rho is the geometric mean of the tokens' ratios, whose logarithms are clipped
                     at epsilon_high if A > 0, else at -epsilon
        others:      l = -w min(min(rho, delta) A, clip(rho, 1 - epsilon, 1 + epsilon_high) A)
        beta != 0:   l += beta KL

        grpo, sapo, gmpo:            mean over rows of (sum l m / sum m)
        bnpo, dapo, cispo, dppo_tv:  sum l m / n_tokens
        dr_grpo:                     sum l m / (n_rows max_completion_length)
        luspo:                       mean over rows of (sum l m)

    With ``off_policy_mask_threshold`` l, without its KL term, is 0 where A < 0 in rows whose mean of log q - log p
    exceeds it (DeepSeek-AI 2025, eq. 9).

    With ``entropy_mask`` l, without its KL term, is 0 for the other tokens, and so is their entropy H in the bonus,
    which does not depend on loss_type: loss -= entropy_coef sum H / n_entropy_tokens.

    KL estimates KL(policy || reference) from the policy's samples (Schulman 2020), with d = ref - policy:
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1. ``kl_bias_correction`` multiplies k3 by rho, so that its
    gradient is the gradient of the KL, as k2's is; the gradient of k1 is zero in expectation.

    A masked position contributes nothing to value and gradient, even if it is NaN. Losses and metrics of
    micro-batches add up to the whole batch's if each call gets the whole batch's ``n_tokens`` and
    ``n_rows``. (bnpo is dapo with the tokens of one update as n_tokens.)

    Args:
        logprobs: (B, T) float, log-probs of the policy, NumPy or torch, differentiable.
        old_logprobs: (B, T), log-probs of the policy that sampled; None: the values of ``logprobs``,
            which is correct for the first update after sampling.
        advantages: (B,) or (B, T).
        completion_mask: (B, T) bool, True on the tokens that count.
        ref_logprobs: (B, T), log-probs of the reference; required if beta != 0, else only for metrics.
        sampler_logprobs: (B, T), log q recorded by an engine that may differ from the policy; None: no
            importance correction, and q is of old_logprobs.
        entropies: (B, T), H of each token's distribution in nats, differentiable; required if entropy_coef != 0.
        entropy_mask: (B, T) bool, the tokens of high entropy (``top_entropy_masks``); None: all.
        loss_type: see above.
        level: level of rho: token, sequence (the geometric mean over its tokens), or sequence_product.
        epsilon: clip the ratio below at 1 - epsilon; for gmpo and dppo_tv see above.
        epsilon_high: clip the ratio above at 1 + epsilon_high; None: ``epsilon``. In cispo the cap of rho (usually 5).
        delta: cap of rho where A < 0 (two-sided clipping); None: no cap.
        off_policy_mask_threshold: in nats per token; None: no mask.
        entropy_coef: weight of the entropy bonus.
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
        n_entropy_tokens: tokens of the whole batch in entropy_mask; None: of this batch.

    Returns:
        The loss, and metrics as floats: ``clip_ratio/{low,high,region}`` (share of tokens with a
        clipped ratio), ``clip_ratio/off_policy`` (share of tokens that off_policy_mask_threshold excludes), ``kl``
        (mean per token) and ``mean_kl`` (mean of the sums per row), and
        ``sampler/{logprob_difference,importance_weight}`` (means of |old - sampler| and w). ``Loss`` of arrays; of
        tensors a pair of a scalar, in the dtype of logprobs, and the metrics.

    Raises:
        WhetTypeError: an argument is neither array nor tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ, a name is unknown, a setting is out of range, beta != 0 without a reference, or
            entropy_coef != 0 without entropies.

    Source: as in TRL 1.16 (grpo: Shao et al. 2024, dr_grpo: Liu et al. 2025, dapo: Yu et al. 2025, GSPO:
        Zheng et al. 2025, RLOO: Ahmadian et al. 2024, cispo: MiniMax 2025, luspo and sapo: TRL,
        gmpo: Zhao et al. 2025; dppo_tv: Qi et al. 2026). Departure: rejected tokens are also excluded from the
        denominators.
    """
    settings = SimpleNamespace(
        loss_type=loss_type, level=level, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta, beta=beta,
        off_policy_mask_threshold=off_policy_mask_threshold, entropy_coef=entropy_coef, kl_estimator=kl_estimator,
        kl_bias_correction=kl_bias_correction,
        sapo_tau_positive=sapo_tau_positive, sapo_tau_negative=sapo_tau_negative,
    )  # fmt: skip
    check_grpo_options("grpo_loss", settings)
    check_float_array("grpo_loss", "logprobs", logprobs, n_axes=2)
    optional = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    optional |= {"sampler_logprobs": sampler_logprobs, "entropies": entropies, "entropy_mask": entropy_mask}
    check_shapes("grpo_loss", "logprobs", logprobs, {"completion_mask": completion_mask}, optional)
    per_row = getattr(advantages, "ndim", 2) == 1
    rows_or_tokens = np.empty(len(logprobs)) if per_row else logprobs
    check_shapes("grpo_loss", "logprobs", rows_or_tokens, {"advantages": advantages})
    if beta != 0 and ref_logprobs is None:
        raise WhetValueError(f"grpo_loss: beta is {beta} but ref_logprobs is None. Pass it, or beta=0.")
    if entropy_coef != 0 and entropies is None:
        raise WhetValueError(f"grpo_loss: entropy_coef is {entropy_coef} but entropies is None. Pass it, or 0.")

    old = logprobs if old_logprobs is None else old_logprobs
    weights, mask = None, completion_mask
    if sampler_logprobs is not None:
        weights, mask = importance_weights(old, sampler_logprobs, mask, correction=sampler_correction, cap=sampler_cap)
    n_high = _and(mask, entropy_mask).sum()
    counts = Counts(
        denominator("grpo_loss", "n_tokens", mask.sum() if n_tokens is None else n_tokens),
        denominator("grpo_loss", "n_rows", count_rows(completion_mask, mask) if n_rows is None else n_rows),
        max_completion_length,
        denominator("grpo_loss", "n_entropy_tokens", n_high if n_entropy_tokens is None else n_entropy_tokens),
    )
    tokens = Tokens(
        logprobs, old, advantages, mask, weights, ref_logprobs, sampler_logprobs, entropies, entropy_mask
    )  # fmt: skip
    loss = masked_loss(tokens, settings, counts)
    if sampler_logprobs is not None:
        total, _ = logprob_difference(old, sampler_logprobs, mask)
        loss.metrics["sampler/logprob_difference"] = total / counts.n_tokens
    return loss


@np.errstate(over="ignore", invalid="ignore")
def masked_loss(tokens: Tokens, settings: Any, counts: Counts) -> Loss:
    """Return ``grpo_loss`` of validated arguments.

    ``settings`` has the options of ``grpo_loss`` as attributes, such as a ``GRPOConfig``.
    """
    logprobs, old, advantages, mask, weights, ref_logprobs, sampler_logprobs, entropies, entropy_mask = tokens
    sampled = masked(old if sampler_logprobs is None else sampler_logprobs, mask)
    logprobs, old = masked(logprobs, mask), masked(old, mask)
    advantages = advantages.astype(np.float64)[:, None] if advantages.ndim == 1 else masked(advantages, mask)
    loss_type, bounds = settings.loss_type, _bounds(settings)
    log_ratio = bounded = logprobs - old
    if loss_type == "gmpo":
        bounded = np.where(advantages > 0, np.minimum(log_ratio, bounds[1]), np.maximum(log_ratio, bounds[0]))
    over_row = _mean if loss_type == "gmpo" else {"sequence": _mean, "sequence_product": _sum}.get(settings.level)
    ratio = np.exp(bounded if over_row is None else over_row(bounded, mask))
    change = {"gmpo": log_ratio, "dppo_tv": np.exp(logprobs) - np.exp(sampled)}.get(loss_type, ratio)
    low, high = (change < bounds[0]) & (advantages < 0), (change > bounds[1]) & (advantages > 0)
    token = _token_loss(settings, logprobs, ratio, advantages, low | high)
    if weights is not None:
        token = _TokenLoss(*(part * weights for part in token))

    def total(values: np.ndarray) -> float:
        return float(masked(values, mask).sum())

    metrics: dict[str, float] = {}
    if settings.off_policy_mask_threshold is not None:
        drift = _mean(np.nan_to_num(sampled - logprobs), mask)  # without the tokens of unknown log-probs
        is_off = (advantages < 0) & (drift > settings.off_policy_mask_threshold)
        token = _TokenLoss(*(np.where(is_off, 0.0, part) for part in token))
        metrics["clip_ratio/off_policy"] = total(is_off) / counts.n_tokens
    if entropy_mask is not None:
        token = _TokenLoss(*(np.where(entropy_mask, part, 0.0) for part in token))
    if loss_type != "sapo":
        for name, clipped in {"low": low, "high": high, "region": low | high}.items():
            metrics[f"clip_ratio/{name}"] = total(clipped) / counts.n_tokens
    if weights is not None:
        metrics["sampler/importance_weight"] = total(weights) / counts.n_tokens
    if ref_logprobs is not None:
        with phase("kl"):
            kl, kl_slope = token_kl(logprobs, masked(ref_logprobs, mask), settings.kl_estimator)
            metrics["kl"], metrics["mean_kl"] = total(kl) / counts.n_tokens, total(kl) / counts.n_rows
            if settings.beta != 0:
                factor = ratio if settings.kl_bias_correction and settings.kl_estimator == "k3" else np.ones_like(ratio)
                of_ratio = kl * ratio if factor is ratio else np.zeros_like(kl)
                kl_loss = _TokenLoss(kl * factor, kl_slope * factor, of_ratio)
                token = _TokenLoss(*(a + settings.beta * b for a, b in zip(token, kl_loss, strict=True)))
    share = _shares(mask, settings.loss_type, counts)
    of_ratio = masked(share * token.slope_ratio, mask)
    if over_row is not None:  # every token of a row changes the row's ratio
        of_ratio = np.where(bounded == log_ratio, over_row(of_ratio, mask), 0.0)
    gradient = masked(share * token.slope_direct + of_ratio, mask)
    value, gradients = float((share * masked(token.value, mask)).sum()), {"logprobs": gradient}
    if settings.entropy_coef and entropies is not None:
        of_entropy = _and(mask, entropy_mask) * (-settings.entropy_coef / counts.n_entropy_tokens)
        value += float((of_entropy * masked(entropies, mask)).sum())
        gradients["entropies"] = of_entropy
    return Loss(value, metrics, gradients)


def _and(mask: np.ndarray, other: np.ndarray | None) -> np.ndarray:
    return mask if other is None else mask & other


class _TokenLoss(NamedTuple):
    """Losses of tokens, and their derivatives with respect to the log-prob at a fixed ratio, and to the log-ratio."""

    value: np.ndarray
    slope_direct: np.ndarray
    slope_ratio: np.ndarray


def _bounds(settings: Any) -> tuple[float, float]:
    """Return the range in which the ratio is not clipped; for gmpo its logarithm, for dppo_tv the difference of the
    probabilities.
    """
    if settings.loss_type == "sapo":
        return -math.inf, math.inf
    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    if settings.loss_type in ("gmpo", "dppo_tv"):
        return -settings.epsilon, high
    return (-math.inf, high) if settings.loss_type == "cispo" else (1 - settings.epsilon, 1 + high)


def _token_loss(
    settings: Any, logprobs: np.ndarray, ratio: np.ndarray, advantages: np.ndarray, is_clipped: np.ndarray
) -> _TokenLoss:
    zero = np.zeros_like(logprobs)
    if settings.loss_type == "sapo":
        tau = np.where(advantages > 0, settings.sapo_tau_positive, settings.sapo_tau_negative)
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
        return _TokenLoss(-advantages * 4 * gate / tau, zero, -advantages * 4 * gate * (1 - gate) * ratio + zero)
    low, high = (-math.inf, math.inf) if settings.loss_type == "gmpo" else _bounds(settings)
    if settings.loss_type in ("cispo", "dppo_tv"):
        weighted = -np.minimum(ratio, high if settings.loss_type == "cispo" else _MAX_DPPO_RATIO) * advantages
        weighted = np.where(is_clipped & (settings.loss_type == "dppo_tv"), 0.0, weighted)
        return _TokenLoss(weighted * logprobs, weighted + zero, zero)
    # grpo, bnpo, dr_grpo, dapo and luspo differ in how tokens are summed; gmpo has clipped its tokens.
    cap = math.inf if settings.delta is None else settings.delta
    capped, clipped = np.minimum(ratio, cap) * advantages, np.clip(ratio, low, high) * advantages
    of_capped, of_clipped = (ratio <= cap) * 1.0, ((low <= ratio) & (ratio <= high)) * 1.0
    slope = np.where(capped < clipped, of_capped, np.where(capped > clipped, of_clipped, (of_capped + of_clipped) / 2))
    return _TokenLoss(-np.minimum(capped, clipped) + zero, zero, -advantages * slope * ratio + zero)


def _sum(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the sum over the tokens of each row, (B, 1); values outside of the mask are 0."""
    return values.sum(1, keepdims=True)


def _mean(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the mean over the tokens of each row, (B, 1); values outside of the mask are 0."""
    return _sum(values, mask) / np.maximum(mask.sum(1, keepdims=True), 1)


def _shares(mask: np.ndarray, loss_type: GRPOLossType, counts: Counts) -> np.ndarray | float:
    """Return the factor of each token's loss in the loss of the batch, (B, 1) or a number."""
    if loss_type in ("grpo", "sapo", "gmpo"):
        return 1 / (np.maximum(mask.sum(1, keepdims=True), 1) * counts.n_rows)
    if loss_type == "luspo":
        return 1 / counts.n_rows
    if loss_type == "dr_grpo":
        return 1 / (counts.n_rows * max(1, counts.max_completion_length or mask.shape[1]))
    return 1 / counts.n_tokens
