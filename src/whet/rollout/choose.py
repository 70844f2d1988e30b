"""Construction of engines and reward functions from a ``RolloutConfig``. Independent of algorithms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, get_args

from whet.config.fields import reject_ineffective
from whet.config.settings import Device, EngineName, RolloutConfig, RolloutWeights
from whet.engine import Engine
from whet.errors import WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.models.families import short_position
from whet.models.formats import PAGE_TOKENS
from whet.models.packed_base import PackedBase
from whet.models.sizes import STATES
from whet.rewards.functions import RewardFn, RewardFunctions
from whet.rollout.protocol import RolloutEngine

_WORKERS = 2
"""Default number of workers of a pool."""


def make_engine(
    engine: RolloutEngine | EngineName,
    model: Any,
    weights: RolloutWeights = "auto",
    where: str = "make_engine",
    kv_bytes: int = 0,
    tokenizer: Any = None,
    workers: int = 0,
    address: str = "",
    device: Device = "cpu",
) -> RolloutEngine:
    """Return an engine for ``model`` by name, or a given engine unchanged.

    Args:
        engine: "native" (``whet.Engine``); "torch" (``TorchEngine``); "auto": native for a Hugging Face model on the
            CPU, else torch, with a warning if the native engine does not support the model; "ray" (``RayPool``); or an
            engine.
        model: the model to sample from; a ``Learner`` is sampled natively.
        weights: format of the native engine's matrices; "auto": as in the model: packed, bfloat16, or else float32, so
            that samples are from the policy and not from a rounded copy (a trainer with bfloat16 matmuls passes "bf16":
            its policy is the rounded weights). If rotary frequencies depend on the length (longrope), sequences are
            limited to the range of the short factors, for the same reason.
        where: the caller's name, for messages.
        kv_bytes: KV cache of the native engine in bytes; 0: its default.
        tokenizer: for stop strings; a given engine has its own.
        workers: number of workers of the pool; 0: two.
        address: address of the pool's Ray cluster, see ``RayPool``.
        device: processor of the native engine, see ``Engine``; "gpu" excludes torch.

    Raises:
        WhetValueError: "native" for a model that the native engine does not support; "torch" or "ray" for a learner;
            kv_bytes with a given engine; weights for a model on a packed base.
        WhetTypeError: engine is neither an engine nor a name; "native" for a module that is not a Hugging Face model.
    """
    names = get_args(EngineName)
    if not hasattr(engine, "generate") and (not isinstance(engine, str) or engine not in names):
        raise WhetTypeError(
            f"{where}: engine is {engine!r}, expected {', '.join(map(repr, names))} or a RolloutEngine."
        )
    if not isinstance(engine, str):
        if kv_bytes:
            raise WhetValueError(f"{where}: kv_bytes is {kv_bytes} and has no effect: the engine already exists.")
        return engine
    if weights != "auto" and packed_base(model) is not None:
        raise WhetValueError(
            f"{where}: rollout_weights is {weights!r}, but the model's base is already packed, also for sampling. "
            f"Leave it at 'auto', or pack the base in that format."
        )
    if isinstance(model, Learner) and engine in ("torch", "ray"):
        raise WhetValueError(
            f"{where}: engine is {engine!r}, and a Learner is sampled by the native engine, which shares its weights. "
            f"Omit it, or train modules of torch."
        )
    if engine == "native" or isinstance(model, Learner):
        return _native(model, _options(model, weights, kv_bytes, tokenizer, device))
    if engine == "ray":
        from whet.rollout.ray_pool import RayPool

        options = _options(model, weights, kv_bytes, tokenizer, device)
        return RayPool(model, workers=workers or _WORKERS, address=address, **options)
    from whet.nn.modules import module_device
    from whet.rollout.torch_engine import TorchEngine

    if engine == "auto" and hasattr(model, "config") and module_device(model).type == "cpu":
        try:
            return _native(model, _options(model, weights, kv_bytes, tokenizer, device))
        except WhetTypeError:
            pass  # a custom module, supported by torch only
        except WhetValueError as error:
            if device != "cpu":
                raise
            warnings.warn(
                f"{where}: torch samples, which is slower: the native engine does not support this model ({error}) "
                f"engine='torch' does so without a warning.",
                stacklevel=4,
            )
    if device != "cpu":
        raise WhetValueError(
            f"{where}: device is {device!r}, and torch samples, where the model is. Omit it, or engine='torch'."
        )
    return TorchEngine(model, tokenizer=tokenizer)


def packed_base(model: Any) -> PackedBase | None:
    """Return the packed base of a learner, or of a model's frozen modules; None: its matrices are floats."""
    if isinstance(model, Learner):
        return model.base
    from whet.nn.frozen import base_of

    return base_of(model)


