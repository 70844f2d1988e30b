"""The inputs of a run: sizes and digests, saved in its folder, by which a resumed run detects changes.

A task or function of a module is identified by the module's file and the version of its package.

Resuming fails if the data, the tasks, or the parts of the base model that checkpoints lack have changed. Changes of
held-out rows, rewards and judges are allowed and printed, as are changes of the data after a row that could not be
used, if the rows trained on so far are unchanged.
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

from whet.data.rows import epoch_order
from whet.data.sources import source_files
from whet.errors import RowError, WhetValueError
from whet.files import fingerprint, replace_text
from whet.models.sources.gguf_container import read_gguf

_CODE = ("task", "env", "agent", "tools", "reward", "preference", "feedback")
_CHANGEABLE = ("eval_data", "reward", "preference", "feedback")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")

Inputs = dict[str, dict[str, dict[str, Any]]]
"""Setting -> path of a file -> its fingerprint, or name of a package -> its version."""


def read_inputs(run: Any) -> Inputs:
    """Return the fingerprints of the files that a run's settings name. Hub names have none."""
    inputs = {setting: {str(path): fingerprint(path) for path in paths} for setting, paths in _list_files(run)}
    for setting in _CODE:
        inputs[setting] = _read_versions(_code_locations(run, setting)) | inputs[setting]
    return {setting: entries for setting, entries in inputs.items() if entries}


def _list_files(run: Any) -> Iterator[tuple[str, list[Path]]]:
    for setting in ("data", "eval_data"):
        yield setting, [file for source in getattr(run, setting) for file in source_files(source)]
    for setting in _CODE:
        given = [Path(spec) for spec in _list_specs(run, setting)]  # folders of reward models, files of judges
        models = [path for spec in given for path in (sorted(spec.glob("*")) if spec.is_dir() else [spec])]
        code = _existing(list(map(_find_file, _code_locations(run, setting))))
        yield setting, [*code, *(path for path in models if path.is_file())]
    yield "chat_template", _existing([run.chat_template])
    if run.adapter:
        yield "adapter", [path for path in sorted(Path(run.adapter).glob("adapter_*")) if path.is_file()]
    if teacher := getattr(run, "teacher", ""):
        folder = Path(teacher)
        yield "teacher", [folder] if folder.is_file() else [path for path in sorted(folder.glob("*")) if path.is_file()]
    model = Path(run.model)
    if model.is_file():
        yield "model", list(read_gguf(model, "whet train").paths)  # checkpoints lack its tokenizer
    else:
        yield "model", [path for path in sorted(model.glob("*")) if path.is_file() and _affects_run(path, run)]


def _code_locations(run: Any, setting: str) -> list[str]:
    """Return the files and modules of the tasks or functions that a setting names."""
    names = [spec.partition(",")[0] for spec in _list_specs(run, setting)]
    locations = [name.rpartition(":")[0] for name in names]
    return [each if each.endswith(".py") else each.partition(":")[0] for each in locations]  # of gem:game:ID, gem


def _list_specs(run: Any, setting: str) -> list[str]:
    specs = getattr(run, setting, "")
    return [specs] if isinstance(specs, str) and specs else list(specs)


def _find_file(location: str) -> str:
    """Return the file of a file name or module; empty if it has none."""
    if location and not location.endswith(".py"):
        with contextlib.suppress(ImportError, ValueError):
            location = getattr(importlib.util.find_spec(location), "origin", None) or ""
    return location


def _read_versions(locations: list[str]) -> dict[str, dict[str, Any]]:
    """Return the versions of the packages of the modules among ``locations``."""
    modules = {location.partition(".")[0] for location in locations if location and not location.endswith(".py")}
    owners = importlib.metadata.packages_distributions() if modules else {}
    names = sorted({name for module in modules for name in owners.get(module, [])})
    return {name: {"version": importlib.metadata.version(name)} for name in names}


def _existing(names: list[str]) -> list[Path]:
    return [Path(name) for name in names if name and Path(name).is_file()]


def _affects_run(path: Path, run: Any) -> bool:
    """Whether a file of the base model affects a resumed run: weights only if checkpoints have only adapters."""
    if path.suffix in _WEIGHTS:
        return run.has_adapters()
    return path.suffix != ".md" and not path.name.startswith(".") and path.name != "adapter_config.json"


def describe_failure(error: RowError, rows: Sequence[Any], seed: int, epoch: int, position: int) -> Inputs:
    """Return the failure of a row for ``write_inputs``: its position, and the digest of the rows before it."""
    progress = {"seed": seed, "epoch": epoch, "position": position}
    row = str(error).partition(": ")[0]
    return {"failed": {"row": {"row": row, "n_rows": len(rows), "sha256": _digest_used(rows, **progress), **progress}}}


def _digest_used(rows: Sequence[Any], *, seed: int, epoch: int, position: int) -> str:
    """Return the digest of the rows that a run has trained on, in order, up to a position in the data."""
    order = epoch_order(len(rows), seed, 0)
    digest = hashlib.sha256()
    for i in order if epoch else order[:position]:
        digest.update(json.dumps(rows[i], sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def _used_rows_match(failed: dict[str, Any], rows: Sequence[Any]) -> bool:
    """Whether the rows that a run has trained on are unchanged."""
    progress = {name: failed[name] for name in ("seed", "epoch", "position")}
    return len(rows) == failed["n_rows"] and _digest_used(rows, **progress) == failed["sha256"]


def check_inputs(file: Path, now: Inputs, rows: Sequence[Any] = ()) -> list[str]:
    """Return descriptions of the allowed changes since ``write_inputs`` wrote ``file``.

    Args:
        file: inputs.json of the run.
        now: the inputs of the resumed run.
        rows: the data of the resumed run.

    Raises:
        WhetValueError: a change is not allowed.
    """
    before: Inputs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    notes = []
    data, data_before = now.get("data", {}).keys(), before.get("data", {}).keys()
    if data_before and data_before != data:  # a pattern or folder has other files
        raise WhetValueError(
            f"{file.parent} contains a run that began with other data files; added or removed: "
            f"{', '.join(sorted(data ^ data_before))}. Restore them, or choose another output_dir."
        )
    failed = before.get("failed", {}).get("row")
    for setting, files in now.items():
        for path, new in files.items():
            old = before.get(setting, {}).get(path, new)
            if old == new:
                continue
            change = f"{path} ({setting}) has changed: {_describe(old)} before, {_describe(new)} now"
            if setting == "data" and failed:
                if not _used_rows_match(failed, rows):
                    raise WhetValueError(
                        f"{change}, and so have rows that the run in {file.parent} has trained on, or their number. "
                        f"Change only unusable rows, such as {failed['row']}, in place, or choose another output_dir."
                    )
                change += f"; {failed['row']} was unusable before"
            elif setting not in _CHANGEABLE:
                raise WhetValueError(f"{file.parent} contains a run with other inputs: {change}. {_suggest_fix(new)}")
            notes.append(change)
    return notes


def _describe(entry: dict[str, Any]) -> str:
    return f"version {entry['version']}" if "version" in entry else f"{entry['size_bytes']:,} bytes"


def _suggest_fix(entry: dict[str, Any]) -> str:
    fix = "Install the old version" if "version" in entry else "Its SHA-256 differs. Restore the old file"
    return f"{fix}, or choose another output_dir."


def write_inputs(file: Path, inputs: Inputs) -> None:
    """Write the inputs of the following steps."""
    replace_text(file, json.dumps(inputs, indent=1) + "\n")
