"""Advantages of completions within their group (GRPO), and along a trajectory (GAE).

Not differentiable: a tensor that requires grad is an error. Arithmetic is float64 for every dtype; results have the
dtype and kind (NumPy or torch) of the rewards.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs

_group_advantages = _core.group_advantages
_SCALES = {"group": _core.Scale.GROUP, "batch": _core.Scale.BATCH, "none": _core.Scale.NONE}
_GROUP = _core.Scale.GROUP


def naive_group_advantages(
    rewards: np.ndarray, *, scale: str = "group", ddof: int = 0, eps: float | None = None
) -> np.ndarray:
    """Reference implementation of ``compute_batch_group_advantages`` for rewards (n_prompts, G), in their precision."""

    def deviation(r: np.ndarray, centred: np.ndarray, axis: int | None) -> np.ndarray:
        freedom = np.sum(~np.isnan(r), axis=axis, keepdims=True) - ddof
        squares = np.nansum(centred * centred, axis=axis, keepdims=True)
        return np.where(freedom > 0, np.sqrt(squares / np.maximum(freedom, 1)), 0)

    scored = ~np.isnan(rewards)
    count = np.maximum(scored.sum(axis=1, keepdims=True), 1)
    centred = rewards - np.nansum(rewards, axis=1, keepdims=True) / count
    if scale == "none":
        return np.where(scored, centred, 0)
    if scale == "batch":
        std = deviation(rewards, rewards - np.nansum(rewards) / max(int(scored.sum()), 1), None)
    else:
        std = deviation(rewards, centred, 1)
    divisor = np.where(std < 1e-8, np.inf, std) if eps is None else std + eps
    return np.where(scored, centred / divisor, 0)


@_core.plain_group_advantages_first
def compute_group_advantages(
    rewards: Any,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 0,
    eps: float | None = None,
) -> Any:
    """Return the advantages of one group: ``compute_batch_group_advantages`` for rewards (G,)."""
    r = inputs.as_plain_array("compute_group_advantages", "rewards", rewards)
    if len(r.shape) != 1:
        raise WhetValueError(
            f"compute_group_advantages: rewards has shape {tuple(r.shape)}, expected one group (G,). "
            "Use compute_batch_group_advantages for several."
        )
    return _advantages("compute_group_advantages", r, r.shape[0], scale, ddof, eps)


def compute_batch_group_advantages(
    rewards: Any,
    group_size: int | None = None,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 0,
    eps: float | None = None,
) -> Any:
    """Return A = (r - group mean) / s, the group-relative advantage of GRPO (Shao et al. 2024, section 4.1.2).

    s is the standard deviation of the group ("group"), of all rewards of the call ("batch"), or 1 ("none"). The
    default is the population deviation, with A = 0 if it is below 1e-8; ``ddof=1, eps=1e-4`` matches TRL:
    A = (r - mean) / (std + eps). The deviation of ddof rewards or fewer is 0.

    A NaN reward means unscored: it is excluded from every mean and deviation, and its advantage is 0. An infinite
    reward makes the advantages of its group NaN.

    Args:
        rewards: (n_prompts * G,) with group_size = G, or (n_prompts, G) without; float32 or float64, NumPy or
            torch (CPU); a list is read as float64, None in it as unscored.
        group_size: completions per prompt.
        scale: the divisor s.
        ddof: 0 for the population deviation, 1 for the sample deviation.
        eps: added to the deviation; None: zero advantages for groups of zero variance instead.

    Returns:
        Advantages, with the shape, dtype and kind of rewards. Exact to 4 ULP (float64).

    Raises:
        WhetValueError: rewards are empty or not a multiple of group_size; group_size < 1; eps < 0; a tensor
            requires grad or is not on the CPU.
        WhetTypeError: the dtype is not float32 or float64.
    """
    result, size = NotImplemented, False if group_size is None else group_size
    if scale == "group" and ddof == 0 and eps is None:
        result = _group_advantages(rewards, size, _GROUP, 0.0, -1.0)
    elif scale == "group" and ddof == 1 and isinstance(eps, float) and 0.0 <= eps < math.inf:
        result = _group_advantages(rewards, size, _GROUP, 1.0, eps)
    if result is NotImplemented:
        r = inputs.as_plain_array("compute_batch_group_advantages", "rewards", rewards)
        return _advantages("compute_batch_group_advantages", r, group_size, scale, ddof, eps)
    return result


def _advantages(function: str, r: Any, group_size: Any, scale: str, ddof: Any, eps: Any) -> Any:
    if 0 in r.shape or not r.shape:
        raise WhetValueError(f"{function}: rewards has shape {tuple(r.shape)}, expected at least one reward.")
    if not isinstance(scale, str) or scale not in _SCALES:
        raise WhetValueError(f"{function}: scale is {scale!r}, expected 'group', 'batch' or 'none'.")
    if not 0 <= inputs.as_number(function, "ddof", ddof) < math.inf:
        raise WhetValueError(f"{function}: ddof is {ddof!r}, expected 0 (population) or 1 (sample).")
    if eps is not None and not 0 <= inputs.as_number(function, "eps", eps) < math.inf:
        raise WhetValueError(f"{function}: eps is {eps!r}, expected a number >= 0, or None.")
    group_size = inputs.check_rows(function, "rewards", r, "group_size", group_size)
    size = False if group_size is None else group_size
    result = _group_advantages(r, size, _SCALES[scale], float(ddof), -1.0 if eps is None else float(eps))
    return inputs.check_computed(function, result)


def naive_gae(
    rewards: np.ndarray, values: np.ndarray, dones: np.ndarray, last_value: Any, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Reference implementation of ``compute_gae`` for (T,) arrays, in their own precision."""
    advantages = np.zeros_like(rewards)
    next_value, advantage = rewards.dtype.type(last_value), rewards.dtype.type(0)
    for t in reversed(range(len(rewards))):
        if dones[t]:
            next_value = advantage = rewards.dtype.type(0)
        advantage = rewards[t] + gamma * next_value - values[t] + gamma * lam * advantage
        advantages[t] = advantage
        next_value = values[t]
    return advantages, advantages + values


