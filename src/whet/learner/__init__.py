"""Learning adapters and norms natively, without torch: packed batches, and the learner of a packed base."""

from __future__ import annotations

from whet.learner.batch import Logprobs
from whet.learner.learner import Learner
from whet.learner.trained import TrainedAdapter, TrainedNorm

__all__ = ["Learner", "Logprobs", "TrainedAdapter", "TrainedNorm"]
