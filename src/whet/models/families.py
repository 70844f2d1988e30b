"""Hugging Face's model families: the options of their configs, and the slots of their modules' weights.

``model_config`` translates a config (an object, or the keys of config.json) into a ``ModelConfig``. It does not run a
model's code, import transformers or read weights. Options and defaults follow transformers 5.

Example: the config.json of Qwen2-0.5B, the entry "qwen2" of families.json (which is "like" "llama"), the result.

    "num_hidden_layers": 24         keys        n_layers: num_hidden_layers        n_layers=24
    "num_attention_heads": 14       keys        n_heads: num_attention_heads       n_heads=14
    "num_key_value_heads": 2        keys        n_kv_heads: num_key_value_heads    n_kv_heads=2
    "hidden_size": 896              keys        hidden_dim: hidden_size            hidden_dim=896
                                    code        hidden_dim / n_heads               head_dim=64
    "intermediate_size": 4864       keys        ffn_dim: intermediate_size         ffn_dim=4864
    "vocab_size": 151936            the same name in all families                  vocab_size=151936
                                    defaults    max_position: 32768                max_position=32768
                                    defaults    activation: silu                   activation="silu"
                                    settings    norm: rms                          norm="rms"
                                    settings    qkv_bias: true                     qkv_bias=True
    "tie_word_embeddings": true     the same name in all families                  tied_head=True
    "rope_theta": 1000000.0         rope: neox                                     rotary_dim=64

and the module "model.layers.3.self_attn.k_proj" has rows 896 to 1023 of slot "layers.3.qkv", as "modules" maps
"layers.{i}.qkv:k" to "model.layers.{i}.self_attn.k_proj".

families.json contains the data, which builds without Python embed:

    activations  name in the config -> ``ModelConfig.activation``
    plain        options of any family that change the computation -> their neutral values, the only ones supported
    not_run      an unsupported feature -> the model_types and GGUF architectures that have it
    text_parts   vision-language models, whose text_config is one of the families: ``models``, model_type -> defaults of
                 their config; ``prefixes`` and ``heads``, names in their files, the first also in their modules;
                 ``skipped``, other modules, whose tensors are not read
    gguf         ``keys``: our names -> metadata keys after "ARCHITECTURE."; ``ignored_keys``: without effect here;
                 ``plain``: keys -> their neutral values, the only ones supported; ``rope_tensors``: numbers that
                 llama.cpp stores as tensors; ``fused_qkv`` and ``fused_experts``: one tensor instead of q, k and v, or
                 of the experts' gates and up projections, in any architecture; ``correction``: the end of a name
    families     model_type -> the attributes of a ``Family``. ``like``: a family whose ``keys``, ``settings``,
                 ``defaults`` and ``modules`` are merged with these, and whose other attributes are defaults; null
                 removes a key or module.
                 ``modules``: "slot" or "slot:part" -> the family whose row it is, or the row: ``hf``, the module's name
                 (``hf_also``: an alternative name; ``hf_file``: the module that folders may have instead),
                 ``hf_layout``, the order of its rows ("by_head"; "transposed"; "pairs": transposed, gate and up
                 alternate; default: the slot's), ``hf_offset``, a constant that the model adds to the weight,
                 ``hf_parameter``, the weight's name in the module (default: "weight"), ``hf_negative_exp``, whether the
                 model uses -exp of the weight, ``hf_adapted``, false if PEFT refuses or llama.cpp ignores adapters of
                 it, ``gguf``, the tensor's name, ``gguf_layout`` (also "column", of single numbers, and "by_group", a
                 row for each key head), ``gguf_parameter``, and ``value_heads``, the axis of the slot that consists of
                 value heads ("rows", "columns"), grouped in Hugging Face and tiled in GGUF. "{i}" is the layer, "{e}"
                 the expert.
                 "slot|moe" is a slot of layers with a mixture of experts, "slot" then of the others. Rows with only
                 one of ``hf`` and ``gguf`` are for matrices that the other has in parts, or as one.

Sliding windows and rotary scaling follow from the options by the code below.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from whet.errors import WhetTypeError, WhetValueError, check_integer
from whet.models.architecture import LARGEST, LARGEST_SIZE, SOFTCAPS, SWIGLU_LIMIT, SWIGLU_SLOPE, ModelConfig
from whet.models.slots import (
    ModuleSpec,
    RowOrder,
    WeightLocation,
    deinterleave,
    group_heads,
    iter_locations,
    keep_order,
    split_experts,
    split_heads,
    split_pairs_of_experts,
    split_part_of_experts,
    tile_heads,
)
from whet.ops.rope_scaling import rope_frequencies

_DATA: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
_ACTIVATIONS: dict[str, str] = _DATA["activations"]
_PLAIN: dict[str, list[Any]] = _DATA["plain"] | {
    "swiglu_alpha": [None, SWIGLU_SLOPE],
    "swiglu_limit": [None, SWIGLU_LIMIT],
}
_NOT_RUN: dict[str, str] = {name: what for what, names in _DATA["not_run"].items() for name in names}
_TEXT_PARTS: dict[str, Any] = _DATA["text_parts"]
PREDICTING = "mtp."
"""Prefix of names of tensors that predict further tokens, in any model."""
PREDICTING_MODULES: dict[str, str] = _DATA["predicting"]
"""Qwen3.5's modules that predict one more token, except its layer -> GGUF's names, below ``blk.N.nextn``."""
SKIPPED = rf"(model\.)?({'|'.join(_TEXT_PARTS['skipped'])})(\..+)?"
"""Expression of names of tensors and modules of a vision-language model that are not part of its language model."""
_FIXES = {"quantization_config": " Load the model in float32, bfloat16 or float16; the engine quantises by weights=."}
GGUF_NAMES: dict[str, Any] = _DATA["gguf"]
"""Metadata keys and tensors common to all architectures; see above."""
_QUERY_SCALE = "llama_4_scaling_beta"
_KINDS = {"conv": "conv", "delta": "linear_attention", "mamba": "linear_attention"}
"""Mixer -> its name in layer_types."""
_OLDER_KINDS = {
    "mamba": "linear_attention", "attention": "full_attention",
    "M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe",
}  # fmt: skip
"""Names in layer_types of older configs, and the characters of hybrid_override_pattern."""
_PATTERN = "hybrid_override_pattern"
_UNLIMITED = (None, [0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}])
"""Values of time_step_limit without effect."""
NO_LEAST_STEP = 1e-30
"""A time_step_min without effect, of files, which have none: transformers takes its logarithm."""
_MIXER_SIZES = ("conv_length", "n_delta_heads", "n_delta_key_heads", "delta_dim", "delta_key_dim")
_EXPERTS, _EXPERT_COUNTS = ("router", "shared_gate", "experts_"), ("num_experts", "num_local_experts")
"""Begins of the settings that only mixtures of experts have, and the names of their number."""
_OF_MIXTURES = "|moe"
_OF_WEIGHTS = ("offset", "negative_exp", "parameter", "adapted")
_ROW_ORDERS: dict[str, RowOrder] = {"by_head": split_heads, "pairs": split_pairs_of_experts}


@dataclass(frozen=True)
class Family:
    """One model_type, as its differences from Llama.

    Attributes:
        keys: name in ``ModelConfig`` -> name in the config.
        settings: ``ModelConfig`` fields; "@option" is the value of that option.
        defaults: values of options missing from the config. null is a value: no number of kv heads, no window.
        modules: the slots of Hugging Face's modules.
        gguf: None if GGUF has no such architecture. Else its name (``architecture``) and llama.cpp's deviations, as
            tested with b11549 of October 2026 by tests/wide/test_llama_cpp.py:
            ``hybrid``: its name if the family has a mixer and some layers do not attend; ``mixture``: its name with
            experts; ``scaled``: a file has router_normalised and router_scale; ``interleaved``: rows of q and
            k are interleaved; ``biases``: attention biases are read; ``head``: an untied head is read; ``needs``: what
            a file must have even if the model has none ("head", a copy of a tied one; "biases" of all matrices;
            "correction" of routers; "windows", the layers that have one; "divisors" of frequencies; "layer_norm_eps",
            the epsilon of norms of means too; "expert_dim", the
            width of experts, also if it is the only one); ``tokenizer``: the kind of a tokenizer of BPE over
            characters, default "llama"; ``sliding_window``: default; ``normalised``: whether the probabilities of a
            token's experts are normalised; ``all_heads``: n_kv_heads has to equal n_heads; ``ignored``: keys of files
            converted from hybrids, without effect; ``scale_by_hidden``: a number of layers with which scores are
            divided by the root of hidden_dim / n_heads instead of head_dim; ``rope``: scaling read in addition to
            linear and YaRN ("divisors" of frequencies, "longrope"); ``square``: n_heads head_dim has to equal
            hidden_dim; ``windows``: sliding windows are computed; ``window_layers``: the layers that have one are
            read; ``windowed_depth``: a number of layers with which, and only then, layers have windows.
        gguf_modules: the slots of a GGUF file's tensors.
        file_modules: the slots of modules that a folder may have instead of ``modules`` with the same slots.
        with_experts: the family of a config with experts, except for defaults, ``rope_option`` and ``mixer``.
        window: layers with sliding_window: "none", "all", "some" (by layer_types), or "pattern" (by layer_types;
            default: all except every sliding_window_pattern-th).
        rope: how elements pair: "neox", halves of a head; "pairs", neighbours; "gptj", neighbours among the first
            rotary_dim, which are not scaled; "none": no rotary embedding.
        partial_rotary: whether partial_rotary_factor applies. transformers ignores it in the other families.
        rope_local: whether layers with a window rotate by separate frequencies.
        root_of_embedding: whether embeddings are multiplied by the root of hidden_dim.
        rope_option: option that has to be "rope", or heads are not rotated.
        rope_others: rotary settings that do not change the frequencies of a text.
        rope_alpha: whether "dynamic" frequencies with an alpha have the base rope_theta alpha^(d / (d - 2)), for heads
            of d elements and texts of any length.
        query_scale: whether queries are multiplied by 1 + llama_4_scaling_beta log(1 + floor(p / L)) at position p,
            with L = original_max_position_embeddings.
        rope_windowed: whether, in a model with sliding_window, only layers with a window rotate.
        rope_off: whether layers with no_rope_layers 0, default every no_rope_layer_interval-th, do not rotate.
        rope_by_layer: whether layer_rope_theta, if it is not null, is the base of each layer; 0: it does not rotate.
        ffn_adjusted: whether, with block_auto_adjust_ff_dim, the width of the MLP is 2 / 3 of the option, times
            block_ffn_dim_multiplier, rounded up to a multiple of block_multiple_of.
        full_first: whether the first layer of each sliding_window_pattern has no window, instead of the last.
        mixer: what mixes the tokens in layers without attention, see ``ModelConfig``; "": all layers attend.
        one_only: whether a layer is one of a mixer, an MLP ("mlp" of layer_types) and a mixture of experts ("moe").
        plain: as ``plain`` above, of this family.
        older: name in the config -> its name in older configs, which is read first.
        file_prefix: prefix of names in folders in place of ``prefix``; "": the same.
    """

    keys: Mapping[str, str]
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]
    modules: tuple[ModuleSpec, ...]
    gguf: Mapping[str, Any] | None = None
    gguf_modules: tuple[ModuleSpec, ...] = ()
    file_modules: tuple[ModuleSpec, ...] = ()
    with_experts: str = ""
    window: str = "none"
    rope: str = "neox"
    partial_rotary: bool = False
    rope_option: str = ""
    rope_windowed: bool = False
    rope_others: tuple[str, ...] = ()
    rope_alpha: bool = False
    query_scale: bool = False
    rope_off: bool = False
    rope_by_layer: bool = False
    full_first: bool = False
    mixer: str = ""
    one_only: bool = False
    plain: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    older: Mapping[str, str] = dataclasses.field(default_factory=dict)
    file_prefix: str = ""
    ffn_adjusted: bool = False
    rope_local: bool = False
    root_of_embedding: bool = False

    @property
    def prefix(self) -> str:
        """Common prefix of the modules' names, except the head's."""
        return self.modules[0].names[0].partition(".")[0] + "."

    @property
    def head_norms(self) -> list[str]:
        """Names of the norms of query and key within an attention module; a model without them has no such modules."""
        names = {module.slot.rpartition(".")[2]: module.names[0] for module in self.modules}
        return [names[slot].rpartition(".")[2] for slot in ("q_norm", "k_norm") if slot in names]

    @property
    def decoder(self) -> str:
        """Name of the module that contains embedding, layers and final norm."""
        return self.modules[0].names[0].rpartition(".")[0]

    @property
    def truncates(self) -> bool:
        """Whether YaRN's ramp begins and ends at whole pairs in a GGUF file, where llama.cpp always computes it so."""
        return self.defaults.get("rope_parameters", {}).get("truncate", True)

    @property
    def norm_offset(self) -> float:
        """Offset that the model adds to the weights of its norms."""
        return next(module.offset for module in self.modules if module.slot == "final_norm")


