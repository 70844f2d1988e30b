"""A thousand engines opened, used and closed: memory, mappings, threads and files do not grow."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

from tests.torture.common import Tally, make_model, require, scaled, workshop

_WARM = 0.3
"""Share of the engines after which resources may not grow."""
_PAGES = 256
"""Tolerance for pages retained by the allocator: a megabyte."""


def torture(scale: float) -> Iterator[Tally]:
    with workshop() as shop:
        yield _opened_and_closed(shop.model, scaled(1000, scale))
        yield _of_live_models(make_model(shop.folder / "other"), scaled(200, scale))


def _opened_and_closed(folder: Path, n: int) -> Tally:
    """Open engines of a folder; close them, leave them to the garbage collector, or drop them during a stream."""
    import whet

    tally = Tally("engines opened and closed")

    def one(i: int) -> None:
        weights = ("float32", "bf16", "int8")[i % 3]
        engine = whet.Engine.from_pretrained(folder, weights=weights, kv_bytes=4 << 20, max_batch=8)
        engine.generate([[1, 2, 3], [4, 5]], 2, whet.SamplingParams(max_new_tokens=4))
        engine.logprobs([[1, 2, 3]])
        if i % 4 == 0:
            next(engine.stream([1, 2, 3], whet.SamplingParams(max_new_tokens=8)))
        if i % 2:
            engine.close()

    _require_no_growth(tally, n, one)
    return tally


def _of_live_models(folder: Path, n: int) -> Tally:
    """Open engines of a transformers model, and add and remove adapters."""
    import whet
    from whet.runs.models import load_model

    tally = Tally("engines of a live model, synced")
    model, _ = load_model(str(folder), "float32")
    adapter = {"model.layers.0.self_attn.q_proj": whet.MicroLoRA(32, 32, rank=2)}

    def one(_: int) -> None:
        with whet.Engine.from_model(model, weights="float32", kv_bytes=4 << 20) as engine:
            number = engine.add_adapter(adapter)
            engine.generate([[1, 2, 3]], 2, whet.SamplingParams(max_new_tokens=4), adapter=number)
            engine.sync(model)
            engine.remove_adapter(number)

    _require_no_growth(tally, n, one)
    return tally


def _require_no_growth(tally: Tally, n: int, one) -> None:
    with tally.case("growth"):
        for i in range(round(n * _WARM)):
            one(i)
        before = _resources()
        for i in range(n - round(n * _WARM)):
            one(i)
        after = _resources()
        tally.note = ", ".join(f"{name} {before[name]:,} -> {after[name]:,}" for name in before)
        grown = {name: after[name] - before[name] for name in before}
        require(grown["pages"] <= _PAGES, f"the resident memory grew: {tally.note}")
        require(grown["mappings"] <= 4, f"mappings are leaked: {tally.note}")
        require(grown["threads"] == 0 and grown["files"] == 0, f"threads or files are leaked: {tally.note}")
    tally.cases = n


def _resources() -> dict[str, int]:
    """Count resident pages, mappings, threads and open files of this process."""
    gc.collect()
    return {
        "pages": int(Path("/proc/self/statm").read_text().split()[1]),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }
