"""Loss of supervised fine-tuning: ``l = -log pi(y_t | x, y_<t)``, averaged over the completion tokens that count."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.losses.closed_form import Loss, accepts_tensors
from whet.losses.terms import check_float_array, check_shapes, denominator, masked


@accepts_tensors("logprobs")
def sft_loss(logprobs: Any, completion_mask: Any, *, n_tokens: float | None = None) -> Loss:
    """Return the mean negative log-likelihood, ``-sum logprobs m / n_tokens``, in nats.

    A masked position contributes nothing to value and gradient, even if it is NaN.

    Args:
        logprobs: (B, T) float, log-probs of the tokens, NumPy or torch, differentiable.
        completion_mask: (B, T) bool, True on the tokens that count.
        n_tokens: counting tokens of the whole batch, so that micro-batches add up; None: counting tokens of this
            batch.

    Returns:
        The loss, and as metric ``token_probability``, the mean probability of the tokens: ``Loss`` of arrays; of
        tensors a pair of a scalar, in the dtype of logprobs, and the metrics.

    Raises:
        WhetTypeError: an argument is neither array nor tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ, or n_tokens is not a number >= 0.
    """
    check_float_array("sft_loss", "logprobs", logprobs, n_axes=2)
    check_shapes("sft_loss", "logprobs", logprobs, {"completion_mask": completion_mask})
    n_tokens = denominator("sft_loss", "n_tokens", completion_mask.sum() if n_tokens is None else n_tokens)
    logprobs = masked(logprobs, completion_mask)
    probability = masked(np.exp(logprobs), completion_mask).sum() / n_tokens
    return Loss(
        value=float(-logprobs.sum() / n_tokens),
        metrics={"token_probability": float(probability)},
        gradients={"logprobs": completion_mask * (-1 / n_tokens)},
    )
