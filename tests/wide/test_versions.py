"""Library versions of pyproject.toml: the oldest, the newest, and two between them.

Each set of versions gets a virtual environment below build/versions that links torch from the current environment:
older versions of torch have no CPU build on the index. The environment runs ``promises.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from whet import _core
from whet.config.toml import read_toml

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "versions"
EXTRAS = ("train", "peft", "datasets")
NEEDED_BY_TORCH = ["sympy", "networkx", "filelock", "fsspec", "typing_extensions", "setuptools"]


def oldest() -> list[str]:
    """List the lower bounds in pyproject.toml, except torch's."""
    project = read_toml(ROOT / "pyproject.toml")["project"]
    lines = project["dependencies"] + [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    found = []
    for needed in map(Requirement, lines):
        if needed.name != "torch" and (needed.marker is None or needed.marker.evaluate()):
            [bound] = [specifier.version for specifier in needed.specifier if specifier.operator == ">="]
            found.append(f"{needed.name}=={bound}")
    return found


VERSIONS = {
    "oldest": [*oldest(), "pyarrow==18"],  # newer versions need NumPy 2, which their metadata omit
    "last 4": ["transformers==4.57.6", "peft==0.17.0", "datasets==4.0.0"],
    "first 5": ["transformers==5.0.0", "peft==0.18.0", "datasets==4.7.0"],
    "newest": ["transformers", "peft", "datasets"],
}


@cache
def environment(name: str) -> Path:
    """Create an environment with these versions, or again if they changed; return its interpreter."""
    folder, wanted = WORK / name.replace(" ", "-"), json.dumps(VERSIONS[name])
    python, stamp = folder / "bin" / "python", folder / "versions.json"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    theirs = Path(torch.__file__).parent.parent
    for path in (*theirs.glob("torch"), *theirs.glob("torch-*"), *theirs.glob("torchgen"), *theirs.glob("functorch")):
        (packages / path.name).symlink_to(path)
    (packages / "whet").mkdir()
    for path in (*(ROOT / "src" / "whet").iterdir(), Path(_core.__file__)):
        if not (packages / "whet" / path.name).exists():
            (packages / "whet" / path.name).symlink_to(path)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    others = [Requirement(line).name for line in oldest()]
    named = {Requirement(line).name for line in VERSIONS[name]}
    subprocess.run([*pip, *VERSIONS[name], *(x for x in others if x not in named), *NEEDED_BY_TORCH], check=True)
    stamp.write_text(wanted)
    return python


def run(name: str, *arguments: object) -> None:
    """Run promises.py in an environment; its errors fail the test."""
    command = [environment(name), "-m", "tests.wide.promises", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of every family by the newest libraries and Whet."""
    folder = tmp_path_factory.mktemp("newest")
    run("newest", "write", folder)
    return folder


@pytest.mark.parametrize("name", VERSIONS)
def test_folders_and_trained_models_are_compatible_between_versions(name, folders, tmp_path):
    run(name, "use", folders, tmp_path)
    run("newest", "read", tmp_path)
