"""``whet train --ranks``: torchrun on this machine, with restarts only after crashes.

torchrun restarts all ranks whatever ended one of them. A rank whose run is over, by a user error or by a signal to
stop, records that here first: then no rank is restarted, and the command's exit status is the rank's.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from whet import _core
from whet.errors import RankError, WhetError
from whet.system.processes import STOP_RANKS, set_parent_death_signal

_RESTARTS = 3
_PATIENCE_S = 20
_STATUS_FILE, _LAUNCHER = "WHET_RANKS_STATUS", "WHET_RANKS_LAUNCHER"


def start_ranks(n: int, command: Sequence[str]) -> NoReturn:
    """Replace this process by one that runs Python with these arguments on ``n`` ranks.

    Raises:
        WhetError: the system is Windows.
    """
    if STOP_RANKS is None:
        raise WhetError(
            f"whet train: --ranks {n} needs signals that Windows lacks. Train without it: one process uses all "
            f"processors."
        )
    threads = str(max(1, _core.n_processors() // n))
    given = {"OMP_NUM_THREADS": threads, "WHET_NUM_THREADS": threads} | os.environ
    # Otherwise restarted ranks would read the addresses of the dead ranks.
    environment = given | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "whet.training.launch", str(n), *command], environment)


def end_ranks(status: int, message: str) -> None:
    """Print why this process ends, and under ``whet train --ranks`` prevent a restart.

    The command exits with ``status``. If several ranks fail, only the first prints.
    """
    if (file := os.environ.get(_STATUS_FILE)) is not None:
        try:
            with open(file, "x", encoding="ascii") as status_file:
                status_file.write(str(status))
        except FileExistsError:
            return
    print(message, file=sys.stderr, flush=True)
    if file is not None and STOP_RANKS is not None:
        with suppress(OSError):
            os.kill(int(os.environ[_LAUNCHER]), STOP_RANKS)


def is_over() -> bool:
    """Whether a rank of ``whet train --ranks`` has reported the end of the run."""
    file = os.environ.get(_STATUS_FILE)
    return file is not None and os.path.exists(file)


def end_with_launcher() -> None:
    """Make Linux kill this rank when its launcher dies, so that the run's folder is unlocked for the same command.

    A launcher that is killed cannot end its ranks: they would continue to train, unsupervised.
    """
    if _LAUNCHER in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        set_parent_death_signal(int(os.environ.get(_LAUNCHER, os.getppid())))


def is_reported_elsewhere(error: RankError) -> bool:
    """Whether another rank of ``whet train --ranks`` reports the failure; wait until it has."""
    file = os.environ.get(_STATUS_FILE)
    if file is None:
        return False
    end = time.monotonic() + (_PATIENCE_S if error.is_reported else 0)
    while not os.path.exists(file) and time.monotonic() < end:  # if this rank ended first, torchrun would kill that one
        time.sleep(0.02)
    return os.path.exists(file)


class _RunOver(BaseException):
    """A rank has reported that the run is over."""


def _end(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise _RunOver


def _main(n: str, command: Sequence[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # ranks print their errors, and this process the last one
    with tempfile.TemporaryDirectory(prefix="whet-ranks-") as folder:
        file = Path(folder) / "status"
        os.environ |= {_STATUS_FILE: str(file), _LAUNCHER: str(os.getpid())}
        if STOP_RANKS is not None:
            signal.signal(STOP_RANKS, _end)
        try:
            run.main(["--standalone", "--nproc-per-node", n, "--max-restarts", str(_RESTARTS), *command])
        except _RunOver:
            pass
        except SignalException as stopped:  # the ranks got the signal as well
            return int(file.read_text()) if file.exists() else 128 + stopped.sigval
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            print(
                f"whet: rank {rank} ended with exit code {failure.exitcode}, also after {_RESTARTS} restarts. Its "
                "error message is above; the same command resumes from the newest checkpoint.",
                file=sys.stderr,
            )
            return 1
        return int(file.read_text()) if file.exists() else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2:]))
