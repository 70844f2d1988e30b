"""Frozen models with packed matrices in any weight format of the engine: the base of adapters.

A product dequantises the matrix into scratch memory that all layers share, in the dtype of products, forward and
backward: y = x W^T, dx = dy W. No layer holds a float copy, saves its input, or has a weight gradient. The packed bytes
belong to a ``whet.models.packed_base.PackedBase``, which an engine can sample from at the same time.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from whet.errors import WhetTypeError, WhetValueError
from whet.models.adapter_files import EXPERT_PARAMETERS
from whet.models.packed_base import PackedBase, pack_base
from whet.models.slots import ModelSource, to_stored
from whet.models.sources.gguf_container import GGUFFile
from whet.models.sources.gguf_model import read_gguf_config
from whet.models.sources.live import open_module
from whet.models.sources.pretrained import open_pretrained
from whet.nn import functions
from whet.nn.linear_logprobs import Head
from whet.nn.modules import auto_class, inner_module, towers
from whet.nn.scratch import scratch_matrix

_MERGE_FIX = (
    "Do that to the model in floats. Save the adapter with save_pretrained, and merge it there: "
    "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter).merge_and_unload()."
)
_WRONG_BASE = "it is the base of another model. Pass this model's base, or a format."


class FrozenWeight(Tensor):
    """The ``.weight`` of a frozen module: a shape, dequantised to float32 on every use.

    Torch operations get a temporary dequantised copy. Writing to the weight, as PEFT does to merge an adapter, raises a
    WhetTypeError: the result would be lost.
    """

    _module: Any

    @staticmethod
    def __new__(cls, module: _PackedModule) -> FrozenWeight:
        shape = module.whet_base.shape(module.name)
        weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device="cpu")  # pyright: ignore
        weight._module = module
        return weight

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        for argument, value in [*zip(arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in arguments)]:
            if isinstance(value, FrozenWeight) and argument.alias_info is not None and argument.alias_info.is_write:
                raise value._write_error()

        def dequantise(x: Any) -> Any:
            return x.dequantise() if isinstance(x, FrozenWeight) else x

        return func(*tree_map(dequantise, args), **tree_map(dequantise, kwargs))

    def dequantise(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a float32 copy, (N, K)."""
        return self._module.whet_base.rows(self._module.name, torch.empty(self.shape))

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.dequantise()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise self._write_error()

    def _write_error(self) -> WhetTypeError:
        return WhetTypeError(
            f"{self._module.name}.weight: it is packed and read-only; merging an adapter, resizing the vocabulary and "
            f"some kinds of init_lora_weights would write to it. {_MERGE_FIX}"
        )

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"FrozenWeight({self._module.name}, {tuple(self.shape)}, {self._module.formats})"


class _PackedModule(nn.Module):
    """Base class of frozen modules: a packed base, and the module's Hugging Face name in it."""

    whet_base: PackedBase
    name: str

    @property
    def formats(self) -> str:
        """Weight format of the matrix; "q4_k, q6_k" if its parts have several."""
        location = self.whet_base.targets[self.name]
        return self.whet_base.formats.get(location.weight) or self.whet_base.formats["embedding"]

    @property
    def weight(self) -> FrozenWeight:
        """The matrix, dequantised on use."""
        return FrozenWeight(self)

    @weight.setter
    def weight(self, value: Any) -> None:
        raise self.weight._write_error()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":
            raise self.weight._write_error()
        super().register_parameter(name, param)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not memo:  # not within a model's copy: PEFT's modules_to_save copies a module to train the copy
            raise WhetValueError(
                f"{self.name}: it is packed as {self.formats}, and a copy of this module, such as for modules_to_save, "
                "does not train. Give it an adapter by target_modules, or load the model in floats."
            )
        clone = memo[id(self)] = self.__new__(type(self))
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        device = fn(torch.empty(0)).device
        if device.type != "cpu":
            raise WhetValueError(
                f"{self.name}: it is packed for the CPU and cannot move to {device}. Load the model in floats: "
                "AutoModelForCausalLM.from_pretrained(folder)."
            )
        return super()._apply(fn, recurse)


