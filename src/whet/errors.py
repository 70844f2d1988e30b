"""Every error that Whet raises on purpose, and checks of single arguments.

Each error is a ``WhetError`` and also the builtin that fits, so callers catch either. A message names the
function, the argument, its value, the expected value, and the fix.
"""

from __future__ import annotations

import importlib.util
import math
import typing
from numbers import Integral, Real
from typing import Any


class WhetError(Exception):
    """Base of every error that Whet raises on purpose."""


class WhetValueError(WhetError, ValueError):
    """An argument has the right type and an invalid value."""


class WhetTypeError(WhetError, TypeError):
    """An argument has the wrong type or dtype."""


DEPENDENCIES = ("tokenizers", "safetensors", "jinja2", "tyro", "rich", "tomli_w")
"""Modules of the packages that Whet depends on, except NumPy; missing if Whet was installed without dependencies."""


class MissingExtraError(WhetError, ImportError):
    """A package of an optional extra, or a dependency, is missing."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(what, package, extra)

    def __str__(self) -> str:
        what, package, extra = self.args
        source = "whet" if package in DEPENDENCIES else f"'whet[{extra}]'"
        return f"{what} needs {package}. Install it with: pip install {source}"


def check_installed(what: str, *modules: str, extra: str = "train", package: str | None = None) -> None:
    """Raise a MissingExtraError for the first missing module; ``package`` is its name on PyPI."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(what, package or module, extra)


class RewardError(WhetValueError):
    """A reward or preference function raised, hung, or returned something other than a score."""


class RowError(WhetValueError, WhetTypeError):
    """A row of a dataset is invalid; the message begins with the row's file and line, or its index."""


class CheckpointError(WhetValueError):
    """A checkpoint is missing, incomplete, corrupted, or does not fit the object that loads it."""


class NonFiniteError(WhetError, ArithmeticError):
    """Loss or gradients stayed NaN or infinite for too many steps in a row."""


class RankError(WhetError, RuntimeError):
    """Ranks cannot reach each other, or one of them failed.

    Attributes:
        is_reported: whether the failing rank reports its error itself.
    """

    is_reported = False


class FolderInUseError(WhetValueError):
    """Another process has locked the folder of a run or of its checkpoints."""


class DiskFullError(WhetError, OSError):
    """A file was not written for lack of space; its previous content is intact."""

    def __init__(self, error_number: int, message: str) -> None:
        super().__init__(error_number, message)

    def __str__(self) -> str:
        return str(self.strerror)


class DownloadError(WhetError, OSError):
    """A published file cannot be downloaded, or its SHA-256 differs."""


def check_integer(where: str, name: str, value: Any, least: int, *, optional: bool = False) -> Any:
    """Return ``value`` as an int, which must be at least ``least``, or None if ``optional``.

    Raises:
        WhetValueError: the value is anything else; the message begins with ``where``, the caller's name.
    """
    if value is None and optional:
        return None
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or not least <= number < 1 << 63:
        none = ", or None" if optional else ""
        limit = " and < 2^63" if number is not None and number >= least else ""
        raise WhetValueError(f"{where}: {name} is {value!r}, expected an integer >= {least}{limit}{none}.")
    return number


def check_unicode(where: str, text: str) -> None:
    """Reject a text with lone surrogates, which no tokenizer accepts; ``where`` is the caller's name.

    Raises:
        WhetValueError: the message quotes the surrogate and its context.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.start + 20]
        raise WhetValueError(
            f"{where}: the text has the lone surrogate {text[error.start]!r} in {around!r}: half of a character, or a "
            f"byte that is not UTF-8. Fix the text."
        ) from error


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite real number, but not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_temperature(value: Any) -> bool:
    """Whether float32 logits can be divided by ``value`` without overflow."""
    return is_number(value) and 1e-30 <= value <= 1e30


def check_temperature(where: str, value: Any) -> None:
    """Raise a WhetValueError for a temperature by which float32 logits cannot be divided."""
    if not is_temperature(value):
        raise WhetValueError(
            f"{where}: temperature is {value!r:.60}, expected a finite number > 0, from 1e-30 to 1e30."
        )


def check_choice(where: str, name: str, value: Any, choices: Any) -> None:
    """Raise a WhetValueError for a ``value`` that is not among the ``choices`` of a Literal type."""
    if value not in typing.get_args(choices):
        raise WhetValueError(f"{where}: {name} is {value!r}, expected one of {', '.join(typing.get_args(choices))}.")
