"""Frozen reference of a policy of torch modules."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from whet.config.settings import TrainerConfig
from whet.errors import WhetValueError
from whet.models.pissa import is_zero
from whet.nn.frozen import base_of
from whet.nn.modules import inner_module
from whet.signals import deferred_signals
from whet.training.policy import check_moving_adapters, error_without_reference
from whet.training.reference_cache import ReferenceCache

_IRRELEVANT = (
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "base_model_name_or_path", "peft_version",
    "inference_mode",
)  # fmt: skip
"""Config fields that do not affect results: its origin, and dtypes, which the tensors determine."""


class Reference:
    """Frozen reference of a loss: the policy at the beginning of training.

    The reference is a separate module, either the user's or a frozen copy of the policy; or a PEFT policy with its
    adapters off, if the adapters are new and nothing else is trained; or a PEFT policy with the initial values of its
    trained parameters.

    Args:
        policy: the trained model.
        trained: the trained parameters of the policy, by name.
        model: the user's module; None: chosen among the other kinds.
        kept: whether to keep initial values or a frozen copy if needed. Otherwise the policy is the reference until its
            first update.
        where: the caller's name, for errors.

    Attributes:
        model: the separate module, if any.
        adapters_off: whether the reference is the policy with its adapters off.
        first_values: initial values of the trained parameters, by name; empty: not used.

    Raises:
        WhetValueError: model shares memory with trained parameters.
    """

    def __init__(
        self, policy: nn.Module, trained: Mapping[str, Tensor], model: nn.Module | None, *, kept: bool, where: str
    ) -> None:
        self._policy: Any = policy
        self._trained = trained
        self._kept = kept
        if model is not None:
            _check_separate(policy, trained, model, where)
        self._is_peft = model is None and hasattr(policy, "peft_config") and hasattr(policy, "disable_adapter")
        self.adapters_off = self._is_peft and _adapters_are_new(policy)
        self.first_values: dict[str, Tensor] = {}
        if kept and self._is_peft and not self.adapters_off:
            self.first_values = {name: p.detach().clone() for name, p in trained.items()}
        if kept and model is None and not self._is_peft:
            model = copy.deepcopy(policy).requires_grad_(False)
        self.model = model

    @contextmanager
    def as_module(self) -> Iterator[nn.Module]:
        """Context that provides a module which computes the reference's log-probs."""
        if self.adapters_off:
            with _without_adapters(self._policy):
                yield self._policy
        elif self.first_values:
            with _with_values(self._trained, self.first_values):
                yield self._policy
        else:
            yield self._policy if self.model is None else self.model

    def is_policy(self) -> bool:
        """Whether the reference is the policy before its first update, with nothing kept separately."""
        return self.model is None and not self.adapters_off and not self.first_values

    def check_moves(self, config: TrainerConfig, where: str) -> None:
        """Raise unless ``move`` can follow the settings: adapters move all the way, a module has the same parameters.

        Raises:
            WhetValueError: names the setting, or the first parameter that differs.
        """
        if not config.moves_reference():
            return
        if self._is_peft:
            check_moving_adapters(config, where)
            return
        own, others = (
            {name: tuple(p.shape) for name, p in cast(nn.Module, model).named_parameters()}
            for model in (self._policy, self.model)
        )
        if own != others:
            name = next(name for name in {**own, **others} if own.get(name) != others.get(name))
            raise WhetValueError(
                f"{where}: ref_sync_steps moves ref_model to model, and they differ in the parameter {name}. Pass a "
                f"ref_model of the same architecture, or omit it."
            )

    def move(self, alpha: float) -> None:
        """Set the reference to alpha times the policy plus 1 - alpha times the reference; adapters need alpha 1."""
        if self.model is None:
            self.first_values = {name: p.detach().clone() for name, p in self._trained.items()}
            self.adapters_off = False
            return
        own = dict(self._policy.named_parameters())
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.lerp_(own[name].to(p), alpha)

    def open_cache(self, folder: str, arithmetic: str) -> ReferenceCache:
        """Open the cached log-probs of earlier runs in ``folder`` for these weights and this arithmetic."""
        module = self._policy if self.model is None else self.model
        return ReferenceCache(folder, model_digest(module, self.adapters_off), arithmetic)

    def load(self, first_values: Mapping[str, Tensor], adapters_off: bool, where: str) -> None:
        """Restore the reference of a checkpoint from its attributes; the policy may already be trained.

        Raises:
            CheckpointError: initial values are needed, and neither the checkpoint nor the policy has them.
        """
        if not self._is_peft:
            return
        if self._kept and not adapters_off and not first_values and self.adapters_off:
            raise error_without_reference(where)
        self.adapters_off = adapters_off
        if adapters_off or first_values:
            self.first_values = {n: value.to(self._trained[n].device) for n, value in first_values.items()}


