"""Every error that Whet raises on purpose.

Each is a ``WhetError`` and also the builtin that fits, so callers catch either. A message names the
function, the argument, what came, what was expected, and the fix.
"""

from __future__ import annotations


class WhetError(Exception):
    """Base of every error that Whet raises on purpose."""


class WhetValueError(WhetError, ValueError):
    """An argument of the right type holds something that cannot be used."""


class WhetTypeError(WhetError, TypeError):
    """An argument has the wrong type or dtype."""


class MissingExtraError(WhetError, ImportError):
    """A part of Whet needs a package that an optional extra installs."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}. Install it with: pip install 'whet[{extra}]'")


class RewardError(WhetValueError):
    """A reward or preference function raised, hung, or returned something that is no score."""


class CheckpointError(WhetValueError):
    """A checkpoint is missing, incomplete, altered, or does not fit the object it is loaded into."""


class NonFiniteError(WhetError, ArithmeticError):
    """Loss or gradients stayed NaN or infinite for too many steps in a row."""


class FolderInUseError(WhetValueError):
    """Another process has locked the folder of a run, or of its checkpoints."""


class DiskFullError(WhetError, OSError):
    """A file was not written for lack of space; what was there before is whole."""

    def __init__(self, error_number: int, message: str) -> None:
        super().__init__(error_number, message)

    def __str__(self) -> str:
        return str(self.strerror)
