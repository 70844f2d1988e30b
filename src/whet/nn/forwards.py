"""Forwards that replace the modules' own, and the attention function for transformers; see ``accelerate``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from whet.errors import WhetValueError
from whet.learner.batch import PackedBatch
from whet.models.sources.module_code import ACTIVATION_NAMES, forward_code
from whet.nn import functions
from whet.nn.frozen import FrozenExperts, FrozenLinear, expert_parameters, special_adapters
from whet.nn.replay import is_router
from whet.nn.scratch import cast_weight

if TYPE_CHECKING:
    from whet.nn.accelerate import Acceleration

NAME = "whet"
"""Name of the attention function."""


def choose_forward(acceleration: Acceleration, module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that replaces a module's forward; None: the forward stays."""
    kind = type(module).__name__
    if type(module) in (FrozenLinear, nn.Linear) or kind == "Conv1D" or is_lora(module):
        return partial(_linear, acceleration, module, module.forward)
    if type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq:
        return partial(_embedding, acceleration, module)
    if kind.endswith("RMSNorm"):
        return partial(_rms_norm, acceleration, module)
    if is_gated(module) and _is_silu(get_activation(module)):
        is_split = any(hasattr(module, names[0]) for names in _SPLIT)
        return partial(_swiglu if is_split else _swiglu_fused, acceleration, module)
    if is_router(module):
        return partial(_router, module.forward)
    if is_experts(module):
        return partial(_experts, acceleration, module, module.forward)
    packed = _choose_mixer(acceleration, module)
    return None if packed is None else partial(_mix, partial(packed, acceleration, module), module.forward)


