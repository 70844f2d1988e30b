"""``whet convert``: converts a GGUF file to a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from whet.cli.merge import FolderDtype, write_folder
from whet.cli.settings import parse_flags
from whet.errors import WhetValueError


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Convert a GGUF file to a Hugging Face folder, with tokenizer and chat template."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL.gguf")]
    """A .gguf file; any part of a split model."""
    output: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write."""
    dtype: FolderDtype = "auto"
    """Dtype of the weights; auto: the most frequent dtype of the file, or bfloat16 if it is quantised."""
    overwrite: bool = False
    """Replace an existing folder."""


def main(argv: Sequence[str]) -> int:
    """Write the folder and return 0."""
    options = parse_flags(ConvertConfig, argv, "whet convert")
    if Path(options.model).is_dir():
        raise WhetValueError(
            f"whet convert: {options.model!r} is a folder, expected a .gguf file; whet export writes one."
        )
    write_folder(options.model, "", options.output, options.dtype, options.overwrite, "whet convert")
    return 0
