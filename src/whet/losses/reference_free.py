"""Losses of preference pairs without a reference: CPO, SimPO and ORPO, see ``whet.algorithms.reference_free``."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.config.preferences import CPOLossType, check_dpo_options
from whet.errors import WhetValueError, check_choice, is_number
from whet.losses.closed_form import Loss, accepts_tensors
from whet.losses.dpo import dpo_loss, log_sigmoid, sigmoid
from whet.losses.terms import check_float_array, check_shapes, denominator

_SIDES = ("chosen_logprobs", "rejected_logprobs")


@accepts_tensors(*_SIDES)
def cpo_loss(
    chosen_logprobs: Any,
    rejected_logprobs: Any,
    *,
    chosen_lengths: Any,
    rejected_lengths: Any,
    beta: float = 0.1,
    loss_type: CPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
    nll_weight: float = 1.0,
    n_pairs: float | None = None,
    n_tokens: float | None = None,
) -> Loss:
    """Return the loss of Contrastive Preference Optimization, ``dpo_loss(reference-free) + nll_weight NLL(chosen)``.

    The first term is the mean over pairs of ``loss_type`` of ``dpo_loss`` with c and r the log-probs themselves, the
    second ``-sum(chosen_logprobs) / n_tokens``.

    Args:
        chosen_logprobs: (B,) float, NumPy or torch, summed over the completion, differentiable.
        rejected_logprobs: (B,), as chosen_logprobs.
        chosen_lengths: (B,), tokens per completion.
        rejected_lengths: (B,).
        beta: factor of the difference of log-probs.
        loss_type: of the difference.
        label_smoothing: probability that a label is wrong; only of "sigmoid".
        nll_weight: see above.
        n_pairs: pairs of the whole batch, so that micro-batches add up; None: B.
        n_tokens: tokens of the chosen completions of the whole batch; None: the sum of chosen_lengths.

    Returns:
        The loss, and the metrics of ``dpo_loss`` and ``nll_loss``. ``Loss`` of arrays; of tensors a pair of a scalar
        and the metrics.

    Raises:
        WhetTypeError, WhetValueError: as ``dpo_loss``.

    Source: Xu et al. 2024, https://arxiv.org/abs/2401.08417, eq. 3 to 5, and TRL 1.16's other loss types.
    """
    check_choice("cpo_loss", "loss_type", loss_type, CPOLossType)
    check_dpo_options("cpo_loss", loss_type, beta, label_smoothing)
    if not (is_number(nll_weight) and nll_weight >= 0):
        raise WhetValueError(f"cpo_loss: nll_weight is {nll_weight!r}, expected a finite number >= 0.")
    lengths = {"chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths}
    sides = chosen_logprobs, rejected_logprobs, None, None
    pair = dpo_loss(*sides, loss_type=loss_type, beta=beta, label_smoothing=label_smoothing, n_pairs=n_pairs, **lengths)
    return _add_nll("cpo_loss", pair, chosen_logprobs, chosen_lengths, nll_weight, n_tokens)


@accepts_tensors(*_SIDES)
def simpo_loss(
    chosen_logprobs: Any,
    rejected_logprobs: Any,
    *,
    chosen_lengths: Any,
    rejected_lengths: Any,
    beta: float = 2.0,
    margin: float = 0.5,
    label_smoothing: float = 0.0,
    n_pairs: float | None = None,
) -> Loss:
    """Return the loss of Simple Preference Optimization, the mean over pairs of

        -(1 - s) logsig(x) - s logsig(-x),    x = beta (chosen / chosen_lengths - rejected / rejected_lengths) - margin

    with s the label smoothing and logsig the logarithm of the sigmoid.

    Args:
        chosen_logprobs: (B,) float, NumPy or torch, summed over the completion, differentiable.
        rejected_logprobs: (B,), as chosen_logprobs.
        chosen_lengths: (B,), tokens per completion.
        rejected_lengths: (B,).
        beta: see above; the paper recommends 2 to 2.5 (TRL's default is 0.1).
        margin: gamma of the paper, 0.3 to 1.6.
        label_smoothing: probability that a label is wrong.
        n_pairs: pairs of the whole batch, so that micro-batches add up; None: B.

    Returns:
        The loss, and metrics as floats, means over the pairs: ``rewards/{chosen,rejected}`` (beta times log-probs per
        token), ``rewards/margins`` (their difference), ``rewards/accuracies`` (share with a difference above 0),
        ``logps/{chosen,rejected}``. ``Loss`` of arrays; of tensors a pair of a scalar and the metrics.

    Raises:
        WhetTypeError, WhetValueError: as ``dpo_loss``.

    Source: Meng et al. 2024, https://arxiv.org/abs/2405.14734, eq. 6.
    """
    check_dpo_options("simpo_loss", "sigmoid_norm", beta, label_smoothing)
    if not (is_number(margin) and margin >= 0):
        raise WhetValueError(f"simpo_loss: margin is {margin!r}, expected a finite number >= 0.")
    c, r, n_c, n_r, n_pairs = _per_token(
        "simpo_loss", chosen_logprobs, rejected_logprobs, chosen_lengths, rejected_lengths, n_pairs
    )
    x, s = beta * (c - r) - margin, label_smoothing
    value = -(1 - s) * log_sigmoid(x) - s * log_sigmoid(-x)
    slope = beta * (s * sigmoid(x) - (1 - s) * sigmoid(-x)) / n_pairs
    gradients = {"chosen_logprobs": slope / n_c, "rejected_logprobs": -slope / n_r}
    return Loss(float(value.sum() / n_pairs), _metrics(c, r, n_c, n_r, beta, n_pairs), gradients)


@accepts_tensors(*_SIDES)
def orpo_loss(
    chosen_logprobs: Any,
    rejected_logprobs: Any,
    *,
    chosen_lengths: Any,
    rejected_lengths: Any,
    beta: float = 0.1,
    n_pairs: float | None = None,
    n_tokens: float | None = None,
) -> Loss:
    """Return the loss of Odds Ratio Preference Optimization, ``NLL(chosen) - beta mean(logsig(x))`` with

        x = log(odds(p_c) / odds(p_r)),    odds(p) = p / (1 - p),    p = exp(log-prob per token)

    Computed in float64; a log-prob per token above -1e-15, whose odds are infinite in float64, counts as -1e-15.

    Args:
        chosen_logprobs: (B,) float, NumPy or torch, summed over the completion, differentiable.
        rejected_logprobs: (B,), as chosen_logprobs.
        chosen_lengths: (B,), tokens per completion.
        rejected_lengths: (B,).
        beta: lambda of the paper.
        n_pairs: pairs of the whole batch, so that micro-batches add up; None: B.
        n_tokens: tokens of the chosen completions of the whole batch; None: the sum of chosen_lengths.

    Returns:
        The loss, and the metrics of ``simpo_loss``, ``log_odds_ratio`` (mean of x) and ``nll_loss``. ``Loss`` of
        arrays; of tensors a pair of a scalar and the metrics.

    Raises:
        WhetTypeError, WhetValueError: as ``dpo_loss``.

    Source: Hong et al. 2024, https://arxiv.org/abs/2403.07691, eq. 6 and 7. Departure from TRL 1.16: the negative
        log-likelihood is of the completion, as in the paper; TRL's includes the prompt.
    """
    if not (is_number(beta) and beta >= 0):
        raise WhetValueError(f"orpo_loss: beta is {beta!r}, expected a finite number >= 0.")
    c, r, n_c, n_r, n_pairs = _per_token(
        "orpo_loss", chosen_logprobs, rejected_logprobs, chosen_lengths, rejected_lengths, n_pairs
    )
    other_c, other_r = (-np.expm1(np.minimum(each, -1e-15)) for each in (c, r))  # 1 - p
    x = (c - np.log(other_c)) - (r - np.log(other_r))
    slope = -beta * sigmoid(-x) / n_pairs
    metrics = {**_metrics(c, r, n_c, n_r, beta, n_pairs), "log_odds_ratio": float(x.sum() / n_pairs)}
    gradients = {"chosen_logprobs": slope / (other_c * n_c), "rejected_logprobs": -slope / (other_r * n_r)}
    pair = Loss(float(-beta * log_sigmoid(x).sum() / n_pairs), metrics, gradients)
    return _add_nll("orpo_loss", pair, chosen_logprobs, chosen_lengths, 1.0, n_tokens)


def _per_token(
    where: str, chosen: Any, rejected: Any, chosen_lengths: Any, rejected_lengths: Any, n_pairs: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """Return the log-probs per token and the lengths of both sides, and the number of pairs."""
    check_float_array(where, "chosen_logprobs", chosen, n_axes=1)
    others = {"rejected_logprobs": rejected, "chosen_lengths": chosen_lengths, "rejected_lengths": rejected_lengths}
    check_shapes(where, "chosen_logprobs", chosen, others)
    if not len(chosen):
        raise WhetValueError(f"{where}: chosen_logprobs is empty. Pass at least one pair.")
    n_c, n_r = (np.maximum(lengths, 1).astype(np.float64) for lengths in (chosen_lengths, rejected_lengths))
    count = denominator(where, "n_pairs", len(chosen) if n_pairs is None else n_pairs)
    return chosen.astype(np.float64) / n_c, rejected.astype(np.float64) / n_r, n_c, n_r, count


def _metrics(
    c: np.ndarray, r: np.ndarray, n_c: np.ndarray, n_r: np.ndarray, beta: float, n_pairs: float
) -> dict[str, float]:
    metrics = {
        "rewards/chosen": beta * c,
        "rewards/rejected": beta * r,
        "rewards/margins": beta * (c - r),
        "rewards/accuracies": c > r,
        "logps/chosen": c * n_c,
        "logps/rejected": r * n_r,
    }
    return {name: float(values.sum() / n_pairs) for name, values in metrics.items()}


def _add_nll(where: str, pair: Loss, chosen: Any, lengths: Any, weight: float, n_tokens: float | None) -> Loss:
    """Add ``weight`` times the negative log-likelihood per token of the chosen completions."""
    divisor = denominator(where, "n_tokens", np.asarray(lengths).sum() if n_tokens is None else n_tokens)
    nll = float(-chosen.sum(dtype=np.float64) / divisor)
    gradients = {**pair.gradients, "chosen_logprobs": pair.gradients["chosen_logprobs"] - weight / divisor}
    return Loss(pair.value + weight * nll, {**pair.metrics, "nll_loss": nll}, gradients)
