"""Translate a Hugging Face config into the metadata of a GGUF file: the inverse of ``sources.gguf.read_options``.

Names come from families.json. The result is read back as in ``open_gguf`` and rejected if it describes another model:
GGUF cannot express every config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.errors import WhetValueError
from whet.models.architecture import SOFTCAPS, ModelConfig, find_difference
from whet.models.families import (
    FAMILIES,
    GGUF_NAMES,
    SCALES,
    Family,
    family_of,
    has_experts,
    is_hybrid,
    rope_scaling,
    text_options,
    trained_position,
)
from whet.models.gguf_writer import Tensor
from whet.models.slots import StoredTensor
from whet.models.sources.gguf import NEVER_ROTATED, ROUTER_NUMBERS, describe_gguf, is_tiled
from whet.models.sources.gguf_container import GGUFFile

_KEYS: dict[str, str] = GGUF_NAMES["keys"]
_ROPE_TENSORS: dict[str, str] = GGUF_NAMES["rope_tensors"]
_MROPE_SECTION = (11, 11, 10)
"""transformers' default, which is not in the config."""


class Keys(NamedTuple):
    """A model's options in a file.

    Attributes:
        metadata: ``general.architecture`` and the keys of the architecture.
        vectors: name -> float32 tensor of rotary frequencies.
    """

    metadata: dict[str, Any]
    vectors: dict[str, np.ndarray]


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """Return GGUF's name of a config's family.

    Raises:
        WhetValueError: GGUF has no such architecture.
    """
    family = family_of(config, where)
    if family.gguf is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.gguf is not None)
        raise WhetValueError(
            f"{where}: model_type is {config['model_type']!r}, and GGUF has architectures for {known} only."
        )
    if "mixture" in family.gguf and has_experts(config, where):
        return family.gguf["mixture"]
    return family.gguf["hybrid" if "hybrid" in family.gguf and is_hybrid(config, where) else "architecture"]


