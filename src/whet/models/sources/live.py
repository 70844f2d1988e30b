"""Open live Hugging Face modules as sources: a config, and views of the current parameters.

Nothing is copied. transformers and PEFT are not imported: modules are recognised by their attributes. PEFT's LoRA
adapters stay separate, or are merged into the slices on the fly. The module is not changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from whet.errors import WhetTypeError, WhetValueError
from whet.models.architecture import ModelConfig, RowSlice
from whet.models.families import (
    FAMILIES,
    Family,
    family_of,
    is_skipped,
    model_config,
    module_targets,
    short_position,
    text_options,
)
from whet.models.formats import FLOAT_FORMATS
from whet.models.slots import (
    LoRA,
    ModelSource,
    StoredTensor,
    WeightLocation,
    is_norm,
    iter_locations,
    iter_slices,
    locate_lora,
    locate_norm,
)
from whet.models.sources.module_code import check_code, check_settings
from whet.ops import inputs

if TYPE_CHECKING:
    from whet.models.packed_base import PackedBase

_WHERE = "open_module"
_ROPE_FIX = (
    "Make the model from its current config; if the config has rope_parameters, with transformers 5, or with "
    "rope_theta and rope_scaling next to them for transformers 4."
)


def open_module(model: Any, *, merged: bool = False, max_position: int | None = None) -> ModelSource:
    """Open a module, inside PEFT and torch.compile.

    Open it again after anything that may replace parameters (``.to``, resizing, tying, a new adapter). In-place updates
    by an optimizer are visible in the source.

    Args:
        model: a Hugging Face causal language model of one of the families, on the CPU.
        merged: yield W + scaling B A (float32, computed lazily) for modules with active LoRA adapters, and no adapters.
            Default: W and separate adapters.
        max_position: see ``model_config``; for a model on a packed base, only the base's.

    Returns:
        A source. vocab_size is the embedding's; the head is tied if it shares the embedding's memory, whatever the
        config; rotary frequencies have the module's rounding (``model.bfloat16()`` rounds them, loading in bfloat16
        does not). If modules have a ``PackedBase`` as ``whet_base``, it is the source's base and no weight is read.

    Raises:
        WhetValueError: an unsupported model, option or adapter; a custom ``forward``, forward hook, activation or
            attribute; rotary frequencies that contradict the config; or trainable parameters other than LoRA adapters
            and PEFT's copies of norms on a packed base.
        WhetTypeError: ``model`` is not a Hugging Face model.
    """
    inner = _unwrap(model)
    config: Any = getattr(inner, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(inner, "named_modules"):
        raise WhetTypeError(f"{_WHERE}: model is a {type(model).__name__}, expected a Hugging Face model (nn.Module).")
    options: Mapping[str, Any] = config.to_dict()
    family = family_of(options, _WHERE)
    module = _Live(inner)
    if (base := module.base()) is not None:
        module.check_on_base(base, merged, max_position)
        check_code(model.named_modules(), _WHERE)
        check_settings(module.modules, base.config, _WHERE)
        norms = (
            locate_norm(base.config, base.targets[name], vectors, _WHERE)
            for name, vectors in module.norms(base.targets)
        )
        adapters = (*module.adapters(base.targets, base.config), *chain.from_iterable(norms))
        return base.source()._replace(adapters=adapters)
    described = model_config(options, max_position=max_position, where=_WHERE, **module.head(family, merged))
    as_built = model_config(options, max_position=1, where=_WHERE, **module.head(family, merged))
    described = replace(described, inv_freq=module.frequencies(described.inv_freq, as_built.inv_freq))

    def slices() -> Iterator[RowSlice]:
        return iter_slices(described, family.modules, partial(module.tensor, merged=merged), _WHERE)

    targets = module_targets(family, described)
    module.check(described, family)
    check_code(model.named_modules(), _WHERE)
    check_settings(module.modules, described, _WHERE)
    adapters = () if merged else tuple(module.adapters(targets, described))
    return ModelSource(described, slices, targets, adapters, short_position(options, _WHERE))


def check_frequencies(model: Any, where: str) -> None:
    """Raise if a Hugging Face model's rotary frequencies contradict its config.

    transformers 4 ignores ``rope_parameters``, in which transformers 5 stores theta and scaling, and uses theta 10000.
    Models of other kinds, and models without rotary frequencies, pass.

    Raises:
        WhetValueError: naming the module and the fix.
    """
    inner = _inside(model)
    config: Any = getattr(inner, "config", None)
    options: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    if text_options(options).get("model_type") not in FAMILIES:
        _check_theta(options, where)
        return
    try:
        exact, as_built = (model_config(options, max_position=n, where=where).inv_freq for n in (None, 1))
    except WhetValueError:
        return  # not supported by the engine
    _Live(inner).frequencies(exact, as_built, where)


def _check_theta(options: Mapping[str, Any], where: str) -> None:
    """Raise if transformers 4 built a model of any other family with a theta that is not the config's."""
    version = getattr(sys.modules.get("transformers"), "__version__", "5")
    theta = (options.get("rope_parameters") or {}).get("rope_theta")
    made_with = options.get("rope_theta", theta)
    if version.startswith("4.") and made_with != theta:
        raise WhetValueError(f"{where}: the model has rope_theta {made_with}, and the config {theta}. {_ROPE_FIX}")


