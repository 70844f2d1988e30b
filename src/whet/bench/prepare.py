"""How a plain function becomes a provider: it is called with the case's inputs, which are a tuple, as they are.

``function`` is a callable, or "package:name", which is imported when the provider is prepared: a package that is not
installed is an ImportError there. What is timed is the function itself, with its arguments bound.
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
    """Standard normal numbers in float32 that ``dtype`` represents exactly: every provider starts from the same."""
    x = rng.standard_normal(shape, np.float32)
    if dtype == "bfloat16":
        x.view(np.uint32)[...] &= 0xFFFF0000
    return x


def tensor(array: Any, dtype: str = "") -> Any:
    """An array in torch, sharing its memory if it can; floats in ``dtype`` if one is given. A number as it is."""
    import torch

    if not isinstance(array, np.ndarray):
        return array
    x = torch.from_numpy(array)
    return x.to(getattr(torch, dtype)) if dtype and x.is_floating_point() else x


def found(function: Function) -> Callable[..., Any]:
    """The function, imported if it is given by its name."""
    return pkgutil.resolve_name(function) if isinstance(function, str) else function


def on_arrays(function: Function, **options: Any) -> Prepare:
    """``function(*inputs, **options)``."""
    return lambda inputs: partial(found(function), *inputs, **options)


def on_tensors(function: Function, dtype: str = "", **options: Any) -> Prepare:
    """``function(*inputs, **options)`` with torch tensors in place of arrays, made outside the timing."""
    return lambda inputs: partial(found(function), *(tensor(x, dtype) for x in inputs), **options)


def in_dtype(function: Function, dtype: Dtype, **options: Any) -> Prepare:
    """On arrays in float32, on torch tensors in bfloat16, which NumPy has not."""
    return on_arrays(function, **options) if dtype == "float32" else on_tensors(function, dtype, **options)


def in_loop(function: Function, tensors: bool = False) -> Prepare:
    """A list of ``function(*row)`` for each of ``inputs.rows()``: a Python loop of calls."""

    def prepare(inputs: Any) -> Call:
        call, rows = found(function), inputs.rows()
        if tensors:
            rows = [[tensor(x) for x in row] for row in rows]
        return lambda: [call(*row) for row in rows]

    return prepare


def in_float64(naive: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    """The reference ``naive(*inputs, **options)``, the floats widened."""

    def reference(inputs: Any) -> Any:
        wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs]
        return naive(*wide, **options)

    return reference
