"""Environments of other libraries, each in a separate Python environment with the versions that it pins.

The tests themselves are in libraries/, and run by pytest there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.wide.test_clients import environment

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "games": ["gem-llm==0.1.0", "textarena==0.7.4", "skyrl-gym==0.4.0"],
    "harnesses": ["verifiers==0.4.0", "textarena==0.7.4", "uv"],
}


@pytest.mark.parametrize("name", PACKAGES)
def test_environments_of_libraries(name: str) -> None:
    python = environment(name, PACKAGES[name], inherits=True)
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))  # verifiers starts uv
    modules = [entry for entry in sys.path if not entry.endswith("site-packages")]  # whose versions are others
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(modules), "PATH": path}
    given["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins of the libraries' dependencies
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/wide/libraries/{name}.py"]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
