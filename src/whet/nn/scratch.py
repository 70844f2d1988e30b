"""Memory of a training step: one scratch matrix per thread, which every product reuses, and its temporary tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from whet import _core

_LINE = 64
"""Bytes of a cache line, the alignment of tensors."""


class _Scratch(threading.local):
    buffer = torch.empty(0)


_scratch = _Scratch()


def scratch_matrix(n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised (n, k) matrix in memory that the next call on this thread reuses."""
    size = n * k * dtype.itemsize
    if len(_scratch.buffer) < size:
        _scratch.buffer = torch.empty(size, dtype=torch.uint8)
    return _scratch.buffer[:size].view(dtype).view(n, k)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return ``torch.empty`` in memory that can reuse the block of a freed tensor of the same size.

    torch allocates with an alignment, for which the C library needs a free block larger than the tensor: blocks freed
    between live tensors, a quarter of a step's activations, would hardly be reused.
    """
    n = math.prod(shape)
    if not n:
        return torch.empty(shape, dtype=dtype)
    buffer = np.empty(n * dtype.itemsize + _LINE, np.uint8)
    numbers = torch.frombuffer(buffer, dtype=dtype, count=n, offset=-buffer.ctypes.data % _LINE)
    return torch.ops.aten._unsafe_view(numbers, list(shape))  # not a view for autograd: callers may add in place


def scratch_memory() -> Tensor:
    """Return the scratch memory of this thread."""
    return _scratch.buffer


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a float32 matrix in the dtype of products: itself, or rounded to bfloat16 into scratch memory.

    Rounding it for every product costs next to nothing with many rows, and no copy can become stale.
    """
    weight = weight.detach()
    if weight.dtype == dtype:
        return weight
    if weight.t().is_contiguous():
        return _round(weight.t(), dtype).t()
    return _round(weight, dtype)


def _round(weight: Tensor, dtype: torch.dtype) -> Tensor:
    out = scratch_matrix(weight.shape[0], weight.shape[1], dtype)
    if not weight.is_contiguous():
        return out.copy_(weight)
    _core.bf16_from_f32(weight, out)
    return out
