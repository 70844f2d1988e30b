"""Table of the page pool: allocating and freeing a page of the KV cache, compared with malloc and torch."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from whet.bench.case import BenchOptions, Call, Case, Provider, Table
from whet.ops import probe


class Page(NamedTuple):
    """Page of a model's KV cache in bfloat16."""

    n_layers: int
    n_kv_heads: int
    head_dim: int

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values of 64 tokens, the engine's page if head_dim is a multiple of 16."""
        return 64 * self.n_layers * self.n_kv_heads * self.head_dim * 2 * 2


_MODELS = {
    "Qwen2-0.5B": Page(24, 2, 64),
    "SmolLM-135M": Page(30, 3, 64),
    "Llama-3.2-1B": Page(16, 8, 64),
    "Llama-3-8B": Page(32, 8, 128),
}


def tables(options: BenchOptions) -> list[Table]:
    """Create the table of this family."""
    cases = [
        Case(f"{name}, {page.n_bytes / 2**20:.2f} MiB", partial(_same, page), lambda p: p.n_bytes, 0.0, n_items=1)
        for name, page in _MODELS.items()
    ]
    providers = [
        Provider("whet", _whet, note="from the cache's free list; zeroed"),
        Provider("malloc, zeroed", partial(_malloc, True), note="malloc, memset, free: the same work"),
        Provider("torch.zeros", partial(_torch, "zeros"), note="created and freed"),
        Provider("malloc", partial(_malloc, False), note="not written: only address space is reserved"),
        Provider("torch.empty", partial(_torch, "empty"), note="not written either"),
    ]
    note = (
        "64 tokens of keys and values of all layers in bfloat16, on one thread; pages are zeroed when allocated and "
        "reused in LIFO order. RuvLLM's document claims 3 allocations per inference instead of 847 for its pool, "
        "without a benchmark; in Whet a decoded token allocates nothing (cpp/tests/allocation_test.cpp)."
    )
    title = "Page pool: allocating and freeing a page of the KV cache"
    return [Table(title, cases, providers, "the timed operation", note, item="pages")]


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
