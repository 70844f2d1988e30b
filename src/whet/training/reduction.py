"""Work and gradients of ranks: micro-batches with balanced costs, and sums that do not depend on their distribution."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whet.training.distributed import Ranks

if TYPE_CHECKING:
    from torch import Tensor

_EXACT_QUANTUM = 2.0**-40
"""Gradients of ``deterministic_reduction`` are rounded to multiples of this, 1e-4 of AdamW's epsilon.

Sums below 2**52 quanta, 4,096, are exact in float64 and independent of the order; larger sums are rounded to float64
and depend on the order."""


def shard_by_cost(costs: Sequence[float], size: int) -> list[list[int]]:
    """Assign items to ``size`` ranks with balanced costs: the most expensive item first, to the rank with the least
    load.

    Returns:
        The indices of each rank's items, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(size), key=lambda rank: (loads[rank], rank))
        shares[rank].append(i)
        loads[rank] += costs[i]
    return [sorted(share) for share in shares]


class ExactSum:
    """Order-independent sum of the gradients of micro-batches, bitwise equal for any sharding.

    Gradients are rounded to multiples of 2**-40, whose sums are exact in float64. The range of float64 needs neither an
    adaptive exponent nor a retry after overflow. The buffers, 8 bytes per parameter, are kept between updates: page
    faults of new buffers would cost more than the sums.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        self._added: set[int] = set()

    def begin(self) -> None:
        """Begin an update with zero gradients."""
        self._added.clear()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradient of each parameter, unless None."""
        # In float64, x + c - c with c = 1.5 * 2**52 quanta rounds x to whole quanta, ties to even.
        shift = 1.5 * 2.0**52 * _EXACT_QUANTUM
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            is_first = i not in self._added
            buffer = self._buffer(i, gradient)
            for values, part in zip(gradient.reshape(-1).split(1 << 18), buffer.split(1 << 18), strict=True):
                rounded = values.double().add_(shift).sub_(shift)
                if is_first:
                    part.copy_(rounded)
                else:
                    part += rounded
            self._added.add(i)

    def has(self, index: int) -> bool:
        """Whether a gradient of the parameter at ``index`` was added."""
        return index in self._added

    def finish(self, gradients: Sequence[Tensor | None], ranks: Ranks) -> None:
        """Overwrite the gradients, unless None, with the sums over all ranks."""
        kept = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        sums = {i: self._buffer(i, gradient) for i, gradient in kept.items()}
        for i in sums.keys() - self._added:
            sums[i].zero_()
        ranks.all_reduce(list(sums.values()))
        for i, gradient in kept.items():
            gradient.copy_(sums[i].view_as(gradient))

    def _buffer(self, index: int, gradient: Tensor) -> Tensor:
        import torch

        if index not in self._buffers:
            self._buffers[index] = torch.empty(gradient.numel(), dtype=torch.float64, device=gradient.device)
        return self._buffers[index]


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a checksum of the bits of the tensors."""
    import torch

    def words(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)

    sums = [int(words(tensor).sum(dtype=torch.int64)) for tensor in tensors]
    return zlib.crc32(repr(sums).encode())