def _exclude_from_compile(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Exclude a method from torch.compile, which cannot trace into packed memory.

    ``torch.compiler.disable`` as a decorator would import the compiler with this module: 75 MB and a second.
    """

    @functools.cache
    def disabled() -> Any:
        return torch.compiler.disable(forward)

    @functools.wraps(forward)
    def method(self: Any, input: Tensor) -> Tensor:
        return (disabled() if torch.compiler.is_compiling() else forward)(self, input)

    return method


class FrozenLinear(_PackedModule, nn.Linear):
    """A linear layer (or transformers' Conv1D) whose weight is packed and does not train.

    Args:
        base: holds the weight.
        name: of the layer, in ``base.targets``.
        bias: (N,) or None.
    """

    def __init__(self, base: PackedBase, name: str, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.whet_base, self.name = base, name
        self.out_features, self.in_features = base.shape(name)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @_exclude_from_compile
    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias, (..., N), in the dtype of x; computed in bfloat16 if x is bfloat16, else in float32."""
        dtype = torch.bfloat16 if input.dtype == torch.bfloat16 else torch.float32
        return functions.linears(input, [self.product(dtype)], dtype)[0].to(input.dtype)

    def product(self, dtype: torch.dtype, adapters: tuple[functions.Adapter, ...] = ()) -> functions.Product:
        """Return the layer and its adapters, for ``functions.linears``."""
        return functions.Product(partial(self.rows, 0, self.out_features, dtype), self.bias, adapters)

    def head(self, dtype: torch.dtype) -> Head:
        """Return the layer as an LM head."""
        shape = self.out_features, self.in_features
        return Head(partial(self.rows, dtype=dtype), shape, self.bias, dtype)

    def rows(self, first: int, n: int, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight, (n, K), in scratch memory that the next call on this thread overwrites."""
        return self.whet_base.rows(self.name, scratch_matrix(n, self.in_features, dtype), first)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight={self.formats}"


class FrozenEmbedding(_PackedModule, nn.Embedding):
    """An embedding whose table is packed and does not train; rows are float32.

    Args:
        base: holds the table.
        name: of the module, in ``base.targets``.
        padding_idx: attribute of nn.Embedding, for code that reads it; no effect here.
        scale: multiplies the rows.
    """

    def __init__(self, base: PackedBase, name: str, padding_idx: int | None, scale: float = 1.0) -> None:
        nn.Module.__init__(self)
        self.whet_base, self.name, self.scale = base, name, scale
        self.num_embeddings, self.embedding_dim = base.shape(name)
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False

    @_exclude_from_compile
    def forward(self, input: Tensor) -> Tensor:
        """Return the rows at the ids, (..., K) float32.

        Raises:
            IndexError: an id outside the table, as nn.Embedding raises.
        """
        ids = input.reshape(-1).long().contiguous()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(f"{self.name}: an id is outside the table of {self.num_embeddings} rows.")
        out = torch.empty((len(ids), self.embedding_dim))
        rows = self.whet_base.gather(self.name, ids, out).view(*input.shape, -1)
        return rows if self.scale == 1 else rows.mul_(self.scale)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight={self.formats}"


class FrozenExperts(nn.Module):
    """The experts of a mixture, whose matrices are packed and do not train.

    Args:
        base: holds the matrices.
        name: of the module, whose parameters are in ``base.targets``.
    """

    def __init__(self, base: PackedBase, name: str) -> None:
        super().__init__()
        self.whet_base, self.name, self.activation = base, name, base.config.activation
        # In place of the matrices, for PEFT's adapters, which have their shapes. They are not in the state_dict.
        for end in EXPERT_PARAMETERS:
            if (location := base.targets.get(f"{name}.{end}")) is not None:
                setattr(self, end, torch.zeros(1).expand(location.n_experts, *location.matrix_shape))

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """Yield what stands for the matrices, which PEFT searches for its ``target_parameters``."""
        yield from ((name, getattr(self, name)) for name in expert_parameters(self))

    def weights(self, dtype: torch.dtype) -> functions.ExpertWeights:
        """Return the matrices, dequantised to ``dtype`` when they are used."""
        names = [f"{self.name}.{end}" for end in expert_parameters(self)]
        first, down = (partial(self._rows, name, dtype) for name in names)
        has_biases = self.whet_base.config.experts_bias
        biases = [self._biases(name) if has_biases else None for name in names]
        return functions.ExpertWeights(first, down, *biases, activation=self.activation)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of the experts of each token, times their weights; see ``functions.experts``."""
        dtype = torch.bfloat16 if hidden_states.dtype == torch.bfloat16 else torch.float32
        out = functions.experts(hidden_states, top_k_index, top_k_weights.float(), self.weights(dtype), dtype)
        return out.to(hidden_states.dtype)

    def _biases(self, name: str) -> Tensor:
        location, config = self.whet_base.targets[name], self.whet_base.config
        out = torch.empty(location.shape[0])
        self.whet_base.core.rows(f"{location.weight}.bias", 0, len(out), out)
        return out.view(config.n_experts, -1)

    def _rows(self, name: str, dtype: torch.dtype, expert: int) -> Tensor:
        location = self.whet_base.targets[name]
        n, k = location.matrix_shape
        out = scratch_matrix(n, k, dtype)
        self.whet_base.core.rows(location.weight, expert * n, n, out)
        return out


def expert_parameters(module: nn.Module) -> list[str]:
    """Return the names of the two matrices of the experts of a mixture, in the order of their products."""
    return [name for name in EXPERT_PARAMETERS if hasattr(module, name)]


def frozen_model(model: str | os.PathLike[str] | GGUFFile | nn.Module, base: str | PackedBase | None = None) -> Any:
    """Return a Hugging Face model with packed, frozen matrices, the base of adapters: pass it to ``get_peft_model``.

    Embedding, linear layers and head become ``FrozenEmbedding`` and ``FrozenLinear``; norms and biases are float32 and
    frozen too. No float copy of a matrix is ever made; matrices of a live model are freed as they are replaced. The
    state_dict has no matrices. torch.compile skips the products of frozen modules. PEFT's prompt tuning searches the
    parameters for the embedding, so set ``peft_model.word_embeddings = model.get_input_embeddings()``.

    Args:
        model: a Hugging Face folder, a GGUF file, or a live model of a supported family, which is changed in place.
        base: weight format of the matrices, as ``weights`` of ``Engine``; None: bf16, or the formats of the GGUF file.
            Or this model's packed base, to share it.

    Returns:
        The model, on the CPU, in eval mode; ``whet_base`` of each frozen module is the base.

    Raises:
        WhetValueError: a model or a format that the engine does not support, or the base of another model.
    """
    packed = (
        base if isinstance(base, PackedBase) else pack_base(_open_source(model), weights=base, where="frozen_model")
    )
    hf = model if isinstance(model, nn.Module) else _build(model)
    inner: Any = inner_module(hf)
    modules = {name: module for name in packed.targets if (module := _submodule(inner, name)) is not None}
    for name, module in modules.items():
        _check_shapes(name, module, packed)
    for name, module in modules.items():
        _freeze(inner, name, module, packed)
    is_known = functions.EXPERT_ACTIVATIONS.get(packed.config.activation) == packed.config.gated
    experts = {
        name.rpartition(".")[0]
        for name, location in packed.targets.items()
        if ".experts_" in location.weight and is_known
    }
    for name in experts:
        holder, _, attribute = name.rpartition(".")
        setattr(inner.get_submodule(holder), attribute, FrozenExperts(packed, name))
    for name, location in packed.targets.items():
        holder, _, parameter = name.rpartition(".")
        if location.module.parameter != "weight" and holder not in experts:
            module: Any = inner.get_submodule(holder)
            values = parameter_values(packed, name, getattr(module, parameter).shape)
            is_buffer = parameter in module._buffers
            setattr(module, parameter, values if is_buffer else nn.Parameter(values, requires_grad=False))
    missing = [name for name, tensor in (*inner.named_parameters(), *inner.named_buffers()) if tensor.is_meta]
    if missing:
        raise WhetValueError(f"frozen_model: the base has no {missing[0]}: {_WRONG_BASE}")
    inner.save_pretrained, inner.tie_weights = _refuse_saving, _ignore_tie_weights
    return hf.eval()


def parameter_values(base: PackedBase, name: str, shape: Sequence[int]) -> Tensor:
    """Return the dequantised values of a parameter that is not a module's weight, by its name in ``base.targets``."""
    location = base.targets[name]
    values = base.rows(name, torch.empty(location.shape))
    return to_stored(base.config, location, values).reshape(shape).contiguous()


def base_of(model: nn.Module) -> PackedBase | None:
    """Return the packed base of a model's frozen modules, also inside PEFT; None: its matrices are floats."""
    return next((module.whet_base for module in model.modules() if isinstance(module, _PackedModule)), None)


def check_trainable(model: nn.Module, where: str) -> None:
    """Raise a WhetValueError if PEFT is to train more of a frozen matrix than plain LoRA."""
    for module in model.modules():
        layer: Any = module
        if isinstance(getattr(module, "base_layer", None), _PackedModule) and (kinds := special_adapters(layer)):
            raise WhetValueError(
                f"{where}: {', '.join(kinds)} of {layer.base_layer.name} needs its weight in floats, and it is packed "
                f"as {layer.base_layer.formats}. Use plain LoRA, or load the model in floats."
            )


def special_adapters(layer: Any) -> list[str]:
    """Return the adapters of a PEFT layer that are more than W + scaling B A, with their kinds."""
    variants, biases = getattr(layer, "lora_variant", {}), getattr(layer, "lora_bias", {})
    found = {name: type(variant).__name__ for name, variant in variants.items()}
    found |= {name: "DoRA" for name, used in getattr(layer, "use_dora", {}).items() if used and name not in found}
    found |= {name: "lora_bias" for name, used in biases.items() if used}
    return [f"adapter {name!r} ({kind})" for name, kind in found.items()]


class _MetaParameters(TorchFunctionMode):
    """Puts ``torch.empty``, which creates parameters, on the meta device; buffers are allocated."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **{**kwargs, "device": "meta"} if func is torch.empty else kwargs)


def _open_source(model: str | os.PathLike[str] | GGUFFile | nn.Module) -> ModelSource:
    return open_module(model) if isinstance(model, nn.Module) else open_pretrained(model)


def _build(path: str | os.PathLike[str] | GGUFFile) -> Any:
    """Build the Hugging Face model of a folder or a GGUF file with parameters on the meta device."""
    import transformers

    stops = None
    if isinstance(path, GGUFFile) or os.path.isfile(path):
        config, tokenizer = read_gguf_config(path)
        stops = tokenizer.stop_token_ids or None
    else:
        config = transformers.AutoConfig.from_pretrained(path)
    with _MetaParameters():
        model: Any = auto_class(config).from_config(config, dtype=torch.float32)
    for name in towers(model):
        delattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
    if stops:
        model.generation_config.eos_token_id = stops
    elif not isinstance(path, GGUFFile) and os.path.isfile(os.path.join(path, "generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model


def _submodule(model: nn.Module, name: str) -> Any:
    """Return the module of this name, inside PEFT's adapters; None if the model has no such module."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return getattr(module, "base_layer", module)


def _check_shapes(name: str, module: Any, base: PackedBase) -> None:
    """Raise a WhetValueError if a module's shape or bias differs from the base."""
    location, shape = base.targets[name], tuple(module.weight.shape)
    if (shape[::-1] if location.module.transposed else shape) != location.shape:
        raise WhetValueError(f"frozen_model: {name}.weight is {shape}, and {location.shape} in the base: {_WRONG_BASE}")
    if (getattr(module, "bias", None) is None) != (location.bias is None):
        raise WhetValueError(f"frozen_model: only one of {name} in the model and in the base has a bias: {_WRONG_BASE}")


def _freeze(model: nn.Module, name: str, module: Any, base: PackedBase) -> None:
    """Replace a module with a matrix by a frozen module; load the values of a router, or a module with a vector."""
    location = base.targets[name]
    bias = None if location.bias is None else base.bias(name, torch.empty(location.shape[0]))
    if len(location.shape) == 1 or location.weight.endswith(".router"):
        module.weight = nn.Parameter(base.rows(name, torch.empty(location.shape)), requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias, requires_grad=False)
        return
    is_table = isinstance(module, nn.Embedding)
    if is_table:
        # Gemma's embedding scales its rows.
        frozen = FrozenEmbedding(base, name, module.padding_idx, getattr(module, "scalar_embed_scale", 1.0))
    else:
        frozen = FrozenLinear(base, name, bias)
    holder, _, attribute = name.rpartition(".")
    parent: Any = model.get_submodule(holder)
    if hasattr(getattr(parent, attribute), "base_layer"):
        parent, attribute = getattr(parent, attribute), "base_layer"
    setattr(parent, attribute, frozen)


def _refuse_saving(*args: Any, **options: Any) -> None:
    raise WhetTypeError(
        "save_pretrained: the matrices are packed, and no library reads them from a folder. Save the adapter: "
        "get_peft_model(model, ...).save_pretrained(folder). The base stays where it was loaded from."
    )


def _ignore_tie_weights(*args: Any, **options: Any) -> None:
    """Replace ``tie_weights`` by a no-op: whether embedding and head share a matrix is fixed in the base."""