def _check_separate(policy: nn.Module, trained: Mapping[str, Tensor], model: nn.Module, where: str) -> None:
    """Raise a WhetValueError if a module shares memory with trained parameters, and would change with the policy."""
    if model is policy:
        raise WhetValueError(f"{where}: ref_model is the model itself. Pass a frozen copy, or None.")
    names = {p.untyped_storage().data_ptr(): name for name, p in trained.items() if p.numel()}
    shared = [names[at] for p in model.parameters() if (at := p.untyped_storage().data_ptr()) in names]
    if shared:
        raise WhetValueError(
            f"{where}: ref_model shares {shared[0]} with model, which trains it: get_peft_model, for example, "
            "inserts adapters into its argument in place. Omit ref_model: Whet keeps the initial model as reference."
        )


def _adapters_are_new(policy: nn.Module) -> bool:
    """Whether a PEFT model equals its base, and only its adapters are trained."""
    adapters: set[nn.Module] = set()
    for layer in policy.modules():
        parts = [getattr(layer, name, None) for name in getattr(layer, "adapter_layer_names", ())]
        if parts and not _is_identity(layer):
            return False
        adapters.update(module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    return not any(p.requires_grad for m in policy.modules() if m not in adapters for p in m.parameters(recurse=False))


def _is_identity(layer: Any) -> bool:
    """Whether the active adapters of a PEFT layer have no effect; False if unknown.

    True for LoRA whose product is zero, which it is only before the first update, and for a module equal to its
    original.
    """
    if hasattr(layer, "modules_to_save"):
        active = [layer.modules_to_save[name] for name in layer.active_adapters if name in layer.modules_to_save]
        return all(_are_equal(module, layer.original_module) for module in active)
    if not isinstance(getattr(layer, "lora_B", None), nn.ModuleDict) or layer.merged:
        return False
    names = [name for name in layer.active_adapters if name in layer.lora_B]
    if not all(is_zero(layer.lora_A[name].weight, layer.lora_B[name].weight) for name in names):
        return False
    tables = [layer.lora_embedding_A[name] for name in layer.active_adapters if name in layer.lora_embedding_A]
    biases = [layer.lora_B[name].bias for name in names if layer.lora_B[name].bias is not None]
    return not any(bool(p.any()) for p in [*tables, *biases])


def _are_equal(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@contextmanager
def _without_adapters(policy: Any) -> Iterator[None]:
    """Context with adapters off. Restores ``requires_grad``, which PEFT sets on all active adapters on exit."""
    flags = [(p, p.requires_grad) for p in policy.parameters()]
    disabled = policy.disable_adapter()
    try:
        with deferred_signals():
            disabled.__enter__()
        yield
    finally:
        with deferred_signals():
            disabled.__exit__(None, None, None)
            for p, requires_grad in flags:
                p.requires_grad_(requires_grad)


@contextmanager
def _with_values(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context with other values of the parameters; exchanges their storage instead of copying."""
    own = {name: p.data for name, p in parameters.items()}
    try:
        with deferred_signals():
            _swap_storage(parameters, values)
        yield
    finally:
        with deferred_signals():
            _swap_storage(parameters, own)


def _swap_storage(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, p in parameters.items():
        p.data = values[name]


def model_digest(model: nn.Module, adapters_off: bool = False) -> str:
    """Return the SHA-256 of a model's tensors, their names, its packed base, and its settings.

    Settings matter because equal weights may give other log-probs: the config of a Hugging Face model, without its
    origin, or the ``repr`` of any other module, which shows names, sizes and constants; and the settings of PEFT
    adapters, unless adapters are off.
    """
    digest = hashlib.sha256(_settings(model).encode())
    if not adapters_off:
        digest.update(_adapter_settings(model).encode())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if adapters_off and tensor.requires_grad:
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    base = base_of(model)
    if base is not None:
        digest.update(base.digest().encode())
    return digest.hexdigest()


def _settings(model: nn.Module) -> str:
    inner = inner_module(model)
    config: Any = getattr(inner, "config", None)
    if not hasattr(config, "to_dict"):
        return repr(inner)
    settings = _relevant_settings(config)
    settings["_attn_implementation"] = getattr(config, "_attn_implementation", None)
    return json.dumps(settings, sort_keys=True, default=repr)


def _adapter_settings(model: nn.Module) -> str:
    configs = getattr(model, "peft_config", None)
    if not configs:
        return ""
    settings = {name: _relevant_settings(config) for name, config in configs.items()}
    return json.dumps([settings, cast(Any, model).active_adapters], sort_keys=True, default=_sorted)


def _relevant_settings(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}


def _sorted(value: Any) -> str:
    return repr(sorted(value)) if isinstance(value, (set, frozenset)) else repr(value)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
