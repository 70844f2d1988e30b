"""Hugging Face's model families as tables: what their configs say, and where their modules' weights go.

Reads a config (an object or the keys of config.json) into a ``ModelConfig``. Runs no code of a model, does not import
transformers, and reads no weights. The options, their defaults and their meaning are those of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.errors import WhetTypeError, WhetValueError
from whet.models.architecture import LARGEST, LARGEST_SIZE, ModelConfig
from whet.models.slots import PARTS, Module, Place, by_head, paired, places, whole
from whet.ops.rope_scaling import rope_frequencies

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}

# Options of any family that change what is computed, and the values with which nothing changes.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "use_mrope": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "pruned_heads": (None, {}),
}
_MENDS = {"quantization_config": " Load the model in float32, bfloat16 or float16; the engine quantises by weights=."}

_KEYS = {
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "max_position": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
}
_GPT2_KEYS = {
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "hidden_dim": "n_embd",
    "ffn_dim": "n_inner",
    "max_position": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation_function",
}


@dataclass(frozen=True)
class Family:
    """What is particular to a model_type.

    Attributes:
        prefix: begins the names of the modules but the head's.
        modules: where their weights go.
        keys: ``ModelConfig``'s name -> the config's.
        defaults: what an option is that the config leaves out. (null is no number of kv heads, no window, and so on.)
        settings: ``ModelConfig`` fields; a string begun with "@" is the value of that option.
        window: "none", "all" layers have sliding_window, or "some" by layer_types.
        rope: "neox" or "gptj", the pairing; "none".
        partial: whether partial_rotary_factor says what part of a head rotates. transformers' other families rotate
            whole heads, whatever it says.
    """

    prefix: str
    modules: tuple[Module, ...]
    keys: Mapping[str, str]
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    window: str = "none"
    rope: str = "neox"
    partial: bool = False


_CUTS = {"by_head": by_head, "paired": paired}


def module_table(prefix: str, layers: str, table: str) -> tuple[Module, ...]:
    """Rows "module slot [part] [cut] [transposed]"; a module begun with "." is in a layer, as is its slot."""
    rows = []
    for line in filter(str.strip, table.splitlines()):
        name, slot, *rest = line.split()
        in_layer = name.startswith(".")
        path = f"{prefix}{layers}.{{i}}{name}" if in_layer else f"{prefix}{name}"
        rows.append(
            Module(
                names=tuple(name.split("|")) if slot == "head" else (path,),
                slot=f"layers.{{i}}.{slot}" if in_layer else slot,
                part=next((word for word in rest if word in PARTS), ""),
                cut=next((_CUTS[word] for word in rest if word in _CUTS), whole),
                transposed="transposed" in rest,
            )
        )
    return tuple(rows)


_LLAMA_MODULES = """
    embed_tokens embedding
    .input_layernorm norm1
    .self_attn.q_proj qkv q
    .self_attn.k_proj qkv k
    .self_attn.v_proj qkv v
    .self_attn.q_norm q_norm
    .self_attn.k_norm k_norm
    .self_attn.o_proj o
    .post_attention_layernorm norm2
    .mlp.gate_proj gate_up gate
    .mlp.up_proj gate_up up
    .mlp.down_proj down
    norm final_norm
    lm_head head
"""
_PHI3_MODULES = """
    embed_tokens embedding
    .input_layernorm norm1
    .self_attn.qkv_proj qkv
    .self_attn.o_proj o
    .post_attention_layernorm norm2
    .mlp.gate_up_proj gate_up
    .mlp.down_proj down
    norm final_norm
    lm_head head
"""
_GPT_NEOX_MODULES = """
    embed_in embedding
    .input_layernorm norm1
    .attention.query_key_value qkv by_head
    .attention.dense o
    .post_attention_layernorm norm2
    .mlp.dense_h_to_4h up
    .mlp.dense_4h_to_h down
    final_layer_norm final_norm
    lm_head|embed_out head
"""
_GPT2_MODULES = """
    wte embedding
    wpe positions
    .ln_1 norm1
    .attn.c_attn qkv transposed
    .attn.c_proj o transposed
    .ln_2 norm2
    .mlp.c_fc up transposed
    .mlp.c_proj down transposed
    ln_f final_norm
    lm_head head
"""
_GPTJ_MODULES = """
    wte embedding
    .ln_1 norm1
    .attn.q_proj qkv q
    .attn.k_proj qkv k
    .attn.v_proj qkv v
    .attn.out_proj o
    .mlp.fc_in up
    .mlp.fc_out down
    ln_f final_norm
    lm_head head
