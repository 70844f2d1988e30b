"""The memory of a training run before it starts: the parts of ``whet.memory``, from its model and its settings.

Nothing is loaded. Weights, gradients, moments and copies are counted number by number, the sampler's weights, pages and
workspace as ``whet.models.sizes`` does, and activations by what the autograd functions of ``whet.nn`` keep for their
backward passes, token by token. Not counted are the rows of the dataset and what reward functions hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from whet import _core
from whet.config.settings import OnlineConfig, TrainerConfig
from whet.errors import WhetValueError
from whet.models.formats import PAGE_TOKENS
from whet.models.sizes import KV_BYTES, MAX_BATCH, estimate, page_bytes, slot_bytes, training
from whet.models.slots import Source

_VOCAB_TILE = 2048
"""Vocabulary entries whose logits a backward pass has at a time: ``whet.nn.functions``' own number."""
_FRAGMENTATION = 0.25
"""Memory that the allocator loses between activations, as a share of them: what is freed between tensors that are kept
and too small for the next. Measured of a model of 135 M parameters: 0.23 with all weights trained, 0.31 with LoRA."""


class Lengths(NamedTuple):
    """Tokens of a row: its prompt, and each of its completions."""

    prompt: int
    completion: int


class RunMemory(NamedTuple):
    """The memory of a run.

    Attributes:
        parts: what it holds all the time, by the names in ``whet.memory.PARTS``.
        update: parts of an update: activations, and what the allocator loses.
        sampling: parts of sampling: keys and values, and workspace. They take the memory that updates have left.
    """

    parts: dict[str, int]
    update: dict[str, int]
    sampling: dict[str, int]

    def at_its_fullest(self) -> dict[str, int]:
        """The parts at the moment when they are most, whose sum is ``total``."""
        last = max(self.update, self.sampling, key=lambda parts: sum(parts.values()))
        return {name: n_bytes for name, n_bytes in {**self.parts, **last}.items() if n_bytes}

    @property
    def total(self) -> int:
        """The most that the process holds."""
        return sum(self.at_its_fullest().values())


def run_memory(
    source: Source,
    config: TrainerConfig,
    lengths: Lengths,
    *,
    interpreter: int,
    lora_rank: int = 0,
    lora_layers: Sequence[str] = (),
    base: str = "",
) -> RunMemory:
    """The memory of training a float32 model on Whet's kernels.

    Args:
        source: the model, from ``load_source``; its weights are not read.
        config: of the algorithm.
        lengths: of the rows; where they differ, of the longest that a step takes.
        interpreter: bytes of Python and its libraries.
        lora_rank: of adapters beside the frozen model; 0: every weight is trained.
        lora_layers: names of the layers that get adapters; empty: every linear layer but the head.
        base: format of a frozen model that is packed once, for the trainer and the sampler; empty: float32 parameters.

    Raises:
        WhetValueError: torch computes, of which nothing is known; a base without adapters; no such layers or format; or
            a model that the engine does not run.
    """
    if base and not lora_rank:
        raise WhetValueError(f"run_memory: base is {base!r}, and lora_rank 0: no weight of a packed base is trained.")
    if config.compute == "torch":
        raise WhetValueError("run_memory: compute is 'torch'. The memory of a step is known of Whet's kernels only.")
    narrow = config.compute == "bfloat16" or (config.compute == "auto" and "bf16" in _core.isa())
    adapters = list(_adapter_shapes(source, lora_layers)) if lora_rank else []
    if lora_rank and not adapters:
        raise WhetValueError(f"run_memory: lora_layers is {list(lora_layers)!r}, and the model has no such layers.")
    model = source.config
    n_adapter = sum(lora_rank * (n + k) for n, k in adapters)
    n_trained = n_adapter or model.n_parameters
    whole = training(model)
    copies = whole.copies if narrow else 0
    own_reference = config.has_reference() and not lora_rank and not getattr(config, "precompute_reference", False)
    parts = {
        "interpreter": interpreter,
        "weights": whole.weights + 4 * n_adapter,
        "reference": whole.weights if own_reference else 0,
        "copies": (2 if own_reference else 1) * copies,
        "gradients": 4 * n_trained,
        "moments": 8 * n_trained,
    }
    if base:
        packed = estimate(source, base)
        largest = max(math.prod(shape) for shape in model.slots().values())
        # Trainer and sampler have norms and biases of their own; products dequantise a matrix at a time.
        parts["weights"] = packed.weights + packed.norms + 4 * n_adapter
        parts["copies"] = (2 if narrow else 4) * largest
    activations = _activation_bytes(source, config, lengths, bool(adapters), 2 if narrow else 4)
    activations += _step_tokens(config, lengths)[0] * len(adapters) * lora_rank * (2 if narrow else 4)
    update = {"activations": activations, "allocator": int(_FRAGMENTATION * activations)}
    sampling: dict[str, int] = {}
    if isinstance(config, OnlineConfig) and config.engine != "torch":
        weights = ("bf16" if narrow else "float32") if config.rollout_weights == "auto" else config.rollout_weights
        engine = estimate(source, base or weights, batch=MAX_BATCH)
        apart = "float32" if (base or weights) == "float32" else "bfloat16"  # format of adapters beside the weights
        parts["sampler_weights"] = (0 if base else engine.weights) + sum(
            slot_bytes((lora_rank, k), apart) + slot_bytes((n, lora_rank), apart) for n, k in adapters
        )
        kv_cache = _n_pages(config, lengths) * page_bytes(model, engine.kv_format)
        sampling = {"kv_cache": min(kv_cache, config.kv_bytes or KV_BYTES), "workspace": engine.workspace}
    return RunMemory(parts, update, sampling)


