"""``whet info``: architecture and memory of a model, and whether the native engine supports it. Loads no weights."""

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
from whet.cli.settings import parse_flags
from whet.errors import WhetValueError
from whet.memory import format_bytes
from whet.models.formats import TABLE, choose_formats, describe_spans
from whet.models.sizes import model_memory
from whet.models.slots import ModelSource
from whet.models.sources.folder import read_config
from whet.models.sources.gguf_container import GGUFFile, read_gguf
from whet.models.sources.pretrained import open_pretrained
from whet.models.tokenizers import read_vocabulary
from whet.models.tokenizers.tokenizer import load_texts, read_chat_template
from whet.text.checkpoint_model import resolve_model


@dataclasses.dataclass(frozen=True)
class InfoConfig:
    """Describe a model: architecture, memory, and whether the native engine supports it."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained wrote, or a .gguf file."""
    json: bool = False
    """Print JSON, with sizes in bytes, instead of tables."""


def main(argv: Sequence[str]) -> int:
    """Print the description and return 0, also for unsupported models."""
    options = parse_flags(InfoConfig, argv, "whet info")
    found = describe(resolve_model(options.model, "whet info"))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(Console(highlight=False, soft_wrap=True), found)
    return 0


def describe(model: str) -> dict[str, Any]:
    """Return the data of ``whet info``, sizes in bytes. Unsupported models have a reason and no sizes.

    Raises:
        WhetValueError: the model does not exist or cannot be read.
    """
    path = Path(model)
    if not path.exists():
        raise WhetValueError(f"whet info: {model!r} does not exist. Pass a model's folder or .gguf file.")
    opened = path if path.is_dir() else read_gguf(path, f"whet info: {path}")
    found: dict[str, Any] = {
        "model": model,
        "architecture": _architecture(opened),
        "isa": whet.isa(),
        "n_threads": whet.get_num_threads(),
    }
    if isinstance(opened, GGUFFile):
        found |= {"files": [str(path) for path in opened.paths], "tokenizer": _tokenizer(opened)}
    try:
        source = open_pretrained(opened)
    except WhetValueError as error:
        return {**found, "supported": False, "reason": str(error)}
    memory = model_memory(source)
    weights = {name: e.weights for name, e in memory.formats.items()}
    if isinstance(opened, GGUFFile):
        weights["as stored"] = memory.as_stored.weights
        found["tensors"] = _tensor_types(opened, source)
    kv_bytes = memory.kv_bytes_per_token
    return {
        **found,
        "supported": True,
        "n_parameters": source.config.n_parameters,
        "n_active_parameters": source.config.n_active_parameters,
        "config": {name: value for name, value in vars(source.config).items() if name != "inv_freq"},
        "weights_bytes": weights,
        "kv_bytes_per_token": {"float32": kv_bytes["float32"], "bf16": kv_bytes["bfloat16"], "q8": kv_bytes["q8"]},
        "memory_bytes": memory.machine,
    }


def _architecture(opened: Path | GGUFFile) -> Any:
    if isinstance(opened, GGUFFile):
        return opened.metadata.get("general.architecture")
    return read_config(opened, "whet info").get("model_type")


def _tensor_types(file: GGUFFile, source: ModelSource) -> dict[str, dict[str, Any]]:
    """Return GGUF tensor type -> number of tensors, size, and their formats in the engine."""
    packed = choose_formats(source, None, None, None, "whet info")
    engine_formats: dict[str, set[str]] = {}
    for row_slice in source.slices():
        format = TABLE[row_slice.format]
        is_float32 = (
            row_slice.slot not in packed or describe_spans(packed[row_slice.slot]) == "float32"
        )  # norms and biases
        format = TABLE["float32" if is_float32 else "bfloat16" if format.is_float else format.packed_as]
        engine_formats.setdefault(row_slice.format, set()).add(format.display_name)
    types: dict[str, dict[str, Any]] = {}
    for stored in file.tensors.values():
        format = TABLE[stored.format]
        row = {"n": 0, "size_bytes": 0, "becomes": sorted(engine_formats.get(format.name, ())), "bound": format.bound}
        row = types.setdefault(format.gguf_name, row)
        row["n"] += 1
        row["size_bytes"] += stored.tensor.nbytes
    return types


def _tokenizer(file: GGUFFile) -> dict[str, Any]:
    """Describe the tokenizer in the file, or the reason why it cannot be read."""
    where = "whet info"
    try:
        vocabulary = read_vocabulary(load_texts(file.metadata, where), where)
        template = read_chat_template(file.metadata, where)
    except WhetValueError as error:
        return {"reason": str(error)}
    return {
        "kind": vocabulary.kind,
        "n_tokens": len(vocabulary.tokens),
        "chat_template": template is not None,
        "stop_tokens": {vocabulary.tokens[i]: i for i in vocabulary.stop_ids},
    }


