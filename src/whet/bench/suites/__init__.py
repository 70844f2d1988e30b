"""The suites, one short module each with a ``SUITE``. A new module here is a new suite: nothing lists them."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from whet.bench.case import Suite
from whet.errors import WhetValueError


def suite_names() -> list[str]:
    """Every suite, as ``whet bench`` calls it."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def load_suite(name: str) -> Suite:
    """The suite of a name.

    Raises:
        WhetValueError: there is none of that name.
    """
    if name not in suite_names():
        close = difflib.get_close_matches(name, suite_names(), n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(suite_names())}."
        raise WhetValueError(f"whet bench: there is no suite {name!r}. {hint}")
    return importlib.import_module(f"whet.bench.suites.{name.replace('-', '_')}").SUITE
