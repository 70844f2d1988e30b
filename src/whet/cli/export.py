"""``whet export``: a model as a GGUF file that llama.cpp and Ollama open."""

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

from whet.cli.card import file_card
from whet.cli.estimate import in_bytes
from whet.cli.modelfile import modelfile
from whet.cli.settings import parse_flags
from whet.cli.text_model import find_model, read_template, with_adapters
from whet.config.fields import PathText
from whet.engine.probe import Comparison, engine_logprobs, original_position
from whet.errors import WhetValueError
from whet.files import replace_text
from whet.models.base_record import pack_recorded, read_binding
from whet.models.export import Exported, export_gguf, read_adapters
from whet.models.export_adapters import export_adapters
from whet.models.formats import TABLE, FileType
from whet.models.gguf_writer import Progress as Told
from whet.models.gguf_writer import check_place
from whet.models.slots import ModelSource
from whet.models.sources.folder import read_config
from whet.models.sources.gguf import read_options
from whet.models.sources.gguf_container import GGUFFile
from whet.models.sources.pretrained import open_pretrained
from whet.models.tokenizers import read_tokenizer

_TOLERANCES = {"f32": 0.01, "f16": 0.3, "bf16": 0.3, "q8_0": 0.5}
"""Relative error of log-probs by file type; of fewer bits 1, from which on a file knows nothing of the model."""


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Write a model as a GGUF file, with its tokenizer and chat template."""

    model: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained or whet train wrote, also of adapters or a checkpoint, or a .gguf file."""
    output: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="OUT.gguf")]
    """The file to write."""
    quantize: FileType | None = None
    """The types of its matrices, mixed as llama-quantize does; none: q4_k_m, and f32 of adapters alone."""
    adapter: PathText = ""
    """A folder of LoRA adapters that PEFT or whet train saved, for this model: merged into it."""
    adapter_only: bool = False
    """Write the adapters alone, to load beside a GGUF file of the model that they are of."""
    tokenizer: PathText = ""
    """A folder with a tokenizer.json in place of the model's own; empty: the model's."""
    pre: str = ""
    """llama.cpp's name of the pre-tokenizer; empty: the one with the expressions of tokenizer.json."""
    chat_template: PathText = ""
    """A file with a Jinja chat template; empty: the tokenizer's."""
    card: bool = False
    """Write a model card beside it: README.md."""
    modelfile: bool = False
    """Write a Modelfile for Ollama beside it."""
    overwrite: bool = False
    """Replace files that are there."""


def main(argv: Sequence[str]) -> int:
    """Writes the file, and says what is in it; the exit status is 0."""
    asked = parse_flags(ExportConfig, argv, "whet export")
    where, output = "whet export", Path(asked.output)
    beside = {"README.md": asked.card, "Modelfile": asked.modelfile}
    for path in (output, *(output.parent / name for name, is_asked in beside.items() if is_asked)):
        check_place(path, asked.overwrite, where)
    model, adapter = with_adapters(asked.model, asked.adapter, where)
    opened = find_model(model, where)
    source = open_pretrained(opened)
    if adapter and not asked.adapter_only and (record := read_binding(adapter, source, False, where)) is not None:
        source = pack_recorded(source, record, where, adapter).source()  # the numbers that they were trained beside
    adapters = read_adapters(adapter, source, where) if adapter else ()
    if asked.adapter_only:
        given = {"--tokenizer": asked.tokenizer, "--pre": asked.pre, "--chat-template": asked.chat_template}
        if unused := [flag for flag, value in given.items() if value]:
            raise WhetValueError(f"{where}: {unused[0]} has no effect: with --adapter-only there is no tokenizer.")
        if asked.modelfile:
            raise WhetValueError(
                f"{where}: --modelfile has no effect with --adapter-only: Ollama takes no adapters since 0.34.1 "
                f"(September 2026). Leave --adapter-only out, which merges them."
            )
        quantize = asked.quantize or "f32"
        found = export_adapters(opened, output, adapters, quantize, overwrite=asked.overwrite)
        print(f"{output}: {describe(found)}; adapters for {model}")
        _write_beside(asked, model, adapter, source, found)
        return 0
    template = read_template(asked.chat_template, where) if asked.chat_template else None
    check_finite = _Checked(opened, source._replace(adapters=tuple(adapters)), asked.quantize or "q4_k_m", where)
    with told_of(output.name) as progress:
        found = export_gguf(
            opened,
            output,
            asked.quantize or "q4_k_m",
            source=source,
            adapters=adapters,
            tokenizer=asked.tokenizer or None,
            pre=asked.pre or None,
            chat_template=template,
            overwrite=asked.overwrite,
            progress=progress,
            check=check_finite,
        )
    print(f"{output}: {describe(found)}{check_finite.result}")
    for note in filter(None, (found.note, check_finite.skipped)):
        print(f"{where}: {note}.", file=sys.stderr)
    _write_beside(asked, model, adapter, source, found)
    return 0


class _Checked:
    """Compares the written file with the model.

    Attributes:
        result: the mean difference of the log-probs, in words; empty: they were not compared.
        skipped: see ``Comparison``.
    """

    result = skipped = ""

    def __init__(self, model: str | GGUFFile, source: ModelSource, quantize: str, where: str) -> None:
        self._model, self._source, self._quantize, self._where = model, source, quantize, where

    def __call__(self, path: Path) -> None:
        config = read_options(self._model, self._where) if isinstance(self._model, GGUFFile) else None
        config = config or read_config(Path(self._model), self._where)  # pyright: ignore[reportArgumentType]
        original = original_position(config, self._where)
        comparison = Comparison(self._source.config, read_tokenizer(path), original, self._where)
        comparison.measure(lambda probe: engine_logprobs(self._source, probe))
        mean = comparison.check(path, _TOLERANCES.get(self._quantize, 1.0))
        self.result = "" if mean is None else f"; log-probs {mean:.2g} from the model's"
        self.skipped = comparison.skipped


def _write_beside(asked: ExportConfig, model: str, adapter: str, source: ModelSource, found: Exported) -> None:
    """The card and the Modelfile, where they are asked for."""
    output = Path(asked.output)
    if asked.card:
        facts = {
            "Model": Path(model).name,
            "Adapters" if asked.adapter_only else "Adapters, merged into it": adapter and Path(adapter).name,
            "Parameters": f"{source.config.n_parameters:,}",
            "Context, tokens": f"{source.config.max_position:,}",
            "File": f"{output.name}, {describe(found)}",
        }
        replace_text(output.parent / "README.md", file_card(output, model, facts, is_adapter=asked.adapter_only))
    if asked.modelfile:
        text, lack = modelfile(output, read_tokenizer(output))
        replace_text(output.parent / "Modelfile", text)
        if lack:
            print(f"whet export: {lack}.", file=sys.stderr)


def describe(found: Exported) -> str:
    """The size and the tensors of a file."""
    counts = ", ".join(f"{TABLE[format].gguf_name} {n}" for format, n in found.formats.items())
    return f"{in_bytes(found.size_bytes)}; tensors: {counts}"


@contextlib.contextmanager
def told_of(name: str) -> Iterator[Told | None]:
    """A bar on standard error, where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = "{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
