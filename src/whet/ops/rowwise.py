"""Slow path of the row-wise functions (norm, activations, softmax): checks, copies, and copying results back.

The native functions support float32 or bfloat16 with contiguous rows, in up to four axes. Here other arguments are
copied to contiguous 2-D arrays and results are copied back, or an error is raised. Nothing here runs on the fast path.
"""

from __future__ import annotations

from typing import Any

from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs


def dtype_name(x: Any) -> str:
    """Return the dtype's name without a library's prefix: "float32", "bfloat16"."""
    return str(x.dtype).removeprefix("torch.")


def as_rows(function: str, name: str, x: Any) -> Any:
    """Return x as a contiguous array of float32 or bfloat16 with at least one axis, or raise."""
    # NumPy has bfloat16 only in arrays of ml_dtypes.
    x = inputs.as_plain_array(function, name, x, ("float32", "bfloat16") if hasattr(x, "dtype") else ("float32",))
    if x.ndim == 0:
        raise WhetValueError(f"{function}: {name} is a scalar, expected (..., n). Pass {name}.reshape(1).")
    return x


def flatten(x: Any) -> Any:
    """Flatten all axes of x except the last."""
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(0, 0)


def check_target(function: str, name: str, target: Any, shape: tuple[int, ...], like: Any) -> None:
    """Raise unless ``target`` can hold a result of this shape, with the kind and dtype of ``like``."""
    if inputs.is_tensor(target) != inputs.is_tensor(like) or not hasattr(target, "dtype"):
        kind = "a torch tensor" if inputs.is_tensor(like) else "a NumPy array"
        raise WhetTypeError(f"{function}: {name} is a {type(target).__name__}, expected {kind} like the input.")
    if tuple(target.shape) != tuple(shape) or dtype_name(target) != dtype_name(like):
        raise WhetValueError(
            f"{function}: {name} is {dtype_name(target)} {tuple(target.shape)}, "
            f"expected {dtype_name(like)} {tuple(shape)}."
        )
    if inputs.is_tensor(target):
        if target.requires_grad:
            raise WhetValueError(f"{function}: {name} requires grad and is written to. Pass {name}.detach().")
        if target.device.type != "cpu":
            raise WhetValueError(f"{function}: {name} is on {target.device}, expected a CPU tensor.")
        inputs.check_memory(function, name, target)
    elif not target.flags.writeable:
        raise WhetValueError(f"{function}: {name} is read-only, and is written to. Pass a copy.")


def store_result(function: str, result: Any, shape: tuple[int, ...], out: Any) -> Any:
    """Return ``result`` in this shape, or copy it into ``out`` and return that."""
    result = result.reshape(shape)
    if out is None:
        return result
    check_target(function, "out", out, shape, result)
    out[...] = result
    return out
