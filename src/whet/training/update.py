"""One optimizer update: gradients and metrics accumulated over the micro-batches of all ranks."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from whet.errors import WhetTypeError, WhetValueError
from whet.learner.batch import count_tokens
from whet.memory import MemoryWatch
from whet.training.distributed import Ranks
from whet.training.phases import phase
from whet.training.policy import Policy
from whet.training.reduction import ExactSum, shard_by_cost

TokenRows = Sequence[Sequence[Sequence[int]]]
"""Token ids of rows; a row is a prompt and its completions."""

Batch = TypeVar("Batch")


class Update:
    """Accumulated gradients and metrics of one optimizer update, over the micro-batches of all ranks.

    Args:
        memory: samples memory around each backward pass.
        policy: computes the gradients of its parameters.
        ranks: the ranks that share the micro-batches.
        seed: seed of dropout, keyed by micro-batch; None: torch's generator continues.
        exact: sums gradients independently of the sharding; None: plain float sums.

    Attributes:
        metrics: after the update, ``loss``, the other metrics, and ``grad_norm`` before clipping.
        maxima: after the update, the maximum of each metric passed as ``maxima``.
    """

    def __init__(
        self,
        memory: MemoryWatch,
        policy: Policy,
        ranks: Ranks,
        seed: int | None,
        exact: ExactSum | None,
    ) -> None:
        self.metrics = {"loss": 0.0}
        self.maxima: dict[str, float] = {}
        self._memory, self._policy = memory, policy
        self._ranks, self._seed, self._exact = ranks, seed, exact
        self._costs: list[int] = []
        self._digest = 0
        self._at, self._share = 0, 1.0
        self._added: list[tuple[int, dict[str, float], dict[str, float]]] = []
        memory.begin()

    def shard(self, batches: Sequence[Batch], rows: Sequence[TokenRows]) -> Iterator[Batch]:
        """Yield this rank's share of the micro-batches; call ``add`` for each before taking the next.

        Args:
            batches: all micro-batches, equal on every rank.
            rows: the token ids of each micro-batch: their counts balance the load, and ranks compare their digest.
        """
        self._costs, self._share = [count_tokens(part) for part in rows], 1 / max(1, len(batches))
        self._digest = zlib.crc32(repr(rows).encode()) if self._ranks.size > 1 else 0
        for i in shard_by_cost(self._costs, self._ranks.size)[self._ranks.rank]:
            self._at = i
            if self._seed is not None:
                self._policy.seed(int(np.random.SeedSequence([self._seed, i]).generate_state(1, np.uint64)[0]) >> 1)
            yield batches[i]

    def add(
        self,
        loss: float,
        grad: np.ndarray,
        metrics: Mapping[str, float],
        maxima: Mapping[str, float] | None = None,
        grad_entropy: np.ndarray | None = None,
        grad_mean: np.ndarray | None = None,
    ) -> None:
        """Add the loss of a micro-batch, its gradient, and its metrics: a sum, or a maximum for ``maxima``.

        Args:
            loss: the micro-batch's share of the batch's loss.
            grad: d loss / d the last log-probs, (B, C), or rewards, (B,), of the policy.
            metrics: summed over the micro-batches.
            maxima: metrics of which the maximum counts.
            grad_entropy: (B, C), d loss / d the entropy of the last log-probs; None: the loss does not depend on it.
            grad_mean: (B, C), d loss / d the last means of the policy, if it returned some.

        Raises:
            WhetTypeError: there are several ranks, and the micro-batch is not from ``shard``.
        """
        if self._ranks.size > 1 and not self._costs:
            raise WhetTypeError(
                "Update.add: the micro-batches were not distributed to the ranks. Take them from shard()."
            )
        self._sample_memory()
        with phase("backward"):
            added = self._policy.backward(grad, self._share, grad_entropy, grad_mean)
        self._sample_memory()
        self._added.append((self._at, {"loss": loss + added.pop("loss", 0.0), **metrics, **added}, dict(maxima or {})))
        if self._exact is not None:
            self._exact.add(self._policy.gradients())
            self._policy.zero_grad()

    def reduce(self, in_bfloat16: bool) -> None:
        """All-reduce gradients, rounded to bfloat16 or as stored, and sum metrics over the micro-batches of all ranks.

        Raises:
            WhetValueError: the ranks have different batches.
            RankError: a rank failed.
        """
        exact, on_this_rank = self._exact, self._has_gradients()
        shares = self._ranks.all_gather_checked((self._digest, self._added, on_this_rank))
        if any(digest != self._digest for digest, _, _ in shares):
            raise WhetValueError(
                "train: the ranks have different batches. Give all ranks the same rows in the same order; each rank "
                "takes its share, so that the data needs no DistributedSampler."
            )
        # In the order of the micro-batches, independent of the rank that computed them.
        for _, metrics, maxima in sorted(itertools.chain(*(added for _, added, _ in shares)), key=lambda part: part[0]):
            for name, value in metrics.items():
                self.metrics[name] = self.metrics.get(name, 0.0) + value
            for name, value in maxima.items():
                self.maxima[name] = max(self.maxima.get(name, -math.inf), value)
        on_any_rank = [any(flags) for flags in zip(*(flags for _, _, flags in shares), strict=True)]
        if exact is not None:
            exact.finish(self._policy.gradients(on_any_rank), self._ranks)
        elif self._ranks.size > 1:
            self._ranks.all_reduce([g for g in self._policy.gradients(on_any_rank) if g is not None], in_bfloat16)

    def _has_gradients(self) -> list[bool]:
        """Return for each parameter whether this rank has a gradient of it; empty for a single rank."""
        if self._exact is not None:
            return [self._exact.has(i) for i in range(len(self._policy.gradients()))]
        return [gradient is not None for gradient in self._policy.gradients()] if self._ranks.size > 1 else []

    def _sample_memory(self) -> None:
        self._memory.sample(self._policy.gradient_bytes())
