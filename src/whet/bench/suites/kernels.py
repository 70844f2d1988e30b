"""All kernels compared with PyTorch and NumPy, and the rows of RuvLLM's benchmark document, by family."""

from __future__ import annotations

from whet.bench.case import BenchOptions, Suite, Table
from whet.bench.kernels import attention, linear, lora, memory, norm, rope


def tables(options: BenchOptions) -> list[Table]:
    """Create the tables of all families."""
    return [table for family in (norm, rope, attention, memory, linear, lora) for table in family.tables(options)]


SUITE = Suite(
    "kernels",
    "Kernels of inference",
    "Norms, RoPE, attention, matrix products, quantised weights and adapters on this processor, with the figures of "
    "RuvLLM's document, from an Apple M4 Pro; notes correct rows with misleading names.",
    tables,
)
