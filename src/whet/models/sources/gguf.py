"""A GGUF file as a source, mapped into memory. Quantised rows stay the bytes they are; the tokenizer is not read.

The metadata is put into the words of the Hugging Face config of the same model, so that ``families`` has the only
reading of options. The tensors become those of the Hugging Face model: llama.cpp reorders Llama's q and k for its
pairing, and views with a stride undo that. An option or tensor that is not known here is an error: it may change what
the model computes. GGUF does not say which GELU GPT-NeoX was trained with: it is the exact one, as in its config. A
sliding window counts, as in Hugging Face; llama.cpp passes over those of llama and phi3.

Source of the names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import WhetValueError
from whet.models.architecture import ModelConfig, Piece
from whet.models.families import FAMILIES, model_config, module_table, module_targets, short_position
from whet.models.slots import Module, Source, Stored, walk
from whet.models.sources.gguf_container import GGUFFile, read_gguf

_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gptneox": "gpt_neox",
    "gpt2": "gpt2",
    "phi3": "phi3",
}

_ENDS = """
    token_embd embedding
    position_embd positions
    output_norm final_norm
    output head
"""
_GATED = """
    .attn_norm norm1
    .attn_q qkv q
    .attn_k qkv k
    .attn_v qkv v
    .attn_q_norm q_norm
    .attn_k_norm k_norm
    .attn_output o
    .ffn_norm norm2
    .ffn_gate gate_up gate
    .ffn_up gate_up up
    .ffn_down down
"""
_FUSED = """
    .attn_norm norm1
    .attn_qkv qkv
    .attn_output o
    .ffn_norm norm2
    .ffn_up up
    .ffn_down down
