"""Losses of supervised fine-tuning, averaged over the completion tokens that count; see ``whet.algorithms.sft``."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.config.settings import SFTLossType
from whet.errors import check_choice
from whet.losses.closed_form import Loss, accepts_tensors
from whet.losses.terms import check_float_array, check_shapes, denominator, masked


@accepts_tensors("logprobs")
def sft_loss(
    logprobs: Any, completion_mask: Any, *, loss_type: SFTLossType = "nll", n_tokens: float | None = None
) -> Loss:
    """Return the mean over tokens of a function of their log-probs, ``sum l m / n_tokens``, in nats.

        nll    l = -log p
        dft    l = -p log p, with the factor p constant in the gradient: -p dlog p

    A masked position contributes nothing to value and gradient, even if it is NaN.

    Args:
        logprobs: (B, T) float, log-probs of the tokens, NumPy or torch, differentiable.
        completion_mask: (B, T) bool, True on the tokens that count.
        loss_type: see above.
        n_tokens: counting tokens of the whole batch, so that micro-batches add up; None: counting tokens of this
            batch.

    Returns:
        The loss, and as metric ``token_probability``, the mean probability of the tokens: ``Loss`` of arrays; of
        tensors a pair of a scalar, in the dtype of logprobs, and the metrics.

    Raises:
        WhetTypeError: an argument is neither array nor tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ, loss_type is unknown, or n_tokens is not a number >= 0.

    Source: dft is Dynamic Fine-Tuning (Wu et al. 2025, https://arxiv.org/abs/2508.05629, eq. 9).
    """
    check_choice("sft_loss", "loss_type", loss_type, SFTLossType)
    check_float_array("sft_loss", "logprobs", logprobs, n_axes=2)
    check_shapes("sft_loss", "logprobs", logprobs, {"completion_mask": completion_mask})
    n_tokens = denominator("sft_loss", "n_tokens", completion_mask.sum() if n_tokens is None else n_tokens)
    logprobs = masked(logprobs, completion_mask)
    probabilities = masked(np.exp(logprobs), completion_mask)
    factors = (probabilities if loss_type == "dft" else completion_mask) / n_tokens
    return Loss(
        value=float(-(factors * logprobs).sum()),
        metrics={"token_probability": float(probabilities.sum() / n_tokens)},
        gradients={"logprobs": -factors},
    )