def compute_gae(rewards: Any, values: Any, dones: Any, last_value: Any, gamma: float, lam: float) -> tuple[Any, Any]:
    """Compute generalised advantage estimates (Schulman et al. 2016, eq. 16) of one trajectory or a batch.

        delta_t = r_t + gamma (1 - done_t) V_{t+1} - V_t
        A_t     = delta_t + gamma lam (1 - done_t) A_{t+1},   returns_t = A_t + V_t

    Args:
        rewards: (T,) or (B, T), float32 or float64, NumPy or torch (CPU).
        values: V_t, the same shape and dtype.
        dones: the same shape, bool (or floats 0 and 1): True if the episode ended with step t.
        last_value: V_T, a number, or (B,) for a batch; ignored if the last step is done.
        gamma: discount, in [0, 1].
        lam: lambda, in [0, 1].

    Returns:
        (advantages, returns), with the shape, dtype and kind of rewards. The recurrence is computed in float64.

    Raises:
        WhetValueError: shapes disagree, T = 0, gamma or lam outside [0, 1], dones not 0 or 1, a tensor requires
            grad or is not on the CPU.
        WhetTypeError: a dtype is not float32 or float64, or they differ.
    """
    result = _core.gae(rewards, values, dones, last_value, gamma, lam)
    return _gae(rewards, values, dones, last_value, gamma, lam) if result is NotImplemented else result


def _gae(rewards: Any, values: Any, dones: Any, last_value: Any, gamma: float, lam: float) -> tuple[Any, Any]:
    name = "compute_gae"
    for label, x in (("gamma", gamma), ("lam", lam)):
        if not 0 <= inputs.as_number(name, label, x) <= 1:
            raise WhetValueError(f"{name}: {label} is {x!r}, expected a number in [0, 1].")
    r, v = inputs.as_plain_array(name, "rewards", rewards), inputs.as_plain_array(name, "values", values)
    if len(r.shape) not in (1, 2) or 0 in r.shape:
        raise WhetValueError(f"{name}: rewards has shape {tuple(r.shape)}, expected (T,) or (B, T), not empty.")
    d = inputs.as_plain_array(name, "dones", dones, ("bool", *inputs.FLOATS))
    inputs.check_same_dtype(name, rewards=r, values=v)
    inputs.check_same_shape(name, rewards=r, values=v, dones=d)
    if "bool" not in str(d.dtype):
        if not bool(((d == 0) | (d == 1)).all()):
            raise WhetValueError(f"{name}: dones holds values other than 0 and 1. Pass a bool array.")
        d = d != 0
    try:
        last = np.asarray(last_value, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WhetTypeError(f"{name}: last_value is {last_value!r:.60}, expected numbers ({error}).") from None
    expected = () if len(r.shape) == 1 else (r.shape[0],)
    if last.shape != expected and last.shape != (1,) * len(last.shape):
        raise WhetValueError(
            f"{name}: last_value has shape {last.shape}, expected {expected or 'a number'} "
            f"for rewards of shape {tuple(r.shape)}."
        )
    last = float(last.reshape(())) if len(r.shape) == 1 else np.ascontiguousarray(np.broadcast_to(last, expected))
    return inputs.check_computed(name, _core.gae(r, v, d, last, float(gamma), float(lam)))
