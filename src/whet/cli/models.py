"""Loads the model and the tokenizer that a command names, and adds adapters. Safetensors or GGUF, no remote code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from whet.cli import without_collection
from whet.cli.estimate import in_bytes
from whet.errors import MissingExtraError, WhetValueError, check_installed
from whet.models.formats import TABLE
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import read_gguf
from whet.models.sources.gguf_model import load_gguf_model

ADAPTERS = "adapter_config.json"


def load_model(name: str, dtype: str) -> tuple[nn.Module, Any]:
    """The causal model of a folder, .gguf file or hub name, on the GPU if there is one, and its tokenizer.

    Of a folder of LoRA adapters: its base model with the adapters merged in.

    Args:
        name: a folder that ``save_pretrained`` wrote, a .gguf file, or a name on the hub.
        dtype: of the weights, "auto" for that which they are stored in; those of a GGUF file become float32.

    Raises:
        WhetValueError: there is no such model, or it, or its tokenizer, cannot be read.
        MissingExtraError: a folder of adapters, and peft is not installed.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = name
    if Path(name).exists():
        source = str(Path(name).resolve())  # adapters remember where their base is
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.endswith(".gguf"):
        raise WhetValueError(f"load_model: there is no folder or file {name!r}.")
    else:
        print(f"{name!r} is no folder here: asking the Hugging Face hub for it", file=sys.stderr)
    try:
        with without_collection():  # transformers imports the model's module now
            model, tokenizer = _load(source, dtype)
    except MissingExtraError:
        raise
    except Exception as error:  # these libraries raise whatever the damage makes them trip over
        raise WhetValueError(
            f"load_model: {name!r} cannot be loaded: {error} Pass a folder that save_pretrained wrote (model and "
            f"tokenizer, as safetensors), a .gguf file, or, where there is a network, a name on the hub."
        ) from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _load(source: str, dtype: str) -> tuple[Any, Any]:
    adapters = Path(source) / ADAPTERS
    base = source
    if adapters.is_file():
        base = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
    model, tokenizer = _load_gguf(base, dtype) if Path(base).is_file() else (_load_folder(base, dtype), None)
    if tokenizer is None or base != source:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer("")  # settings that make no sense to it fail here, not in the first batch
    if base != source:
        model = _peft().PeftModel.from_pretrained(model, source).merge_and_unload().requires_grad_(True)
    return model, tokenizer


def _load_folder(base: str, dtype: str) -> Any:
    """The model of a folder or hub name, whose every weight is there."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, use_safetensors=True, output_loading_info=True
    )
    model, found = loaded
    if found["missing_keys"]:
        raise ValueError(f"its weights lack {', '.join(sorted(found['missing_keys'])[:3])}.")
    return model


def _load_gguf(path: str, dtype: str) -> tuple[Any, Any]:
    """The dequantised model of a GGUF file, and its tokenizer; says what the weights take."""
    dtype = "float32" if dtype == "auto" else dtype
    file = read_gguf(Path(path), "load_model")
    types = ", ".join(sorted({TABLE[stored.format].gguf_name for stored in file.tensors.values()}))
    size = in_bytes(TABLE[dtype].block_bytes * open_gguf(file).config.n_parameters)
    print(f"{path}: weights in {types} become {dtype}, which takes {size}", file=sys.stderr)
    return load_gguf_model(file, dtype)


def add_lora(model: nn.Module, name: str, rank: int, alpha: int, layers: list[str]) -> nn.Module:
    """The model, frozen, with LoRA adapters (Hu et al. 2021) beside its linear layers.

    Raises:
        WhetValueError: the model, called ``name``, came from a folder of adapters, or has no such layers.
        MissingExtraError: peft is not installed.
    """
    if (Path(name) / ADAPTERS).is_file():
        raise WhetValueError(
            f"add_lora: {name!r} holds adapters, and adapters upon adapters cannot be saved. Pass lora_rank=0 to "
            f"train the model with these merged in."
        )
    peft = _peft()
    settings = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=layers or "all-linear", task_type="CAUSAL_LM")
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise WhetValueError(f"add_lora: lora_layers is {layers!r}: {error}") from error


def describe_size(model: nn.Module) -> str:
    """Number of parameters, of trained ones, their dtype and device, in words."""
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    size = f"{total:,} parameters" + (f" ({trained:,} of them trained)" if trained < total else "")
    return f"{size} in {str(parameters[0].dtype).removeprefix('torch.')} on {parameters[0].device}"


def _peft() -> Any:
    check_installed("LoRA", "peft", extra="peft")
    import peft

    return peft