def _format_shape(n_parameters: int, n_active: int, config: dict[str, Any]) -> str:
    heads = f"{config['n_heads']} {'gated ' if config['output_gate'] else ''}heads of {config['head_dim']}"
    if config["local_head_dim"]:
        heads += f", or {config['local_head_dim']} in local layers"
    if config["n_kv_heads"] < config["n_heads"]:
        heads += f" ({config['n_kv_heads']} KV heads)"
    count = f"{n_parameters:,} parameters{f', {n_active:,} of them active' if n_active < n_parameters else ''}"
    tied = " (tied)" if config["tied_head"] else ""
    windows = sorted({window for window in config["windows"] if window})
    others = {"without keys and values": config["n_shared_kv_layers"]}
    others |= {"convolutions": config["mixers"].count("conv"), "gated delta rules": config["mixers"].count("delta")}
    mixed = "".join(f" ({n} of them {name})" for name, n in others.items() if n)
    return (
        f"{count}: {config['n_layers']} layers{mixed}, hidden {config['hidden_dim']}, {heads}, "
        f"{_format_mlp(config)}, vocabulary {config['vocab_size']:,}{tied}, "
        f"{config['max_position']:,} positions{f', windows of {windows[0]:,}' if windows else ''}."
    )


def _format_mlp(config: dict[str, Any]) -> str:
    kind = f"({config['activation']}{', gated' if config['gated'] else ''})"
    if not config["n_experts"]:
        return f"MLP {' or '.join(map(str, sorted({*config['ffn_dims']}))) or config['ffn_dim']} {kind}"
    text = f"{config['n_used_experts']} of {config['n_experts']} experts of {config['expert_dim']} {kind}"
    if config["shared_dim"]:
        text += f" and a shared one of {config['shared_dim']}"
    if n_dense := config["moe_layers"].count(False):
        text += f", in {n_dense} of the layers MLP {config['ffn_dim']}"
    return text


def _print(console: Console, found: dict[str, Any]) -> None:
    console.print(f"{found['model']}: {found['architecture']}")
    console.print(f"Native engine, on {found['isa']} with {found['n_threads']} threads: ", end="")
    if not found["supported"]:
        console.print(f"not supported. {found['reason']}")
        return
    console.print("supported.")
    console.print(_format_shape(found["n_parameters"], found["n_active_parameters"], found["config"]))
    if "tensors" in found:
        _print_file(console, found)
    table = Table(title="Weights in memory", title_justify="left")
    table.add_column("--weights")
    table.add_column("size", justify="right")
    table.add_column("share of memory", justify="right")
    for name, size in found["weights_bytes"].items():
        table.add_row(name, format_bytes(size), f"{size / found['memory_bytes']:.1%}")
    console.print(table)
    kv = found["kv_bytes_per_token"]
    console.print(
        f"KV cache per token: {format_bytes(kv['bf16'])}, with float32 weights {format_bytes(kv['float32'])}, "
        f"with --kv-dtype q8 {format_bytes(kv['q8'])}."
    )


def _print_file(console: Console, found: dict[str, Any]) -> None:
    """Print the tensor types of a GGUF file, and its tokenizer."""
    n_files = len(found["files"])
    table = Table(title=f"Tensors in {n_files} files" if n_files > 1 else "Tensors", title_justify="left")
    for name in ("type", "tensors", "size", "in the engine"):
        table.add_column(name, justify="left" if name in ("type", "in the engine") else "right")
    for name, row in found["tensors"].items():
        becomes = " or ".join(row["becomes"]) + (f", {row['bound']}" if row["bound"] else "")
        table.add_row(name, str(row["n"]), format_bytes(row["size_bytes"]), becomes)
    console.print(table)
    tokenizer = found["tokenizer"]
    if "reason" in tokenizer:
        console.print(f"Tokenizer: unreadable. {tokenizer['reason']}", markup=False)
        return
    stops = ", ".join(f"{text} ({i})" for text, i in tokenizer["stop_tokens"].items()) or "none"
    template = "with a chat template" if tokenizer["chat_template"] else "without a chat template"
    console.print(
        f"Tokenizer: {tokenizer['kind']}, {tokenizer['n_tokens']:,} tokens, {template}; stop tokens: {stops}.",
        markup=False,
    )
