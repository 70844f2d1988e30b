"""Installs Whet's training kernels in a Hugging Face model, and removes them again.

``accelerate(model)`` replaces forwards by autograd functions over native kernels: linear layers with bfloat16 products
(if the processor has them) over float32 master weights or over packed frozen weights, PEFT's LoRA, RMSNorm, SwiGLU,
RoPE, and attention over packed batches. Parameters, state dict, adapters and hooks of the model are unchanged; a model
with a custom ``forward`` or hook that the kernels would bypass is rejected. ``completion_logprobs`` then runs packed
batches, computes shared prompts once, and applies the LM head only to tokens that count.

How a packed batch gets through a Hugging Face forward:

    PackedBatch (N tokens: prompts once, completions after them)      learner/batch.py
      | Acceleration.hidden_states: input_ids (1, N), position_ids (1, N),
      | attention_mask = a (1, 1, 1, 1) NaN tensor with the attribute ``whet_batch``   _wrap_batch
      v
    the model's own decoder.forward, which passes a 4-D mask on unchanged
      | embedding, norms, MLPs: one row per token, no sequences         _embedding, _rms_norm, _swiglu, _linear
      | attention: finds the batch in the mask                          _unwrap_batch
      |   _attention, _gptj_attention: q, k, v, RoPE and the kernel in place of the module's forward
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
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from whet import _core
from whet.config.settings import Compute, ComputeDtype
from whet.errors import WhetTypeError, WhetValueError, check_choice
from whet.learner.batch import PackedBatch
from whet.memory import tensor_memory
from whet.models.families import FAMILIES, logits_scale, softcap
from whet.models.sources.module_code import check_code, forward_code
from whet.nn import functions
from whet.nn.frozen import FrozenLinear, FrozenWeight, check_trainable, special_adapters
from whet.nn.linear_logprobs import Head
from whet.nn.modules import inner_module, module_device
from whet.nn.scratch import cast_weight, scratch_memory
from whet.nn.threads import openmp_fork, warn_of_spinning
from whet.signals import deferred_signals

_NAME = "whet"
_MAX_ROWS_ROUNDED_ON_LOAD = 32
"""Up to this many rows, rounding weights on load is faster than rounding the whole matrix first."""
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
        in_place: whether backward passes add gradients of weights to ``.grad`` directly, bypassing autograd: faster,
            and correct for ``backward()``, but not for ``torch.autograd.grad``.
    """

    def __init__(self, model: nn.Module, dtype: ComputeDtype = "auto") -> None:
        check_choice("accelerate", "dtype", dtype, ComputeDtype)
        narrow = dtype == "bfloat16" or (dtype == "auto" and "bf16" in _core.isa())
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.in_place = False
        self._model: Any = inner_module(model)
        if any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()):
            raise WhetTypeError(
                "accelerate: the model has virtual tokens before its input. Pass LoRA adapters, or none."
            )
        check_trainable(self._model, "accelerate")
        self._decoder, self._head_module = _find_head(self._model)
        self._wrapped = model
        self._check_modules()
        config = self._model.config.to_dict()
        self._logits_scale = logits_scale(config, "accelerate")
        self._logits_softcap = softcap(config, "logits_softcap", "accelerate")
        self.attention_softcap = softcap(config, "attention_softcap", "accelerate")
        self.norm_offset = FAMILIES[self._model.config.model_type].norm_offset
        self._head: Head | None = None
        self._packed = False
        self._originals: list[tuple[nn.Module, str, Any]] = []
        _register()
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
            for module in self._model.modules():
                forward = self._choose_forward(module)
                if forward is not None:
                    self._replace(module, "forward", forward)
                if _uses_attention_interface(module):
                    # On a copy of the config, which may be shared with another model.
                    config = copy.copy(module.config)
                    config._attn_implementation = _NAME
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

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        self._originals.append((module, name, vars(module).get(name)))
        setattr(module, name, value)

    def __enter__(self) -> Acceleration:
        if acceleration_of(self._model) is not self:
            self.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return the hidden states (N, K) of a packed batch, as the LM head reads them."""
        self._packed = True
        try:
            output = self._decoder(
                input_ids=batch.input_ids[None],
                position_ids=batch.position_ids[None],
                attention_mask=_wrap_batch(batch),
                use_cache=False,
            )
        finally:
            self._packed = False
        return output[0][0] * self._logits_scale if self._logits_scale != 1 else output[0][0]

    def head(self) -> Head:
        """Return the LM head with its current weights and adapters."""
        layer, adapters = _split_adapters(self._head_module)
        weight = None if isinstance(layer, FrozenLinear) else layer.weight
        if weight is not None:
            _check_master(weight)
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
        layer, adapters = _split_adapters(module)
        if adapters is None:
            return None
        if isinstance(layer, FrozenLinear):
            return layer.product(self.dtype, adapters)
        by_columns = type(layer).__name__ == "Conv1D"
        if not (by_columns or type(layer) is nn.Linear) or self.can_round_on_load(x, layer):
            return None
        _check_master(layer.weight)
        weight = layer.weight.t() if by_columns else layer.weight
        master = weight if layer.weight.requires_grad else None
        return functions.Product(partial(cast_weight, weight, self.dtype), layer.bias, adapters, master)

    def _check_modules(self) -> None:
        """Raise if the kernels would bypass code, or an attention module does not call them."""
        named = list(self._wrapped.named_modules())
        modules = [module for _, module in named]
        wrappers = modules[: modules.index(self._model) + 1]  # PEFT's, and the model itself
        bypassed = {*wrappers, *self._head_module.modules()}
        for name, module in named:
            kind = type(module).__name__
            if kind == "Linear" or kind.endswith("MLP"):
                bypassed.update(_bypassed_submodules(module))
            elif kind == "ParamWrapper":
                raise WhetValueError(f"accelerate: {name} has PEFT's target_parameters. Pass target_modules.")
            elif kind.endswith("Attention") and not (_uses_attention_interface(module) or _is_legacy_gptj(module)):
                raise WhetValueError(
                    f"accelerate: {kind} of the installed transformers does not support custom attention functions. "
                    f"Install a newer one."
                )
        check_code(named, "accelerate", bypassed)

    def _choose_forward(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return the function that replaces a module's forward; None: the forward stays."""
        kind = type(module).__name__
        if type(module) in (FrozenLinear, nn.Linear) or kind == "Conv1D" or _is_lora(module):
            return partial(_linear, self, module, module.forward)
        if type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq:
            return partial(_embedding, self, module)
        if kind.endswith("RMSNorm"):
            return partial(_rms_norm, self, module)
        if _is_gated(module) and _is_silu(_get_activation(module)):
            return partial(_swiglu_fused if hasattr(module, "gate_up_proj") else _swiglu, self, module)
        if _is_legacy_gptj(module):
            return partial(_gptj_attention, self, module, module.forward)
        if kind.endswith("Attention") and hasattr(module, "q_proj"):
            family = FAMILIES[self._model.config.model_type]
            if family.rope == "neox" and not family.partial_rotary and not getattr(module, "residual_dropout", 0):
                return partial(_attention, self, module, module.forward)
        return None


