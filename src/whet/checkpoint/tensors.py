"""Tensors of torch and arrays of NumPy as bytes of safetensors files, and back.

Torch is imported only to read tensors of torch.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.errors import CheckpointError, MissingExtraError, WhetTypeError


class StoredTensor(NamedTuple):
    """A tensor as its bytes.

    Attributes:
        dtype: its name in safetensors.
        shape: the shape.
        itemsize: bytes of an element.
        data: the bytes, uint8.
    """

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    data: np.ndarray


def store_tensor(tensor: Any, where: str) -> StoredTensor:
    """Return the bytes of a tensor or array: its own memory if that is contiguous and on the CPU.

    Raises:
        WhetTypeError: neither, a sparse tensor, one without data, or a dtype that safetensors lacks.
    """
    if isinstance(tensor, np.ndarray):
        dtype = _check_dtype(_array_dtype(tensor.dtype), tensor.dtype, where)
        return StoredTensor(
            dtype, tensor.shape, tensor.itemsize, np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        )
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        what = type(tensor).__name__
        raise WhetTypeError(f"save_checkpoint: {where} is a {what}, expected a torch.Tensor or a NumPy array.")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        what = f"{tensor.layout} on {tensor.device}"
        raise WhetTypeError(f"save_checkpoint: {where} is {what}, expected a dense tensor with data.")
    dtype = _check_dtype(_tensor_dtype(tensor.dtype), tensor.dtype, where)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy()
    return StoredTensor(dtype, tuple(tensor.shape), tensor.element_size(), data)


def same_memory_key(tensor: Any) -> tuple:
    """Return a key that is equal for two non-empty tensors exactly if they are the same view of the same memory."""
    if isinstance(tensor, np.ndarray):
        return tensor.ctypes.data, tensor.dtype, tensor.shape, tensor.strides
    view = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    return tensor.device, *view, tensor.is_conj(), tensor.is_neg()


def lay_out(tensors: Mapping[str, StoredTensor]) -> list[Any]:
    """Return the bytes of a safetensors file: header, then the tensors, widest dtype first, so that each is aligned.

    The library's ``save_file`` is not used because the digest is computed while writing: reading a checkpoint again to
    hash it costs as much as writing it.
    """
    header: dict[str, Any] = {}
    chunks: list[Any] = []
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        start, end = end, end + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        chunks.append(tensor.data.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *chunks]


def read_tensors(file: Path, as_arrays: bool) -> dict[str, Any]:
    """Return copies of the tensors of a safetensors file, of torch or of NumPy.

    Raises:
        CheckpointError: the file cannot be read, or a dtype that NumPy lacks.
    """
    library, error_class = _import_safetensors("numpy" if as_arrays else "torch")
    try:
        # load_file of torch maps the file, which may change.
        copy = (lambda array: array) if as_arrays else (lambda tensor: tensor.clone())
        return {name: copy(tensor) for name, tensor in library.load_file(file).items()}
    except (error_class, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"load_checkpoint: {file} cannot be read: {error}.") from error


@functools.cache
def _array_dtype(dtype: np.dtype) -> str | None:
    return _saved_dtype(lambda: _import_safetensors("numpy")[0].save({"x": np.empty(0, dtype)}))


@functools.cache
def _tensor_dtype(dtype: Any) -> str | None:
    import torch

    return _saved_dtype(lambda: _import_safetensors("torch")[0].save({"x": torch.empty(0, dtype=dtype)}))


def _saved_dtype(save_empty: Callable[[], bytes]) -> str | None:
    """Return the name of a dtype in the header that the library writes; None: it has no such dtype."""
    try:
        empty = save_empty()
    except KeyError:
        return None
    return json.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])["x"]["dtype"]


def _check_dtype(name: str | None, dtype: Any, where: str) -> str:
    if name is None:
        what = f"{where} is of dtype {dtype}: safetensors has no such dtype"
        raise WhetTypeError(f"save_checkpoint: {what}. Convert the tensor.")
    return name


def _import_safetensors(framework: str) -> tuple[Any, type[Exception]]:
    """Return the library's module for a framework, and its error."""
    try:
        import safetensors

        if framework == "numpy":
            import safetensors.numpy as library
        else:
            import safetensors.torch as library
    except ImportError as error:
        raise MissingExtraError("whet.checkpoint", error.name or framework, "train") from error
    return library, safetensors.SafetensorError
