"""The model in a trainer's checkpoint as a folder that Hugging Face's ``from_pretrained``, or PEFT's, reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from whet.checkpoint.folder import load_checkpoint
from whet.checkpoint.modules import build_module, load_module_tensors
from whet.errors import CheckpointError
from whet.files import replace_text
from whet.models.base_record import write_record
from whet.models.written_folder import complete_folder


def adapter_settings(model: nn.Module) -> dict[str, Any] | None:
    """PEFT's settings of a model's one adapter, as its adapter_config.json has them; None: it has none, or several."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or len(configs) != 1:
        return None
    [(name, config)] = configs.items()
    return {"name": name, "config": json.loads(json.dumps(config.to_dict(), default=_plain)) | {"inference_mode": True}}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def unpack_model(checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the model of a checkpoint into a folder that is there: the whole model, or its adapters.

    Adapters get the record of the packed base that they were trained on, as ``Trainer.save_pretrained`` leaves it.

    Raises:
        CheckpointError: a damaged checkpoint, or one that holds a part of a model that is no adapter of PEFT's.
        OSError: nothing can be written.
    """
    folder = Path(folder)
    tensors, state = load_checkpoint(checkpoint, ["model"])
    settings = state.get("adapter")
    if state.get("whole_model"):
        model: Any = build_module(state["model"])
        load_module_tensors(model, tensors["model"])
        if not hasattr(model, "save_pretrained"):
            raise CheckpointError(f"{checkpoint} holds a {type(model).__name__}, which is no Hugging Face model.")
        model.save_pretrained(folder)
        complete_folder(folder)
    elif settings is None:
        raise CheckpointError(
            f"{checkpoint} holds a part of its model, and not the settings of adapters. Load it with from_checkpoint "
            f"and model=, made as it was before training, and call save_pretrained."
        )
    else:
        save_file(_named_as_saved(tensors["model"], settings["name"]), folder / "adapter_model.safetensors")
        replace_text(folder / "adapter_config.json", json.dumps(settings["config"], indent=2, sort_keys=True) + "\n")
        if state.get("base") is not None:
            write_record(folder, state["base"])
        complete_folder(folder)


def _named_as_saved(tensors: Mapping[str, Tensor], adapter: str) -> dict[str, Tensor]:
    """Tensors under the names of PEFT's files, which leave that of the adapter out."""
    own_name = re.compile(rf"\.(modules_to_save\.)?{re.escape(adapter)}(?=\.|$)")
    return {own_name.sub("", name, count=1): tensor for name, tensor in tensors.items()}
