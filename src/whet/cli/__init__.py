"""The command line: dispatches to a command, and turns errors that a user can fix into one line and an exit status.

Exit statuses: 0 success; 1 a benchmark found wrong results or a regression; 2 a usage error; 130 Ctrl-C; 143 SIGTERM,
after the current step; 141 a closed pipe. Unexpected errors keep their traceback. This file imports only the standard
library; each command imports its dependencies when it is called.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import gc
import importlib
import os
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from whet import __version__
from whet.errors import DEPENDENCIES, RankError, RewardError, WhetError, WhetValueError, check_installed
from whet.system.openmp import wait_passively
from whet.training.launch import end_ranks, end_with_launcher, is_reported_elsewhere, start_ranks

_USAGE = """\
Whet {version}: post-trains language models on the machine you have.

usage: whet COMMAND ...

  whet demo                           train a small model to add, in minutes
{methods}
  whet best-of-n CONFIG.toml          sample, score, keep the best
  whet generate MODEL --prompt TEXT   continue a text
  whet chat MODEL                     chat with a model
  whet serve MODEL                    serve a model to clients of OpenAI's API
  whet eval MODEL --task TASK         accuracy of one or two models on a task
  whet score MODEL --data ROWS        log-probs of rows, for whet train kd
  whet export MODEL OUT.gguf          write a GGUF file for llama.cpp
  whet merge MODEL OUT                merge adapters into a model folder
  whet convert MODEL.gguf OUT         convert a GGUF file to a model folder
  whet fetch NAME                     download a model
  whet info MODEL                     architecture, size and support of a model
  whet estimate MODEL                 memory of a model in every format
  whet bench SUITE                    benchmark Whet against its peers
  whet bench compare BEFORE AFTER     changes between two benchmark runs

Every setting of a config file is also a flag: --learning-rate 1e-5 overrides
learning_rate in the file. COMMAND --help lists them.

  whet --help      print this text
  whet --version   print the version
"""

_TRAIN_USAGE = """\
usage: whet train METHOD [CONFIG.toml] [--SETTING VALUE ...]

METHOD is one of:
{methods}

whet train METHOD --help lists its settings.
"""


def _usage() -> str:
    from whet.config.algorithms import ALGORITHMS

    commands = [(f"whet train {each.name} CONFIG.toml", each.summary) for each in ALGORITHMS.values()]
    return _USAGE.format(version=__version__, methods="\n".join(f"  {name:36}{text}" for name, text in commands))


def _train_usage() -> str:
    from whet.config.algorithms import ALGORITHMS

    methods = [
        textwrap.fill(each.rows, 72, initial_indent=f"  {each.name:13}", subsequent_indent=" " * 15)
        for each in ALGORITHMS.values()
    ]
    return _TRAIN_USAGE.format(methods="\n".join(methods))


# Each paragraph fits into 80 columns: tyro does not wrap them.
TRAIN_DESCRIPTION = """\
Flags override the settings of CONFIG.toml, if there is one.

The same command resumes a run that was stopped."""

BEST_OF_N_DESCRIPTION = """\
Sample n completions per prompt and write the best as a line of JSON.

