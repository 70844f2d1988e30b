"""Interface between an algorithm and the engine that samples its completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from whet.config.sampling import Completion, SamplingParams


class RolloutEngine(Protocol):
    """Engine that samples completions from the current policy. Algorithms sample only through this interface."""

    policy_version: int
    """Number of ``sync`` calls; every completion records the version that sampled it."""

    def generate(self, prompt_ids: Sequence[Sequence[int]], n: int, sampling: SamplingParams) -> list[list[Completion]]:
        """Sample ``n`` completions for each prompt: ``result[prompt][sample]``.

        Prompts are token ids without padding and may differ in length. Unsupported settings are errors. Optional
        features of an engine: ``keys=``, a ``StreamKey`` for each prompt, with which a batch can be split among calls;
        ``generate_each``, which takes the same arguments and yields ``result[prompt]`` in order, as soon as each is
        complete; ``release_memory()``, which returns the memory of sampling to the system, and its size in bytes; and
        ``snapshot(model)``, which returns a copy of the weights that ``sync`` takes, so that later training does not
        change them, or, if ``samples_snapshots`` is true, that ``generate`` takes as ``weights=``, in several threads.
        """
        ...

    def sync(self, model: Any) -> None:
        """Load the weights of ``model`` atomically."""
        ...
