"""Loads models and tokenizers for training, and adds adapters. Safetensors or GGUF, no remote code."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from whet.errors import CheckpointError, MissingExtraError, WhetValueError, check_installed
from whet.memory import format_bytes, without_gc
from whet.models.adapter_files import (
    EXPERT_PARAMETERS,
    REWARD_USE,
    SCORE,
    base_name,
    has_reward_head,
    is_adapter_folder,
)
from whet.models.base_record import check_record, pack_recorded, read_record
from whet.models.families import FAMILIES, SKIPPED, family_of, text_options
from whet.models.formats import TABLE
from whet.models.hub import find_on_hub
from whet.models.lora import ALL_LINEAR, EXPERTS, LoraSettings, choose_adapted
from whet.models.pissa import principal_factors
from whet.models.sizes import source_of_config
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import read_gguf
from whet.models.sources.gguf_model import load_gguf_model
from whet.models.sources.live import check_frequencies
from whet.models.sources.pretrained import open_pretrained
from whet.models.tokenizers import read_tokenizer
from whet.nn.forwards import is_experts, is_lora
from whet.nn.frozen import base_of, expert_parameters, frozen_model
from whet.nn.modules import auto_class, towers
from whet.runs.resume import Notify
from whet.runs.settings import RunConfig
from whet.text.model import choose_template, load_transformers_tokenizer


def load_model(
    name: str,
    dtype: str,
    base: str = "none",
    chat_template: str = "",
    notify: Notify = lambda text: None,
    adapter: str = "",
) -> tuple[nn.Module, Any]:
    """Load the causal model of a folder, .gguf file or hub name, onto the GPU if there is one, and its tokenizer.

    For a folder of LoRA adapters, return its base model with the adapters merged, or with the adapters applied to the
    quantised base that they were trained on.

    Args:
        name: a folder that ``save_pretrained`` wrote, a .gguf file, or a name on the hub.
        dtype: dtype of the weights; "auto": as stored, or float32 for a GGUF file.
        base: format of weights packed on the CPU, instead of dtype; "own": the file's format; "none": float weights.
        chat_template: see ``choose_template``.
        notify: called with a line of text on a name on the hub, and on the size of dequantised weights.
        adapter: a folder of adapters that the caller adds, see ``choose_template``.

    Raises:
        WhetValueError: the model does not exist, or it, its tokenizer or the template cannot be read.
        MissingExtraError: the folder contains adapters, and peft is not installed.
    """
    template = choose_template(chat_template, adapter, "load_model")
    if ":" in name:  # a .gguf file on the hub, which transformers does not find
        name = find_on_hub(name, "load_model", notify)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # PEFT reads it from every model.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    source = name
    if Path(name).exists():
        source = str(Path(name).resolve())  # saved adapters record the path of their base
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1 or name.endswith(".gguf"):
        raise WhetValueError(f"load_model: {name!r} is not a folder or file.")
    else:
        notify(f"{name!r} is not a local folder; trying the Hugging Face hub")
    try:
        with without_gc():  # transformers imports the model's module now
            model, tokenizer = _load(source, dtype, base, notify)
    except (MissingExtraError, CheckpointError):
        raise
    except Exception as error:  # on damaged files these libraries raise any type
        raise WhetValueError(
            f"load_model: {name!r} cannot be loaded: {error} Pass a folder that save_pretrained wrote (model and "
            f"tokenizer, as safetensors), a .gguf file, or, with network access, a name on the hub."
        ) from error
    if base_of(model) is None and torch.cuda.is_available():
        model = model.to("cuda")
    if template is not None:
        tokenizer.chat_template = template
    return model, tokenizer


def _load(source: str, dtype: str, base: str, notify: Notify) -> tuple[Any, Any]:
    if not is_adapter_folder(source):
        model, tokenizer = _load_base(source, dtype, base, notify)
        tokenizer("")  # fail on invalid settings here, not in the first batch
        return model, tokenizer
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer("")
    path, record = base_name(source, "load_model"), read_record(source, "load_model")
    if record is None or not record["is_quantised"]:
        model = merge_adapters(_load_base(path, dtype, "none", notify)[0], source)
        return _freeze_towers(model.requires_grad_(True)), tokenizer
    packed = pack_recorded(open_pretrained(path), record, "load_model", source)
    return import_peft().PeftModel.from_pretrained(frozen_model(path, packed), source), tokenizer


def _load_base(source: str, dtype: str, base: str, notify: Notify) -> tuple[Any, Any]:
    if not Path(source).is_file():
        model = _load_folder(source, dtype) if base == "none" else frozen_model(source, base)
        return model, load_transformers_tokenizer(source)
    if base == "none":
        return _load_gguf(source, dtype, notify)
    file = read_gguf(Path(source), "load_model")
    return frozen_model(file, None if base == "own" else base), read_tokenizer(file).to_transformers()


def as_reward_model(model: Any, tokenizer: Any, where: str) -> nn.Module:
    """Return the decoder of a causal model as a sequence classifier with one label, whose head is 0.

    The classifier takes the decoder, and sets options of its config. A sequence classifier is returned unchanged.

    Raises:
        WhetValueError: transformers has no sequence classifier of this family.
    """
    if hasattr(model, SCORE):
        return model
    config = model.config
    config.num_labels = 1
    # transformers scores the last token that is not padding: no row may end with the padding token.
    names = ("pad_token_id", "unk_token_id", "bos_token_id")
    unfit = (None, getattr(tokenizer, "eos_token_id", None))
    pad_ids = (token for name in names if (token := getattr(tokenizer, name, None)) not in unfit)
    config.get_text_config().pad_token_id = next(pad_ids, None)
    try:
        with torch.device("meta"):
            made = transformers.AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise WhetValueError(
            f"{where}: transformers has no sequence classifier of {type(model).__name__}, which a reward model is. "
            f"Choose a model of another family."
        ) from error
    decoder = model.base_model
    setattr(made, made.base_model_prefix, decoder)
    first = next(decoder.parameters())
    made.score = nn.Linear(made.score.in_features, 1, bias=False, device=first.device, dtype=first.dtype)
    nn.init.zeros_(made.score.weight)
    return made


def _load_folder(base: str, dtype: str) -> Any:
    """Load the model of a folder or hub name; raise if weights are missing."""
    config = transformers.AutoConfig.from_pretrained(base)
    is_classifier = any("ForSequenceClassification" in name for name in config.architectures or ())
    kind = transformers.AutoModelForSequenceClassification if is_classifier else auto_class(config)
    model, info = kind.from_pretrained(base, dtype=dtype, use_safetensors=True, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"its weights lack {', '.join(sorted(info['missing_keys'])[:3])}.")
    check_frequencies(model, "load_model")
    return _freeze_towers(model)


def _freeze_towers(model: Any) -> Any:
    """Freeze a vision-language model except for its language model."""
    for tower in towers(model).values():
        tower.requires_grad_(False)
    return model


def _load_gguf(path: str, dtype: str, notify: Notify) -> tuple[Any, Any]:
    """Load the dequantised model of a GGUF file, and its tokenizer; notify of the size of the weights."""
    dtype = "float32" if dtype == "auto" else dtype
    file = read_gguf(Path(path), "load_model")
    types = ", ".join(sorted({TABLE[stored.format].gguf_name for stored in file.tensors.values()}))
    size = format_bytes(TABLE[dtype].block_bytes * open_gguf(file).config.n_parameters)
    notify(f"{path}: dequantised from {types} to {dtype}, {size}")
    return load_gguf_model(file, dtype)


def add_adapters(model: nn.Module, run: RunConfig, record: Mapping[str, Any] | None = None) -> nn.Module:
    """Freeze a model and add the LoRA adapters (Hu et al. 2021) of a run: new ones, or its ``adapter`` folder.

    Args:
        record: the base that the adapters require; None: any.

    Raises:
        WhetValueError: PEFT finds no matching layers.
        CheckpointError: the adapters were trained on another base.
        MissingExtraError: peft is not installed.
    """
    peft, where = import_peft(), "whet train"
    if run.adapter:
        if record is not None:
            check_record(record, base_of(model), where, run.adapter)
        return peft.PeftModel.from_pretrained(model, run.adapter, is_trainable=True)
    layers = run.lora_layers or [ALL_LINEAR]
    of_experts = [name for name in layers if EXPERTS in name.split(".")]
    modules = [name for name in layers if name not in of_experts]
    n_parts = 2 if run.lora_init == "pissa" else 1  # the second part of an adapter does not train
    alpha = math.sqrt(n_parts) if run.use_rslora else n_parts
    settings = peft.LoraConfig(
        r=n_parts * run.lora_rank,
        lora_alpha=alpha * run.lora_alpha,
        lora_dropout=run.lora_dropout,
        use_rslora=run.use_rslora,
        use_dora=run.use_dora,
        rank_pattern={name: n_parts * rank for name, rank in run.rank_pattern.items()},
        alpha_pattern={name: alpha * own for name, own in run.alpha_pattern.items()},
        trainable_token_indices=list(run.trainable_token_indices) or None,
        target_modules=_all_linear(model) if modules == [ALL_LINEAR] else modules,
        target_parameters=[
            f"{name}.{parameter}" if name.endswith(EXPERTS) else name
            for name in of_experts
            for parameter in _expert_parameters(model)
        ]
        or None,
        exclude_modules=SKIPPED if towers(model) else None,
        modules_to_save=run.modules_to_save or None,
        task_type="SEQ_CLS" if hasattr(model, SCORE) else "CAUSAL_LM",  # of which PEFT also trains the head
    )
    try:
        adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise WhetValueError(f"{where}: lora_layers is {run.lora_layers!r}: {error}") from error
    if run.lora_init == "pissa":
        _start_principal(adapted, run, where)
    return adapted


@torch.no_grad()
def _start_principal(model: nn.Module, run: Any, where: str) -> None:
    """Set the adapters of a model to the principal parts of their matrices, see ``whet.models.pissa``."""
    if run.weight_decay:
        raise WhetValueError(
            f"{where}: weight_decay is {run.weight_decay}, and lora_init 'pissa' has parameters that do not train, "
            f"which torch would decay too. Pass --backend native, or weight_decay 0."
        )
    base, rng = base_of(model), np.random.default_rng(run.seed % 2**64)
    layers: Any = filter(is_lora, model.modules())
    for layer in layers:
        [(name, a)], inside = layer.lora_A.items(), layer.base_layer
        a, b = a.weight, layer.lora_B[name].weight
        if base is None:
            matrix = (inside.weight.T if layer.fan_in_fan_out else inside.weight).float().cpu().numpy()
        else:
            matrix = base.rows(inside.name, np.empty((len(b), a.shape[1]), np.float32))
        half = len(a) // 2
        factors = principal_factors(matrix, half, layer.scaling[name], rng)
        first_a, first_b = (torch.from_numpy(np.ascontiguousarray(each)).to(a) for each in factors)
        a.copy_(torch.cat((first_a, first_a)))
        b.copy_(torch.cat((first_b, -first_b), 1))
        keep = torch.arange(2 * half, device=a.device) < half
        a.register_hook(lambda grad, keep=keep: grad * keep[:, None])
        b.register_hook(lambda grad, keep=keep: grad * keep)


def _expert_parameters(model: nn.Module) -> list[str]:
    """Return the names of the matrices of a model's experts."""
    found = {name for module in model.modules() if is_experts(module) for name in expert_parameters(module)}
    return [name for name in EXPERT_PARAMETERS if name in found or not found]


