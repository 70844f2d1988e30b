"""Losses of supervised fine-tuning, averaged over the completion tokens that count; see ``whet.algorithms.sft``."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.config.settings import SFTLossType
from whet.errors import WhetValueError, check_choice
from whet.losses.closed_form import Loss, accepts_tensors
from whet.losses.terms import check_float_array, check_shapes, denominator, masked


@accepts_tensors("logprobs", "mean_logprobs")
def sft_loss(
    logprobs: Any,
    completion_mask: Any,
    *,
    mean_logprobs: Any | None = None,
    loss_type: SFTLossType = "nll",
    label_smoothing: float = 0.0,
    n_tokens: float | None = None,
) -> Loss:
    """Return the mean over tokens of a function of their log-probs, ``sum l m / n_tokens``, in nats.

        nll    l = -log p
        dft    l = -p log p, with the factor p constant in the gradient: -p dlog p

    With label smoothing e, and M the mean of the log-probs of the vocabulary at the position, nll becomes the
    cross-entropy with the target (1 - e) [v = y] + e / V: ``l = -(1 - e) log p - e M``.

    A masked position contributes nothing to value and gradient, even if it is NaN.

    Args:
        logprobs: (B, T) float, log-probs of the tokens, NumPy or torch, differentiable.
        completion_mask: (B, T) bool, True on the tokens that count.
        mean_logprobs: (B, T) float, M, differentiable; required by label smoothing.
        loss_type: see above.
        label_smoothing: e, in [0, 1); only of "nll".
        n_tokens: counting tokens of the whole batch, so that micro-batches add up; None: counting tokens of this
            batch.

    Returns:
        The loss, and as metric ``token_probability``, the mean probability of the tokens: ``Loss`` of arrays; of
        tensors a pair of a scalar, in the dtype of logprobs, and the metrics.

    Raises:
        WhetTypeError: an argument is neither array nor tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ, loss_type is unknown, label_smoothing is out of range or without effect, or
            n_tokens is not a number >= 0.

    Source: dft is Dynamic Fine-Tuning (Wu et al. 2025, https://arxiv.org/abs/2508.05629, eq. 9); label smoothing is
        Szegedy et al. 2015 (https://arxiv.org/abs/1512.00567, section 7), as transformers' ``LabelSmoother``.
    """
    check_choice("sft_loss", "loss_type", loss_type, SFTLossType)
    check_float_array("sft_loss", "logprobs", logprobs, n_axes=2)
    others = {"completion_mask": completion_mask}
    check_shapes("sft_loss", "logprobs", logprobs, others, {"mean_logprobs": mean_logprobs})
    if not (0 <= label_smoothing < 1 and (loss_type == "nll" or not label_smoothing)):
        raise WhetValueError(
            f"sft_loss: label_smoothing is {label_smoothing!r} with loss_type {loss_type!r}, expected a number in "
            f"[0, 1) with 'nll', and 0 with others."
        )
    if bool(label_smoothing) != (mean_logprobs is not None):
        given = "missing" if mean_logprobs is None else "given"
        raise WhetValueError(
            f"sft_loss: mean_logprobs is {given}, and label_smoothing is {label_smoothing}. Pass both, or neither."
        )
    n_tokens = denominator("sft_loss", "n_tokens", completion_mask.sum() if n_tokens is None else n_tokens)
    logprobs = masked(logprobs, completion_mask)
    probabilities = masked(np.exp(logprobs), completion_mask)
    factors = (1 - label_smoothing) * (probabilities if loss_type == "dft" else completion_mask) / n_tokens
    value, gradients = -(factors * logprobs).sum(), {"logprobs": -factors}
    if mean_logprobs is not None:
        gradients["mean_logprobs"] = -label_smoothing * completion_mask / n_tokens
        value += (gradients["mean_logprobs"] * masked(mean_logprobs, completion_mask)).sum()
    return Loss(float(value), {"token_probability": float(probabilities.sum() / n_tokens)}, gradients)
