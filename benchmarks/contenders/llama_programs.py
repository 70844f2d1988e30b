"""Programs of llama.cpp."""

from __future__ import annotations

import shutil

from whet.bench.case import NotMeasured
from whet.bench.suites import CLONE

BUILT = CLONE / "build" / "llama.cpp" / "bin"
"""The folder in which ``tools/llama_server.py`` builds them."""


def find_llama_program(name: str, given: str = "") -> str:
    """Return the path of a program: the given one, else the one that is built here, else the one on PATH.

    Raises:
        NotMeasured: there is none.
    """
    found = shutil.which(given or str(BUILT / name)) or (None if given else shutil.which(name))
    if found is None:
        named = f"; --{name} names another" if name == "llama-server" else ""
        raise NotMeasured(f"{given or name} is missing: python3 tools/llama_server.py builds it{named}")
    return found
