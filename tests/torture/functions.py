"""Reward functions: one without side effects, some with side effects that score anyway, and some that fail."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time


def share(completions, answer):
    """Score between 0 and 2 that distinguishes completions."""
    return [sum(map(ord, text)) % 97 / 97 + (text == right) for text, right in zip(completions, answer, strict=True)]


# --- scores like share ----------------------------------------------------------------------------------


def forks(completions, answer):
    """Leak a process that would run for an hour."""
    if os.fork() == 0:
        time.sleep(3600)
        os._exit(0)
    return share(completions, answer)


def starts_threads(completions, answer):
    """Leak threads for which Python would wait an hour."""
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(3600,)).start()
    return share(completions, answer)


def prints_a_megabyte(completions, answer):
    """Print to both streams without a newline."""
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * (1 << 20))
    os.write(1, b"y" * (1 << 20))
    return share(completions, answer)


def changes_the_process(completions, answer):
    """Change seeds, threads, directory, environment and file descriptors."""
    import random

    import numpy as np
    import torch

    random.seed(1), np.random.seed(1), torch.manual_seed(1), torch.set_num_threads(2)  # noqa: NPY002
    os.chdir("/")
    os.environ.clear()
    os.closerange(3, 6)
    return share(completions, answer)


# --- do not score ---------------------------------------------------------------------------------------


def hangs(completions):
    """Sleep and ignore all exceptions."""
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(3600)


def computes_for_hours(completions):
    """Compute in native code while holding the GIL."""
    return [float(3 ** (10**10))]


def raises(completions):
    """Raise an ordinary exception."""
    raise ZeroDivisionError("fault of the function")


def recurses(completions):
    """Recurse until Python raises RecursionError."""
    return recurses(completions)


def exits(completions):
    """Exit as a script does."""
    sys.exit(3)


def ends_the_process(completions):
    """End the process immediately and silently."""
    os._exit(3)


def crashes(completions):
    """Dereference a null pointer."""
    ctypes.string_at(0)


def takes_all_memory(completions):
    """Allocate more memory than the machine has."""
    return [bytearray(1 << 60)]


def returns_nan(completions):
    """Return NaN."""
    return [float("nan")] * len(completions)


def returns_too_much(completions):
    """Return a number beyond the range of floats."""
    return [10**400] * len(completions)


def returns_too_few(completions):
    """Return one score for all completions."""
    return [1.0]


def returns_text(completions):
    """Return strings that look like numbers."""
    return ["1.0"] * len(completions)


def returns_nothing(completions):
    """Return None, as without a return statement."""


def returns_itself(completions):
    """Return an object that JSON cannot represent."""
    return returns_itself