def _check_master(weight: Tensor) -> None:
    """Raise a WhetValueError if a weight is no longer float32 on the CPU."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise WhetValueError(
            f"accelerate: a weight of shape {tuple(weight.shape)} has become {weight.dtype} on {weight.device}, "
            "expected float32 on the CPU. Call remove() before the model is converted, or convert it back."
        )


def _make_float_head(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Head:
    def rows(first: int, n: int) -> Tensor:
        return cast_weight(weight[first : first + n], dtype)

    return Head(rows, (weight.shape[0], weight.shape[1]), bias, dtype, weight)


def _uses_attention_interface(module: nn.Module) -> bool:
    """Whether an attention module looks up its function by the config's ``_attn_implementation``."""
    return (
        type(module).__name__.endswith("Attention")
        and hasattr(getattr(module, "config", None), "model_type")
        and "ALL_ATTENTION_FUNCTIONS" in forward_code(module).co_names
    )


def _is_legacy_gptj(module: nn.Module) -> bool:
    """Whether this is GPT-J's attention of transformers before 5.24, which does not look up a function."""
    return type(module).__name__ == "GPTJAttention" and hasattr(module, "embed_positions")


def _is_gated(module: nn.Module) -> bool:
    return type(module).__name__.endswith("MLP") and (hasattr(module, "gate_proj") or hasattr(module, "gate_up_proj"))


def _get_activation(module: Any) -> Any:
    """Return the activation of an MLP; None if it has another name."""
    return getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)


def _bypassed_submodules(module: Any) -> Iterator[nn.Module]:
    """Return the modules that the kernels do not call: those inside a LoRA layer, the activation of a gated MLP."""
    inside = list(module.children()) if _is_lora(module) else [_get_activation(module)] if _is_gated(module) else []
    return (member for outer in inside if isinstance(outer, nn.Module) for member in outer.modules())


