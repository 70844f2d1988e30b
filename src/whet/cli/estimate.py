"""``whet estimate``: how much memory a model takes in each format, and whether this machine has it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from whet.cli.adapters import plan_adapters
from whet.cli.runs import DPORun, GRPORun, OnlineDPORun, SFTRun
from whet.cli.settings import parse
from whet.config.fields import Positive
from whet.errors import WhetValueError, check_installed
from whet.memory import PARTS, machine_bytes, resident_bytes
from whet.models.formats import FORMATS, MIXTURES
from whet.models.sizes import ModelMemory, TrainingEstimate, load_source, model_memory
from whet.models.slots import ModelSource
from whet.training.sizes import Lengths, RunMemory, run_memory

_WEIGHTS = tyro.conf.arg(metavar="{" + ",".join(FORMATS) + "}")
_EMBEDDINGS = tyro.conf.arg(metavar="{" + ",".join(name for name in FORMATS if name not in MIXTURES) + "}")


@dataclasses.dataclass(frozen=True)
class EstimateConfig:
    """How much memory a model takes: weights with their scales, keys and values, workspace, and training.

    With ``--train METHOD`` and the settings of ``whet train METHOD``: what that run comes to hold, part by part."""

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


@dataclasses.dataclass(kw_only=True)
class _OnlineRows:
    """Beside the settings of a ``whet train`` that samples."""

    prompt_tokens: Positive = 128
    """Tokens of a prompt."""
    json: bool = False
    """Print JSON, in bytes, in place of the table."""


@dataclasses.dataclass(kw_only=True)
class _OfflineRows(_OnlineRows):
    """Beside those of others."""

    completion_tokens: Positive = 128
    """Tokens of a completion."""


@dataclasses.dataclass(kw_only=True)
class _SFT(_OfflineRows, SFTRun):
    """Memory of ``whet train sft``."""


@dataclasses.dataclass(kw_only=True)
class _DPO(_OfflineRows, DPORun):
    """Memory of ``whet train dpo``."""


@dataclasses.dataclass(kw_only=True)
class _GRPO(_OnlineRows, GRPORun):
    """Memory of ``whet train grpo``."""


@dataclasses.dataclass(kw_only=True)
class _OnlineDPO(_OnlineRows, OnlineDPORun):
    """Memory of ``whet train online-dpo``."""


_RUNS = {"sft": _SFT, "dpo": _DPO, "grpo": _GRPO, "online-dpo": _OnlineDPO}


def main(argv: Sequence[str]) -> int:
    """Prints the estimate; the exit status is 0."""
    if any(argument.partition("=")[0] == "--train" for argument in argv):
        return _train(list(argv))
    asked = tyro.cli(EstimateConfig, args=argv, prog="whet estimate")
    memory = model_memory(load_source(asked.model), asked.context, asked.batch, asked.embeddings)
    if asked.json:
        print(json.dumps(_as_dict(asked, memory), indent=2))
        return 0
    chosen = memory.formats[memory.display_name(asked.weights)]
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


_TRAIN = """\
How much memory a whet train comes to hold: MODEL --train METHOD, and its settings. Its rows are not read:

