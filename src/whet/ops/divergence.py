"""KL divergence between a policy and a reference from the log-probabilities of sampled tokens.

Two estimators, each for one sequence and for a batch; functions that end in ``_f32`` accept only float32. With
p = log policy and q = log reference, per token:

    token_kl            exp(p) (p - q)
    token_kl_schulman   exp(q - p) - (q - p) - 1     k3 of Schulman (2020), "Approximating KL Divergence"

k3 is non-negative, and an unbiased estimate of KL(policy || reference) on tokens drawn from the policy. token_kl
weights sampled tokens by their probability once more: it is the summand of the exact divergence, meant for the
log-probabilities of a whole vocabulary.

Not differentiable: a tensor that requires grad is an error. Views that are not contiguous are copied. Arithmetic is in
the dtype of the arrays; sums are float64 with compensation for rounding. k3 is computed without cancellation where
policy and reference nearly agree (exp(r) - r - 1 as written has no correct digit there in float32).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetValueError
from whet.ops import inputs


def naive_token_kl(p: np.ndarray, q: np.ndarray, mask: np.ndarray | None = None) -> Any:
    """Reference implementation of ``compute_token_kl`` over the last axis, in the arrays' own precision."""
    with np.errstate(invalid="ignore"):
        terms = np.where(p == -np.inf, 0, np.exp(p) * (p - q))
    return np.where(True if mask is None else mask, terms, 0).sum(-1)


def naive_token_kl_schulman(p: np.ndarray, q: np.ndarray, mask: np.ndarray | None = None) -> Any:
    """Reference implementation of ``compute_token_kl_schulman`` over the last axis, in the arrays' own precision."""
    with np.errstate(invalid="ignore"):
        r = q - p
        terms = np.expm1(r) - r
    return np.where(True if mask is None else mask, terms, 0).sum(-1)


def compute_token_kl(log_probs_policy: Any, log_probs_ref: Any, mask: Any = None) -> float:
    """Return the sum of exp(p) (p - q) over one sequence.

    A token with p = -inf adds 0 (the limit of x log x).

    Args:
        log_probs_policy: p, (T,), float32 or float64, NumPy or torch (CPU).
        log_probs_ref: q, the same shape and dtype.
        mask: (T,) bool, True counts. Values of masked tokens are ignored. None counts all.

    Returns:
        The sum in nats, 0.0 for T = 0. NaN if a counted token holds NaN.

    Raises:
        WhetValueError: shapes disagree, or a tensor requires grad or is not on the CPU.
        WhetTypeError: a dtype is not float32 or float64, or the two differ.
    """
    result = _core.token_kl(log_probs_policy, log_probs_ref, mask, False, False)
    if result is NotImplemented:
        return _single("compute_token_kl", log_probs_policy, log_probs_ref, mask, False, inputs.FLOATS)
    return result


def compute_token_kl_schulman(log_probs_policy: Any, log_probs_ref: Any, mask: Any = None) -> float:
    """Return the sum of k3 = exp(r) - r - 1 with r = q - p over one sequence: at least 0, and 0 if p = q.

    Arguments, result and errors as ``compute_token_kl``. The direction follows Schulman (2020) and TRL: with tokens
    sampled from the policy the expectation is KL(policy || reference).
    """
    result = _core.token_kl(log_probs_policy, log_probs_ref, mask, True, False)
    if result is NotImplemented:
        return _single("compute_token_kl_schulman", log_probs_policy, log_probs_ref, mask, True, inputs.FLOATS)
    return result


def compute_token_kl_f32(log_probs_policy: Any, log_probs_ref: Any, mask: Any = None) -> float:
    """Return ``compute_token_kl`` of float32 arrays; other dtypes are an error."""
    result = _core.token_kl(log_probs_policy, log_probs_ref, mask, False, True)
    if result is NotImplemented:
        return _single("compute_token_kl_f32", log_probs_policy, log_probs_ref, mask, False, ("float32",))
    return result


def compute_token_kl_schulman_f32(log_probs_policy: Any, log_probs_ref: Any, mask: Any = None) -> float:
    """Return ``compute_token_kl_schulman`` of float32 arrays; other dtypes are an error."""
    result = _core.token_kl(log_probs_policy, log_probs_ref, mask, True, True)
    if result is NotImplemented:
        return _single("compute_token_kl_schulman_f32", log_probs_policy, log_probs_ref, mask, True, ("float32",))
    return result


