"""Processes that train together (data parallel), as torchrun or ``accelerate launch`` starts them.

Every rank runs the same script on the same stream of batches. A rank samples its share of the completions and computes
its share of the micro-batches; completions are gathered and gradients summed, so that every rank makes the same update
and no weight is ever sent. What a batch is, and what it is divided by, is known before it is dealt: the loss of n ranks
is that of one, but for the order of float additions, and with ``deterministic_reduction`` to the bit.

Collectives run over gloo, on the CPU. This module imports torch where there are ranks only.
"""

from __future__ import annotations

import datetime
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from whet.errors import RankError, WhetValueError

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")

TIMEOUT_S = 1800
"""A rank that neither answers nor ends, such as one that is stopped, is waited for so long."""

_BUCKET_BYTES = 25 << 20  # as torch's DistributedDataParallel: large enough that latency does not count

_EXACT_QUANTUM = 2.0**-40
"""Gradients of ``deterministic_reduction`` are rounded to multiples of this, 1e-4 of AdamW's epsilon.

Sums of them below 2**52 quanta, 4,096, are exact in float64, so that their order does not matter. Beyond that they are
as exact as float64 is, but depend on the order."""


def launched_rank() -> int:
    """The rank of this process as its launcher says it, 0 without one; needs no torch."""
    return _number("RANK", 0) if launched_size() > 1 else 0


def launched_size() -> int:
    """How many ranks the launcher says that there are, 1 without one."""
    return _number("WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    """A variable that launchers set."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise WhetValueError(
            f"{name} in the environment is {text!r}, expected a number, as torchrun sets it. Unset it, or start the "
            f"ranks by torchrun."
        )
    return int(text)


class Ranks:
    """All ranks, seen from one of them. What it does not say otherwise is called on all of them, in the same order.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that logs, saves and shows progress."""
        return self.rank == 0

    def all_gather(self, value: Value) -> list[Value]:
        """The values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with _report_lost_ranks():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_results(self, compute: Callable[[], Value]) -> list[Value]:
        """The values that ``compute`` returns on the ranks, in their order.

        Raises:
            RankError: it failed on another rank; where it fails, that error.
        """
        if self.size == 1:
            return [compute()]
        try:
            value = compute()
        except Exception as error:
            self.broadcast_failure(error)
            raise
        return self.all_gather_checked(value)

    def all_gather_checked(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in rank order, when other ranks may call ``broadcast_failure`` instead.

        Raises:
            RankError: another rank failed.
        """
        if self.size == 1:
            return [value]
        gathered = self.all_gather((None, value))
        for rank, (failure, _) in enumerate(gathered):
            if failure is not None:
                error = RankError(f"rank {rank} failed: {failure}")
                error.is_reported = True
                raise error
        return [value for _, value in gathered]

    def broadcast_failure(self, error: Exception) -> None:
        """Make ``all_gather_checked`` raise on the other ranks; no-op if ``error`` is another rank's failure."""
        if self.size > 1 and not isinstance(error, RankError):
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            with suppress(RankError):  # they have ended: the error that is being raised is the cause
                self.all_gather((text, None))

    def broadcast_from_first(self, compute: Callable[[], Value]) -> Value:
        """The value that ``compute`` returns on rank 0; the others wait for it."""
        return self.gather_results(lambda: compute() if self.is_first else None)[0]  # pyright: ignore[reportReturnType]

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        return any(self.all_gather(flag))

    def check_same(self, where: str, facts: dict[str, Any]) -> None:
        """Raise unless every rank has the same facts.

        Raises:
            WhetValueError: it names the first one that differs.
        """
        for rank, others in enumerate(self.all_gather(facts)):
            for name, value in facts.items():
                if others.get(name) != value:
                    raise WhetValueError(
                        f"{where}: {name} is {others.get(name)!s:.60} on rank {rank} and {value!s:.60} on rank "
                        f"{self.rank}. Every rank needs the same model (seed what makes it, or load one), settings, "
                        f"data and checkpoint."
                    )

    def all_reduce(self, tensors: Sequence[Tensor], dtype: Any) -> None:
        """Replace each contiguous tensor by its sum over the ranks, all-reduced in ``dtype``; None: its own dtype.

        Every rank gets the same bits.
        """
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        def reduce(pieces: list[Tensor]) -> None:
            wire_dtype = dtype or pieces[0].dtype
            with _report_lost_ranks():
                if len(pieces) == 1 and pieces[0].dtype == wire_dtype:
                    dist.all_reduce(pieces[0], group=self._group)
                    return
                bucket = torch.cat([piece.to(wire_dtype) for piece in pieces])
                dist.all_reduce(bucket, group=self._group)
            for piece, total in zip(pieces, bucket.split([p.numel() for p in pieces]), strict=True):
                piece.copy_(total)

        for bucket in _buckets(tensors):
            reduce(bucket)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Flat pieces of the tensors, of one dtype and together at most ``_BUCKET_BYTES``, in order."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        for piece in tensor.view(-1).split(max(1, _BUCKET_BYTES // tensor.element_size())):
            full = sum(p.nbytes for p in bucket) + piece.nbytes > _BUCKET_BYTES
            if bucket and (full or bucket[0].dtype != piece.dtype):
                yield bucket
                bucket = []
            bucket.append(piece)
    if bucket:
        yield bucket


