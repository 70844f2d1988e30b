"""A torch module as the policy of a trainer: log-probs as NumPy arrays, and the backward pass from their gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from whet.errors import WhetTypeError
from whet.learner.batch import Logprobs
from whet.nn.causal_lm import completion_logprobs


class TorchPolicy:
    """Log-probs of completions under a module, in its current mode, and their gradient."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: Tensor | None = None

    def logprobs(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        *,
        completion_mask: Sequence[Sequence[bool]] | None = None,
        temperature: float = 1.0,
        return_entropy: bool = False,
    ) -> Logprobs:
        """Return log-probs as ``completion_logprobs`` does; ``backward`` follows."""
        self._kept, entropy, mask = completion_logprobs(
            self._model, prompt_ids, completion_ids, completion_mask=completion_mask, temperature=temperature,
            return_entropy=return_entropy,
        )  # fmt: skip
        arrays = [None if x is None else x.detach().cpu().numpy() for x in (self._kept, entropy, mask)]
        return Logprobs(*arrays)  # pyright: ignore[reportArgumentType]

    def backward(self, grad_logprobs: np.ndarray) -> None:
        """Add the gradients of the parameters, from the gradient of the last log-probs, (B, C)."""
        kept, self._kept = self._kept, None
        if kept is None:
            raise WhetTypeError("backward: it follows logprobs, once. Call logprobs first.")
        kept.backward(torch.from_numpy(grad_logprobs).to(kept))
