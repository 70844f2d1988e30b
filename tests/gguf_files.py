"""Write models as GGUF files with the gguf package, in the names and order of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

import whet
from whet.models.reference import naive_weights
from whet.models.row_reader import RowReader
from whet.ops.quant import FORMATS

F32, F16, BF16, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0"))
_PLACES_OF_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
_ARCHITECTURES = {"mistral": "llama", "gpt_neox": "gptneox", "phi": "phi2", "gemma3_text": "gemma3",
                  "olmo3": "olmo2", "granitemoehybrid": "granite", "ministral3": "mistral3",
                  "hunyuan_v1_dense": "hunyuan-dense", "qwen3_5_text": "qwen35", "qwen3_moe": "qwen3moe",
                  "lfm2_moe": "lfm2moe", "granitemoeshared": "granitemoe", "qwen3_5_moe_text": "qwen35moe",
                  "gpt_oss": "gpt-oss", "gemma4_text": "gemma4"}  # fmt: skip
_INTERLEAVED = ("llama", "mistral", "smollm3", "granite", "granitemoehybrid", "ministral3", "arcee", "granite_swa",
                "granitemoe", "granitemoeshared")  # fmt: skip
_WITH_WINDOWS = ("mistral", "phi3", "starcoder2", "gemma2", "gemma3_text", "olmo3", "exaone4", "granite_swa",
                 "gpt_oss", "gemma4_text")  # fmt: skip
_FLOATS = (".conv.conv.", ".conv1d.", ".gate.weight", ".shared_expert_gate.", ".router.")
_BY_NAME = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
_BY_NAME["granite_swa"] = gguf.MODEL_ARCH.GRANITE  # not in this package yet


def architecture_of(config: Any) -> str:
    if is_nemotron(config):
        return "nemotron_h_moe" if "moe" in config.layer_types else "nemotron_h"
    if is_mamba(config):
        return "granitehybrid"
    if config.model_type == "granitemoehybrid" and config.num_local_experts:
        return "granitemoe"
    return _ARCHITECTURES.get(config.model_type, config.model_type)


def is_mamba(config: Any) -> bool:
    return config.model_type == "granitemoehybrid" and "linear_attention" in config.layer_types


def is_nemotron(config: Any) -> bool:
    return config.model_type == "nemotron_h"


def gguf_name(config: Any, name: str) -> str:
    """Return llama.cpp's name of a transformers tensor."""
    if is_nemotron(config):
        name = name.replace("model.", "backbone.").replace("correction_bias", "correction.bias")
        if ".experts." in name:
            name = f"{name.replace('backbone.', 'model.').replace('mixer', 'mlp')}.weight"
    if name.endswith(".layer_scalar"):
        name += ".weight"
    if name.endswith(".sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    name = name.replace("moe.router.weight", "moe.router.layer.weight")
    name = name.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
    names = gguf.get_tensor_name_map(_BY_NAME[architecture_of(config)], config.num_hidden_layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def as_llama_cpp(config: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Return a tensor with rows in the order of llama.cpp's converter."""
    n_heads = config.num_attention_heads
    if ".mamba." in name or ".mixer." in name:
        return as_mamba(config, name, array)
    if config.model_type in _INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
        heads = n_heads if ".q_proj." in name else config.num_key_value_heads
        rest = array.shape[1:]
        return array.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(array.shape)
    if ".query_key_value." in name:
        rest = array.shape[1:]
        return array.reshape(n_heads, 3, -1, *rest).swapaxes(0, 1).reshape(array.shape)
    if config.model_type == "gpt2" and name.rsplit(".", 2)[-2] in ("c_attn", "c_proj", "c_fc") and array.ndim == 2:
        return array.T
    if config.model_type == "gpt_oss" and ".experts." in name:
        array = array if name.endswith("_bias") else array.swapaxes(1, 2)
        return np.concatenate([array[:, ::2], array[:, 1::2]], 1) if "gate_up_proj" in name else array
    with_offset = config.model_type in ("gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text")
    if with_offset and "norm" in name and ".linear_attn." not in name:
        return array + np.float32(1)
    return as_tiled(config, name, array) if ".linear_attn." in name else array


def as_mamba(config: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Return a tensor of Mamba-2 with the axes that llama.cpp requires."""
    if name.endswith("A_log"):
        return -np.exp(array, dtype=np.float64).astype(np.float32)[:, None]
    if name.endswith(".norm.weight"):
        return array.reshape(config.n_groups if is_nemotron(config) else config.mamba_n_groups, -1)
    return array[:, None] if name.endswith(".D") else array


def as_tiled(config: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Return a tensor of Qwen3.5's linear attention with value heads [copy][key head], from [key head][copy]."""
    array = -np.exp(array, dtype=np.float64).astype(np.float32) if name.endswith("A_log") else array
    n_heads, n_keys = config.linear_num_value_heads, config.linear_num_key_heads
    if ".norm." in name:
        return array
    if ".out_proj." in name:
        return as_tiled(config, "", array.T).T
    n_values = n_heads * (config.linear_value_head_dim if len(array) > n_heads else 1)
    begin, values = np.split(array, [len(array) - n_values])
    tiled = values.reshape(n_keys, n_heads // n_keys, -1, *array.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    return np.concatenate([begin, tiled])


def values_by_slot(source: Any) -> dict[str, np.ndarray]:
    return naive_weights(source.config, source.slices(), np.float32)


def values_by_module(source: Any) -> dict[str, np.ndarray]:
    """Return the slots' values in the order of Hugging Face's modules, by the names of their parameters."""
    rows, slots, found = RowReader(source, "test"), source.config.slots(), {}
    for name, location in source.targets.items():
        for suffix, slot in ((".weight", location.weight), (".bias", location.bias)):
            if slot in slots:
                found[name + suffix] = np.concatenate(list(rows.iter_chunks(location, slot, "float32")))
    return found


TOKENIZER = {
    "tokenizer.ggml.tokens": ["a", "bc", "é"],
    "tokenizer.ggml.scores": [0.0, 1.0, 2.0],
    "tokenizer.ggml.add_bos_token": True,
}


def write_gguf(
    model: Any,
    path: Path,
    kinds: Any = F32,
    *,
    change: Any = None,
    extra: Any = None,
    keys: Any = None,
    fused: bool = False,
    fused_experts: bool = False,
    **split: Any,
) -> Path:
    """Write a model as a GGUF file, or split, and return the (first) path.

    ``kinds``: a type, or name -> type; ``change``: of the writer; ``extra``: tensors; ``keys``: of the tokenizer;
    ``fused``: q, k and v in one; ``fused_experts``: gates and up projections in one; ``split``: the writer's options of
    parts.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture_of(config), **split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    n_experts = getattr(config, "num_experts", getattr(config, "num_local_experts", 0))
    if is_nemotron(config) and "moe" not in config.layer_types:
        n_experts = 0
    names = ("shared_intermediate_size" if not n_experts else "", "intermediate_size", "n_inner")
    ffn_dim = next(filter(None, (getattr(config, name, None) for name in names)), 4 * config.hidden_size)
    if config.model_type == "lfm2":
        ffn_dim = model.model.layers[0].feed_forward.w1.out_features
    if config.model_type in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "gemma4_text" and config.use_double_wide_mlp:
        n_shared = config.num_kv_shared_layers
        writer.add_feed_forward_length([ffn_dim] * (config.num_hidden_layers - n_shared) + [2 * ffn_dim] * n_shared)
    elif is_nemotron(config):
        width = config.moe_intermediate_size if n_experts else ffn_dim
        writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in config.layer_types])
    elif config.model_type != "qwen3_5_moe_text":
        writer.add_feed_forward_length(ffn_dim)
    if n_experts:
        write_expert_keys(writer, config, n_experts)
    writer.add_head_count(config.num_attention_heads)
    n_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    is_hybrid = config.model_type in ("lfm2", "lfm2_moe")
    writer.add_head_count_kv(
        [n_kv_heads * (kind == "full_attention") for kind in config.layer_types]
        if is_hybrid or is_mamba(config) or is_nemotron(config)
        else n_kv_heads
    )
    is_gemma_4 = config.model_type == "gemma4_text"
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    if is_gemma_4:
        head_dim = write_gemma_4_keys(writer, config, head_dim)
    if is_nemotron(config):
        write_nemotron_keys(writer, config)
    if hasattr(config, "rms_norm_eps") or is_hybrid:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_layer_norm_rms_eps(config.norm_eps if is_hybrid else config.rms_norm_eps)
    else:
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
        writer.add_layer_norm_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
    settings = getattr(config, "rope_parameters", None)
    if settings and "full_attention" in settings:
        settings = settings["full_attention"]
        if settings["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(settings["factor"])
    if settings and config.model_type != "granite_swa":
        stretch = settings.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
        writer.add_rope_freq_base(settings["rope_theta"] * stretch)
        share = 1.0 if is_gemma_4 else settings.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_dim * share))
    if config.model_type in _WITH_WINDOWS and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "ministral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(settings["factor"])
        writer.add_rope_scaling_orig_ctx_len(settings["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(settings["mscale_all_dim"])
        writer.add_attn_temperature_scale(settings["llama_4_scaling_beta"])
    if config.model_type == "gpt_oss":
        if settings["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(settings["factor"])
            writer.add_rope_scaling_orig_ctx_len(settings["original_max_position_embeddings"])
        if config.layer_types[0] != "sliding_attention":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type == "olmo3" or (config.model_type == "exaone4" and config.sliding_window):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type == "granite_swa":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        theta = max(config.layer_rope_theta)
        assert {*config.layer_rope_theta} <= {theta, 0}
        writer.add_rope_freq_base(theta)
        writer.add_array("granite_swa.attention.rope_pattern", [bool(theta) for theta in config.layer_rope_theta])
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if config.model_type.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if is_mamba(config):
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    if config.model_type in ("gpt_neox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type in ("qwen3_5_text", "qwen3_5_moe_text"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_array(
            f"{writer.arch}.attention.recurrent_layers", [kind == "linear_attention" for kind in config.layer_types]
        )
        writer.add_rope_dimension_sections([*settings["mrope_section"], 0])
    add_keys(writer, keys or TOKENIZER)
    if change:
        change(writer)
    qkv: dict[str, list[np.ndarray]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        kind = kinds(name) if callable(kinds) else kinds
        array = np.ascontiguousarray(as_llama_cpp(config, name, tensor.float().numpy()))
        if (".shared_mlp." in name or ".experts." in name) and not is_nemotron(config):  # gate and up in one
            if fused_experts and "gate_up_proj" in name:
                add(writer, f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", array, kind)
                continue
            for part, half in split_gate(name, array, bool(n_experts)):
                add(writer, part, np.ascontiguousarray(half), F32 if part.endswith("bias") else kind)
            continue
        if array.ndim == 3 and ".experts." not in name:  # of a convolution
            array = array.squeeze(1)
        is_matrix = array.ndim == len(tensor.shape) > 1 and not any(part in name for part in _FLOATS)
        name = gguf_name(config, name)
        block, _, layer = name.rpartition(".attn_")
        if fused and layer.split(".")[0] in ("q", "k", "v"):
            name = f"{block}.attn_qkv.{layer[2:]}"
            qkv.setdefault(name, []).append(array)  # q, k, v, as transformers has them
            if len(qkv[name]) < 3:
                continue
            array = np.concatenate(qkv[name])
        add(writer, name, array, kind if is_matrix else F32)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(path)[0] if len(writer.tensors) > 1 else path


def write_nemotron_keys(writer: Any, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_rope_scaling_finetuned(False)


def write_gemma_4_keys(writer: Any, config: Any, local_head_dim: int) -> int:
    """Write the options of layers with different sizes, and return head_dim of those with full attention."""
    full = next(layer.head_dim for layer in config.per_layer_config if layer.head_dim != local_head_dim)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_key_length_swa(local_head_dim)
    writer.add_value_length_swa(local_head_dim)
    writer.add_rope_dimension_count_swa(local_head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    n_rotated = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * n_rotated + [1e30] * (full // 2 - n_rotated), np.float32))
    return full


def write_expert_keys(writer: Any, config: Any, n_experts: int) -> None:
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    width = config.intermediate_size if config.model_type == "gpt_oss" else None
    if (width := getattr(config, "moe_intermediate_size", width)) is not None:
        writer.add_expert_feed_forward_length(width)
    if is_nemotron(config):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
    shared = "moe_shared_expert_intermediate_size"
    names = ("shared_intermediate_size", "shared_expert_intermediate_size", shared)
    if width := next(filter(None, (getattr(config, name, None) for name in names)), None):
        writer.add_expert_shared_feed_forward_length(width)
    if config.model_type == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def split_gate(name: str, array: np.ndarray, has_experts: bool) -> list[tuple[str, np.ndarray]]:
    """Return the file's tensors of a fused tensor of Granite's shared expert, or of the experts."""
    end = "exps" if ".experts." in name else "shexp" if has_experts else ""
    begin = f"blk.{name.split('.')[2]}.ffn_"
    parts = ["down"] if "down_proj" in name or "output_linear" in name else ["gate", "up"]
    halves = np.split(array, len(parts), axis=int(end == "exps"))
    suffix = "bias" if name.endswith("_bias") else "weight"
    return [(f"{begin}{part}{'_' * bool(end)}{end}.{suffix}", half) for part, half in zip(parts, halves, strict=True)]


def add_keys(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, bytes) or value:
            writer.add_array(key, value)


def add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    if kind == F32:
        writer.add_tensor(name, array)
    elif kind == F16:
        writer.add_tensor(name, array.astype(np.float16))
    else:
        blocks = blocks_of(array.reshape(-1, array.shape[-1]), kind)
        writer.add_tensor(name, blocks.reshape(*array.shape[:-1], -1), raw_dtype=kind)


def blocks_of(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Encode rows in a type; random bits with scales of 1e-4 for types that neither package writes."""
    if kind.name.lower() in FORMATS:
        return whet.quantize(array, kind.name.lower()).data
    if kind.name not in _PLACES_OF_SCALES:
        return gguf.quants.quantize(array, kind)
    length, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (array.size // length, size), np.uint8)
    for at in _PLACES_OF_SCALES[kind.name]:
        blocks[:, at : at + 2] = np.array([1e-4], np.float16).view(np.uint8)
    return blocks.reshape(len(array), -1)
