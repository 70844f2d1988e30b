"""Autograd functions, layers and the optimizer on Whet's kernels. Importing this package imports torch."""

from __future__ import annotations

from whet.errors import MissingExtraError
from whet.system.openmp import wait_passively

try:
    wait_passively()  # read when torch is loaded
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("whet.nn", "torch", "train") from error

from whet.nn.accelerate import Acceleration, accelerate
from whet.nn.causal_lm import CompletionLogprobs, completion_logprobs
from whet.nn.frozen import frozen_model
from whet.nn.optim import AdamW

__all__ = ["Acceleration", "AdamW", "CompletionLogprobs", "accelerate", "completion_logprobs", "frozen_model"]