def compute_batch_token_kl(
    log_probs_policy: Any, log_probs_ref: Any, seq_len: int | None = None, mask: Any = None
) -> Any:
    """Return ``compute_token_kl`` of every sequence of a batch.

    Args:
        log_probs_policy: p, (B, T), or flat (B * T,) with seq_len = T; float32 or float64, NumPy or torch (CPU).
        log_probs_ref: q, the same shape and dtype.
        seq_len: T of flat arrays; omit it for 2-D arrays.
        mask: bool, the shape of p, True counts. None counts all.

    Returns:
        (B,) sums in nats, of the dtype and kind (NumPy or torch) of p.

    Raises:
        WhetValueError: shapes disagree, a flat array is empty or not a multiple of seq_len, seq_len < 1, or a
            tensor requires grad or is not on the CPU.
        WhetTypeError: a dtype is not float32 or float64, or the two differ.
    """
    result = _core.batch_token_kl(log_probs_policy, log_probs_ref, seq_len, mask, False, False)
    if result is NotImplemented:
        return _batch("compute_batch_token_kl", log_probs_policy, log_probs_ref, seq_len, mask, False, inputs.FLOATS)
    return result


def compute_batch_token_kl_schulman(
    log_probs_policy: Any, log_probs_ref: Any, seq_len: int | None = None, mask: Any = None
) -> Any:
    """Return ``compute_token_kl_schulman`` of every sequence of a batch. Arguments as ``compute_batch_token_kl``."""
    result = _core.batch_token_kl(log_probs_policy, log_probs_ref, seq_len, mask, True, False)
    if result is NotImplemented:
        name = "compute_batch_token_kl_schulman"
        return _batch(name, log_probs_policy, log_probs_ref, seq_len, mask, True, inputs.FLOATS)
    return result


def compute_batch_token_kl_f32(
    log_probs_policy: Any, log_probs_ref: Any, seq_len: int | None = None, mask: Any = None
) -> Any:
    """Return ``compute_batch_token_kl`` of float32 arrays; other dtypes are an error."""
    result = _core.batch_token_kl(log_probs_policy, log_probs_ref, seq_len, mask, False, True)
    if result is NotImplemented:
        name = "compute_batch_token_kl_f32"
        return _batch(name, log_probs_policy, log_probs_ref, seq_len, mask, False, ("float32",))
    return result


def compute_batch_token_kl_schulman_f32(
    log_probs_policy: Any, log_probs_ref: Any, seq_len: int | None = None, mask: Any = None
) -> Any:
    """Return ``compute_batch_token_kl_schulman`` of float32 arrays; other dtypes are an error."""
    result = _core.batch_token_kl(log_probs_policy, log_probs_ref, seq_len, mask, True, True)
    if result is NotImplemented:
        name = "compute_batch_token_kl_schulman_f32"
        return _batch(name, log_probs_policy, log_probs_ref, seq_len, mask, True, ("float32",))
    return result


def _plain(function: str, policy: Any, ref: Any, mask: Any, dtypes: tuple[str, ...]) -> tuple[Any, Any, Any]:
    p = inputs.as_plain_array(function, "log_probs_policy", policy, dtypes)
    q = inputs.as_plain_array(function, "log_probs_ref", ref, dtypes)
    inputs.check_same_dtype(function, log_probs_policy=p, log_probs_ref=q)
    inputs.check_same_shape(function, log_probs_policy=p, log_probs_ref=q)
    if mask is not None:
        mask = inputs.as_plain_array(function, "mask", mask, ("bool",))
        inputs.check_same_shape(function, log_probs_policy=p, mask=mask)
    return p, q, mask


def _single(function: str, policy: Any, ref: Any, mask: Any, schulman: bool, dtypes: tuple[str, ...]) -> float:
    p, q, mask = _plain(function, policy, ref, mask, dtypes)
    if len(p.shape) != 1:
        raise WhetValueError(
            f"{function}: log_probs_policy has shape {tuple(p.shape)}, expected one sequence (T,). "
            "Use the batch form for several."
        )
    return inputs.check_computed(function, _core.token_kl(p, q, mask, schulman, False))


def _batch(
    function: str, policy: Any, ref: Any, seq_len: Any, mask: Any, schulman: bool, dtypes: tuple[str, ...]
) -> Any:
    p, q, mask = _plain(function, policy, ref, mask, dtypes)
    seq_len = inputs.check_rows(function, "log_probs_policy", p, "seq_len", seq_len)
    return inputs.check_computed(function, _core.batch_token_kl(p, q, seq_len, mask, schulman, False))
