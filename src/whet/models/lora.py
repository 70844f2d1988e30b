"""The modules of a model that LoRA adapters change, from settings or a PEFT folder, before the model is loaded.

Only headers are read: the model's config or GGUF metadata, adapter_config.json and the header of
adapter_model.safetensors.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from whet import _core
from whet.errors import CheckpointError, WhetValueError
from whet.models.adapter_files import (
    PEFT_PREFIX,
    SCORE,
    SEPARATE,
    adapted_name,
    describe_special,
    match_pattern,
    read_peft_config,
)
from whet.models.slots import ModelSource, WeightLocation, is_norm, with_expert_modules
from whet.models.sources.folder import read_safetensors

ALL_LINEAR = "all-linear"
"""PEFT's name for every linear layer except the head. Routers get no adapters by it, nor do layers whose adapters PEFT
refuses or llama.cpp ignores."""
EXPERTS = "experts"
"""The part of a name of ``lora_layers`` that the experts of a mixture have, which no other name reaches."""
_CORE_MATRICES = {
    "qkv": _core.Target.QKV,
    "o": _core.Target.O,
    "conv_in": _core.Target.QKV,
    "conv_out": _core.Target.O,
    "delta_in": _core.Target.QKV,
    "delta_out": _core.Target.O,
    "gate_up": _core.Target.UP,
    "up": _core.Target.UP,
    "down": _core.Target.DOWN,
    "input_gate": _core.Target.INPUT_GATE,
    "input_out": _core.Target.INPUT_OUT,
    "layer_inputs": _core.Target.LAYER_INPUTS,
    "experts_gate_up": _core.Target.EXPERTS_UP,
    "experts_up": _core.Target.EXPERTS_UP,
    "experts_down": _core.Target.EXPERTS_DOWN,
}
"""The core's matrices by the last part of a slot's name."""
_FACTOR = re.compile(r"(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))")
_WHOLE = re.compile(r"(.+)\.(?:weight|bias)")


LoraInit = Literal["zero", "pissa"]
"""Initial values of new adapters: A is random and B zero, or the principal part of the matrix."""


class LoraSettings(NamedTuple):
    """Settings of new adapters, by their names in ``whet train``, where they are documented."""

    lora_rank: int
    lora_layers: Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    rank_pattern: Mapping[str, int] = MappingProxyType({})
    alpha_pattern: Mapping[str, float] = MappingProxyType({})
    lora_init: LoraInit = "zero"
    use_dora: bool = False
    trainable_token_indices: Sequence[int] = ()


class Adapted(NamedTuple):
    """The matrices and modules of a model that adapters change.

    Attributes:
        factors: location and rank of every matrix, or matrices of experts, with an adapter W + scaling B A each.
        whole: locations of modules of which a copy is trained, PEFT's ``modules_to_save``.
        special: a feature beyond LoRA and DoRA, such as trained tokens; empty: none.
        is_new: whether the adapters change nothing yet; False for saved ones.
        n_special: number of parameters of that feature, and of magnitudes.
        use_dora: whether the adapters have magnitudes.
    """

    factors: tuple[tuple[WeightLocation, int], ...]
    whole: tuple[WeightLocation, ...] = ()
    special: str = ""
    is_new: bool = True
    n_special: int = 0
    use_dora: bool = False

    @property
    def n_whole(self) -> int:
        """Number of parameters of the modules that are trained whole."""
        return sum(math.prod(location.shape) + (location.shape[0] if location.bias else 0) for location in self.whole)

    @property
    def n_parameters(self) -> int:
        """Number of trained parameters."""
        factors = (each.n_experts * rank * sum(each.matrix_shape) for each, rank in self.factors)
        return sum(factors) + self.n_whole + self.n_special

    def floats_reason(self, in_torch: bool) -> str:
        """Return the first feature that needs float weights, in modules of torch or in a learner; empty: packed ones
        are enough.
        """
        matrices = (f"{location.names[0]} in modules_to_save" for location in self.whole if not is_norm(location))
        return self.special or next(matrices, "use_dora=True" if self.use_dora and in_torch else "")

    @property
    def is_separable(self) -> bool:
        """Whether an engine can compute all adapters and trained norms next to unchanged weights."""
        is_low_rank = not self.special and all(_is_of_core(location) for location, _ in self.factors)
        return is_low_rank and all(map(is_norm, self.whole))


def choose_adapted(source: ModelSource, settings: LoraSettings, where: str = "LoRA") -> Adapted:
    """Choose new adapters of a model.

    Args:
        source: the model; its weights are not read.
        settings: ``lora_layers`` are PEFT's ``target_modules``: names or ends of names. Default: "all-linear", without
            routers and the experts of mixtures: those are "experts". ``modules_to_save`` are ends of names.
        where: prefix of error messages.

    Raises:
        WhetValueError: an unknown module, with similar names; a module without a matrix, or named twice; a pattern that
            matches no adapter; or a rank above the larger side of a matrix, with the largest rank for all. (Gates of
            linear attention have as many rows as heads: the smaller side would exclude ranks that others need.)
    """
    layers, modules_to_save = settings.lora_layers, settings.modules_to_save
    chosen: list[WeightLocation] = []
    for name in layers or [ALL_LINEAR]:
        if name == ALL_LINEAR:
            known = [each for each in _list_locations(source) if core_matrix(each.weight) is not None]
            chosen += [location for location in known if location.module.adapted]
        else:
            chosen += _find(source, name, f".{name}", "lora_layers", where)
    whole = [location for name in modules_to_save for location in _find(source, name, name, "modules_to_save", where)]
    for location in chosen:
        if is_norm(location):
            raise WhetValueError(
                f"{where}: lora_layers names {location.names[0]}, not a matrix. Train it whole: modules_to_save."
            )
        if location in whole:
            raise WhetValueError(
                f"{where}: {location.names[0]} is in modules_to_save, and also has an adapter. Name it in only one."
            )
    for name in ("rank_pattern", "alpha_pattern"):
        _check_patterns(getattr(settings, name), [location.name for location in chosen], name, where)
    ranks = {each: match_pattern(settings.rank_pattern, each.name, settings.lora_rank) for each in chosen}
    is_pissa = settings.lora_init == "pissa"
    for location, rank in sorted(ranks.items(), key=lambda item: max(item[0].matrix_shape)):
        most = (min if is_pissa else max)(location.matrix_shape)
        if rank > most:
            n, k = location.matrix_shape
            raise WhetValueError(
                f"{where}: lora_rank is {rank}, and {location.name} is {n} x {k}: the rank of its adapter is at most "
                f"{most}. Pass {most}, or remove that layer from lora_layers."
            )
        if is_pissa and (location.n_experts > 1 or core_matrix(location.weight) is None):
            raise WhetValueError(
                f"{where}: lora_init is 'pissa', and {location.name} is not a linear layer of attention or MLP. Remove "
                f"it from lora_layers, or pass lora_init 'zero'."
            )
    factors = tuple((location, 2 * rank if is_pissa else rank) for location, rank in ranks.items())
    special, n_special = "", 0
    if settings.use_dora:
        n_special = sum(location.shape[0] for location in ranks)
        if other := next((each.name for each in ranks if each.n_experts > 1 or each.weight == "embedding"), ""):
            raise WhetValueError(
                f"{where}: use_dora is True, and {other} is not a linear layer. Remove it from lora_layers."
            )
    if tokens := settings.trainable_token_indices:
        _check_tokens(tokens, source, [*ranks, *whole], where)
        special = f"trainable_token_indices={list(tokens)!r:.60}"
        n_special += len(tokens) * source.config.hidden_dim
    return Adapted(factors, tuple(dict.fromkeys(whole)), special, n_special=n_special, use_dora=settings.use_dora)


def _check_patterns(patterns: Mapping[str, Any], names: Sequence[str], setting: str, where: str) -> None:
    for pattern in patterns:
        try:
            found = any(match_pattern({pattern: True}, name, False) for name in names)
        except re.error as error:
            raise WhetValueError(f"{where}: {setting} has {pattern!r}, not a regular expression: {error}.") from None
        if not found:
            raise WhetValueError(
                f"{where}: {setting} has {pattern!r}, which matches no layer with an adapter, such as {names[0]}. "
                f"Remove it."
            )


def _check_tokens(tokens: Sequence[int], source: ModelSource, others: Sequence[WeightLocation], where: str) -> None:
    n_tokens = source.config.vocab_size
    if len(set(tokens)) < len(tokens) or not all(0 <= token < n_tokens for token in tokens):
        raise WhetValueError(
            f"{where}: trainable_token_indices is {list(tokens)!r:.60}, expected different tokens from 0 to "
            f"{n_tokens - 1}."
        )
    if any(location.weight == "embedding" for location in others):
        raise WhetValueError(
            f"{where}: trainable_token_indices has tokens of the embedding, which is also in lora_layers or "
            f"modules_to_save. Name it in only one."
        )


def read_adapted(folder: str | os.PathLike[str], source: ModelSource, where: str) -> Adapted:
    """Read the adapters of a model from a PEFT folder.

    Raises:
        CheckpointError: the adapters are missing, damaged, not LoRA, or do not fit the model.
    """
    label = f'{where}: "{folder}"'
    config = read_peft_config(label, Path(folder) / "adapter_config.json")
    path = Path(folder) / "adapter_model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{label}: there is no {path.name}. Save the adapters with save_pretrained.")
    shapes = {name: entry.shape for name, entry in read_safetensors(path, where).items()}
    pairs: dict[tuple[WeightLocation, bool], dict[str, tuple[int, ...]]] = {}
    targets = with_expert_modules(source.targets)
    whole: dict[WeightLocation, None] = {}
    for name, shape in shapes.items():
        name = name.removeprefix(PEFT_PREFIX)
        if match := _FACTOR.fullmatch(name):
            location = _find_location(source, targets, adapted_name(match[1], config), label)
            pairs.setdefault((location, match[3] is not None), {})[match[2] or match[3]] = shape
        elif name == f"{SCORE}.weight":
            continue
        elif (match := _WHOLE.fullmatch(name)) and ".base_layer." not in name and ".lora_" not in name:
            whole[_find_location(source, targets, match[1], label)] = None
    if not pairs:
        raise CheckpointError(f"{label}: it has no lora_A and lora_B.")
    factors = tuple((location, _rank(location, is_table, pair, label)) for (location, is_table), pair in pairs.items())
    special = describe_special(config, label, SEPARATE)
    has_magnitudes = bool(config.get("use_dora"))
    n_special = sum(location.shape[0] for location, _ in factors) if has_magnitudes else 0
    return Adapted(factors, tuple(whole), special, is_new=False, n_special=n_special, use_dora=has_magnitudes)


def core_matrix(slot: str) -> tuple[int, _core.Target] | None:
    """Return the layer, or 0, and the core's name of a matrix to whose product adapters can be added; None: no such
    matrix.
    """
    _, layer, kind = slot.split(".") if slot.count(".") == 2 else ("", "", slot)
    return (int(layer or 0), _CORE_MATRICES[kind]) if kind in _CORE_MATRICES else None


def _list_locations(source: ModelSource) -> list[WeightLocation]:
    """Return the locations of matrices and norms."""
    return list(dict.fromkeys(each for each in source.targets.values() if each.module.parameter == "weight"))


def _is_of_core(location: WeightLocation) -> bool:
    return core_matrix(location.weight) is not None


def _find(source: ModelSource, name: str, end: str, setting: str, where: str) -> list[WeightLocation]:
    """Find modules by the end of their names, at a dot; experts only by names with ``EXPERTS``."""
    known = _list_locations(source)
    if EXPERTS in name.split("."):
        known = [each for each in dict.fromkeys(source.targets.values()) if core_matrix(each.weight) is not None]
    found = [each for each in known if any(f".{own}".endswith(end) for own in (*each.names, each.name))]
    if not name or not found:
        raise WhetValueError(
            f"{where}: {setting} names {name!r}, and the model has no such module. {_suggest(source, name)}"
        )
    return found


def _suggest(source: ModelSource, name: str) -> str:
    """Suggest the names of modules similar to an unknown one."""
    if source.config.n_experts and re.search(r"(^|\.)(experts|w[123]|\w+_(proj|linear))(\.|$)", name):
        return f'Name "{EXPERTS}" for adapters of all experts.'
    full = [location.names[0] for location in _list_locations(source)]
    short = list(dict.fromkeys(known.rpartition(".")[2] for known in full))
    close = difflib.get_close_matches(name, short, n=2) or difflib.get_close_matches(name, full, n=2)
    return f"Did you mean {' or '.join(close)}?" if close else f"It has {', '.join(short)}."


def _find_location(
    source: ModelSource, targets: Mapping[str, WeightLocation], module: str, label: str
) -> WeightLocation:
    if module not in targets:
        raise CheckpointError(
            f"{label}: it is an adapter of another model: the model has no {module}. {_suggest(source, module)}"
        )
    return targets[module]


def _rank(location: WeightLocation, is_table: bool, pair: Mapping[str, tuple[int, ...]], label: str) -> int:
    """Return the rank of an adapter whose shapes fit its matrix, or its embedding."""
    a, b, n_experts = pair.get("A", ()), pair.get("B", ()), location.n_experts
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0] or a[0] % n_experts:
        ranks = f"{n_experts} r" if n_experts > 1 else "r"
        raise CheckpointError(f"{label}: {location.name} has {dict(pair)}, expected A ({ranks}, k) and B (n, {ranks}).")
    shape = (a[1], b[0]) if is_table else (b[0], a[1])
    if shape != location.matrix_shape:
        raise CheckpointError(
            f"{label}: it is an adapter of another model: its {location.name} is for a matrix of {shape}, and the "
            f"model's is {location.matrix_shape}."
        )
    return a[0] // n_experts
