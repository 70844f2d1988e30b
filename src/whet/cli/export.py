"""``whet export``: writes a model as a GGUF file for llama.cpp and Ollama."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from whet.cli.modelfile import render_modelfile
from whet.cli.settings import parse_flags
from whet.config.fields import PathText
from whet.engine.probe import Comparison, engine_logprobs, original_position
from whet.errors import WhetValueError
from whet.files import replace_text
from whet.memory import format_bytes
from whet.models.base_record import pack_recorded, read_binding
from whet.models.export import Exported, export_gguf, read_adapters
from whet.models.export_adapters import export_adapters
from whet.models.formats import TABLE, FileType
from whet.models.gguf_writer import Progress as ProgressCallback
from whet.models.gguf_writer import check_destination
from whet.models.slots import ModelSource
from whet.models.sources.gguf_container import GGUFFile
from whet.models.sources.pretrained import open_pretrained, read_model_config
from whet.models.tokenizers import read_tokenizer
from whet.runs.card import render_file_card
from whet.text.checkpoint_model import resolve_adapter
from whet.text.model import choose_template, find_model

_TOLERANCES = {"f32": 0.01, "f16": 0.3, "bf16": 0.3, "q8_0": 0.5}
"""Tolerated relative error of log-probs by file type; fewer bits: 1, above which the file is unrelated to the model."""


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Export a model as a GGUF file, with tokenizer and chat template."""

    model: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained or whet train wrote, also of adapters, a checkpoint, or a .gguf file."""
    output: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="OUT.gguf")]
    """File to write."""
    quantize: FileType | None = None
    """Types of the matrices, mixed as llama-quantize does. Default: q4_k_m, and f32 with --adapter-only."""
    adapter: PathText = ""
    """A folder of LoRA adapters that PEFT or whet train saved, to merge into the model."""
    adapter_only: bool = False
    """Write only the adapters, to load together with a GGUF file of their base model."""
    tokenizer: PathText = ""
    """A folder with a tokenizer.json; empty: the model's."""
    pre: str = ""
    """llama.cpp's name of the pre-tokenizer; empty: the one that matches tokenizer.json."""
    chat_template: PathText = ""
    """A file with a Jinja chat template; empty: the one saved with the adapters, or else the tokenizer's."""
    card: bool = False
    """Write a model card, README.md, next to the file."""
    modelfile: bool = False
    """Write a Modelfile for Ollama next to the file."""
    overwrite: bool = False
    """Replace existing files."""


def main(argv: Sequence[str]) -> int:
    """Write the file, print a summary and return 0."""
    options = parse_flags(ExportConfig, argv, "whet export")
    where, output = "whet export", Path(options.output)
    companions = {"README.md": options.card, "Modelfile": options.modelfile}
    for path in (output, *(output.parent / name for name, is_requested in companions.items() if is_requested)):
        check_destination(path, options.overwrite, where)
    model, adapter = resolve_adapter(options.model, options.adapter, where)
    opened = find_model(model, where)
    source = open_pretrained(opened)
    if adapter and not options.adapter_only and (record := read_binding(adapter, source, False, where)) is not None:
        source = pack_recorded(source, record, where, adapter).source()  # the base that the adapters were trained on
    adapters = read_adapters(adapter, source, where) if adapter else ()
    if options.adapter_only:
        given = {"--tokenizer": options.tokenizer, "--pre": options.pre, "--chat-template": options.chat_template}
        if unused := [flag for flag, value in given.items() if value]:
            raise WhetValueError(f"{where}: {unused[0]} has no effect with --adapter-only, which writes no tokenizer.")
        if options.modelfile:
            raise WhetValueError(
                f"{where}: --modelfile has no effect with --adapter-only: Ollama does not support adapters since "
                f"0.34.1 (September 2026). Omit --adapter-only to merge them."
            )
        quantize = options.quantize or "f32"
        exported = export_adapters(opened, output, adapters, quantize, overwrite=options.overwrite)
        print(f"{output}: {describe(exported)}; adapters for {model}")
        _write_companions(options, model, adapter, source, exported)
        return 0
    template = choose_template(options.chat_template, "" if options.tokenizer else adapter, where)
    compared = source._replace(adapters=tuple(adapters))
    if source.base is None:  # without the bound that files lack, see Exported.note
        compared = compared._replace(config=dataclasses.replace(source.config, delta_step_min=0.0))
    check = _LogprobCheck(opened, compared, options.quantize or "q4_k_m", where)
    with show_progress(output.name) as progress:
        exported = export_gguf(
            opened,
            output,
            options.quantize or "q4_k_m",
            source=source,
            adapters=adapters,
            tokenizer=options.tokenizer or None,
            pre=options.pre or None,
            chat_template=template,
            overwrite=options.overwrite,
            progress=progress,
            check=check,
        )
    print(f"{output}: {describe(exported)}{check.result}")
    for note in filter(None, (exported.note, check.skipped)):
        print(f"{where}: {note}.", file=sys.stderr)
    _write_companions(options, model, adapter, source, exported)
    return 0


class _LogprobCheck:
    """Compares log-probs of the written file with the model's.

    Attributes:
        result: a phrase with the mean difference of the log-probs; empty if they were not compared.
        skipped: see ``Comparison``.
    """

    result = skipped = ""

    def __init__(self, model: str | GGUFFile, source: ModelSource, quantize: str, where: str) -> None:
        self._model, self._source, self._quantize, self._where = model, source, quantize, where

    def __call__(self, path: Path) -> None:
        original = original_position(read_model_config(self._model, self._where), self._where)
        comparison = Comparison(self._source.config, read_tokenizer(path), original, self._where)
        comparison.measure(lambda probe: engine_logprobs(self._source, probe))
        mean = comparison.check(path, _TOLERANCES.get(self._quantize, 1.0))
        self.result = "" if mean is None else f"; log-probs {mean:.2g} from the model's"
        self.skipped = comparison.skipped


def _write_companions(options: ExportConfig, model: str, adapter: str, source: ModelSource, exported: Exported) -> None:
    """Write the card and the Modelfile if requested."""
    output = Path(options.output)
    if options.card:
        facts = {
            "Model": Path(model).name,
            "Adapters" if options.adapter_only else "Adapters, merged into it": adapter and Path(adapter).name,
            "Parameters": f"{source.config.n_parameters:,}",
            "Context, tokens": f"{source.config.max_position:,}",
            "File": f"{output.name}, {describe(exported)}",
        }
        replace_text(
            output.parent / "README.md", render_file_card(output, model, facts, is_adapter=options.adapter_only)
        )
    if options.modelfile:
        text, limitation = render_modelfile(output, read_tokenizer(output))
        replace_text(output.parent / "Modelfile", text)
        if limitation:
            print(f"whet export: {limitation}.", file=sys.stderr)


def describe(exported: Exported) -> str:
    """Describe the size and the tensor types of a file."""
    counts = ", ".join(f"{TABLE[format].gguf_name} {n}" for format, n in exported.formats.items())
    return f"{format_bytes(exported.size_bytes)};  tensors: {counts}"


@contextlib.contextmanager
def show_progress(name: str) -> Iterator[ProgressCallback | None]:
    """Show a progress bar on standard error if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = "{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