def _resolve(name: str) -> dict[str, Any]:
    """Merge a family's entry with the entry that it is "like"."""
    entry = dict(_DATA["families"][name])
    if "like" not in entry:
        return entry
    base = _resolve(entry.pop("like"))
    rows = entry.get("modules", {})
    entry["modules"] = {
        name: _resolve(row)["modules"][name] if isinstance(row, str) else row for name, row in rows.items()
    }
    merged = {field: {**base[field], **entry.get(field, {})} for field in ("keys", "settings", "defaults", "modules")}
    for field in ("keys", "modules"):
        merged[field] = {name: value for name, value in merged[field].items() if value is not None}
    return {**base, **entry, **merged}


def _make_family(entry: dict[str, Any]) -> Family:
    rows, gguf = entry.pop("modules"), entry["gguf"]
    modules, gguf_modules, file_modules = [], [], []
    for target, row in rows.items():
        slot, _, part = target.removesuffix(_OF_MIXTURES).partition(":")
        of_mixtures = {"of_mixtures": target != slot} if f"{slot}{_OF_MIXTURES}" in rows else {}
        names = tuple(row[key] for key in ("hf", "hf_also") if key in row)
        layout = row.get("hf_layout")
        order_of_heads = {"rows": "row_order", "columns": "column_order"}.get(row.get("value_heads"))
        of_experts = (split_part_of_experts if part else split_experts) if ".experts_" in slot else keep_order
        if names:
            order = _ROW_ORDERS.get(layout, of_experts)
            settings: dict[str, Any] = {
                **of_mixtures,
                "row_order": order,
                "transposed": layout in ("transposed", "pairs"),
            }
            settings |= {name: row[f"hf_{name}"] for name in _OF_WEIGHTS if f"hf_{name}" in row}
            settings |= {order_of_heads: group_heads} if order_of_heads else {}
            files = [other.get("hf_file", "") for name, other in rows.items() if name.partition(":")[0] == slot]
            settings |= {"expert_parts": tuple(name.rpartition("{e}.")[2] for name in files if "{e}" in name)}
            modules.append(ModuleSpec(names, slot, part, **settings))
        if "hf_file" in row:
            order = keep_order if "{e}" in row["hf_file"] else of_experts
            file_modules.append(ModuleSpec((row["hf_file"],), slot, part, row_order=order, **of_mixtures))
        if gguf is not None and "gguf" in row:
            interleaved = gguf.get("interleaved", False) and part in ("q", "k")
            settings = {**of_mixtures, "row_order": deinterleave if interleaved else of_experts}
            settings |= {"transposed": row.get("gguf_layout") == "transposed"}
            settings |= {"parameter": row.get("gguf_parameter", "weight"), "axes": row.get("gguf_layout", "")}
            settings |= {order_of_heads: tile_heads} if order_of_heads else {}
            gguf_modules.append(ModuleSpec((row["gguf"],), slot, part, **settings))
    return Family(**entry, modules=tuple(modules), gguf_modules=tuple(gguf_modules), file_modules=tuple(file_modules))


