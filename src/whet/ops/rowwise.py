"""Slow path of the row-wise functions (norm, activations, softmax): checks, copies, and writing back.

The native functions take float32 or bfloat16 with rows side by side, in up to four axes. Here anything else becomes
two-dimensional contiguous arrays and its result is put where it belongs, or it is refused with the reason. Nothing here
runs on the fast path.
"""

from __future__ import annotations

from typing import Any

from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs


def dtype_name(x: Any) -> str:
    """The dtype's name without a library's prefix: "float32", "bfloat16"."""
    return str(x.dtype).removeprefix("torch.")


def rows(function: str, name: str, x: Any) -> Any:
    """x as a contiguous array of float32 or bfloat16 with at least one axis, else an error."""
    # NumPy knows bfloat16 only where ml_dtypes made the array.
    x = inputs.plain(function, name, x, ("float32", "bfloat16") if hasattr(x, "dtype") else ("float32",))
    if x.ndim == 0:
        raise WhetValueError(f"{function}: {name} is a scalar, expected (..., n). Pass {name}.reshape(1).")
    return x


def flat(x: Any) -> Any:
    """x with all axes but the last as one."""
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(0, 0)


def check_target(function: str, name: str, target: Any, shape: tuple[int, ...], like: Any) -> None:
    """Raises unless ``target`` can take a result of this shape, and of the kind and dtype of ``like``."""
    if inputs.is_tensor(target) != inputs.is_tensor(like) or not hasattr(target, "dtype"):
        kind = "a torch tensor" if inputs.is_tensor(like) else "a NumPy array"
        raise WhetTypeError(f"{function}: {name} is a {type(target).__name__}, expected {kind} as the input is.")
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


def finish(function: str, result: Any, shape: tuple[int, ...], out: Any) -> Any:
    """``result`` in its shape: as it is, or copied into ``out``."""
    result = result.reshape(shape)
    if out is None:
        return result
    check_target(function, "out", out, shape, result)
    out[...] = result
    return out
