"""Training runs that reach a memory limit: a named error, an intact last checkpoint, and the same command continues.

The limit is RLIMIT_AS, set to the size of the process plus a margin when a run logs a step. glibc is set to map every
block of 64 KiB or more, so that the next step needs new mappings instead of reusing freed memory. A checkpoint is due
at step 4.
"""

from __future__ import annotations

import ctypes
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.torture.common import Tally, finished, forked, make_model, require, require_same, scaled, workshop

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_MARGINS = (0, 1 << 20, 3 << 20, 6 << 20, 256 << 10, 2 << 20)


def torture(scale: float) -> Iterator[Tally]:
    tally = Tally("memory limit: train, and the same command")
    n_failed = 0
    with workshop() as shop:
        shop.model = make_model(shop.folder / "large", hidden_size=256, intermediate_size=1024)
        cases = [(method, step, margin) for margin in _MARGINS for step in (3, 4) for method in ("grpo", "dpo")]
        expected: dict[str, dict[str, str]] = {}
        for method, step, margin in cases[: scaled(len(cases), scale)]:
            with tally.case(f"{method} at step {step}, {margin:,} bytes left"):
                if method not in expected:
                    expected[method] = finished(shop, method)
                folder = shop.folder / "limited"
                shutil.rmtree(folder, ignore_errors=True)
                command = shop.command(method, folder)
                end = forked(command, lambda step=step, margin=margin: _limit_at(step, margin))
                if end.status:
                    n_failed += 1
                    lines = [line for line in end.text.splitlines() if line.startswith("whet: out of memory")]
                    require(end.status == 2 and len(lines) == 1, f"{end}")
                    require("Traceback" not in end.text, end.text)
                    names = {path.name for path in (folder / "checkpoints").glob("*") if path.name[0] != "."}
                    require("step-000002" in names, f"the checkpoints are {names}")
                    again = forked(command)
                    require(again.status == 0, f"the same command failed: {again.text}")
                require_same(folder, expected[method])
        with tally.case("limits are reached"):
            require(n_failed > 0, "no run reached its limit")
    tally.note = f"{n_failed} reached the limit"
    yield tally


def _limit_at(step: int, margin: int) -> None:
    """Limit the address space to its size plus a margin once this process has taken a step."""
    from whet.training.trainer import Trainer

    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 << 10)
    log: Any = Trainer.log

    def limit_and_log(trainer: Any, metrics: Any) -> None:
        if trainer.step == step:
            n_pages = int(Path("/proc/self/statm").read_text().split()[0])
            size = n_pages * resource.getpagesize() + margin
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        log(trainer, metrics)

    Trainer.log = limit_and_log