_joined: Ranks | None = None


def join_ranks() -> Ranks:
    """The ranks that the launcher has started, or that torch.distributed knows already; without them this process.

    Raises:
        RankError: they cannot reach each other.
    """
    global _joined
    if _joined is None:
        _joined = _join()
    return _joined


def _join() -> Ranks:
    size = launched_size()
    if size == 1:
        return Ranks()
    import torch.distributed as dist

    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and not dist.is_initialized():
        raise RankError(
            f"WORLD_SIZE is {size}, and {', '.join(missing)} not set. Start all ranks by torchrun, or unset WORLD_SIZE."
        )
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    shares_store = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    if restarts and shares_store and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RankError(
            "torchrun has restarted the ranks, whose store holds the addresses of those that died. Start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment; the same command continues the run."
        )
    try:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timeout)
        group = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RankError(
            f"the {size} ranks do not reach each other through {where}: {error!s:.300}. Check the address, a free "
            f"port and GLOO_SOCKET_IFNAME."
        ) from error
    return Ranks(dist.get_rank(), dist.get_world_size(), group)


@contextmanager
def _report_lost_ranks() -> Iterator[None]:
    """Report what gloo raises where a rank has ended, or does not answer, as a RankError."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        what = "has ended" if time.monotonic() - start < TIMEOUT_S else f"did not answer for {TIMEOUT_S} s"
        raise RankError(
            f"another rank {what} ({error!s:.200}). Its own message gives the reason; the same command continues from "
            f"the newest checkpoint."
        ) from error


def shard_by_cost(costs: Sequence[float], size: int) -> list[list[int]]:
    """Items to ``size`` ranks so that their costs are about even: the longest first, to whoever has least.

    Returns:
        The items of each rank, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(size), key=lambda rank: (loads[rank], rank))
        shares[rank].append(i)
        loads[rank] += costs[i]
    return [sorted(share) for share in shares]


class ExactSum:
    """Gradients of micro-batches summed so that neither their order nor how they are dealt changes a bit.

    Each is rounded to a multiple of 2**-40, sums of which are exact in float64. That is wide enough for it to need no
    exponent that follows the gradients, and no repetition where one overflows. Their memory, 8 bytes a parameter, is
    kept from update to update: the page faults that bring it anew cost more than the sums.
    """

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}
        self._added: set[Tensor] = set()

    def begin(self) -> None:
        """Begin an update, with no gradients."""
        self._added.clear()

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Add the gradients, and remove them."""
        # In float64, x + c - c with c = 1.5 * 2**52 quanta rounds x to whole quanta, ties to even.
        shift = 1.5 * 2.0**52 * _EXACT_QUANTUM
        for p in parameters:
            if p.grad is None:
                continue
            is_first = p not in self._added
            for gradient, part in zip(p.grad.reshape(-1).split(1 << 18), self._sum_of(p).split(1 << 18), strict=True):
                rounded = gradient.double().add_(shift).sub_(shift)
                if is_first:
                    part.copy_(rounded)
                else:
                    part += rounded
            p.grad = None
            self._added.add(p)

    def has(self, parameter: Tensor) -> bool:
        """Whether it got a gradient."""
        return parameter in self._added

    def finish(self, parameters: Sequence[Tensor], ranks: Ranks) -> None:
        """Set the gradients of these parameters to the sums over all ranks."""
        sums = [self._sum_of(p) if p in self._added else self._sum_of(p).zero_() for p in parameters]
        ranks.all_reduce(sums, None)
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total.to(p.dtype).view_as(p)

    def _sum_of(self, parameter: Tensor) -> Tensor:
        import torch

        if parameter not in self._sums:
            self._sums[parameter] = torch.empty(parameter.numel(), dtype=torch.float64, device=parameter.device)
        return self._sums[parameter]


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """A number that differs, but for chance, where the bits of the tensors differ."""
    import torch

    def words(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)

    sums = [int(words(tensor).sum(dtype=torch.int64)) for tensor in tensors]
    return zlib.crc32(repr(sums).encode())
