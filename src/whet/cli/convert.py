"""``whet convert``: a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from whet.cli.merge import FolderDtype, write_folder
from whet.errors import WhetValueError


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Write the model of a GGUF file as a Hugging Face folder, with its tokenizer and chat template."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL.gguf")]
    """A .gguf file; of a model in parts any of them."""
    output: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """The folder to write."""
    dtype: FolderDtype = "auto"
    """Of the weights; auto: that of most of the file's, and bfloat16 of a quantised one."""
    overwrite: bool = False
    """Replace a folder that is there."""


def main(argv: Sequence[str]) -> int:
    """Writes the folder; the exit status is 0."""
    asked = tyro.cli(ConvertConfig, args=argv, prog="whet convert")
    if Path(asked.model).is_dir():
        raise WhetValueError(f"whet convert: {asked.model!r} is a folder. Name a .gguf file; whet export writes one.")
    write_folder(asked.model, "", asked.output, asked.dtype, asked.overwrite, "whet convert")
    return 0
