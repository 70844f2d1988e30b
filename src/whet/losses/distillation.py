"""Losses of distillation, see ``whet.algorithms.distill`` and ``kd``."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.config.settings import SamplerCorrection
from whet.losses.closed_form import Loss, accepts_tensors
from whet.losses.terms import check_float_array, check_shapes, denominator, importance_weights, masked

_LEAST_REST = 1e-6
"""Least probability of all tokens that a teacher's file does not list."""


@accepts_tensors("logprobs")
def distillation_loss(
    logprobs: Any,
    teacher_logprobs: Any,
    completion_mask: Any,
    *,
    old_logprobs: Any | None = None,
    sampler_logprobs: Any | None = None,
    sampler_correction: SamplerCorrection = "token_truncate",
    sampler_cap: float = 3.0,
    n_tokens: float | None = None,
) -> Loss:
    """Policy gradient of the reverse KL divergence from a teacher, estimated from the student's samples.

    With the mask m, importance weights w (1 without sampler_logprobs), rho = exp(logprobs - old_logprobs), and the
    advantage A = teacher_logprobs - old_logprobs, which is constant:

        sum -w rho A m / n_tokens

    With old_logprobs = logprobs the value estimates KL(student || teacher) per token, and the gradient is an unbiased
    estimate of the gradient of KL(student || teacher) of each token given the tokens before it.

    Args:
        logprobs: (B, T) float, log-probs of the student, NumPy or torch, differentiable.
        teacher_logprobs: (B, T), log-probs of the same tokens under the teacher.
        completion_mask: (B, T) bool, True on the tokens that count.
        old_logprobs: (B, T), log-probs of the student that sampled; None: the values of ``logprobs``.
        sampler_logprobs: (B, T), recorded by an engine that may differ from the student; None: no correction.
        sampler_correction: computation of w, see ``importance_weights``.
        sampler_cap: maximum of w.
        n_tokens: tokens of the whole batch, so that the losses of micro-batches add up; None: of this batch.

    Returns:
        The loss, and metrics as floats: ``reverse_kl``, the estimate of KL(student || teacher) per token in nats, and
        ``sampler/importance_weight``, the mean of w. ``Loss`` of arrays; of tensors a pair of a scalar and the metrics.

    Raises:
        WhetTypeError: an argument is neither array nor tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ, or a setting is out of range.

    Source: Agarwal et al. 2023 (arXiv 2306.13649), with beta = 1; the estimate per token as in Lu and Thinking Machines
        Lab 2025, "On-Policy Distillation".
    """
    where = "distillation_loss"
    check_float_array(where, "logprobs", logprobs, n_axes=2)
    others = {"teacher_logprobs": teacher_logprobs, "completion_mask": completion_mask}
    optional = {"old_logprobs": old_logprobs, "sampler_logprobs": sampler_logprobs}
    check_shapes(where, "logprobs", logprobs, others, optional)
    mask = completion_mask
    own = masked(logprobs, mask)
    old = own if old_logprobs is None else masked(old_logprobs, mask)
    weights = mask.astype(np.float64)
    if sampler_logprobs is not None:
        weights, kept = importance_weights(
            old, sampler_logprobs, mask, correction=sampler_correction, cap=sampler_cap
        )  # fmt: skip
        weights = masked(weights, kept)
    count = denominator(where, "n_tokens", mask.sum() if n_tokens is None else n_tokens)
    excess = old - masked(teacher_logprobs, mask)
    token = weights * np.exp(own - old) * excess / count
    metrics = {"reverse_kl": float(excess.sum()) / count}
    if sampler_logprobs is not None:
        metrics["sampler/importance_weight"] = float(weights.sum()) / count
    return Loss(float(token.sum()), metrics, {"logprobs": token})


@accepts_tensors("logprobs")
def top_k_loss(logprobs: Any, teacher_logprobs: Any, completion_mask: Any, *, n_tokens: float | None = None) -> Loss:
    """Forward KL divergence of a student from a teacher's k most probable tokens, and all others as one.

    With the teacher's probabilities p, the student's q, P = sum_k p_k, Q = sum_k q_k and the mask m:

        l = sum_k p_k (log p_k - log q_k) + (1 - P) (log (1 - P) - log (1 - Q)),    sum l m / n_tokens

    The gradient with respect to log q_k is -p_k + (1 - P) q_k / (1 - Q). A rest 1 - Q below 1e-6, of rounded log-probs,
    counts as 1e-6, and 1 - P below it as 0.

    Args:
        logprobs: (B, T, k) float, log q of the teacher's tokens under the student, NumPy or torch, differentiable.
        teacher_logprobs: (B, T, k), log p; -inf for a position without a token.
        completion_mask: (B, T) bool, True on the tokens that count.
        n_tokens: tokens of the whole batch, so that the losses of micro-batches add up; None: of this batch.

    Returns:
        The loss, and the metric ``covered``, the mean of P. ``Loss`` of arrays; of tensors a pair of a scalar and the
        metrics.

    Raises:
        WhetTypeError: an argument is neither array nor tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ.

    Source: Hinton et al. 2015 (arXiv 1503.02531), without a temperature.
    """
    where = "top_k_loss"
    check_float_array(where, "logprobs", logprobs, n_axes=3)
    check_shapes(where, "logprobs", logprobs, {"teacher_logprobs": teacher_logprobs})
    check_shapes(where, "logprobs", logprobs[..., 0], {"completion_mask": completion_mask})
    mask = completion_mask[..., None] & (teacher_logprobs > -np.inf)
    own, target = masked(logprobs, mask), masked(teacher_logprobs, mask)
    p, q = np.exp(target) * mask, np.exp(own) * mask
    count = denominator(where, "n_tokens", completion_mask.sum() if n_tokens is None else n_tokens)
    covered, rest = p.sum(-1), 1 - q.sum(-1)
    left = np.where(1 - covered < _LEAST_REST, 0.0, 1 - covered) * completion_mask
    bounded = np.maximum(rest, _LEAST_REST)
    token = (p * (target - own)).sum(-1) + left * (np.log(np.where(left > 0, left, 1.0)) - np.log(bounded))
    slope = np.where(rest > _LEAST_REST, left / bounded, 0.0)
    return Loss(
        float(token.sum() / count),
        {"covered": float(covered.sum() / count)},
        {"logprobs": (slope[..., None] * q - p) / count},
    )