"""

_LLAMA_DEFAULTS = {"norm_eps": 1e-6, "activation": "silu", "max_position": 2048}
_QWEN_DEFAULTS = {
    "norm_eps": 1e-6,
    "activation": "silu",
    "max_position": 32768,
    "n_kv_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GPT2_DEFAULTS = {"norm_eps": 1e-5, "activation": "gelu_new"}
_GPT2_SETTINGS = {"norm": "layer", "gated": False, "mlp_bias": True}
_RMS = {"norm": "rms"}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        prefix="model.",
        modules=module_table("model.", "layers", _LLAMA_MODULES),
        keys=_KEYS,
        settings={**_RMS, "qkv_bias": "@attention_bias", "o_bias": "@attention_bias", "mlp_bias": "@mlp_bias"},
        defaults={**_LLAMA_DEFAULTS, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Family(
        prefix="model.",
        modules=module_table("model.", "layers", _LLAMA_MODULES),
        keys=_KEYS,
        settings=_RMS,
        defaults={**_LLAMA_DEFAULTS, "max_position": 131072, "n_kv_heads": 8, "sliding_window": 4096},
        window="all",
    ),
    "qwen2": Family(
        prefix="model.",
        modules=module_table("model.", "layers", _LLAMA_MODULES),
        keys=_KEYS,
        settings={**_RMS, "qkv_bias": True},
        defaults=_QWEN_DEFAULTS,
        window="some",
    ),
    "qwen3": Family(
        prefix="model.",
        modules=module_table("model.", "layers", _LLAMA_MODULES),
        keys=_KEYS,
        settings={**_RMS, "qk_norm": True, "qkv_bias": "@attention_bias", "o_bias": "@attention_bias"},
        defaults={**_QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
        window="some",
    ),
    "phi3": Family(
        prefix="model.",
        modules=module_table("model.", "layers", _PHI3_MODULES),
        keys=_KEYS,
        settings=_RMS,
        defaults={
            **_LLAMA_DEFAULTS,
            "norm_eps": 1e-5,
            "max_position": 4096,
            "original_max_position_embeddings": 4096,
        },
        window="all",
        partial=True,
    ),
    "gpt_neox": Family(
        prefix="gpt_neox.",
        modules=module_table("gpt_neox.", "layers", _GPT_NEOX_MODULES),
        keys={
            **{name: key for name, key in _KEYS.items() if name not in ("n_kv_heads", "head_dim")},
            "norm_eps": "layer_norm_eps",
        },
        settings={
            **_GPT2_SETTINGS,
            "qkv_bias": "@attention_bias",
            "o_bias": "@attention_bias",
            "parallel_residual": "@use_parallel_residual",
        },
        defaults={
            "norm_eps": 1e-5,
            "activation": "gelu",
            "max_position": 2048,
            "attention_bias": True,
            "use_parallel_residual": True,
            "rotary_pct": 0.25,
        },
        partial=True,
    ),
    "gpt2": Family(
        prefix="transformer.",
        modules=module_table("transformer.", "h", _GPT2_MODULES),
        keys=_GPT2_KEYS,
        settings={**_GPT2_SETTINGS, "qkv_bias": True, "o_bias": True},
        defaults={**_GPT2_DEFAULTS, "max_position": 1024, "tie_word_embeddings": True, "scale_attn_weights": True},
        rope="none",
    ),
    "gptj": Family(
        prefix="transformer.",
        modules=module_table("transformer.", "h", _GPTJ_MODULES),
        keys=_GPT2_KEYS,
        settings={**_GPT2_SETTINGS, "head_bias": True, "parallel_residual": True, "shared_norm": True},
        defaults={**_GPT2_DEFAULTS, "max_position": 2048, "rotary_dim": 64},
        rope="gptj",
    ),
}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config's model_type.

    Raises:
        WhetValueError: the engine has none of that name.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise WhetValueError(
            f"{where}: model_type is {model_type!r:.60}; the engine runs {', '.join(sorted(FAMILIES))}. "
            f'Use engine="torch" for this model.'
        )
    return FAMILIES[model_type]


def layer_windows(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The sliding window of each layer by a Hugging Face config; 0: none.

    Raises:
        WhetValueError: another model_type than the engine's, or a size that cannot be.
    """
    options = _Options(config, family_of(config, where), where)
    return options.windows(options.size("n_layers"), LARGEST_SIZE)