SCALES = ("attention_scale", "embedding_scale", "residual_scale", "logits_divisor")
"""Factors in the configs of some families, by our names."""
FAMILIES: dict[str, Family] = {name: _make_family(_resolve(name)) for name in _DATA["families"]}


def unsupported_reason(name: Any) -> str:
    """Describe why a model_type or a GGUF architecture is not supported; empty: no known reason."""
    return f", which has {_NOT_RUN[name]}" if isinstance(name, str) and name in _NOT_RUN else ""


def text_options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model: the text_config of a vision-language model, else the config itself.

    Tied embeddings and quantisation are options of the whole model.
    """
    text, model_type = config.get("text_config"), config.get("model_type")
    if not isinstance(text, Mapping) or not isinstance(model_type, str) or model_type not in _TEXT_PARTS["models"]:
        return config
    defaults = _TEXT_PARTS["models"][model_type]
    outer = {name: config[name] for name in ("tie_word_embeddings", "quantization_config") if name in config}
    return {**defaults, **text, **outer}


def is_skipped(name: str, has_towers: bool = True) -> bool:
    """Whether a tensor or module is not part of the language model: of towers, or to predict further tokens (MTP)."""
    return re.fullmatch(SKIPPED, name) is not None and (has_towers or name.startswith(PREDICTING))


@cache
def _text_part(model_type: str) -> Family:
    """Return the family with its modules' names in a vision-language model."""
    family = FAMILIES[model_type]

    def rename(module: ModuleSpec) -> ModuleSpec:
        if module.slot == "head":
            return replace(module, names=tuple(_TEXT_PARTS["heads"]))
        rest = module.names[0].removeprefix(family.prefix)
        return replace(module, names=tuple(prefix + rest for prefix in _TEXT_PARTS["prefixes"]))

    return replace(
        family, modules=tuple(map(rename, family.modules)), file_modules=tuple(map(rename, family.file_modules))
    )


