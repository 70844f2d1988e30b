"""Open GGUF files as sources, memory-mapped; quantised rows keep their bytes. (Tokenizers: ``whet.models.tokenizers``.)

The metadata is translated into a Hugging Face config, so that only ``families`` interprets options. Tensors become
those in the Hugging Face model: llama.cpp interleaves rows of Llama's q and k, which strided views undo; newer
converters may fuse q, k and v. An unknown option or tensor is an error, because it may change the computation. GGUF
does not record the GELU of GPT-NeoX: the exact one is used, as in its config. Sliding windows apply, as in Hugging
Face; llama.cpp ignores them in llama, phi3 and starcoder2.

Source of the names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import WhetValueError
from whet.models.architecture import SOFTCAPS, ModelConfig
from whet.models.families import (
    FAMILIES,
    GGUF_NAMES,
    NO_LEAST_STEP,
    SCALES,
    Family,
    family_of,
    model_config,
    module_targets,
    short_position,
    unsupported_reason,
)
from whet.models.slots import (
    ModelSource,
    ModuleSpec,
    StoredTensor,
    find_stored,
    iter_locations,
    iter_slices,
    split_experts,
    unread_names,
)
from whet.models.sources.gguf_container import GGUFFile, read_gguf

_KEYS: dict[str, str] = GGUF_NAMES["keys"]
_ROPE_TENSORS: dict[str, str] = GGUF_NAMES["rope_tensors"]
_DELTA_KEYS = (
    "delta_conv_length", "delta_key_dim", "n_delta_key_heads", "n_delta_heads", "delta_values", "recurrent_layers",
    "full_attention_interval",
)  # fmt: skip
_BIASED = {"qkv_bias": ("qkv:", "qkv:q"), "o_bias": ("o:",), "mlp_bias": ("gate_up:gate", "up:")}
"""Field of ``ModelConfig`` -> slots whose biases make it true."""
_FUSED_QKV: str = GGUF_NAMES["fused_qkv"]
_FUSED_EXPERTS: str = GGUF_NAMES["fused_experts"]
_EXPERT_KEYS = (
    "n_experts", "n_used_experts", "expert_dim", "shared_dim", "router", "router_normalised", "n_dense_layers",
)  # fmt: skip
ROUTER_NUMBERS = {"softmax": 1, "sigmoid": 2}
"""llama.cpp's numbers of gating functions."""
NEVER_ROTATED = 1e30
"""Divisor of a frequency of 0."""
_OF_MODEL_TYPE = [
    (name, family.gguf[key])
    for key in ("architecture", "hybrid", "mixture")
    for name, family in FAMILIES.items()
    if family.gguf is not None and key in family.gguf and (key == "architecture" or family.mixer)
]
_ARCHITECTURES = {
    architecture: [name for name, same in _OF_MODEL_TYPE if same == architecture] for _, architecture in _OF_MODEL_TYPE
}
"""Architecture -> its model_types."""


def open_gguf(path: str | os.PathLike[str] | GGUFFile, *, max_position: int | None = None) -> ModelSource:
    """Open the model of a GGUF file.

    Args:
        path: a file of version 2 or 3 with tensor types that ``formats.TABLE`` lists with a ``gguf_type``, any file of
            a split model, or a ``GGUFFile``.
        max_position: see ``model_config``.

    Returns:
        A source whose slices are read-only views of the mapped file, which must not change while they are in use;
        bfloat16 is uint16, quantised rows are bytes.

    Raises:
        WhetValueError: an unsupported architecture, option or type, a damaged file, or a missing or wrong file of a
            split model.
    """
    file = path if isinstance(path, GGUFFile) else read_gguf(Path(path), f'open_gguf("{path}")')
    where = f'open_gguf("{file.paths[0]}")'
    options, described = describe_gguf(file, max_position, where)
    family = family_of(options, where)
    fused = [ModuleSpec((_FUSED_EXPERTS,), "layers.{i}.experts_gate_up", row_order=split_experts)]
    modules = find_stored(described, family.gguf_modules, fused, file.tensors.__contains__)
    architecture = file.metadata["general.architecture"]
    tensors = _split_qkv(file.tensors, modules, described, where)
    used = set(_ROPE_TENSORS.values())

    def tensor(names: Sequence[str], suffix: str) -> StoredTensor:
        name = f"{names[0]}.{suffix}"
        used.add(name)
        if name not in tensors:
            raise WhetValueError(f"{where}: tensor {name} is missing, which this {architecture} needs.")
        return tensors[name]

    slices = list(iter_slices(described, modules, tensor, where))
    unread = unread_names(described, modules)
    rest = tensors.keys() - used - predicting_tensors(file, described).keys()
    unknown = sorted(name for name in rest if name.rpartition(".")[0] not in unread)
    if unknown:
        raise WhetValueError(f"{where}: tensor {unknown[0]} is not supported in a {architecture} with this metadata.")
    targets = module_targets(family, described)
    return ModelSource(described, lambda: iter(slices), targets, short_position=short_position(options, where))


