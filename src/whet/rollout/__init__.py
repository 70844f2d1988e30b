"""Sources of completions: one protocol, and the engines that follow it.

``whet.rollout.torch_engine.TorchEngine`` samples from a live torch module; importing it imports torch.
"""

from __future__ import annotations

from whet.rollout.protocol import RolloutEngine

__all__ = ["RolloutEngine"]
