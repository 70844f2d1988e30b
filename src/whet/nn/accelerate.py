"""Installs Whet's training kernels in a Hugging Face model, and removes them again.

``accelerate(model)`` replaces forwards by autograd functions over native kernels: linear layers with bfloat16 products
(if the processor has them) over float32 master weights or over packed frozen weights, PEFT's LoRA, RMSNorm, SwiGLU,
RoPE, and attention over packed batches. Parameters, state dict, adapters and hooks of the model are unchanged; a model
with a custom ``forward`` or hook that the kernels would bypass is rejected. ``completion_logprobs`` then runs packed
batches, computes shared prompts once, and applies the LM head only to tokens that count.

How a packed batch gets through a Hugging Face forward:

    PackedBatch (N tokens: prompts once, completions after them)      learner/batch.py
      | Acceleration.hidden_states: input_ids (1, N), position_ids (1, N),
      | attention_mask = a (1, 1, 1, 1) NaN tensor with the attribute ``whet_batch``   wrap_batch
      v
    the model's own decoder.forward, which passes a 4-D mask on unchanged
      | embedding, norms, MLPs: one row per token, no sequences         nn/forwards.py
      | attention: finds the batch in the mask                          _mix
      |   _attention, _gptj_attention: q, k, v, RoPE and the kernel in place of the module's forward
      |   _short_conv, _gated_delta_net: the same for the convolutions of LFM2, and the delta rule of Qwen3.5
      |   _attention_interface: other modules, which look up attention functions by name
      |     -> functions.attention: a token attends to its prompt and its own completion
      v
    hidden states (N, K) -> rows that predict -> linear_logprobs        nn/causal_lm.py
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from whet import _core
from whet.config.settings import Compute, ComputeDtype
from whet.errors import WhetTypeError, WhetValueError, check_choice
from whet.learner.batch import PackedBatch
from whet.memory import tensor_memory
from whet.models.activations import count_kept, saved_bytes
from whet.models.families import (
    FAMILIES,
    family_of,
    layer_windows,
    logits_scale,
    model_config,
    rotated_layers,
    softcap,
    text_options,
)
from whet.models.sources.module_code import check_code
from whet.nn import functions
from whet.nn.forwards import (
    NAME,
    check_master,
    choose_forward,
    get_activation,
    is_experts,
    is_gated,
    is_legacy_gptj,
    is_lora,
    register,
    split_adapters,
    uses_attention_interface,
    wrap_batch,
)
from whet.nn.frozen import FrozenLinear, FrozenWeight, check_trainable, special_adapters
from whet.nn.linear_logprobs import Head
from whet.nn.modules import inner_module, module_device
from whet.nn.scratch import cast_weight, scratch_memory
from whet.nn.threads import openmp_fork, warn_of_spinning
from whet.signals import deferred_signals

_MAX_ROWS_ROUNDED_ON_LOAD = 32
"""Up to this many rows, rounding weights on load is faster than rounding the whole matrix first."""
_MOST_HEAD_DIM = 512
_accelerated: weakref.WeakKeyDictionary[nn.Module, Acceleration] = weakref.WeakKeyDictionary()


def accelerate(model: nn.Module, dtype: ComputeDtype = "auto") -> Acceleration:
    """Install Whet's kernels in a model, permanently or within ``with accelerate(model):``.

    Args:
        model: a Hugging Face causal model of a supported family (or a PEFT model over one) on the CPU, with weights
            float32 or packed by ``frozen_model``. It can be called and trained as before, also by other loops; outputs
            have the precision of ``dtype``. LoRA adapters of frozen linear layers are computed with the layer.
        dtype: of products: "bfloat16" rounds the weights and activations of products, and keeps master weights,
            gradients, norms, the residual stream, logits and all sums in float32. "float32" changes only the order of
            sums. "auto": bfloat16 if the processor has bfloat16 products.

    Returns:
        The ``Acceleration``, whose ``remove()`` restores the model's own functions. From here on the process keeps
        freed memory for the next step instead of returning it, in huge pages if the system grants them.

    Raises:
        WhetTypeError: not a Hugging Face causal model.
        WhetValueError: an unsupported family, another device or dtype, a model that is accelerated already, an adapter
            that packed weights do not support, a module whose ``forward`` is not its library's, a forward hook that
            would be bypassed (on the model itself, its head, an activation, or inside an adapter), or an unknown
            ``dtype``.
    """
    acceleration = Acceleration(model, dtype)
    acceleration.install()
    return acceleration


def acceleration_of(model: nn.Module) -> Acceleration | None:
    """Return the acceleration installed in this model; None: it runs its own functions."""
    return _accelerated.get(inner_module(model))


def choose_accelerations(
    models: Sequence[nn.Module], compute: Compute, training_mode: bool, where: str
) -> dict[nn.Module, Acceleration]:
    """Return an ``Acceleration`` for each model, or none at all: models whose outputs are compared compute alike.

    Args:
        models: a policy, or a policy and its reference.
        compute: as in ``TrainerConfig``. "auto" tries Hugging Face models on the CPU without attention dropout in
            their mode, and falls back to torch if the kernels do not support a model.
        training_mode: whether models are updated in training mode.
        where: the caller's name, for the warning.

    Returns:
        Accelerations by model; empty if torch computes the step.

    Raises:
        WhetTypeError, WhetValueError: the kernels do not support a model, and ``compute`` is "bfloat16" or "float32";
            or packed weights do not support an adapter.
    """
    accelerations: dict[nn.Module, Acceleration] = {}
    for model in models:
        check_trainable(model, where)
    for model in models:
        acceleration = _choose_acceleration(model, compute, training_mode, where)
        if acceleration is None:
            return {}
        accelerations[model] = acceleration
    return accelerations


def _choose_acceleration(model: nn.Module, compute: Compute, training_mode: bool, where: str) -> Acceleration | None:
    if compute == "torch":
        return None
    if compute != "auto":
        return Acceleration(model, compute)
    config = getattr(inner_module(model), "config", None)
    dropout = any(getattr(config, name, 0) for name in ("attention_dropout", "attn_pdrop"))
    if config is None or module_device(model).type != "cpu" or (training_mode and dropout):
        return None
    try:
        return Acceleration(model)
    except WhetTypeError:
        return None  # a custom module, which only torch can run
    except WhetValueError as error:
        warnings.warn(
            f"{where}: torch computes the step, which is slower, because Whet's kernels do not support this model "
            f"({error}) compute='torch' silences this warning.",
            stacklevel=5,
        )
        return None


class Acceleration:
    """Whet's kernels for one model, installed from ``install()`` to ``remove()``, or inside a ``with``.

    Arguments and errors are the same as for ``accelerate``.

    Attributes:
        dtype: of products, torch.bfloat16 or torch.float32.
        family: the model's family.
        attention_softcap: bound of the attention scores; 0: none.
        windows: sliding window of each layer; 0: none.
        rotated_layers: whether each layer rotates queries and keys; (): all do.
        norm_offset: constant that the family adds to the weights of norms.
        activation_bytes: memory in which ``hidden_states`` keeps activations of layers for the backward pass, besides
            the inputs of all layers; the other layers are computed again, with the same bits. None: no limit.
        layer_bytes: bytes per token that each layer saves for the backward pass; empty: unknown, all layers are kept.
        in_place: whether backward passes add gradients of weights to ``.grad`` directly, bypassing autograd: faster,
            and correct for ``backward()``, but not for ``torch.autograd.grad``.
    """

    def __init__(self, model: nn.Module, dtype: ComputeDtype = "auto") -> None:
        check_choice("accelerate", "dtype", dtype, ComputeDtype)
        narrow = dtype == "bfloat16" or (dtype == "auto" and "bf16" in _core.isa())
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.in_place = False
        self.activation_bytes: int | None = None
        self._model: Any = inner_module(model)
        if any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()):
            raise WhetTypeError(
                "accelerate: the model has virtual tokens before its input. Pass LoRA adapters, or none."
            )
        check_trainable(self._model, "accelerate")
        self._decoder, self._head_module = _find_head(self._model)
        self._layers = _find_layers(self._decoder)
        self._wrapped = model
        self._check_modules()
        config = self._model.config.to_dict()
        self._logits_scale = logits_scale(config, "accelerate")
        self._logits_softcap = softcap(config, "logits_softcap", "accelerate")
        self.attention_softcap = softcap(config, "attention_softcap", "accelerate")
        self.windows = layer_windows(config, "accelerate")
        self.rotated_layers = rotated_layers(config, "accelerate")
        self.family = family_of(config, "accelerate")
        self.norm_offset = self.family.norm_offset
        self.layer_bytes = self._count_layer_bytes()
        self._head: Head | None = None
        self._packed = False
        self._recomputation: Recomputation | None = None
        self._originals: list[tuple[nn.Module, str, Any]] = []
        register()
        _core.keep_freed_memory()

    def install(self) -> None:
        """Replace the model's functions by the kernels: all of them, or none if interrupted."""
        if acceleration_of(self._model) is not None:
            raise WhetValueError("accelerate: the model is accelerated already. Call remove() on that Acceleration.")
        self._check_modules()
        _warn_of_special_adapters(self._model)
        warn_of_spinning()
        _accelerated[self._model] = self
        try:
            for module in self._computed():
                forward = choose_forward(self, module)
                if forward is not None:
                    self._replace(module, "forward", forward)
                elif module in self._layers:
                    self._replace(module, "forward", partial(self._layer, self._layers[module], module.forward))
                if uses_attention_interface(module):
                    # On a copy of the config, which may be shared with another model.
                    config: Any = copy.copy(module.config)
                    config._attn_implementation = NAME
                    self._replace(module, "config", config)
            _core.borrow_threads(openmp_fork())
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Restore all of the model's own functions; a no-op if they are in place."""
        if acceleration_of(self._model) is not self:
            return
        with deferred_signals():
            while self._originals:
                module, name, original = self._originals.pop()
                if original is None:
                    vars(module).pop(name, None)
                else:
                    setattr(module, name, original)
            del _accelerated[self._model]
            if not _accelerated:
                _core.borrow_threads(0)

    def _computed(self) -> Iterator[nn.Module]:
        """Yield the modules of the language model: a vision tower keeps its functions."""
        yield from self._decoder.modules()
        yield from self._head_module.modules()

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        self._originals.append((module, name, vars(module).get(name)))
        setattr(module, name, value)

    def __enter__(self) -> Acceleration:
        if acceleration_of(self._model) is not self:
            self.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def hidden_states(
        self,
        batch: PackedBatch,
        *,
        scaled: bool = True,
        again: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """Return the hidden states (N, K) of a packed batch, as the LM head reads them.

        Args:
            batch: the tokens.
            scaled: whether they are scaled for the LM head; ``score`` reads unscaled ones.
            again: makes the context in which the backward pass computes a layer again.
        """
        self._packed = True
        self._recomputation = self._choose_recomputation(len(batch.input_ids), again)
        mask: Any = wrap_batch(batch)
        options: dict[str, Any] = {}
        if "n_shared_kv_layers" in self.family.keys:  # with the number of logits, Gemma 4 cuts the mask
            options["logits_to_keep"] = batch.position_ids
        if self.family.mixer:  # the model would pass no mask on to convolutions
            mask = dict.fromkeys(("full_attention", "conv", "linear_attention"), mask)
        try:
            output = self._decoder(
                input_ids=batch.input_ids[None],
                position_ids=batch.position_ids[None],
                attention_mask=mask,
                use_cache=False,
                **options,
            )
        finally:
            self._packed, self._recomputation = False, None
        return output[0][0] * self._logits_scale if scaled and self._logits_scale != 1 else output[0][0]

    def _count_layer_bytes(self) -> list[int]:
        """Return the bytes per token that each layer saves for the backward pass; empty: unknown."""
        trained = [name for name, p in self._decoder.named_parameters() if p.requires_grad]
        is_fused = not any(name.endswith("q_proj") for name, _ in self._decoder.named_modules())
        try:
            model = model_config(self._model.config.to_dict())
        except WhetValueError:  # an architecture that the engine does not support, and torch computes in part
            return []
        is_frozen = any("lora_" in name for name in trained)
        return saved_bytes(model, self.dtype.itemsize, is_frozen=is_frozen, is_fused=is_fused)

    def _choose_recomputation(
        self, n_tokens: int, again: Callable[[], AbstractContextManager[Any]]
    ) -> Recomputation | None:
        """Return which layers of a pass are computed again: the first ones, if not all fit into the limit."""
        if self.activation_bytes is None or not torch.is_grad_enabled():
            return None
        n_kept = count_kept([n_tokens * n_bytes for n_bytes in self.layer_bytes], self.activation_bytes)
        return Recomputation(len(self.layer_bytes) - n_kept, again)

    def _layer(self, index: int, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Compute a layer, and again in the backward pass if its activations are not kept."""
        recomputation = self._recomputation
        if recomputation is None or index >= recomputation.n_layers:
            return original(*args, **options)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), recomputation.context()

        return checkpoint(original, *args, use_reentrant=False, context_fn=contexts, **options)

    def head(self) -> Head:
        """Return the LM head with its current weights and adapters.

        Raises:
            WhetTypeError: the model is a sequence classifier.
        """
        if type(self._head_module) is nn.Identity:
            raise WhetTypeError(
                f"accelerate: model is a {type(self._model).__name__}, which has no LM head. Pass a causal language "
                f"model."
            )
        layer, adapters = split_adapters(self._head_module)
        weight = None if isinstance(layer, FrozenLinear) else layer.weight
        if weight is not None:
            check_master(weight)
        head = self._head
        if head is None or head.weight is not weight or head.bias is not layer.bias:
            head = layer.head(self.dtype) if weight is None else _make_float_head(weight, layer.bias, self.dtype)
        head.in_place, head.adapters, head.softcap = self.in_place, adapters or (), self._logits_softcap
        self._head = head
        return head

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the rounded, dequantised and packed copies of weights, for ``whet.memory_report``."""
        yield from tensor_memory("copies", [scratch_memory()])
        if self._head is not None:
            yield "copies", ("head", id(self._head)), self._head.packed_bytes

    def can_round_on_load(self, x: Tensor, module: Any) -> bool:
        """Whether the product with x can read the float32 weight directly and round it on load.

        With few rows, as in generation, the product is bound by one read of the weight.
        """
        weight = module.weight
        return (
            x.numel() <= _MAX_ROWS_ROUNDED_ON_LOAD * x.shape[-1]
            and self.dtype == torch.bfloat16
            and not (self._packed or torch.is_grad_enabled())
            and not isinstance(weight, FrozenWeight)
            and weight.dtype == torch.float32
            and weight.is_contiguous()
        )

    def linears(self, x: Tensor, *modules: Any) -> Sequence[Tensor]:
        """Return the outputs of several linear layers for one input.

        One autograd function computes all of them: it saves x at most once and accumulates its gradient in place.
        """
        products = [self.product(module, x) for module in modules]
        if None in products or any(map(_has_hooks, modules)):
            return [module(x) for module in modules]
        return functions.linears(x, cast("list[functions.Product]", products), self.dtype, self.in_place)

    def product(self, module: Any, x: Tensor) -> functions.Product | None:
        """Return a linear layer and its active LoRA adapters as a ``Product``; None if another path computes it."""
        layer, adapters = split_adapters(module)
        if adapters is None:
            return None
        if isinstance(layer, FrozenLinear):
            return layer.product(self.dtype, adapters)
        by_columns = type(layer).__name__ == "Conv1D"
        if not (by_columns or type(layer) is nn.Linear) or self.can_round_on_load(x, layer):
            return None
        check_master(layer.weight)
        weight = layer.weight.t() if by_columns else layer.weight
        master = weight if layer.weight.requires_grad else None
        return functions.Product(partial(cast_weight, weight, self.dtype), layer.bias, adapters, master)

    def _check_modules(self) -> None:
        """Raise if the kernels would bypass code, or an attention module does not call them."""
        named = list(self._wrapped.named_modules())
        modules = [module for _, module in named]
        wrappers = modules[: modules.index(self._model) + 1]  # PEFT's, and the model itself
        bypassed, computed = {*wrappers, *self._head_module.modules()}, set(self._computed())
        for name, module in named:
            kind = type(module).__name__
            if kind == "Linear" or kind.endswith("MLP"):
                bypassed.update(_bypassed_submodules(module))
            elif kind == "ParamWrapper" and not is_experts(module):
                raise WhetValueError(
                    f"accelerate: {name} has PEFT's target_parameters, which are of experts only. Pass target_modules."
                )
            elif (
                kind.endswith("Attention")
                and module in computed
                and not (uses_attention_interface(module) or is_legacy_gptj(module))
            ):
                raise WhetValueError(
                    f"accelerate: {kind} of the installed transformers does not support custom attention functions. "
                    f"Install a newer one."
                )
        check_code(named, "accelerate", bypassed)


class Recomputation(NamedTuple):
    """The number of layers, from the first, that a backward pass computes again, and makes the context for that."""

    n_layers: int
    context: Callable[[], AbstractContextManager[Any]]


def _find_layers(decoder: nn.Module) -> dict[nn.Module, int]:
    """Return the index of each layer of a decoder: in the longest of its lists of modules."""
    lists = [module for module in decoder.children() if isinstance(module, nn.ModuleList)]
    return {layer: i for i, layer in enumerate(max(lists, key=len, default=()))}


def _make_float_head(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Head:
    def rows(first: int, n: int) -> Tensor:
        return cast_weight(weight[first : first + n], dtype)

    return Head(rows, (weight.shape[0], weight.shape[1]), bias, dtype, weight)


def _bypassed_submodules(module: Any) -> Iterator[nn.Module]:
    """Return the modules that the kernels do not call: those inside a LoRA layer, the activation of a gated MLP."""
    inside = list(module.children()) if is_lora(module) else [get_activation(module)] if is_gated(module) else []
    return (member for outer in inside if isinstance(outer, nn.Module) for member in outer.modules())


def _find_head(inner: Any) -> tuple[nn.Module, Any]:
    """Return decoder and LM head, or raise if the model cannot be accelerated.

    The head of a sequence classifier runs its own code: in place of the LM head it has an ``nn.Identity``.
    """
    config: Any = getattr(inner, "config", None)
    if getattr(config, "model_type", None) is None or not hasattr(inner, "get_output_embeddings"):
        raise WhetTypeError(f"accelerate: model is {type(inner).__name__}, expected a Hugging Face causal model.")
    options = config.to_dict()
    if text_options(options)["model_type"] not in FAMILIES:
        raise WhetValueError(
            f"accelerate: model_type is {config.model_type!r}; the kernels support {', '.join(sorted(FAMILIES))}."
        )
    names = dict(inner.named_modules())
    head: Any = inner.get_output_embeddings()
    if isinstance(getattr(inner, "score", None), nn.Module):
        head = head or nn.Identity()
    decoder = names.get(family_of(options, "accelerate").decoder)
    layer = head.base_layer if is_lora(head) and not special_adapters(head) else head
    if type(layer) not in (nn.Linear, FrozenLinear, nn.Identity) or decoder is None or decoder is inner:
        raise WhetValueError(
            f"accelerate: {type(inner).__name__} has no plain linear head over a decoder. Pass a causal language model."
        )
    dtypes = {p.dtype for p in inner.parameters() if p.is_floating_point()}
    if dtypes != {torch.float32} or module_device(inner).type != "cpu":
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise WhetValueError(
            f"accelerate: the weights are {names} on {module_device(inner)}, expected float32 on the CPU. Load the "
            "model with dtype=torch.float32, or call model.float() or model.cpu()."
        )
    config = config.get_text_config()
    sizes = {module.head_dim for module in decoder.modules() if hasattr(module, "head_dim")}
    for head_dim in sizes or {config.hidden_size // config.num_attention_heads}:
        if head_dim % 2 or head_dim > _MOST_HEAD_DIM:
            raise WhetValueError(f"accelerate: head_dim is {head_dim}, expected an even number up to {_MOST_HEAD_DIM}.")
    return decoder, head


def _has_hooks(module: Any) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


def _warn_of_special_adapters(model: nn.Module) -> None:
    kinds = {kind: None for module in model.modules() if is_lora(module) for kind in special_adapters(module)}
    if kinds:
        warnings.warn(
            f"accelerate: PEFT computes {', '.join(kinds)}, which is slower and takes more memory than plain LoRA.",
            stacklevel=4,
        )
