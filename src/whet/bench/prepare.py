"""Providers from plain functions, which are called with the case's inputs, a tuple.

``function`` is a callable, or "package:name", which is imported when the provider is prepared: a missing package raises
ImportError there. The timed call is the function itself with its arguments bound.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np

from whet.bench.case import Call

Prepare = Callable[[Any], Call]
Function = Callable[..., Any] | str
Dtype = Literal["float32", "bfloat16"]

ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Draw standard normal numbers in float32 that ``dtype`` represents exactly, so that all providers get the same."""
    x = rng.standard_normal(shape, np.float32)
    if dtype == "bfloat16":
        x.view(np.uint32)[...] &= 0xFFFF0000
    return x


def tensor(array: Any, dtype: str = "") -> Any:
    """Convert an array to a torch tensor, sharing memory if possible, and floats to ``dtype``; return scalars as is."""
    import torch

    if not isinstance(array, np.ndarray):
        return array
    x = torch.from_numpy(array)
    return x.to(getattr(torch, dtype)) if dtype and x.is_floating_point() else x


def resolve(function: Function) -> Callable[..., Any]:
    """Return the function, importing it if given by name."""
    return pkgutil.resolve_name(function) if isinstance(function, str) else function


def on_arrays(function: Function, **options: Any) -> Prepare:
    """Call ``function(*inputs, **options)``."""
    return lambda inputs: partial(resolve(function), *inputs, **options)


def on_tensors(function: Function, dtype: str = "", **options: Any) -> Prepare:
    """Call ``function(*inputs, **options)`` with torch tensors, converted from arrays outside of the timing."""
    return lambda inputs: partial(resolve(function), *(tensor(x, dtype) for x in inputs), **options)


def in_dtype(function: Function, dtype: Dtype, **options: Any) -> Prepare:
    """Call with arrays in float32, with torch tensors in bfloat16, which NumPy does not have."""
    return on_arrays(function, **options) if dtype == "float32" else on_tensors(function, dtype, **options)


def in_loop(function: Function, tensors: bool = False) -> Prepare:
    """Call ``function(*row)`` for each of ``inputs.rows()`` in a Python loop, and return the list of results."""

    def prepare(inputs: Any) -> Call:
        call, rows = resolve(function), inputs.rows()
        if tensors:
            rows = [[tensor(x) for x in row] for row in rows]
        return lambda: [call(*row) for row in rows]

    return prepare


def in_float64(naive: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    """Return the reference ``naive(*inputs, **options)`` with float32 inputs widened to float64."""

    def reference(inputs: Any) -> Any:
        wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs]
        return naive(*wide, **options)

    return reference
