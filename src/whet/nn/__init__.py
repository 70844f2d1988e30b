"""The parts of Whet that live inside a torch graph. Importing this package imports torch."""

from __future__ import annotations

from whet.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("whet.nn", "torch", "train") from error

from whet.nn.causal_lm import CompletionLogprobs, completion_logprobs

__all__ = ["CompletionLogprobs", "completion_logprobs"]
