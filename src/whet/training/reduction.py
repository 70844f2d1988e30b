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
        self._buffers: dict[Tensor, Tensor] = {}
        self._added: set[Tensor] = set()

    def begin(self) -> None:
        """Begin an update with zero gradients."""
        self._added.clear()

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Add the gradients of the parameters, and set them to None."""
        # In float64, x + c - c with c = 1.5 * 2**52 quanta rounds x to whole quanta, ties to even.
        shift = 1.5 * 2.0**52 * _EXACT_QUANTUM
        for p in parameters:
            if p.grad is None:
                continue
            is_first = p not in self._added
            for gradient, part in zip(p.grad.reshape(-1).split(1 << 18), self._buffer(p).split(1 << 18), strict=True):
                rounded = gradient.double().add_(shift).sub_(shift)
                if is_first:
                    part.copy_(rounded)
                else:
                    part += rounded
            p.grad = None
            self._added.add(p)

    def has(self, parameter: Tensor) -> bool:
        """Whether a gradient of ``parameter`` was added."""
        return parameter in self._added

    def finish(self, parameters: Sequence[Tensor], ranks: Ranks) -> None:
        """Set the gradients of the parameters to the sums over all ranks."""
        sums = [self._buffer(p) if p in self._added else self._buffer(p).zero_() for p in parameters]
        ranks.all_reduce(sums, None)
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total.to(p.dtype).view_as(p)

    def _buffer(self, parameter: Tensor) -> Tensor:
        import torch

        if parameter not in self._buffers:
            self._buffers[parameter] = torch.empty(parameter.numel(), dtype=torch.float64, device=parameter.device)
        return self._buffers[parameter]


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a checksum of the bits of the tensors."""
    import torch

    def words(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)

    sums = [int(words(tensor).sum(dtype=torch.int64)) for tensor in tensors]
    return zlib.crc32(repr(sums).encode())
