"""Terms shared by the losses: NaN-safe masking, KL estimators, importance weights, tensor checks.

Pure functions of tensors. No model, no trainer, no loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whet.config.settings import KLEstimator, SamplerCorrection
from whet.errors import WhetTypeError, WhetValueError, check_choice, is_number


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` where ``mask`` is True and 0 elsewhere, in value and gradient.

    Unlike multiplying by the mask, selecting does not propagate NaN and inf.
    """
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def importance_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    completion_mask: Tensor,
    *,
    correction: SamplerCorrection = "sequence_mask",
    cap: float = 3.0,
) -> tuple[Tensor, Tensor]:
    """Return importance weights of tokens sampled by an engine whose log-probs differ from the policy's.

    ``w = exp(old_logprobs - sampler_logprobs)``, per token, or per sequence with the difference summed
    over its tokens. "truncate" gives min(w, cap) (Ionides 2008); "mask" rejects tokens with
    w > cap or w = NaN.

    Args:
        old_logprobs: (B, T), log-probs of the policy at the time of sampling.
        sampler_logprobs: (B, T), recorded by the sampler.
        completion_mask: (B, T) bool.
        correction: see above.
        cap: maximum weight.

    Returns:
        weights (B, T), detached, in old_logprobs' dtype, and the mask without the rejected tokens.

    Raises:
        WhetValueError: an unknown correction, or a cap that is not positive.
    """
    check_choice("importance_weights", "correction", correction, SamplerCorrection)
    if not cap > 0:
        raise WhetValueError(f"importance_weights: cap is {cap!r}, expected a number > 0.")
    old, sampler = old_logprobs.detach(), sampler_logprobs.detach().to(old_logprobs)
    log_weights = masked(old, completion_mask) - masked(sampler, completion_mask)
    if correction.startswith("sequence"):
        log_weights = log_weights.sum(1, keepdim=True).expand_as(log_weights)
    weights = log_weights.exp()
    if correction.endswith("truncate"):
        return weights.clamp(max=cap), completion_mask
    return masked(weights, weights <= cap), completion_mask & (weights <= cap)


def logprob_difference(logprobs: Tensor, sampler_logprobs: Tensor, completion_mask: Tensor) -> tuple[float, float]:
    """Return sum and maximum of |logprobs - sampler_logprobs| over the mask."""
    difference = masked(logprobs.detach() - sampler_logprobs.to(logprobs), completion_mask).abs()
    return difference.sum().item(), difference.max().item() if difference.numel() else 0.0


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) from the policy's samples, per token (Schulman 2020).

    With d = ref_logprobs - logprobs: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1.
    """
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(difference) - difference


def count_rows(completion_mask: Tensor, kept_mask: Tensor) -> int:
    """Count the rows of a batch, except rows that an importance correction rejected entirely."""
    return int((kept_mask.any(1) | ~completion_mask.any(1)).sum())


def denominator(where: str, name: str, value: Any) -> float:
    """Return the divisor of sums over a batch, at least 1; ``value`` may be a tensor with one element.

    Raises:
        WhetValueError: value is not a finite number >= 0.
    """
    count = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if not (is_number(count) and count >= 0):
        raise WhetValueError(f"{where}: {name} is {value!r:.60}, expected a finite number >= 0.")
    return max(float(count), 1.0)


def check_float_tensor(where: str, name: str, value: Any, n_axes: int) -> None:
    """Raise unless ``value`` is a floating-point tensor with ``n_axes`` axes."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim != n_axes:
        axes = "(B, T)" if n_axes == 2 else "(B,)"
        raise WhetTypeError(f"{where}: {name} is {_describe(value)}, expected a {axes} floating-point tensor.")


def check_shapes(
    where: str, name: str, like: Tensor, others: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> None:
    """Raise unless every tensor has the shape of ``like`` and every ``*_mask`` is bool; ``optional`` may be None."""
    given = {other: value for other, value in (optional or {}).items() if value is not None}
    for other, value in {**others, **given}.items():
        if not isinstance(value, Tensor):
            raise WhetTypeError(f"{where}: {other} is {_describe(value)}, expected a tensor.")
        if value.shape != like.shape:
            raise WhetValueError(
                f"{where}: {other} has shape {tuple(value.shape)}, expected the shape of {name}, {tuple(like.shape)}."
            )
        if other.endswith("_mask") and value.dtype != torch.bool:
            raise WhetTypeError(
                f"{where}: {other} is {_describe(value)}, expected bool, True on the tokens that count. "
                f"Convert a 0/1 mask with mask.bool()."
            )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a {tuple(value.shape)} {value.dtype} tensor"
