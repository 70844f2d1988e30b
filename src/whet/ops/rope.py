"""Rotary position embedding of queries and keys, in place, with NumPy reference implementations.

Scaling for long contexts is in ``whet.ops.rope_scaling``: it only changes the table of angles.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError
from whet.ops import inputs
from whet.ops.rope_scaling import rope_frequencies

MAX_POSITION = 2**31
"""Largest absolute position that can be rotated without a table."""


def naive_cos_sin_cache(inv_freq: np.ndarray, max_position: int, attention_factor: float = 1.0) -> np.ndarray:
    """Reference table, (max_position, 2 n): scaled cosines, then sines, in the precision of inv_freq."""
    angles = np.arange(max_position, dtype=inv_freq.dtype)[:, None] * inv_freq
    return attention_factor * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def naive_rope(
    positions: np.ndarray,
    x: np.ndarray,
    head_size: int,
    cos_sin_cache: np.ndarray,
    is_neox: bool = True,
    *,
    inverse: bool = False,
) -> np.ndarray:
    """Reference implementation of ``apply_rope`` for one of query and key, in the precision of x, as a new array."""
    half = cos_sin_cache.shape[1] // 2
    cos, sin = (part[:, None] for part in np.split(cos_sin_cache[positions.ravel()].astype(x.dtype), 2, axis=1))
    sin = -sin if inverse else sin
    out = x.reshape(positions.size, -1, head_size).copy()
    first, second = (slice(half), slice(half, 2 * half)) if is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out.reshape(x.shape)


def apply_rope(
    positions: Any,
    query: Any,
    key: Any,
    head_size: int,
    cos_sin_cache: Any,
    is_neox: bool = True,
    *,
    inverse: bool = False,
) -> None:
    """Rotate every pair (a, b) of every head by its token's angle, in place: (a cos - b sin, a sin + b cos).

    Within the first rotary_dim elements (the width of the table), NeoX (Llama, Mistral, Qwen) pairs element i with
    i + rotary_dim / 2 and GPT-J pairs 2i with 2i + 1; the rest of a head is unchanged. float32 arithmetic, one rounding
    to nearest even for bfloat16; results do not depend on the number of threads.

    Source: Su et al., "RoFormer", 2021, equation 34.

    Args:
        positions: integers, (T,) or (B, T): rows of the table.
        query: (T, H * head_size) or (T, H, head_size), or with (B, T) instead of T; float32 or bfloat16, NumPy
            (bfloat16 of ml_dtypes) or torch, on the CPU. Any strides (for example a slice of a fused projection) with
            a contiguous last axis.
        key: like query with its own number of heads, or None.
        head_size: elements of a head.
        cos_sin_cache: (max_position, rotary_dim) float32: rotary_dim / 2 cosines, then as many sines.
        is_neox: the pairing, NeoX or GPT-J.
        inverse: rotate by the negative angle, which is also the gradient. With a table scaled by an attention factor m,
            rotation and inverse together multiply by m^2.

    Raises:
        WhetValueError: shapes disagree, a position is outside the table, rotary_dim is odd or above head_size, or
            query or key requires grad, is not on the CPU, is read-only, or has elements that share memory.
        WhetTypeError: another dtype or type.
    """
    if _core.apply_rope(positions, query, key, head_size, cos_sin_cache, bool(is_neox), bool(inverse)) is None:
        return
    name = "apply_rope"
    table = inputs.as_plain_array(name, "cos_sin_cache", cos_sin_cache, ("float32",))
    if table.ndim != 2:
        raise WhetValueError(
            f"{name}: cos_sin_cache has shape {tuple(table.shape)}, expected (max_position, rotary_dim)."
        )
    positions, head_size = _check_arguments(name, positions, query, key, head_size, int(table.shape[1]))
    _check_rows(name, positions, 0, len(table) - 1, f"the table of {len(table)} positions", "Make a longer table")
    _apply_converted(name, _core.apply_rope, positions, query, key, head_size, table, bool(is_neox), bool(inverse))


def apply_rope_freqs(
    positions: Any,
    query: Any,
    key: Any,
    head_size: int,
    inv_freq: Any,
    is_neox: bool = True,
    *,
    attention_factor: float = 1.0,
    inverse: bool = False,
) -> None:
    """Apply RoPE without a table: sines and cosines of position * inv_freq are computed once per token.

    The bits equal those with the table of a ``RotaryEmbedding`` of these frequencies. Angles are float64: the error of
    sines and cosines is at most 1e-7 for positions up to 10^6, and 1e-6 up to 2^31, if inv_freq is at most 1.

    Args:
        positions: as for ``apply_rope``; in [-2^31, 2^31].
        query: as for ``apply_rope``.
        key: as for ``apply_rope``.
        head_size: as for ``apply_rope``.
        inv_freq: (rotary_dim / 2,) angles in radians per position, float64 (float32 is widened).
        is_neox: as for ``apply_rope``.
        attention_factor: multiplies cosines and sines.
        inverse: as for ``apply_rope``.

    Raises:
        WhetValueError, WhetTypeError: as ``apply_rope``.
    """
    flags = (float(attention_factor), bool(is_neox), bool(inverse))
    if _core.apply_rope_freqs(positions, query, key, head_size, inv_freq, *flags) is None:
        return
    name = "apply_rope_freqs"
    freqs = _frequencies(name, inv_freq)
    positions, head_size = _check_arguments(name, positions, query, key, head_size, 2 * len(freqs))
    _check_rows(name, positions, -MAX_POSITION, MAX_POSITION, "the range of [-2^31, 2^31]", "Check the positions")
    _apply_converted(name, _core.apply_rope_freqs, positions, query, key, head_size, freqs, *flags)


class RotaryEmbedding:
    """A table of angles and its pairing; ``get_rope`` creates it from a model's settings.

    Attributes:
        head_size: elements of a head.
        rotary_dim: elements of a head that are rotated.
        max_position: rows of the table.
        is_neox_style: the pairing, see ``apply_rope``.
        inv_freq: (rotary_dim / 2,) float64, radians per position.
        attention_factor: multiplies cosines and sines.
        cos_sin_cache: (max_position, rotary_dim) float32 NumPy array, computed in float64 and rounded once.
    """

    def __init__(
        self,
        head_size: int,
        max_position: int,
        inv_freq: Any,
        *,
        attention_factor: float = 1.0,
        is_neox_style: bool = True,
    ) -> None:
        """Fill the table.

        Args:
            inv_freq: (rotary_dim / 2,) radians per position.

        Raises:
            WhetValueError: inv_freq is empty or longer than head_size / 2, or a size is below 1.
            WhetTypeError: a size is not an integer, or inv_freq is not float.
        """
        name = "RotaryEmbedding"
        self.head_size = inputs.as_positive_int(name, "head_size", head_size)
        self.max_position = inputs.as_positive_int(name, "max_position", max_position)
        self.inv_freq = _frequencies(name, inv_freq).copy()
        self.rotary_dim = 2 * len(self.inv_freq)
        check_rotary_dim(name, self.rotary_dim, self.head_size)
        self.attention_factor = float(attention_factor)
        self.is_neox_style = bool(is_neox_style)
        self.cos_sin_cache = np.empty((self.max_position, self.rotary_dim), np.float32)
        _core.rope_table(self.inv_freq, self.attention_factor, self.cos_sin_cache)

    def forward(self, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        """Rotate query and key in place, see ``apply_rope``, and return them."""
        apply_rope(positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style)
        return query, key

    __call__ = forward

    def inverse(self, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        """Rotate query and key back in place, see ``apply_rope``, and return them. The gradient of ``forward``."""
        apply_rope(positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style, inverse=True)
        return query, key

    def __repr__(self) -> str:
        return (
            f"RotaryEmbedding(head_size={self.head_size}, rotary_dim={self.rotary_dim}, "
            f"max_position={self.max_position}, is_neox_style={self.is_neox_style})"
        )


def get_rope(
    head_size: int,
    rotary_dim: int | None = None,
    max_position: int = 8192,
    base: float = 10000.0,
    is_neox_style: bool = True,
    scaling: dict[str, Any] | None = None,
) -> RotaryEmbedding:
    """Return the rotary embedding of a model: inv_freq[i] = base^(-2i / rotary_dim), modified by ``scaling``.

    Args:
        head_size: elements of a head.
        rotary_dim: elements of a head to rotate, even; None: the whole head.
        max_position: rows of the table, so positions 0 .. max_position - 1.
        base: rope_theta.
        is_neox_style: the pairing, see ``apply_rope``.
        scaling: Hugging Face's rope_scaling (or rope_parameters): a dict with "rope_type" linear, dynamic, yarn,
            llama3, longrope, proportional or default, and the settings of that type; see ``whet.ops.rope_scaling``. One
            table serves all lengths: dynamic and longrope assume a sequence of max_position tokens, where Hugging Face
            recomputes the frequencies as a sequence grows.

    Raises:
        WhetValueError, WhetTypeError: a setting is missing, unknown or invalid.
    """
    head_size = inputs.as_positive_int("get_rope", "head_size", head_size)
    max_position = inputs.as_positive_int("get_rope", "max_position", max_position)
    inv_freq, factor = rope_frequencies(head_size, rotary_dim, max_position, base, scaling)
    return RotaryEmbedding(head_size, max_position, inv_freq, attention_factor=factor, is_neox_style=is_neox_style)


# --- the slow path --------------------------------------------------------------------------------------


def _frequencies(function: str, inv_freq: Any) -> np.ndarray:
    freqs = np.asarray(inputs.as_plain_array(function, "inv_freq", inv_freq), np.float64)
    if freqs.ndim != 1 or len(freqs) == 0:
        raise WhetValueError(f"{function}: inv_freq has shape {freqs.shape}, expected (rotary_dim / 2,).")
    if not np.isfinite(freqs).all():
        raise WhetValueError(f"{function}: inv_freq holds {freqs[~np.isfinite(freqs)][0]}, expected finite numbers.")
    return freqs


def check_rotary_dim(function: str, rotary_dim: int, head_size: int) -> None:
    """Raise unless rotary_dim is even and at most head_size."""
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_size:
        raise WhetValueError(
            f"{function}: rotary_dim is {rotary_dim}, expected an even number from 2 to head_size={head_size}."
        )


def _check_arguments(
    function: str, positions: Any, query: Any, key: Any, head_size: Any, rotary_dim: int
) -> tuple[np.ndarray, int]:
    """Return positions as int64 and head_size as an int, if query and key fit them."""
    head_size = inputs.as_positive_int(function, "head_size", head_size)
    check_rotary_dim(function, rotary_dim, head_size)
    ids = inputs.as_integers(function, "positions", positions, "int64 or int32")
    if ids.ndim not in (1, 2):
        raise WhetValueError(f"{function}: positions has shape {ids.shape}, expected (T,) or (B, T).")
    check_heads(function, "query", query, ids.shape, head_size)
    if key is not None:
        check_heads(function, "key", key, ids.shape, head_size)
    return ids, head_size


def check_heads(
    function: str, name: str, x: Any, leading: tuple[int, ...], head_size: int, device: str = "cpu"
) -> None:
    """Raise unless x, with the shape ``leading`` of positions and on this type of device, can be rotated in place."""
    where, is_tensor = f"{function}: {name}", inputs.is_tensor(x)
    if not is_tensor and type(x) not in (np.ndarray,):
        raise WhetTypeError(
            f"{where} is a {type(x).__name__}, expected a NumPy array or a torch tensor: it is written in place."
        )
    if is_tensor and x.requires_grad:
        raise WhetValueError(f"{where} requires grad, but this function is not differentiable. Pass {name}.detach().")
    if is_tensor and x.device.type != device:
        raise WhetValueError(f"{where} is on {x.device}, expected a {device.upper()} tensor. Pass {name}.{device}().")
    if is_tensor:
        inputs.check_memory(function, name, x)
        if x.is_neg():
            raise WhetValueError(f"{where} is lazily negated, but it is written in place. Pass {name}.resolve_neg().")
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16"):
        cast = f"{name}.to(torch.float32)" if is_tensor else f"{name}.astype(np.float32)"
        raise WhetTypeError(f"{where} has dtype {dtype}, expected float32 or bfloat16. Pass {cast}.")
    shape, n = tuple(x.shape), len(leading)
    fits = shape[:n] == leading and len(shape) in (n + 1, n + 2)
    if not fits or (shape[-1] % head_size if len(shape) == n + 1 else shape[-1] != head_size):
        raise WhetValueError(
            f"{where} has shape {shape}, but positions has {leading} and head_size is {head_size}. "
            "Expected (*positions.shape, n_heads * head_size) or (*positions.shape, n_heads, head_size)."
        )
    strides = x.stride() if is_tensor else [step // x.itemsize for step in x.strides]
    if 0 in shape:
        return
    if not is_tensor and not x.flags.writeable:
        raise WhetValueError(f"{where} is read-only, but it is written in place. Pass {name}.copy().")
    if strides[-1] != 1:
        raise WhetValueError(
            f"{where} has strides {tuple(strides)}, expected 1 along the last axis. Pass a contiguous copy."
        )
    if any(size > 1 and step == 0 for size, step in zip(shape, strides, strict=True)):
        raise WhetValueError(f"{where} is expanded: elements share memory. Pass a contiguous copy.")


def _check_rows(function: str, positions: np.ndarray, lowest: int, highest: int, what: str, fix: str) -> None:
    outside = np.argwhere((positions < lowest) | (positions > highest))
    if len(outside):
        at = tuple(outside[0].tolist())
        raise WhetValueError(
            f"{function}: positions[{', '.join(map(str, at))}] is {positions[at]}, outside {what}. "
            f"{fix}, or exclude padding."
        )


def _apply_converted(function: str, core: Any, positions: Any, query: Any, key: Any, *rest: Any) -> None:
    if core(positions, query, key, *rest) is not None:
        raise WhetTypeError(
            f"{function}: query or key has a memory layout that cannot be written in place. Pass a contiguous copy."
        )
