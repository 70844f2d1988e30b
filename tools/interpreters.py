"""The installed Python interpreters of the versions that Whet supports."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def find_interpreters() -> dict[str, str]:
    """Map versions to interpreters, preferring the distribution's."""
    on_path = [shutil.which(f"python{version}") for version in VERSIONS]
    installed = sorted(Path.home().glob(".pyenv/versions/*/bin/python3"))
    found: dict[str, str] = {}
    for python in filter(None, ["/usr/bin/python3", *installed, *on_path]):
        if Path(python).exists():
            code = "import sys; print('{}.{}'.format(*sys.version_info))"
            printed = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            if (version := printed.stdout.strip()) in VERSIONS:
                found.setdefault(version, str(python))
    return found