@cache
def _with_experts(model_type: str) -> Family:
    """Return the family of a config with experts."""
    family = FAMILIES[model_type]
    other = FAMILIES[family.with_experts]
    return replace(other, defaults=family.defaults, rope_option=family.rope_option, mixer=family.mixer)


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a config's model_type, or of the text part of a vision-language model.

    Raises:
        WhetValueError: the model_type is not supported.
    """
    options = text_options(config)
    model_type = options.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise WhetValueError(
            f"{where}: model_type is {model_type!r:.60}{unsupported_reason(model_type)}; the engine supports "
            f"{', '.join(sorted(FAMILIES))}. "
            f'Use engine="torch" for this model.'
        )
    family = FAMILIES[model_type]
    if family.with_experts and options.get(_EXPERT_COUNTS[1], family.defaults["n_experts"]) != 0:
        return _with_experts(model_type)
    return family if options is config else _text_part(model_type)


def layer_windows(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return the sliding window of each layer of a Hugging Face config; 0: none.

    Raises:
        WhetValueError: an unsupported model_type, or an invalid size.
    """
    options = _Options(config, family_of(config, where), where)
    return options.windows(options.size("n_layers"), LARGEST_SIZE)


def logits_scale(config: Mapping[str, Any], where: str) -> float:
    """Return the factor of the logits in a Hugging Face config.

    Raises:
        WhetValueError: an unsupported model_type, or an invalid factor.
    """
    return 1 / _Options(config, family_of(config, where), where).scale("logits_divisor")


def softcap(config: Mapping[str, Any], name: str, where: str) -> float:
    """Return a soft-cap, one of ``SOFTCAPS``, of a Hugging Face config; 0: none.

    Raises:
        WhetValueError: an unsupported model_type, or an invalid cap.
    """
    return _Options(config, family_of(config, where), where).softcap(name)


def short_position(config: Any, where: str = "short_position") -> int | None:
    """Return the length up to which sequences rotate by longrope's short factors, in tokens.

    None: frequencies do not depend on the length of a sequence, or the model_type is not supported.
    """
    given = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(given, Mapping) or text_options(given).get("model_type") not in FAMILIES:
        return None
    options = _Options(given, family_of(given, where), where)
    if not options.is_scaled():
        return None
    trained = options.size("max_position")
    scaling = _scaling(options, trained)
    original = scaling.get("original_max_position_embeddings", trained)
    longer = scaling["rope_type"] == "longrope" and isinstance(original, int) and 0 < original < trained
    return original if longer and scaling.get("short_factor") != scaling.get("long_factor") else None


def is_hybrid(config: Mapping[str, Any], where: str) -> bool:
    """Whether some layers of a Hugging Face config do not attend."""
    options = _Options(config, family_of(config, where), where)
    return bool(options.mixers(options.size("n_layers")))


def has_experts(config: Mapping[str, Any], where: str) -> bool:
    """Whether some layers of a Hugging Face config have a mixture of experts."""
    options = _Options(config, family_of(config, where), where)
    return bool(options.experts(options.size("n_layers")))


def rotated_layers(config: Mapping[str, Any], where: str) -> tuple[bool, ...]:
    """Return whether each layer of a Hugging Face config rotates queries and keys; (): all do."""
    options = _Options(config, family_of(config, where), where)
    return options.rope_layers(options.size("n_layers"))


def is_scaled(config: Mapping[str, Any], where: str) -> bool:
    """Whether a Hugging Face config's heads are rotated by frequencies that may be scaled."""
    return _Options(config, family_of(config, where), where).is_scaled()


def trained_position(config: Mapping[str, Any], where: str) -> int:
    """Return the longest sequence of a Hugging Face config, in tokens."""
    return _Options(config, family_of(config, where), where).size("max_position")


