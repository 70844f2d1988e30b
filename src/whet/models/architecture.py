"""A decoder-only transformer as data: sizes and switches instead of code per model.

    x = embedding[tokens] (+ positions)
    per layer   x = x + attention(norm1(x));  x = x + mlp(norm2(x))
      mixers    conv, delta and mamba in place of attention in some layers (ModelConfig)
      one only  x = x + attention(norm1(x)), or x = x + mlp(norm2(x)), in layers without an MLP or without a mixer
      post_norm   x = x + post_norm1(attention(norm1(x))), and so on; without pre_norm there is no norm1, norm2
      parallel  x = x + attention(norm1(x)) + mlp(norm2(x))           shared_norm: mlp reads norm1(x)
      layer inputs   x = x + input_norm(W_out (act(W_gate x) * p)), p of the token and the layer (ModelConfig)
    logits = head(final_norm(x))

``whet.models.reference`` is the definition in NumPy. This module contains no Hugging Face or GGUF names (``families``,
``gguf``) and no weights: ``slots`` lists a model's weights by the names of the engine's core.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from whet.errors import WhetValueError

NORMS = ("rms", "layer")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu")
MIXERS = ("attention", "conv", "delta", "mamba", "none")
ROUTERS = ("softmax", "sigmoid")
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702
"""Bound of gates and up projections in "clamped_swiglu", and factor of gates in the sigmoid, as in cpp/kernels."""
SOFTCAPS = ("attention_softcap", "logits_softcap")

# Far above any model, and low enough that a malicious file cannot cause an unbounded loop or allocation.
LARGEST = {"n_layers": 1 << 12, "n_heads": 1 << 16, "n_kv_heads": 1 << 16, "head_dim": 1 << 14, "n_experts": 1 << 12}
LARGEST_SIZE = (1 << 31) - 1
LONGEST_CONV = 16
TABLE_SLOT = "layer_embedding"
"""A matrix that is not packed: its rows are read where they are stored."""
_NUMBERS = ("inv_freq", "local_inv_freq", "attention_factor", "norm_eps")
_SIZES = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "ffn_dim", "vocab_size", "max_position")


class RowSlice(NamedTuple):
    """Some rows of one weight, as stored in the source.

    Attributes:
        slot: name of the weight, one of ``ModelConfig.slots``.
        first_row: index in the slot of the first of these rows.
        tensor: NumPy or torch, not copied, any strides. (rows, k) numbers, or (rows,) for a norm or bias; in a
            quantised format (rows, bytes per row) uint8.
        format: a name in ``formats.TABLE``. A NumPy array of bfloat16 is uint16, the bits.
    """

    slot: str
    first_row: int
    tensor: Any
    format: str


@dataclass(frozen=True)
class ModelConfig:
    """The computation of a model, as sizes and switches.

    Attributes:
        max_position: tokens of the longest sequence, for which the rotary frequencies are resolved.
        norm: "rms" or "layer".
        rotary_dim: elements of a head that are rotated; 0: no rotary embedding.
        is_neox: pairs i with i + rotary_dim / 2, else 2i with 2i + 1.
        inv_freq: rotary_dim / 2 radians per position, after scaling.
        attention_factor: multiplies cosines and sines.
        learned_positions: rows of the position embedding; 0: none.
        parallel_residual: attention and MLP read the same x, and both outputs are added to it.
        shared_norm: with ``parallel_residual``, the MLP reads the norm of attention.
        pre_norm: attention and MLP read the norm of x, else x.
        post_norm: the outputs of attention and MLP are normalised before they are added to x.
        qk_norm: RMS norm over head_dim of every query and key head, before rotation.
        qk_norm_whole: this norm spans all query heads at once, and all key heads.
        qk_norm_rotated: this norm follows the rotation.
        v_norm: RMS norm over head_dim of every value head, without a weight; with ``qk_norm``, and not
            ``qk_norm_rotated`` or ``qk_norm_whole``.
        query_log_scale: b; a query at position p is multiplied by 1 + b log(1 + floor(p / query_scale_length)).
        query_scale_length: positions with the same factor.
        sinks: each head has a logit without a value: weights are e^s_j / (e^sink + sum over i of e^s_i) for scores s.
        activation: "silu", "gelu", "gelu_tanh" or "relu2"; or "clamped_swiglu" (gpt-oss), of gated MLPs only, which is
            g sigmoid(1.702 g) (u + 1) for g = min(gate x, 7) and u = up x, at most 7 and at least -7.
        gated: the MLP is down(act(gate x) * up x), else down(act(up x)).
        windows: per layer; 0: full causal attention, w: a query attends to itself and the w - 1 keys before it.
        attention_scale: multiplies query . key.
        attention_softcap: c; scores s become c tanh(s / c). 0: no soft-cap.
        logits_softcap: c; logits s become c tanh(s / c). 0: no soft-cap.
        rope_layers: per layer, whether queries and keys are rotated; (): in all layers.
        local_layers: per layer, whether it rotates by ``local_inv_freq`` (without attention_factor; as many radians
            as inv_freq, or half of ``local_head_dim``) and has heads of ``local_head_dim``; (): none.
        local_head_dim: elements of a head of these layers; 0: head_dim.
        n_shared_kv_layers: number of the last layers, which have no keys and values: they read another
            layer's, of the last one before them that is local if they are, and not if they are not.
        ffn_dims: per layer, the width of its MLP, 0: it has none; (): ffn_dim in all.
        layer_input_dim: numbers of a token's input p to each layer, 0: none. p = (norm(W x / sqrt(hidden_dim)) +
            sqrt(layer_input_dim) e) / sqrt(2), of x, the scaled embedding, and e, the token's row of a second table
            that has layer_input_dim numbers for each layer.
        layer_scale: the output of each layer is multiplied by a number.
        output_gate: every query head is followed by a gate, of head_dim rows; outputs are multiplied by its sigmoid.
        mixers: per layer, what mixes the tokens; (): attention in all.
            "conv": W_out (C conv(B u)), [B, C, u] = W_in norm1(x) (LFM2);
            "delta": the gated delta rule (Qwen3.5), W_out (norm(o) silu(z)), [qkv, z, b, a] = W_in norm1(x). Per
            value head o = S^T q / sqrt(delta_key_dim), S = e^g S' + k (beta (v - e^g S'^T k))^T for the state S' after
            the token before, of q, k, v = silu(conv(qkv)), q and k divided by their length, beta = sigmoid(b),
            g = decay softplus(a + dt_bias);
            "mamba": Mamba-2 (Granite 4 H, Nemotron-H), W_out norm((o + skip v) silu(z)), [z, vkq, a] = W_in norm1(x),
            with a norm over the value heads of each key head. o = S^T q, S = e^g S' + k (t v)^T, of v, k, q =
            silu(conv(vkq) + conv_bias), t = max(softplus(a + dt_bias), delta_step_min), g = decay t;
            "none": the layer has only an MLP, or a mixture of experts.
            Convolutions are causal and depthwise: y_t = sum over j of w_j x_(t - conv_length + 1 + j), with zeros
            before the sequence.
        conv_length: taps of the convolutions, 0 without any.
        n_delta_heads: value heads of "delta" and "mamba", of delta_dim numbers; 0 without such layers.
        n_delta_key_heads: key heads, of delta_key_dim numbers. Value head h reads key head
            h // (n_delta_heads / n_delta_key_heads).
        delta_step_min: see "mamba".
        delta_tiled: value head h reads key head h % n_delta_key_heads instead (GGUF).
        n_experts: experts of a mixture, which some layers have in place of the MLP; 0: none has.
        n_used_experts: experts of a token: those with the largest probability, plus the correction where a model has
            one; of equal ones, the first.
        expert_dim: width of an expert.
        shared_dim: width of the expert that all tokens have, ``gate_up`` and ``down``; 0: none.
        moe_layers: per layer, whether it has a mixture; (): all, if there are experts.
        shared_gate: the shared expert is multiplied by sigmoid(w . x).
        router: "softmax" or "sigmoid": probabilities of experts from their logits.
        router_normalised: the probabilities of a token's experts are divided by their sum + ``router_eps``.
        router_eps: see router_normalised.
        router_scale: multiplies the probabilities of a token's experts.
        router_bias: the router has a bias.
        router_correction: each expert has a number that is added to its probability for the choice only.
        experts_bias: the matrices of the experts have biases.
        embedding_scale: multiplies the embeddings.
        residual_scale: multiplies the outputs of attention and MLP.
        logits_scale: multiplies the logits.
        tied_head: the head is the embedding.
        qkv_bias: q, k and v have biases.
        o_bias: the output projection of attention has a bias.
        mlp_bias: the matrices of the MLP have biases.
        head_bias: the head has a bias.

    Raises:
        WhetValueError: a value is invalid.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    ffn_dim: int
    vocab_size: int
    max_position: int
    norm: str
    norm_eps: float
    windows: tuple[int, ...]
    attention_scale: float
    rotary_dim: int = 0
    is_neox: bool = True
    inv_freq: tuple[float, ...] = ()
    attention_factor: float = 1.0
    rope_layers: tuple[bool, ...] = ()
    local_layers: tuple[bool, ...] = ()
    local_inv_freq: tuple[float, ...] = ()
    local_head_dim: int = 0
    n_shared_kv_layers: int = 0
    ffn_dims: tuple[int, ...] = ()
    layer_input_dim: int = 0
    layer_scale: bool = False
    output_gate: bool = False
    mixers: tuple[str, ...] = ()
    conv_length: int = 0
    n_delta_heads: int = 0
    n_delta_key_heads: int = 0
    delta_dim: int = 0
    delta_key_dim: int = 0
    delta_step_min: float = 0.0
    delta_tiled: bool = False
    n_experts: int = 0
    n_used_experts: int = 0
    expert_dim: int = 0
    shared_dim: int = 0
    moe_layers: tuple[bool, ...] = ()
    shared_gate: bool = False
    router: str = "softmax"
    router_normalised: bool = False
    router_eps: float = 0.0
    router_scale: float = 1.0
    router_bias: bool = False
    router_correction: bool = False
    experts_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    learned_positions: int = 0
    parallel_residual: bool = False
    shared_norm: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qk_norm_rotated: bool = False
    v_norm: bool = False
    query_log_scale: float = 0.0
    query_scale_length: int = 1
    sinks: bool = False
    activation: str = "silu"
    gated: bool = True
    tied_head: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            _check_integer(name, getattr(self, name), 1, LARGEST.get(name, LARGEST_SIZE))
        _check_integer("learned_positions", self.learned_positions, 0, LARGEST_SIZE)
        if self.n_heads % self.n_kv_heads:
            raise _invalid("n_heads", self.n_heads, f"a multiple of n_kv_heads={self.n_kv_heads}")
        for name, known in (("norm", NORMS), ("activation", ACTIVATIONS), ("router", ROUTERS)):
            if getattr(self, name) not in known:
                raise _invalid(name, getattr(self, name), f"one of {', '.join(known)}")
        if self.activation == "clamped_swiglu" and not self.gated:
            raise _invalid("gated", False, "True with clamped_swiglu")
        _check_number("norm_eps", self.norm_eps, at_least=0.0)
        for name in ("attention_scale", "embedding_scale", "residual_scale", "logits_scale"):
            _check_number(name, getattr(self, name))
        for name in SOFTCAPS:
            _check_number(name, getattr(self, name), at_least=0.0)
        if len(self.windows) != self.n_layers:
            raise _invalid("windows", f"{len(self.windows)} numbers", f"one for each of n_layers={self.n_layers}")
        for window in self.windows:
            _check_integer("windows", window, 0, LARGEST_SIZE)
        if 0 < self.learned_positions < self.max_position:
            raise _invalid("max_position", self.max_position, f"at most learned_positions={self.learned_positions}")
        if self.shared_norm and not self.parallel_residual:
            raise _invalid("shared_norm", True, "False where parallel_residual is")
        if self.parallel_residual and (self.post_norm or not self.pre_norm):
            raise _invalid("post_norm", True, "False where parallel_residual is")
        for name in ("qk_norm_whole", "qk_norm_rotated"):
            if getattr(self, name) and not self.qk_norm:
                raise _invalid(name, True, "False where qk_norm is")
        for name in ("qk_norm_rotated", "output_gate"):
            if self.qk_norm_whole and getattr(self, name):
                raise _invalid(name, True, "False where qk_norm_whole is True")
        if self.v_norm and (not self.qk_norm or self.qk_norm_whole or self.qk_norm_rotated):
            raise _invalid("v_norm", True, "False unless qk_norm is of single heads before their rotation")
        _check_number("query_log_scale", self.query_log_scale, at_least=0.0)
        _check_integer("query_scale_length", self.query_scale_length, 1, LARGEST_SIZE)
        self._check_layers()
        self._check_rotary()
        self._check_mixers()
        self._check_experts()

    def _check_layers(self) -> None:
        _check_integer("local_head_dim", self.local_head_dim, 0, LARGEST["head_dim"] if self.local_layers else 0)
        if self.ffn_dims and len(self.ffn_dims) != self.n_layers:
            raise _invalid("ffn_dims", self.ffn_dims, f"one for each of n_layers={self.n_layers}, or none")
        for width in self.ffn_dims:
            _check_integer("ffn_dims", width, 0, LARGEST_SIZE)
        _check_integer("layer_input_dim", self.layer_input_dim, 0, LARGEST_SIZE // self.n_layers)
        if self.layer_input_dim and (not self.gated or self.norm != "rms" or self.parallel_residual):
            raise _invalid("layer_input_dim", self.layer_input_dim, "0 without gated MLPs, RMS norms and two residuals")
        if self.layer_scale and self.parallel_residual:
            raise _invalid("layer_scale", True, "False where parallel_residual is True")
        _check_integer("n_shared_kv_layers", self.n_shared_kv_layers, 0, self.n_layers - 1)
        if self.n_shared_kv_layers and (self.output_gate or self.qk_norm_whole or self.mixers):
            raise _invalid("n_shared_kv_layers", self.n_shared_kv_layers, "0 in a model with other mixers or gates")
        n_own = self.n_layers - self.n_shared_kv_layers
        if not set(self.local_layers[n_own:]) <= set(self.local_layers[:n_own]):
            raise _invalid("n_shared_kv_layers", self.n_shared_kv_layers, "fewer: no layer has their keys and values")

    def _check_mixers(self) -> None:
        if self.mixers and (len(self.mixers) != self.n_layers or not set(self.mixers) <= set(MIXERS)):
            raise _invalid("mixers", self.mixers, f"n_layers={self.n_layers} of {', '.join(MIXERS)}, or none")
        kinds = {*self.mixers} - {"none"}
        has_conv, has_delta = not kinds <= {"attention"}, not kinds <= {"attention", "conv"}
        _check_integer("conv_length", self.conv_length, int(has_conv), LONGEST_CONV if has_conv else 0)
        for name in ("n_delta_heads", "n_delta_key_heads", "delta_dim", "delta_key_dim"):
            _check_integer(name, getattr(self, name), int(has_delta), LARGEST["n_heads"] if has_delta else 0)
        if has_delta and self.n_delta_heads % self.n_delta_key_heads:
            raise _invalid(
                "n_delta_heads", self.n_delta_heads, f"a multiple of n_delta_key_heads={self.n_delta_key_heads}"
            )
        _check_number("delta_step_min", self.delta_step_min, at_least=0.0)
        if self.delta_step_min and "mamba" not in kinds:
            raise _invalid("delta_step_min", self.delta_step_min, "0 without layers of mamba")

    def _check_experts(self) -> None:
        has_experts = self.n_experts > 0
        _check_integer("n_experts", self.n_experts, 0, LARGEST["n_experts"])
        _check_integer("n_used_experts", self.n_used_experts, int(has_experts), self.n_experts)
        _check_integer("expert_dim", self.expert_dim, int(has_experts), LARGEST_SIZE if has_experts else 0)
        _check_integer("shared_dim", self.shared_dim, 0, LARGEST_SIZE if has_experts else 0)
        if self.moe_layers and (len(self.moe_layers) != self.n_layers or not set(self.moe_layers) <= {True, False}):
            raise _invalid("moe_layers", self.moe_layers, f"n_layers={self.n_layers} of true and false, or none")
        if self.moe_layers and not has_experts:
            raise _invalid("moe_layers", self.moe_layers, "none without n_experts")
        if self.shared_gate and not self.shared_dim:
            raise _invalid("shared_gate", True, "False where shared_dim is 0")
        for name in ("router_eps", "router_scale"):
            _check_number(name, getattr(self, name), at_least=0.0)
        for i in range(self.n_layers):
            if self.mixer(i) != "none" and self.has_mlp(i):
                continue
            if self.mixer(i) == "none" and not self.has_mlp(i):
                raise _invalid("mixers", self.mixers, f"a mixer or an MLP in layer {i}")
            if self.parallel_residual or self.layer_input_dim or self.layer_scale:
                raise _invalid("mixers", self.mixers, "a mixer and an MLP in each layer of this kind")

    def _check_rotary(self) -> None:
        _check_integer("rotary_dim", self.rotary_dim, 0, self.head_dim)
        if self.rotary_dim % 2:
            raise _invalid("rotary_dim", self.rotary_dim, "an even number: elements are rotated in pairs")
        if len(self.inv_freq) != self.rotary_dim // 2:
            raise _invalid("inv_freq", f"{len(self.inv_freq)} numbers", f"{self.rotary_dim // 2}, one for each pair")
        for frequency in self.inv_freq:
            _check_number("inv_freq", frequency)
        _check_number("attention_factor", self.attention_factor)
        for name in ("rope_layers", "local_layers"):
            layers = getattr(self, name)
            if layers and (len(layers) != self.n_layers or not set(layers) <= {True, False}):
                raise _invalid(name, layers, f"n_layers={self.n_layers} of true and false, or none")
        n_local = (self.local_head_dim // 2 or len(self.inv_freq)) if self.local_layers else 0
        if len(self.local_inv_freq) != n_local or self.local_head_dim % 2:
            raise _invalid("local_inv_freq", f"{len(self.local_inv_freq)} numbers", f"{n_local}, one for each pair")
        for frequency in self.local_inv_freq:
            _check_number("local_inv_freq", frequency)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return self.n_experts > 0 and (not self.moe_layers or self.moe_layers[layer])

    def mlp_dim(self, layer: int) -> int:
        """Return the width of a layer's MLP, or of its shared expert; 0: none."""
        return self.shared_dim if self.is_moe(layer) else self.ffn_dims[layer] if self.ffn_dims else self.ffn_dim

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or a mixture of experts."""
        return self.is_moe(layer) or self.mlp_dim(layer) > 0

    def is_local(self, layer: int) -> bool:
        """Whether a layer rotates by ``local_inv_freq``."""
        return bool(self.local_layers) and self.local_layers[layer]

    def layer_head_dim(self, layer: int) -> int:
        """Return the elements of a head of a layer."""
        return self.local_head_dim if self.local_head_dim and self.is_local(layer) else self.head_dim

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        n_own = self.n_layers - self.n_shared_kv_layers
        if layer < n_own:
            return layer
        return max(i for i in range(n_own) if self.is_local(i) == self.is_local(layer))

    def part_sizes(self, layer: int) -> dict[str, int]:
        """Return the rows of a layer's queries (with gates), keys and values; 0: it reads another layer's."""
        dim, has_own = self.layer_head_dim(layer), self.kv_layer(layer) == layer
        kv = self.n_kv_heads * dim if has_own else 0
        return {"q": (2 if self.output_gate else 1) * self.n_heads * dim, "k": kv, "v": kv}

    def mixer(self, layer: int) -> str:
        """Return what mixes the tokens in a layer, one of ``MIXERS``."""
        return self.mixers[layer] if self.mixers else "attention"

    @property
    def n_moe_layers(self) -> int:
        """Number of layers that are mixtures of experts."""
        return sum(map(self.is_moe, range(self.n_layers)))

    @property
    def delta_values(self) -> int:
        """Numbers of all value heads of "delta" and "mamba"."""
        return self.n_delta_heads * self.delta_dim

    @property
    def delta_channels(self) -> int:
        """Channels of the convolution of "delta" and "mamba": queries, keys and values."""
        return 2 * self.n_delta_key_heads * self.delta_key_dim + self.delta_values

    def slots(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every weight: matrices (outputs, inputs), norms and biases (n,)."""
        hidden = self.hidden_dim
        values, channels = self.delta_values, self.delta_channels
        found: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, hidden)}
        if self.learned_positions:
            found["positions"] = (self.learned_positions, hidden)
        norms = ["norm1"] if self.shared_norm else ["norm1", "norm2"] if self.pre_norm else []
        norms += ["post_norm1", "post_norm2"] if self.post_norm else []
        n_normed = (self.n_heads, self.n_kv_heads) if self.qk_norm_whole else (1, 1)
        parts = ("weight", "bias") if self.norm == "layer" else ("weight",)
        up, per_dim = ("gate_up", 2) if self.gated else ("up", 1)
        matrices = {
            "none": (),
            "conv": (("conv_in", 3 * hidden, hidden, False), ("conv_out", hidden, hidden, False)),
            "delta": (
                ("delta_in", channels + values + 2 * self.n_delta_heads, hidden, False),
                ("delta_out", hidden, values, False),
            ),
            "mamba": (
                ("delta_in", channels + values + self.n_delta_heads, hidden, False),
                ("delta_out", hidden, values, False),
            ),
        }
        experts = (
            ("router", self.n_experts, hidden, self.router_bias),
            (f"experts_{up}", self.n_experts * per_dim * self.expert_dim, hidden, self.experts_bias),
            ("experts_down", self.n_experts * hidden, self.expert_dim, self.experts_bias),
            *((("shared_router", 1, hidden, False),) if self.shared_gate else ()),
        )
        if self.layer_input_dim:
            n_inputs = self.n_layers * self.layer_input_dim
            found |= {TABLE_SLOT: (self.vocab_size, n_inputs), "layer_inputs": (n_inputs, hidden)}
            found["layer_inputs_norm.weight"] = (self.layer_input_dim,)
        for i in range(self.n_layers):
            layer, dim, parts_of_qkv = f"layers.{i}.", self.layer_head_dim(i), self.part_sizes(i)
            mixer = self.mixer(i)
            halves = {"1": mixer != "none", "2": self.has_mlp(i)}
            found |= {f"{layer}{norm}.{part}": (hidden,) for norm in norms if halves[norm[-1]] for part in parts}
            if mixer not in ("attention", "none"):
                found[f"{layer}conv"] = (self.conv_length, hidden if mixer == "conv" else channels)
            elif mixer == "attention" and self.qk_norm:
                for which, heads in zip("qk", n_normed, strict=True):
                    if parts_of_qkv[which]:
                        found[f"{layer}{which}_norm.weight"] = (heads * dim,)
            if mixer in ("delta", "mamba"):
                found |= {f"{layer}{name}": (self.n_delta_heads,) for name in ("decay", "dt_bias")}
                found[f"{layer}delta_norm.weight"] = (self.delta_dim if mixer == "delta" else values,)
            if mixer == "mamba":
                found |= {f"{layer}conv_bias": (channels,), f"{layer}skip": (self.n_delta_heads,)}
            if self.layer_scale:
                found[f"{layer}scale"] = (1,)
            if self.layer_input_dim:
                found[f"{layer}input_gate"] = (self.layer_input_dim, hidden)
                found[f"{layer}input_out"] = (hidden, self.layer_input_dim)
                found[f"{layer}input_norm.weight"] = (hidden,)
            if self.sinks and mixer == "attention":
                found[f"{layer}sinks"] = (self.n_heads,)
            is_moe = self.is_moe(i)
            if is_moe and self.router_correction:
                found[f"{layer}router_correction"] = (self.n_experts,)
            width = self.mlp_dim(i)
            mlp = (up, per_dim * width, hidden, self.mlp_bias), ("down", hidden, width, self.mlp_bias)
            attention = (
                ("qkv", sum(parts_of_qkv.values()), hidden, self.qkv_bias),
                ("o", hidden, self.n_heads * dim, self.o_bias),
            )
            for name, rows, columns, biased in (
                *(matrices[mixer] if mixer != "attention" else attention),
                *(experts if is_moe else ()),
                *(mlp if width else ()),
            ):
                found[layer + name] = (rows, columns)
                if biased:
                    found[f"{layer}{name}.bias"] = (rows,)
        found |= {f"final_norm.{part}": (hidden,) for part in parts}
        if not self.tied_head:
            found["head"] = (self.vocab_size, hidden)
        if self.head_bias:
            found["head.bias"] = (self.vocab_size,)
        return found

    @property
    def n_parameters(self) -> int:
        """Number of parameters; a shared weight counts once."""
        return sum(math.prod(shape) for shape in self.slots().values())

    @property
    def n_active_parameters(self) -> int:
        """Number of parameters that a token uses: of the experts, and of the inputs of layers, only its own."""
        rest = (self.vocab_size - 1) * self.n_layers * self.layer_input_dim
        experts = sum(math.prod(shape) for slot, shape in self.slots().items() if ".experts_" in slot)
        return (
            self.n_parameters
            - rest
            - (experts // self.n_experts * (self.n_experts - self.n_used_experts) if experts else 0)
        )


def find_difference(a: ModelConfig, b: ModelConfig) -> str | None:
    """Return the first field in which two models differ; frequencies may differ by rounding to float32."""
    for field in dataclasses.fields(ModelConfig):
        x, y = getattr(a, field.name), getattr(b, field.name)
        is_number = field.name in _NUMBERS or field.name.endswith(("_scale", "_softcap"))
        is_close = is_number and np.shape(x) == np.shape(y)
        if not (np.allclose(x, y, rtol=1e-5, atol=0) if is_close else x == y):
            return field.name
    return None


def _invalid(name: str, got: Any, expected: str) -> WhetValueError:
    return WhetValueError(f"ModelConfig: {name} is {got!r:.80}, expected {expected}.".replace("'", ""))


def _check_integer(name: str, value: Any, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise _invalid(name, value, f"an integer from {lowest} to {highest}")


def _check_number(name: str, value: Any, at_least: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf or value < at_least:
        limit = "" if at_least == -math.inf else f" of at least {at_least:g}"
        raise _invalid(name, value, f"a finite number{limit}")
