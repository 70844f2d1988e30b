"""The table of the memory pool: a page of the KV cache, taken and given back, beside the allocators of C and torch."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from whet.bench.case import BenchOptions, Call, Case, Provider, Table
from whet.ops import probe


class Page(NamedTuple):
    """The model whose page it is, keys and values in bfloat16, and the page's bytes."""

    n_layers: int
    n_kv_heads: int
    head_dim: int

    @property
    def n_bytes(self) -> int:
        """64 tokens, keys and values, 2 bytes each: as the engine has it where head_dim is a multiple of 16."""
        return 64 * self.n_layers * self.n_kv_heads * self.head_dim * 2 * 2


_MODELS = {
    "Qwen2-0.5B": Page(24, 2, 64),
    "SmolLM-135M": Page(30, 3, 64),
    "Llama-3.2-1B": Page(16, 8, 64),
    "Llama-3-8B": Page(32, 8, 128),
}


def tables(options: BenchOptions) -> list[Table]:
    """The one table of this family."""
    cases = [
        Case(f"{name}, {page.n_bytes / 2**20:.2f} MiB", partial(_same, page), lambda p: p.n_bytes, 0.0, n_items=1)
        for name, page in _MODELS.items()
    ]
    providers = [
        Provider("whet", _whet, note="from the cache's free pages; zeroed"),
        Provider("malloc, zeroed", partial(_malloc, True), note="malloc, memset, free: the same work"),
        Provider("torch.zeros", partial(_torch, "zeros"), note="made and dropped"),
        Provider("malloc", partial(_malloc, False), note="nothing is written: the system has only given addresses"),
        Provider("torch.empty", partial(_torch, "empty"), note="likewise"),
    ]
    note = (
        "64 tokens of keys and values of all layers in bfloat16, on one thread; a page is zeroed when taken, and is "
        "the one given back last. RuvLLM's document says of its pool that an inference makes 3 allocations in "
        "place of 847, without a bench; in Whet a decoded token makes none (cpp/tests/allocation_test.cpp)."
    )
    title = "Memory pool: a page of the KV cache, taken and given back"
    return [Table(title, cases, providers, "it is what is timed", note, item="pages")]


def _same(page: Page, _: object) -> Page:
    return page


def _whet(page: Page) -> Call:
    return probe.kv_pages(*page, "bfloat16").take_and_release


def _malloc(zeroed: bool, page: Page) -> Call:
    return partial(probe.malloc_and_free, page.n_bytes, zeroed)


def _torch(name: str, page: Page) -> Call:
    import torch

    make = partial(getattr(torch, name), page.n_bytes, dtype=torch.uint8)
    return lambda: make().nbytes
