"""Open a model by its path: a folder or a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

from whet.models.slots import ModelSource
from whet.models.sources.folder import open_folder
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import GGUFFile


def open_pretrained(path: str | os.PathLike[str] | GGUFFile, *, max_position: int | None = None) -> ModelSource:
    """Open a Hugging Face folder or a GGUF file; see ``open_folder`` and ``open_gguf``."""
    if isinstance(path, GGUFFile):
        return open_gguf(path, max_position=max_position)._replace(path=os.path.abspath(path.paths[0]))
    read = open_gguf if Path(path).is_file() else open_folder
    return read(path, max_position=max_position)._replace(path=os.path.abspath(path))
