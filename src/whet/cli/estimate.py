"""``whet estimate``: the memory of a model in each format, or of a training run, and whether this machine has it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from whet.cli.settings import parse, parse_flags
from whet.config.algorithms import ALGORITHMS
from whet.config.fields import Positive
from whet.errors import WhetValueError
from whet.memory import PARTS, format_bytes
from whet.models.formats import FORMATS, MIXTURES
from whet.models.hub import find_on_hub
from whet.models.sizes import ModelMemory, TrainingEstimate, load_source, model_memory
from whet.runs.adapters import plan_adapters
from whet.runs.estimate import estimate_run_memory, measure_interpreter
from whet.runs.native import uses_learner
from whet.runs.settings import RUNS
from whet.system.memory import machine_bytes
from whet.training.sizes import Lengths, RunMemory

_WEIGHTS = tyro.conf.arg(metavar="{" + ",".join(FORMATS) + "}")
_EMBEDDINGS = tyro.conf.arg(metavar="{" + ",".join(name for name in FORMATS if name not in MIXTURES) + "}")


@dataclasses.dataclass(frozen=True)
class EstimateConfig:
    """Estimate the memory of a model: weights with their scales, KV cache, workspace, and training.

    With --train METHOD and the settings of whet train METHOD: the peak memory of that run, part by part."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A preset such as llama-2-7b, a config.json, its folder, or a .gguf file."""
    weights: Annotated[str, _WEIGHTS] = "bf16"
    """Weight format of the layers."""
    context: int | None = None
    """Tokens of each sequence, prompt and completion; None: 4096, or the model's positions if fewer."""
    batch: int = 1
    """Number of concurrent sequences."""
    embeddings: Annotated[str | None, _EMBEDDINGS] = None
    """Format of embeddings and head; None: the weights' format, or q8_0 for 4-bit weights."""
    json: bool = False
    """Print JSON, with sizes in bytes, instead of tables."""


@dataclasses.dataclass(kw_only=True)
class _OnlineRows:
    """Additional settings for methods that sample."""

    prompt_tokens: Positive = 128
    """Average number of tokens of a prompt."""
    json: bool = False
    """Print JSON, with sizes in bytes, instead of tables."""


@dataclasses.dataclass(kw_only=True)
class _OfflineRows(_OnlineRows):
    """Additional settings for methods that do not sample."""

    completion_tokens: Positive = 128
    """Average number of tokens of a completion."""


_RUNS = {
    name: dataclasses.make_dataclass(
        f"_{run.__name__}",
        [],
        bases=(_OnlineRows if ALGORITHMS[name].config.samples else _OfflineRows, run),
        kw_only=True,
    )
    for name, run in RUNS.items()
}
"""Settings of ``whet estimate`` by method of ``whet train``."""


def main(argv: Sequence[str]) -> int:
    """Print the estimate and return 0."""
    if any(argument.partition("=")[0] == "--train" for argument in argv):
        return _train(list(argv))
    options = parse_flags(EstimateConfig, argv, "whet estimate")
    memory = model_memory(
        load_source(find_on_hub(options.model, "whet estimate")), options.context, options.batch, options.embeddings
    )
    if options.json:
        print(json.dumps(_as_dict(options, memory), indent=2))
        return 0
    chosen = memory.formats[memory.display_name(options.weights)]
    console = Console()
    console.print(_table(options, memory))
    console.print(
        f"KV cache {format_bytes(chosen.kv_cache)} ({chosen.kv_format}), workspace {format_bytes(chosen.workspace)}, "
        f"norms and biases {format_bytes(chosen.norms)} (float32). {options.weights} takes "
        f"{format_bytes(chosen.total)} in total and {'fits' if chosen.total <= memory.machine else 'does not fit'} "
        f"into this machine's {format_bytes(memory.machine)}."
    )
    console.print(_describe_training(memory.training))
    console.print("1 GB is 10^9 bytes. Bits per weight include scales, embeddings and norms.", style="dim")
    return 0


_TRAIN = """\
Estimate the peak memory of whet train: MODEL --train METHOD, and its settings. The data is not read.

Set the lengths of rows with --prompt-tokens and, for methods that do not sample, --completion-tokens."""


