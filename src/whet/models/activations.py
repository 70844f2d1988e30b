"""Bytes of the tensors that the autograd functions of ``whet.nn`` save of each layer for the backward pass.

Per token and layer: the residual stream before each norm (float32), q, k and v, attention output and log-sum-exps,
rotary cosines and sines, and the inputs of the MLP's activation. Matmuls recompute their inputs from the saved inputs
of the preceding norm or activation, except after layer norms and single-input activations, whose outputs are saved.
torch saves B, C, x and two sums of a convolution in float32, its output, and to train the taps their inputs. The gated
delta rule saves its projections, and in float32 its results before and after the norm, and z. Mamba-2 also saves the
gated results, and to train the norm the normed ones. Frozen experts save their input; torch's own, which train, in
float32 for each expert of a token its input, gate and up, their activation and product (if clamped, three steps more;
without gates, the root of the activation and it), and its result. Routers save probabilities, and ids and weights of
the chosen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from whet.models.architecture import ModelConfig


def saved_bytes(model: ModelConfig, size: int, *, is_frozen: bool, is_fused: bool) -> list[int]:
    """Return the bytes per token of each layer.

    Args:
        model: the architecture.
        size: bytes of an operand of a product.
        is_frozen: whether only adapters train.
        is_fused: whether one module computes queries, keys and values.
    """
    return [_layer_bytes(model, i, size, is_frozen, is_fused) for i in range(model.n_layers)]


def count_kept(layers: Sequence[int], limit: int) -> int:
    """Return how many of the last layers, with these bytes each, fit into a limit."""
    return bisect_right(list(accumulate(reversed(layers), initial=0)), limit) - 1


def _layer_bytes(model: ModelConfig, i: int, size: int, is_frozen: bool, is_fused: bool) -> int:
    hidden, mixer = model.hidden_dim, model.mixer(i)
    n_norms = 1 if model.shared_norm else (mixer != "none") + model.has_mlp(i)
    read = 4 if model.pre_norm else size  # input of attention and MLP, or of their norm
    saved = n_norms * (read + (size if model.norm == "layer" else 0) + (size if model.post_norm else 0)) * hidden
    n_ffn = 4 if model.gated and model.activation != "silu" else 2  # torch keeps each operand of a gate
    saved += size * n_ffn * model.mlp_dim(i)
    if model.layer_input_dim:  # the inputs of both products and of the norm, and the gate; to train, also its operand
        saved += size * ((2 if is_frozen else 3) * model.layer_input_dim + 2 * hidden)
    if model.is_moe(i):
        k, expert = model.n_used_experts, model.expert_dim
        n_kept = 7 if model.activation == "clamped_swiglu" else 4 if model.gated else 2
        saved += size * hidden if is_frozen else k * 4 * (2 * hidden + n_kept * expert) + 4 * hidden
        saved += 4 * (model.n_experts + 3 * k)
    if mixer == "attention":
        return saved + _attention_bytes(model, i, size, is_fused)
    if mixer == "conv":
        return saved + (4 * (4 if is_frozen else 4 + model.conv_length) + size) * hidden
    if mixer == "delta":
        return saved + size * (model.delta_channels + 2 * model.n_delta_heads) + 4 * 3 * model.delta_values
    if mixer == "mamba":
        of_values = (4 * (3 if is_frozen else 4) + 2 * size) * model.delta_values
        return saved + size * (model.delta_channels + model.n_delta_heads) + of_values
    return saved


def _attention_bytes(model: ModelConfig, i: int, size: int, is_fused: bool) -> int:
    q, kv = model.n_heads * model.layer_head_dim(i), model.part_sizes(i)["k"]
    saved = size * (2 * q + 2 * kv) + 4 * model.n_heads
    if model.qk_norm:
        saved += size * (q + kv * (2 if model.v_norm else 1))
    if model.output_gate:  # its sigmoid and the product
        saved += size * 2 * q
    # The values are a view of the fused q, k and v.
    return saved + (size * (q + kv) if is_fused else 4 * model.rotary_dim)
