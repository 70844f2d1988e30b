"""``whet info``: what a model is, what it takes, and whether the native engine runs it here. Loads no weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import whet
from whet.cli.estimate import in_bytes
from whet.errors import WhetValueError
from whet.models.sizes import model_memory
from whet.models.sources.folder import open_folder, read_config
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import read_gguf


@dataclasses.dataclass(frozen=True)
class InfoConfig:
    """Describe a model: its architecture, its memory on the native engine, and whether that runs it."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained wrote, or a .gguf file."""
    json: bool = False
    """Print JSON, in bytes, in place of the table."""


def main(argv: Sequence[str]) -> int:
    """Prints what is known; the exit status is 0, also of a model that the engine does not run."""
    asked = tyro.cli(InfoConfig, args=argv, prog="whet info")
    found = describe(asked.model)
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        _print(Console(highlight=False, soft_wrap=True), found)
    return 0


def describe(model: str) -> dict[str, Any]:
    """All that ``whet info`` tells, sizes in bytes. What the engine does not run has a reason and no sizes.

    Raises:
        WhetValueError: there is no model of that name, or what is there cannot be read.
    """
    path = Path(model)
    if not path.exists():
        raise WhetValueError(f"whet info: there is no {model!r}. Pass a model's folder or its .gguf file.")
    found: dict[str, Any] = {
        "model": model,
        "architecture": _architecture(path),
        "isa": whet.isa(),
        "n_threads": whet.get_num_threads(),
    }
    try:
        source = open_gguf(path) if path.is_file() else open_folder(path)
    except WhetValueError as error:
        return {**found, "supported": False, "reason": str(error)}
    memory = model_memory(source)
    weights = {name: e.weights for name, e in memory.formats.items()}
    if path.is_file():
        weights["as stored"] = memory.as_stored.weights
    kv_bytes = memory.kv_bytes_per_token
    return {
        **found,
        "supported": True,
        "n_parameters": source.config.n_parameters,
        "config": {name: value for name, value in vars(source.config).items() if name != "inv_freq"},
        "weights_bytes": weights,
        "kv_bytes_per_token": {"float32": kv_bytes["float32"], "bf16": kv_bytes["bfloat16"]},
        "memory_bytes": memory.machine,
    }


def _architecture(path: Path) -> Any:
    if path.is_file():
        return read_gguf(path, f"whet info: {path}").metadata.get("general.architecture")
    return read_config(path, "whet info").get("model_type")


def _shape(n_parameters: int, config: dict[str, Any]) -> str:
    heads = f"{config['n_heads']} heads of {config['head_dim']}"
    if config["n_kv_heads"] < config["n_heads"]:
        heads += f" ({config['n_kv_heads']} for keys and values)"
    mlp = f"{config['activation']}{', gated' if config['gated'] else ''}"
    tied = " (tied)" if config["tied_head"] else ""
    windows = sorted({window for window in config["windows"] if window})
    return (
        f"{n_parameters:,} parameters: {config['n_layers']} layers, hidden {config['hidden_dim']}, {heads}, "
        f"MLP {config['ffn_dim']} ({mlp}), vocabulary {config['vocab_size']:,}{tied}, "
        f"{config['max_position']:,} positions{f', windows of {windows[0]:,}' if windows else ''}."
    )


def _print(console: Console, found: dict[str, Any]) -> None:
    console.print(f"{found['model']}: {found['architecture']}")
    console.print(f"Native engine, on {found['isa']} with {found['n_threads']} threads: ", end="")
    if not found["supported"]:
        console.print(f"does not run it. {found['reason']}")
        return
    console.print("runs it.")
    console.print(_shape(found["n_parameters"], found["config"]))
    table = Table(title="Weights in memory", title_justify="left")
    table.add_column("--weights")
    table.add_column("size", justify="right")
    table.add_column("of this machine", justify="right")
    for name, size in found["weights_bytes"].items():
        table.add_row(name, in_bytes(size), f"{size / found['memory_bytes']:.1%}")
    console.print(table)
    kv = found["kv_bytes_per_token"]
    console.print(
        f"Keys and values of a token: {in_bytes(kv['bf16'])}, with float32 weights {in_bytes(kv['float32'])}."
    )
