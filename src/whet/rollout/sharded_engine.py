"""A RolloutEngine over the engines of all ranks: each rank samples an equal share of the completions.

Completions depend on their ``StreamKey`` only, so that n ranks sample the completions of one process.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from whet.config.sampling import Completion, SamplingParams, StreamKey
from whet.errors import WhetTypeError

if TYPE_CHECKING:
    from whet.rollout.protocol import RolloutEngine
    from whet.training.distributed import Ranks


class ShardedEngine:
    """Sample on the engines of all ranks.

    Args:
        ranks: all ranks.
        engine: the engine of this rank.
    """

    def __init__(self, ranks: Ranks, engine: RolloutEngine) -> None:
        self.ranks, self.engine = ranks, engine

    def generate(self, prompt_ids: Sequence[Sequence[int]], n: int, sampling: SamplingParams) -> list[list[Completion]]:
        """Sample ``n`` completions for each prompt; every rank gets all of them, as ``result[prompt][sample]``."""
        shares = self.ranks.gather_results(lambda: self._generate_share(prompt_ids, n, sampling))
        found = dict(itertools.chain(*shares))
        return [[found[i, j] for j in range(n)] for i in range(len(prompt_ids))]

    def _generate_share(
        self, prompt_ids: Sequence[Sequence[int]], n: int, sampling: SamplingParams
    ) -> list[tuple[tuple[int, int], Completion]]:
        """Return this rank's completions, each with the indices of its prompt and sample."""
        generate: Any = self.engine.generate
        parameters = inspect.signature(generate).parameters.values()
        if not any(p.name == "keys" or p.kind is p.VAR_KEYWORD for p in parameters):
            raise WhetTypeError(
                f"{type(self.engine).__name__}.generate takes no keys, by which ranks divide a batch. Add keys=None "
                f"(a whet.StreamKey for each prompt), or train in one process."
            )
        found = []
        for count, keys in split_samples(len(prompt_ids), n, self.ranks.rank, self.ranks.size).items():
            groups = generate([prompt_ids[key.prompt_index] for key in keys], count, sampling, keys=keys)
            for key, group in zip(keys, groups, strict=True):
                found += [((key.prompt_index, key.first_sample + j), c) for j, c in enumerate(group)]
        return found


def split_samples(n_prompts: int, n: int, rank: int, size: int) -> dict[int, list[StreamKey]]:
    """Return a rank's samples of ``n_prompts`` groups of ``n``: samples per prompt -> prompts and first samples."""
    first, end = (n_prompts * n * r // size for r in (rank, rank + 1))
    keys: dict[int, list[StreamKey]] = {}
    if first == end:  # more ranks than samples
        return keys
    for i in range(first // n, math.ceil(end / n)):
        start, stop = max(first, i * n), min(end, (i + 1) * n)
        keys.setdefault(stop - start, []).append(StreamKey(i, start - i * n))
    return keys
