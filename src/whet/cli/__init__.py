"""The command line: finds the command, and turns errors that a user can fix into one line and an exit status.

0 is success, 1 a benchmark that found Whet wrong or slower, 2 a mistake in what was asked for, 130 Ctrl-C, 143 SIGTERM
after the step it came in, 141 a reader that went away; anything unexpected keeps its traceback. This file needs the
standard library only: each command imports what it needs, and only when it is called.
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
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from whet import __version__
from whet.errors import RankError, RewardError, WhetError, WhetValueError, check_installed
from whet.training.launch import end_ranks, end_with_launcher, is_reported_elsewhere, start_ranks

USAGE = f"""\
Whet {__version__}: post-trains language models on the machine you have.

usage: whet COMMAND ...

  whet demo                           a small model learns to add, in minutes
  whet train sft CONFIG.toml          learn from completions
  whet train dpo CONFIG.toml          learn from pairs, one preferred
  whet train grpo CONFIG.toml         sample, score, reinforce
  whet train online-dpo CONFIG.toml   sample pairs, judge, learn from them
  whet best-of-n CONFIG.toml          sample, score, keep the best; no training
  whet generate MODEL --prompt TEXT   continue a text
  whet chat MODEL                     talk to a model
  whet eval MODEL --task TASK         accuracy on a task, of one model or two
  whet export MODEL OUT.gguf          write it for llama.cpp and Ollama
  whet merge MODEL OUT                a folder with the adapters merged
  whet convert MODEL.gguf OUT         a GGUF file as a folder
  whet fetch NAME                     get a model by name
  whet info MODEL                     what a model is, and whether it runs
  whet estimate MODEL                 memory of a model, in every format
  whet bench SUITE                    measure Whet beside its peers
  whet bench compare BEFORE AFTER     what became faster or slower

Every setting of a config file is a flag too: --learning-rate 1e-5 overrides
learning_rate in the file. COMMAND --help lists them.

  whet --help      this text
  whet --version   the version
"""

TRAIN_USAGE = """\
usage: whet train METHOD [CONFIG.toml] [--SETTING VALUE ...]

METHOD is one of:
  sft          supervised fine-tuning, on rows with prompt and completion,
               or with messages, or with text
  dpo          direct preference optimization, on rows with prompt, chosen
               and rejected
  grpo         group relative policy optimization, on rows with a prompt,
               and with reward functions; or on tasks, by name
  online-dpo   the same rows, with reward functions or a preference function;
               or on tasks

whet train METHOD --help lists its settings.
"""

# Paragraphs of one line each: tyro does not wrap them.
TRAIN_DESCRIPTION = """\
Flags override the settings of CONFIG.toml, if there is one.

Given again, the command of a run that was stopped continues it."""

BEST_OF_N_DESCRIPTION = """\
Samples n completions per prompt and gives the best as a line of JSON.

