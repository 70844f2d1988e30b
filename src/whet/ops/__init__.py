"""Python functions over the native kernels, each with a NumPy reference implementation. Needs only NumPy."""

from whet.ops.activations import gelu, log_softmax, relu2, silu, softcap, softmax, swiglu
from whet.ops.advantages import compute_batch_group_advantages, compute_gae, compute_group_advantages
from whet.ops.attention import attention, decode_attention
from whet.ops.divergence import (
    compute_batch_token_kl,
    compute_batch_token_kl_f32,
    compute_batch_token_kl_schulman,
    compute_batch_token_kl_schulman_f32,
    compute_token_kl,
    compute_token_kl_f32,
    compute_token_kl_schulman,
    compute_token_kl_schulman_f32,
)
from whet.ops.kv_cache import kv_append, kv_gather
from whet.ops.linear import PackedWeight, gemm, gemv, linear, pack_weight
from whet.ops.logprobs import compute_token_logprobs
from whet.ops.lora import lora_accumulate, lora_forward
from whet.ops.micro_lora import LoRAStack, MicroLoRA, lora_batch
from whet.ops.norm import layer_norm, rms_norm
from whet.ops.packing import pack_sequences
from whet.ops.quant import Quantized, quantize
from whet.ops.rope import RotaryEmbedding, apply_rope, apply_rope_freqs, get_rope

__all__ = [
    "LoRAStack",
    "MicroLoRA",
    "PackedWeight",
    "Quantized",
    "RotaryEmbedding",
    "apply_rope",
    "apply_rope_freqs",
    "attention",
    "compute_batch_group_advantages",
    "compute_batch_token_kl",
    "compute_batch_token_kl_f32",
    "compute_batch_token_kl_schulman",
    "compute_batch_token_kl_schulman_f32",
    "compute_gae",
    "compute_group_advantages",
    "compute_token_kl",
    "compute_token_kl_f32",
    "compute_token_kl_schulman",
    "compute_token_kl_schulman_f32",
    "compute_token_logprobs",
    "decode_attention",
    "gelu",
    "gemm",
    "gemv",
    "get_rope",
    "kv_append",
    "kv_gather",
    "layer_norm",
    "linear",
    "log_softmax",
    "lora_accumulate",
    "lora_batch",
    "lora_forward",
    "pack_sequences",
    "pack_weight",
    "quantize",
    "relu2",
    "rms_norm",
    "silu",
    "softcap",
    "softmax",
    "swiglu",
]