def _train(argv: list[str]) -> int:
    """Run ``whet estimate MODEL --train METHOD``, with the settings of ``whet train METHOD``."""
    where = "whet estimate"
    argv = [
        part
        for argument in argv
        for part in (argument.split("=", 1) if argument.startswith("--train=") else [argument])
    ]
    at = argv.index("--train")
    method = "".join(argv[at + 1 : at + 2])
    if method not in _RUNS:
        raise WhetValueError(f"{where}: --train is {method!r}, expected one of {', '.join(_RUNS)}.")
    del argv[at : at + 2]
    if argv and not argv[0].startswith("-") and not argv[0].endswith(".toml"):
        argv[:1] = ["--model", argv[0]]
    options: Any = parse(_RUNS[method], argv, where, _TRAIN)
    if not options.model:
        raise WhetValueError(f"{where}: model is missing. Pass it as the first argument, or set it in the config file.")
    options.check_adapters()
    if options.dtype != "float32":
        raise WhetValueError(
            f"{where}: dtype is {options.dtype!r}, but only float32 steps on Whet's kernels can be estimated. Omit it: "
            "weights, gradients and optimizer, with its float32 master weights, take as much in bfloat16."
        )
    lengths = Lengths(options.prompt_tokens, getattr(options, "completion_tokens", 0) or options.max_new_tokens)
    options.model = find_on_hub(options.model, where)
    source = load_source(options.model)
    plan = plan_adapters(options, source, where)  # checks the settings before the interpreter is measured
    options.base = plan.base
    is_native = uses_learner(options, plan, where)
    if not is_native:
        options.check_torch(where)
    packages = [] if is_native else options.torch_packages()
    interpreter = measure_interpreter(options.model, getattr(options, "task", ()), packages)
    _print_run(options, method, estimate_run_memory(options, source, lengths, interpreter=interpreter))
    return 0


def _print_run(options: Any, method: str, memory: RunMemory) -> None:
    parts, machine = memory.at_peak(), machine_bytes()
    if options.json:
        figures = {"parts": parts, "total_bytes": memory.total, "update_bytes": sum(memory.update.values())}
        figures |= {"sampling_bytes": sum(memory.sampling.values()), "memory_bytes": machine}
        figures["kept_layers"] = memory.kept_layers
        print(json.dumps({"model": options.model, "method": method, **figures}, indent=2))
        return
    console, shared = Console(), min(sum(memory.update.values()), sum(memory.sampling.values()))
    table = Table(title=f"whet train {method} of {options.model}", title_justify="left")
    table.add_column("Used by")
    table.add_column("Memory", justify="right")
    for name, n_bytes in parts.items():
        table.add_row(PARTS[name], format_bytes(n_bytes))
    table.add_row("total", format_bytes(memory.total), style="bold")
    console.print(table)
    if shared:
        smaller, larger = ("Sampling", "the update") if "activations" in parts else ("The update", "sampling")
        console.print(f"{smaller} takes {format_bytes(shared)}, which {larger} releases first.")
    if memory.kept_layers:
        console.print(
            f"The activations of {memory.kept_layers} layers are kept for the backward pass; --activation-bytes sets "
            f"their memory."
        )
    verdict = "fits" if memory.total <= machine else "does not fit"
    console.print(f"It {verdict} into this machine's {format_bytes(machine)}. 1 GB is 10^9 bytes.")


def _table(options: EstimateConfig, memory: ModelMemory) -> Table:
    title = f"{options.model}: {memory.config.n_parameters:,} parameters, {options.batch} x {memory.context:,} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("Format")
    for name in ("Bits/weight", "Layers", "Embeddings", "All weights", "Total"):
        table.add_column(name, justify="right")
    for name, e in memory.formats.items():
        sizes = map(format_bytes, (e.linear, e.embeddings, e.weights, e.total))
        style = "bold" if name == memory.display_name(options.weights) else ""
        table.add_row(name, f"{e.bits_per_weight:.2f}", *sizes, style=style)
    return table


def _describe_training(trained: TrainingEstimate) -> str:
    return (
        f"Full fine-tuning takes {format_bytes(trained.total)} plus activations: weights "
        f"{format_bytes(trained.weights)}, gradients {format_bytes(trained.gradients)}, AdamW moments "
        f"{format_bytes(trained.moments)} (float32). A reference model adds {format_bytes(trained.reference)}. "
        "Training in bfloat16 takes as much: the optimizer adds float32 master weights."
    )


def _as_dict(options: EstimateConfig, memory: ModelMemory) -> dict[str, object]:
    chosen, trained = memory.formats[memory.display_name(options.weights)], memory.training
    settings = {key: value for key, value in dataclasses.asdict(options).items() if key != "json"}
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
