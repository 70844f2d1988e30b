"""Load GGUF files as transformers models for training: dequantised weights, a config, and the file's tokenizer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import WhetValueError, check_installed
from whet.models.architecture import ModelConfig, find_difference
from whet.models.families import GGUF_NAMES, model_config
from whet.models.row_reader import RowReader
from whet.models.slots import ModelSource, to_stored
from whet.models.sources.gguf import open_gguf, read_options
from whet.models.sources.gguf_container import GGUFFile, read_gguf
from whet.models.tokenizers import GGUFTokenizer, read_tokenizer
from whet.ops.rope_scaling import rope_frequencies

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary scaling of Llama 3.1 to 3.3, without the factor."""


def load_gguf_model(path: str | os.PathLike[str] | GGUFFile, dtype: str = "float32") -> tuple[Any, Any]:
    """Load the model of a GGUF file as a transformers module, and its tokenizer.

    The weights are dequantised; in float32 the logits equal
    ``whet.models.reference.naive_forward``. ``save_pretrained`` of both writes a Hugging Face folder.

    Args:
        path: see ``open_gguf``.
        dtype: dtype of the weights, "float32" or "bfloat16".

    Returns:
        ``(model, tokenizer)``: a causal language model of the file's family on the CPU, and a
        ``PreTrainedTokenizerFast``. The generation config has all stop tokens.

    Raises:
        WhetValueError: as ``open_gguf`` and ``read_tokenizer``; a tokenizer with more tokens than the embedding has
            rows; or a model that transformers computes differently.
        MissingExtraError: torch or transformers is not installed.
    """
    check_installed("load_gguf_model", "torch", "transformers")
    import torch
    import transformers

    if dtype not in ("float32", "bfloat16"):
        raise WhetValueError(f'load_gguf_model("{path}"): dtype is {dtype!r}, expected float32 or bfloat16.')
    file = path if isinstance(path, GGUFFile) else read_gguf(Path(path), f'load_gguf_model("{path}")')
    config, tokenizer = read_gguf_config(file)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    _copy_weights(open_gguf(file), model)
    model.generation_config.eos_token_id = tokenizer.stop_token_ids or None
    return model.eval(), tokenizer.to_transformers()


def read_gguf_config(path: str | os.PathLike[str] | GGUFFile) -> tuple[Any, GGUFTokenizer]:
    """Read the transformers config of a GGUF file, and its tokenizer; arguments and errors as ``load_gguf_model``."""
    file = path if isinstance(path, GGUFFile) else read_gguf(Path(path), f'load_gguf_model("{path}")')
    where = f'load_gguf_model("{file.paths[0]}")'
    described, tokenizer = open_gguf(file).config, read_tokenizer(file)
    if len(tokenizer) > described.vocab_size:
        raise WhetValueError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens and the embedding {described.vocab_size} rows. "
            f"Convert the model again."
        )
    config = _make_config(file, described, tokenizer, where)
    _check_same(described, model_config(config, where=where), where)
    return config, tokenizer


def _make_config(file: GGUFFile, described: ModelConfig, tokenizer: GGUFTokenizer, where: str) -> Any:
    """Make the transformers config from the options that its class has."""
    import transformers

    options = read_options(file, where)
    if GGUF_NAMES["rope_tensors"]["divisors"] in file.tensors:
        rope = options["rope_parameters"]
        full = rope.get("full_attention", rope)
        divided = _divided_rope(described, full["rope_theta"])
        options["rope_parameters"] = {**rope, "full_attention": divided} if full is not rope else divided
    if options["original_max_position_embeddings"] is None:
        del options["original_max_position_embeddings"]
    family = transformers.AutoConfig.for_model(options["model_type"])
    if not hasattr(family, "rope_parameters"):  # transformers 4
        rope = options["rope_parameters"]
        options |= dict.fromkeys(("rope_theta", "rotary_emb_base"), rope["rope_theta"])
        options |= dict.fromkeys(("partial_rotary_factor", "rotary_pct"), rope.get("partial_rotary_factor", 1.0))
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        options["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    # Qwen3 MoE and Gemma 4 read sizes of heads that are not fields of their classes.
    fields = [name for name in options if name in ("head_dim", "global_head_dim") or hasattr(family, name)]
    known = {name: options[name] for name in fields if name != "model_type"}
    return transformers.AutoConfig.for_model(
        options["model_type"],
        **known,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        name_or_path=str(file.paths[0].resolve()),  # adapters store the path of their base
    )


def _divided_rope(config: ModelConfig, theta: float) -> dict[str, Any]:
    """Return rope_parameters of frequencies with divisors: Llama 3's scaling, or longrope with these factors."""
    unscaled = theta ** (-2 * np.arange(config.rotary_dim // 2) / config.rotary_dim)
    n_rotated = np.count_nonzero(config.inv_freq)
    if n_rotated < len(unscaled):  # the share of the pairs, which transformers rounds down
        share = next(
            s
            for s in (n_rotated / len(unscaled), (n_rotated + 0.5) / len(unscaled))
            if int(s * config.rotary_dim // 2) == n_rotated
        )
        return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}
    divisors = unscaled / np.array(config.inv_freq)
    llama3 = {"rope_type": "llama3", "rope_theta": theta, "factor": float(np.round(divisors.max())), **_LLAMA3}
    if llama3["factor"] >= 1 and config.attention_factor == 1.0:
        frequencies, _ = rope_frequencies(config.head_dim, None, config.max_position, scaling=llama3)
        if frequencies.shape == divisors.shape and np.allclose(frequencies, config.inv_freq, rtol=1e-5, atol=0):
            return llama3
    factors = divisors.tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": config.max_position,
        "attention_factor": config.attention_factor,
    }


def _check_same(ours: ModelConfig, theirs: ModelConfig, where: str) -> None:
    """Reject a model that transformers' config cannot express."""
    ours = replace(ours, delta_tiled=False)  # an order of the file
    if (name := find_difference(ours, theirs)) is not None:
        raise WhetValueError(
            f"{where}: {name} is {getattr(ours, name)!r:.80}, and in transformers it would be "
            f"{getattr(theirs, name)!r:.80}: this model cannot be trained from the file. Train its Hugging Face folder."
        )


def _copy_weights(source: ModelSource, model: Any) -> None:
    """Write the file's weights into the module's parameters."""
    import torch

    rows, places = RowReader(source, "load_gguf_model"), {}
    for name, location in source.targets.items():
        whole = f"{name}.weight" if location.module.parameter == "weight" else name
        bias = f"{name}.bias" if whole != name else f"{name}_bias"
        places |= {whole: (location, location.weight), bias: (location, location.bias)}
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in places)
    for name, parameter in (*model.named_parameters(), *buffers):
        location, slot = places[name]
        values, filled = np.empty(rows.config.slots()[slot], np.float32)[: location.shape[0]], 0
        for chunk in rows.iter_chunks(location, slot, "float32"):
            values[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        if slot == location.weight:
            values = location.module.from_slot(values)
            values = to_stored(source.config, location, values)
        parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(parameter.shape))