Flags override the settings of CONFIG.toml, if there is one."""


_PLACES = {
    errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ELOOP, errno.ENOTDIR
}  # fmt: skip
"""What is wrong with a path that a user named, wherever it is found."""

atexit.register(gc.freeze)  # or the interpreter looks through all of torch for garbage, twice, before it ends: a second


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (None: that of the process) and return its exit status.

    Raises:
        SystemExit: after a help text (0), or for flags that are not understood (2).
    """
    _replace_closed_streams()
    _replace_unknown_characters()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of other packages, for their callers
        warnings.showwarning = _show_warning
        try:
            status = _run(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
            return status
        except RankError as error:  # torchrun starts all ranks again, unless another has said that the run is over
            if not is_reported_elsewhere(error):
                print(_line_of(error), file=sys.stderr)
            return 2
        except WhetError as error:
            end_ranks(2, _line_of(error))
            return 2
        except KeyboardInterrupt as interrupt:
            signal_number = getattr(interrupt, "signal_number", signal.SIGINT)
            if os.environ.get("RANK", "0") != "0":  # the first has a checkpoint to write, and speaks for all
                return 128 + signal_number
            end_ranks(128 + signal_number, f"whet: {'interrupted' if signal_number == signal.SIGINT else 'terminated'}")
            return 128 + signal_number
        except BrokenPipeError:  # whoever read standard output, such as head, has gone
            _discard_output()
            return 141
        except MemoryError as error:
            end_ranks(2, _line_of_memory(error))
            return 2
        except RuntimeError as error:
            if "DefaultCPUAllocator" not in str(error):  # torch has no error of its own for memory
                raise
            end_ranks(2, _line_of_memory(error))
            return 2
        except OSError as error:
            if error.errno in _PLACES and error.filename is not None:
                end_ranks(2, f"whet: {str(error.filename)!r:.200}: {error.strerror}. Name another place.")
                return 2
            if not _is_output_unwritable():
                raise
            _discard_output()
            print(f"whet: standard output cannot be written: {error.strerror}. Give it another place.", file=sys.stderr)
            return 2


def _line_of(error: WhetError) -> str:
    return f"whet: {' '.join(str(error).split())}{_line_of_reward(error)}"


def _line_of_memory(error: BaseException) -> str:
    reason = str(error).strip().splitlines()
    return (
        f"whet: there is not enough memory ({reason[0] if reason else 'MemoryError'}). Close other programs, raise the "
        f"limit (ulimit -v), or choose a smaller model; whet estimate computes what it needs."
    )


def _is_output_unwritable() -> bool:
    """Whether standard output takes no line any more, such as on a full disk."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _discard_output() -> None:
    """Send standard output to the null device, or the interpreter would fail to write the rest as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace_closed_streams() -> None:
    """Open the null device for a standard stream that the caller closed, which is None here.

    A file that is opened later would get its descriptor, and what child processes print would go there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _replace_unknown_characters() -> None:
    """Have "?" printed for a character that the encoding of standard output lacks, instead of an error."""
    stdout: Any = sys.stdout
    if hasattr(stdout, "reconfigure") and (stdout.errors == "strict" or stdout.encoding.lower() != "utf-8"):
        stdout.reconfigure(errors="replace")


def _run(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command != "bench":  # which measures every library as it comes
        # torch's OpenMP threads wait for each other by spinning: where another program wants a core, a step of a small
        # model takes 5 to 40 times as long. Sleeping instead costs a small model nothing that can be measured.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        print(f"whet {__version__}")
        return 0
    _check_choice("command", command, _COMMANDS)
    where = f"whet {command}"
    extra, *packages = _COMMANDS[command]
    check_installed(where, *packages, extra=extra)
    if command == "train":
        return _train(rest)
    if command not in ("best-of-n", "demo"):
        return _command(command).main(rest)
    from whet.cli.runs import BestOfNRun
    from whet.cli.settings import parse

    if command == "demo":
        check_installed(where, *_MODEL_PACKAGES, "matplotlib")
        demo = _command(command)
        return demo.main(parse(demo.DemoConfig, rest, where, "A small model learns to add: SFT, then GRPO."))
    run = parse(BestOfNRun, rest, where, BEST_OF_N_DESCRIPTION)
    run.check(where)
    check_installed(where, *_MODEL_PACKAGES)
    return _command("best_of_n").main(run)


_COMMANDS = {
    "demo": ("train", "tyro", "rich"),
    "train": ("train",),
    "best-of-n": ("train", "tyro", "rich"),
    "generate": ("train", "tyro", "rich", "tokenizers", "jinja2"),
    "chat": ("train", "tyro", "rich", "tokenizers", "jinja2"),
    "eval": ("train", "tyro", "rich", "tokenizers", "jinja2"),
    "export": ("train", "tyro", "rich", "tokenizers", "jinja2"),
    "merge": ("train", "tyro", "rich", "torch", "transformers"),
    "convert": ("train", "tyro", "rich", "torch", "transformers"),
    "fetch": ("train", "tyro"),
    "info": ("train", "tyro", "rich"),
    "estimate": ("train", "tyro", "rich"),
    "bench": ("bench", "tyro", "rich", "matplotlib", "threadpoolctl"),
}
"""Command -> the extra that it needs, and the packages of it that are looked for before the command's module is."""


def _train(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(TRAIN_USAGE, end="")
        return 0 if argv else 2
    method, where = argv[0], f"whet train {argv[0]}"
    from whet.cli.runs import RUNS, lock_folder

    _check_choice("method", method, RUNS)
    check_installed(where, "tyro", "rich")
    from whet.cli.settings import parse

    run = parse(RUNS[method], argv[1:], where, TRAIN_DESCRIPTION)
    run.check(where)
    check_installed(where, *_MODEL_PACKAGES, "matplotlib")
    from whet.training.distributed import launched_rank, launched_size

    if run.ranks > 1 and launched_size() == 1:
        start_ranks(run.ranks, ["-m", "whet", "train", *argv])
    if run.ranks not in (1, launched_size()):
        raise WhetValueError(f"{where}: ranks is {run.ranks}, and {launched_size()} were launched. Leave ranks out.")
    if launched_size() > 1:
        end_with_launcher()
    # Before the seconds that it takes to import torch; of several ranks the first alone writes.
    with lock_folder(run.output_dir) if launched_rank() == 0 else contextlib.nullcontext():
        return _command("train").main(method, run)


def _command(name: str) -> Any:
    with without_collection():
        return importlib.import_module(f"whet.cli.{name}")


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """For imports: of torch and transformers a quarter of the time goes into looking for garbage, and there is none.

    What they made stays, and is not looked through later either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


_MODEL_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "jinja2")


def _check_choice(kind: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        close = difflib.get_close_matches(name, list(choices), n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(choices)}."
        raise WhetValueError(f"there is no {kind} {name!r}. {hint}")


def _line_of_reward(error: WhetError) -> str:
    """File and line of the user's function that raised a RewardError."""
    if not isinstance(error, RewardError) or error.__cause__ is None:
        return ""
    frames = traceback.extract_tb(error.__cause__.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _show_warning(message: Warning | str, *_: Any) -> None:
    print(f"whet: warning: {message}", file=sys.stderr)
