"""Plain values as standard JSON, and back, without loss.

JSON lacks NaN, infinities, tuples, dict keys other than strings, and torch dtypes. Such values are encoded as
``{"$": "tuple", "value": [1, 2]}``. Objects of other classes are rejected, and decoding runs no code.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.errors import CheckpointError, WhetTypeError

if TYPE_CHECKING:
    import torch

TAG = "$"
"""A dict with this key is an encoded value of another type: ``{"$": "tuple", "value": [1, 2]}``."""


def encode(value: Any, where: str, special: Callable[[Any, str], Any] | None = None) -> Any:
    """Convert a value to standard JSON types; ``decode`` inverts it.

    Accepts None, bool, int, float (NaN and infinities too), str, list, tuple, dict, torch.dtype, torch.Size,
    torch.device and NumPy scalars (decoded as Python numbers).

    Args:
        value: the value to encode.
        where: the value's name, for the error message.
        special: called with (value, where) for every value of another type; returns its JSON or raises.

    Raises:
        WhetTypeError: a value has another type, and ``special`` is not given.
    """
    kind, torch = type(value), sys.modules.get("torch")
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {TAG: "float", "value": repr(value)}
    if kind is list:
        return [encode(item, f"{where}[{i}]", special) for i, item in enumerate(value)]
    if kind is tuple or (torch is not None and kind is torch.Size):
        name = "tuple" if kind is tuple else "size"
        return {TAG: name, "value": [encode(item, f"{where}[{i}]", special) for i, item in enumerate(value)]}
    if kind is dict and TAG not in value and all(type(key) is str for key in value):
        return {key: encode(item, f"{where}[{key!r}]", special) for key, item in value.items()}
    if kind is dict:
        pairs = [[encode(k, where, special), encode(v, f"{where}[{k!r}]", special)] for k, v in value.items()]
        return {TAG: "dict", "value": pairs}
    if torch is not None and kind is torch.dtype:
        return {TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if torch is not None and kind is torch.device:
        return {TAG: "device", "value": str(value)}
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, str):
        return encode(value.item(), where)
    if special is not None:
        return special(value, where)
    raise WhetTypeError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot store. "
        f"Store numbers, strings, lists, tuples and dicts of them; tensors go into a tensor group."
    )


def decode(value: Any, special: Callable[[str, Any], Any] | None = None) -> Any:
    """Return the value that ``encode`` was given. ``special`` is called with (tag, content) for other tags.

    Raises:
        CheckpointError: a tag is unknown.
    """
    if isinstance(value, list):
        return [decode(item, special) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(item, special) for key, item in value.items()}
    tag, content = value[TAG], value["value"]
    if tag == "float":
        return float(content)
    if tag == "tuple":
        return tuple(decode(item, special) for item in content)
    if tag == "size":
        import torch

        return torch.Size(content)
    if tag == "dict":
        return {decode(k, special): decode(v, special) for k, v in content}
    if tag == "dtype":
        return dtype_named(content)
    if tag == "device":
        import torch

        return torch.device(content)
    if special is not None:
        return special(tag, content)
    raise CheckpointError(f"decode: a value is tagged {tag!r}, which this version of Whet does not support.")


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of this name, such as "bfloat16" for torch.bfloat16.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    import torch

    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"decode: {name!r} is not a dtype of torch.")
    return dtype
