"""Models: architecture, families, weight formats, sizes, and the files that models are read from."""

from __future__ import annotations

from whet.models.architecture import ModelConfig

__all__ = ["ModelConfig"]
