"""Random transformers models of every family, small and with large weights, so that a slip shows in the logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from whet.models.families import family_of, is_skipped, text_options
from whet.models.reference import naive_forward, naive_weights
from whet.models.slots import ModelSource
from whet.nn.modules import auto_class

VOCAB = 48
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 2}
_SIZES = {"gpt2": _GPT2, "gptj": {**_GPT2, "rotary_dim": 4}}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **settings}}


_GRANITE_SCALES = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.7,
}
_GRANITE_4 = {
    "shared_intermediate_size": 24,
    "num_local_experts": 0,
    "layer_types": ["full_attention"] * 2,
    **_GRANITE_SCALES,
    "mamba_n_heads": 4,
}
_GRANITE_4_H = {
    **_GRANITE_4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_d_state": 10,
    "mamba_chunk_size": 8,
}

_NEMOTRON_H = {
    "head_dim": 12,
    "intermediate_size": 22,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 3,
    "ssm_state_size": 7,
    "conv_kernel": 3,
    "chunk_size": 8,
    "layer_norm_epsilon": 1e-4,
}

_MINISTRAL_3 = {
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 32.0,
        "original_max_position_embeddings": 8,
        "max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}

_QWEN3_5 = {
    "head_dim": 12,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 10,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}

_LOCAL = ("sliding_attention", "sliding_attention")
_GEMMA_4 = {
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 5,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 6,
    "use_double_wide_mlp": False,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "llama-gelu": ("llama", {"hidden_act": "gelu", "num_key_value_heads": 1, "rms_norm_eps": 0.1}),
    "llama-linear": ("llama", rope("linear", factor=3.0)),
    "llama-dynamic": ("llama", rope("dynamic", factor=2.0)),
    "llama-yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-yarn-mscale": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.4, beta_fast=8),
    ),
    "llama-llama3": (
        "llama",
        rope("llama3", factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "llama-longrope": (
        "llama",
        rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 3.0, 4.0],
            original_max_position_embeddings=16,
        ),
    ),
    "llama-proportional": ("llama", rope("proportional", partial_rotary_factor=0.5)),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "ministral3": ("ministral3", {"head_dim": 16, **_MINISTRAL_3}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 10}),
    "qwen3-biases-windows": (
        "qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [0, 1], **rope("default")}),
    "smollm3-interval": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3-windows": (
        "smollm3",
        {
            "no_rope_layer_interval": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "granite": (
        "granite",
        {
            **_GRANITE_SCALES,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite4": ("granitemoehybrid", {**_GRANITE_4, "position_embedding_type": "rope", "attention_bias": True}),
    "granite4-hybrid": ("granitemoehybrid", {**_GRANITE_4_H, "tie_word_embeddings": True}),
    "granite4-hybrid-groups": (
        "granitemoehybrid",
        {
            **_GRANITE_4_H,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mamba_n_heads": 6,
            "mamba_n_groups": 3,
            "mamba_expand": 3,
            "mamba_d_head": 16,
            "mamba_d_state": 7,
            "mamba_d_conv": 3,
        },
    ),
    "nemotron_h": ("nemotron_h", {**_NEMOTRON_H, "hybrid_override_pattern": "M-M*-", "time_step_min": 0.6}),
    "nemotron_h-groups": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["full_attention", "mamba", "mlp", "linear_attention"],
            "mamba_num_heads": 4,
            "n_groups": 1,
            "conv_kernel": 4,
            "mlp_bias": True,
            "num_key_value_heads": 4,
            "time_step_min": 1e-30,
        },
    ),
    "granite4-not-rotated": ("granitemoehybrid", {**_GRANITE_4, "tie_word_embeddings": True}),
    "granite_swa": (
        "granite_swa",
        {
            **_GRANITE_SCALES,
            "attention_multiplier": 0.2,
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "layer_rope_theta": [500.0, 0.0, 500.0, 500.0, 0.0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
            "tie_word_embeddings": False,
        },
    ),
    "granite_swa-bases": (
        "granite_swa",
        {
            "head_dim": 12,
            "attention_multiplier": 0.2,
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "layer_rope_theta": [10.0, 500.0, 0.0],
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "olmo2": ("olmo2", {"rms_norm_eps": 0.01}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 500.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "olmo3-kinds": ("olmo3", {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4-windows": ("exaone4", {"num_hidden_layers": 5, "sliding_window": 5, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 12}),
    "ernie4_5-biases-yarn": (
        "ernie4_5",
        {
            "head_dim": 8,
            "use_bias": True,
            "tie_word_embeddings": False,
            **rope("yarn", factor=4.0, original_max_position_embeddings=16),
        },
    ),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {
            "head_dim": 10,
            "attention_bias": True,
            "tie_word_embeddings": True,
            **rope("dynamic", alpha=50.0, factor=1.0),
        },
    ),
    "arcee": ("arcee", {"head_dim": 8}),
    "arcee-biases": ("arcee", {"head_dim": 12, "mlp_bias": True, "attention_bias": True}),
    "olmo2-one-head": (
        "olmo2",
        {"num_key_value_heads": 1, "num_attention_heads": 1, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 8,
            "num_hidden_layers": 6,
            "sliding_window": 5,
            "query_pre_attn_scalar": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma3-kinds": (
        "gemma3_text",
        {
            "head_dim": 6,
            "sliding_window": 4,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "gemma3-vision": ("gemma3", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "mistral3-vision": ("mistral3", {"model_type": "mistral", "head_dim": 16, "tie_word_embeddings": False}),
    "ministral3-vision": ("mistral3", {"model_type": "ministral3", "head_dim": 8, **_MINISTRAL_3}),
    "qwen3_vl-vision": (
        "qwen3_vl",
        {
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]},
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma2-kinds": (
        "gemma2",
        {
            "head_dim": 6,
            "sliding_window": 4,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "attn_logit_softcapping": None,
        },
    ),
    "gemma2-attention": ("gemma2", {"head_dim": 12, "query_pre_attn_scalar": 12, "final_logit_softcapping": None}),
    "gemma4": (
        "gemma4_text",
        {
            **_GEMMA_4,
            "num_hidden_layers": 7,
            "layer_types": [*_LOCAL, "full_attention", *_LOCAL, "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma4-plain": (
        "gemma4_text",
        {
            **_GEMMA_4,
            "head_dim": 6,
            "global_head_dim": 10,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-vision": (
        "gemma4",
        {
            "model_type": "gemma4_text",
            **_GEMMA_4,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "initializer_range": 0.2,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 6,
        },
    ),
    "lfm2-taps": (
        "lfm2",
        {
            "conv_L_cache": 5,
            "num_hidden_layers": 3,
            "full_attn_idxs": [2],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5_text": ("qwen3_5_text", {**_QWEN3_5, "linear_num_value_heads": 6, "tie_word_embeddings": True}),
    "qwen3_5_text-sizes": (
        "qwen3_5_text",
        {
            **_QWEN3_5,
            "num_hidden_layers": 5,
            "layer_types": None,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 7,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "initializer_range": 0.25,
        },
    ),
    "qwen3_5-vision": (
        "qwen3_5",
        {"model_type": "qwen3_5_text", **_QWEN3_5, "linear_num_value_heads": 3, "tie_word_embeddings": False},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "starcoder2-untied": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, **rope("default", partial_rotary_factor=0.5)}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "tie_word_embeddings": True}),
    "phi": ("phi", {}),
    "phi-rotary": ("phi", {"num_key_value_heads": None, **rope("default", partial_rotary_factor=0.25)}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-serial": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5, "attention_bias": False}),
    "gpt_neox-tied-linear": ("gpt_neox", {"tie_word_embeddings": True, **rope("linear", factor=2.0)}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied-unscaled": ("gpt2", {"tie_word_embeddings": False, "scale_attn_weights": False, "n_inner": 24}),
    "gpt2-reordered": ("gpt2", {"reorder_and_upcast_attn": True, "activation_function": "gelu"}),
    "gptj": ("gptj", {}),
    "gptj-tied": ("gptj", {"tie_word_embeddings": True, "rotary_dim": 8}),
    "phi3": ("phi3", {"sliding_window": 6}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            **rope("longrope", short_factor=[1.0] * 3, long_factor=[1.0, 2.0, 3.0], partial_rotary_factor=0.75),
        },
    ),
}
_MOE = {"num_experts_per_tok": 3, "num_hidden_layers": 3}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("olmoe", {**_MOE, "num_experts": 5, "intermediate_size": 10, "num_key_value_heads": 4}),
    "olmoe-normalised": (
        "olmoe",
        {**_MOE, "num_experts": 8, "intermediate_size": 6, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**_MOE, "num_experts": 7, "moe_intermediate_size": 14, "head_dim": 10, "norm_topk_prob": True},
    ),
    "qwen3_moe-dense": (
        "qwen3_moe",
        {
            **_MOE,
            "num_hidden_layers": 5,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 14,
            "num_dense_layers": 1,
        },
    ),
    "lfm2_moe-plain": (
        "lfm2_moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "conv", "conv"],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    "granitemoe": (
        "granitemoe",
        {
            **_GRANITE_SCALES,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 10,
            "attention_bias": True,
        },
    ),
    "granitemoeshared": (
        "granitemoeshared",
        {**_GRANITE_SCALES, "num_local_experts": 8, "intermediate_size": 6, "shared_intermediate_size": 14},
    ),
    "granite4-experts": (
        "granitemoehybrid",
        {**_GRANITE_4, "num_local_experts": 6, "num_experts_per_tok": 4, "intermediate_size": 10},
    ),
    "granite4-hybrid-experts": (
        "granitemoehybrid",
        {
            **_GRANITE_4_H,
            "layer_types": ["mamba", "mamba", "attention"],
            "position_embedding_type": "rope",
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 6,
        },
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "hybrid_override_pattern": "MEM*E",
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
            "moe_shared_expert_intermediate_size": 14,
            "routed_scaling_factor": 2.5,
            "time_step_min": 1e-30,
        },
    ),
    "nemotron_h-mixed": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "hybrid_override_pattern": "E*-ME",
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "moe_shared_expert_intermediate_size": 10,
            "norm_topk_prob": False,
            "time_step_min": 0.7,
        },
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {
            **_QWEN3_5,
            "linear_num_value_heads": 6,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "shared_expert_intermediate_size": 14,
            "initializer_range": 0.2,
        },
    ),
    "qwen3_5_moe-vision": (
        "qwen3_5_moe",
        {
            "model_type": "qwen3_5_moe_text",
            **_QWEN3_5,
            "linear_num_value_heads": 3,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 6,
            "shared_expert_intermediate_size": 6,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_MOE,
            "num_local_experts": 5,
            "intermediate_size": 10,
            "head_dim": 12,
            "sliding_window": 5,
            "rope_parameters": {**_GPT_OSS_ROPE, "rope_theta": 50.0},
        },
    ),
    "gpt_oss-kinds": (
        "gpt_oss",
        {
            **_MOE,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "intermediate_size": 14,
            "head_dim": 8,
            "attention_bias": False,
            "sliding_window": 4,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "tie_word_embeddings": True,
        },
    ),
}
CASES |= MIXTURES
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 4, "head_dim": 8,
    "deepstack_visual_indexes": [0],
}  # fmt: skip


def tiny_config(case: str, **options: Any) -> Any:
    model_type, given = CASES[case]
    if "vocab_size" in options and "vocab_size_per_layer_input" in given:
        options["vocab_size_per_layer_input"] = options["vocab_size"]
    if case.endswith("-vision"):
        text = {**_LLAMA, "initializer_range": 0.3, "tie_word_embeddings": True, **given, **options}
        whole = transformers.AutoConfig.for_model(model_type).to_dict()["vision_config"]
        whole = whole or transformers.AutoConfig.for_model(f"{model_type}_vision").to_dict()
        vision = {key: value for key, value in _VISION.items() if key in whole}
        parts = {"text_config": text, "vision_config": {"model_type": whole["model_type"], **vision}}
        tied = text["tie_word_embeddings"]
        image = VOCAB if model_type == "gemma4" else 3  # Gemma 4 has another second embedding for it
        return transformers.AutoConfig.for_model(model_type, **parts, image_token_id=image, tie_word_embeddings=tied)
    sizes = dict(_SIZES.get(model_type, _LLAMA))
    if model_type == "gpt_neox":
        del sizes["num_key_value_heads"]
    return transformers.AutoConfig.for_model(model_type, **{**sizes, "initializer_range": 0.3, **given, **options})


def family_name(case: str) -> str:
    """Return the model_type of a case; of a vision-language model, its language model's."""
    return text_options(tiny_config(case).to_dict())["model_type"]


