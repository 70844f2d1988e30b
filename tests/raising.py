"""Refusals: the error of a call, and the facts that its message must hold.

A test names the facts of a message (argument, value, expected value, fix), not its words, so that a sentence can be
improved without the tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def mentions(*facts: object) -> str:
    """A regex for ``match=`` that is found in texts with each of ``facts``, in any order."""
    return "(?s)^" + "".join(f"(?=.*{re.escape(str(fact))})" for fact in facts)


def assert_mentions(text: str, *facts: object) -> None:
    """Assert that a printed text has each of ``facts``."""
    __tracebackhide__ = True
    missing = [fact for fact in facts if str(fact) not in text]
    assert not missing, f"{missing} missing in: {text}"


def assert_raises(
    error: type[BaseException],
    message: str | tuple[object, ...],
    function: Callable[..., object],
    /,
    *arguments: Any,
    **settings: Any,
) -> None:
    """Assert that ``function(*arguments, **settings)`` raises ``error`` with these facts or this regex."""
    __tracebackhide__ = True
    with pytest.raises(error, match=message if isinstance(message, str) else mentions(*message)):
        function(*arguments, **settings)
