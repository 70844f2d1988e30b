"""What a call refuses, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def assert_raises(
    error: type[BaseException], message: str, function: Callable[..., object], /, *arguments: Any, **settings: Any
) -> None:
    """``function(*arguments, **settings)`` raises ``error`` with a text in which ``message``, a regex, is found."""
    __tracebackhide__ = True
    with pytest.raises(error, match=message):
        function(*arguments, **settings)