def make_keys(config: Mapping[str, Any], described: ModelConfig, where: str) -> Keys:
    """Translate a Hugging Face config into metadata and tensors.

    Args:
        config: the dict of config.json.
        described: its ``model_config``.
        where: prefix of error messages.

    Raises:
        WhetValueError: an option that GGUF cannot express, or that llama.cpp does not read in the architecture.
    """
    architecture, family = architecture_of(config, where), family_of(config, where)
    table = family.gguf or {}
    if described.qkv_bias and not table.get("biases", True):
        raise WhetValueError(f"{where}: GGUF cannot express this model's attention biases in {architecture}.")
    if not described.tied_head and not table.get("head", True):
        raise WhetValueError(f"{where}: GGUF cannot express this model's untied head in {architecture}.")
    if table.get("square") and described.n_heads * described.head_dim != described.hidden_dim:
        raise WhetValueError(
            f"{where}: GGUF cannot express this model's {described.n_heads} heads of {described.head_dim}: in "
            f"{architecture} their product has to be hidden_dim, {described.hidden_dim}."
        )
    if table.get("all_heads") and described.n_kv_heads != described.n_heads:
        raise WhetValueError(
            f"{where}: GGUF cannot express this model's n_kv_heads: it is {described.n_kv_heads}, and in "
            f"{architecture} it has to be n_heads, {described.n_heads}."
        )
    given: dict[str, Any] = {
        "n_layers": described.n_layers,
        "max_position": trained_position(config, where),
        "hidden_dim": described.hidden_dim,
        "ffn_dim": described.ffn_dim,
        "n_heads": described.n_heads,
        "n_kv_heads": described.n_kv_heads,
        "head_dim": described.head_dim,
        "value_dim": described.head_dim,
        "rms_norm_eps" if described.norm == "rms" else "layer_norm_eps": described.norm_eps,
    }
    if "layer_norm_eps" in table.get("needs", ()):
        given["layer_norm_eps"] = described.norm_eps
    if family.window in ("all", "pattern") and any(described.windows):
        given["sliding_window"] = max(described.windows)
    depth = table.get("windowed_depth")
    if depth is not None and any(described.windows) != (described.n_layers == depth):
        raise WhetValueError(
            f"{where}: GGUF cannot express this model's windows: llama.cpp computes them in {architecture} models of "
            f"{depth} layers, and only there, and this model has {described.n_layers} layers."
        )
    if described.query_log_scale:
        given["query_log_scale"] = described.query_log_scale
    if table.get("window_layers") and (any(described.windows) or "windows" in table.get("needs", ())):
        given["window_layers"] = np.array(described.windows) > 0
        given.setdefault("sliding_window", given["max_position"])
    if family.mixer == "delta":
        given |= _delta_keys(described, config, where)
    elif family.mixer == "conv" or described.mixers:  # the others are plain models
        heads = [described.n_kv_heads * (described.mixer(i) == "attention") for i in range(described.n_layers)]
        given["n_kv_heads"] = np.array(heads, np.int32)
        given |= _state_sizes(described) if family.mixer == "mamba" else {"conv_length": described.conv_length or 1}
    if "local_head_dim" in family.keys:
        given |= _layer_keys(described)
    if described.n_experts:
        given |= _expert_keys(described, family)
    if family.one_only:
        given["ffn_dim"] = _one_only_widths(described, where)
    if family.rope_by_layer and described.rope_layers:
        given["rope_layers"] = np.array(described.rope_layers)
    if family.rope_option and not described.rotary_dim:
        given["is_rotated"] = False
    if "parallel_residual" in family.settings:
        given["use_parallel_residual"] = described.parallel_residual
    scales = {**vars(described), "logits_divisor": 1 / described.logits_scale}
    given |= {name: scales[name] for name in SCALES if name in family.keys}
    given |= {name: scales[name] for name in SOFTCAPS if scales[name]}
    vectors: dict[str, np.ndarray] = {}
    if described.rotary_dim:
        given["rotary_dim"] = described.rotary_dim
        rope, vectors = _rope(described, rope_scaling(config, where), family, where)
        if family.rope_local and rope.get("attention_factor", 1.0) != 1.0:
            raise WhetValueError(
                f"{where}: GGUF cannot express this model's attention_factor: in {architecture} llama.cpp applies it "
                f"to the layers with a window too."
            )
        given |= rope
    metadata: dict[str, Any] = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{_KEYS[name]}": value for name, value in given.items()}
    metadata[f"{architecture}.vocab_size"] = described.vocab_size
    return Keys(metadata, vectors)


def _layer_keys(described: ModelConfig) -> dict[str, Any]:
    """Return the options of layers with different sizes, shared keys and values, and inputs by token."""
    local, frequencies = described.local_head_dim or described.head_dim, described.local_inv_freq
    given: dict[str, Any] = dict.fromkeys(("local_head_dim", "local_value_dim", "local_rotary_dim"), local)
    given |= {name: getattr(described, name) for name in ("n_shared_kv_layers", "layer_input_dim")}
    if described.ffn_dims:
        given["ffn_dim"] = np.array(described.ffn_dims, np.int32)
    if len(frequencies) > 1:
        given["rope_local_base_freq"] = frequencies[1] ** -len(frequencies)
    return given


def _one_only_widths(described: ModelConfig, where: str) -> np.ndarray:
    """Return the widths of layers that are a mixer, an MLP or a mixture: with experts, llama.cpp has no MLPs."""
    n_layers = range(described.n_layers)
    if described.n_experts and any(described.ffn_dims):
        raise WhetValueError(f"{where}: GGUF cannot express this model's layers: MLPs and mixtures of experts.")
    return np.array([described.expert_dim if described.is_moe(i) else described.mlp_dim(i) for i in n_layers], np.int32)


