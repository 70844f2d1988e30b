"""Generate src/facts.ts: Python's tables of families, formats, tokenizers and settings, and the binding's names.

python facts.py OUT
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from whet.config.fields import NonNegative, Range
from whet.config.sampling import GRAMMAR_SETTINGS, SamplingParams
from whet.config.settings import GRPOConfig, SFTConfig
from whet.learner import Learner
from whet.models import adapter_files, architecture, families, formats, slots
from whet.models.sources import folder
from whet.models.tokenizers import algorithms, vocabulary
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS

BINDING = Path(__file__).parent.parent / "cpp/bindings/wasm"
KERNELS = Path(__file__).parent.parent / "src/whet/gpu/kernels"
CALLS = {"engineCalls": "engine.cpp", "opCalls": "ops.cpp", "learnerCalls": "learner.cpp", "gpuCalls": "gpu.cpp"}
STEP = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm")
RUN = (*STEP, "batch_size", "max_tokens_per_step")
LEARNING = {
    "sft": (SFTConfig, RUN),
    "grpo": (GRPOConfig, (*RUN, "group_size", "num_iterations", "epsilon", "sampler_cap")),
}
"""Settings of training that the package has."""


def camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


def settings(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the default and the accepted values of settings of a config by name."""
    hints = typing.get_type_hints(config, include_extras=True)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.name not in names:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        # epsilon, which check_grpo_options checks, has no range.
        notes = [*typing.get_args(hints[field.name])[1:], *typing.get_args(NonNegative)[1:]]
        note = next(note for note in notes if isinstance(note, Range))
        found[camel(field.name)] = {"default": default, "expected": note.expected}
    return found


def learning() -> dict[str, Any]:
    """Return the settings of each way to train, of a step of AdamW, and the config of an adapter for PEFT."""
    found = {name: settings(config, names) for name, (config, names) in LEARNING.items()}
    step = {name: setting for name, setting in found["sft"].items() if name in map(camel, STEP)}
    step["learningRate"] = step["learningRate"] | {"default": inspect.signature(Learner.step).parameters["lr"].default}
    factors = {"": (np.zeros((1, 1)), np.zeros((1, 1)), 1.0)}
    peft = adapter_files.peft_config(factors, "", "CAUSAL_LM")
    return found | {"step": step, "maxNewTokens": GRPOConfig.max_new_tokens, "peft": peft}


def pre_tokenizers() -> list[list[Any]]:
    """Return [names, definition] entries; names with the same definition share one."""
    entries: dict[Any, list[str]] = {}
    for name, entry in PRE_TOKENIZERS.items():
        entries.setdefault(entry, []).append(name)
    return [[names, {camel(key): value for key, value in entry._asdict().items()}] for entry, names in entries.items()]