def rows_per_prompt(config: TrainerConfig) -> int:
    """Completions of each prompt that a step is trained on."""
    if hasattr(config, "group_size"):
        return int(getattr(config, "group_size"))  # noqa: B009
    return 2 if hasattr(config, "label_smoothing") else 1


def _adapter_shapes(source: Source, layers: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of the linear layers that get adapters."""
    for place in dict.fromkeys(source.targets.values()):
        chosen = [f".{name}".endswith(f".{layer}") for name in place.names for layer in layers]
        if place.weight.startswith("layers.") and len(place.shape) == 2 and (any(chosen) or not layers):
            yield place.shape[0], place.shape[1]


def _n_pages(config: Any, lengths: Lengths) -> int:
    """Pages of the sequences that are sampled at a time, those of prompts shared by their completions."""
    n_sequences = min(config.batch_size * rows_per_prompt(config), MAX_BATCH)
    own = math.ceil((lengths.prompt + config.max_new_tokens - 1) / PAGE_TOKENS) - lengths.prompt // PAGE_TOKENS
    return config.batch_size * math.ceil(lengths.prompt / PAGE_TOKENS) + n_sequences * own


def _step_tokens(config: TrainerConfig, lengths: Lengths) -> tuple[int, int]:
    """Tokens of the largest micro-batch, and how many of them predict one that counts."""
    per_prompt = rows_per_prompt(config)
    rows = config.batch_size * per_prompt
    in_pairs = per_prompt if not hasattr(config, "group_size") else 1
    if config.micro_batch_size:
        rows = min(rows, config.micro_batch_size * in_pairs)
    targets = rows * lengths.completion
    tokens = math.ceil(rows / per_prompt) * lengths.prompt + targets - rows
    most = 0 if config.micro_batch_size else config.max_tokens_per_step
    if most and tokens > most:
        # Parts of one prompt's completions fill a micro-batch to within half a completion.
        full = max(most - lengths.completion // 2, lengths.prompt + lengths.completion - 1)
        tokens, targets = full, targets * full // tokens
    return tokens, targets


def _activation_bytes(source: Source, config: TrainerConfig, lengths: Lengths, with_adapters: bool, size: int) -> int:
    """Tensors that the forward pass of a micro-batch keeps, and that the head makes at the beginning of its backward.

    Per token and layer: the residual stream before each norm (float32), each norm's output, q, k and v, attention's
    output and log-sum-exps, rotary cosines and sines, and of the MLP what its activation reads and what it gives.
    Layers with adapters compute their inputs again from what the norm and the activation before them read.
    ``size``: bytes of a number that is multiplied.
    """
    model, rounded = source.config, 2 if size == 2 else 0
    tokens, targets = _step_tokens(config, lengths)
    q, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    hidden, n_norms = model.hidden_dim, 1 if model.shared_norm else 2
    per_layer = n_norms * (4 + size) * hidden + size * (2 * q + 2 * kv) + 4 * model.n_heads
    per_layer += size * (3 if model.gated else 2) * model.ffn_dim
    if model.qk_norm:
        per_layer += size * (q + kv)
    if any(place.weight == "layers.0.qkv" and not place.module.part for place in source.targets.values()):
        per_layer += size * (q + kv)  # the values are a view of q, k and v in one
    else:
        per_layer += 4 * model.rotary_dim
    if with_adapters:
        per_layer -= size * (n_norms * hidden + (model.ffn_dim if model.gated else 0))
    per_token = model.n_layers * per_layer + 4 * hidden
    logits, states = _VOCAB_TILE * (4 + rounded), (4 + 2 * rounded) * hidden
    return tokens * per_token + targets * (size * hidden + logits + states)