def _expert_keys(described: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the options of a mixture of experts. A family without another width of MLPs has one key of widths."""
    given: dict[str, Any] = {"n_experts": described.n_experts, "n_used_experts": described.n_used_experts}
    has_one_width = family.keys["expert_dim"] == "intermediate_size"
    given["ffn_dim" if has_one_width else "expert_dim"] = described.expert_dim
    if "expert_dim" in (family.gguf or {}).get("needs", ()):
        given["expert_dim"] = described.expert_dim
    if described.shared_dim:
        given["shared_dim"] = described.shared_dim
    if described.router != "softmax":
        given["router"] = ROUTER_NUMBERS[described.router]
    if (family.gguf or {}).get("scaled"):
        given |= {name: getattr(described, name) for name in ("router_normalised", "router_scale")}
    if "n_dense_layers" in family.keys:
        given["n_dense_layers"] = described.moe_layers.count(False)
    return given


def _delta_keys(described: ModelConfig, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of the gated delta rule, and the sections of rotations, which llama.cpp requires."""
    if described.delta_dim != described.delta_key_dim:
        raise WhetValueError(
            f"{where}: GGUF cannot express this model's linear attention: its keys have {described.delta_key_dim} "
            f"numbers and its values {described.delta_dim}, and llama.cpp has one size."
        )
    flags = np.array([described.mixer(i) == "delta" for i in range(described.n_layers)])
    rope, n_pairs = text_options(config).get("rope_parameters") or {}, described.rotary_dim // 2
    sections = list(rope.get("mrope_section", _MROPE_SECTION))
    if sum(sections) > n_pairs:  # llama.cpp would abort; a text has the same position in all sections
        sections = [(n_pairs + i) // 3 for i in range(3)]
    return _state_sizes(described) | {
        "recurrent_layers": flags,
        "full_attention_interval": int(np.argmin(flags)) + 1,
        "mrope_section": np.array([*sections, 0], np.int32),
    }


def _state_sizes(described: ModelConfig) -> dict[str, Any]:
    """Return the sizes of layers whose heads have a matrix as state."""
    return {
        "delta_conv_length": described.conv_length or 1,
        "delta_key_dim": described.delta_key_dim or 1,
        "n_delta_key_heads": described.n_delta_key_heads or 1,
        "n_delta_heads": described.n_delta_heads or 1,
        "delta_values": described.delta_values or 1,
    }


def add_predicting(keys: Keys, described: ModelConfig) -> Keys:
    """Return the options of a file with a block after the layers of the model that predicts one more token."""
    begin = f"{keys.metadata['general.architecture']}."
    flags = np.append(keys.metadata[begin + _KEYS["recurrent_layers"]], False)
    more = {"n_layers": described.n_layers + 1, "n_predicting": 1, "recurrent_layers": flags}
    return keys._replace(metadata=keys.metadata | {begin + _KEYS[name]: value for name, value in more.items()})


def deviation_note(described: ModelConfig, family: Family) -> str:
    """Describe how llama.cpp's result deviates from the model; empty: it does not."""
    table, window = family.gguf or {}, max(described.windows)
    if not family.truncates and described.attention_factor != 1.0:
        return (
            f"llama.cpp rounds the pairs between which YaRN scales the frequencies of {table['architecture']}, which "
            f"changes rotations slightly: this model has fractions of pairs"
        )
    if described.delta_step_min:
        return (
            f"llama.cpp has no lower bound of Mamba-2's steps, which are at least {described.delta_step_min:g} in this "
            f"model (time_step_min) as in transformers: where steps are smaller, states decay more slowly in llama.cpp"
        )
    if table.get("windows") or not window:
        return ""
    return (
        f"llama.cpp has no sliding window in {table['architecture']}: beyond {window:,} tokens it computes another "
        f"model, because this model's layers attend no further"
    )


def as_stored(described: ModelConfig, family: Family) -> ModelConfig:
    """Return the config with the tensors and the order of value heads that llama.cpp requires, and no bound of steps.

    The tensors are an untied head, and biases and corrections of 0. See ``deviation_note`` for the bound.
    """
    needs = (family.gguf or {}).get("needs", ())
    described = replace(described, delta_tiled=is_tiled(described), delta_step_min=0.0)
    if "head" in needs:
        described = replace(described, tied_head=False)
    if "correction" in needs and described.n_experts:
        described = replace(described, router_correction=True)
    return replace(described, qkv_bias=True, o_bias=True, mlp_bias=True) if "biases" in needs else described


def check_keys(keys: Keys, tensors: Sequence[Tensor], described: ModelConfig, where: str) -> None:
    """Read the metadata back.

    Raises:
        WhetValueError: the file would describe another model.
    """
    stored = {tensor.name: StoredTensor(None, tensor.format, tensor.shape) for tensor in tensors}
    stored |= {name: StoredTensor(vector, "float32", vector.shape) for name, vector in keys.vectors.items()}
    file = GGUFFile((Path(where),), keys.metadata, stored)
    _, found = describe_gguf(file, described.max_position, where)
    if (name := find_difference(described, found)) is not None:
        raise WhetValueError(
            f"{where}: GGUF cannot express this model's {name}: it is {getattr(described, name)!r:.80}, and the file "
            f"would have {getattr(found, name)!r:.80}."
        )


def _rope(
    described: ModelConfig, scaling: Mapping[str, Any], family: Family, where: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the metadata and the tensors of rotary embedding."""
    table = family.gguf or {}
    architecture, known = table["architecture"], table.get("rope", ())
    kind, theta = scaling["rope_type"], float(scaling.get("rope_theta", 10000.0))
    given: dict[str, Any] = {"rope_theta": theta}
    original = scaling.get("original_max_position_embeddings")
    needs_divisors = "divisors" in table.get("needs", ())
    if needs_divisors and kind != "longrope":
        kind = "divisors"  # llama.cpp would scale the layers with a window too
    if kind == "linear":
        return given | {"rope_type": kind, "factor": float(scaling["factor"])}, {}
    if kind == "yarn" and _is_llama_cpp_ramp(scaling, family.truncates):
        factor = float(scaling["factor"])
        relative = described.attention_factor / (0.1 * math.log(max(factor, 1.0)) + 1.0)
        given |= {"rope_type": kind, "factor": factor, "attention_factor": relative}
        return given | {"original_max_position_embeddings": original}, {}
    if kind == "longrope" and "longrope" in known:
        given |= {"rope_type": kind, "original_max_position_embeddings": original}
        given["attention_factor"] = described.attention_factor
        names = ("long_factor", "short_factor")
        return given, {_ROPE_TENSORS[name]: np.array(scaling[name], np.float32) for name in names}
    unscaled = theta ** (-2 * np.arange(described.rotary_dim // 2) / described.rotary_dim)
    inv_freq = np.array(described.inv_freq)
    divisors = np.divide(unscaled, inv_freq, out=np.full(len(unscaled), NEVER_ROTATED), where=inv_freq != 0)
    if described.attention_factor != 1.0:
        given["attention_factor"] = described.attention_factor
    elif np.allclose(divisors, 1.0, rtol=1e-6, atol=0) and not needs_divisors:
        return given, {}
    if kind == "longrope" or "divisors" not in known:
        custom = " with custom beta_fast, beta_slow or truncate" if kind == "yarn" else ""
        raise WhetValueError(f"{where}: GGUF cannot express rope_type {kind!r}{custom} in {architecture}.")
    return given, {_ROPE_TENSORS["divisors"]: divisors.astype(np.float32)}


def _is_llama_cpp_ramp(scaling: Mapping[str, Any], truncates: bool) -> bool:
    """Whether YaRN's ramp is llama.cpp's fixed one: beta 32 and 1, at whole pairs if the family has it so."""
    given = {"beta_fast": 32, "beta_slow": 1, "truncate": True} | dict(scaling)
    return given["beta_fast"] == 32 and given["beta_slow"] == 1 and given["truncate"] is truncates