def difference(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return what ``{...base, ...difference}`` makes ``found`` again, also of objects within; null: no such entry."""
    changed: dict[str, Any] = {name: None for name in base if name not in found}
    for name, value in found.items():
        of_base = base.get(name)
        if name in ("keys", "settings", "defaults", "modules"):
            value, of_base = difference(value, of_base or {}), {}
        if value != of_base:
            changed[name] = value
    return changed


def model_families() -> dict[str, Any]:
    """Return each family's config keys by model_type, with inherited ones resolved."""
    fields = (
        "keys", "settings", "defaults", "window", "rope", "partial_rotary", "rope_off", "rope_local",
        "root_of_embedding", "rope_option", "rope_windowed", "rope_others", "rope_alpha", "query_scale",
        "rope_by_layer", "full_first", "ffn_adjusted", "mixer", "with_experts", "one_only", "older", "plain",
        "file_prefix",
    )  # fmt: skip
    return {name: {f: getattr(family, f) for f in fields} for name, family in families.FAMILIES.items()}


def differences(whole: dict[str, Any], is_ordered: bool = False) -> dict[str, Any]:
    """Return the objects of families as differences from Llama's; whole, in a list, if the order would be another."""
    base = whole["llama"]

    def shorten(found: dict[str, Any]) -> Any:
        order = [name for name in {**base, **found} if name in found]
        return [found] if is_ordered and order != list(found) else difference(found, base)

    return {name: found if name == "llama" else shorten(found) for name, found in whole.items()}


def hf_modules() -> dict[str, Any]:
    """Return the Hugging Face modules of each family by model_type and slot."""
    return {
        name: {target: hf_module(m) for target, m in modules_of(name) if "hf" in m or "hf_file" in m}
        for name in families.FAMILIES
    }


def gguf_families() -> dict[str, Any]:
    """Return the architecture in GGUF of each family by model_type, and its tensors by slot."""
    fields = (
        "architecture",
        "hybrid",
        "mixture",
        "scaled",
        "scale_by_hidden",
        "sliding_window",
        "normalised",
        "ignored",
    )
    return {
        name: {field: gguf[field] for field in fields if field in gguf}
        | {"modules": {target: gguf_module(gguf, target, m) for target, m in modules_of(name) if "gguf" in m}}
        for name, family in families.FAMILIES.items()
        if (gguf := family.gguf)
    }


def gguf_module(gguf: Mapping[str, Any], target: str, module: dict[str, Any]) -> dict[str, Any]:
    """Return a ModuleSpec of web/src/models/slices.ts."""
    is_interleaved = gguf.get("interleaved") and target.endswith((":q", ":k"))
    return (
        {"names": [module["gguf"]]}
        | ({"order": "deinterleave"} if is_interleaved else {})
        | ({"isTransposed": True} if module.get("gguf_layout") == "transposed" else {})
        | ({"parameter": module["gguf_parameter"]} if "gguf_parameter" in module else {})
    )


def hf_module(module: dict[str, Any]) -> dict[str, Any]:
    """Return a ModuleSpec of web/src/models/slices.ts."""
    layouts = {
        "by_head": {"order": "splitHeads"},
        "transposed": {"isTransposed": True},
        "pairs": {"isTransposed": True, "order": "splitPairs"},
    }
    spec = {"names": [module[key] for key in ("hf", "hf_also") if key in module]}
    offset = {"offset": module["hf_offset"]} if "hf_offset" in module else {}
    parameter = {"parameter": module["hf_parameter"]} if "hf_parameter" in module else {}
    converted: dict[str, Any] = {"isNegativeExp": True} if module.get("hf_negative_exp") else {}
    converted |= {"file": module["hf_file"]} if "hf_file" in module else {}
    converted |= {"isAdapted": False} if module.get("hf_adapted") is False else {}
    orders = {"rows": {"order": "groupHeads"}, "columns": {"columnOrder": "groupHeads"}}
    order = orders.get(module.get("value_heads", ""), {})
    return spec | layouts.get(module.get("hf_layout", ""), {}) | offset | parameter | converted | order


def modules_of(name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    return families._resolve(name)["modules"].items()


def binding_names() -> dict[str, Any]:
    """Return the names in fields.def by macro: fields in their order, and the values of each enum."""
    lines = re.findall(r"^(\w+)\((.+)\)$", (BINDING.parent / "fields.def").read_text(encoding="utf-8"), re.MULTILINE)
    names = {
        f"{macro.lower()}Fields": [
            camel(re.split(r"[ .]", arguments)[-1]) for kind, arguments in lines if kind == macro
        ]
        for macro in ("MODEL", "PROMPT", "BATCH", "SAMPLE", "LOSS")
    }
    enums: dict[str, list[str]] = {}
    for macro, arguments in lines:
        if macro == "VALUE":
            enum, _, value = arguments.split(", ")
            enums.setdefault(enum, []).append(value)
    return names | {"enums": enums}


def calls(file: str) -> str:
    """Return functions that call a file's exports with more than three parameters by name."""
    text = (BINDING / file).read_text(encoding="utf-8")
    found = []
    for export, declared in re.findall(r"WHET_EXPORT\((\w+)\)[^(]*\(([^)]+)\)", text):
        names = [camel(name) for name in re.findall(r"(\w+)(?:,|$)", declared)]
        if len(names) > 3:
            fields, values = "; ".join(f"{name}: number" for name in names), ", ".join(f"a.{name}" for name in names)
            found.append(f'{export}: (core: Callable, a: {{ {fields} }}) => core.call("{export}", {values}),')
    return "\n  ".join(["{", *found]) + "\n}"


def kernels() -> dict[str, str]:
    """Return the kernels of GPUs by name, without comments."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.wgsl"))}
    return {name: re.sub(r"^ *(//.*\n)?| *//.*", "", text, flags=re.MULTILINE) for name, text in texts.items()}


def not_run() -> dict[str, list[str]]:
    """Return why some models are not run: reasons of few bytes, as folders are a chunk of at most 16 KB."""
    named = ("streams", "fused", "mixtures")
    found = {why: names for why, names in families._DATA["not_run"].items() if any(word in why for word in named)}
    found["mixtures of experts"] = found["mixtures of experts"][:8]
    return found


def facts() -> dict[str, Any]:
    kinds = {}
    for model in algorithms._BUILDERS:
        kind = vocabulary._KINDS[model]
        kinds[model] = {camel(key): value for key, value in kind._asdict().items() if key != "name"}
    return binding_names() | {
        "families": differences(model_families()),
        "hfModules": differences(hf_modules(), is_ordered=True),
        "ggufFamilies": differences(gguf_families()),
        "gguf": families.GGUF_NAMES,
        "activations": families._ACTIVATIONS,
        "plain": families._PLAIN,
        "notRun": not_run(),
        "textParts": families._TEXT_PARTS,
        "skippedTensors": families.SKIPPED,
        "predicting": families.PREDICTING,
        "kinds": families._KINDS,
        "olderKinds": families._OLDER_KINDS,
        "unlimited": [limit for limit in families._UNLIMITED if isinstance(limit, list) and isinstance(limit[1], dict)],
        "mixerSizes": families._MIXER_SIZES,
        "parts": slots.PARTS,
        "largest": architecture.LARGEST,
        "largestSize": architecture.LARGEST_SIZE,
        "formats": {
            name: {camel(k): s[k] for k in ("alias", "embedding_format", "next") if k in s}
            for name, s in formats._SETTINGS.items()
        },
        "folder": {"buffers": folder._BUFFERS.pattern},
        "sampling": settings(
            SamplingParams, [f.name for f in dataclasses.fields(SamplingParams) if f.name not in GRAMMAR_SETTINGS]
        ),
        "learning": learning(),
        "kernels": kernels(),
        "adapters": {
            "prefix": adapter_files.PEFT_PREFIX,
            "plain": adapter_files._PLAIN,
            "changesBase": adapter_files._CHANGES_BASE,
        },
        "preTokenizers": pre_tokenizers(),
        "vocabulary": {
            "kinds": kinds,
            "refused": vocabulary._REFUSED,
            "types": {kind.name: int(kind) for kind in vocabulary.TokenType},
            "special": [int(kind) for kind in vocabulary.SPECIAL],
            "roles": vocabulary._ROLES,
            "fillInTheMiddle": vocabulary._FILL_IN_THE_MIDDLE,
            "endsGeneration": vocabulary._ENDS_GENERATION,
            "ends": vocabulary._ENDS,
            "alwaysShown": vocabulary._ALWAYS_SHOWN,
            "mostTokens": vocabulary._MOST_TOKENS,
        },
    }


if __name__ == "__main__":
    lines = ["// Generated by facts.py from src/whet and cpp/bindings/wasm: change it there."]
    for name, value in facts().items():  # separate constants, so that bundlers drop the unused ones
        lines.append(f"export const {name} = {json.dumps(value, ensure_ascii=False, separators=(',', ':'))} as const;")
    lines.append("type Callable = { call(name: string, ...args: number[]): number };")
    lines += [f"export const {name} = {calls(file)};" for name, file in CALLS.items()]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