Flags override the settings of CONFIG.toml, if there is one."""


_PATH_ERRORS = {
    errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ELOOP, errno.ENOTDIR,
    errno.EEXIST
}  # fmt: skip
"""Errors of a path that the user named."""

atexit.register(gc.freeze)  # otherwise exit takes a second: the garbage collector scans all of torch twice


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv``) and return its exit status.

    Raises:
        SystemExit: after a help text (0), or for unknown flags (2).
    """
    _replace_closed_streams()
    _replace_unencodable_characters()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # addressed to callers of other packages
        warnings.showwarning = _show_warning
        try:
            status = _run(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
            return status
        except RankError as error:  # torchrun restarts all ranks unless one has reported the end of the run
            if not is_reported_elsewhere(error):
                print(_error_line(error), file=sys.stderr)
            return 2
        except WhetError as error:
            end_ranks(2, _error_line(error))
            return 2
        except KeyboardInterrupt as interrupt:
            signal_number = getattr(interrupt, "signal_number", signal.SIGINT)
            if os.environ.get("RANK", "0") != "0":  # rank 0 writes the checkpoint and prints the message
                return 128 + signal_number
            end_ranks(128 + signal_number, f"whet: {'interrupted' if signal_number == signal.SIGINT else 'terminated'}")
            return 128 + signal_number
        except BrokenPipeError:  # the reader of standard output, such as head, has exited
            _discard_output()
            return 141
        except MemoryError as error:
            end_ranks(2, _memory_error_line(error))
            return 2
        except RuntimeError as error:
            if "DefaultCPUAllocator" not in str(error):  # torch has no exception type for this
                raise
            end_ranks(2, _memory_error_line(error))
            return 2
        except OSError as error:
            if error.errno in _PATH_ERRORS and error.filename is not None:
                end_ranks(2, f"whet: {str(error.filename)!r:.200}: {error.strerror}. Choose another path.")
                return 2
            if not _is_output_unwritable():
                raise
            _discard_output()
            print(f"whet: standard output cannot be written: {error.strerror}. Redirect it elsewhere.", file=sys.stderr)
            return 2


def _error_line(error: WhetError) -> str:
    return f"whet: {' '.join(str(error).split())}{_reward_location(error)}"


def _memory_error_line(error: BaseException) -> str:
    reason = str(error).strip().splitlines()
    return (
        f"whet: out of memory ({reason[0] if reason else 'MemoryError'}). Close other programs, raise the limit "
        f"(ulimit -v), or choose a smaller model; whet estimate computes the memory of a model."
    )


def _is_output_unwritable() -> bool:
    """Whether writing to standard output fails, as on a full disk."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _discard_output() -> None:
    """Redirect standard output to the null device, so that flushing it at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace_closed_streams() -> None:
    """Open the null device for each standard stream that the caller closed (None here).

    Otherwise the next file to be opened gets its descriptor, and child processes print into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _replace_unencodable_characters() -> None:
    """Print "?" for characters that the encoding of standard output lacks, instead of raising."""
    stdout: Any = sys.stdout
    if hasattr(stdout, "reconfigure") and (stdout.errors == "strict" or stdout.encoding.lower() != "utf-8"):
        stdout.reconfigure(errors="replace")


def _run(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command != "bench":  # which measures every library in its default settings
        wait_passively()
    if command in ("-h", "--help"):
        print(_usage(), end="")
        return 0
    if command == "--version":
        print(f"whet {__version__}")
        return 0
    _check_choice("command", command, _COMMANDS)
    where = f"whet {command}"
    extra, *packages = _COMMANDS[command]
    check_installed(where, *DEPENDENCIES)
    check_installed(where, *packages, extra=extra)
    if command == "train":
        return _train(rest)
    if command not in ("best-of-n", "demo"):
        return _command(command).main(rest)
    from whet.cli.settings import parse
    from whet.runs.settings import BestOfNRun

    if command == "demo":
        demo = _command(command)
        return demo.main(parse(demo.DemoConfig, rest, where, "Train a small model to add: SFT, then GRPO."))
    run = parse(BestOfNRun, rest, where, BEST_OF_N_DESCRIPTION)
    run.check(where)
    return _command("best_of_n").main(run)


_COMMANDS = {
    "demo": ("train", "torch", "transformers", "matplotlib"),
    "train": ("train",),
    "best-of-n": ("train", "torch", "transformers"),
    "generate": ("train",),
    "chat": ("train",),
    "serve": ("serve", "starlette", "uvicorn", "prometheus_client"),
    "eval": ("train",),
    "score": ("train",),
    "export": ("train",),
    "merge": ("train", "torch", "transformers"),
    "convert": ("train", "torch", "transformers"),
    "fetch": ("train",),
    "info": ("train",),
    "estimate": ("train",),
    "bench": ("bench", "matplotlib", "threadpoolctl"),
}
"""Command -> its extra, and the packages of the extra that are checked before the command's module is imported."""


def _train(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_train_usage(), end="")
        return 0 if argv else 2
    method, where = argv[0], f"whet train {argv[0]}"
    from whet.runs.settings import RUNS, lock_folder

    _check_choice("method", method, RUNS)
    from whet.cli.settings import parse

    run = parse(RUNS[method], argv[1:], where, TRAIN_DESCRIPTION)
    run.check(where)
    from whet.training.distributed import launched_rank, launched_size

    if run.ranks > 1 and launched_size() == 1:
        start_ranks(run.ranks, ["-m", "whet", "train", *argv])
    if launched_size() > 1:
        end_with_launcher()
    # Lock before importing torch, which takes seconds. Only rank 0 writes.
    with lock_folder(run.output_dir) if launched_rank() == 0 else contextlib.nullcontext():
        return _command("train").main(run)


def _command(name: str) -> Any:
    from whet.memory import without_gc

    with without_gc():
        return importlib.import_module(f"whet.cli.{name}")


def _check_choice(kind: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        close = difflib.get_close_matches(name, list(choices), n=1)
        hint = f"Did you mean {close[0]}?" if close else f"Choose from {', '.join(choices)}."
        raise WhetValueError(f"there is no {kind} {name!r}. {hint}")


def _reward_location(error: WhetError) -> str:
    """File and line in the user's function that caused a RewardError; empty for other errors."""
    if not isinstance(error, RewardError) or error.__cause__ is None:
        return ""
    frames = traceback.extract_tb(error.__cause__.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _show_warning(message: Warning | str, *_: Any) -> None:
    print(f"whet: warning: {message}", file=sys.stderr)