def _all_linear(model: nn.Module) -> str | list[str]:
    """Return every linear layer except the head, and of a mixture, for which PEFT would add the experts, routers."""
    config: Any = model.config
    options, names = config.to_dict(), {name for name, _ in model.named_modules()}
    is_known = text_options(options).get("model_type") in FAMILIES
    if not is_known or "n_experts" not in family_of(options, "whet train").keys:
        return ALL_LINEAR
    source = source_of_config(options)
    return [
        name
        for location, _ in choose_adapted(source, LoraSettings(1)).factors
        for name in location.names
        if name in names
    ]


def merge_adapters(model: Any, folder: str, inspect: Callable[[Any], None] | None = None) -> Any:
    """Merge the LoRA adapters of a folder into a float model, in place, and return the model.

    A tied head is untied if an adapter changes head or embedding: merging into the shared matrix would change both.

    Args:
        inspect: called with the model and its adapters before they are merged.

    Raises:
        MissingExtraError: peft is not installed.
        CheckpointError: the adapters are a reward model.
    """
    if has_reward_head(folder):
        raise CheckpointError(f"merge_adapters: the adapters in {folder} are a reward model. {REWARD_USE}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Model has `tie_word_embeddings=True`|.*are no longer tied)", UserWarning)
        adapted = import_peft().PeftModel.from_pretrained(model, folder)
        if inspect is not None:
            inspect(adapted)
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        is_tied = bool(head) and head.weight is embedding.weight
        if is_tied and any(hasattr(layer, "base_layer") for layer in (embedding, head)):
            layer = getattr(head, "base_layer", head)
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
            model.config.tie_word_embeddings = False
        return adapted.merge_and_unload()


def describe_size(model: nn.Module) -> str:
    """Describe the numbers of parameters and trained parameters, dtype and device, or the formats of the base."""
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    base = base_of(model)
    total = total if base is None else base.config.n_parameters + trained
    size = f"{total:,} parameters" + (f" ({trained:,} trained)" if trained < total else "")
    if base is not None:
        return f"{size}, packed in {base.summary}"
    return f"{size} in {str(parameters[0].dtype).removeprefix('torch.')} on {parameters[0].device}"


def import_peft() -> Any:
    """Import and return peft.

    Raises:
        MissingExtraError: peft is not installed.
    """
    check_installed("LoRA", "peft", extra="peft")
    import peft

    return peft
