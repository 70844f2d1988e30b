"""Slow path of the primitives: converts arguments that the fast path rejects, and raises if no conversion is safe.

The native functions return ``NotImplemented`` for anything except contiguous float arrays of matching shapes. The
functions here then convert views, subclasses, lists and odd strides to plain arrays, copying only if necessary, and
raise for arguments without a safe interpretation. Nothing here runs on the fast path.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import numpy as np

from whet.errors import WhetTypeError, WhetValueError

FLOATS = ("float32", "float64")


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_plain_array(function: str, name: str, x: Any, dtypes: tuple[str, ...] = FLOATS) -> Any:
    """Return x as a contiguous NumPy array or torch CPU tensor of one of the dtypes, or raise an error with the fix."""
    where = f"{function}: {name}"
    if is_tensor(x):
        if x.requires_grad:
            raise WhetValueError(
                f"{where} requires grad, but this function is not differentiable. Pass {name}.detach()."
            )
        if x.device.type != "cpu":
            raise WhetValueError(f"{where} is on {x.device}, expected a CPU tensor. Pass {name}.cpu().")
        if x.is_nested:
            raise WhetTypeError(f"{where} is a nested tensor. Pass a padded one, or one row at a time.")
        if x.layout != sys.modules["torch"].strided:
            raise WhetTypeError(f"{where} has layout {x.layout}, expected a dense tensor. Pass {name}.to_dense().")
        check_memory(function, name, x)
        x = x.detach().resolve_neg().contiguous()
        dtype = str(x.dtype).removeprefix("torch.")
    else:
        if x is None:
            raise WhetTypeError(f"{where} is None. Pass a NumPy array or a torch tensor.")
        if isinstance(x, np.ma.MaskedArray):
            raise WhetTypeError(
                f"{where} is a masked array, whose mask would be ignored. Pass {name}.filled(nan) or a bool mask."
            )
        given_array = hasattr(x, "__array__")
        try:
            x = np.asarray(x, order="C") if given_array else np.array(x, dtype=dtypes[-1])
        except (TypeError, ValueError) as error:
            raise WhetTypeError(
                f"{where} is a {type(x).__name__} that does not make an array ({error}). "
                "Pass a NumPy array or a torch tensor."
            ) from None
        dtype = x.dtype.newbyteorder("=").name
        if dtype in dtypes:
            x = np.require(x, x.dtype.newbyteorder("="), ["C", "A"])
    if dtype not in dtypes:
        cast = f"{name}.to(torch.{dtypes[0]})" if is_tensor(x) else f"{name}.astype(np.{dtypes[0]})"
        raise WhetTypeError(f"{where} has dtype {dtype}, expected {' or '.join(dtypes)}. Pass {cast}.")
    return x


def as_integers(function: str, name: str, x: Any, expected: str = "integers") -> np.ndarray:
    """Return x as a contiguous int64 array; an empty array may have any dtype.

    Raises:
        WhetTypeError: x does not hold integers.
    """
    try:
        array = tensor_to_numpy(function, name, x) if is_tensor(x) else np.asarray(x)
    except (TypeError, ValueError) as error:
        if isinstance(error, WhetTypeError):
            raise
        raise WhetTypeError(f"{function}: {name} does not make an array ({error}). Pass {expected}.") from None
    if array.size and (array.dtype.kind not in "iu" or isinstance(x, np.ma.MaskedArray)):
        raise WhetTypeError(f"{function}: {name} has dtype {array.dtype}, expected {expected}.")
    return np.ascontiguousarray(array, np.int64)


def tensor_to_numpy(function: str, name: str, x: Any) -> np.ndarray:
    """Return the values of a torch tensor on any device, detached; 16-bit floats as float32: NumPy has no bfloat16."""
    try:
        if x.data_ptr() != 0:
            return x.numpy()
    except (RuntimeError, TypeError):  # not plain CPU memory, or bfloat16
        pass
    if x.device.type in ("cpu", "meta"):
        check_memory(function, name, x)
    x = x.detach().cpu().resolve_neg()
    return (x.float() if x.dtype.is_floating_point and x.itemsize < 4 else x).numpy()


def _has_address(x: Any) -> bool:
    try:
        return x.data_ptr() != 0
    except RuntimeError:  # a wrapped tensor
        return False


def check_memory(function: str, name: str, x: Any) -> None:
    """Raise for a torch tensor without memory in this process: fake, wrapped or freed."""
    size = 0 if 0 in x.shape else 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    try:
        storage = x.untyped_storage()
        has_memory = storage.device == x.device and storage.nbytes() >= (x.storage_offset() + size) * x.itemsize
    except RuntimeError:  # a wrapped tensor
        has_memory = False
    if size and not (has_memory and _has_address(x)):
        raise WhetTypeError(
            f"{function}: {name} has no memory: its storage was freed, or it represents another tensor (a fake tensor, "
            f"torch.func.vmap or jvp, a subclass). Pass a plain tensor."
        )


def check_computed(function: str, result: Any) -> Any:
    """Return the core's result for arguments that were checked and converted.

    Raises:
        WhetTypeError: the core rejected them again, for a reason that no check covers.
    """
    if result is NotImplemented:
        raise WhetTypeError(
            f"{function}: the memory layout of an argument cannot be read, or written to. Pass contiguous copies."
        )
    return result


def as_number(function: str, name: str, value: Any) -> float:
    """Return value as a float.

    Raises:
        WhetTypeError: value is not a real number.
    """
    try:
        math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        raise WhetTypeError(f"{function}: {name} is {value!r:.60}, expected a number.") from None
    return float(value)


def as_float32_factor(function: str, name: str, value: Any) -> float:
    """Return value as a float, if it is above 0 and float32 holds it and its reciprocal: kernels use both."""
    if not 1e-37 < (factor := as_number(function, name, value)) < 1e37:
        raise WhetValueError(f"{function}: {name} is {value!r}, expected a number above 0 that float32 holds.")
    return factor


def check_same_dtype(function: str, **arrays: Any) -> None:
    """Raise unless all arrays have the dtype of the first."""
    (first, a), *others = arrays.items()
    for name, b in others:
        if str(a.dtype).removeprefix("torch.") != str(b.dtype).removeprefix("torch."):
            raise WhetTypeError(
                f"{function}: {name} has dtype {b.dtype}, but {first} has {a.dtype}. Convert one of them."
            )


def check_same_shape(function: str, **arrays: Any) -> None:
    """Raise unless all arrays have the shape of the first."""
    (first, a), *others = arrays.items()
    for name, b in others:
        if tuple(a.shape) != tuple(b.shape):
            raise WhetValueError(
                f"{function}: {name} has shape {tuple(b.shape)}, but {first} has {tuple(a.shape)}. They must be equal."
            )


def as_positive_int(function: str, name: str, value: Any) -> int:
    """Return value as an int of at least 1."""
    try:
        size = operator.index(value)
    except TypeError:
        raise WhetTypeError(f"{function}: {name} is {value!r}, expected an integer.") from None
    if size < 1:
        raise WhetValueError(f"{function}: {name} is {size}, expected at least 1.")
    return size


def copy_overlapping(out: Any, *arrays: Any) -> list[Any]:
    """Copy the arrays that share memory with ``out``, which is written while they are read; return all arrays."""
    if out is None:
        return list(arrays)
    return [(x.clone() if is_tensor(x) else x.copy()) if may_share_memory(out, x) else x for x in arrays]


def may_share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays, or two tensors, may share memory."""
    if is_tensor(a) and is_tensor(b):
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.may_share_memory(a, b)


def check_rows(function: str, name: str, x: Any, length_name: str, length: Any) -> int | None:
    """Check that x is 2-D, or flat with a length that divides its size; return the length as an int."""
    shape = tuple(x.shape)
    if length is not None:
        length = as_positive_int(function, length_name, length)
    if len(shape) == 2:
        if length is not None and length != shape[1]:
            raise WhetValueError(
                f"{function}: {name} has shape {shape}, but {length_name}={length}. Omit {length_name} for a 2-D array."
            )
        return length
    if len(shape) != 1:
        raise WhetValueError(
            f"{function}: {name} has {len(shape)} axes, expected a flat array with {length_name}, or 2 axes."
        )
    if length is None:
        raise WhetValueError(
            f"{function}: {name} is flat with {shape[0]} elements and no {length_name} was given. "
            f"Pass {length_name}, or a 2-D array."
        )
    if shape[0] == 0:
        raise WhetValueError(f"{function}: {name} is empty. Pass at least one row of {length_name}={length}.")
    if shape[0] % length:
        raise WhetValueError(
            f"{function}: {name} has {shape[0]} elements, not a multiple of {length_name}={length}. "
            f"Pass every row whole, or a 2-D array."
        )
    return length