def describe_gguf(file: GGUFFile, max_position: int | None, where: str) -> tuple[dict[str, Any], ModelConfig]:
    """Return ``read_options`` of a file, and the config from them and its tensor ``rope_freqs``.

    Raises:
        WhetValueError: as ``open_gguf``.
    """
    options = read_options(file, where)
    described = model_config(options, max_position=max_position, where=where)
    described = dataclasses.replace(described, delta_tiled=is_tiled(described))
    return options, _with_rope_freqs(described, file.tensors, where)


def is_tiled(described: ModelConfig) -> bool:
    """Whether a file has the value heads of the gated delta rule tiled."""
    return "delta" in described.mixers and described.n_delta_heads != described.n_delta_key_heads


def read_options(file: GGUFFile, where: str) -> dict[str, Any]:
    """Translate a file's metadata into a Hugging Face config, without the tensor ``rope_freqs``.

    Raises:
        WhetValueError: an unsupported architecture, or an unsupported or invalid option.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise WhetValueError(
            f"{where}: general.architecture is {architecture!r:.60}{unsupported_reason(architecture)}; this engine "
            f"reads {', '.join(_ARCHITECTURES)}."
        )
    return _Metadata(file, architecture, where).options()


def rope_vectors(file: GGUFFile) -> dict[str, np.ndarray]:
    """Return the tensors of a file that are not weights: numbers of its rotary embedding."""
    return {name: file.tensors[name].tensor for name in _ROPE_TENSORS.values() if name in file.tensors}


def predicting_tensors(file: GGUFFile, described: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of blocks after the model's layers, which predict more tokens and are not run."""
    architecture, first = file.metadata["general.architecture"], described.n_layers
    n = file.metadata.get(f"{architecture}.{_KEYS['n_predicting']}", 0)
    begins = tuple(f"blk.{i}." for i in range(first, first + n))
    return {name: stored for name, stored in file.tensors.items() if name.startswith(begins)}


def tensor_name(model_type: str, name: str) -> str:
    """Return GGUF's name of a parameter: "blk.3.ffn_up.weight" for "model.layers.3.mlp.up_proj.weight".

    Raises:
        KeyError: the family has no such module, or GGUF no such family.
    """
    family = FAMILIES[model_type]
    theirs = {m.place: f"{m.names[0]}.{m.parameter}" for m in family.gguf_modules}
    ours = ((f"{m.names[0]}.{m.parameter}", m.place) for m in family.modules)
    names = {name: theirs[place] for name, place in ours if place in theirs}
    names |= {f"{name.removesuffix('.weight')}.bias": f"{n.removesuffix('weight')}bias" for name, n in names.items()}
    layer = re.search(r"\.(\d+)\.", name)
    if layer is None:
        return names[name]
    return names[name.replace(layer[0], ".{i}.", 1)].replace("{i}", layer[1])


