"""``whet estimate``: how much memory a model takes in each format, and whether this machine has it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from whet.estimate import FORMATS, PASS_TOKENS, Estimate, embeddings_format, estimate, load_shape

Format = Literal["float32", "bfloat16", "float16", "int8", "q8_0", "q4_0", "q4_k"]
Float = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class EstimateConfig:
    """How much memory a model takes: weights with their scales, KV cache, workspace."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A preset such as llama-2-7b, a config.json, or the folder that holds one."""
    weights: Format = "bfloat16"
    """Format of the layers' matrices."""
    context: int = 4096
    """Tokens of each sequence, prompt and completion together."""
    batch: int = 1
    """Sequences at once."""
    embeddings: Format | None = None
    """Format of embeddings and head; that of the weights if that is a float, else bfloat16."""
    kv_cache: Float = "bfloat16"
    """Format of the KV cache."""
    json: bool = False
    """Print JSON, in bytes, in place of the table."""


def main(argv: Sequence[str]) -> int:
    """Prints the estimate; the exit status is 0."""
    asked = tyro.cli(EstimateConfig, args=argv, prog="whet estimate")
    shape = load_shape(asked.model)
    all_formats = {
        name: estimate(shape, name, asked.context, asked.batch, asked.embeddings, asked.kv_cache) for name in FORMATS
    }
    memory = memory_bytes()
    if asked.json:
        print(json.dumps(_as_dict(asked, all_formats[asked.weights], memory), indent=2))
        return 0
    console = Console()
    console.print(_table(asked, all_formats))
    chosen = all_formats[asked.weights]
    console.print(
        f"KV cache {in_bytes(chosen.kv_cache)} ({asked.kv_cache}), workspace {in_bytes(chosen.workspace)}, norms and "
        f"biases {in_bytes(chosen.norms)} (float32). {asked.weights} takes {in_bytes(chosen.total)} in all and "
        f"{'fits' if chosen.total <= memory else 'does not fit'} into this machine's {in_bytes(memory)}."
    )
    console.print(
        "GB are 10^9 bytes, and bits per weight count scales, embeddings and norms. The workspace is an estimate: "
        f"float32 activations of {PASS_TOKENS} tokens at a time, or one per sequence if that is more, and the logits.",
        style="dim",
    )
    return 0


def memory_bytes() -> int:
    """This machine's memory, or what its container may use of it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(memory, int(text)) if text.isdigit() else memory


def _table(asked: EstimateConfig, all_formats: dict[str, Estimate]) -> Table:
    n_parameters = all_formats[asked.weights].n_parameters
    title = f"{asked.model}: {n_parameters:,} parameters, {asked.batch} x {asked.context:,} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("Format")
    for name in ("Bits/weight", "Layers", "Embeddings", "All weights", "In all"):
        table.add_column(name, justify="right")
    for name, e in all_formats.items():
        sizes = map(in_bytes, (e.linear, e.embeddings, e.weights, e.total))
        table.add_row(name, f"{e.bits_per_weight:.2f}", *sizes, style="bold" if name == asked.weights else "")
    return table


def _as_dict(asked: EstimateConfig, chosen: Estimate, memory: int) -> dict[str, object]:
    settings = {key: value for key, value in dataclasses.asdict(asked).items() if key != "json"}
    settings["embeddings"] = asked.embeddings or embeddings_format(asked.weights)
    return {
        **settings,
        "n_parameters": chosen.n_parameters,
        "bits_per_weight": chosen.bits_per_weight,
        "layers_bytes": chosen.linear,
        "embeddings_bytes": chosen.embeddings,
        "norms_bytes": chosen.norms,
        "weights_bytes": chosen.weights,
        "kv_cache_bytes": chosen.kv_cache,
        "workspace_bytes": chosen.workspace,
        "total_bytes": chosen.total,
        "memory_bytes": memory,
        "fits": chosen.total <= memory,
    }


def in_bytes(n_bytes: int) -> str:
    """A size in words: 21.45 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes} B"
