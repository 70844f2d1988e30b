"""Suites, one module each with a ``SUITE``: in this package, and in ``benchmarks/suites`` of a clone.

Suites that need peers (TRL, llama.cpp, a browser) are in the repository but not in the wheel. A new module in either
folder is a new suite; there is no list.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from pathlib import Path

import whet
from whet.bench.case import Suite
from whet.errors import WhetValueError

CLONE = Path(whet.__file__).resolve().parents[2]
"""Root of the repository, if Whet is installed from a clone (editable); else a folder without ``benchmarks``."""
_PACKAGES = {"whet.bench.suites": __path__[0], "benchmarks.suites": str(CLONE / "benchmarks" / "suites")}


def _modules() -> dict[str, str]:
    """Map suite names to their modules."""
    return {
        module.name.replace("_", "-"): f"{package}.{module.name}"
        for package, folder in _PACKAGES.items()
        for module in pkgutil.iter_modules([folder])
    }


def in_clone() -> bool:
    """Whether the suites that need peers are available."""
    return Path(_PACKAGES["benchmarks.suites"]).is_dir()


def suite_names() -> list[str]:
    """List the available suites by their names in ``whet bench``."""
    return sorted(_modules())


def load_suite(name: str) -> Suite:
    """Import a suite.

    Raises:
        WhetValueError: there is no suite of this name, or it is available only in a clone of the repository.
    """
    modules = _modules()
    if name not in modules:
        close, names = difflib.get_close_matches(name, modules, n=1), ", ".join(suite_names())
        hint = f"Did you mean {close[0]}?" if close else f"There are: {names}."
        if not in_clone():
            hint = f"The installed package has: {names}. Others need a clone of the repository (pip install -e CLONE)."
        raise WhetValueError(f"whet bench: there is no suite {name!r}. {hint}")
    if modules[name].startswith("benchmarks.") and str(CLONE) not in sys.path:
        sys.path.insert(0, str(CLONE))  # an editable install adds only src
    return importlib.import_module(modules[name]).SUITE
