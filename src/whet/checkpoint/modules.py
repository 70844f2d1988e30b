"""Module trees as JSON, and back, so that checkpoints need no pickled model.

``describe_module`` serialises an ``nn.Module`` as a tree of objects, so that ``build_module`` can rebuild it without
calling its constructor, whose arguments are unknown.

A description cannot run code: classes are looked up among imported ones and must be modules or dataclasses, functions
are looked up in torch by name, and no constructor runs. The only exception is a Hugging Face model, which
transformers' class builds from its config. A description has no tensor values; ``module_tensors`` and
``load_module_tensors`` transfer them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from whet.checkpoint.jsonable import TAG, decode, dtype_named, encode
from whet.checkpoint.tensors import same_memory_key
from whet.errors import CheckpointError


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by dotted name, including buffers outside ``state_dict``.

    The tensors are detached and share the module's memory; a tied tensor is listed under each of its names.
    """
    return {name: tensor.detach() for name, tensor in _named_tensors(module)}


def load_module_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy values into all of a module's parameters and buffers, or into none if a name, shape or dtype differs.

    Args:
        module: keeps its tensors, ties and devices; only values change.
        tensors: the result of ``module_tensors`` for a module with the same structure, on any device.

    Raises:
        CheckpointError: a name is missing or unexpected, or a shape or dtype differs.
    """
    own = dict(_named_tensors(module))
    where = f"load_module_tensors({type(module).__name__})"
    missing, extra = [n for n in own if n not in tensors], [n for n in tensors if n not in own]
    if missing or extra:
        faults = [f"the module also has {_some(missing)}"] if missing else []
        faults += [f"the checkpoint also has {_some(extra)}"] if extra else []
        raise CheckpointError(
            f"{where}: the tensors do not fit the module: {'; '.join(faults)}. "
            f"Pass a model of the same class and configuration as the one that was saved."
        )
    for name, target in own.items():
        source = tensors[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise CheckpointError(
                f"{where}: {name} is {_form(source)} in the checkpoint and {_form(target)} in the module. "
                f"Pass a model of the same configuration and dtype as the one that was saved."
            )
    with torch.no_grad():
        for name, target in own.items():
            target.copy_(tensors[name])


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --- describing -----------------------------------------------------------------------------------------


class _NotDescribedError(Exception):
    """An attribute cannot be serialised; the message names it."""


def describe_module(module: nn.Module) -> dict[str, Any]:
    """Return a module as a JSON tree: classes, plain attributes, shapes and dtypes of tensors, and sharing.

    Supported attributes are values that ``encode`` accepts, dataclasses, references to tensors and modules of the same
    tree, functions of torch and torch.nn.functional, and transformers configs. A Hugging Face model anywhere in the
    tree is described by its class and config. Everything else (a lambda, a tensor that is neither parameter nor buffer,
    a hook, a class defined inside a function) is listed under ``"undescribed"`` by dotted name; such a description
    cannot be built.

    Returns:
        ``{"modules": [...], "tensors": [...], "undescribed": [...]}``, in JSON types. ``modules[0]`` is the module;
        children, parameters and buffers are indices, which preserves sharing.
    """
    describer = _Describer(module)
    modules = [describer.describe(path, member) for path, member in describer.members]
    return {"modules": modules, "tensors": describer.tensors, "undescribed": describer.undescribed}


class _Describer:
    """Indexes the modules and tensors of a tree, and serialises each module in terms of the indices."""

    def __init__(self, root: nn.Module) -> None:
        self.members: list[tuple[str, nn.Module]] = []
        self.tensors: list[dict[str, Any]] = []
        self.undescribed: list[str] = []
        self._module_index: dict[int, int] = {}
        self._tensor_index: dict[int, int] = {}
        self._data_index: dict[tuple, int] = {}
        self._visit(root, "")

    def _visit(self, module: nn.Module, path: str) -> None:
        if id(module) in self._module_index:
            return
        self._module_index[id(module)] = len(self.members)
        self.members.append((path, module))
        if _is_pretrained(module):
            return  # its class builds its children
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and id(tensor) not in self._tensor_index:
                self._tensor_index[id(tensor)] = len(self.tensors)
                self.tensors.append(self._describe_tensor(tensor, _join(path, name)))
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, _join(path, name))

    def _describe_tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        kind = "parameter" if type(tensor) is nn.Parameter else "buffer"
        if (kind == "buffer" and type(tensor) is not Tensor) or tensor.layout != torch.strided:
            self.undescribed.append(f"{path} is a {type(tensor).__name__} of layout {tensor.layout}")
            return {}
        form = {"kind": kind, **_tensor_form(tensor)}
        if tensor.numel() and tensor.device.type != "meta":
            # Distinct tensors may view the same memory (``a.weight.data = b.weight.data``).
            first = self._data_index.setdefault(same_memory_key(tensor), len(self.tensors))
            if first != len(self.tensors):
                form["data_of"] = first
        return form

    def describe(self, path: str, module: nn.Module) -> dict[str, Any]:
        if not _is_findable(type(module)):
            name = _class_name(type(module))
            self.undescribed.append(f"{path or 'the module'} is of class {name}, not found by that name")
        if _is_pretrained(module):
            return _describe_pretrained(module)
        for hooks in sorted(_MODULE_FIELDS - _STRUCTURE):
            if getattr(module, hooks, None):
                self.undescribed.append(f"{_join(path, hooks)} holds hooks")
        attributes = {}
        for name, value in vars(module).items():
            if name not in _MODULE_FIELDS:
                try:
                    attributes[name] = encode(value, _join(path, name), self._encode_special)
                except _NotDescribedError as fault:
                    self.undescribed.append(str(fault))
        return {
            "class": _class_name(type(module)),
            "training": module.training,
            "attributes": attributes,
            "parameters": self._indices(module._parameters, self._tensor_index),
            "buffers": self._indices(module._buffers, self._tensor_index),
            "non_persistent_buffers": sorted(module._non_persistent_buffers_set),
            "children": self._indices(module._modules, self._module_index),
        }

    @staticmethod
    def _indices(members: Mapping[str, Any], index: Mapping[int, int]) -> dict[str, int | None]:
        return {name: None if member is None else index[id(member)] for name, member in members.items()}

    def _encode_special(self, value: Any, where: str) -> Any:
        if id(value) in self._tensor_index:
            return {TAG: "tensor", "value": self._tensor_index[id(value)]}
        if id(value) in self._module_index:
            return {TAG: "module", "value": self._module_index[id(value)]}
        if isinstance(value, weakref.ref) and id(value()) in self._tensor_index:
            return {TAG: "weakref", "value": self._tensor_index[id(value())]}
        if _is_torch_function(value) and (name := _function_name(value)):
            return {TAG: "function", "value": name}
        if _is_config(value):
            return {TAG: "config", "value": _describe_config(value)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and _is_findable(type(value)):
            names = [field.name for field in dataclasses.fields(value)]
            if set(getattr(value, "__dict__", names)) == set(names):
                fields = {n: encode(getattr(value, n), f"{where}.{n}", self._encode_special) for n in names}
                return {TAG: "dataclass", "value": [_class_name(type(value)), fields]}
        if isinstance(value, Tensor):
            raise _NotDescribedError(f"{where} is a tensor, but neither a parameter nor a buffer")
        if (name := getattr(value, "__qualname__", None)) is not None:
            raise _NotDescribedError(f"{where} is {value.__module__}.{name}")
        raise _NotDescribedError(f"{where} is of type {_class_name(type(value)).replace(':', '.')}")


_MODULE_FIELDS = frozenset(vars(nn.Module()))
_STRUCTURE = frozenset({"training", "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"})
_FUNCTION_HOMES = {"torch.nn.functional": torch.nn.functional, "torch": torch}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _tensor_form(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "requires_grad": tensor.requires_grad,
    }


def _is_torch_function(value: Any) -> bool:
    """Whether ``value`` is an operator of torch, unlike torch.load or torch.compile."""
    if isinstance(value, types.FunctionType):
        return value.__module__ in ("torch.nn.functional", "torch.functional")
    return isinstance(value, types.BuiltinFunctionType)


def _function_name(function: Any) -> str | None:
    for home, namespace in _FUNCTION_HOMES.items():
        if vars(namespace).get(function.__name__) is function:
            return f"{home}.{function.__name__}"
    return None


def _find_function(name: str) -> Any:
    home, _, attribute = name.rpartition(".")
    function = vars(_FUNCTION_HOMES[home]).get(attribute) if home in _FUNCTION_HOMES else None
    if not _is_torch_function(function):
        raise CheckpointError(f"build_module: {name!r} is not an operator of torch or torch.nn.functional.")
    return function


def _find_class(name: str, *, imports: bool) -> type | None:
    """Return the class ``module:qualname`` if that module is imported and defines it, else None.

    With ``imports``, transformers' modules of models and configs are imported on demand; no others are.
    """
    module_name, _, qualname = name.partition(":")
    if imports and re.fullmatch(r"transformers\.models\.\w+\.(modeling|configuration)_\w+", module_name):
        importlib.import_module(module_name)
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        # vars, not getattr: a module's __getattr__ may import.
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    return found if isinstance(found, type) else None


def _is_findable(cls: type) -> bool:
    return _find_class(_class_name(cls), imports=False) is cls


# --- building -------------------------------------------------------------------------------------------


def build_module(description: Mapping[str, Any]) -> nn.Module:
    """Build the module that ``describe_module`` described, on the CPU.

    Its tensors have arbitrary values until ``load_module_tensors`` sets them. Classes must be imported already (except
    transformers'), and no constructor runs. Tied parameters and shared modules stay tied and shared.

    Raises:
        CheckpointError: part of the module was not described, a class is not imported or not an nn.Module, a Hugging
            Face model built from its config differs from the saved one, or the description is malformed.
    """
    try:
        undescribed = list(description["undescribed"])
        if undescribed:
            raise CheckpointError(
                f"build_module: the model cannot be rebuilt from its description: {_some(undescribed)}. "
                f"Build it yourself and pass it as model=."
            )
        return _Builder(description).modules[0]
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"build_module: the description is malformed ({type(error).__name__}: {error}). "
            f"Build the model yourself and pass it as model=."
        ) from error


class _Builder:
    def __init__(self, description: Mapping[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        for form in description["tensors"]:
            self.tensors.append(self._build_tensor(form))
        entries = description["modules"]
        self.modules = [_build_pretrained(e) if "config" in e else _bare_module(e["class"]) for e in entries]
        for index, entry in enumerate(entries):
            if "config" not in entry:
                self._fill(self.modules[index], entry)

    def _build_tensor(self, form: Mapping[str, Any]) -> Tensor:
        if "data_of" in form:
            data = self.tensors[form["data_of"]].detach()
        else:
            data = torch.zeros(form["shape"], dtype=dtype_named(form["dtype"]))
        if form["kind"] == "parameter":
            return nn.Parameter(data, requires_grad=form["requires_grad"])
        return data.requires_grad_(form["requires_grad"])

    def _fill(self, module: nn.Module, entry: Mapping[str, Any]) -> None:
        attributes = {n: decode(value, self._decode_special) for n, value in entry["attributes"].items()}
        if not _MODULE_FIELDS.isdisjoint(attributes):
            raise CheckpointError(f"build_module: {entry['class']} has attributes named like nn.Module's.")
        vars(module).update(attributes, training=entry["training"])
        for members, field, known in (
            (module._parameters, "parameters", self.tensors),
            (module._buffers, "buffers", self.tensors),
            (module._modules, "children", self.modules),
        ):
            members.update({name: None if i is None else known[i] for name, i in entry[field].items()})
        module._non_persistent_buffers_set.update(entry["non_persistent_buffers"])

    def _decode_special(self, tag: str, content: Any) -> Any:
        if tag == "tensor":
            return self.tensors[content]
        if tag == "module":
            return self.modules[content]
        if tag == "weakref":
            return weakref.ref(self.tensors[content])
        if tag == "function":
            return _find_function(content)
        if tag == "config":
            return _build_config(content)
        if tag == "dataclass":
            return self._build_dataclass(*content)
        raise CheckpointError(f"build_module: a value is tagged {tag!r}, which this version of Whet does not support.")

    def _build_dataclass(self, name: str, fields: Mapping[str, Any]) -> Any:
        cls = _import_class(name)
        if not dataclasses.is_dataclass(cls) or {f.name for f in dataclasses.fields(cls)} != set(fields):
            raise CheckpointError(f"build_module: {name} is not a dataclass with the fields {sorted(fields)}.")
        instance = object.__new__(cls)
        for field, value in fields.items():
            object.__setattr__(instance, field, decode(value, self._decode_special))
        return instance


def _bare_module(name: str) -> nn.Module:
    cls = _import_class(name)
    if not issubclass(cls, nn.Module):
        raise CheckpointError(f"build_module: {name} is not an nn.Module.")
    module = object.__new__(cls)
    nn.Module.__init__(module)
    return module


def _import_class(name: str) -> type:
    cls = _find_class(name, imports=True)
    if cls is None:
        raise CheckpointError(
            f"build_module: no class {name} is imported. Import the module that defines it before loading "
            f"(a class of a script is found only in that script), or build the model and pass it as model=."
        )
    return cls


# --- Hugging Face models --------------------------------------------------------------------------------


def _is_pretrained(value: Any) -> bool:
    hub = sys.modules.get("transformers.modeling_utils")
    return hub is not None and isinstance(value, hub.PreTrainedModel)


def _is_config(value: Any) -> bool:
    hub = sys.modules.get("transformers.configuration_utils")
    return hub is not None and isinstance(value, hub.PretrainedConfig)


def _describe_config(config: Any) -> list[Any]:
    return [_class_name(type(config)), _config_json(config), config._attn_implementation]


def _config_json(config: Any) -> Any:
    return encode(json.loads(config.to_json_string(use_diff=False)), "config")


def _build_config(entry: list[Any]) -> Any:
    from transformers import PretrainedConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name, content, attention = entry
    cls = _import_class(name)
    if not issubclass(cls, PretrainedConfig):
        raise CheckpointError(f"build_module: {name} is not a config class of transformers.")
    config = cls.from_dict(decode(content))
    # transformers would download a kernel of any other name from the hub, and run it.
    known = ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())
    if attention is not None and attention not in known:
        raise CheckpointError(
            f"build_module: the attention of {name} is {attention!r:.60}, expected one of {', '.join(known)}. If you "
            f"trust it, build the model yourself and pass it as model=."
        )
    config._attn_implementation = attention  # to_dict omits it
    return config


def _describe_pretrained(module: Any) -> dict[str, Any]:
    generation = getattr(module, "generation_config", None)
    return {
        "class": _class_name(type(module)),
        "training": module.training,
        "config": _describe_config(module.config),
        "generation_config": None if generation is None else _config_json(generation),
        "tensors": {name: _tensor_form(tensor) for name, tensor in _own_tensors(module).items()},
    }


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return each tensor once, so that equal results imply equal ties."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _build_pretrained(entry: Mapping[str, Any]) -> nn.Module:
    from transformers import GenerationConfig, PreTrainedModel

    cls = _import_class(entry["class"])
    if not issubclass(cls, PreTrainedModel):
        raise CheckpointError(f"build_module: {entry['class']} is not a model class of transformers.")
    with torch.random.fork_rng(devices=[]):  # its initial weights are discarded
        module = cls(_build_config(entry["config"]))
    built, forms = _own_tensors(module), entry["tensors"]
    shapes = {name: list(tensor.shape) for name, tensor in built.items()}
    different = [n for n in {**shapes, **forms} if shapes.get(n) != forms.get(n, {}).get("shape")]
    if different:
        raise CheckpointError(
            f"build_module: {entry['class']} built from its config differs from the model that was saved in "
            f"{len(different)} tensors ({_some(different)}), as one with adapters or quantised layers does. "
            f"Build the model yourself and pass it as model=."
        )
    for name, tensor in built.items():
        tensor.data = tensor.data.to(dtype_named(forms[name]["dtype"]))
        tensor.requires_grad_(forms[name]["requires_grad"])
    if entry["generation_config"] is not None:
        module.generation_config = GenerationConfig.from_dict(decode(entry["generation_config"]))  # pyright: ignore
    return module.train(entry["training"])
