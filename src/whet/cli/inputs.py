"""The inputs of a run, kept in its folder as sizes and digests, so that a continued run notices a change.

A task or a function of a module is known by the module's file, and by the version of the package that it comes with.

A run is refused if what changed would make it another run: its data, its tasks, or what of its base model is not in its
checkpoints. Of held-out rows, rewards and judges, which a run may change on its way, it is only said.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.cli.models import ADAPTERS
from whet.data.sources import source_files
from whet.errors import WhetValueError
from whet.files import fingerprint, replace_text
from whet.models.sources.gguf_container import read_gguf

_CODE = ("task", "reward", "preference")
_FREE = ("eval_data", "reward", "preference")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")

Inputs = dict[str, dict[str, dict[str, Any]]]
"""Per setting the files that it names, by their paths: their fingerprints; and packages, by name: their versions."""


def read_inputs(run: Any) -> Inputs:
    """The fingerprints of what a run's settings name. What is on the hub has none."""
    found = {setting: {str(path): fingerprint(path) for path in paths} for setting, paths in _files(run)}
    for setting in _CODE:
        found[setting] = _packages(_places(run, setting)) | found[setting]
    return {setting: inputs for setting, inputs in found.items() if inputs}


def _files(run: Any) -> Iterator[tuple[str, list[Path]]]:
    for setting in ("data", "eval_data"):
        yield setting, [file for source in getattr(run, setting) for file in source_files(source)]
    for setting in _CODE:
        yield setting, _existing(list(map(_source, _places(run, setting))))
    yield "chat_template", _existing([run.chat_template])
    if run.adapter:
        yield "adapter", [path for path in sorted(Path(run.adapter).glob("adapter_*")) if path.is_file()]
    model = Path(run.model)
    if model.is_file():
        yield "model", list(read_gguf(model, "whet train").paths)  # its tokenizer is in no checkpoint
    else:
        yield "model", [path for path in sorted(model.glob("*")) if path.is_file() and _matters(path, run)]


def _places(run: Any, setting: str) -> list[str]:
    """The files and modules of the tasks or functions that a setting names."""
    specs = getattr(run, setting, "")
    names = [spec.partition(",")[0] for spec in ([specs] if isinstance(specs, str) else specs)]
    return [name.rpartition(":")[0] for name in names]


def _source(place: str) -> str:
    """The file of a place, if it has one."""
    if place and not place.endswith(".py"):
        with contextlib.suppress(ImportError, ValueError):
            place = getattr(importlib.util.find_spec(place), "origin", None) or ""
    return place


def _packages(places: list[str]) -> dict[str, dict[str, Any]]:
    """The versions of the packages that modules among ``places`` are installed with."""
    modules = {place.partition(".")[0] for place in places if place and not place.endswith(".py")}
    owners = importlib.metadata.packages_distributions() if modules else {}
    names = sorted({name for module in modules for name in owners.get(module, [])})
    return {name: {"version": importlib.metadata.version(name)} for name in names}


def _existing(names: list[str]) -> list[Path]:
    return [Path(name) for name in names if name and Path(name).is_file()]


def _matters(path: Path, run: Any) -> bool:
    """Whether a file of the base model is part of the run: weights are where its checkpoints hold only adapters."""
    if path.suffix in _WEIGHTS:
        return run.has_adapters()
    return path.suffix != ".md" and not path.name.startswith(".") and path.name != ADAPTERS


def check_inputs(file: Path, now: Inputs) -> list[str]:
    """The changes since ``write_inputs`` wrote ``file`` that are allowed, in words.

    Raises:
        WhetValueError: something has changed that makes it another run.
    """
    before: Inputs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    notes = []
    rows, rows_before = now.get("data", {}).keys(), before.get("data", {}).keys()
    if rows_before and rows_before != rows:  # of a pattern or a folder
        raise WhetValueError(
            f"{file.parent} holds a run that began with other files of data: {', '.join(sorted(rows ^ rows_before))} "
            f"came or went. Restore them, or choose another output_dir."
        )
    for setting, files in now.items():
        for path, new in files.items():
            old = before.get(setting, {}).get(path, new)
            if old == new:
                continue
            what = f"{path} ({setting}) has changed: {_describe(old)} then, {_describe(new)} now"
            if setting not in _FREE:
                raise WhetValueError(f"{file.parent} holds a run that began with something else: {what}. {_fix(new)}")
            notes.append(what)
    return notes


def _describe(found: dict[str, Any]) -> str:
    return f"version {found['version']}" if "version" in found else f"{found['size_bytes']:,} bytes"


def _fix(found: dict[str, Any]) -> str:
    what = "Install the old version" if "version" in found else "Its SHA-256 is another one. Put the old file back"
    return f"{what}, or choose another output_dir."


def write_inputs(file: Path, inputs: Inputs) -> None:
    """Remember the inputs of the steps that follow."""
    replace_text(file, json.dumps(inputs, indent=1) + "\n")
