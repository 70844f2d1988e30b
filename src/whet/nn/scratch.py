"""Memory for one matrix, which every product of a thread writes again, and for tensors that a step makes and frees."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from whet import _core

_LINE = 64
"""Bytes of a cache line, on which tensors begin."""


class _Scratch(threading.local):
    buffer = torch.empty(0)


_scratch = _Scratch()


def scratch_matrix(n: int, k: int, dtype: torch.dtype) -> Tensor:
    """(n, k), not initialised, in memory that the next call on this thread gives again."""
    size = n * k * dtype.itemsize
    if len(_scratch.buffer) < size:
        _scratch.buffer = torch.empty(size, dtype=torch.uint8)
    return _scratch.buffer[:size].view(dtype).view(n, k)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``torch.empty`` in memory that fits where a tensor of the same size has been.

    torch asks for its memory with an alignment, for which the C library wants a free piece larger than the tensor: what
    is freed between tensors that are kept, a quarter of the activations of a step, would hardly be used again.
    """
    n = math.prod(shape)
    if not n:
        return torch.empty(shape, dtype=dtype)
    buffer = np.empty(n * dtype.itemsize + _LINE, np.uint8)
    numbers = torch.frombuffer(buffer, dtype=dtype, count=n, offset=-buffer.ctypes.data % _LINE)
    return torch.ops.aten._unsafe_view(numbers, list(shape))  # no view, so that others may add to it in place


def scratch_memory() -> Tensor:
    """The memory of this thread."""
    return _scratch.buffer


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 matrix as it is multiplied: itself, or rounded to bfloat16 in the scratch memory.

    Reading it costs a product of many rows next to nothing, and nothing can be out of date.
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