def live_parameters(model: Any, source: ModelSource) -> Iterator[tuple[str, str, Any]]:
    """Yield name, slot and tensor of every weight of a module with this ``source``."""
    module, config = _Live(_unwrap(model)), source.config
    for location in _stored_locations(source):
        for suffix, slot in ((location.module.parameter, location.weight), (location.module.bias, location.bias)):
            if slot in config.slots():
                yield f"{location.names[0]}.{suffix}", slot, module.tensor(location.names, suffix).tensor


def live_matrices(model: Any, source: ModelSource) -> Iterator[tuple[WeightLocation, Any, Any]]:
    """Yield location, parameter, and the sum of its active adapters (None: none), of every matrix once."""
    module, seen, slots = _Live(_unwrap(model)), set[int](), source.config.slots()
    for location in _stored_locations(source):
        layer, lora = module.layer(location.names)
        weight = _find_parameter(layer, suffix := location.module.parameter)
        if location.weight not in slots or weight.ndim < 2 or weight.data_ptr() in seen:  # tied weights are one matrix
            continue
        seen.add(weight.data_ptr())
        deltas = [_delta(wrapper, name) for wrapper, name in lora if _parameter(wrapper) == suffix]
        yield location, weight, sum(deltas[1:], deltas[0]) if deltas else None


def _stored_locations(source: ModelSource) -> Iterator[WeightLocation]:
    """Yield the location of every module of every layer once."""
    return iter_locations(source.config, list(dict.fromkeys(each.module for each in source.targets.values())))


def live_adapters(model: Any, source: ModelSource) -> Iterator[tuple[str, Any, Any, float]]:
    """Yield module name, A, B and scaling of every active adapter of a module with this ``source``."""
    return _Live(_unwrap(model)).factors(source.targets)


