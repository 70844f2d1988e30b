"""The model in a checkpoint of ``whet train``, or in its run, as the commands take a model: a folder with a config."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from whet.errors import CheckpointError, WhetValueError
from whet.files import disk_full_errors


def resolve_model(model: str, where: str) -> str:
    """The folder or file of a model: of a run the model in it, of a checkpoint a folder for the time of the process.

    Args:
        model: what was asked for; a name that is no folder is returned as it is.
        where: begins the errors.

    Raises:
        WhetValueError: a run that has not ended; its newest checkpoint is named.
        CheckpointError: a damaged checkpoint, or one of which a model alone cannot be made.
        DiskFullError: there is no room for it in the folder of temporary files.
    """
    path = Path(model)
    if (path / "config.toml").is_file() and not (path / "config.json").is_file():
        if (path / "model").is_dir():
            return str(path / "model")
        raise WhetValueError(f"{where}: {model!r} is a run that has not ended. {_what_it_has(path)}")
    if (path / "manifest.json").is_file() and (path / "state.json").is_file():
        return _unpacked(path, where)
    return model


def _what_it_has(run: Path) -> str:
    from whet.checkpoint.folder import latest_checkpoint  # of which nothing is needed where a model is named

    newest = latest_checkpoint(run / "checkpoints")
    if newest is None:
        return "It has no checkpoint either: the same whet train goes on with it."
    return f"Name its newest checkpoint, {newest}, or go on with the same whet train."


def _unpacked(checkpoint: Path, where: str) -> str:
    from whet.training.unpack import unpack_model

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
    """That of the model which the run began with, where both are there."""
    from whet.cli.models import load_transformers_tokenizer
    from whet.cli.settings import read_toml

    settings = checkpoint.resolve().parent.parent / "config.toml"
    model = read_toml(settings).get("model") if settings.is_file() else None
    if isinstance(model, str) and Path(model).exists():
        load_transformers_tokenizer(resolve_model(model, where)).save_pretrained(folder)