"""
_PAIRED = _GATED.replace("qkv q\n", "qkv q paired\n").replace("qkv k\n", "qkv k paired\n")

_MODULES: dict[str, tuple[Module, ...]] = {
    "llama": module_table("", "blk", _ENDS + _PAIRED),
    "qwen2": module_table("", "blk", _ENDS + _GATED),
    "qwen3": module_table("", "blk", _ENDS + _GATED),
    "gptneox": module_table("", "blk", _ENDS + _FUSED),
    "gpt2": module_table("", "blk", _ENDS + _FUSED),
    "phi3": module_table("", "blk", _ENDS + _FUSED.replace("ffn_up up", "ffn_up gate_up")),
}

_SIZES = {
    "block_count": "n_layers",
    "context_length": "max_position",
    "embedding_length": "hidden_dim",
    "feed_forward_length": "ffn_dim",
    "attention.head_count": "n_heads",
}
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_KNOWN = {
    *_SIZES,
    *_EPSILONS,
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
    "use_parallel_residual",
    "tensor_data_layout",
    "vocab_size",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def open_gguf(path: str | os.PathLike[str], *, max_position: int | None = None) -> Source:
    """The model of a GGUF file.

    Args:
        path: of a single file, version 2 or 3, with tensors in F32, BF16, F16, Q8_0, Q4_0 and Q4_K.
        max_position: see ``model_config``.

    Returns:
        ``Source(config, pieces, targets)``. The pieces are read-only views of the mapped file, which must not be
        changed while they are used; bfloat16 comes as uint16, quantised rows as their bytes.

    Raises:
        WhetValueError: an architecture, option or type that the engine does not run, or a damaged file.
    """
    where = f'open_gguf("{path}")'
    file = read_gguf(Path(path), where)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _MODEL_TYPES:
        raise WhetValueError(
            f"{where}: general.architecture is {architecture!r:.60}; this engine reads {', '.join(_MODEL_TYPES)}."
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise WhetValueError(f"{where}: this is one part of a model. Join the parts with llama-gguf-split --merge.")
    options = _Metadata(file, architecture, where).options()
    described = model_config(options, max_position=max_position, where=where)
    described = _with_rope_freqs(described, file.tensors, where)
    modules = _MODULES[architecture]
    used: set[str] = set(_ROPE_TENSORS)

    def tensor(names: Sequence[str], suffix: str) -> Stored:
        name = f"{names[0]}.{suffix}"
        used.add(name)
        if name not in file.tensors:
            raise WhetValueError(f"{where}: there is no tensor {name}, which this {architecture} needs.")
        return file.tensors[name]

    def pieces() -> Iterator[Piece]:
        return walk(described, modules, tensor, where)

    for _ in pieces():
        pass
    unknown = sorted(file.tensors.keys() - used)
    if unknown:
        raise WhetValueError(
            f"{where}: a {architecture} of this kind has no {unknown[0]}; the engine does not know it."
        )
    targets = module_targets(options["model_type"], described)
    return Source(described, pieces, targets, short_position=short_position(options, where))


class _Metadata:
    """The file's options of its architecture, in Hugging Face's words."""

    def __init__(self, file: GGUFFile, architecture: str, where: str) -> None:
        self.tensors, self.architecture, self.where = file.tensors, architecture, where
        begin = f"{architecture}."
        self.given = {key.removeprefix(begin): v for key, v in file.metadata.items() if key.startswith(begin)}
        unknown = sorted(self.given.keys() - _KNOWN)
        if unknown:
            raise WhetValueError(f"{where}: the engine does not know the option {begin}{unknown[0]} of this model.")

    def wrong(self, key: str, expected: str) -> WhetValueError:
        return WhetValueError(
            f"{self.where}: {self.architecture}.{key} is {self.given.get(key)!r:.80}, expected {expected}."
        )

    def size(self, key: str, default: int | None = None) -> int:
        value = self.given.get(key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "an integer of at least 1" + (", the same in all layers" * isinstance(value, list)))
        return value

    def number(self, key: str, default: float) -> float:
        value = self.given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(key, "a finite number above 0")
        return float(value)

    def options(self) -> dict[str, Any]:
        model_type = _MODEL_TYPES[self.architecture]
        sizes = {name: self.size(key) for key, name in _SIZES.items()}
        n_heads = sizes["n_heads"]
        if sizes["hidden_dim"] % n_heads and "attention.key_length" not in self.given:
            raise self.wrong("embedding_length", f"a multiple of attention.head_count={n_heads}")
        sizes["n_kv_heads"] = self.size("attention.head_count_kv", n_heads)
        sizes["head_dim"] = self.size("attention.key_length", sizes["hidden_dim"] // n_heads)
        if self.size("attention.value_length", sizes["head_dim"]) != sizes["head_dim"]:
            raise self.wrong("attention.value_length", f"attention.key_length={sizes['head_dim']}")
        window = self.given.get("attention.sliding_window")
        if window:
            if self.architecture not in ("llama", "phi3"):
                raise self.wrong("attention.sliding_window", "none: it is not said which layers have it")
            model_type = "mistral" if model_type == "llama" else model_type
        keys = FAMILIES[model_type].keys
        for name, implied in (("n_kv_heads", n_heads), ("head_dim", sizes["hidden_dim"] // n_heads)):
            if name not in keys and sizes[name] != implied:
                raise WhetValueError(f"{self.where}: {name} is {sizes[name]}, expected {implied} for a {model_type}.")
        epsilon = next((self.number(key, 0.0) for key in _EPSILONS if key in self.given), None)
        if epsilon is None:
            raise self.wrong(_EPSILONS[0], "a number above 0")
        table = self.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise WhetValueError(f"{self.where}: there is no token_embd.weight of two axes, the embedding.")
        rotary_dim = self.size("rope.dimension_count", sizes["head_dim"])
        if rotary_dim != sizes["head_dim"] and not FAMILIES[model_type].partial:
            raise self.wrong("rope.dimension_count", f"the whole head, {sizes['head_dim']}")
        rope = self.rope(sizes, rotary_dim)
        return {
            "model_type": model_type,
            **{keys[name]: value for name, value in sizes.items() if name in keys},
            keys["norm_eps"]: epsilon,
            "vocab_size": table.shape[0],
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": any(f"blk.0.attn_{name}.bias" in self.tensors for name in ("q", "qkv")),
            "mlp_bias": "blk.0.ffn_gate.bias" in self.tensors,
            "use_parallel_residual": self.given.get("use_parallel_residual", True),
            "sliding_window": window or None,
            "rope_parameters": rope,
            # Where both places say it, transformers believes this one.
            "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
        }

    def rope(self, sizes: Mapping[str, int], rotary_dim: int) -> dict[str, Any]:
        """Hugging Face's rope_parameters. (A half more than rotary_dim: its share is rounded down to it.)"""
        head_dim = sizes["head_dim"]
        found: dict[str, Any] = {"rope_type": "default", "rope_theta": self.number("rope.freq_base", 10000.0)}
        found["partial_rotary_factor"] = 1.0 if rotary_dim == head_dim else (rotary_dim + 0.5) / head_dim
        kind = self.given.get("rope.scaling.type", "none")
        attention_factor = self.number("rope.scaling.attn_factor", 1.0)
        original = self.size("rope.scaling.original_context_length", sizes["max_position"])
        factors = [self.tensors.get(name) for name in _ROPE_TENSORS[1:]]
        if any(factors):
            short, long = (_factors(stored, self.where) for stored in factors)
            found |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
            found |= {"original_max_position_embeddings": original, "attention_factor": attention_factor}
        elif kind in ("linear", "yarn"):
            factor = self.number("rope.scaling.factor", 1.0)
            found |= {"rope_type": kind, "factor": factor}
            if kind == "yarn":
                found["original_max_position_embeddings"] = original
                found["attention_factor"] = attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1.0)
                for name in ("beta_fast", "beta_slow"):
                    if f"rope.scaling.yarn_{name}" in self.given:
                        found[name] = self.number(f"rope.scaling.yarn_{name}", 1.0)
        elif kind != "none":
            raise self.wrong("rope.scaling.type", "none, linear, yarn, or longrope with its rope_factors tensors")
        return found


def _factors(stored: Stored | None, where: str) -> list[float]:
    if stored is None or stored.format != "float32" or len(stored.shape) != 1:
        raise WhetValueError(f"{where}: rope_freqs, rope_factors_short and rope_factors_long are 1-D F32 tensors.")
    return stored.tensor.tolist()


def _with_rope_freqs(config: ModelConfig, tensors: Mapping[str, Stored], where: str) -> ModelConfig:
    """Frequencies divided by rope_freqs.weight, which is how llama.cpp keeps Llama 3's scaling."""
    if "rope_freqs.weight" not in tensors:
        return config
    divisors = np.array(_factors(tensors["rope_freqs.weight"], where), np.float64)
    if divisors.shape != (config.rotary_dim // 2,) or not (divisors > 0).all() or not np.isfinite(divisors).all():
        raise WhetValueError(
            f"{where}: rope_freqs.weight is {divisors.tolist()!r:.80}, expected {config.rotary_dim // 2} finite "
            f"numbers above 0, one for each pair."
        )
    inv_freq = np.array(config.inv_freq) / divisors
    return dataclasses.replace(config, inv_freq=tuple(inv_freq.tolist()))
