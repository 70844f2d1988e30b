"""Reward functions: one that is well behaved, those that behave badly and score all the same, and those that fail."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time


def share(completions, answer):
    """Something between 0 and 2 that tells completions apart."""
    return [sum(map(ord, text)) % 97 / 97 + (text == right) for text, right in zip(completions, answer, strict=True)]


# --- scores like share ----------------------------------------------------------------------------------


def forks(completions, answer):
    """Leaves a process behind that would run for an hour."""
    if os.fork() == 0:
        time.sleep(3600)
        os._exit(0)
    return share(completions, answer)


def starts_threads(completions, answer):
    """Leaves threads behind for which Python would wait an hour."""
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(3600,)).start()
    return share(completions, answer)


def prints_a_megabyte(completions, answer):
    """To both, without a line's end."""
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * (1 << 20))
    os.write(1, b"y" * (1 << 20))
    return share(completions, answer)


def changes_the_process(completions, answer):
    """Where it is, what it may, what time it is to be woken."""
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
    """Sleeps, deaf to what Python could tell it."""
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(3600)


def computes_for_hours(completions):
    """In native code, with the interpreter's lock."""
    return [float(3 ** (10**10))]


def raises(completions):
    """The plain case."""
    raise ZeroDivisionError("the function's own fault")


def recurses(completions):
    """Until Python ends it."""
    return recurses(completions)


def exits(completions):
    """As a script does."""
    sys.exit(3)


def ends_the_process(completions):
    """At once, without a word."""
    os._exit(3)


def crashes(completions):
    """Reads where there is no memory."""
    ctypes.string_at(0)


def takes_all_memory(completions):
    """More than there is."""
    return [bytearray(1 << 60)]


def returns_nan(completions):
    """A number, but none to learn from."""
    return [float("nan")] * len(completions)


def returns_too_much(completions):
    """No float holds it."""
    return [10**400] * len(completions)


def returns_too_few(completions):
    """One for all."""
    return [1.0]


def returns_text(completions):
    """That looks like numbers."""
    return ["1.0"] * len(completions)


def returns_nothing(completions):
    """As a function does whose return was forgotten."""


def returns_itself(completions):
    """What no JSON holds."""
    return returns_itself
