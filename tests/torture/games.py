"""Environments and tools: some with side effects that play on, and some that fail. Each name is both."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
import time
from typing import Any

from whet.tasks.environment import Step


def nothing() -> None:
    """Do nothing."""


# --- side effects ---------------------------------------------------------------------------------------


def forks() -> None:
    """Leak a process that would run for an hour."""
    if os.fork() == 0:
        time.sleep(3600)
        os._exit(0)


def starts_threads() -> None:
    """Leak threads for which Python would wait an hour."""
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(3600,)).start()


def prints_a_megabyte() -> None:
    """Print to both streams without a newline."""
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * (1 << 20))
    os.write(1, b"y" * (1 << 20))


def changes_the_process() -> None:
    """Change seeds, directory, environment and file descriptors."""
    import random

    import numpy as np

    random.seed(1), np.random.seed(1)  # noqa: NPY002
    os.chdir("/")
    os.environ.clear()
    os.closerange(0, 3)


# --- failures -------------------------------------------------------------------------------------------


def hangs() -> None:
    """Sleep and ignore all exceptions."""
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(3600)


def computes_for_hours() -> None:
    """Compute in native code while holding the GIL."""
    3 ** (10**10)


def ends_the_process() -> None:
    """End the process immediately and silently."""
    os._exit(3)


def crashes() -> None:
    """Dereference a null pointer."""
    ctypes.string_at(0)


def raises() -> None:
    """Raise an ordinary exception."""
    raise ZeroDivisionError("fault of the function")


def recurses() -> None:
    """Recurse until Python raises RecursionError."""
    recurses()


def exits() -> None:
    """Exit as a script does."""
    sys.exit(3)


def takes_all_memory() -> Any:
    """Allocate more memory than the machine has."""
    return bytearray(1 << 60)


async def never_returns() -> None:
    """Wait on an event loop for ever."""
    await asyncio.Event().wait()


def returns_ten_megabytes() -> str:
    """Return ten megabytes."""
    return "x" * 10_000_000


# --- environments ---------------------------------------------------------------------------------------


class Game:
    """Rewards the first letter of each turn; acts at the first step."""

    act: Any = staticmethod(nothing)
    turns = 0

    def reset(self, row: Any, seed: int) -> Any:
        return row["prompt"]

    async def step(self, message: Any) -> Any:
        self.turns += 1
        if self.turns == 1:
            found = self.act()
            if asyncio.iscoroutine(found):
                await found
        return Step("more", reward=float(ord(message["content"][:1] or "a") % 7), done=self.turns == 2)


def _game(name: str) -> type[Game]:
    return type(f"{name}_game", (Game,), {"act": staticmethod(globals()[name])})


GAMES = (
    "nothing", "forks", "starts_threads", "prints_a_megabyte", "changes_the_process", "hangs", "computes_for_hours",
    "ends_the_process", "crashes", "raises", "recurses", "exits", "takes_all_memory", "never_returns",
)  # fmt: skip
globals().update({f"{name}_game": _game(name) for name in GAMES})


class hangs_at_the_beginning(Game):
    def reset(self, row: Any, seed: int) -> Any:
        hangs()


class begins_with_ten_megabytes(Game):
    def reset(self, row: Any, seed: int) -> Any:
        return "x" * 10_000_000


class answers_with_ten_megabytes(Game):
    async def step(self, message: Any) -> Any:
        return Step("x" * 10_000_000, reward=1.0)


class never_ends(Game):
    async def step(self, message: Any) -> Any:
        return Step("more", reward=1.0)


class hangs_at_the_end(Game):
    def close(self) -> None:
        hangs()


class returns_text(Game):
    async def step(self, message: Any) -> Any:
        return "more"


class returns_nan(Game):
    async def step(self, message: Any) -> Any:
        return Step("more", reward=float("nan"))


class returns_itself(Game):
    async def step(self, message: Any) -> Any:
        return Step([{"role": "user", "content": self}])
