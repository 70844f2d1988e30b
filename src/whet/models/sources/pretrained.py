"""Open a model by its path: a folder or a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from whet.models.slots import ModelSource
from whet.models.sources.folder import open_folder, read_config
from whet.models.sources.gguf import open_gguf, read_options
from whet.models.sources.gguf_container import GGUFFile


def open_pretrained(path: str | os.PathLike[str] | GGUFFile, *, max_position: int | None = None) -> ModelSource:
    """Open a Hugging Face folder or a GGUF file; see ``open_folder`` and ``open_gguf``."""
    if isinstance(path, GGUFFile):
        return open_gguf(path, max_position=max_position)._replace(path=os.path.abspath(path.paths[0]))
    read = open_gguf if Path(path).is_file() else open_folder
    return read(path, max_position=max_position)._replace(path=os.path.abspath(path))


def read_model_config(model: str | os.PathLike[str] | GGUFFile, where: str) -> dict[str, Any]:
    """Read the config of a Hugging Face folder, or translate a GGUF file's metadata into one; see ``read_options``."""
    return read_options(model, where) if isinstance(model, GGUFFile) else read_config(Path(model), where)
