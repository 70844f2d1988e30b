"""Cache on disk of a frozen reference's log-probs, for later runs over the same pairs.

One file per model, keyed by a digest of its weights and settings and by the arithmetic; one line per row, keyed by a
digest of its token ids, so that a hit equals a recomputation. Rows are written as soon as they are added: a run that is
killed loses none.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from whet.errors import WhetValueError
from whet.files import drop_torn_line
from whet.nn.frozen import base_of
from whet.nn.modules import inner_module

_IRRELEVANT = (
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "base_model_name_or_path", "peft_version",
    "inference_mode",
)  # fmt: skip
"""Config fields that do not affect results: its origin, and dtypes, which the tensors determine."""

Sums = tuple[float, float]
"""Log-probs of the chosen and the rejected completion of a pair, summed over tokens."""


class ReferenceCache:
    """Summed log-probs of one reference, by row.

    Args:
        folder: created if missing.
        reference: the model.
        adapters_off: identify the reference by its frozen parameters only: a PEFT model with adapters off.
        arithmetic: backend that computes the sums: "bfloat16", "float32" or "torch".

    Raises:
        WhetValueError: ``folder`` is a file, or its file for this reference is damaged.
    """

    def __init__(
        self, folder: str | os.PathLike[str], reference: nn.Module, arithmetic: str, adapters_off: bool = False
    ) -> None:
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise WhetValueError(f"reference_cache: {str(path)!r} is a file. Name a folder.")
        path.mkdir(parents=True, exist_ok=True)
        self._path = path / f"{model_digest(reference, adapters_off)[:32]}-{arithmetic}.jsonl"
        self._sums: dict[str, Sums] = {}
        if self._path.exists():
            drop_torn_line(self._path)
            for number, line in enumerate(self._path.read_text(errors="replace").splitlines(), 1):
                try:
                    key, chosen, rejected = json.loads(line)
                    self._sums[key] = (float(chosen), float(rejected))
                except (TypeError, ValueError):
                    raise WhetValueError(
                        f"reference_cache: line {number} of {str(self._path)!r} is {line[:60]!r}, expected a row's "
                        "digest and two numbers. Delete the line, or the file: missing sums are computed again."
                    ) from None

    def __getitem__(self, row: Sequence[Sequence[int]]) -> Sums | None:
        """Return the sums of a row (prompt, chosen and rejected token ids); None: unknown."""
        return self._sums.get(row_digest(row))

    def add(self, rows: Iterable[tuple[Sequence[Sequence[int]], Sums]]) -> None:
        """Store the sums of rows."""
        new = {row_digest(row): sums for row, sums in rows}
        with self._path.open("a") as file:
            file.writelines(json.dumps([key, *sums]) + "\n" for key, sums in new.items())
        self._sums |= new


def model_digest(model: nn.Module, adapters_off: bool = False) -> str:
    """Return the SHA-256 of a model's tensors, their names, its packed base, and its settings.

    Settings matter because equal weights may give other log-probs: the config of a Hugging Face model, without its
    origin, or the ``repr`` of any other module, which shows names, sizes and constants; and the settings of PEFT
    adapters, unless adapters are off.
    """
    digest = hashlib.sha256(_settings(model).encode())
    if not adapters_off:
        digest.update(_adapter_settings(model).encode())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if adapters_off and tensor.requires_grad:
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    base = base_of(model)
    if base is not None:
        digest.update(base.digest().encode())
    return digest.hexdigest()


def _settings(model: nn.Module) -> str:
    inner = inner_module(model)
    config: Any = getattr(inner, "config", None)
    if not hasattr(config, "to_dict"):
        return repr(inner)
    settings = _relevant_settings(config)
    settings["_attn_implementation"] = getattr(config, "_attn_implementation", None)
    return json.dumps(settings, sort_keys=True, default=repr)


def _adapter_settings(model: nn.Module) -> str:
    configs = getattr(model, "peft_config", None)
    if not configs:
        return ""
    settings = {name: _relevant_settings(config) for name, config in configs.items()}
    return json.dumps([settings, cast(Any, model).active_adapters], sort_keys=True, default=_sorted)


def _relevant_settings(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}


def _sorted(value: Any) -> str:
    return repr(sorted(value)) if isinstance(value, (set, frozenset)) else repr(value)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def row_digest(row: Sequence[Sequence[int]]) -> str:
    """Return 32 hexadecimal digits that identify a row (prompt, chosen and rejected token ids)."""
    digest = hashlib.sha256()
    for part in row:
        digest.update(array("q", [len(part), *part]).tobytes())
    return digest.hexdigest()[:32]
