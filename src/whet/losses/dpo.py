"""Losses of Direct Preference Optimization, see ``whet.algorithms.dpo``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from whet.config.preferences import SORTED_LOSSES, DPOLossType, FDivergence, check_dpo_options
from whet.errors import WhetValueError
from whet.losses.closed_form import Loss, accepts_tensors
from whet.losses.terms import check_float_array, check_shapes, denominator

_LENGTH_NORMALISED = ("ipo", "sigmoid_norm")


@accepts_tensors("chosen_logprobs", "rejected_logprobs")
def dpo_loss(
    chosen_logprobs: Any,
    rejected_logprobs: Any,
    ref_chosen_logprobs: Any,
    ref_rejected_logprobs: Any,
    *,
    loss_type: DPOLossType | Mapping[str, float] = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: FDivergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    chosen_lengths: Any = None,
    rejected_lengths: Any = None,
    weights: Any = None,
    n_pairs: float | None = None,
    n_tokens: float | None = None,
) -> Loss:
    """Loss of the DPO family, averaged over pairs; sft is averaged over the tokens of the chosen completions.

    With c and r the log-ratios of chosen and rejected, f the score of a log-ratio, d = f(c) - f(r), d' = f(c) /
    chosen_lengths - f(r) / rejected_lengths, s the label smoothing and sig the sigmoid:

        sigmoid       -(1 - s) logsig(beta d) - s logsig(-beta d)      (s > 0: conservative DPO)
        sigmoid_norm  sigmoid with d' in place of d
        robust        [-(1 - s) logsig(beta d) + s logsig(-beta d)] / (1 - 2 s)
        hinge         relu(1 - beta d)
        ipo           (d' - 1 / (2 beta))^2
        exo_pair      KL(q || p), q = (sig(beta d), sig(-beta d)), p = (1 - s, s)
        nca_pair      -logsig(beta c) - logsig(-beta c) / 2 - logsig(-beta r) / 2
        bco_pair      -logsig(beta c) - logsig(-beta r)
        sppo_hard     (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2
        apo_zero      1 - sig(beta c) + sig(beta r)
        apo_down      sig(beta c) + 1 - sig(beta d)
        aot           sigmoid with d the k-th smallest difference of log-probs, chosen_logprobs - rejected_logprobs,
                      minus the k-th smallest of the reference, for every k
        aot_unpaired  sigmoid with d the k-th smallest c minus the k-th smallest r, for every k
        sft           -chosen_logprobs, summed and divided by n_tokens

    The score is f'(t) of the divergence's f at the ratio t = exp(x) of a log-ratio x:

        reverse_kl          x
        forward_kl          1 - exp(-x)
        js_divergence       log 2 + logsig(x)
        alpha_divergence    (exp((alpha - 1) x) - 1) / (alpha - 1)

    Exponents above 80 count as 80, as TRL's of alpha_divergence do.

    Args:
        chosen_logprobs: (B,) float, NumPy or torch, summed over the completion, differentiable.
        rejected_logprobs: (B,), as chosen_logprobs.
        ref_chosen_logprobs: (B,), log-probs of the reference; None for both references: reference-free, as if the
            reference assigned every completion the same probability.
        ref_rejected_logprobs: (B,).
        loss_type: see above; or several losses and the factors of their sum.
        beta: strength of the KL regularisation towards the reference.
        label_smoothing: probability that a label is wrong, for sigmoid, sigmoid_norm, robust, aot, aot_unpaired and
            exo_pair (which needs a value above 0).
        f_divergence_type: see above; only reverse_kl for nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, aot and
            aot_unpaired.
        f_alpha_divergence_coef: alpha above; not 1, which is reverse_kl.
        chosen_lengths: (B,), tokens per completion; for ipo, sigmoid_norm and sft.
        rejected_lengths: (B,); for ipo and sigmoid_norm.
        weights: (B,), constant factors of the pairs' losses (WPO); not for aot, aot_unpaired and sft. None: 1.
        n_pairs: pairs of the whole batch, so that losses and metrics of micro-batches add up, except for aot and
            aot_unpaired, which sort the batch; None: B.
        n_tokens: for sft, tokens of the chosen completions of the whole batch; None: the sum of chosen_lengths.

    Returns:
        The loss, and metrics as floats, means over the pairs: ``rewards/{chosen,rejected}`` (beta c
        and beta r), ``rewards/margins`` (beta d), ``rewards/accuracies`` (share with d > 0),
        ``logps/{chosen,rejected}``. ``Loss`` of arrays; of tensors a pair of a scalar, in the dtype of chosen_logprobs,
        and the metrics.

    Raises:
        WhetTypeError: an argument is neither array nor tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ, there are no pairs, loss_type is unknown, a setting is out of range, only one
            reference is given, lengths are missing, or aot gets a part of a batch.

    Source: TRL 1.16's table (Rafailov 2023, Mitchell 2023, Chowdhury 2024, Zhao 2023, Azar 2023, Meng
        2024, Ji 2024, Chen 2024, Jung 2024, Wu 2024, D'Oosterlinck 2024, Melnyk 2024); Wang 2023 for the
        divergences. Departure: TRL's sigmoid ignores label_smoothing.
    """
    losses = {loss_type: 1.0} if isinstance(loss_type, str) else loss_type
    check_dpo_options("dpo_loss", losses, beta, label_smoothing, f_divergence_type, f_alpha_divergence_coef)
    averaged = next((name for name in losses if name in _LENGTH_NORMALISED), None)
    if averaged and (chosen_lengths is None or rejected_lengths is None):
        raise WhetValueError(f"dpo_loss: {averaged!r} averages over tokens. Pass chosen_lengths and rejected_lengths.")
    if "sft" in losses and chosen_lengths is None and n_tokens is None:
        raise WhetValueError("dpo_loss: 'sft' averages over tokens. Pass chosen_lengths, or n_tokens.")
    check_float_array("dpo_loss", "chosen_logprobs", chosen_logprobs, n_axes=1)
    optional = {"ref_chosen_logprobs": ref_chosen_logprobs, "ref_rejected_logprobs": ref_rejected_logprobs}
    optional |= {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths, "weights": weights}
    check_shapes("dpo_loss", "chosen_logprobs", chosen_logprobs, {"rejected_logprobs": rejected_logprobs}, optional)
    if not len(chosen_logprobs):
        raise WhetValueError("dpo_loss: chosen_logprobs is empty. Pass at least one pair.")
    if weights is not None and not {*SORTED_LOSSES, "sft"}.isdisjoint(losses):
        raise WhetValueError(f"dpo_loss: {', '.join(losses)} has a loss without a term of each pair. Omit weights.")
    if (ref_chosen_logprobs is None) != (ref_rejected_logprobs is None):
        raise WhetValueError("dpo_loss: only one of the two ref_*_logprobs is None. Pass both, or neither.")

    chosen, rejected = chosen_logprobs.astype(np.float64), rejected_logprobs.astype(np.float64)
    c, r = chosen, rejected
    if ref_chosen_logprobs is not None:
        c, r = c - ref_chosen_logprobs, r - ref_rejected_logprobs
    n_pairs = denominator("dpo_loss", "n_pairs", len(c) if n_pairs is None else n_pairs)
    if n_pairs != len(c) and not set(losses).isdisjoint(SORTED_LOSSES):
        raise WhetValueError(
            f"dpo_loss: there are {len(c)} of n_pairs={n_pairs:g} pairs, and aot sorts the whole batch. Pass all pairs."
        )
    value, gradients = 0.0, {}
    scores = [_score(x, f_divergence_type, f_alpha_divergence_coef) for x in (c, r)]
    for name, weight in losses.items():
        if name == "sft":
            count = np.asarray(chosen_lengths).sum() if n_tokens is None else n_tokens
            divisor = denominator("dpo_loss", "n_tokens", count)
            value -= weight * chosen.sum() / divisor
            slopes = {"chosen_logprobs": np.full_like(c, -weight / divisor)}
        else:
            lengths: Any = (chosen_lengths, rejected_lengths) if name in _LENGTH_NORMALISED else (1, 1)
            (f_c, df_c), (f_r, df_r) = (
                (f / n, df / n) for (f, df), n in zip(scores, [np.maximum(x, 1) for x in lengths], strict=True)
            )
            if name in SORTED_LOSSES:
                loss = _sorted_loss(name, c, r, chosen - rejected, beta, label_smoothing)
            else:
                loss = _pair_loss(name, c, r, f_c - f_r, beta, label_smoothing)
            factors = np.full_like(c, weight / n_pairs) if weights is None else weights * (weight / n_pairs)
            value += (factors * loss.value).sum()
            slopes = {
                "chosen_logprobs": factors * (loss.slope_c + loss.slope_d * df_c),
                "rejected_logprobs": factors * (loss.slope_r - loss.slope_d * df_r),
            }
        gradients = {**gradients, **{side: slope + gradients.get(side, 0.0) for side, slope in slopes.items()}}
    metrics = {
        "rewards/chosen": beta * c,
        "rewards/rejected": beta * r,
        "rewards/margins": beta * (c - r),
        "rewards/accuracies": c > r,
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    return Loss(float(value), {name: float(values.sum() / n_pairs) for name, values in metrics.items()}, gradients)


_LARGEST_EXPONENT = 80.0
"""Largest exponent of scores: exp(80) is finite in float32."""


def _score(x: np.ndarray, divergence: str, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of log-ratios, and their derivatives."""
    if divergence == "reverse_kl":
        return x, np.ones_like(x)
    if divergence == "js_divergence":
        return math.log(2) + log_sigmoid(x), sigmoid(-x)
    power = -1.0 if divergence == "forward_kl" else alpha - 1
    capped = np.minimum(power * x, _LARGEST_EXPONENT)
    return np.expm1(capped) / power, np.where(power * x <= _LARGEST_EXPONENT, np.exp(capped), 0.0)


class _PairLoss(NamedTuple):
    """Losses of pairs, (B,), and their derivatives with respect to c, r and d, taken as independent."""

    value: np.ndarray
    slope_c: np.ndarray | float = 0.0
    slope_r: np.ndarray | float = 0.0
    slope_d: np.ndarray | float = 0.0


def _pair_loss(loss_type: str, c: np.ndarray, r: np.ndarray, d: np.ndarray, beta: float, s: float) -> _PairLoss:
    right, wrong = log_sigmoid(beta * d), log_sigmoid(-beta * d)
    p_right, p_wrong = np.exp(right), np.exp(wrong)
    if loss_type in ("sigmoid", "sigmoid_norm"):
        return _PairLoss(-(1 - s) * right - s * wrong, slope_d=beta * (s * p_right - (1 - s) * p_wrong))
    if loss_type == "robust":
        scale = 1 / (1 - 2 * s)
        return _PairLoss(
            scale * (s * wrong - (1 - s) * right), slope_d=-beta * scale * (s * p_right + (1 - s) * p_wrong)
        )
    if loss_type == "hinge":
        return _PairLoss(np.maximum(1 - beta * d, 0), slope_d=np.where(beta * d < 1, -beta, 0.0))
    if loss_type == "ipo":
        return _PairLoss(np.square(d - 1 / (2 * beta)), slope_d=2 * (d - 1 / (2 * beta)))
    if loss_type == "exo_pair":
        of_right, of_wrong = right - math.log1p(-s), wrong - math.log(s)
        return _PairLoss(
            p_right * of_right + p_wrong * of_wrong, slope_d=beta * p_right * p_wrong * (of_right - of_wrong)
        )
    if loss_type == "nca_pair":
        return _PairLoss(
            -log_sigmoid(beta * c) - (log_sigmoid(-beta * c) + log_sigmoid(-beta * r)) / 2,
            slope_c=beta * (sigmoid(beta * c) / 2 - sigmoid(-beta * c)),
            slope_r=beta * sigmoid(beta * r) / 2,
        )
    if loss_type == "bco_pair":
        return _PairLoss(
            -log_sigmoid(beta * c) - log_sigmoid(-beta * r),
            slope_c=-beta * sigmoid(-beta * c),
            slope_r=beta * sigmoid(beta * r),
        )
    if loss_type == "sppo_hard":
        above, below = c - 1 / (2 * beta), r + 1 / (2 * beta)
        return _PairLoss(np.square(above) + np.square(below), slope_c=2 * above, slope_r=2 * below)
    p_c, slope_c = sigmoid(beta * c), beta * sigmoid(beta * c) * sigmoid(-beta * c)
    if loss_type == "apo_zero":
        slope_r = beta * sigmoid(beta * r) * sigmoid(-beta * r)
        return _PairLoss(1 - p_c + sigmoid(beta * r), slope_c=-slope_c, slope_r=slope_r)
    return _PairLoss(p_c + 1 - p_right, slope_c=slope_c, slope_d=-beta * p_right * p_wrong)  # apo_down


def _sorted_loss(
    loss_type: str, c: np.ndarray, r: np.ndarray, differences: np.ndarray, beta: float, s: float
) -> _PairLoss:
    """Return the losses of aot by rank; ``differences``: of the policy's log-probs of chosen and rejected."""
    if loss_type == "aot":
        order, reference = np.argsort(differences, kind="stable"), np.sort(differences - (c - r))
        loss = _pair_loss("sigmoid", c, r, differences[order] - reference, beta, s)
        slope = np.empty_like(c)
        slope[order] = loss.slope_d
        return _PairLoss(loss.value, slope_c=slope, slope_r=-slope)
    orders = [np.argsort(side, kind="stable") for side in (c, r)]
    loss = _pair_loss("sigmoid", c, r, c[orders[0]] - r[orders[1]], beta, s)
    slopes = np.empty((2, len(c)))
    slopes[0, orders[0]], slopes[1, orders[1]] = loss.slope_d, -np.asarray(loss.slope_d)
    return _PairLoss(loss.value, slope_c=slopes[0], slope_r=slopes[1])


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    """Return log(1 / (1 + exp(-x)))."""
    return -np.logaddexp(0, -x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x))."""
    return np.exp(log_sigmoid(x))
