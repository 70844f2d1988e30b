"""Check that the modules of a live model run the unmodified code of their classes.

The native engine and the training kernels rely on a model's config and the classes of its modules, and would bypass a
custom ``forward`` (in a subclass or on one module), a forward hook or another activation. Such a model is rejected,
naming the module.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any

import numpy as np

from whet.errors import WhetValueError
from whet.models.architecture import ModelConfig
from whet.models.reference import naive_activation

_LIBRARIES = (
    "torch.nn.modules.", "torch.nn.parallel.", "torch.utils._contextlib.", "torch._dynamo.", "transformers.", "peft.",
    "accelerate.", "whet.",
)  # fmt: skip
"""Packages of trusted ``forward`` functions and hooks; accelerate's only move weights."""
_NUMBERS = {
    "eps": "norm_eps",
    "variance_epsilon": "norm_eps",
    "scaling": "attention_scale",
    "attention_scaling": "attention_factor",
    "attn_logit_softcapping": "attention_softcap",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "top_k": "n_used_experts",
    "norm_topk_prob": "router_normalised",
    "routed_scaling_factor": "router_scale",
}
"""Attribute of transformers' modules -> the corresponding field of ``ModelConfig``."""
ACTIVATION_NAMES = ("act_fn", "activation_fn", "activation", "act")
"""Names of an MLP's activation."""


def check_code(modules: Iterable[tuple[str, Any]], where: str, hooked: Collection[Any] | None = None) -> None:
    """Raise if a module does not run the code of its class in torch, transformers or PEFT.

    Args:
        modules: from ``named_modules``.
        where: prefix of error messages.
        hooked: modules whose forward hooks would be bypassed. Default: all.

    Raises:
        WhetValueError: a ``forward`` or a forward hook defined elsewhere.
    """
    classes: set[type] = set()
    for name, module in modules:
        own = vars(module)
        if type(module) not in classes:
            classes.add(type(module))
            _check_function(type(module).forward, where, name, "forward")
        if "forward" in own:
            _check_function(own["forward"], where, name, "forward")
        if (own["_forward_hooks"] or own["_forward_pre_hooks"]) and (hooked is None or module in hooked):
            for hook in (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()):
                _check_function(hook, where, name, "a forward hook")


def check_settings(modules: Mapping[str, Any], config: ModelConfig, where: str) -> None:
    """Raise if an attribute of a module contradicts the config.

    Args:
        modules: name -> module of the causal model.
        config: the model's config.
        where: prefix of error messages.

    Raises:
        WhetValueError: an epsilon, factor, soft-cap, window or activation was changed in the module or in the config
            after the model was made.
    """
    for name, module in modules.items():
        own = vars(module)
        expected = {key: getattr(config, field) for key, field in _NUMBERS.items() if key in own}
        layer = own.get("layer_idx")
        if "sliding_window" in own and layer is not None and own.get("is_sliding", True):
            expected["sliding_window"] = config.windows[layer]
        for key, number in expected.items():
            if not _is_number(own[key], number, config.max_position):
                raise _changed(where, f"{name}.{key}", repr(own[key]), f"{number:g}")
        activation = "silu" if "conv1d" in module._modules else config.activation  # of a mixer, of an MLP
        for key in ACTIVATION_NAMES:
            if key in module._modules and not _is_activation(module._modules[key], activation):
                raise _changed(where, f"{name}.{key}", f"a {type(module._modules[key]).__name__}", activation)


def _is_number(own: Any, expected: float, max_position: int) -> bool:
    """Whether an attribute has the expected value; None and a window of all positions count as 0."""
    if own is not None and not isinstance(own, (int, float)):
        return True  # such as PEFT's dict of scalings
    own = own or 0.0
    return math.isclose(own, expected, rel_tol=1e-5) or (expected == 0 and isinstance(own, int) and own >= max_position)


def _is_activation(module: Any, name: str) -> bool:
    """Whether a module computes the activation of this name."""
    from torch import from_numpy

    points = np.array([-3.0, -1.0, 0.5, 2.0], np.float32)
    own = module(from_numpy(points)).detach().numpy()
    return np.allclose(own, naive_activation(name, points), rtol=0, atol=1e-5)


def _changed(where: str, what: str, own: str, expected: str) -> WhetValueError:
    return WhetValueError(
        f"{where}: {what} is {own}, and {expected} in the config. Make the model from its current config."
    )


def forward_code(module: Any) -> CodeType:
    """Return the code of a module's class, without decorators."""
    return inspect.unwrap(type(module).forward).__code__


def _check_function(function: Any, where: str, name: str, kind: str) -> None:
    for home in _iter_homes(function):
        if not f"{home}.".startswith(_LIBRARIES):
            raise WhetValueError(
                f"{where}: {kind} of {name or 'the model'} is defined in {home} and would be bypassed. Remove it, or "
                f"let torch run it: compute='torch' and engine='torch'."
            )


def _iter_homes(function: Any) -> Iterator[str]:
    """Yield the Python modules that define a function and the functions that it wraps."""
    while function is not None:
        inner = function.func if isinstance(function, partial) else function
        inner = getattr(inner, "__func__", inner)
        yield getattr(inner, "__globals__", {}).get("__name__", type(inner).__module__)
        function = getattr(function, "__wrapped__", None)
