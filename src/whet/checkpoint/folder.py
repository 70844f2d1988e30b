"""Checkpoints: folders of safetensors and JSON, written and loaded atomically.

A checkpoint is a folder with one safetensors file per group of tensors, ``state.json``, and ``manifest.json``
with the size and SHA-256 of each. It is written to a temporary folder next to its final path, synced to disk, and
renamed, so that a process killed at any moment leaves a checkpoint that loads. Nothing is pickled, so an untrusted
checkpoint cannot run code.

Independent of what a trainer saves, and when. ``whet.checkpoint.modules`` rebuilds modules. Torch is imported only for
tensors and generators of torch.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from whet.checkpoint.jsonable import decode, encode
from whet.checkpoint.tensors import StoredTensor, lay_out, read_tensors, same_memory_key, store_tensor
from whet.errors import CheckpointError, WhetValueError
from whet.files import (
    disk_full_errors,
    fingerprint,
    previous_of,
    remove_abandoned,
    replace_folder,
    require_address_space,
    temporary_next_to,
    write_new,
)
from whet.signals import deferred_signals
from whet.system.files import replace

_SAVING = "saving"
_THREAD_BYTES = 16 << 20
"""Address space of a writing thread: its stack of 8 MiB, the block of ``write_new``, and allocations."""

FORMAT = "whet-checkpoint"
FORMAT_VERSION = 1

_GROUP = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_FILE_NAME = re.compile(rf"{_GROUP}\.safetensors|state\.json")
_STEP_NAME = re.compile(r"(?P<hidden>\.)?(?P<name>step-(?P<step>\d{6,}))(?(hidden)\.previous)")


def save_checkpoint(
    path: str | os.PathLike[str], tensors: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any]
) -> None:
    """Write a checkpoint at ``path``, replacing an existing one.

    At every moment either the old checkpoint or the new one loads from ``path``, despite a kill, a full disk or a power
    failure: the new one is written to ``.NAME.TOKEN.saving``, a folder of this save only, and synced to disk, the old
    one is renamed to ``.NAME.previous`` (where ``load_checkpoint`` finds it), the new one is renamed to NAME, and the
    old one is removed.

    Args:
        path: the checkpoint's folder; its parents are created. If several processes save to it at once, the last to
            finish wins.
        tensors: groups of named tensors, of torch on any device or of NumPy; each group becomes ``GROUP.safetensors``.
            A tensor with several names, in any groups, is stored once and stays shared when loaded. Other overlapping
            views are stored as separate tensors.
        state: plain values that ``whet.checkpoint.jsonable.encode`` accepts, NaN and infinities included.

    Raises:
        CheckpointError: ``path`` exists and is not a checkpoint; it is not changed.
        WhetTypeError, WhetValueError: a tensor, value or group name cannot be stored.
        DiskFullError: the disk is full; ``path`` is not changed.
        OSError: the disk cannot be written; ``path`` is not changed.
    """
    path = Path(os.path.realpath(path))
    _check_replaceable(path)
    stored, aliases = _deduplicate(tensors)
    state_text = json.dumps(encode(dict(state), "save_checkpoint: state"), allow_nan=False)
    size_bytes = sum(tensor.data.nbytes for members in stored.values() for tensor in members.values()) + len(state_text)

    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        disk_full_errors(path, size_bytes, "continue from the newest checkpoint"),
        temporary_next_to(path, _SAVING, folder=True) as temporary,
    ):
        files = _write_tensors(temporary, stored)
        files["state.json"] = _write_text(temporary / "state.json", state_text)
        manifest = {"format": FORMAT, "version": FORMAT_VERSION, "files": files, "aliases": aliases}
        manifest["sha256"] = _digest(manifest)
        _write_text(temporary / "manifest.json", _dump(manifest))
        replace_folder(temporary, path)


def load_checkpoint(
    path: str | os.PathLike[str], groups: Collection[str] | None = None, *, as_arrays: bool = False
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the (tensors, state) that ``save_checkpoint`` was given, with tensors of torch on the CPU.

    Every size and hash is verified first. Hashes detect damage, not malice: an attacker can write a checkpoint that
    verifies, but none that runs code.

    Args:
        path: the checkpoint's folder.
        groups: tensor groups to load, with the groups that they share tensors with. None: all.
        as_arrays: return NumPy arrays, without importing torch.

    Raises:
        CheckpointError: there is no checkpoint at ``path``, or a file of it is missing, truncated, altered, unexpected
            or of an unknown format. The message names the file.
    """
    folder = _resolve(Path(path))
    manifest = _verified_manifest(folder)
    tensors: dict[str, dict[str, Any]] = {}
    if groups is not None:
        shared = {source for group in groups for source, _ in manifest["aliases"].get(group, {}).values()}
        groups = {*groups, *shared}
    for name in manifest["files"]:
        if name.endswith(".safetensors") and (groups is None or name.removesuffix(".safetensors") in groups):
            tensors[name.removesuffix(".safetensors")] = read_tensors(folder / name, as_arrays)
    try:
        for group, members in manifest["aliases"].items():
            for name, (source_group, source) in members.items() if groups is None or group in groups else ():
                tensors[group][name] = tensors[source_group][source]
        state = decode(json.loads((folder / "state.json").read_text(encoding="utf-8")))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"load_checkpoint: {folder} is malformed: {error!r}.") from error
    return tensors, state


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the intact checkpoint of the highest step in ``folder``, or None.

    Only folders named as by ``step_folder`` are considered. A folder that does not verify is skipped, with a warning
    that gives the reason.
    """
    folder = Path(folder)
    for path in reversed(_step_paths(folder)):
        try:
            _verified_manifest(_resolve(path))
            return path
        except CheckpointError as error:
            warnings.warn(f"latest_checkpoint: {path.name} is skipped: {error}", stacklevel=2)
    return None


def step_folder(folder: str | os.PathLike[str], step: int) -> Path:
    """Return the path of a step's checkpoint: ``folder/step-000100``."""
    return Path(folder) / f"step-{step:06d}"


