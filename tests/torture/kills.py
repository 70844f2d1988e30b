"""Training runs killed (SIGKILL) in every phase, and continued by the same command to bit-identical results.

A kill happens at a line of Python that Whet, or the standard library called by it, executes in a phase: the lines of an
undisturbed run are counted and kills are distributed evenly over them. Every other kill is a few milliseconds after its
line, so that native code is interrupted too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.torture.common import N_STEPS, Tally, Workshop, finished, forked, require, require_same, scaled, workshop

_PHASES = {"generation": "sampling", "reward": "rewards"}
"""Phases of ``whet.training.phases``; all others are "update"."""

_SHARES = {"grpo": ("sampling", "rewards", "update", "saving", "ending"), "dpo": ("update", "saving", "ending")}


class Lines:
    """Counter of the lines of each phase in this process, which is killed at one of them."""

    def __init__(self, kill_in: str = "", at: int = 0, delay_s: float = 0.0) -> None:
        self.kill_in, self.at, self.delay_s = kill_in, at, delay_s
        self.counts: Counter[str] = Counter()
        self.pid = 0

    def install(self) -> None:
        """Start counting in this process."""
        self.pid = os.getpid()
        from whet.runs import training
        from whet.training import phases
        from whet.training.callbacks import Callback
        from whet.training.trainer import Trainer

        record: Any = phases._Record
        of_record = record.phase

        @contextlib.contextmanager
        def phase(this: Any, name: str) -> Iterator[None]:
            with of_record(this, name), self.during(_PHASES.get(name, "update")):
                yield

        record.phase = phase
        for owner, name in [(Trainer, "log"), *_hooks(Callback)]:
            setattr(owner, name, self.count_lines("saving", getattr(owner, name)))
        training.write_results = self.count_lines("ending", training.write_results)

    def count_lines(self, phase: str, function: Any) -> Any:
        """Wrap a function to count its lines in a phase."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.during(phase):
                return function(*args, **kwargs)

        return wrapper

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count lines executed in this context as lines of a phase."""

        def local(frame: Any, event: str, _: Any) -> Any:
            if event == "line" and os.getpid() == self.pid:
                self.counts[name] += 1
                if name == self.kill_in and self.counts[name] == self.at:
                    self.kill()
            return local

        def called(frame: Any, event: str, _: Any) -> Any:
            return None if "site-packages" in frame.f_code.co_filename else local

        outer = sys.gettrace()
        sys.settrace(called)
        try:
            yield
        finally:
            sys.settrace(outer)

    def kill(self) -> None:
        """Kill the process after ``delay_s``."""
        if self.delay_s == 0:
            os.kill(self.pid, signal.SIGKILL)
        threading.Thread(target=lambda: (time.sleep(self.delay_s), os.kill(self.pid, signal.SIGKILL))).start()


def _hooks(base: type) -> list[tuple[type, str]]:
    """List the hooks in which callbacks write after a step and after the last step."""
    owners = [cls for cls in _subclasses(base) if cls.__module__.startswith("whet.")]
    return [(cls, name) for cls in owners for name in ("on_step_end", "on_train_end") if name in vars(cls)]


def _subclasses(cls: type) -> list[type]:
    return [cls, *(below for child in cls.__subclasses__() for below in _subclasses(child))]


def torture(scale: float) -> Iterator[Tally]:
    with workshop() as shop:
        for method in _SHARES:
            yield from _of_method(shop, method, scaled(20, scale))


def _of_method(shop: Workshop, method: str, n: int) -> Iterator[Tally]:
    tally = Tally(f"kill -9: train {method}")
    expected: dict[str, str] = {}
    totals: dict[str, int] = {}
    with tally.case("undisturbed"):
        expected = finished(shop, method)
        totals = _count_lines(shop, method, expected)
    tally.cases = 0
    rng = random.Random(0)
    killed: Counter[str] = Counter()
    for i in range(n if totals else 0):
        phase = _SHARES[method][i % len(_SHARES[method])]
        per_phase = max(1, -(-n // len(_SHARES[method])))
        at = 1 + int((i // len(_SHARES[method]) + rng.random()) / per_phase * (totals[phase] - 1))
        delay_s = 0.0 if i // len(_SHARES[method]) % 2 == 0 else rng.uniform(0.0005, 0.004)
        with tally.case(f"{phase}, line {at} of {totals[phase]} + {delay_s * 1e3:.1f} ms"):
            folder = shop.folder / "killed"
            shutil.rmtree(folder, ignore_errors=True)
            command = shop.command(method, folder)
            end = forked(command, Lines(phase, at, delay_s).install)
            require(end.status in (-signal.SIGKILL, 0), f"status {end.status}: {end.text}")
            killed[phase if end.status else "after the end"] += 1
            again = forked(command)
            require(again.status == 0, f"the same command failed: {again.text}")
            require_same(folder, expected)
    tally.note = ", ".join(f"{count} in {phase}" for phase, count in sorted(killed.items()))
    yield tally


def _count_lines(shop: Workshop, method: str, expected: dict[str, str]) -> dict[str, int]:
    """Count the lines of each phase in an undisturbed run, whose results must not change by counting."""
    folder, file = shop.folder / f"counted-{method}", shop.folder / "lines.json"
    lines = Lines()

    def install() -> None:
        from whet.runs import training

        lines.install()
        finish: Any = training.write_results
        training.write_results = lambda *args: (finish(*args), file.write_text(json.dumps(lines.counts)))[0]

    end = forked(shop.command(method, folder), install)
    require(end.status == 0, end.text)
    require_same(folder, expected)
    totals = json.loads(Path(file).read_text())
    require(all(totals.get(phase, 0) > N_STEPS for phase in _SHARES[method]), f"too few lines: {totals}")
    return totals
