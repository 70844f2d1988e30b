"""Export of the model in a trainer's checkpoint to a folder for ``from_pretrained`` of Hugging Face or PEFT."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.checkpoint.folder import load_checkpoint
from whet.errors import CheckpointError, check_installed
from whet.files import replace_text
from whet.models.base_record import write_record
from whet.models.written_folder import complete_folder


def adapter_settings(model: Any) -> dict[str, Any] | None:
    """Return the PEFT settings of a model's only adapter, as in adapter_config.json; None: no adapter, or several."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or len(configs) != 1:
        return None
    [(name, config)] = configs.items()
    return {"name": name, "config": json.loads(json.dumps(config.to_dict(), default=_plain)) | {"inference_mode": True}}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def unpack_model(checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the model of a checkpoint, the whole model or its adapters, to an existing folder.

    Adapters get the record of the packed base that they were trained on, as by ``Trainer.save_pretrained``.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds part of a model without PEFT adapters.
        OSError: the folder is not writable.
    """
    folder, has_torch = Path(folder), importlib.util.find_spec("torch") is not None
    tensors, state = load_checkpoint(checkpoint, ["model"], as_arrays=not has_torch)
    settings = state.get("adapter")
    if state.get("whole_model"):
        check_installed("the whole model of a checkpoint", "torch", "transformers")
        from whet.checkpoint.modules import build_module, load_module_tensors

        model: Any = build_module(state["model"])
        load_module_tensors(model, tensors["model"])
        if not hasattr(model, "save_pretrained"):
            raise CheckpointError(f"{checkpoint} holds a {type(model).__name__}, which is not a Hugging Face model.")
        model.save_pretrained(folder)
        complete_folder(folder)
    elif settings is None:
        raise CheckpointError(
            f"{checkpoint} holds part of its model, without settings of adapters. Load it with from_checkpoint "
            f"and model=, constructed as before training, and call save_pretrained."
        )
    else:
        library = importlib.import_module("safetensors.torch" if has_torch else "safetensors.numpy")
        library.save_file(_peft_names(tensors["model"], settings["name"]), folder / "adapter_model.safetensors")
        replace_text(folder / "adapter_config.json", json.dumps(settings["config"], indent=2, sort_keys=True) + "\n")
        if state.get("base") is not None:
            write_record(folder, state["base"])
        complete_folder(folder)


def _peft_names(tensors: Mapping[str, Any], adapter: str) -> dict[str, Any]:
    """Rename tensors as in PEFT's files, without the name of the adapter."""
    own_name = re.compile(rf"\.(modules_to_save\.)?{re.escape(adapter)}(?=\.|$)")
    return {own_name.sub("", name, count=1): tensor for name, tensor in tensors.items()}
