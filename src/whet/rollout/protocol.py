"""The interface between an algorithm and the engine that samples its completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from whet.config.sampling import Completion, SamplingParams


class RolloutEngine(Protocol):
    """Samples completions from the current policy. Algorithms see sampling through this only."""

    policy_version: int
    """How many times ``sync`` has been called; every completion records the version that sampled it."""

    def generate(self, prompt_ids: Sequence[Sequence[int]], n: int, sampling: SamplingParams) -> list[list[Completion]]:
        """Sample ``n`` completions for each prompt: ``result[prompt][sample]``.

        Prompts are token ids without padding and may differ in length. Settings that it cannot follow are errors. An
        engine may also take ``keys=``, a ``StreamKey`` for each prompt, with which a batch is divided among calls; have
        ``generate_each``, which takes the same and yields ``result[prompt]`` in order, each as
        soon as it is complete; and ``release_memory()``, which gives the memory of sampling back to the system, and
        returns how many bytes that is.
        """
        ...

    def sync(self, model: Any) -> None:
        """Load the weights of ``model``, all of them or none."""
        ...
