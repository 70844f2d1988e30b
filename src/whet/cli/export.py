"""``whet export``: a model as a GGUF file that llama.cpp and Ollama open."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from whet.cli.estimate import in_bytes
from whet.cli.text_model import find_model, read_template, with_adapters
from whet.models.base import pack_recorded, read_binding
from whet.models.export import export_gguf, read_adapters
from whet.models.formats import TABLE, FileType
from whet.models.gguf_writer import Progress as Told
from whet.models.gguf_writer import check_place
from whet.models.sources.pretrained import open_pretrained


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Write a model as a GGUF file, with its tokenizer and chat template."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained or whet train wrote, also of adapters, or a .gguf file."""
    output: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT.gguf")]
    """The file to write."""
    quantize: FileType = "q4_k_m"
    """The types of its matrices, mixed as llama-quantize does."""
    adapter: str = ""
    """A folder of LoRA adapters that PEFT or whet train saved, for this model: merged into it."""
    tokenizer: str = ""
    """A folder with a tokenizer.json in place of the model's own; empty: the model's."""
    pre: str = ""
    """llama.cpp's name of the pre-tokenizer; empty: the one with the expressions of tokenizer.json."""
    chat_template: str = ""
    """A file with a Jinja chat template; empty: the tokenizer's."""
    overwrite: bool = False
    """Replace a file that is there."""


def main(argv: Sequence[str]) -> int:
    """Writes the file, and says what is in it; the exit status is 0."""
    asked = tyro.cli(ExportConfig, args=argv, prog="whet export")
    where, output = "whet export", Path(asked.output)
    check_place(output, asked.overwrite, where)
    model, adapter = with_adapters(asked.model, asked.adapter, where)
    opened = find_model(model, where)
    source = open_pretrained(opened)
    if adapter and (record := read_binding(adapter, source, False, where)) is not None:
        source = pack_recorded(source, record, where, adapter).source()  # the numbers that they were trained beside
    template = read_template(asked.chat_template, where) if asked.chat_template else None
    with told_of(output.name) as progress:
        found = export_gguf(
            opened,
            output,
            asked.quantize,
            source=source,
            adapters=read_adapters(adapter, source, where) if adapter else (),
            tokenizer=asked.tokenizer or None,
            pre=asked.pre or None,
            chat_template=template,
            overwrite=asked.overwrite,
            progress=progress,
        )
    counts = ", ".join(f"{TABLE[format].gguf_name} {n}" for format, n in found.formats.items())
    print(f"{output}: {in_bytes(found.size_bytes)}; tensors: {counts}")
    return 0


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