def _find_head(inner: Any) -> tuple[nn.Module, Any]:
    """Return decoder and LM head, or raise if the model cannot be accelerated."""
    config: Any = getattr(inner, "config", None)
    family = getattr(config, "model_type", None)
    if family is None or not hasattr(inner, "get_output_embeddings"):
        raise WhetTypeError(f"accelerate: model is {type(inner).__name__}, expected a Hugging Face causal model.")
    if family not in FAMILIES:
        raise WhetValueError(
            f"accelerate: model_type is {family!r}; the kernels support {', '.join(sorted(FAMILIES))}."
        )
    head, decoder = inner.get_output_embeddings(), getattr(inner, FAMILIES[family].prefix.removesuffix("."), None)
    layer = head.base_layer if _is_lora(head) and not special_adapters(head) else head
    if type(layer) not in (nn.Linear, FrozenLinear) or decoder is None or decoder is inner:
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
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % 2 or head_dim > 256:
        raise WhetValueError(f"accelerate: head_dim is {head_dim}, expected an even number up to 256.")
    return decoder, head


def _is_silu(activation: Any) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


# --- replacements of a module's forward ---------------------------------------------------------------------


def _embedding(acceleration: Acceleration, module: Any, input: Tensor) -> Tensor:
    return functions.embedding(input, module.weight, module.padding_idx, acceleration.in_place)


def _linear(
    acceleration: Acceleration, module: Any, original: Callable[..., Any], x: Tensor, *args: Any, **options: Any
) -> Tensor:
    product = None if args or options else acceleration.product(module, x)  # options: PEFT's adapter_names, ...
    if product is not None:
        return functions.linears(x, [product], acceleration.dtype, acceleration.in_place)[0]
    if args or options or _is_lora(module):
        return original(x, *args, **options)
    return functions.rounded_linear(x, module.weight, module.bias, by_columns=type(module) is not nn.Linear)


def _is_lora(module: Any) -> bool:
    """Whether this is PEFT's LoRA around a linear layer."""
    kind = type(module)
    return kind.__name__ == "Linear" and kind.__module__ == "peft.tuners.lora.layer"


def _split_adapters(module: Any) -> tuple[Any, tuple[functions.Adapter, ...] | None]:
    """Return a linear layer and the active adapters of PEFT's layer around it; None: only PEFT can compute them."""
    if not _is_lora(module):
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


def _has_hooks(module: Any) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


def _warn_of_special_adapters(model: nn.Module) -> None:
    kinds = {kind: None for module in model.modules() if _is_lora(module) for kind in special_adapters(module)}
    if kinds:
        warnings.warn(
            f"accelerate: PEFT computes {', '.join(kinds)}, which is slower and takes more memory than plain LoRA.",
            stacklevel=4,
        )


def _rms_norm(acceleration: Acceleration, module: Any, hidden_states: Tensor) -> Tensor:
    _check_master(module.weight)
    eps = getattr(module, "variance_epsilon", None) or module.eps
    weight = module.weight + acceleration.norm_offset if acceleration.norm_offset else module.weight
    return functions.rms_norm(hidden_states, weight, eps, acceleration.dtype)


def _swiglu(acceleration: Acceleration, module: Any, x: Tensor) -> Tensor:
    return module.down_proj(functions.swiglu(*acceleration.linears(x, module.gate_proj, module.up_proj)))


def _swiglu_fused(acceleration: Acceleration, module: Any, hidden_states: Tensor) -> Tensor:
    return module.down_proj(functions.swiglu(*module.gate_up_proj(hidden_states).chunk(2, dim=-1)))


def _reject_dropout(dropout: float) -> None:
    if dropout:
        raise WhetValueError(
            f"accelerate: attention dropout is {dropout}, which packed attention does not support. Call model.eval(), "
            "or set it to 0 in the config."
        )


def _wrap_batch(batch: PackedBatch) -> Tensor:
    """Return a mask that carries the batch to every attention module: models pass 4-D masks on unchanged."""
    mask = torch.full((1, 1, 1, 1), torch.nan)  # an attention that adds the mask returns NaN, which is noticed
    mask.whet_batch = batch  # pyright: ignore[reportAttributeAccessIssue]
    return mask


def _unwrap_batch(attention_mask: Tensor | None) -> PackedBatch | None:
    return getattr(attention_mask, "whet_batch", None)


