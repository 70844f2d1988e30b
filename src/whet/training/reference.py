"""The frozen reference of a policy: which module it is, and its log-probs of preference pairs, computed once.

Knows no trainer: who computes log-probs passes that in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.training.distributed import Ranks
from whet.training.reference_cache import ReferenceCache, Sums, row_digest

TokenRow = tuple[list[int], list[int], list[int]]
"""Token ids of a pair: prompt, chosen and rejected completion."""


class Reference:
    """The model that a loss compares the policy with.

    Args:
        policy: the model that is trained. Of a PEFT model the base, with the adapters off, is the reference.
        model: a module of its own; None: that base, or else a copy of policy as it is now.
        copied: whether such a copy is made. Without one the policy itself is the reference until it is trained.

    Attributes:
        model: the module of its own; None: there is none.
    """

    def __init__(self, policy: nn.Module, model: nn.Module | None, copied: bool) -> None:
        self._policy: Any = policy
        self.has_adapters = hasattr(policy, "peft_config") and hasattr(policy, "disable_adapter")
        if model is None and copied and not self.has_adapters:
            model = copy.deepcopy(policy).requires_grad_(False)
        self.model = model

    @contextmanager
    def as_module(self) -> Iterator[nn.Module]:
        """The module that computes the reference's log-probs, as long as the context lasts."""
        if self.model is None and self.has_adapters:
            with self._policy.disable_adapter():
                yield self._policy
        else:
            yield self._policy if self.model is None else self.model

    def is_policy(self) -> bool:
        """Whether the reference is the policy as it was before its first update."""
        return self.model is None and not self.has_adapters

    def open_cache(self, folder: str, arithmetic: str) -> ReferenceCache:
        """The log-probs that earlier runs left in ``folder`` for these weights and this arithmetic."""
        if self.model is not None:
            return ReferenceCache(folder, self.model, arithmetic)
        return ReferenceCache(folder, self._policy, arithmetic, frozen_only=self.has_adapters)


class ReferenceSums:
    """The reference's summed log-probs of pairs, by their token ids: kept over epochs, and in checkpoints."""

    def __init__(self) -> None:
        self._sums: dict[str, Sums] = {}

    def get(self, row: Sequence[Sequence[int]]) -> Sums | None:
        """The sums of a row; None: not known."""
        return self._sums.get(row_digest(row)) if self._sums else None

    def add(
        self,
        rows: Sequence[TokenRow],
        compute: Callable[[list[TokenRow]], list[Sums]],
        batch_size: int,
        open_cache: Callable[[], ReferenceCache] | None,
        ranks: Ranks,
    ) -> list[Sums]:
        """The sums of all rows; ``compute``, in batches, gives those that neither this nor the cache has.

        Rank 0 alone reads the cache and writes it.
        """
        keys = [row_digest(row) for row in rows]
        unknown = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._sums}
        cache: ReferenceCache | None = None

        def look_up(opened: Callable[[], ReferenceCache]) -> dict[str, Sums]:
            nonlocal cache
            cache = opened()
            return {key: sums for key, row in unknown.items() if (sums := cache[row])}

        if open_cache and unknown:
            self._sums |= ranks.from_first(partial(look_up, open_cache))
        left = [(key, row) for key, row in unknown.items() if key not in self._sums]
        for start in range(0, len(left), batch_size):
            batch = dict(left[start : start + batch_size])
            new = compute(list(batch.values()))
            if cache:
                cache.add(zip(batch.values(), new, strict=True))
            self._sums |= zip(batch, new, strict=True)
        return [self._sums[key] for key in keys]

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: digests of the rows (N, 16) uint8, and chosen and rejected sums (N, 2) float64."""
        if not self._sums:
            return {}
        rows = torch.tensor([list(bytes.fromhex(key)) for key in self._sums], dtype=torch.uint8)
        return {"rows": rows, "sums": torch.tensor(list(self._sums.values()), dtype=torch.float64)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Know what ``tensors`` returned."""
        if tensors:
            rows, sums = tensors["rows"].tolist(), tensors["sums"].tolist()
            self._sums = {bytes(key).hex(): (c, r) for key, (c, r) in zip(rows, sums, strict=True)}
