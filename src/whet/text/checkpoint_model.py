"""Paths of models and adapters, also for runs and checkpoints of ``whet train``."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path

from whet.errors import CheckpointError, WhetValueError
from whet.files import disk_full_errors
from whet.models.adapter_files import base_name, is_adapter_folder
from whet.models.hub import find_on_hub, is_hub_name


def resolve_model(model: str, where: str) -> str:
    """Return the path of a model; for a checkpoint, a temporary folder that lasts as long as the process.

    Args:
        model: a run, a checkpoint, a model, or a name on the hub (``whet.models.hub``); a path that is not a run or
            checkpoint is returned unchanged.
        where: prefix of errors.

    Raises:
        WhetValueError: the run has not ended; the message names its newest checkpoint.
        CheckpointError: the checkpoint is damaged, or does not contain a whole model.
        DiskFullError: the folder of temporary files is full.
    """
    path = Path(model)
    if (path / "config.toml").is_file() and not (path / "config.json").is_file():
        if (path / "model").is_dir():
            return str(path / "model")
        raise WhetValueError(f"{where}: {model!r} is a run that has not ended. {_suggest_checkpoint(path)}")
    if (path / "manifest.json").is_file() and (path / "state.json").is_file():
        return _unpack(path, where)
    return find_on_hub(model, where, _print_to_stderr)


def resolve_adapter(model: str, adapter: str, where: str) -> tuple[str, str]:
    """Return the paths of a model and its adapters; for a folder of adapters, their base model and the folder.

    Args:
        model: a model, adapters, or a run or checkpoint of ``whet train``.
        adapter: adapters for the model; empty: none.

    Raises:
        WhetValueError: both contain adapters, or the base model does not exist.
    """
    model, adapter = resolve_model(model, where), adapter and resolve_model(adapter, where)
    if not is_adapter_folder(model):
        return model, adapter
    base = find_on_hub(base_name(model, where), where, _print_to_stderr)
    if adapter:
        raise WhetValueError(f"{where}: {model!r} contains adapters of {base!r}. Pass {base} with --adapter {adapter}.")
    if not Path(base).exists():
        raise WhetValueError(
            f"{where}: {model!r} contains adapters of {base!r}, which does not exist. Pass the model that they were "
            f"trained on, and --adapter {model}."
        )
    return base, model


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _suggest_checkpoint(run: Path) -> str:
    from whet.checkpoint.folder import latest_checkpoint  # imported lazily: most models are not runs

    newest = latest_checkpoint(run / "checkpoints")
    if newest is None:
        return "It has no checkpoint; finish it with the same whet train command."
    return f"Pass its newest checkpoint, {newest}, or finish it with the same whet train command."


def _unpack(checkpoint: Path, where: str) -> str:
    from whet.checkpoint.unpack import unpack_model

    folder = Path(tempfile.mkdtemp(prefix="whet-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    size_bytes = sum(file.stat().st_size for file in checkpoint.glob("model.safetensors"))
    try:
        with disk_full_errors(folder / "model", size_bytes):
            unpack_model(checkpoint, folder)
            _add_tokenizer(checkpoint, folder, where)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    return str(folder)


def _add_tokenizer(checkpoint: Path, folder: Path, where: str) -> None:
    """Save the tokenizer of the model that the run began with, if config.toml and the model exist."""
    from whet.config.toml import read_toml
    from whet.text.model import find_model, load_chat_tokenizer

    settings = checkpoint.resolve().parent.parent / "config.toml"
    model = read_toml(settings).get("model") if settings.is_file() else None
    if isinstance(model, str) and (Path(model).exists() or is_hub_name(model)):
        load_chat_tokenizer(find_model(resolve_model(model, where), where), where).save_pretrained(folder)
