"""``whet estimate``: how much memory a model takes in each format, and whether this machine has it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from whet.models.formats import FORMATS, MIXTURES
from whet.models.sizes import ModelMemory, TrainingEstimate, load_source, model_memory

_WEIGHTS = tyro.conf.arg(metavar="{" + ",".join(FORMATS) + "}")
_EMBEDDINGS = tyro.conf.arg(metavar="{" + ",".join(name for name in FORMATS if name not in MIXTURES) + "}")


@dataclasses.dataclass(frozen=True)
class EstimateConfig:
    """How much memory a model takes: weights with their scales, keys and values, workspace, and training."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A preset such as llama-2-7b, a config.json, the folder that holds one, or a .gguf file."""
    weights: Annotated[str, _WEIGHTS] = "bf16"
    """Format of the layers' matrices."""
    context: int | None = None
    """Tokens of each sequence, prompt and completion together; none: 4096, or as many as the model has positions."""
    batch: int = 1
    """Sequences at once."""
    embeddings: Annotated[str | None, _EMBEDDINGS] = None
    """Format of embeddings and head; none: that of the weights, but q8_0 with 4 bits."""
    json: bool = False
    """Print JSON, in bytes, in place of the table."""


def main(argv: Sequence[str]) -> int:
    """Prints the estimate; the exit status is 0."""
    asked = tyro.cli(EstimateConfig, args=argv, prog="whet estimate")
    memory = model_memory(load_source(asked.model), asked.context, asked.batch, asked.embeddings)
    if asked.json:
        print(json.dumps(_as_dict(asked, memory), indent=2))
        return 0
    chosen = memory.formats[memory.usual_name(asked.weights)]
    console = Console()
    console.print(_table(asked, memory))
    console.print(
        f"Keys and values {in_bytes(chosen.kv_cache)} ({chosen.kv_format}), workspace {in_bytes(chosen.workspace)}, "
        f"norms and biases {in_bytes(chosen.norms)} (float32). {asked.weights} takes {in_bytes(chosen.total)} in all "
        f"and {'fits' if chosen.total <= memory.machine else 'does not fit'} into this machine's "
        f"{in_bytes(memory.machine)}."
    )
    console.print(_training(memory.training))
    console.print("GB are 10^9 bytes, and bits per weight count scales, embeddings and norms.", style="dim")
    return 0


def _table(asked: EstimateConfig, memory: ModelMemory) -> Table:
    title = f"{asked.model}: {memory.config.n_parameters:,} parameters, {asked.batch} x {memory.context:,} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("Format")
    for name in ("Bits/weight", "Layers", "Embeddings", "All weights", "In all"):
        table.add_column(name, justify="right")
    for name, e in memory.formats.items():
        sizes = map(in_bytes, (e.linear, e.embeddings, e.weights, e.total))
        style = "bold" if name == memory.usual_name(asked.weights) else ""
        table.add_row(name, f"{e.bits_per_weight:.2f}", *sizes, style=style)
    return table


def _training(trained: TrainingEstimate) -> str:
    return (
        f"Training of all weights takes {in_bytes(trained.total)} and the activations: weights "
        f"{in_bytes(trained.weights)}, gradients {in_bytes(trained.gradients)}, AdamW's moments "
        f"{in_bytes(trained.moments)} (float32), and {in_bytes(trained.copies)} of copies where products are bfloat16. "
        f"A reference model adds {in_bytes(trained.reference)}."
    )


def _as_dict(asked: EstimateConfig, memory: ModelMemory) -> dict[str, object]:
    chosen, trained = memory.formats[memory.usual_name(asked.weights)], memory.training
    settings = {key: value for key, value in dataclasses.asdict(asked).items() if key != "json"}
    return {
        **settings,
        "context": memory.context,
        "embeddings": chosen.embedding_format,
        "kv_cache": chosen.kv_format,
        "n_parameters": chosen.n_parameters,
        "bits_per_weight": chosen.bits_per_weight,
        "layers_bytes": chosen.linear,
        "embeddings_bytes": chosen.embeddings,
        "norms_bytes": chosen.norms,
        "weights_bytes": chosen.weights,
        "kv_cache_bytes": chosen.kv_cache,
        "workspace_bytes": chosen.workspace,
        "total_bytes": chosen.total,
        "training_bytes": {**trained._asdict(), "total": trained.total, "reference": trained.reference},
        "memory_bytes": memory.machine,
        "fits": chosen.total <= memory.machine,
    }


def in_bytes(n_bytes: int) -> str:
    """A size in words: 21.45 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes} B"