def prune_checkpoints(folder: str | os.PathLike[str], newest: Path, keep: int) -> None:
    """Remove checkpoints of steps before ``newest``, so that ``keep`` of them remain, including ``newest``.

    Also removes the remains of killed saves and prunes. Checkpoints of later steps, folders that are not checkpoints,
    and folders that another process is writing are not touched.
    """
    folder = Path(folder)
    older = [p for p in _step_paths(folder) if _step_of(p) < _step_of(newest) and _is_checkpoint(p)]
    for path in older[: max(0, len(older) - (keep - 1))]:
        with temporary_next_to(path, _SAVING, folder=True) as removed:
            replace(path, removed)  # so that no half-removed checkpoint is ever visible
    remove_abandoned(folder, f".step-*.{_SAVING}")
    for previous in folder.glob(".step-*.previous"):
        if (folder / previous.name[1:].removesuffix(".previous")).exists():
            shutil.rmtree(previous, ignore_errors=True)


# --- the folder -----------------------------------------------------------------------------------------


def _resolve(path: Path) -> Path:
    """Return the checkpoint's folder: ``path``, or the previous one, which a killed save had renamed."""
    path = Path(os.path.realpath(path))
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(
            f"load_checkpoint: {path} is a file, expected a folder that Whet saved. Pickles (.pt and .bin "
            f"of torch.save) are rejected, since loading one can run code: save the model again with Whet."
        )
    previous = previous_of(path)
    if previous.is_dir():
        return previous
    raise CheckpointError(f"load_checkpoint: there is no checkpoint at {path}.")


