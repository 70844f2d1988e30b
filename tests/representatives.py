"""Cases of which ``make test`` runs representatives, and ``make wide`` the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def cases(values: Iterable[Any], is_representative: Callable[[Any], bool]) -> list[Any]:
    """Return the values for ``pytest.mark.parametrize``, with the mark "wide" on those that make test leaves out."""
    return [value if is_representative(value) else _wide(value) for value in values]


def _wide(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.wide)