def short_position(config: Any, where: str = "short_position") -> int | None:
    """Tokens of the longest sequence that longrope's short factors are for; longer ones rotate by the long factors.

    None where there is no such length: a sequence's length changes no frequency, or ``config`` is of no family here.
    """
    given = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(given, Mapping) or given.get("model_type") not in FAMILIES:
        return None
    options = _Options(given, family_of(given, where), where)
    if options.family.rope != "neox":
        return None
    trained = options.size("max_position")
    scaling = _scaling(options, trained)
    original = scaling.get("original_max_position_embeddings", trained)
    longer = scaling["rope_type"] == "longrope" and isinstance(original, int) and 0 < original < trained
    return original if longer and scaling.get("short_factor") != scaling.get("long_factor") else None


def module_targets(model_type: str, config: ModelConfig) -> dict[str, Place]:
    """Where every module of the Hugging Face model goes, by its name there."""
    return {name: place for place in places(config, FAMILIES[model_type].modules) for name in place.names}


def model_config(
    config: Any,
    *,
    max_position: int | None = None,
    vocab_size: int | None = None,
    tied_head: bool | None = None,
    where: str = "model_config",
) -> ModelConfig:
    """What a Hugging Face config describes.

    Args:
        config: a transformers config, or the dict of a config.json.
        max_position: tokens of the longest sequence; None: what the config says. Rotary scaling that depends on the
            length (dynamic, longrope) is resolved for it: as transformers does for a text of just that length.
        vocab_size: where the embedding was resized.
        tied_head: whether the head is the embedding; None: what the config says.
        where: begins the errors.

    Raises:
        WhetValueError: a model_type, an option or a value that the engine does not run.
    """
    given = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(given, Mapping):
        raise WhetValueError(f"{where}: config is a {type(config).__name__}, expected a Hugging Face config or a dict.")
    family = family_of(given, where)
    options = _Options(given, family, where)
    options.refuse()
    n_layers, n_heads, hidden_dim = (options.size(name) for name in ("n_layers", "n_heads", "hidden_dim"))
    n_kv_heads = options.size("n_kv_heads", default=n_heads)
    head_dim = options.size("head_dim", default=hidden_dim // n_heads)
    if "head_dim" not in family.keys or options.get("head_dim") is None:
        options.check_heads(hidden_dim, n_heads)
    trained = options.size("max_position")
    length = trained if max_position is None else max_position
    scale = 1.0 if options.get("scale_attn_weights") is False else 1 / math.sqrt(head_dim)
    settings: dict[str, Any] = {
        name: options.flag(value[1:]) if isinstance(value, str) and value.startswith("@") else value
        for name, value in family.settings.items()
    }
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise WhetValueError(f"{where}: max_position is {length!r}, expected an integer of at least 1.")
    try:
        return ModelConfig(
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            hidden_dim=hidden_dim,
            ffn_dim=options.size("ffn_dim", default=4 * hidden_dim if family.keys["ffn_dim"] == "n_inner" else None),
            vocab_size=options.size("vocab_size") if vocab_size is None else vocab_size,
            max_position=length,
            norm_eps=options.number("norm_eps"),
            windows=options.windows(n_layers, length),
            attention_scale=scale,
            learned_positions=trained if family.rope == "none" else 0,
            activation=options.activation(),
            gated=settings.pop("gated", True),
            tied_head=options.flag("tie_word_embeddings") if tied_head is None else tied_head,
            **_rotary(options, head_dim, length, trained),
            **settings,
        )
    except WhetValueError as error:
        raise WhetValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


class _Options:
    """A config's options under either name, with the family's defaults, checked."""

    def __init__(self, given: Mapping[str, Any], family: Family, where: str) -> None:
        self.given, self.family, self.where = given, family, where

    def get(self, name: str) -> Any:
        key = self.family.keys.get(name, name)
        return self.given[key] if key in self.given else self.family.defaults.get(name)

    def wrong(self, name: str, expected: str) -> WhetValueError:
        return WhetValueError(
            f"{self.where}: {self.family.keys.get(name, name)} is {self.get(name)!r:.80}, expected {expected}."
        )

    def refuse(self) -> None:
        for name, plain in _REFUSED.items():
            if self.given.get(name) not in plain:
                model_type = self.given["model_type"]
                raise WhetValueError(
                    f"{self.where}: {name} is {self.given[name]!r:.60}, which the engine does not run for "
                    f"{model_type}; expected {plain[-1]!r}.{_MENDS.get(name, '')}"
                )

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name) if name in self.family.keys or name == "vocab_size" else None
        value = default if value is None else value
        highest = LARGEST.get(name, LARGEST_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
            raise self.wrong(name, f"an integer from 1 to {highest}")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
            raise self.wrong(name, "a finite number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)

    def activation(self) -> str:
        value = self.get("activation")
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.wrong("activation", f"one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def check_heads(self, hidden_dim: int, n_heads: int) -> None:
        if hidden_dim % n_heads:
            raise self.wrong("hidden_dim", f"a multiple of {self.family.keys['n_heads']}={n_heads}")

    def windows(self, n_layers: int, length: int) -> tuple[int, ...]:
        window, kinds = self.get("sliding_window"), None
        if self.family.window == "some":
            window = window if self.flag("use_sliding_window") else None
            kinds = self.get("layer_types")
        if self.family.window == "none" or window is None:
            kinds, window = None, 0
        elif isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise self.wrong("sliding_window", "an integer of at least 1, or null")
        if window >= length:
            window = 0  # the same as none, and cheaper
        if kinds is None and self.family.window == "some" and window:
            full = self.get("max_window_layers")
            if isinstance(full, bool) or not isinstance(full, int) or full < 0:
                raise self.wrong("max_window_layers", "an integer of at least 0")
            return tuple(window if i >= full else 0 for i in range(n_layers))
        if kinds is None:
            return (window,) * n_layers
        known = {"full_attention": 0, "sliding_attention": window}
        if (
            not isinstance(kinds, (list, tuple))
            or len(kinds) != n_layers
            or not all(k in known for k in map(str, kinds))
        ):
            raise self.wrong("layer_types", f"{n_layers} of {' and '.join(known)}")
        return tuple(known[str(kind)] for kind in kinds)


def _rotary(options: _Options, head_dim: int, length: int, trained: int) -> dict[str, Any]:
    """The fields of rotary embedding, with frequencies resolved for texts of ``length`` tokens."""
    rope, where = options.family.rope, options.where
    if rope == "none":
        return {}
    if rope == "gptj":
        rotary_dim, scaling = options.get("rotary_dim"), None
        if rotary_dim is None:
            raise options.wrong("rotary_dim", "an even number")
    else:
        rotary_dim, scaling = None, _scaling(options, trained)
    try:
        inv_freq, factor = rope_frequencies(head_dim, rotary_dim, length, scaling=scaling)
    except (WhetValueError, WhetTypeError, ArithmeticError) as error:
        raise WhetValueError(f"{where}: rotary embedding: {str(error).removeprefix('get_rope: ')}") from None
    return {
        "rotary_dim": 2 * len(inv_freq),
        "is_neox": rope == "neox",
        "inv_freq": tuple(inv_freq.tolist()),
        "attention_factor": factor,
    }


def _scaling(options: _Options, trained: int) -> dict[str, Any]:
    """The settings that ``rope_frequencies`` takes: rope_parameters, or what older configs say in several places."""
    given = options.get("rope_parameters") or options.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise WhetValueError(
            f"{options.where}: rope_parameters is {given!r:.80}, expected one object of settings for all layers."
        )
    scaling = {key: value for key, value in given.items() if value is not None}
    kind = scaling.setdefault("rope_type", scaling.get("type", "default"))
    if kind == "su" or (kind == "yarn" and options.given.get("model_type") == "phi3"):
        kind = scaling["rope_type"] = "longrope"
    for key, names in (
        ("rope_theta", ("rope_theta", "rotary_emb_base")),
        ("partial_rotary_factor", ("partial_rotary_factor", "rotary_pct") if options.family.partial else ()),
    ):
        for value in (options.get(name) for name in names):
            if value is not None:
                scaling.setdefault(key, value)
    if not options.family.partial and kind != "proportional":
        partial = scaling.pop("partial_rotary_factor", 1.0)
        if partial != 1.0 and kind != "default":  # which transformers makes frequencies for, and then cannot apply
            raise WhetValueError(
                f"{options.where}: partial_rotary_factor is {partial!r:.40} with rope_type {kind!r:.40}, and a "
                f"{options.given['model_type']} rotates whole heads. Leave it out."
            )
    original = "original_max_position_embeddings"
    if kind in ("llama3", "yarn", "longrope"):
        if options.get(original) is not None:
            scaling[original] = options.get(original)
        scaling.setdefault(original, trained)
        if kind != "llama3" and isinstance(scaling[original], (int, float)) and scaling[original] > 0:
            scaling.setdefault("factor", trained / scaling[original])
    elif kind == "dynamic":
        scaling[original] = trained
    else:
        scaling.pop(original, None)
    return scaling
