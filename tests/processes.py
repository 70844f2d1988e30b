"""Python code and ``whet`` commands in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys

WHET = [sys.executable, "-c", "import sys; from whet.cli import main; sys.exit(main())"]
"""The ``whet`` command without arguments."""


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code; the result has its output and exit status."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **environment})


def printed_by(code: str, *arguments: object, **environment: str) -> str:
    """Return the output of Python code, which must exit with status 0."""
    done = run_python(code, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
