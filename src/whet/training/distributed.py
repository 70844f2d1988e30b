"""Data-parallel training on ranks started by torchrun or ``accelerate launch``.

Every rank runs the same script on the same stream of batches. A rank samples its share of the completions and computes
its share of the micro-batches; completions are gathered and gradients all-reduced, so that every rank makes the same
update and weights are never sent. A batch and its denominators are known before it is sharded: the loss of n ranks
equals the loss of one, except for the order of float additions, and bitwise with ``deterministic_reduction``.

Collectives run over gloo, on the CPU. This module imports torch only if there are several ranks.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from whet.errors import RankError, WhetValueError

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")

TIMEOUT_S = 1800
"""Timeout of collectives in seconds, for a rank that neither responds nor exits, such as a stopped process."""

_BUCKET_BYTES = 25 << 20  # as in torch's DistributedDataParallel: large enough that latency is negligible


def launched_rank() -> int:
    """Return the rank of this process from its launcher's environment, 0 without a launcher; needs no torch."""
    return _number("RANK", 0) if launched_size() > 1 else 0


def launched_size() -> int:
    """Return the number of ranks from the launcher's environment, 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    """Return the number in an environment variable of launchers."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise WhetValueError(
            f"the environment variable {name} is {text!r}, expected a number, as torchrun sets it. Unset it, or start "
            f"the ranks with torchrun."
        )
    return int(text)


class Ranks:
    """Collective operations over all ranks. Unless documented otherwise, all ranks call a method, in the same order.

    Attributes:
        rank: rank of this process, from 0.
        size: number of ranks.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @property
    def is_first(self) -> bool:
        """Whether this rank logs, saves and shows progress."""
        return self.rank == 0

    def all_gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with _report_lost_ranks():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_results(self, compute: Callable[[], Value]) -> list[Value]:
        """Run ``compute`` on every rank and return all results, in rank order.

        Raises:
            RankError: ``compute`` failed on another rank; the failing rank raises its own error.
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
        """Run ``compute`` on rank 0 only, and return its result on every rank."""
        return self.gather_results(lambda: compute() if self.is_first else None)[0]  # pyright: ignore[reportReturnType]

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        return any(self.all_gather(flag))

    def check_same(self, where: str, facts: dict[str, Any]) -> None:
        """Raise unless every rank has the same facts.

        Raises:
            WhetValueError: names the first fact that differs.
        """
        for rank, others in enumerate(self.all_gather(facts)):
            for name, value in facts.items():
                if others.get(name) != value:
                    raise WhetValueError(
                        f"{where}: {name} is {others.get(name)!s:.60} on rank {rank} and {value!s:.60} on rank "
                        f"{self.rank}. Every rank needs the same model (seed its initialisation, or load one), "
                        f"settings, data and checkpoint."
                    )

    def all_reduce(self, tensors: Sequence[Tensor], in_bfloat16: bool = False) -> None:
        """Replace each contiguous tensor by its sum over the ranks, all-reduced in its own dtype or in bfloat16.

        Every rank gets the same bits.
        """
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        def reduce(pieces: list[Tensor]) -> None:
            wire_dtype = torch.bfloat16 if in_bfloat16 else pieces[0].dtype
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
    """Yield buckets of flat pieces of the tensors, in order, each of one dtype and at most ``_BUCKET_BYTES``."""
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


_ranks: Ranks | None = None


def join_ranks() -> Ranks:
    """Return the ranks of the launcher or of an initialised torch.distributed; otherwise this process only.

    Raises:
        RankError: the ranks cannot connect to each other.
    """
    global _ranks
    if _ranks is None:
        _ranks = _join()
    return _ranks


def _join() -> Ranks:
    size = launched_size()
    if size == 1:
        return Ranks()
    import torch.distributed as dist

    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and not dist.is_initialized():
        raise RankError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} not set. Start all ranks with torchrun, or unset "
            "WORLD_SIZE."
        )
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    shares_store = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    if restarts and shares_store and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RankError(
            "torchrun has restarted the ranks, but its store still has the addresses of the dead ranks. Start torchrun "
            "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment; the same command continues the run."
        )
    try:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timeout)
        group = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RankError(
            f"the {size} ranks cannot connect through {where}: {error!s:.300}. Check the address, a free "
            f"port and GLOO_SOCKET_IFNAME."
        ) from error
    return Ranks(dist.get_rank(), dist.get_world_size(), group)


@contextmanager
def _report_lost_ranks() -> Iterator[None]:
    """Raise a RankError for gloo's error if another rank has exited or does not respond."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        what = "has exited" if time.monotonic() - start < TIMEOUT_S else f"did not respond for {TIMEOUT_S} s"
        raise RankError(
            f"another rank {what} ({error!s:.200}). Its error message gives the reason; the same command resumes from "
            f"the newest checkpoint."
        ) from error