def _step_paths(folder: Path) -> list[Path]:
    """Return ``folder/step-N`` in ascending order of N, including checkpoints that a killed save left renamed."""
    if not folder.is_dir():
        return []
    names = [match["name"] for entry in folder.iterdir() if (match := _STEP_NAME.fullmatch(entry.name))]
    return sorted((folder / name for name in set(names)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _is_checkpoint(path: Path) -> bool:
    try:
        return json.loads((path / "manifest.json").read_bytes())["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_replaceable(path: Path) -> None:
    """Reject a ``path`` that is neither a checkpoint nor an empty folder."""
    if not path.exists():
        return
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name}
    foreign = sorted(name for name in names if name != "manifest.json" and not _FILE_NAME.fullmatch(name))
    if not names or (_is_checkpoint(path) and not foreign):
        return
    what = f"also holds {foreign[0]}" if _is_checkpoint(path) else "is not a Whet checkpoint"
    raise CheckpointError(
        f"save_checkpoint: {path} {what}; replacing it would delete that. Move it, or save elsewhere."
    )


def _verified_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder after verifying that every file is present, intact and listed."""
    manifest = _read_manifest(folder)
    present = {entry.name for entry in folder.iterdir()} - {"manifest.json"}
    for name in sorted(present.symmetric_difference(manifest["files"])):
        fault = "is not part of the checkpoint: remove it" if name in present else "is missing"
        raise CheckpointError(f"load_checkpoint: {folder / name} {fault}.")
    for name, expected in manifest["files"].items():
        found = fingerprint(folder / name)
        if found["size_bytes"] != expected["size_bytes"]:
            raise CheckpointError(
                f"load_checkpoint: {folder / name} has {found['size_bytes']} bytes, expected "
                f"{expected['size_bytes']}: it is truncated, or not the file that was saved."
            )
        if found != expected:
            raise CheckpointError(f"load_checkpoint: {folder / name} was altered: its SHA-256 does not match.")
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / "manifest.json"
    try:
        text = file.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except FileNotFoundError:
        hint = ". Pass one of the checkpoints in this folder" if _step_paths(folder) else ""
        raise CheckpointError(f"load_checkpoint: {file} is missing{hint}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"load_checkpoint: {file} is not JSON: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"load_checkpoint: {file} is not the manifest of a Whet checkpoint.")
    if manifest.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"load_checkpoint: {file} is of format version {manifest.get('version')!r}; this Whet reads "
            f"{FORMAT_VERSION}. Load it with the Whet that saved it."
        )
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    try:
        altered = manifest.get("sha256") != _digest(content) or text != _dump(manifest)
    except ValueError:  # NaN, which no manifest contains
        altered = True
    if altered:
        raise CheckpointError(f"load_checkpoint: {file} was altered: its SHA-256 does not match.")
    files = content.get("files")
    if not isinstance(files, dict) or not isinstance(content.get("aliases"), dict):
        raise CheckpointError(f"load_checkpoint: {file} lists no files.")
    for name, entry in files.items():
        if not _FILE_NAME.fullmatch(name) or not isinstance(entry, dict) or "size_bytes" not in entry:
            raise CheckpointError(
                f"load_checkpoint: {file} names {name!r}, expected only state.json and GROUP.safetensors, "
                f"with their sizes."
            )
    return content


# --- files ----------------------------------------------------------------------------------------------


def _deduplicate(
    tensors: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, dict[str, list[str]]]]:
    """Return the bytes of each tensor once, and ``aliases[group][name]``: where a shared tensor is stored."""
    stored: dict[str, dict[str, StoredTensor]] = {}
    aliases: dict[str, dict[str, list[str]]] = {}
    first: dict[tuple, list[str]] = {}
    for group, members in tensors.items():
        if not re.fullmatch(_GROUP, group):
            raise WhetValueError(
                f"save_checkpoint: the group {group!r} is not a file name. Use letters, digits, '_', '.', '-'."
            )
        stored[group] = {}
        for name, tensor in members.items():
            plain = store_tensor(tensor, f"{group}[{name!r}]")
            key = same_memory_key(tensor)
            if plain.data.size and key in first:
                aliases.setdefault(group, {})[name] = first[key]
                continue
            first[key] = [group, name]
            stored[group][name] = plain
    return stored, aliases


def _write_tensors(folder: Path, groups: Mapping[str, Mapping[str, StoredTensor]]) -> dict[str, dict[str, Any]]:
    """Write one file per group in parallel, and return file name -> fingerprint."""
    layouts = {group: lay_out(members) for group, members in groups.items()}
    require_address_space(_THREAD_BYTES * len(layouts))
    with ThreadPoolExecutor() as pool:  # writing and hashing release the GIL
        files = {
            f"{group}.safetensors": pool.submit(write_new, folder / f"{group}.safetensors", chunks)
            for group, chunks in layouts.items()
        }
        return {name: written.result() for name, written in sorted(files.items())}


def _write_text(file: Path, text: str) -> dict[str, Any]:
    return write_new(file, [text.encode()])


def _dump(content: Any) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _digest(content: Any) -> str:
    return hashlib.sha256(_dump(content).encode()).hexdigest()


# --- random state ---------------------------------------------------------------------------------------


def capture_rng() -> dict[str, Any]:
    """Return the states of the global generators as JSON types: of Python, NumPy and, if it is imported, torch (CPU and
    each CUDA device).

    Generators created explicitly (``np.random.default_rng``) are not included.
    """
    version, internal, gauss = random.getstate()
    state = {
        "python": [version, _pack(np.array(internal, np.uint32)), gauss],
        "numpy": _pack_arrays(np.random.get_state(legacy=False)),  # noqa: NPY002
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        state |= {"torch": _pack(torch.get_rng_state().numpy()), "cuda": [_pack(each.numpy()) for each in cuda]}
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set every generator to the state that ``capture_rng`` saved. Missing devices are ignored, and so is torch's state
    if torch is not imported: nothing has drawn from it.

    Raises:
        CheckpointError: ``state`` is not a result of ``capture_rng``.
    """
    try:
        version, internal, gauss = state["python"]
        python_state = (version, tuple(_unpack(internal).tolist()), gauss)
        numpy_state = _unpack_arrays(state["numpy"])
        torch_states = [_unpack(packed) for packed in (state["torch"], *state["cuda"])] if "torch" in state else []
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch_states:
            torch_state, *cuda_states = map(torch.from_numpy, torch_states)
            torch.set_rng_state(torch_state)
            if torch.cuda.is_available():
                for device, device_state in enumerate(cuda_states[: torch.cuda.device_count()]):
                    torch.cuda.set_rng_state(device_state, device)
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"restore_rng: the random state cannot be restored: {error!r}.") from error


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the generators' states on exit, including exit by an exception or Ctrl-C."""
    state = capture_rng()
    try:
        yield
    finally:
        with deferred_signals():
            restore_rng(state)


def _pack(array: np.ndarray) -> dict[str, str]:
    return {"dtype": array.dtype.name, "base64": base64.b64encode(array.tobytes()).decode()}


def _unpack(packed: Mapping[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["base64"]), packed["dtype"]).copy()


def _pack_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pack_arrays(item) for key, item in value.items()}
    return _pack(value) if isinstance(value, np.ndarray) else value


def _unpack_arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "base64"}:
        return _unpack(value)
    return {key: _unpack_arrays(item) for key, item in value.items()}
