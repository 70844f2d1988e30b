"""``whet train``: trains with a progress bar and prints notes and a summary; ``whet.runs`` does the work."""

from __future__ import annotations

import errno

from whet.errors import DiskFullError
from whet.runs.settings import RunConfig
from whet.runs.training import train
from whet.training.loggers import ProgressLogger


def main(run: RunConfig) -> int:
    """Train with the settings ``run``, print a summary and return 0."""
    try:
        result = train(run, loggers=[ProgressLogger(description=run.method())], notify=_print_line)
    except DiskFullError as error:
        raise DiskFullError(error.errno or errno.ENOSPC, f"{error} The same command resumes the run.") from error
    if result.summary:
        _print_line(result.summary)
    return 0


def _print_line(text: str) -> None:
    print(text, flush=True)
