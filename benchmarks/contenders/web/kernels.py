"""Kernels in a page compared with the same kernels of native Whet, on one thread."""

from __future__ import annotations

import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import whet
from benchmarks.contenders.web.page import Page
from whet.bench.case import BenchOptions, Call, Provider, Table, Timed
from whet.bench.kernels import attention, linear, norm

_BATCH_S = 0.02
_ROWS = {
    "gemv": (linear, "GEMV, float32", "1024 x 1024", {}, 145e-6),
    "decode_attention": (attention, "Attention, rows of the RuvLLM document", "Flash attention 256", {}, 18e-6),
    "rms_norm": (norm, "rms_norm, one row, float32", "1 x 4096", {"eps": 1e-6}, 1.8e-6),
}
"""Name of the kernel -> family, its table and case in the suite "kernels", settings, and seconds in the document."""


def in_page(name: str, is_copied: bool) -> Callable[[Sequence[np.ndarray]], Call]:
    """Prepare a kernel in a page; ``is_copied``: on JavaScript arrays, which the call copies."""

    def prepare(inputs: Sequence[np.ndarray]) -> Call:
        arrays = [x for x in inputs if x.dtype == np.float32]
        folder = Path(tempfile.mkdtemp(prefix="whet-bench-"))
        (folder / "inputs").write_bytes(b"".join(x.tobytes() for x in arrays))
        page = Page("ops.js", {"files": folder})
        page.call("prepare", name=name, url="/files/inputs", lengths=[x.size for x in arrays], isCopied=is_copied)
        shape = (inputs[0].shape[0],) if name == "gemv" else inputs[0].shape

        def call() -> Timed:
            found = page.call("call")
            return Timed(np.reshape(found["values"], shape), {"call": found["seconds"]}, "call")

        weakref.finalize(call, _remove, folder)
        return call

    return prepare


def _remove(folder: Path) -> None:
    (folder / "inputs").unlink(missing_ok=True)
    folder.rmdir()


def on_native(name: str, settings: dict[str, Any]) -> Callable[[Sequence[np.ndarray]], Call]:
    """Prepare a kernel of native Whet on one thread, timed in batches of calls from Python."""

    def prepare(inputs: Sequence[np.ndarray]) -> Call:
        function = getattr(whet, name)

        def call() -> Timed:
            threads, n, value = whet.get_num_threads(), 1, None
            whet.set_num_threads(1)
            try:
                while True:
                    start = time.perf_counter()
                    for _ in range(n):
                        value = function(*inputs, **settings)
                    if (seconds := time.perf_counter() - start) >= _BATCH_S:
                        return Timed(value, {"call": seconds / n}, "call")
                    n *= 2
            finally:
                whet.set_num_threads(threads)

        return call

    return prepare


def tables() -> list[Table]:
    """Create a table per kernel with its case and the document's figure."""
    return [_table(name, *row) for name, row in _ROWS.items()]


def _table(name: str, family: Any, title: str, case_name: str, settings: dict[str, Any], published: float) -> Table:
    table = next(table for table in family.tables(BenchOptions()) if table.title == title)
    case = next(case for case in table.cases if case.name == case_name)
    document = {"RuvLLM's document, WASM (M4 Pro)": published}
    providers = [
        Provider("whet", in_page(name, False), note="in the page, on arrays in the module's memory"),
        Provider("whet on copies", in_page(name, True), note="in the page, Ops on typed arrays, which it copies"),
        Provider("whet native", on_native(name, settings), note="the timing includes the call from Python"),
    ]
    return Table(
        f"Kernel {name}, one thread",
        [replace(case, published=document, note="", n_items=0, thread_scaling=False)],
        providers,
        "inside, except for the first provider",
        "The page measures the time. The document's packages have no GEMV or RMSNorm in WebAssembly, and their "
        "attention was measured in milliseconds; its published figure is shown.",
        error=table.error,
    )
