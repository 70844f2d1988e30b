"""Sources of completions: the ``RolloutEngine`` protocol and engines that implement it.

``whet.rollout.torch_engine.TorchEngine`` samples from a live torch module; importing it imports torch.
"""

from __future__ import annotations

from whet.rollout.protocol import RolloutEngine

__all__ = ["RolloutEngine"]