def rope_scaling(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Collect the rotary settings of a Hugging Face config from all options that may contain them."""
    options = _Options(config, family_of(config, where), where)
    return _scaling(options, options.size("max_position"))


def module_targets(family: Family, config: ModelConfig) -> dict[str, WeightLocation]:
    """Return name -> location of every matrix and norm of the Hugging Face model, and of its other parameters."""
    return {
        name if (parameter := location.module.parameter) == "weight" else f"{name}.{parameter}": location
        for location in iter_locations(config, family.modules)
        for name in location.names
    }


def model_config(
    config: Any,
    *,
    max_position: int | None = None,
    vocab_size: int | None = None,
    tied_head: bool | None = None,
    where: str = "model_config",
) -> ModelConfig:
    """Translate a Hugging Face config into a ``ModelConfig``.

    Args:
        config: a transformers config, or the dict of a config.json.
        max_position: tokens of the longest sequence. Default: the config's. Rotary scaling that depends on the length
            (dynamic, longrope) is resolved for it, as in transformers for a text of this length.
        vocab_size: rows of a resized embedding. Default: the config's.
        tied_head: whether the head is the embedding. Default: the config's.
        where: prefix of error messages.

    Raises:
        WhetValueError: an unsupported model_type, option or value.
    """
    given = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(given, Mapping):
        raise WhetValueError(f"{where}: config is a {type(config).__name__}, expected a Hugging Face config or a dict.")
    family = family_of(given, where)
    options = _Options(given, family, where)
    options.check_neutral()
    n_layers, n_heads, hidden_dim = (options.size(name) for name in ("n_layers", "n_heads", "hidden_dim"))
    n_kv_heads = options.size("n_kv_heads", default=n_heads)
    layers = options.layer_sizes(n_layers)
    head_dim = options.size("head_dim", default=hidden_dim // n_heads)
    if "head_dim" not in family.keys or options.get("head_dim") is None:
        options.check_heads(hidden_dim, n_heads)
    trained = options.size("max_position")
    length = trained if max_position is None else max_position
    attention_scale = 1.0 if options.get("scale_attn_weights") is False else 1 / math.sqrt(head_dim)
    if "query_pre_attn_scalar" in family.defaults:
        attention_scale = options.number("query_pre_attn_scalar") ** -0.5
    experts = options.experts(n_layers)
    settings: dict[str, Any] = {
        name: options.flag(value[1:]) if isinstance(value, str) and value.startswith("@") else value
        for name, value in family.settings.items()
        if experts or not name.startswith(_EXPERTS)
    }
    length = check_integer(where, "max_position", length, 1)
    try:
        return ModelConfig(
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            hidden_dim=hidden_dim,
            ffn_dim=options.ffn_dim(hidden_dim),
            vocab_size=options.size("vocab_size") if vocab_size is None else vocab_size,
            max_position=length,
            norm_eps=options.number("norm_eps"),
            windows=options.windows(n_layers, length),
            attention_scale=settings.pop("attention_scale", options.scale("attention_scale", attention_scale)),
            embedding_scale=options.scale(
                "embedding_scale", math.sqrt(hidden_dim) if family.root_of_embedding else 1.0
            ),
            residual_scale=options.scale("residual_scale"),
            logits_scale=1 / options.scale("logits_divisor"),
            **{name: options.softcap(name) for name in SOFTCAPS},
            **options.query_scale(),
            rope_layers=options.rope_layers(n_layers),
            **_local_rope(options, n_layers, layers.get("local_head_dim", head_dim), length),
            **layers,
            **options.mixers(n_layers),
            **experts,
            learned_positions=trained if "positions" in (module.slot for module in family.modules) else 0,
            activation=settings.pop("activation", options.activation()),
            gated=settings.pop("gated", True),
            tied_head=options.tied_head() if tied_head is None else tied_head,
            **_rotary(options, head_dim, length, trained),
            **settings,
        )
    except WhetValueError as error:
        raise WhetValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


class _Options:
    """Checked options of a config, by our name or the config's, with the family's defaults."""

    def __init__(self, given: Mapping[str, Any], family: Family, where: str) -> None:
        self.given, self.family, self.where = text_options(given), family, where
        key = family.keys.get("n_experts")
        for name in _EXPERT_COUNTS:  # transformers 5 renames the option of some families
            if key is not None and name in self.given and name != key:
                others = {option: value for option, value in self.given.items() if option != name}
                self.given = {key: self.given[name], **others}
        older = {name: self.given[old] for name, old in family.older.items() if old in self.given}
        self.given = {**self.given, **older}
        if family.one_only:
            self.read_one_only_layers()
        sizes = self.given.get("per_layer_config")
        if "local_head_dim" in family.keys and isinstance(sizes, Mapping):
            self.given = {**self.given, **self.full_sizes(sizes), "per_layer_config": None}

    def get(self, name: str) -> Any:
        key = self.family.keys.get(name, name)
        return self.given[key] if key in self.given else self.family.defaults.get(name)

    def wrong(self, name: str, expected: str) -> WhetValueError:
        return WhetValueError(
            f"{self.where}: {self.family.keys.get(name, name)} is {self.get(name)!r:.80}, expected {expected}."
        )

    def check_neutral(self) -> None:
        """Reject values that would change the computation and are not supported."""
        options = {**self.family.defaults, **self.given}
        quantised = options.get("quantization_config")
        if isinstance(quantised, Mapping) and quantised.get("quant_method") == "mxfp4":  # a format of the engine
            options["quantization_config"] = None
        for name, neutral in {**_PLAIN, **self.family.plain}.items():
            if options.get(name) not in neutral and name not in self.family.keys.values():
                model_type = self.given["model_type"]
                raise WhetValueError(
                    f"{self.where}: {name} is {self.get(name)!r:.60}, which the engine does not support for "
                    f"{model_type}; expected {neutral[-1]!r}.{_FIXES.get(name, '')}"
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

    def ffn_dim(self, hidden_dim: int) -> int:
        if self.family.one_only and "mlp" not in self.kinds():  # the width of no layer
            return self.size("expert_dim") if "moe" in self.kinds() else 1
        width = self.size("ffn_dim", default=4 * hidden_dim if self.family.keys["ffn_dim"] == "n_inner" else None)
        if not self.family.ffn_adjusted:
            return width
        if (given := self.given.get("block_ff_dim")) is not None:  # older configs
            width = check_integer(self.where, "block_ff_dim", given, 1)
        if not self.flag("block_auto_adjust_ff_dim"):
            return width
        width, multiple = 2 * width // 3, self.get("block_multiple_of")
        if self.get("block_ffn_dim_multiplier") is not None:
            width = int(self.number("block_ffn_dim_multiplier") * width)
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise self.wrong("block_multiple_of", "an integer of at least 1")
        return -(-width // multiple) * multiple

    def tied_head(self) -> bool:
        older = self.given.get("tie_embedding") if self.family.mixer == "conv" else None
        if older is not None and not isinstance(older, bool):
            raise WhetValueError(f"{self.where}: tie_embedding is {older!r:.60}, expected true or false.")
        return self.flag("tie_word_embeddings") if older is None else older

    def full_sizes(self, sizes: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the option of the full layers' heads from the sizes of single layers (transformers 5)."""
        name, kinds = self.family.keys["head_dim"], self.get("layer_types") or ()
        full = [str(i) for i, kind in enumerate(kinds) if kind == "full_attention"]
        first, *others = list(sizes.values()) or [None]
        if sorted(map(str, sizes)) != sorted(full) or any(each != first for each in others) or [*first] != ["head_dim"]:
            raise WhetValueError(
                f"{self.where}: per_layer_config is {sizes!r:.80}, expected one head_dim of all layers with "
                f"full_attention, and no other size."
            )
        return {name: first["head_dim"]}

    def layer_sizes(self, n_layers: int) -> dict[str, Any]:
        """Return the fields of layers with different sizes, shared keys and values, and inputs by token."""
        if "local_head_dim" not in self.family.keys:
            return {}
        if (local := self.local_layers(n_layers))[-1]:
            raise self.wrong("layer_types", "full_attention in the last layer")
        n_shared, inputs = self.count("n_shared_kv_layers"), self.count("layer_input_dim")
        if n_shared >= n_layers:
            raise self.wrong("n_shared_kv_layers", f"an integer below {self.family.keys['n_layers']}={n_layers}")
        if inputs and self.get("vocab_size_per_layer_input") != self.get("vocab_size"):
            raise self.wrong("vocab_size_per_layer_input", f"vocab_size={self.get('vocab_size')}")
        fields: dict[str, Any] = {"n_shared_kv_layers": n_shared, "layer_input_dim": inputs}
        if any(local):
            fields["local_head_dim"] = self.size("local_head_dim")
        if n_shared and self.flag("use_double_wide_mlp"):
            width, n_own = self.size("ffn_dim"), n_layers - n_shared
            fields["ffn_dims"] = (width,) * n_own + (2 * width,) * n_shared
        return fields

    def read_one_only_layers(self) -> None:
        """Set the kinds and the number of layers that are one of a mixer, an MLP and a mixture."""
        name = self.family.keys["layer_types"]
        kinds = self.given.get(name, self.given.get("layer_types"))
        pattern = self.given.get(_PATTERN)
        if kinds is None and isinstance(pattern, str):
            kinds = list(pattern)
        kinds = self.family.defaults["layer_types"] if kinds is None else kinds
        self.given = {**self.given, name: kinds}
        if not isinstance(kinds, (list, tuple)) or not kinds or not all(isinstance(kind, str) for kind in kinds):
            raise self.wrong("layer_types", "a list of layers' kinds")
        self.given = {**self.given, self.family.keys["n_layers"]: len(kinds)}

    def mixers(self, n_layers: int) -> dict[str, Any]:
        """Return the fields of layers without attention, or without an MLP."""
        mixer = self.family.mixer
        if not mixer:
            return {}
        name, kinds = _KINDS[mixer], self.kinds()
        if kinds is None:
            attending = self.attending(n_layers)
            kinds = ["full_attention" if i in attending else name for i in range(n_layers)]
        self.check_kinds()
        if not isinstance(kinds, (list, tuple)) or len(kinds) != n_layers:
            raise self.wrong("layer_types", f"{n_layers} of {name} and full_attention")
        names = {name: mixer, "mlp": "none", "moe": "none"}
        mixers, fields = tuple(names.get(kind, "attention") for kind in kinds), {}
        if self.family.one_only:
            fields["ffn_dims"] = tuple(self.size("ffn_dim") if kind == "mlp" else 0 for kind in kinds)
        if mixer not in mixers:
            return {"mixers": mixers, **fields} if fields else {}
        if "delta_step_min" in self.family.keys:
            least = self.number("delta_step_min")
            fields["delta_step_min"] = 0.0 if 0 <= least <= NO_LEAST_STEP else least
        if mixer == "mamba" and self.get("time_step_limit") not in _UNLIMITED:
            raise self.wrong("time_step_limit", "0 and infinity, or null")
        defaults = {}
        if mixer == "mamba" and self.get("delta_dim") in (None, "auto"):
            self.given = {**self.given, self.family.keys["delta_dim"]: None}
            defaults["delta_dim"] = self.size("hidden_dim") * self.size("expansion") // self.size("n_delta_heads")
        sizes = [field for field in _MIXER_SIZES if field in self.family.keys]
        return {"mixers": mixers, **fields} | {field: self.size(field, defaults.get(field)) for field in sizes}

    def kinds(self) -> Any:
        """Return layer_types, with the names of current configs."""
        kinds = self.get("layer_types")
        return [_OLDER_KINDS.get(kind, kind) for kind in kinds] if isinstance(kinds, (list, tuple)) else kinds

    def experts(self, n_layers: int) -> dict[str, Any]:
        """Return the fields of a mixture of experts; {}: no layer is one."""
        layers = self.moe_layers(n_layers) if "n_experts" in self.family.keys and self.count("n_experts") else []
        if not any(layers):
            return {}
        fields: dict[str, Any] = {name: self.size(name) for name in ("n_experts", "n_used_experts", "expert_dim")}
        if fields["n_used_experts"] > fields["n_experts"]:
            raise self.wrong("n_used_experts", f"at most {self.family.keys['n_experts']}={fields['n_experts']}")
        if "shared_dim" in self.family.keys:
            fields["shared_dim"] = self.count("shared_dim")
        if "router_scale" in self.family.keys:
            fields["router_scale"] = self.number("router_scale")
        return fields if all(layers) else {**fields, "moe_layers": tuple(layers)}

    def moe_layers(self, n_layers: int) -> list[bool]:
        """Return whether each layer has a mixture of experts."""
        if self.family.one_only:
            return [kind == "moe" for kind in self.kinds()]
        if "n_dense_layers" in self.family.keys:
            return [i >= self.count("n_dense_layers") for i in range(n_layers)]
        if "decoder_sparse_step" not in self.family.defaults:
            return [True] * n_layers
        step, dense = self.get("decoder_sparse_step"), self.get("mlp_only_layers") or ()
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise self.wrong("decoder_sparse_step", "an integer of at least 1")
        if not isinstance(dense, (list, tuple)):
            raise self.wrong("mlp_only_layers", "a list of layers, or null")
        return [i not in dense and (i + 1) % step == 0 for i in range(n_layers)]

    def count(self, name: str) -> int:
        """Return a size that may be 0."""
        return self.size(name) if self.get(name) != 0 or isinstance(self.get(name), bool) else 0

    def attending(self, n_layers: int) -> Container[int]:
        """Return the layers with attention of a config without layer_types."""
        interval, attending = self.get("full_attention_interval"), self.get("full_attn_idxs")
        if self.family.mixer == "mamba":
            return ()
        if interval is not None:
            if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
                raise self.wrong("full_attention_interval", "an integer of at least 1")
            return range(interval - 1, n_layers, interval)
        is_list = isinstance(attending, (list, tuple))
        if attending is not None and not (is_list and all(i in range(n_layers) for i in attending)):
            raise self.wrong("full_attn_idxs", f"indices of {n_layers} layers")
        return range(n_layers) if attending is None else attending

    def scale(self, name: str, neutral: float = 1.0) -> float:
        """Return a factor; ``neutral`` in families without it."""
        if name not in self.family.keys:
            return neutral
        value = self.number(name)
        if not value > 0:
            raise self.wrong(name, "a number above 0")
        return value

    def softcap(self, name: str) -> float:
        """Return a soft-cap; 0: the family or the config has none."""
        if name not in self.family.keys or self.get(name) is None:
            return 0.0
        value = self.number(name)
        if not 1e-6 < value < 1e6:  # it, its inverse and its product with log2 e fit float32
            raise self.wrong(name, "a number from 1e-6 to 1e6, or null")
        return value

    def rotates(self) -> bool:
        """Whether heads are rotated at all."""
        name = self.family.rope_option
        if name and self.get(name) not in (None, "nope", "rope"):
            raise self.wrong(name, "rope, nope or null")
        return self.family.rope != "none" and (not name or self.get(name) == "rope")

    def query_scale(self) -> dict[str, Any]:
        """Return the fields of queries that are scaled by their position."""
        given = self.get("rope_parameters")
        if not self.family.query_scale or not isinstance(given, Mapping) or not given.get(_QUERY_SCALE):
            return {}
        scale, length = given[_QUERY_SCALE], given.get("original_max_position_embeddings")
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 <= scale < 1e6:
            raise self.wrong("rope_parameters", f"{_QUERY_SCALE} of at least 0")
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise self.wrong("rope_parameters", "original_max_position_embeddings, from which queries are scaled")
        return {"query_log_scale": float(scale), "query_scale_length": length}

    def is_scaled(self) -> bool:
        """Whether rotary settings apply: heads are rotated, by frequencies that may be scaled."""
        return self.rotates() and self.family.rope != "gptj"

    def rope_layers(self, n_layers: int) -> tuple[bool, ...]:
        if self.family.rope_windowed and self.get("sliding_window") is not None:
            layers = tuple(self.local_layers(n_layers))
            return () if all(layers) else layers
        if thetas := self.layer_thetas(n_layers):
            return () if all(thetas) else tuple(theta != 0 for theta in thetas)
        if not self.family.rope_off:
            return ()
        given = self.get("no_rope_layers")
        if given is None:
            interval = self.get("no_rope_layer_interval")
            if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
                raise self.wrong("no_rope_layer_interval", "an integer of at least 1")
            return tuple((i + 1) % interval != 0 for i in range(n_layers))
        if not isinstance(given, (list, tuple)) or len(given) < n_layers or not set(given) <= {0, 1}:
            raise self.wrong("no_rope_layers", f"a 0 or 1 for each of {n_layers} layers")
        return tuple(map(bool, given[:n_layers]))

    def layer_thetas(self, n_layers: int) -> list[float]:
        """Return the rotary base of each layer, 0: it does not rotate; []: all have rope_theta."""
        given = self.get("layer_rope_theta") if self.family.rope_by_layer else None
        if given is None:
            return []
        if not isinstance(given, (list, tuple)) or len(given) != n_layers or not all(map(_is_theta, given)):
            raise self.wrong("layer_rope_theta", f"a number of at least 0 for each of {n_layers} layers")
        if len({*given} - {0}) > 2:
            raise self.wrong("layer_rope_theta", "at most two numbers other than 0")
        return list(map(float, given))

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
        if self.family.window == "some" or "use_sliding_window" in self.family.defaults:
            window = window if self.flag("use_sliding_window") else None
        if self.family.window == "some":
            kinds = self.get("layer_types")
        if self.family.window == "none" or window is None:
            kinds, window = None, 0
        elif isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise self.wrong("sliding_window", "an integer of at least 1, or null")
        if window >= length:
            window = 0  # equivalent, and cheaper
        if self.family.window not in ("some", "pattern"):
            self.check_kinds()
        if self.family.window == "pattern" and window:
            return tuple(window if local else 0 for local in self.local_layers(n_layers))
        if kinds is None and self.family.window == "some" and window:
            full = self.get("max_window_layers")
            if isinstance(full, bool) or not isinstance(full, int) or full < 0:
                raise self.wrong("max_window_layers", "an integer of at least 0")
            return tuple(window if i >= full else 0 for i in range(n_layers))
        if kinds is None:
            return (window,) * n_layers
        return tuple(window if local else 0 for local in self.parse_kinds(kinds, n_layers))

    def check_kinds(self) -> None:
        """Reject layers that do not attend, in a family whose layers are alike."""
        kinds = self.kinds() or ()
        known, expected = {"full_attention", "sliding_attention"}, "attention"
        if self.family.mixer:
            name = _KINDS[self.family.mixer]
            known, expected = {name, "full_attention"}, f"{name} or full_attention"
        if self.family.one_only:
            known, expected = {*known, "mlp", "moe"}, f"{name}, full_attention, mlp or moe"
        if not isinstance(kinds, (list, tuple)) or not set(map(str, kinds)) <= known:
            raise self.wrong("layer_types", f"{expected} in all layers; the engine has no other kinds")

    def parse_kinds(self, kinds: Any, n_layers: int) -> list[bool]:
        """Return whether each layer attends in a window, from its layer_types."""
        known = "full_attention", "sliding_attention"
        if (
            not isinstance(kinds, (list, tuple))
            or len(kinds) != n_layers
            or not all(k in known for k in map(str, kinds))
        ):
            raise self.wrong("layer_types", f"{n_layers} of {' and '.join(known)}")
        return [str(kind) == known[1] for kind in kinds]

    def local_layers(self, n_layers: int) -> list[bool]:
        """Return whether each layer attends in a window. Default: all except every sliding_window_pattern-th."""
        if (kinds := self.get("layer_types")) is not None:
            return self.parse_kinds(kinds, n_layers)
        pattern = self.get("sliding_window_pattern")
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
            raise self.wrong("sliding_window_pattern", "an integer of at least 1")
        return [(i + (not self.family.full_first)) % pattern != 0 for i in range(n_layers)]


def _rotary(options: _Options, head_dim: int, length: int, trained: int) -> dict[str, Any]:
    """Return the fields of rotary embedding, with frequencies resolved for texts of ``length`` tokens."""
    rope, where = options.family.rope, options.where
    if not options.rotates():
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


def _local_rope(options: _Options, n_layers: int, head_dim: int, length: int) -> dict[str, Any]:
    """Return the fields of layers that rotate by separate frequencies."""
    if thetas := options.layer_thetas(n_layers):
        return _second_theta(options, thetas, head_dim, length)
    if not options.family.rope_local:
        return {}
    given = options.get("rope_parameters") or {}
    theta = options.get("rope_local_base_freq")
    theta = _scaling(options, options.size("max_position")).get("rope_theta") if theta is None else theta
    local = given.get("sliding_attention") or {"rope_theta": theta}
    if not isinstance(local, Mapping) or local.get("rope_type", "default") != "default":
        raise options.wrong("rope_parameters", "plain frequencies of sliding_attention, without scaling")
    layers = tuple(options.local_layers(n_layers))
    if not any(layers):
        return {}
    unscaled = {"rope_type": "default", "rope_theta": local.get("rope_theta")}
    inv_freq, _ = rope_frequencies(head_dim, None, length, scaling=unscaled)
    return {"local_layers": layers, "local_inv_freq": tuple(inv_freq.tolist())}


def _second_theta(options: _Options, thetas: list[float], head_dim: int, length: int) -> dict[str, Any]:
    """Return the fields of layers with another rotary base than the first layer that rotates."""
    _, *others = dict.fromkeys(theta for theta in thetas if theta) or (0.0,)
    if not others:
        return {}
    scaling = {**_scaling(options, options.size("max_position")), "rope_theta": others[0]}
    if scaling["rope_type"] != "default":
        raise options.wrong("layer_rope_theta", f"one number other than 0, with rope_type {scaling['rope_type']!r}")
    inv_freq, _ = rope_frequencies(head_dim, None, length, scaling=scaling)
    layers = tuple(theta == others[0] for theta in thetas)
    return {"local_layers": layers, "local_inv_freq": tuple(inv_freq.tolist())}


def _is_theta(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e300


def _scaling(options: _Options, trained: int) -> dict[str, Any]:
    """Collect the settings of ``rope_frequencies`` from rope_parameters, or from the options of older configs."""
    given = options.given.get("rope_parameters") or options.given.get("rope_scaling")
    given = given or options.family.defaults.get("rope_parameters") or {}
    if options.family.rope_local and isinstance(given, Mapping):
        given = given.get("full_attention", {} if "sliding_attention" in given else given)
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise WhetValueError(
            f"{options.where}: rope_parameters is {given!r:.80}, expected one object of settings for all layers."
        )
    others = options.family.rope_others
    scaling = {key: value for key, value in given.items() if value is not None and key not in others}
    if theta := next(filter(None, options.layer_thetas(options.size("n_layers"))), None):
        scaling["rope_theta"] = theta
    kind = scaling.setdefault("rope_type", scaling.get("type", "default"))
    if kind == "su" or (kind == "yarn" and options.given.get("model_type") == "phi3"):
        kind = scaling["rope_type"] = "longrope"
    for key, names in (
        ("rope_theta", ("rope_theta", "rotary_emb_base")),
        ("partial_rotary_factor", ("partial_rotary_factor", "rotary_pct") if options.family.partial_rotary else ()),
    ):
        for value in (options.get(name) for name in names):
            if value is not None:
                scaling.setdefault(key, value)
    if not options.family.partial_rotary and kind != "proportional":
        partial = scaling.pop("partial_rotary_factor", 1.0)
        if partial != 1.0 and kind != "default":  # transformers computes the frequencies, and then cannot apply them
            raise WhetValueError(
                f"{options.where}: partial_rotary_factor is {partial!r:.40} with rope_type {kind!r:.40}, and a "
                f"{options.given['model_type']} rotates whole heads. Remove it."
            )
    original, alpha = "original_max_position_embeddings", scaling.get("alpha")
    if options.family.rope_alpha and kind == "dynamic" and alpha:
        return {"rope_type": "default", "rope_theta": _stretched(options, scaling.get("rope_theta", 10_000.0), alpha)}
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


def _stretched(options: _Options, theta: Any, alpha: Any) -> float:
    """Return theta alpha^(d / (d - 2)) for heads of d elements."""
    d = options.size("head_dim", default=options.size("hidden_dim") // options.size("n_heads"))
    for value in (theta, alpha):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12 or d < 3:
            raise options.wrong("rope_parameters", "rope_theta and alpha above 0, and heads of at least 4 elements")
    return float(theta * alpha ** (d / (d - 2)))