def _short_position(model: Any) -> int | None:
    """Return the position from which the rotary frequencies of a module change; None: they do not."""
    if isinstance(model, Learner):
        return None  # its base is packed for one range of positions
    from whet.nn.modules import inner_module

    return short_position(getattr(inner_module(model), "config", None))


def _options(model: Any, weights: RolloutWeights, kv_bytes: int, tokenizer: Any, device: Device) -> dict[str, Any]:
    """Return the options of a native engine."""
    options: dict[str, Any] = {"max_position": _short_position(model), "tokenizer": tokenizer, "device": device}
    options |= {"kv_bytes": kv_bytes} if kv_bytes else {}
    if packed_base(model) is not None:
        return options
    if weights == "auto":
        is_bfloat16 = str(next(model.parameters()).dtype) == "torch.bfloat16"
        weights = "bf16" if is_bfloat16 else "float32"
    return options | {"weights": weights}


def _native(model: Any, options: dict[str, Any]) -> Engine:
    if packed_base(model) is not None:
        return Engine.from_model(model, **options)
    try:
        return Engine.from_model(model, **options)
    except WhetValueError:
        if not hasattr(model, "peft_config"):
            raise
        # Adapters of the embedding or the head are supported only if merged.
        return Engine.from_model(model, merge_adapters=True, **options)


def ensure_capacity(
    engine: RolloutEngine,
    make: Callable[[int], RolloutEngine] | None,
    prompt_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> RolloutEngine:
    """Return the engine, or a new one by ``make(kv_bytes)`` if its KV cache is too small for the longest sequence.

    Sequences wait for free pages, but a sequence larger than the whole cache is an error. ``make`` None: keep the
        engine.
    """
    if make is None or not isinstance(engine, Engine):
        return engine
    longest = min(max(map(len, prompt_ids), default=0) + max_new_tokens, engine.config.max_position)
    # The prompt's last page is shared copy-on-write: each completion copies it.
    memory = engine.memory
    needed = (longest // PAGE_TOKENS + 2) * memory["kv_page_bytes"] + STATES * memory["kv_state_bytes"]
    if needed <= memory["kv_bytes"]:
        return engine
    larger = make(needed)
    larger.policy_version = engine.policy_version
    return larger


def check_lengths(model: Any, prompt_ids: Sequence[Sequence[int]], max_new_tokens: int, where: str) -> None:
    """Raise if completions may exceed the length at which the model's rotary frequencies change (longrope).

    Such a completion is sampled with the short factors first and the long factors later, but scored with the long
    factors only: its log-probs would differ from the sampler's, on any engine. If all prompts exceed that length, only
    the long factors are used.

    Raises:
        WhetValueError: names the first such prompt.
    """
    limit = _short_position(model)
    if limit is None or all(len(prompt) > limit for prompt in prompt_ids):
        return
    for i, prompt in enumerate(prompt_ids):
        if len(prompt) + max_new_tokens > limit:
            raise WhetValueError(
                f"{where}: prompt {i} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}: above {limit} "
                f"tokens this model uses other rotary frequencies (longrope). Lower max_new_tokens, drop such prompts, "
                f"or load the model with a config whose short_factor is its long_factor."
            )


def reward_functions(config: RolloutConfig, reward_fn: RewardFn | None) -> RewardFunctions:
    """Return reward functions with the settings of the config; ``RewardFunctions`` are returned unchanged.

    Raises:
        WhetTypeError: reward_fn is None.
        WhetValueError: the settings of ``RewardFunctions`` contradict the config.
    """
    if reward_fn is None:
        where = type(config).__name__.removesuffix("Config")
        raise WhetTypeError(f"{where}: reward_fn is None. Pass a function that scores completions.")
    if isinstance(reward_fn, RewardFunctions):
        weights = reward_fn.weights.tolist()
        for name, own, same in (
            ("reward_weights", weights, list(config.reward_weights) == weights),
            ("reward_policy", reward_fn.on_error, config.reward_policy == reward_fn.on_error),
            ("reward_timeout_s", reward_fn.timeout_s, config.reward_timeout_s == reward_fn.timeout_s),
        ):
            reject_ineffective(config, [name], same, f"reward_fn is RewardFunctions with {own!r}")
        return reward_fn
    return RewardFunctions(
        reward_fn,
        weights=config.reward_weights or None,
        on_error=config.reward_policy,
        timeout_s=config.reward_timeout_s,
    )
