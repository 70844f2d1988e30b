"""Checkpoints: folders of safetensors and JSON.

``whet.checkpoint.modules`` describes trees of torch modules.
"""

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

__all__ = [
    "capture_rng",
    "latest_checkpoint",
    "load_checkpoint",
    "prune_checkpoints",
    "restore_rng",
    "save_checkpoint",
    "step_folder",
]
