"""The definition of the transformer: slow and obvious, in NumPy, in the precision of its weights.

One sequence, no cache, every logit. Tests check the engine and every family against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from whet import _core
from whet.models.architecture import SWIGLU_LIMIT, SWIGLU_SLOPE, ModelConfig, RowSlice
from whet.models.formats import TABLE
from whet.ops.activations import naive_gelu, naive_relu2, naive_silu, naive_softcap, naive_softmax
from whet.ops.norm import naive_layer_norm, naive_rms_norm
from whet.ops.quant import bf16_values
from whet.ops.rope import naive_cos_sin_cache, naive_rope


def naive_forward(config: ModelConfig, weights: Mapping[str, np.ndarray], token_ids: Any) -> np.ndarray:
    """Return logits (T, V) of one sequence of T tokens.

    Args:
        config: the architecture.
        weights: slot -> float32 or float64 array, from ``naive_weights``.
        token_ids: (T,) integers.
    """
    tokens = np.asarray(token_ids)
    x = config.embedding_scale * weights["embedding"][tokens]
    if config.learned_positions:
        x = x + weights["positions"][: len(tokens)]
    inputs = _layer_inputs(config, weights, x, tokens) if config.layer_input_dim else None
    kv: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    scale = config.residual_scale
    for i in range(config.n_layers):
        layer = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        normed, attended = x, np.zeros_like(x)
        if (mixer := config.mixer(i)) != "none":
            normed = _norm(config, layer, "norm1", x)
            is_other = mixer in _MIXERS
            mixed = _MIXERS[mixer](config, layer, normed) if is_other else _attention(config, layer, normed, i, kv)
            attended = scale * _post_norm(config, layer, "post_norm1", mixed)
        if not config.has_mlp(i):
            x = x + attended
        elif config.parallel_residual:
            read = normed if config.shared_norm else _norm(config, layer, "norm2", x)
            x = x + attended + scale * _feed_forward(config, layer, read, i)
        else:
            x = x + attended
            fed = _feed_forward(config, layer, _norm(config, layer, "norm2", x), i)
            x = x + scale * _post_norm(config, layer, "post_norm2", fed)
        if inputs is not None:
            gated = naive_activation(config.activation, _linear(layer, "input_gate", x)) * inputs[:, i]
            x = x + _norm(config, layer, "input_norm", _linear(layer, "input_out", gated))
        x = x * layer["scale"] if config.layer_scale else x
    head = weights["embedding"] if config.tied_head else weights["head"]
    hidden = config.logits_scale * _norm(config, weights, "final_norm", x)
    logits = hidden @ head.T + weights.get("head.bias", x.dtype.type(0))
    return naive_softcap(logits, config.logits_softcap) if config.logits_softcap else logits


def naive_weights(config: ModelConfig, slices: Iterable[RowSlice], dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """Assemble slot -> array of all weights from slices; rows without a slice are NaN."""
    weights = {slot: np.full(shape, np.nan, dtype) for slot, shape in config.slots().items()}
    for row_slice in slices:
        rows = slice_values(row_slice)
        weights[row_slice.slot][row_slice.first_row : row_slice.first_row + len(rows)] = rows
    return weights


def slice_values(row_slice: RowSlice) -> np.ndarray:
    """Return the numbers of a slice as float32 (float64 for float64)."""
    if hasattr(row_slice.tensor, "detach"):
        tensor = row_slice.tensor.detach()
        return (tensor if row_slice.format == "float64" else tensor.float()).numpy()
    if row_slice.format == "bfloat16":
        return bf16_values(row_slice.tensor)
    format = TABLE[row_slice.format]
    if not format.is_float:
        n, row_bytes = row_slice.tensor.shape
        numbers = np.empty((n, row_bytes // format.block_bytes * format.block_length), np.float32)
        _core.dequantize_rows(stored_rows(row_slice), numbers)
        return numbers
    return np.asarray(row_slice.tensor, np.float64 if row_slice.format == "float64" else np.float32)


def memory_of(tensor: Any) -> tuple[int, tuple[int, ...]]:
    """Return the address of the first element, and the strides in elements."""
    if hasattr(tensor, "data_ptr"):
        return tensor.data_ptr(), tuple(tensor.stride())
    return tensor.ctypes.data, tuple(stride // tensor.itemsize for stride in tensor.strides)


def stored_rows(row_slice: RowSlice) -> _core.StoredRows:
    """Return the core's view of a slice: a matrix or one row. The slice must outlive it, unless its rows are joined."""
    tensor = row_slice.tensor.join() if hasattr(row_slice.tensor, "join") else row_slice.tensor
    address, strides = memory_of(tensor)
    *n, width = tensor.shape
    rows = _core.StoredRows(
        address=address,
        type=_core.StoredType[row_slice.format],
        n=n[0] if n else 1,
        width=width,
        row_stride=strides[0] if n else 0,
        column_stride=strides[-1],
    )
    rows.owner = tensor
    return rows