def live_norms(model: Any, source: ModelSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield module name, and weight and bias, of every norm of which a module with this ``source`` trains a copy."""
    return _Live(_unwrap(model)).norms(source.targets)


def _unwrap(model: Any) -> Any:
    """Return the Hugging Face model inside torch.compile and PEFT."""
    outer = getattr(model, "_orig_mod", model)
    if getattr(getattr(outer, "active_peft_config", None), "is_prompt_learning", False):
        raise WhetValueError(f"{_WHERE}: the model has learned prompts; the engine supports only LoRA of PEFT.")
    return _inside(model)


def _inside(model: Any) -> Any:
    inner = getattr(model, "_orig_mod", model)
    get_base_model = getattr(inner, "get_base_model", None)
    inner = get_base_model() if callable(get_base_model) else inner
    return getattr(inner, "_orig_mod", inner)


class _Live:
    """Finds modules of the language model by name, inside PEFT's wrappers."""

    def __init__(self, model: Any) -> None:
        self.modules = {name: module for name, module in model.named_modules() if not is_skipped(name)}
        parameters = model.named_parameters(remove_duplicate=False)
        self.parameters = {name: parameter for name, parameter in parameters if not is_skipped(name)}

    def layer(self, names: Sequence[str]) -> tuple[Any, list[tuple[Any, str]]]:
        """Return the unwrapped layer, and its active LoRA adapters: (PEFT's layer, adapter name)."""
        found = next((self.modules[name] for name in names if name in self.modules), None)
        if found is None:
            raise WhetValueError(
                f"{_WHERE}: the model has no {names[0]}. Pass the causal language model with its head."
            )
        if hasattr(found, "token_adapter"):  # PEFT's trained tokens
            tokens = found.token_adapter
            is_off = tokens.disable_adapters or tokens.merged
            return tokens.base_layer, [] if is_off else [(tokens, name) for name in tokens.active_adapters]
        saved = getattr(found, "modules_to_save", None)
        if saved is not None and hasattr(found, "original_module"):
            active = _only_adapter(found, names[0])
            return (found.original_module if active is None or active not in saved else saved[active]), []
        if not hasattr(found, "base_layer"):
            return found, []
        if not hasattr(found, "lora_A"):
            raise WhetValueError(
                f"{_WHERE}: {names[0]} is a {type(found).__name__}; the engine supports only LoRA of PEFT."
            )
        active = [name for name in found.active_adapters if name in found.scaling]
        if found.disable_adapters and found.merged:
            raise WhetValueError(f"{_WHERE}: {names[0]} has a merged adapter that is disabled. Unmerge it first.")
        if found.disable_adapters or found.merged:
            return found.get_base_layer(), []
        for name in active:
            variant = getattr(found, "lora_variant", {}).get(name)
            if (variant and not _is_dora(found, name)) or getattr(found, "lora_bias", {}).get(name):
                raise WhetValueError(
                    f"{_WHERE}: adapter {name!r} of {names[0]} is more than W + scaling B A (a bias ...). Merge it "
                    f"with PEFT's merge_and_unload()."
                )
        inside, adapters = found.base_layer, [(found, name) for name in active]
        while hasattr(inside, "parameter_name"):  # PEFT's wrapper of another parameter
            adapters += [(inside, name) for name in inside.active_adapters if name in inside.scaling]
            inside = inside.base_layer
        return inside, adapters

    def tensor(self, names: Sequence[str], suffix: str, merged: bool = False) -> StoredTensor:
        layer, lora = self.layer(names)
        weight = _find_parameter(layer, suffix)
        label = f"{_WHERE}: {names[0]}.{suffix}"
        if weight is None or not hasattr(weight, "detach"):
            raise WhetValueError(f"{label} is missing in this {type(layer).__name__}; is the module quantised?")
        weight = weight.detach()
        format = str(weight.dtype).removeprefix("torch.")
        if format not in FLOAT_FORMATS:
            raise WhetValueError(
                f"{label} is {format}, expected {', '.join(FLOAT_FORMATS)}. Load the model without quantisation; the "
                f"engine quantises by weights=."
            )
        if weight.device.type != "cpu":
            raise WhetValueError(f"{label} is on {weight.device}; the engine runs on the CPU. Pass model.cpu().")
        inputs.check_memory(_WHERE, f"{names[0]}.{suffix}", weight)
        if weight.is_neg():
            raise WhetValueError(f"{label} is lazily negated. Replace it by its resolve_neg().")
        lora = [(wrapper, name) for wrapper, name in lora if _parameter(wrapper) == suffix]
        if merged and lora:
            weight = weight if format == "float64" else weight.float()
            for wrapper, name in lora:
                weight = _merge(weight, wrapper, name)
            format = str(weight.dtype).removeprefix("torch.")
        return StoredTensor(weight, format, tuple(weight.shape))

    def head(self, family: Family, merged: bool) -> dict[str, Any]:
        """Return vocab_size and tied_head: whether embedding and head share memory that no adapter changes."""
        embedding, head = (next(m for m in family.modules if m.slot == slot) for slot in ("embedding", "head"))
        (table, table_lora), (output, output_lora) = self.layer(embedding.names), self.layer(head.names)
        if not hasattr(table, "weight") or not hasattr(output, "weight"):
            raise WhetValueError(f"{_WHERE}: {embedding.names[0]} or {head.names[0]} has no weight.")
        same = table.weight.data_ptr() == output.weight.data_ptr() and table.weight.shape == output.weight.shape
        same = same and table.weight.stride() == output.weight.stride() and table.weight.numel() > 0
        share = all(hasattr(layer, "token_indices") for layer, _ in (*table_lora, *output_lora))
        share = share and len(table_lora) == len(output_lora)  # tied tokens
        changed = not share and (table_lora or (merged and output_lora))
        return {"vocab_size": int(table.weight.shape[0]), "tied_head": bool(same and not changed)}

    def frequencies(
        self, exact: tuple[float, ...], as_built: tuple[float, ...], where: str = _WHERE
    ) -> tuple[float, ...]:
        """Return the module's rotary frequencies if they are rounded exact ones, else the exact ones.

        Args:
            exact: the config's frequencies for the longest sequence.
            as_built: the config's frequencies for a short sequence, which a new module has; after a long text it also
                stores others.
        """
        several = [name for name in self.modules if name.rpartition(".")[0].endswith("rotary_embs")]  # one per base
        stored: dict[str, tuple[float, ...]] = {}
        for name in several or [name for name in self.modules if name.endswith("rotary_emb")][:1]:
            for buffer in ("inv_freq", "original_inv_freq"):
                found: Any = getattr(self.modules[name], buffer, None)
                if hasattr(found, "tolist") and found.device.type != "meta":
                    stored[f"{name}.{buffer}"] = tuple(found.double().tolist())
        for found in stored.values():
            if _close(found, exact):
                return exact if _same_float32(found, exact) else found
        if stored and not any(_close(found, as_built) for found in stored.values()):
            name, found = next(iter(stored.items()))
            raise WhetValueError(f"{where}: {name} is {found!r:.60}, and {as_built!r:.60} by the config. {_ROPE_FIX}")
        return exact

    def check(self, config: ModelConfig, family: Family) -> None:
        """Check that every tensor has the config's shape, and that every parameter is used."""
        seen: set[int] = set()

        def tensor(names: Sequence[str], suffix: str) -> StoredTensor:
            stored = self.tensor(names, suffix)
            seen.add(stored.tensor.data_ptr())
            return stored

        for _ in iter_slices(config, family.modules, tensor, _WHERE):
            pass
        for name, parameter in self.parameters.items():
            parts = (".lora_", ".original_module.", ".modules_to_save.", ".trainable_tokens_delta.")
            wrapped = any(part in name for part in parts)
            if parameter.data_ptr() not in seen and not wrapped:
                raise WhetValueError(
                    f"{_WHERE}: {name} is not a parameter of this model family; the engine does not support it."
                )

    def base(self) -> PackedBase | None:
        """Return the packed base that the modules share, or None."""
        bases = {id(base): base for m in self.modules.values() if (base := getattr(m, "whet_base", None)) is not None}
        if len(bases) > 1:
            raise WhetValueError(f"{_WHERE}: the model's modules are on {len(bases)} packed bases, expected one.")
        return next(iter(bases.values()), None)

    def check_on_base(self, base: PackedBase, merged: bool, max_position: int | None) -> None:
        """Check that every weight except LoRA adapters and norms is the base's, and that options fit the base."""
        if merged:
            raise WhetValueError(
                f"{_WHERE}: merged is True, and the model's weights are a packed base, which is immutable. Keep the "
                f"adapters separate: merge_adapters=False."
            )
        if max_position not in (None, base.config.max_position):
            raise WhetValueError(
                f"{_WHERE}: max_position is {max_position}, and the base was packed for {base.config.max_position}. "
                f"Omit it, or pack the base from a source with that max_position."
            )
        for name, location in base.targets.items():
            is_router = location.weight.endswith(".router")  # a copy in floats, which does not train
            if len(location.shape) != 2 or name not in self.modules or is_router:
                continue
            layer, _ = self.layer([name])
            if getattr(layer, "whet_base", None) is not base:
                raise WhetValueError(
                    f"{_WHERE}: {name} is a {type(layer).__name__} with a separate weight, and the others are on a "
                    f"packed base, on which only LoRA adapters and norms can change. Remove it from modules_to_save, "
                    f"or train the model without a base."
                )
        for name, parameter in self.parameters.items():
            owner, _, copy = name.partition(".modules_to_save.")
            is_trained_norm = copy and owner in base.targets and is_norm(base.targets[owner])
            if parameter.requires_grad and ".lora_" not in name and not is_trained_norm:
                raise WhetValueError(
                    f"{_WHERE}: {name} requires grad, and the model is on a packed base, on which only LoRA "
                    f"adapters and norms in modules_to_save can change. Freeze it, or train the model without a base."
                )

    def adapters(self, targets: Mapping[str, WeightLocation], config: ModelConfig) -> Iterator[LoRA]:
        for name, a, b, scaling in self.factors(targets):
            yield from locate_lora(config, targets[name], a, b, scaling, _WHERE)

    def norms(self, targets: Mapping[str, WeightLocation]) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, location in targets.items():
            found: Any = self.modules.get(name)
            if not is_norm(location) or not hasattr(found, "modules_to_save"):
                continue
            layer, _ = self.layer([name])
            if layer is not found.original_module:
                yield name, {part: vector.detach() for part, vector in layer.named_parameters()}

    def factors(self, targets: Mapping[str, WeightLocation]) -> Iterator[tuple[str, Any, Any, float]]:
        for name, location in targets.items():
            holder = name if (parameter := location.module.parameter) == "weight" else name.rpartition(".")[0]
            if holder not in self.modules:
                continue
            for wrapper, adapter in self.layer([holder])[1]:
                if _parameter(wrapper) != parameter:
                    continue
                if adapter not in getattr(wrapper, "lora_A", ()) or _is_dora(wrapper, adapter):
                    raise WhetValueError(
                        f"{_WHERE}: adapter {adapter!r} of {name} changes the embedding, or is DoRA. Pass merged=True, "
                        f"or merge it with PEFT's merge_and_unload()."
                    )
                a, b = wrapper.lora_A[adapter].weight.detach(), wrapper.lora_B[adapter].weight.detach()
                yield name, a, b, float(wrapper.scaling[adapter])


def _close(found: tuple[float, ...], exact: tuple[float, ...]) -> bool:
    """Whether frequencies may be the exact ones, rounded to any format."""
    # bfloat16 has a relative error up to 2^-8; float16 has steps of 2^-24 near zero.
    pairs = zip(found, exact, strict=False)
    return len(found) == len(exact) and all(abs(a - b) <= 2**-8 * abs(b) + 2**-24 for a, b in pairs)


def _same_float32(found: tuple[float, ...], exact: tuple[float, ...]) -> bool:
    """Whether frequencies differ by no more than the error of powers in float32."""
    return all(abs(a - b) <= 2**-19 * abs(b) for a, b in zip(found, exact, strict=True))


def _only_adapter(wrapper: Any, name: str) -> str | None:
    active = [] if wrapper.disable_adapters else list(wrapper.active_adapters)
    if len(active) > 1:
        raise WhetValueError(f"{_WHERE}: {name} has {len(active)} active copies ({', '.join(active)}). Activate one.")
    return active[0] if active else None


def _find_parameter(layer: Any, name: str) -> Any:
    """Return a parameter of a layer by its dotted name; None: it is missing."""
    for part in name.split("."):
        layer = getattr(layer, part, None)
    return layer


def _parameter(wrapper: Any) -> str:
    """Return the name of the parameter that an adapter of PEFT changes."""
    return getattr(wrapper, "parameter_name", "weight")


def _is_dora(wrapper: Any, name: str) -> bool:
    return name in getattr(wrapper, "lora_magnitude_vector", ()) and name in wrapper.lora_A


def _merge(weight: Any, wrapper: Any, name: str) -> Any:
    """Return a copy of the wrapped weight with an adapter of PEFT."""
    if hasattr(wrapper, "token_indices"):
        weight = weight.clone()
        weight[wrapper.token_indices[name]] = wrapper.trainable_tokens_delta[name].detach().to(weight.dtype)
        return weight
    weight = weight + _delta(wrapper, name).to(weight.dtype)
    if _is_dora(wrapper, name):
        outputs = 1 if getattr(wrapper, "fan_in_fan_out", False) else 0
        lengths = weight.norm(dim=1 - outputs)
        magnitude = wrapper.lora_magnitude_vector[name].weight.detach().to(weight.dtype)
        weight = weight * (magnitude / lengths).unsqueeze(1 - outputs)
    return weight


def _delta(wrapper: Any, name: str) -> Any:
    """Return scaling B A in the layout of the wrapped weight."""
    if hasattr(wrapper, "parameter_name"):
        return wrapper.get_delta_weight(name).detach()
    if name in wrapper.lora_A:
        a, b = wrapper.lora_A[name].weight.detach(), wrapper.lora_B[name].weight.detach()
    else:
        a, b = wrapper.lora_embedding_A[name].detach(), wrapper.lora_embedding_B[name].detach()
    a, b = (x if str(x.dtype) == "torch.float64" else x.float() for x in (a, b))
    delta = wrapper.scaling[name] * (b @ a)
    is_transposed = name not in wrapper.lora_A or getattr(wrapper, "fan_in_fan_out", False)
    return delta.T if is_transposed else delta