class _Metadata:
    """Checked metadata of a file's architecture, and its translation to Hugging Face."""

    def __init__(self, file: GGUFFile, architecture: str, where: str) -> None:
        self.tensors, self.architecture, self.where = file.tensors, architecture, where
        begin = f"{architecture}."
        given = {key.removeprefix(begin): v for key, v in file.metadata.items() if key.startswith(begin)}
        for key in sorted(given.keys() - {*_KEYS.values(), *GGUF_NAMES["ignored_keys"]}):
            neutral = GGUF_NAMES["plain"].get(key)
            if neutral is None:
                raise WhetValueError(f"{where}: option {begin}{key} is not supported.")
            if given[key] not in neutral:
                raise WhetValueError(f"{where}: {begin}{key} is {given[key]!r:.60}, expected {neutral[0]!r} or none.")
        self.given = {name: given[key] for name, key in _KEYS.items() if key in given}

    def wrong(self, name: str, expected: str) -> WhetValueError:
        return WhetValueError(
            f"{self.where}: {self.architecture}.{_KEYS[name]} is {self.given.get(name)!r:.80}, expected {expected}."
        )

    def size(self, name: str, default: int | None = None) -> int:
        value = self.given.get(name, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "an integer of at least 1" + (", the same in all layers" * isinstance(value, list)))
        return value

    def number(self, name: str, default: float = 0.0) -> float:
        value = self.given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(name, "a finite number above 0")
        return float(value)

    def model_type(self) -> str:
        """Return the architecture's family; of several, the family with a window if the file has one."""
        model_types = _ARCHITECTURES[self.architecture]
        if self.given.get("shared_dim"):
            model_types = [name for name in model_types if "shared_dim" in FAMILIES[name].keys] or model_types
        switched = [name for name in model_types if FAMILIES[name].rope_option]
        if self.given.get("is_rotated") is False and switched:  # in other architectures, the key describes the training
            return switched[0]
        if not self.given.get("sliding_window"):
            return model_types[0]
        found = next((name for name in model_types if FAMILIES[name].window in ("all", "pattern")), None)
        if found is None:
            raise self.wrong("sliding_window", "none: the file does not record which layers have it")
        return found

    def options(self) -> dict[str, Any]:
        self.given.setdefault("ffn_dim", self.given.get("expert_dim"))
        kinds = self.one_only_kinds(FAMILIES[self.model_type()])
        layers = self.layer_sizes(FAMILIES[self.model_type()])
        sizes = {name: self.size(name) for name in ("n_layers", "max_position", "hidden_dim", "ffn_dim", "n_heads")}
        sizes["n_layers"] -= self.n_predicting(sizes["n_layers"])
        n_heads = sizes["n_heads"]
        if sizes["hidden_dim"] % n_heads and "head_dim" not in self.given:
            raise self.wrong("hidden_dim", f"a multiple of {_KEYS['n_heads']}={n_heads}")
        model_type = self.model_type()
        family = family_of({"model_type": model_type, "num_local_experts": self.given.get("n_experts", 0)}, self.where)
        is_hybrid = self.architecture == (family.gguf or {}).get("hybrid")
        for name in () if is_hybrid else (family.gguf or {}).get("ignored", ()):
            self.given.pop(name, None)
        mixers = self.mixers(family, sizes["n_layers"])
        sizes["n_kv_heads"] = self.size("n_kv_heads", n_heads)
        sizes["head_dim"] = self.size("head_dim", sizes["hidden_dim"] // n_heads)
        if self.size("value_dim", sizes["head_dim"]) != sizes["head_dim"]:
            raise self.wrong("value_dim", f"{_KEYS['head_dim']}={sizes['head_dim']}")
        gguf = family.gguf or {}
        by_hidden = sizes["n_layers"] == gguf.get("scale_by_hidden")
        for name, implied in (("n_kv_heads", n_heads), ("head_dim", sizes["hidden_dim"] // n_heads)):
            if name not in family.keys and sizes[name] != implied:
                raise WhetValueError(f"{self.where}: {name} is {sizes[name]}, expected {implied} for a {model_type}.")
        epsilon = next((self.number(name) for name in ("rms_norm_eps", "layer_norm_eps") if name in self.given), None)
        if epsilon is None:
            raise self.wrong("rms_norm_eps", "a number above 0")
        names = {f"{m.slot}:{m.part}": m.names[0].replace("{i}", "0") for m in family.gguf_modules}
        names.setdefault("layers.{i}.qkv:", _FUSED_QKV.replace("{i}", "0"))
        table = self.tensors.get(f"{names['embedding:']}.weight")
        if table is None or len(table.shape) != 2:
            raise WhetValueError(f"{self.where}: {names['embedding:']}.weight, the embedding, is missing or not 2-D.")
        rotary_dim = self.size("rotary_dim", sizes["head_dim"])
        if rotary_dim != sizes["head_dim"] and not family.partial_rotary:
            raise self.wrong("rotary_dim", f"the whole head, {sizes['head_dim']}")
        rope = self.rope(sizes, rotary_dim)
        if rope["rope_type"] == "yarn":  # a file does not record it
            rope["truncate"] = family.truncates
        if family.query_scale:
            rope["llama_4_scaling_beta"] = self.given.get("query_log_scale", 0.0)
            rope.setdefault("original_max_position_embeddings", sizes["max_position"])
        elif self.given.get("query_log_scale", 0.0) != 0.0:
            raise self.wrong("query_log_scale", "0 or none")
        # A text has the same position in all sections, so that they do not change its rotations.
        if isinstance(sections := self.given.get("mrope_section"), list) and "mrope_section" in family.rope_others:
            rope["mrope_section"] = sections[:3]
        biased = {
            f"{m.slot}:{m.part}"
            for m in family.gguf_modules
            if any(f"{m.names[0].replace('{i}', str(i))}.bias" in self.tensors for i in range(sizes["n_layers"]))
        }
        biased |= {"layers.{i}.qkv:"} if f"{names['layers.{i}.qkv:']}.bias" in self.tensors else set()
        return {
            "model_type": model_type,
            **{family.keys[name]: value for name, value in sizes.items() if name in family.keys},
            family.keys["norm_eps"]: epsilon,
            "vocab_size": table.shape[0],
            "tie_word_embeddings": f"{names['head:']}.weight" not in self.tensors,
            **self.biases(family, biased),
            **layers,
            "vocab_size_per_layer_input": table.shape[0],
            **self.scales(family, sizes["head_dim"]),
            **self.softcaps(family),
            "use_parallel_residual": self.given.get("use_parallel_residual", True),
            "sliding_window": self.given.get("sliding_window") or gguf.get("sliding_window"),
            "use_sliding_window": bool(self.given.get("sliding_window")),
            "rope_parameters": self.by_layers(rope, family),
            **self.window_layers(family, sizes["n_layers"]),
            **self.not_rotated(family, sizes["n_layers"]),
            **mixers,
            **kinds,
            **self.experts(family, sizes["ffn_dim"]),
            **self.layer_thetas(family, sizes["n_layers"], rope["rope_theta"]),
            "query_pre_attn_scalar": sizes["hidden_dim"] // n_heads if by_hidden else sizes["head_dim"],
            # transformers prefers this one over the one in rope_parameters.
            "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
        }

    def layer_sizes(self, family: Family) -> dict[str, Any]:
        """Return the options of layers with different sizes, shared keys and values, and inputs by token."""
        if "local_head_dim" not in family.keys:
            for name in ("local_head_dim", "local_value_dim", "local_rotary_dim"):
                if self.given.get(name, self.given.get("head_dim")) != self.given.get("head_dim"):
                    raise self.wrong(name, f"{_KEYS['head_dim']} or none")
            for name in ("n_shared_kv_layers", "layer_input_dim"):
                if self.given.get(name, 0) != 0:
                    raise self.wrong(name, "0 or none")
            return {}
        local = self.size("local_head_dim")
        for name in ("local_value_dim", "local_rotary_dim"):
            if self.size(name, local) != local:
                raise self.wrong(name, f"{_KEYS['local_head_dim']}={local}")
        counts = {name: self.given.get(name, 0) for name in ("n_shared_kv_layers", "layer_input_dim")}
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise self.wrong(name, "an integer of at least 0")
        widths = self.given.get("ffn_dim")
        widths = widths.tolist() if isinstance(widths, np.ndarray) else widths
        is_double = False
        if isinstance(widths, list) and len(set(widths)) > 1:
            is_double = True
            n_own = len(widths) - counts["n_shared_kv_layers"]
            if widths != [widths[0]] * n_own + [2 * widths[0]] * counts["n_shared_kv_layers"]:
                raise self.wrong("ffn_dim", "one width, and twice that in the layers without keys and values")
            self.given["ffn_dim"] = widths[0]
        sizes = {"local_head_dim": local, **counts}
        return {family.keys[name]: size for name, size in sizes.items()} | {"use_double_wide_mlp": is_double}

    def by_layers(self, rope: dict[str, Any], family: Family) -> dict[str, Any]:
        """Return the rotary settings, by kind of layer if layers with a window have separate ones."""
        name = "rope_local_base_freq"
        if not family.rope_local:
            if name in self.given:
                raise self.wrong(name, "none")
            return rope
        theta = self.number(name, family.defaults.get(name, rope["rope_theta"]))
        local = {"rope_type": "default", "rope_theta": theta}
        return {"full_attention": rope, "sliding_attention": local}

    def window_layers(self, family: Family, n_layers: int) -> dict[str, Any]:
        """Return the layers with a window, if the file names them: one flag a layer, or the period of those without."""
        value = self.given.get("window_layers")
        if family.rope_windowed and not self.given.get("sliding_window"):
            return {"layer_types": ["full_attention"] * n_layers}
        if value is None or (family.window != "pattern" and not self.given.get("sliding_window")):
            return {}
        if family.window != "pattern":
            raise self.wrong("window_layers", "none")
        if not isinstance(value, (list, np.ndarray)):
            return {"sliding_window_pattern": self.size("window_layers")}
        if len(value) != n_layers or not all(flag in (False, True) for flag in value):
            raise self.wrong("window_layers", f"{n_layers} of true and false")
        return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in value]}

    def not_rotated(self, family: Family, n_layers: int) -> dict[str, Any]:
        """Return the options of a model whose family has models without rotations, hybrids and mixtures too."""
        if not family.rope_option:
            return {}
        kind = None if self.given.get("is_rotated") is False else "rope"
        return {family.rope_option: kind, "num_local_experts": 0, "layer_types": ["full_attention"] * n_layers}

    def n_predicting(self, n_blocks: int) -> int:
        """Return the number of blocks after the layers, which predict more tokens."""
        n = self.given.get("n_predicting", 0)
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < n_blocks:
            raise self.wrong("n_predicting", f"an integer below {_KEYS['n_layers']}={n_blocks}")
        return n

    def mixers(self, family: Family, n_layers: int) -> dict[str, Any]:
        """Return the options of what mixes the tokens in each layer."""
        table = family.gguf or {}
        is_mamba = family.mixer == "mamba" and self.architecture == table.get("hybrid", self.architecture)
        mixer = family.mixer if is_mamba or family.mixer != "mamba" else ""
        known = {"conv": ("conv_length",), "delta": _DELTA_KEYS, "mamba": _DELTA_KEYS[:5]}
        for name in ("conv_length", *_DELTA_KEYS):
            if name in self.given and name not in known.get(mixer, ()):
                raise self.wrong(name, "none")
        read = {"conv": self.convolutions, "delta": self.delta_rules, "mamba": self.mamba_layers}.get(mixer)
        return {} if read is None else read(family, n_layers)

    def delta_rules(self, family: Family, n_layers: int) -> dict[str, Any]:
        """Return the options of the gated delta rule: of the layers that the file names, or all except every 4th."""
        flags, interval = self.given.get("recurrent_layers"), self.size("full_attention_interval", 4)
        if flags is None:
            flags = [(i + 1) % interval != 0 for i in range(n_layers)]
        if not isinstance(flags, (list, np.ndarray)) or len(flags) < n_layers or not {*flags} <= {False, True}:
            raise self.wrong("recurrent_layers", f"{n_layers} of true and false")
        kinds = ["linear_attention" if flag else "full_attention" for flag in flags[:n_layers]]
        return {"layer_types": kinds} | self.state_sizes(family)

    def one_only_kinds(self, family: Family) -> dict[str, Any]:
        """Return the kinds of layers that are one of a mixer, an MLP and a mixture, from their kv heads and widths."""
        if not family.one_only:
            return {}
        n_blocks = self.size("n_layers")
        n_layers, per_layer = n_blocks - self.n_predicting(n_blocks), []
        for name in ("n_kv_heads", "ffn_dim"):
            value = self.given.get(name)
            value = value.tolist() if isinstance(value, np.ndarray) else value
            if not isinstance(value, list) or len(value) != n_blocks:
                raise self.wrong(name, f"a number for each of {n_blocks} layers")
            per_layer.append(value[:n_layers])
            self.given[name] = [n for n in value[:n_layers] if n != 0] or [1]
        of_widths = "moe" if self.given.get("n_experts") else "mlp"
        of_heads = ("linear_attention", "full_attention")
        kinds = [of_widths if width else of_heads[bool(heads)] for heads, width in zip(*per_layer, strict=True)]
        self.given["n_kv_heads"] = [n for n, kind in zip(per_layer[0], kinds, strict=True) if kind == of_heads[1]] or [
            1
        ]
        if "linear_attention" not in kinds:
            return {family.keys["layer_types"]: kinds}
        return {family.keys["layer_types"]: kinds, family.keys["delta_step_min"]: NO_LEAST_STEP}

    def mamba_layers(self, family: Family, n_layers: int) -> dict[str, Any]:
        """Return the options of Mamba-2: of layers without kv heads."""
        if family.one_only:
            return self.state_sizes(family)
        kinds = self.kinds_by_heads("linear_attention", n_layers)
        return {"layer_types": kinds} | (self.state_sizes(family) if "linear_attention" in kinds else {})

    def state_sizes(self, family: Family) -> dict[str, Any]:
        """Return the sizes of layers whose heads have a matrix as state."""
        sizes = {name: self.size(name) for name in ("n_delta_heads", "n_delta_key_heads", "delta_key_dim")}
        sizes |= {"conv_length": self.size("delta_conv_length"), "delta_dim": self.size("delta_values")}
        if sizes["delta_dim"] % sizes["n_delta_heads"]:
            raise self.wrong("delta_values", f"a multiple of {_KEYS['n_delta_heads']}={sizes['n_delta_heads']}")
        sizes["delta_dim"] //= sizes["n_delta_heads"]
        return {family.keys[name]: size for name, size in sizes.items()}

    def kinds_by_heads(self, kind: str, n_layers: int) -> list[str]:
        """Return the layer_types of a model whose layers without kv heads are of a kind."""
        heads = self.given.get("n_kv_heads")
        heads = heads.tolist() if isinstance(heads, np.ndarray) else heads
        if not isinstance(heads, list):
            return ["full_attention"] * n_layers
        if len(heads) != n_layers:
            raise self.wrong("n_kv_heads", f"a number for each of {n_layers} layers")
        self.given["n_kv_heads"] = [n for n in heads if n != 0] or [1]
        return [kind if n == 0 else "full_attention" for n in heads]

    def convolutions(self, family: Family, n_layers: int) -> dict[str, Any]:
        """Return the options of short convolutions: of layers without kv heads."""
        kinds = self.kinds_by_heads("conv", n_layers)
        length = {family.keys["conv_length"]: self.size("conv_length")} if "conv" in kinds else {}
        return {"layer_types": kinds, "block_auto_adjust_ff_dim": False, **length}

    def experts(self, family: Family, ffn_dim: int) -> dict[str, Any]:
        """Return the options of a mixture of experts."""
        table, router = family.gguf or {}, family.settings.get("router", "softmax")
        is_scaled = table.get("scaled", False)
        if not is_scaled and self.given.get("router_scale", 0.0) not in (0.0, 1.0):
            raise self.wrong("router_scale", "1 or none")
        if "n_experts" not in family.keys or (family.one_only and not self.given.get("n_experts")):
            for name in _EXPERT_KEYS:
                if self.given.get(name, 0) != 0:
                    raise self.wrong(name, "0 or none")
            return {}
        normalised = bool(self.given.get("router_normalised")) if is_scaled else table["normalised"]
        if self.given.get("router_normalised", normalised) != normalised:
            raise self.wrong("router_normalised", f"{normalised} or none".lower())
        if self.given.get("router", ROUTER_NUMBERS[router]) != ROUTER_NUMBERS[router]:
            raise self.wrong("router", f"{ROUTER_NUMBERS[router]}, {router}, or none")
        sizes: dict[str, Any] = {name: self.size(name) for name in ("n_experts", "n_used_experts")}
        sizes["expert_dim"] = self.size("expert_dim", ffn_dim)
        counts = [name for name in ("shared_dim", "n_dense_layers") if name in family.keys]
        sizes |= {name: self.size(name) if self.given.get(name) else 0 for name in counts}
        if is_scaled:
            sizes["router_scale"] = self.number("router_scale", 1.0) if self.given.get("router_scale") else 1.0
        has_correction = any(name.endswith(GGUF_NAMES["correction"]) for name in self.tensors)
        return {family.keys[name]: size for name, size in sizes.items()} | {
            "norm_topk_prob": normalised,
            "use_expert_bias": has_correction,
        }

    def layer_thetas(self, family: Family, n_layers: int, theta: float) -> dict[str, Any]:
        """Return the rotary base of each layer, if the file names the layers that rotate."""
        flags = self.given.get("rope_layers")
        if flags is None:
            return {}
        if not family.rope_by_layer:
            raise self.wrong("rope_layers", "none")
        if not isinstance(flags, (list, np.ndarray)) or len(flags) != n_layers or not {*flags} <= {False, True}:
            raise self.wrong("rope_layers", f"{n_layers} of true and false")
        return {"layer_rope_theta": [theta if flag else 0.0 for flag in flags]}

    def biases(self, family: Family, biased: set[str]) -> dict[str, bool]:
        """Return the family's options of biases, from the tensors that exist."""
        found: dict[str, bool] = {}
        for field, slots in _BIASED.items():
            option = family.settings.get(field)
            if isinstance(option, str):
                found.setdefault(option[1:], any(f"layers.{{i}}.{slot}" in biased for slot in slots))
        return found

    def scales(self, family: Family, head_dim: int) -> dict[str, float]:
        """Return the factors of the family, after checking that the others are neutral."""
        default = dict.fromkeys(SCALES, 1.0) | {"attention_scale": 1 / math.sqrt(head_dim)}
        for name in SCALES:
            if name not in family.keys and not math.isclose(
                self.number(name, default[name]), default[name], rel_tol=1e-6
            ):
                raise self.wrong(name, f"{default[name]:.6g} or none")
        return {family.keys[name]: self.number(name, default[name]) for name in SCALES if name in family.keys}

    def softcaps(self, family: Family) -> dict[str, float]:
        """Return the soft-caps of the family. Default: the family's, as in llama.cpp."""
        for name in SOFTCAPS:
            if self.given.get(name, 0.0) != 0.0 and name not in family.keys:
                raise self.wrong(name, "0 or none")
        names = [name for name in SOFTCAPS if name in family.keys]
        given = [name for name in names if name in self.given or family.defaults.get(name) is not None]
        return {family.keys[n]: self.number(n, family.defaults.get(n, 0.0)) for n in given}

    def rope(self, sizes: Mapping[str, int], rotary_dim: int) -> dict[str, Any]:
        """Return Hugging Face's rope_parameters. (rotary_dim + 0.5: transformers rounds the product down.)"""
        head_dim = sizes["head_dim"]
        found: dict[str, Any] = {"rope_type": "default", "rope_theta": self.number("rope_theta", 10000.0)}
        found["partial_rotary_factor"] = 1.0 if rotary_dim == head_dim else (rotary_dim + 0.5) / head_dim
        kind = self.given.get("rope_type", "none")
        attention_factor = self.number("attention_factor", 1.0)
        original = self.size("original_max_position_embeddings", sizes["max_position"])
        factors = {name: self.tensors.get(_ROPE_TENSORS[name]) for name in ("short_factor", "long_factor")}
        if any(factors.values()):
            found |= {"rope_type": "longrope"} | {
                name: _read_factors(tensor, self.where) for name, tensor in factors.items()
            }
            found |= {"original_max_position_embeddings": original, "attention_factor": attention_factor}
        elif kind in ("linear", "yarn"):
            factor = self.number("factor", 1.0)
            found |= {"rope_type": kind, "factor": factor}
            if kind == "yarn":
                growth, multiplier = 0.1 * math.log(max(factor, 1.0)), self.given.get("yarn_log_multiplier", 0.0)
                if isinstance(multiplier, bool) or not isinstance(multiplier, (int, float)) or multiplier < 0:
                    raise self.wrong("yarn_log_multiplier", "a number of at least 0")
                relative = attention_factor * (growth + 1.0) / (growth * multiplier + 1.0)
                # llama.cpp's converter writes the config's value to this key, which llama.cpp does not read.
                is_relative = "attention_factor" in self.given
                found["attention_factor"] = relative if is_relative else self.number("yarn_attention_factor", relative)
                found["original_max_position_embeddings"] = original
                found |= {name: self.number(name) for name in ("beta_fast", "beta_slow") if name in self.given}
        elif kind != "none":
            raise self.wrong("rope_type", "none, linear, yarn, or longrope with its rope_factors tensors")
        if attention_factor != 1.0 and found["rope_type"] in ("default", "linear"):  # which have no such option
            factors = [found.pop("factor", 1.0)] * (rotary_dim // 2)
            found |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
            found |= {"original_max_position_embeddings": sizes["max_position"], "attention_factor": attention_factor}
        return found


def _split_qkv(
    tensors: Mapping[str, StoredTensor], modules: Sequence[ModuleSpec], config: ModelConfig, where: str
) -> dict[str, StoredTensor]:
    """Split a fused q, k and v, weight or bias, of an architecture with three tensors."""
    split = dict(tensors)
    for location in iter_locations(config, [module for module in modules if module.part in ("q", "k", "v")]):
        fused = _FUSED_QKV.replace("{i}", location.weight.split(".")[1])
        for name, single in ((f"{fused}.{suffix}", f"{location.names[0]}.{suffix}") for suffix in ("weight", "bias")):
            if name not in tensors:
                continue
            whole, n_rows = tensors[name], config.slots()[location.weight][0]
            if single in tensors:
                raise WhetValueError(f"{where}: there are both {name} and {single}. Convert the model again.")
            if whole.shape[0] != n_rows:
                raise WhetValueError(f"{where}: {name} has {whole.shape[0]} rows, expected {n_rows}: q, k and v.")
            split.pop(name, None)
            rows = slice(location.first_row, location.first_row + location.shape[0])
            split[single] = StoredTensor(whole.tensor[rows], whole.format, (location.shape[0], *whole.shape[1:]))
    return split


def _read_factors(stored: StoredTensor | None, where: str) -> list[float]:
    if stored is None or stored.format != "float32" or len(stored.shape) != 1:
        raise WhetValueError(
            f"{where}: rope_freqs, rope_factors_short and rope_factors_long have to be 1-D F32 tensors."
        )
    return stored.tensor.tolist()


def _with_rope_freqs(config: ModelConfig, tensors: Mapping[str, StoredTensor], where: str) -> ModelConfig:
    """Divide the frequencies by a tensor, llama.cpp's form of Llama 3's scaling."""
    name = _ROPE_TENSORS["divisors"]
    if name not in tensors:
        return config
    divisors = np.array(_read_factors(tensors[name], where), np.float64)
    if divisors.shape != (config.rotary_dim // 2,) or not (divisors > 0).all() or not np.isfinite(divisors).all():
        raise WhetValueError(
            f"{where}: {name} is {divisors.tolist()!r:.80}, expected {config.rotary_dim // 2} finite "
            f"numbers above 0, one for each pair."
        )
    inv_freq = np.where(divisors < NEVER_ROTATED * (1 - 1e-6), np.array(config.inv_freq) / divisors, 0.0)
    return dataclasses.replace(config, inv_freq=tuple(inv_freq.tolist()))