def _attention(
    acceleration: Acceleration,
    module: Any,
    original: Callable[..., Any],
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Attention of a packed batch with separate projections and NeoX RoPE (Llama, Mistral, Qwen)."""
    batch = _unwrap_batch(attention_mask)
    if batch is None:
        return original(hidden_states, position_embeddings, attention_mask, *args, **options)
    _reject_dropout(module.attention_dropout if module.training else 0.0)
    q, k, v = _project(acceleration, module, hidden_states)
    if hasattr(module, "q_norm"):
        q, k = _norm_heads(module.q_norm, q), _norm_heads(module.k_norm, k)
    if getattr(module, "use_rope", True):
        table = _rope_table(*position_embeddings)
        q, k = functions.rope(q, table), functions.rope(k, table)
    window = getattr(module, "sliding_window", None)
    if FAMILIES[module.config.model_type].window == "all":
        window = module.config.sliding_window
    out = functions.attention(q, k, v, batch, module.scaling, window, acceleration.attention_softcap)
    return module.o_proj(out.view(1, len(q), -1)), None


def _norm_heads(norm: Any, heads: Tensor) -> Tensor:
    """Norm each head, or all heads together if the norm's weight spans them."""
    if norm.weight.shape[0] == heads.shape[-1]:
        return norm(heads)
    return norm(heads.reshape(len(heads), -1)).view(heads.shape)


def _rope_table(cos: Any, sin: Tensor) -> Tensor:
    """Return the cosines and sines of a packed batch, (N, R): one tensor, which all layers save for their backward."""
    if not hasattr(cos, "whet_table"):
        half = cos.shape[-1] // 2
        cos.whet_table = torch.cat((cos[0, :, :half], sin[0, :, :half]), 1).float()
    return cos.whet_table


def _gptj_attention(
    acceleration: Acceleration,
    module: Any,
    original: Callable[..., Any],
    hidden_states: Tensor,
    layer_past: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Attention of a packed batch with RoPE over neighbouring pairs (GPT-J)."""
    batch = _unwrap_batch(attention_mask)
    if batch is None:
        return original(hidden_states, layer_past, attention_mask, position_ids, *args, **options)
    _reject_dropout(module.attn_dropout.p if module.training else 0.0)
    q, k, v = _project(acceleration, module, hidden_states)
    sin, cos = module.embed_positions[position_ids[0]].chunk(2, dim=1)
    table = torch.cat((cos, sin), 1).float()
    q, k = (functions.rope(x, table, is_neox=False) for x in (q, k))
    out = functions.attention(q, k, v, batch, module.head_dim**-0.5, None)
    return module.resid_dropout(module.out_proj(out.view(1, len(q), -1))), None


def _project(acceleration: Acceleration, module: Any, hidden_states: Tensor) -> list[Tensor]:
    """Return query, key and value of a packed batch: (N, heads, head_dim) each."""
    parts = acceleration.linears(hidden_states, module.q_proj, module.k_proj, module.v_proj)
    return [part.view(part.shape[1], -1, module.head_dim) for part in parts]


def _attention_interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: Any = None,
    sliding_window: int | None = None, dropout: float = 0.0, softcap: float | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Attention function with the signature of transformers, for (1, heads, tokens, head_dim)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch = _unwrap_batch(attention_mask)
    if batch is None:
        query, key = query.to(value.dtype), key.to(value.dtype)
        if softcap is not None:
            return _softcap_attention(query, key, value, attention_mask, dropout, scaling, softcap), None
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
    return functions.attention(q, k, v, batch, scale, sliding_window, softcap or 0.0)[None], None


def _softcap_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None, cap: float
) -> Tensor:
    """Attention with soft-capped scores, which torch's function does not support: (1, tokens, heads, head_dim)."""
    n_queries, n_keys, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scores = cap * torch.tanh(query @ key.transpose(2, 3) * (scale / cap))
    if mask is None:  # sdpa_mask returns None for a whole sequence, and for one token that attends to all keys
        mask = torch.ones(n_queries, n_keys, dtype=torch.bool).tril_() if n_queries > 1 else None
    if mask is not None:  # bool or additive, depending on the model's own config
        mask = mask[..., :n_keys]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).nan_to_num(0.0).to(value.dtype)
    return (torch.dropout(weights, dropout, train=dropout > 0) @ value).transpose(1, 2).contiguous()


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention_interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, sdpa_mask)