def tiny_model(case: str, **options: Any) -> Any:
    """Make the model of a case, float32, in eval mode, with random norms and biases."""
    torch.manual_seed(0)
    config = tiny_config(case, **options)
    model = auto_class(config).from_config(config).eval()
    if case in MIXTURES:
        model.set_experts_implementation("eager")  # the default needs rows of a multiple of 16 bytes
    offset = family_of(config.to_dict(), case).norm_offset
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and not is_skipped(name):
            parameter.data.uniform_(0.5 - offset, 1.5 - offset)
        if name.endswith("_proj_bias"):
            parameter.data.uniform_(-8, 8)  # beyond the clamps of gpt-oss
    for name, buffer in model.named_buffers():
        if name.endswith(("expert_bias", "e_score_correction_bias")):
            buffer.uniform_(-0.3, 0.3)
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    return model.requires_grad_(False)


@contextmanager
def own_precision(model: Any) -> Iterator[None]:
    """Compute in the model's precision where transformers uses float32: softmax, and the gated delta rule."""
    before = model.config._attn_implementation
    if model.config.model_type in ("gemma2", "granite_swa"):
        model.config._attn_implementation = "exact softmax"
    is_narrow = any(part in model.config.model_type for part in ("qwen3_5", "moe", "nemotron"))
    with contextlib.ExitStack() as patches:
        if is_narrow and model.dtype == torch.float64:
            for name in ("float32", "float"):
                patches.enter_context(patch.object(torch, name, torch.float64))
            patches.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield
    model.config._attn_implementation = before


def _exact_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, softcap: Any = None, s_aux: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("exact softmax", _exact_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("exact softmax", eager_mask)


def foreign_model() -> Any:
    """Make a model of a family that Whet does not support."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.AutoModelForCausalLM.from_config(transformers.OPTConfig(**sizes, word_embed_proj_dim=16))


def token_ids(n: int = 24) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(1))


def logits_of(model: Any, ids: torch.Tensor) -> np.ndarray:
    """Return transformers' logits (T, V)."""
    with torch.no_grad():
        return model(ids).logits[0].numpy()


def naive_logits(source: ModelSource, ids: torch.Tensor, dtype: Any = np.float32) -> np.ndarray:
    """Return the logits (T, V) of a source by the NumPy definition."""
    weights = naive_weights(source.config, source.slices(), dtype)
    return naive_forward(source.config, weights, ids[0].numpy())