def _layer_inputs(
    config: ModelConfig, weights: Mapping[str, np.ndarray], x: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Return the inputs (T, n_layers, layer_input_dim) of the layers; see ``ModelConfig.layer_input_dim``."""
    shape = len(tokens), config.n_layers, config.layer_input_dim
    projected = (_linear(weights, "layer_inputs", x) / np.sqrt(x.dtype.type(config.hidden_dim))).reshape(shape)
    normed = naive_rms_norm(projected, weights["layer_inputs_norm.weight"], config.norm_eps)
    embedded = np.sqrt(x.dtype.type(config.layer_input_dim)) * weights["layer_embedding"][tokens].reshape(shape)
    return (normed + embedded) / np.sqrt(x.dtype.type(2))


def _post_norm(config: ModelConfig, layer: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return _norm(config, layer, name, x) if config.post_norm else x


def _norm(config: ModelConfig, weights: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    if f"{name}.weight" not in weights and not config.pre_norm:
        return x
    if config.norm == "rms":
        return naive_rms_norm(x, weights[f"{name}.weight"], config.norm_eps)
    return naive_layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], config.norm_eps)


def _linear(weights: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[name].T + weights.get(f"{name}.bias", x.dtype.type(0))


def _convolution(config: ModelConfig, layer: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Compute W_out (C conv(B x)) of a causal depthwise convolution."""
    b, c, u = np.split(_linear(layer, "conv_in", x), 3, axis=-1)
    return _linear(layer, "conv_out", c * _convolve(layer["conv"], b * u))


def _convolve(taps: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Convolve each channel of (T, C), with zeros before the first token; taps are (taps, C)."""
    inputs = np.pad(x, ((len(taps) - 1, 0), (0, 0)))
    return sum((tap * inputs[j : j + len(x)] for j, tap in enumerate(taps)), np.zeros_like(x))


def _delta(config: ModelConfig, layer: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Compute the gated delta rule, token by token, for each value head; see ``ModelConfig.mixers``."""
    n, n_heads, n_keys, dim = len(x), config.n_delta_heads, config.n_delta_key_heads, config.delta_key_dim
    ends = np.cumsum([config.delta_channels, config.delta_values, n_heads])
    qkv, z, b, a = np.split(_linear(layer, "delta_in", x), ends, axis=-1)
    qkv = naive_silu(_convolve(layer["conv"], qkv))
    q, k, v = np.split(qkv, [n_keys * dim, 2 * n_keys * dim], axis=-1)
    q, k = (_unit(part.reshape(n, n_keys, dim)) for part in (q, k))
    v, beta = v.reshape(n, n_heads, -1), _sigmoid(b)
    g = layer["decay"] * np.logaddexp(0, a + layer["dt_bias"])
    out = np.empty_like(v)
    for head in range(n_heads):
        key = head % n_keys if config.delta_tiled else head // (n_heads // n_keys)
        state = np.zeros((dim, config.delta_dim), x.dtype)
        for t in range(n):
            state = np.exp(g[t, head]) * state
            error = v[t, head] - k[t, key] @ state
            state = state + np.outer(k[t, key], beta[t, head] * error)
            out[t, head] = q[t, key] @ state / np.sqrt(x.dtype.type(dim))
    normed = naive_rms_norm(out, layer["delta_norm.weight"], config.norm_eps).reshape(n, -1)
    return _linear(layer, "delta_out", normed * naive_silu(z))


def _mamba(config: ModelConfig, layer: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Compute Mamba-2, token by token, for each value head; see ``ModelConfig.mixers``."""
    n, n_heads, n_keys, dim = len(x), config.n_delta_heads, config.n_delta_key_heads, config.delta_key_dim
    z, vkq, a = np.split(_linear(layer, "delta_in", x), [config.delta_values, -n_heads], axis=-1)
    vkq = naive_silu(_convolve(layer["conv"], vkq) + layer["conv_bias"])
    v, k, q = np.split(vkq, [config.delta_values, -n_keys * dim], axis=-1)
    q, k, v = q.reshape(n, n_keys, dim), k.reshape(n, n_keys, dim), v.reshape(n, n_heads, -1)
    step = np.maximum(np.logaddexp(0, a + layer["dt_bias"]), x.dtype.type(config.delta_step_min))
    out = np.empty_like(v)
    for head in range(n_heads):
        key = head // (n_heads // n_keys)
        state = np.zeros((dim, config.delta_dim), x.dtype)
        for t in range(n):
            state = np.exp(layer["decay"][head] * step[t, head]) * state
            state = state + np.outer(k[t, key], step[t, head] * v[t, head])
            out[t, head] = q[t, key] @ state + layer["skip"][head] * v[t, head]
    gated = (out.reshape(n, -1) * naive_silu(z)).reshape(n, n_keys, -1)
    weight = layer["delta_norm.weight"].reshape(n_keys, -1)
    normed = np.stack([naive_rms_norm(gated[:, j], weight[j], config.norm_eps) for j in range(n_keys)], axis=1)
    return _linear(layer, "delta_out", normed.reshape(n, -1))


def _unit(x: np.ndarray) -> np.ndarray:
    """Divide vectors by their length; the square of the length is increased by 1e-6."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(1e-6))


def _attention(
    config: ModelConfig,
    layer: Mapping[str, np.ndarray],
    x: np.ndarray,
    i: int,
    kv: dict[int, tuple[np.ndarray, np.ndarray]],
) -> np.ndarray:
    """Compute softmax(scale q k^T) v per head, causal, within the window of layer i.

    ``kv``: layer -> its keys and values after norms and rotation, to which this layer's are added.
    """
    window, source = config.windows[i], config.kv_layer(i)
    n, dim, group = len(x), config.layer_head_dim(i), config.n_heads // config.n_kv_heads
    ends = np.cumsum([size // dim for size in config.part_sizes(i).values()][:2])
    q, k, v = np.split(_linear(layer, "qkv", x).reshape(n, -1, dim), ends, axis=1)
    q, gate = (q[:, ::2], q[:, 1::2]) if config.output_gate else (q, None)
    if config.qk_norm_whole:
        q, k = (
            naive_rms_norm(part.reshape(n, -1), layer[name], config.norm_eps).reshape(part.shape)
            for name, part in (("q_norm.weight", q), ("k_norm.weight", k))
        )
    elif config.qk_norm and not config.qk_norm_rotated:
        q, k = _head_norms(config, layer, q, k)
    if config.v_norm:
        v = naive_rms_norm(v, np.ones(dim, x.dtype), config.norm_eps)
    positions = np.arange(n)
    if config.rotary_dim and (not config.rope_layers or config.rope_layers[i]):
        frequencies = (config.local_inv_freq, 1.0) if config.is_local(i) else (config.inv_freq, config.attention_factor)
        table = naive_cos_sin_cache(np.array(frequencies[0]), n, frequencies[1])
        q, k = (naive_rope(positions, part, dim, table, config.is_neox) for part in (q, k))
    if config.qk_norm_rotated:
        q, k = _head_norms(config, layer, q, k)
    if config.query_log_scale:
        factor = 1 + config.query_log_scale * np.log1p(positions // config.query_scale_length)
        q = q * factor[:, None, None].astype(q.dtype)
    if source == i:
        kv[i] = k, v
    k, v = kv[source]
    distance = positions[:, None] - positions
    mask = (distance >= 0) & ((distance < window) | (window == 0))
    out = np.empty_like(q)
    for head in range(config.n_heads):
        scores = config.attention_scale * (q[:, head] @ k[:, head // group].T)
        if config.attention_softcap:
            scores = naive_softcap(scores, config.attention_softcap)
        scores = np.where(mask, scores, -np.inf).astype(x.dtype)
        if config.sinks:
            scores = np.pad(scores, ((0, 0), (0, 1)), constant_values=layer["sinks"][head])
        out[:, head] = naive_softmax(scores)[:, :n] @ v[:, head // group]
    if gate is not None:
        out = out * _sigmoid(gate)
    return _linear(layer, "o", out.reshape(n, -1))


_MIXERS = {"conv": _convolution, "delta": _delta, "mamba": _mamba}


def _head_norms(config: ModelConfig, layer: Mapping[str, np.ndarray], *heads: np.ndarray) -> list[np.ndarray]:
    names = "q_norm.weight", "k_norm.weight"
    return [
        naive_rms_norm(x, layer[name], config.norm_eps) if x.size else x for x, name in zip(heads, names, strict=True)
    ]


def _feed_forward(config: ModelConfig, layer: Mapping[str, np.ndarray], x: np.ndarray, i: int) -> np.ndarray:
    """Compute the MLP of layer i, or its mixture of experts and the shared expert."""
    if not config.is_moe(i):
        return _mlp(config, layer, x)
    out = _mixture(config, layer, x)
    if not config.shared_dim:
        return out
    shared = _mlp(config, layer, x)
    return out + (_sigmoid(_linear(layer, "shared_router", x)) * shared if config.shared_gate else shared)


def _mixture(config: ModelConfig, layer: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Compute the weighted sum of each token's experts."""
    chosen, weights = naive_route(config, layer, x)
    matrices = {
        name.removeprefix("experts_"): w.reshape(config.n_experts, -1, *w.shape[1:])
        for name, w in layer.items()
        if name.startswith("experts_")
    }
    out = np.zeros_like(x)
    for t in range(len(x)):
        for expert, weight in zip(chosen[t], weights[t], strict=True):
            out[t] += weight * _mlp(config, {name: w[expert] for name, w in matrices.items()}, x[t])
    return out


def naive_route(config: ModelConfig, layer: Mapping[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts of each token, (T, n_used_experts) in descending order, and their weights.

    The first of several experts with the same score is chosen.

    Args:
        config: the architecture.
        layer: the weights of a layer by the last part of their slots.
        x: (T, hidden_dim), the input of the router.
    """
    logits = _linear(layer, "router", x)
    probabilities = naive_softmax(logits) if config.router == "softmax" else _sigmoid(logits)
    scores = probabilities + layer.get("router_correction", x.dtype.type(0))
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : config.n_used_experts]
    weights = np.take_along_axis(probabilities, chosen, axis=-1)
    if config.router_normalised:
        weights = weights / (weights.sum(-1, keepdims=True) + config.router_eps)
    return chosen, weights * config.router_scale


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _mlp(config: ModelConfig, layer: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate, up = np.split(_linear(layer, "gate_up", x), 2, axis=-1) if config.gated else (_linear(layer, "up", x), None)
    if up is not None and config.activation == "clamped_swiglu":
        gate, up = np.minimum(gate, SWIGLU_LIMIT), np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return _linear(layer, "down", gate * _sigmoid(SWIGLU_SLOPE * gate) * (up + 1))
    inner = naive_activation(config.activation, gate)
    return _linear(layer, "down", inner if up is None else inner * up)


def naive_activation(name: str, x: np.ndarray) -> np.ndarray:
    """Apply the activation of this name in ``ModelConfig``."""
    if name == "gelu_tanh":
        return naive_gelu(x, "tanh")
    return {"silu": naive_silu, "gelu": naive_gelu, "relu2": naive_relu2}[name](x)