def _choose_mixer(acceleration: Acceleration, module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that mixes the tokens of a packed batch in place of a module's forward."""
    kind = type(module).__name__
    if kind.endswith("ShortConv"):
        return _short_conv
    if kind.endswith("GatedDeltaNet"):
        return _gated_delta_net
    if kind.endswith(("MambaLayer", "Mamba2Mixer")):
        return _mamba
    if is_legacy_gptj(module):
        return _gptj_attention
    if kind.endswith("Attention") and hasattr(module, "q_proj"):
        family = acceleration.family
        rotates_whole = not family.partial_rotary or _is_output_gated(module)
        is_plain = family.rope in ("neox", "pairs", "none") and rotates_whole and not family.query_scale
        if is_plain and not getattr(module, "residual_dropout", 0):
            return _attention
    return None


def _mix(packed: Callable[..., Any], original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``packed`` with the batch that an argument carries, or the module's own forward without such a batch."""
    batch = next((x.whet_batch for x in (*args, *options.values()) if hasattr(x, "whet_batch")), None)
    return original(*args, **options) if batch is None else packed(batch, *args, **options)


def check_master(weight: Tensor) -> None:
    """Raise a WhetValueError if a weight is no longer float32 on the CPU."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise WhetValueError(
            f"accelerate: a weight of shape {tuple(weight.shape)} has become {weight.dtype} on {weight.device}, "
            "expected float32 on the CPU. Call remove() before the model is converted, or convert it back."
        )


def uses_attention_interface(module: nn.Module) -> bool:
    """Whether an attention module looks up its function by the config's ``_attn_implementation``."""
    return (
        type(module).__name__.endswith("Attention")
        and hasattr(getattr(module, "config", None), "model_type")
        and "ALL_ATTENTION_FUNCTIONS" in forward_code(module).co_names
    )


def is_legacy_gptj(module: nn.Module) -> bool:
    """Whether this is GPT-J's attention of transformers before 5.24, which does not look up a function."""
    return type(module).__name__ == "GPTJAttention" and hasattr(module, "embed_positions")


_SPLIT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the matrices of gate, up and down."""
_FUSED = {"gate_up_proj": "down_proj", "input_linear": "output_linear"}
"""Name of the matrix of gate and up -> name of the other matrix, in MLPs that have one matrix for both."""


def is_gated(module: nn.Module) -> bool:
    names = [names[0] for names in _SPLIT] + [*_FUSED]
    return type(module).__name__.endswith("MLP") and any(hasattr(module, name) for name in names)


def get_activation(module: Any) -> Any:
    """Return the activation of an MLP; None if it has another name. LFM2's MLP, with w1, calls silu as a function."""
    found = next((getattr(module, name) for name in ACTIVATION_NAMES if hasattr(module, name)), None)
    return nn.SiLU() if found is None and hasattr(module, "w1") else found


def _is_silu(activation: Any) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _embedding(acceleration: Acceleration, module: Any, input: Tensor) -> Tensor:
    return functions.embedding(input, module.weight, module.padding_idx, acceleration.in_place)


def _linear(
    acceleration: Acceleration, module: Any, original: Callable[..., Any], x: Tensor, *args: Any, **options: Any
) -> Tensor:
    product = None if args or options else acceleration.product(module, x)  # options: PEFT's adapter_names, ...
    if product is not None:
        return functions.linears(x, [product], acceleration.dtype, acceleration.in_place)[0]
    if args or options or is_lora(module):
        return original(x, *args, **options)
    return functions.rounded_linear(x, module.weight, module.bias, by_columns=type(module) is not nn.Linear)


def is_lora(module: Any) -> bool:
    """Whether this is PEFT's LoRA around a linear layer."""
    kind = type(module)
    return kind.__name__ == "Linear" and kind.__module__ == "peft.tuners.lora.layer"


def split_adapters(module: Any) -> tuple[Any, tuple[functions.Adapter, ...] | None]:
    """Return a linear layer and the active adapters of PEFT's layer around it; None: only PEFT can compute them."""
    if not is_lora(module):
        return module, ()
    if module.disable_adapters and module.merged:
        module.unmerge()  # as PEFT's own forward does
    if module.disable_adapters or module.merged:
        return module.base_layer, ()
    if special_adapters(module):
        return module.base_layer, None
    names = [name for name in module.active_adapters if name in module.lora_A]
    return module.base_layer, tuple(
        functions.Adapter(
            module.lora_A[name].weight,
            module.lora_B[name].weight,
            module.scaling[name],
            getattr(module.lora_dropout[name], "p", 0.0) if module.training else 0.0,
        )
        for name in names
    )


def _rms_norm(acceleration: Acceleration, module: Any, hidden_states: Tensor) -> Tensor:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    if getattr(module, "weight", None) is None:  # Gemma 4's norm of values
        return functions.rms_norm(hidden_states, torch.ones(hidden_states.shape[-1]), eps, acceleration.dtype)
    check_master(module.weight)
    weight = module.weight + acceleration.norm_offset if acceleration.norm_offset else module.weight
    return functions.rms_norm(hidden_states, weight, eps, acceleration.dtype)


def _swiglu(acceleration: Acceleration, module: Any, x: Tensor) -> Tensor:
    [names] = [names for names in _SPLIT if hasattr(module, names[0])]
    gate, up, down = (getattr(module, name) for name in names)
    return down(functions.swiglu(*acceleration.linears(x, gate, up)))


def _swiglu_fused(acceleration: Acceleration, module: Any, hidden_states: Tensor) -> Tensor:
    [names] = [names for names in _FUSED.items() if hasattr(module, names[0])]
    gate_up, down = (getattr(module, name) for name in names)
    return down(functions.swiglu(*gate_up(hidden_states).chunk(2, dim=-1)))


def _router(original: Callable[..., Any], hidden_states: Tensor, *args: Any) -> Any:
    """The module's own router, in float32: small differences would change the experts."""
    return original(hidden_states.float(), *args)


def is_experts(module: Any) -> bool:
    """Whether these are the experts of a mixture, in float parameters or packed, perhaps inside PEFT's wrappers."""
    while hasattr(module, "parameter_name"):
        module = module.base_layer
    return type(module).__name__.endswith("Experts") and len(expert_parameters(module)) == 2


def _experts(
    acceleration: Acceleration,
    module: Any,
    original: Callable[..., Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Experts of a mixture without their activations, if they are frozen; else the module's own, in float32."""
    adapters: dict[str, tuple[Tensor, Tensor] | None] = {}
    while hasattr(module, "parameter_name"):
        adapters[module.parameter_name] = _expert_factors(module)
        module = module.base_layer
    names = expert_parameters(module)
    dtype, activation = acceleration.dtype, _expert_activation(module)
    factors = functions.ExpertAdapters(*map(adapters.get, names))
    if activation == "clamped_swiglu" and factors.gate_up is not None:
        a, b = factors.gate_up
        factors = factors._replace(gate_up=(a, _split_pairs(b)))
    if isinstance(module, FrozenExperts):
        weights = module.weights(dtype)
        return functions.experts(hidden_states, top_k_index, top_k_weights.float(), weights, dtype, factors)
    gate_up, down = (getattr(module, name) for name in names)
    if any(weight.requires_grad for weight in module.parameters()) or not activation:
        return original(hidden_states.float(), top_k_index, top_k_weights)
    if (
        activation == "clamped_swiglu"
    ):  # gpt-oss, whose matrices are (inputs, outputs), and in which gate and up alternate
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    read_up, read_down = (partial(_expert_weight, matrix, dtype) for matrix in (gate_up, down))
    weights = functions.ExpertWeights(read_up, read_down, activation=activation)
    if activation == "clamped_swiglu":
        biases = _split_pairs(module.gate_up_proj_bias[..., None])[..., 0], module.down_proj_bias
        weights = functions.ExpertWeights(lambda e: _split_pairs(read_up(e)), read_down, *biases, activation)
    return functions.experts(hidden_states, top_k_index, top_k_weights, weights, dtype, factors)


def _expert_activation(module: Any) -> str:
    """Return one of ``EXPERT_ACTIVATIONS``; "": the experts have another activation."""
    if isinstance(module, FrozenExperts):
        return module.activation
    if hasattr(module, "gate_up_proj_bias"):
        return "clamped_swiglu"
    is_gated = hasattr(module, "gate_up_proj")
    if is_gated and _is_silu(module.act_fn):
        return "silu"
    return "relu2" if not is_gated and type(module.act_fn).__name__ == "ReLUSquaredActivation" else ""


def _expert_factors(wrapper: Any) -> tuple[Tensor, Tensor] | None:
    """Return the active adapters of PEFT's wrapper as one: A (E, r, inputs), B (E, outputs, r); None: none."""
    if wrapper.disable_adapters and wrapper.merged:
        wrapper.unmerge()  # as PEFT's own forward does
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if wrapper.disable_adapters or wrapper.merged or not names:
        return None
    n = wrapper.num_experts
    a = [wrapper.lora_A[name].weight.unflatten(0, (n, -1)) for name in names]
    b = [wrapper.scaling[name] * wrapper.lora_B[name].weight.unflatten(1, (-1, n)).permute(2, 0, 1) for name in names]
    return torch.cat(a, 1), torch.cat(b, 2)


def _expert_weight(matrices: Tensor, dtype: torch.dtype, expert: int) -> Tensor:
    check_master(matrices)
    return cast_weight(matrices[expert], dtype)


def _split_pairs(rows: Tensor) -> Tensor:
    """Return the rows (..., 2 F, K) with all gates first, of which gate and up alternate."""
    return torch.cat((rows[..., ::2, :], rows[..., 1::2, :]), -2)


def _reject_dropout(dropout: float) -> None:
    if dropout:
        raise WhetValueError(
            f"accelerate: attention dropout is {dropout}, which packed attention does not support. Call model.eval(), "
            "or set it to 0 in the config."
        )


def wrap_batch(batch: PackedBatch) -> Tensor:
    """Return a mask that carries the batch to every attention module: models pass 4-D masks on unchanged."""
    mask = torch.full((1, 1, 1, 1), torch.nan)  # an attention that adds the mask returns NaN, which is noticed
    mask.whet_batch = batch  # pyright: ignore[reportAttributeAccessIssue]
    return mask


def _attention(
    acceleration: Acceleration,
    module: Any,
    batch: PackedBatch,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Attention of a packed batch with separate projections (Llama, Mistral, Qwen).

    ``shared_kv_states``: kind of layer -> its last own keys and values, which later layers read (Gemma 4).
    """
    _reject_dropout(getattr(module, "attention_dropout", 0.0) if module.training else 0.0)
    q, *own = _project(acceleration, module, hidden_states)
    k, v = own or (None, None)
    gate = None
    if _is_output_gated(module):  # after each query head
        q, gate = q.unflatten(1, (-1, 2)).unbind(2)
    family, layer = acceleration.family, module.layer_idx
    norms = [getattr(module, name) for name in family.head_norms if hasattr(module, name)]
    norms_rotated = bool(family.settings.get("qk_norm_rotated"))
    heads = [q] if k is None else [q, k]
    if norms and not norms_rotated:
        heads = list(map(_norm_heads, norms, heads))
    if position_embeddings is not None and (not acceleration.rotated_layers or acceleration.rotated_layers[layer]):
        # gpt-oss has a cosine for each pair, other models for each element, in some of a part of a head.
        width = position_embeddings[0].shape[-1] if family.partial_rotary else q.shape[-1]
        table, is_neox = _rope_table(width // 2, *position_embeddings), family.rope == "neox"
        heads = [functions.rope(each, table, is_neox=is_neox) for each in heads]
    if norms and norms_rotated:
        heads = list(map(_norm_heads, norms, heads))
    q, kv = heads[0], (heads[-1], module.v_norm(v) if hasattr(module, "v_norm") and v is not None else v)
    if k is None:
        kv = options["shared_kv_states"][module.layer_type]
    elif getattr(module, "store_full_length_kv", False):
        options["shared_kv_states"][module.layer_type] = kv
    window = acceleration.windows[layer] or None
    sinks = getattr(module, "sinks", None)
    key, value = cast(tuple[Tensor, Tensor], kv)
    out = functions.attention(q, key, value, batch, module.scaling, window, acceleration.attention_softcap, sinks)
    if gate is not None:
        out = out * gate.sigmoid()
    output = module.o_proj if hasattr(module, "o_proj") else module.out_proj
    return output(out.view(1, len(q), -1)), None


def _is_output_gated(module: Any) -> bool:
    """Whether ``q_proj`` has a gate for each result of attention, whose sigmoid multiplies it (Qwen3.5)."""
    return hasattr(module, "o_proj") and module.q_proj.out_features == 2 * module.o_proj.in_features


def _gated_delta_net(
    acceleration: Acceleration, module: Any, batch: PackedBatch, hidden_states: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Gated delta rule over the sequences of a packed batch (Qwen3.5)."""
    d = module.head_k_dim

    def mix(qkv: Tensor, b: Tensor, a: Tensor, taps: Tensor, log_rate: Tensor, dt_bias: Tensor) -> Tensor:
        mixed = nn.functional.silu(functions.short_conv(qkv[0].float(), taps.squeeze(1), batch))
        q, k, v = mixed.split((module.key_dim, module.key_dim, module.value_dim), 1)
        q, k = (  # x / |x| is an RMS norm with the weight 1 / sqrt(d)
            functions.rms_norm(x.unflatten(1, (-1, d)), torch.full((d,), d**power), _LENGTH_EPS / d, torch.float32)
            for x, power in ((q, -1.0), (k, -0.5))
        )
        log_decay = -log_rate.exp() * nn.functional.softplus(a[0].float() + dt_bias)
        v = v.unflatten(1, (-1, module.head_v_dim))
        return functions.gated_delta_rule(q, k, v, log_decay, b[0].float().sigmoid(), batch)

    projections = module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a
    qkv, z, b, a = acceleration.linears(hidden_states, *projections)
    out = functions.recompute(mix, qkv, b, a, module.conv1d.weight, module.A_log, module.dt_bias)
    normed = functions.rms_norm(out, module.norm.weight, module.norm.variance_epsilon, torch.float32)
    return module.out_proj(functions.swiglu(z, normed.view(z.shape)))


def _mamba(
    acceleration: Acceleration, module: Any, batch: PackedBatch, hidden_states: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Mamba-2 over the sequences of a packed batch (Granite 4 H, Nemotron-H)."""
    heads, groups, state = module.num_heads, module.n_groups, module.ssm_state_size
    values = module.intermediate_size

    def mix(
        channels: Tensor, a: Tensor, taps: Tensor, bias: Tensor, log_rate: Tensor, dt_bias: Tensor, skip: Tensor
    ) -> Tensor:
        mixed = functions.short_conv(channels[0].float(), taps.squeeze(1), batch) + bias
        v, k, q = nn.functional.silu(mixed).split((values, groups * state, groups * state), 1)
        v, k, q = v.unflatten(1, (heads, -1)), k.unflatten(1, (groups, -1)), q.unflatten(1, (groups, -1))
        step = nn.functional.softplus(a[0].float() + dt_bias).clamp(min=module.time_step_limit[0])
        out = functions.gated_delta_rule(q, k, v, -log_rate.exp() * step, step, batch, corrects=False)
        return out + skip[:, None] * v

    projected = module.in_proj(hidden_states)
    z, channels, a = projected.split((values, projected.shape[-1] - values - heads, heads), -1)
    conv, rates = module.conv1d, (module.A_log, module.dt_bias, module.D)
    out = functions.recompute(mix, channels, a, conv.weight, conv.bias, *rates)
    gated = functions.swiglu(z, out.view(z.shape)).unflatten(-1, (groups, -1))
    ones = torch.ones(values // groups)
    normed = functions.rms_norm(gated, ones, module.norm.variance_epsilon, torch.float32)
    return module.out_proj((normed.flatten(-2) * module.norm.weight).to(projected.dtype))


_LENGTH_EPS = 1e-6
"""Added to the square of a length by the gated delta rule."""


def _short_conv(
    acceleration: Acceleration, module: Any, batch: PackedBatch, hidden_states: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Causal convolution over the sequences of a packed batch: W_out (C conv(B x)), [B, C, x] = W_in h (LFM2)."""
    projected = module.in_proj(hidden_states)[0]
    b, c, x = projected.float().chunk(3, dim=-1)
    mixed = functions.short_conv(b * x, module.conv.weight.squeeze(1), batch)
    return module.out_proj((c * mixed).to(projected.dtype)[None])


def _norm_heads(norm: Any, heads: Tensor) -> Tensor:
    """Norm each head, or all heads together if the norm's weight spans them."""
    if norm.weight.shape[0] == heads.shape[-1]:
        return norm(heads)
    return norm(heads.reshape(len(heads), -1)).view(heads.shape)


def _rope_table(half: int, cos: Any, sin: Tensor) -> Tensor:
    """Return the cosines and sines of a packed batch, (N, R): one tensor, which all layers save for their backward."""
    if not hasattr(cos, "whet_table"):
        cos.whet_table = torch.cat((cos[0, :, :half], sin[0, :, :half]), 1).float()
    return cos.whet_table


def _gptj_attention(
    acceleration: Acceleration,
    module: Any,
    batch: PackedBatch,
    hidden_states: Tensor,
    layer_past: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Attention of a packed batch with RoPE over neighbouring pairs (GPT-J)."""
    _reject_dropout(module.attn_dropout.p if module.training else 0.0)
    q, k, v = _project(acceleration, module, hidden_states)
    sin, cos = module.embed_positions[position_ids[0]].chunk(2, dim=1)
    table = torch.cat((cos, sin), 1).float()
    q, k = (functions.rope(x, table, is_neox=False) for x in (q, k))
    out = functions.attention(q, k, v, batch, module.head_dim**-0.5, None)
    return module.resid_dropout(module.out_proj(out.view(1, len(q), -1))), None


def _project(acceleration: Acceleration, module: Any, hidden_states: Tensor) -> list[Tensor]:
    """Return query, key and value of a packed batch, or the query only of a layer without the others.

    Each is (N, heads, head_dim).
    """
    names = [name for name in ("q_proj", "k_proj", "v_proj") if hasattr(module, name)]
    parts = acceleration.linears(hidden_states, *(getattr(module, name) for name in names))
    return [part.view(part.shape[1], -1, module.head_dim) for part in parts]


def _attention_interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: Any = None,
    sliding_window: int | None = None, dropout: float = 0.0, softcap: float | None = None,
    s_aux: Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Attention function with the signature of transformers, for (1, heads, tokens, head_dim)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch = getattr(attention_mask, "whet_batch", None)
    if batch is None:
        query, key = query.to(value.dtype), key.to(value.dtype)
        if softcap is not None or s_aux is not None:
            return _eager_attention(query, key, value, attention_mask, dropout, scaling, softcap, s_aux), None
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **options,
        )
    _reject_dropout(dropout)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return functions.attention(q, k, v, batch, scale, sliding_window, softcap or 0.0, s_aux)[None], None


def _eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None,
    cap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with soft-capped scores or sinks, which torch's function lacks: (1, tokens, heads, head_dim)."""
    n_queries, n_keys, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scores = query @ key.transpose(2, 3) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is None:  # sdpa_mask returns None for a whole sequence, and for one token that attends to all keys
        mask = torch.ones(n_queries, n_keys, dtype=torch.bool).tril_() if n_queries > 1 else None
    if mask is not None:  # bool or additive, depending on the model's own config
        mask = mask[..., :n_keys]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).nan_to_num(0.0).to(value.dtype)[..., :n_keys]
    return (torch.dropout(weights, dropout, train=dropout > 0) @ value).transpose(1, 2).contiguous()


def register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention_interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
