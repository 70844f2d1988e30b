"""Log-probabilities of tokens under a language model's logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetValueError
from whet.ops import inputs


def naive_token_logprobs(
    logits: np.ndarray, token_ids: np.ndarray, *, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Reference implementation of ``compute_token_logprobs`` with entropy, in the logits' own precision."""
    z = logits / logits.dtype.type(temperature)
    z = z - z.max(axis=1, keepdims=True)
    logprobs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    with np.errstate(invalid="ignore"):
        entropy = -np.where(logprobs == -np.inf, 0, np.exp(logprobs) * logprobs).sum(axis=1)
    return logprobs[np.arange(len(token_ids)), token_ids], entropy


def compute_token_logprobs(
    logits: Any, token_ids: Any, *, temperature: float = 1.0, return_entropy: bool = False
) -> Any:
    """Return log softmax(logits / temperature) at one token per row: log pi(y) = z_y - log sum_i exp(z_i).

    One pass over the logits without an (N, V) temporary. Exponentials are float32, their sums float64; the relative
    error is at most 1e-6, also for log-probabilities close to 0.

    Args:
        logits: (N, V), float32 (NumPy or torch) or bfloat16 (torch), on the CPU.
        token_ids: (N,) integers in [0, V).
        temperature: divides the logits; greater than 0.
        return_entropy: also return H = log Z - sum_i pi_i z_i, in nats, of softmax(logits / temperature).

    Returns:
        logprobs (N,) float32, NumPy or torch like logits, or (logprobs, entropy). A token with logit -inf has
        probability 0; a row with NaN or inf, or of only -inf, gives NaN.

    Raises:
        WhetValueError: shapes disagree, V = 0, a token id outside [0, V), temperature not above 0, or logits that
            require grad or are not on the CPU.
        WhetTypeError: logits are not float32 or bfloat16, or token_ids are not integers.
    """
    name = "compute_token_logprobs"
    if not (isinstance(temperature, float) and 1e-37 < temperature < 1e37):
        temperature = inputs.as_float32_factor(name, "temperature", temperature)
    ids = inputs.as_integers(name, "token_ids", token_ids)
    shape = tuple(np.shape(logits))
    if len(shape) != 2 or shape[1] == 0 or ids.shape != shape[:1]:
        raise WhetValueError(
            f"{name}: logits has shape {shape} and token_ids {ids.shape}, expected (N, V) with V >= 1 and (N,)."
        )
    # One comparison for both ends: a negative id is a huge unsigned integer.
    if len(ids) and int(ids.view(np.uint64).max()) >= shape[1]:
        bad = int(np.flatnonzero((ids < 0) | (ids >= shape[1]))[0])
        raise WhetValueError(
            f"{name}: token_ids[{bad}] is {ids[bad]}, outside the vocabulary of {shape[1]}. "
            "Give padding a valid id, and mask it afterwards."
        )
    result = _core.token_logprobs(logits, ids, temperature, bool(return_entropy))
    if result is NotImplemented:
        dtypes = ("float32", "bfloat16") if inputs.is_tensor(logits) else ("float32",)
        plain = inputs.as_plain_array(name, "logits", logits, dtypes)
        result = inputs.check_computed(name, _core.token_logprobs(plain, ids, temperature, bool(return_entropy)))
    return result
