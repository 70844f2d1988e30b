"""Reward and preference functions: called with the arguments they declare, in this process or in killable ones."""

from __future__ import annotations

from whet.rewards.functions import RewardBatch, RewardFunctions, call_preference, load_function

__all__ = ["RewardBatch", "RewardFunctions", "call_preference", "load_function"]
