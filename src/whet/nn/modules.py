"""Properties of a module: its device and mode, the module inside its wrappers, its position limit, its stop tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from whet.models.families import is_skipped, text_options
from whet.models.stop_tokens import choose_stop_ids
from whet.signals import deferred_signals


def module_device(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def module_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Switch to training or eval mode within a ``with``, then restore the mode of every submodule."""
    modes = [(member, member.training) for member in module.modules()]
    try:
        module.train(training)
        yield
    finally:
        with deferred_signals():
            for member, mode in modes:
                member.training = mode


def inner_module(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile and PEFT wrappers, which has the signature and the config."""
    inner = getattr(model, "_orig_mod", model)
    if type(inner).__name__ == "PeftMixedModel":  # has no get_base_model
        return inner.base_model.model  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]
    get_base_model = getattr(inner, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else inner  # pyright: ignore[reportReturnType]


def auto_class(config: Any) -> Any:
    """Return the class of transformers that makes the causal model of a config, with the towers of its modalities."""
    import transformers

    options = config.to_dict()
    is_causal = text_options(options) is options
    return transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText


def towers(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module of the parts of a vision-language model that are not its language model."""
    names = {name: module for name, module in model.named_modules() if is_skipped(name)}
    return {name: module for name, module in names.items() if name.rpartition(".")[0] not in names}


def position_limit(model: nn.Module) -> int | None:
    """Return ``max_position_embeddings`` of the module's config, or of the module itself."""
    inner: Any = inner_module(model)
    config = getattr(inner, "config", inner)
    get_text_config = getattr(config, "get_text_config", None)
    text_config = get_text_config() if callable(get_text_config) else config
    return getattr(text_config, "max_position_embeddings", None)


def stop_token_ids(model: nn.Module, tokenizer: Any, chosen: Sequence[int] = ()) -> list[int]:
    """Return the tokens that end a completion, see ``choose_stop_ids``.

    The model's EOS is its generation config's, else its config's. A plain module without a tokenizer has none.

    Raises:
        WhetValueError: a stop token is outside the model's vocabulary.
    """
    inner: Any = inner_module(model)
    config = getattr(inner, "generation_config", None) or getattr(inner, "config", None)
    model_eos = getattr(config, "eos_token_id", None)
    ids = [] if model_eos is None else [model_eos] if isinstance(model_eos, int) else list(model_eos)
    table: Any = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    n_tokens = len(table.weight) if hasattr(table, "weight") else math.inf
    return choose_stop_ids(ids, n_tokens, tokenizer, chosen)