--prompt-tokens says how long they are, and, where nothing is sampled, --completion-tokens."""


def _train(argv: list[str]) -> int:
    """``whet estimate MODEL --train METHOD``, with the settings of ``whet train METHOD``."""
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
    asked: Any = parse(_RUNS[method], argv, where, _TRAIN)
    if not asked.model:
        raise WhetValueError(f"{where}: model is missing. Name it first, or in the config file.")
    asked.check_adapters()
    if asked.dtype != "float32":
        raise WhetValueError(
            f"{where}: dtype is {asked.dtype!r}, and only a float32 step on Whet's kernels can be estimated. Leave "
            "it out: weights, gradients and optimizer, with its float32 masters, take as much in bfloat16."
        )
    check_installed(where, "torch", "transformers", *(["peft"] if asked.has_adapters() else []))
    lengths = Lengths(asked.prompt_tokens, getattr(asked, "completion_tokens", 0) or asked.max_new_tokens)
    source = load_source(asked.model)
    asked.base = plan_adapters(asked, source, where).base  # before anything is measured
    interpreter = measure_interpreter(asked.model, getattr(asked, "task", ()), with_adapters=asked.has_adapters())
    _print_run(asked, method, memory_of(asked, source, lengths, interpreter=interpreter))
    return 0


def memory_of(run: Any, source: ModelSource, lengths: Lengths, *, interpreter: int) -> RunMemory:
    """``run_memory`` with the settings of a run."""
    plan = plan_adapters(run, source, "whet estimate")
    base = "none" if plan.adapters is None else plan.base
    return run_memory(source, run, lengths, interpreter=interpreter, adapters=plan.adapters, base=base)


def measure_interpreter(model: str, tasks: Sequence[Any], with_adapters: bool) -> int:
    """Memory of a process that has what ``whet train`` has beside the model: measured in one."""
    code = f"from whet.cli.estimate import _print_loaded as go; go({model!r}, {list(tasks)!r}, {with_adapters})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise WhetValueError(f"whet estimate: the imports of whet train fail: {done.stderr.strip()[-300:]}")
    return int(done.stdout)


def _print_loaded(model: str, tasks: Sequence[Any], with_adapters: bool) -> None:
    """Imports what ``whet train`` imports, loads the tokenizer and the tasks, and prints this process's memory.

    What is wrong with one of them, the run says.
    """
    models = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils")
    for name in ("whet.cli.train", *models, *(["peft"] if with_adapters else [])):
        importlib.import_module(name)
    from whet.cli.models import load_transformers_tokenizer
    from whet.tasks.mixture import open_tasks

    kept = []
    if Path(model).exists():
        with suppress(Exception):
            kept.append(load_transformers_tokenizer(model))
    with suppress(Exception):
        kept.append(open_tasks(tasks))
    print(resident_bytes())


def _print_run(asked: Any, method: str, memory: RunMemory) -> None:
    parts, machine = memory.at_peak(), machine_bytes()
    if asked.json:
        figures = {"parts": parts, "total_bytes": memory.total, "update_bytes": sum(memory.update.values())}
        figures |= {"sampling_bytes": sum(memory.sampling.values()), "memory_bytes": machine}
        print(json.dumps({"model": asked.model, "method": method, **figures}, indent=2))
        return
    console, lent = Console(), min(sum(memory.update.values()), sum(memory.sampling.values()))
    table = Table(title=f"whet train {method} of {asked.model}", title_justify="left")
    table.add_column("Held by")
    table.add_column("Memory", justify="right")
    for name, n_bytes in parts.items():
        table.add_row(PARTS[name], in_bytes(n_bytes))
    table.add_row("in all", in_bytes(memory.total), style="bold")
    console.print(table)
    if lent:
        less = "Sampling" if "activations" in parts else "An update"
        console.print(f"{less} takes {in_bytes(lent)}, which the other has given back before.")
    verdict = "fits" if memory.total <= machine else "does not fit"
    console.print(f"It {verdict} into this machine's {in_bytes(machine)}. GB are 10^9 bytes.")


def _table(asked: EstimateConfig, memory: ModelMemory) -> Table:
    title = f"{asked.model}: {memory.config.n_parameters:,} parameters, {asked.batch} x {memory.context:,} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("Format")
    for name in ("Bits/weight", "Layers", "Embeddings", "All weights", "In all"):
        table.add_column(name, justify="right")
    for name, e in memory.formats.items():
        sizes = map(in_bytes, (e.linear, e.embeddings, e.weights, e.total))
        style = "bold" if name == memory.display_name(asked.weights) else ""
        table.add_row(name, f"{e.bits_per_weight:.2f}", *sizes, style=style)
    return table


def _training(trained: TrainingEstimate) -> str:
    return (
        f"Training of all weights takes {in_bytes(trained.total)} and the activations: weights "
        f"{in_bytes(trained.weights)}, gradients {in_bytes(trained.gradients)}, and AdamW's moments "
        f"{in_bytes(trained.moments)} (float32). A reference model adds {in_bytes(trained.reference)}. Trained in "
        "bfloat16, it takes as much: the optimizer adds float32 master weights."
    )


def _as_dict(asked: EstimateConfig, memory: ModelMemory) -> dict[str, object]:
    chosen, trained = memory.formats[memory.display_name(asked.weights)], memory.training
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
