"""Terms shared by the losses: NaN-safe masking, KL estimators, importance weights, checks of arrays.

Pure functions of NumPy arrays, in float64. No model, no trainer, no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.config.settings import KLEstimator, SamplerCorrection
from whet.errors import WhetTypeError, WhetValueError, check_choice, is_number


def masked(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return ``values`` where ``mask`` is True and 0 elsewhere, (B, T) float64.

    Unlike multiplying by the mask, selecting does not propagate NaN and inf.
    """
    return np.where(mask, np.asarray(values, np.float64), 0.0)


def importance_weights(
    old_logprobs: np.ndarray,
    sampler_logprobs: np.ndarray,
    completion_mask: np.ndarray,
    *,
    correction: SamplerCorrection = "sequence_mask",
    cap: float = 3.0,
) -> tuple[np.ndarray, np.ndarray]:
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
        weights (B, T) float64, and the mask without the rejected tokens.

    Raises:
        WhetValueError: an unknown correction, or a cap that is not positive.
    """
    check_choice("importance_weights", "correction", correction, SamplerCorrection)
    if not cap > 0:
        raise WhetValueError(f"importance_weights: cap is {cap!r}, expected a number > 0.")
    log_weights = masked(old_logprobs, completion_mask) - masked(sampler_logprobs, completion_mask)
    if correction.startswith("sequence"):
        log_weights = np.broadcast_to(log_weights.sum(1, keepdims=True), log_weights.shape)
    with np.errstate(over="ignore"):
        weights = np.exp(log_weights)
    if correction.endswith("truncate"):
        return np.minimum(weights, cap), completion_mask
    kept = weights <= cap
    return masked(weights, kept), completion_mask & kept


def logprob_difference(
    logprobs: np.ndarray, sampler_logprobs: np.ndarray, completion_mask: np.ndarray
) -> tuple[float, float]:
    """Return sum and maximum of |logprobs - sampler_logprobs| over the mask."""
    difference = np.abs(masked(logprobs, completion_mask) - masked(sampler_logprobs, completion_mask))
    return float(difference.sum()), float(difference.max(initial=0.0))


def top_entropy_masks(
    entropies: Sequence[np.ndarray], masks: Sequence[np.ndarray], quantile: float
) -> list[np.ndarray]:
    """Return the tokens of a batch whose entropy is at least its (1 - quantile)-quantile, in micro-batches.

    Args:
        entropies: (B, T) in nats, of each micro-batch.
        masks: (B, T) bool, True on the tokens that count.
        quantile: share of the tokens, from 0 (only the maximum) to 1.

    Source: Wang et al. 2025 (2506.01939), as TRL's ``top_entropy_quantile``: linear interpolation, ties count.
    """
    values = np.concatenate([entropy[mask] for entropy, mask in zip(entropies, masks, strict=True)] or [np.zeros(0)])
    least = np.quantile(values.astype(np.float64), 1 - quantile) if len(values) else 0.0
    return [mask & (entropy >= least) for entropy, mask in zip(entropies, masks, strict=True)]


def token_kl(logprobs: np.ndarray, ref_logprobs: np.ndarray, estimator: KLEstimator) -> tuple[np.ndarray, np.ndarray]:
    """Estimate KL(policy || reference) from the policy's samples, per token (Schulman 2020).

    With d = ref_logprobs - logprobs: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1.

    Returns:
        The estimates, and their derivatives with respect to logprobs: 1, -d and 1 - exp(d).
    """
    d = ref_logprobs - logprobs
    if estimator == "k1":
        return -d, np.ones_like(d)
    if estimator == "k2":
        return np.square(d) / 2, -d
    with np.errstate(over="ignore"):
        return np.expm1(d) - d, -np.expm1(d)


def count_rows(completion_mask: np.ndarray, kept_mask: np.ndarray) -> int:
    """Count the rows of a batch, except rows that an importance correction rejected entirely."""
    return int((kept_mask.any(1) | ~completion_mask.any(1)).sum())


def denominator(where: str, name: str, value: Any, least: float = 1.0) -> float:
    """Return the divisor of sums over a batch, at least ``least``; ``value`` may be an array with one element.

    Raises:
        WhetValueError: value is not a finite number >= 0.
    """
    count = value.item() if isinstance(value, (np.ndarray, np.generic)) and value.size == 1 else value
    if not (is_number(count) and count >= 0):
        raise WhetValueError(f"{where}: {name} is {value!r:.60}, expected a finite number >= 0.")
    return max(float(count), least)


def check_float_array(where: str, name: str, value: Any, n_axes: int) -> None:
    """Raise unless ``value`` is a floating-point array with ``n_axes`` axes."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.ndim != n_axes:
        axes = "(B, T)" if n_axes == 2 else "(B,)"
        raise WhetTypeError(f"{where}: {name} is {_describe(value)}, expected a {axes} floating-point array or tensor.")


def check_shapes(
    where: str, name: str, like: np.ndarray, others: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> None:
    """Raise unless every array has the shape of ``like`` and every ``*_mask`` is bool; ``optional`` may be None."""
    given = {other: value for other, value in (optional or {}).items() if value is not None}
    for other, value in {**others, **given}.items():
        if not isinstance(value, np.ndarray):
            raise WhetTypeError(f"{where}: {other} is {_describe(value)}, expected an array or a tensor.")
        if value.shape != like.shape:
            raise WhetValueError(
                f"{where}: {other} has shape {value.shape}, expected the shape of {name}, {like.shape}."
            )
        if other.endswith("_mask") and value.dtype != bool:
            raise WhetTypeError(
                f"{where}: {other} is {_describe(value)}, expected bool, True on the tokens that count. "
                f"Convert a 0/1 mask with .astype(bool), or .bool() of a tensor."
            )


def _describe(value: Any) -> str:
    return f"{value.shape} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
