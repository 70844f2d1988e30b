"""Checkpoints: folders of safetensors and JSON (``folder``), and descriptions of module trees (``modules``)."""

from __future__ import annotations

from whet.checkpoint.folder import (
    capture_rng,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    restore_rng,
    save_checkpoint,
    step_folder,
)
from whet.checkpoint.modules import build_module, describe_module, load_module_tensors, module_tensors

__all__ = [
    "build_module",
    "capture_rng",
    "describe_module",
    "latest_checkpoint",
    "load_checkpoint",
    "load_module_tensors",
    "module_tensors",
    "prune_checkpoints",
    "restore_rng",
    "save_checkpoint",
    "step_folder",
]
