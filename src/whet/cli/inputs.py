"""The inputs of a run, kept in its folder as sizes and digests, so that a continued run notices a change.

A task or a function of a module is known by the module's file, and by the version of the package that it comes with.

A run is refused if what changed would make it another run: its data, its tasks, or what of its base model is not in its
checkpoints. Changes of held-out rows, rewards and judges, which a run may change on its way, are printed. So are
changes of the data after one of its rows could not be used, if the rows that were trained on before are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from whet.cli.models import ADAPTERS
from whet.data.rows import epoch_order
from whet.data.sources import source_files
from whet.errors import RowError, WhetValueError
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


def describe_failure(error: RowError, rows: Sequence[Any], seed: int, epoch: int, position: int) -> Inputs:
    """The failure of a row, for ``write_inputs``: where it was, and the rows that were trained on before."""
    place = {"seed": seed, "epoch": epoch, "position": position}
    row = str(error).partition(": ")[0]
    return {"failed": {"row": {"row": row, "n_rows": len(rows), "sha256": _digest_used(rows, **place), **place}}}


def _digest_used(rows: Sequence[Any], *, seed: int, epoch: int, position: int) -> str:
    """The digest of the rows that a run has trained on, in their order, up to a place in the data."""
    order = epoch_order(len(rows), seed, 0)
    digest = hashlib.sha256()
    for i in order if epoch else order[:position]:
        digest.update(json.dumps(rows[i], sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def _may_go_on(failed: dict[str, Any], rows: Sequence[Any]) -> bool:
    """Whether rows differ from those of a run only where it has not been."""
    place = {name: failed[name] for name in ("seed", "epoch", "position")}
    return len(rows) == failed["n_rows"] and _digest_used(rows, **place) == failed["sha256"]


def check_inputs(file: Path, now: Inputs, rows: Sequence[Any] = ()) -> list[str]:
    """The changes since ``write_inputs`` wrote ``file`` that are allowed, in words.

    Args:
        file: of the run.
        now: of the run as it is continued.
        rows: its data.

    Raises:
        WhetValueError: something has changed that makes it another run.
    """
    before: Inputs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    notes = []
    data, data_before = now.get("data", {}).keys(), before.get("data", {}).keys()
    if data_before and data_before != data:  # of a pattern or a folder
        raise WhetValueError(
            f"{file.parent} holds a run that began with other files of data: {', '.join(sorted(data ^ data_before))} "
            f"came or went. Restore them, or choose another output_dir."
        )
    failed = before.get("failed", {}).get("row")
    for setting, files in now.items():
        for path, new in files.items():
            old = before.get(setting, {}).get(path, new)
            if old == new:
                continue
            what = f"{path} ({setting}) has changed: {_describe(old)} then, {_describe(new)} now"
            if setting == "data" and failed:
                if not _may_go_on(failed, rows):
                    raise WhetValueError(
                        f"{what}, and so have rows that the run in {file.parent} has been trained on, or their number. "
                        f"Change only rows that could not be used, where they are, such as {failed['row']}, or choose "
                        f"another output_dir."
                    )
                what += f"; {failed['row']} could not be used before"
            elif setting not in _FREE:
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
