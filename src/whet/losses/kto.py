"""Loss of Kahneman-Tversky Optimization, see ``whet.algorithms.kto``."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.config.preferences import KTOLossType, check_kto_options
from whet.errors import WhetTypeError, WhetValueError, is_number
from whet.losses.closed_form import Loss, accepts_tensors
from whet.losses.dpo import sigmoid
from whet.losses.terms import check_float_array, check_shapes, denominator


@accepts_tensors("logprobs")
def kto_loss(
    logprobs: Any,
    ref_logprobs: Any,
    labels: Any,
    *,
    kl: float = 0.0,
    loss_type: KTOLossType = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    n_rows: float | None = None,
    n_desirable: float | None = None,
) -> Loss:
    """Return the loss of completions that are each labelled desirable or undesirable, averaged over rows.

    With c the log-ratio ``logprobs - ref_logprobs``, sig the sigmoid and w the weight of the row's label:

        kto                  desirable: w (1 - sig(beta (c - kl)))    undesirable: w (1 - sig(beta (kl - c)))
        apo_zero_unpaired    desirable: w (1 - sig(beta c))           undesirable: w sig(beta c)

    Args:
        logprobs: (B,) float, NumPy or torch, summed over the completion, differentiable.
        ref_logprobs: (B,), the reference's.
        labels: (B,) bool, True for desirable completions.
        kl: estimate of KL(policy || reference) in nats, which counts as a constant; only for "kto".
        loss_type: see above.
        beta: strength of the KL regularisation towards the reference.
        desirable_weight: factor of the loss of desirable completions.
        undesirable_weight: factor of the loss of undesirable completions.
        n_rows: rows of the whole batch, so that losses and metrics of micro-batches add up; None: B.
        n_desirable: desirable rows of the whole batch; None: those among labels.

    Returns:
        The loss, and metrics as floats: means over the desirable rows of the batch ``rewards/chosen`` (beta c) and
        ``logps/chosen``, over the undesirable ones ``rewards/rejected`` and ``logps/rejected``, and
        ``rewards/margins``, the difference of the rewards. A batch without one kind lacks its metrics, and the margins.
        ``Loss`` of arrays; of tensors a pair of a scalar, in the dtype of logprobs, and the metrics.

    Raises:
        WhetTypeError: an argument is neither array nor tensor, or has the wrong dtype or number of axes.
        WhetValueError: shapes differ, there are no rows, loss_type is unknown, a setting is out of range, or kl has no
            effect.

    Source: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, eq. 7 and 8; D'Oosterlinck et al. 2024,
        https://arxiv.org/abs/2408.06266, eq. 7 by rows.
    """
    check_kto_options("kto_loss", loss_type, beta, desirable_weight, undesirable_weight)
    if not (is_number(kl) and kl >= 0):
        raise WhetValueError(f"kto_loss: kl is {kl!r}, expected a finite number >= 0.")
    if kl and loss_type != "kto":
        raise WhetValueError(f"kto_loss: kl is {kl!r} and has no effect: {loss_type!r} has no baseline. Pass 0.")
    check_float_array("kto_loss", "logprobs", logprobs, n_axes=1)
    check_shapes("kto_loss", "logprobs", logprobs, {"ref_logprobs": ref_logprobs, "labels": labels})
    if labels.dtype != bool:
        raise WhetTypeError(f"kto_loss: labels is {labels.dtype}, expected bool, True for desirable completions.")
    if not len(logprobs):
        raise WhetValueError("kto_loss: logprobs is empty. Pass at least one row.")
    n_rows = denominator("kto_loss", "n_rows", len(labels) if n_rows is None else n_rows)
    n_good = denominator("kto_loss", "n_desirable", labels.sum() if n_desirable is None else n_desirable, least=0)

    c = logprobs.astype(np.float64) - ref_logprobs
    sign, weight = np.where(labels, 1.0, -1.0), np.where(labels, desirable_weight, undesirable_weight)
    x = beta * sign * (c - kl)
    value = weight * sigmoid(-x)  # 1 - sigmoid(x)
    slope = -weight * beta * sign * sigmoid(x) * sigmoid(-x)
    metrics: dict[str, float] = {}
    for side, of_side, count in (("chosen", labels, n_good), ("rejected", ~labels, n_rows - n_good)):
        if count > 0:
            metrics[f"rewards/{side}"] = float(beta * c[of_side].sum() / count)
            metrics[f"logps/{side}"] = float(logprobs[of_side].sum(dtype=np.float64) / count)
    if 0 < n_good < n_rows:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return Loss(float(value.sum() / n_rows), metrics, {"logprobs": slope / n_rows})
