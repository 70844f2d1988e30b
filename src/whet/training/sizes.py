"""Estimate of a training run's memory before it starts, by the parts of ``whet.memory``, from model and settings.

Loads nothing. Counts every number of weights, gradients and moments, the sampler's weights, pages and workspace as in
``whet.models.sizes``, and the activations per token that the autograd functions of ``whet.nn`` save for the backward
pass. Excludes the rows of the dataset and memory of reward functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from whet import _core
from whet.config.settings import GroupConfig, OnlineConfig, TrainerConfig
from whet.errors import WhetValueError
from whet.learner.moments import moment_bytes
from whet.learner.rounding import rounded_bytes
from whet.models.activations import count_kept, saved_bytes
from whet.models.architecture import ModelConfig
from whet.models.formats import PAGE_TOKENS
from whet.models.lora import Adapted
from whet.models.sizes import KV_BYTES, MAX_BATCH, VOCAB_TILE, cache_bytes, estimate, slot_bytes, training
from whet.models.slots import ModelSource
from whet.system.memory import available_bytes, choose_activation_bytes

_FRAGMENTATION = 0.25
"""Memory that the allocator loses to fragmentation between activations, as a share of them: freed gaps that are too
small for the next tensor. Measured on a model with 135 M parameters: 0.23 with all weights trained, 0.31 with LoRA."""


class Lengths(NamedTuple):
    """Tokens of a row: of its prompt, and of each completion."""

    prompt: int
    completion: int


class RunMemory(NamedTuple):
    """Memory of a run in bytes.

    Attributes:
        parts: memory held throughout the run, by the names in ``whet.memory.PARTS``.
        update: parts at the beginning of the last backward pass of an update: activations, gradients, and
            fragmentation.
        gradients: gradients at the end of that pass, without activations.
        sampling: parts of sampling: KV cache, workspace, and weights that each sync packs again. They reuse the memory
            of updates, unless updates and sampling overlap (``async_lag``): then ``parts`` has them.
        kept_layers: last layers whose activations are kept for the backward pass; the others are computed again.
    """

    parts: dict[str, int]
    update: dict[str, int]
    gradients: int
    sampling: dict[str, int]
    kept_layers: int = 0

    def at_peak(self) -> dict[str, int]:
        """Return the parts at the peak, whose sum is ``total``."""
        moments = self.update, {"gradients": self.gradients}, self.sampling
        last = max(moments, key=lambda parts: sum(parts.values()))
        return {name: n_bytes for name, n_bytes in {**self.parts, **last}.items() if n_bytes}

    @property
    def total(self) -> int:
        """Peak memory of the process."""
        return sum(self.at_peak().values())


def run_memory(
    source: ModelSource,
    config: TrainerConfig,
    lengths: Lengths,
    *,
    interpreter: int,
    adapters: Adapted | None = None,
    base: str = "none",
    learner: bool = False,
    others: Mapping[str, int] | None = None,
) -> RunMemory:
    """Estimate the memory of training a float32 model on Whet's kernels, or adapters with a ``Learner``.

    Args:
        source: the model, from ``load_source``; its weights are not read.
        config: settings of the algorithm.
        lengths: tokens of the rows; if they differ, of the longest row of a step.
        interpreter: bytes of Python and its libraries.
        adapters: adapters on the frozen model; None: every weight is trained.
        base: format of a frozen model packed once, for trainer and sampler; "own": the formats of a GGUF file;
            "none": float32 parameters.
        learner: whether a learner trains the adapters.
        others: bytes of other models in this process, by part.

    Raises:
        WhetValueError: compute is "torch", whose memory is unknown; a base without adapters; an unknown format; or a
            model that the engine does not support.
    """
    is_packed, weights = base != "none", None if base == "own" else base
    if is_packed and adapters is None:
        raise WhetValueError(f"run_memory: base is {base!r}, and there are no adapters to train.")
    if config.compute == "torch":
        raise WhetValueError("run_memory: compute is 'torch'. Memory estimates support Whet's kernels only.")
    narrow = multiplies_bfloat16(config)
    model = source.config
    if learner and base == "float32" and not config.qat:
        narrow = config.compute == "bfloat16"
    n_adapter = 0 if adapters is None else adapters.n_parameters
    n_trained = n_adapter or model.n_parameters
    whole = training(model)
    keeps_reference = config.uses_reference_model()
    own_reference = keeps_reference and adapters is None
    keeps_values = keeps_reference and adapters is not None and (config.moves_reference() or not adapters.is_new)
    first_values = 4 * n_adapter if keeps_values else 0
    parts = {
        "interpreter": interpreter,
        "weights": whole.weights + 4 * n_adapter,
        "reference": whole.weights if own_reference else first_values,
        "copies": _converted_bytes(source, narrow, is_packed, n_models=2 if own_reference else 1)
        + (whole.weights if config.qat else 0),
        "moments": _moment_bytes(source, adapters, config),
        **(others or {}),
    }
    if isinstance(config, GroupConfig) and config.sampling((), 0).drops_tokens():
        n_tokens = config.batch_size * config.group_size * lengths.completion
        parts["kept_tokens"] = n_tokens * math.ceil(model.vocab_size / 32) * 4
    if is_packed:
        packed = estimate(source, weights)
        n_bytes = packed.weights if source.base is None else source.base.nbytes
        # Trainer and sampler have separate norms and biases.
        parts["weights"] = n_bytes + packed.norms + 4 * n_adapter
    largest = _step_tokens(config, lengths)
    if learner and adapters is not None:
        parts["copies"] = _adapter_bytes(adapters, "bfloat16" if narrow else "float32")
        if config.qat:  # the rounded weights
            parts["copies"] += rounded_bytes(source, config.qat)
        size = 2 if narrow else 4
        parts["gradients"] = 4 * n_adapter
        sampling = _sampling(parts, source, config, lengths, adapters, weights, is_packed)
        unused = max(0, available_bytes() - sum(parts.values()))
        layers = _layer_bytes(model, largest.tokens, size, keeps=True)
        kept_layers = count_kept(layers, choose_activation_bytes(config.activation_bytes, unused))
        scratch = _delta_scratch_bytes(model, config, lengths, largest.tokens)
        n_keys = largest.tokens + largest.targets // lengths.completion * lengths.prompt  # of all sequences
        least = _learner_bytes(source, largest, n_keys, size, adapters)
        update = {"activations": least + scratch + sum(layers[len(layers) - kept_layers :])}
        return RunMemory(parts, update, 0, sampling, kept_layers)
    size = 2 if narrow else 4
    # The first gradient of a backward pass is the head's.
    first = math.prod(model.slots()["embedding"]) if adapters is None and not largest.is_part else n_trained
    if not is_packed and isinstance(config, OnlineConfig):
        weights = config.rollout_weights
        if weights == "auto":
            weights = "bf16" if narrow else "float32"
    sampling = _sampling(parts, source, config, lengths, adapters, weights, is_packed)
    unused = max(0, available_bytes() - sum(parts.values()) - 4 * n_trained)
    activations, kept_layers = _module_activations(source, config, largest, size, adapters, unused)
    update = {"activations": activations, "gradients": 4 * first, "allocator": int(_FRAGMENTATION * activations)}
    return RunMemory(parts, update, 4 * n_trained, sampling, kept_layers)


def _module_activations(
    source: ModelSource, config: TrainerConfig, largest: _Pass, size: int, adapters: Adapted | None, unused: int
) -> tuple[int, int]:
    """Return the bytes that modules save for the backward pass of a micro-batch, and the number of kept layers.

    ``size``: bytes of an operand of a product. ``unused``: memory that nothing else needs.
    """
    model, is_frozen = source.config, adapters is not None
    is_fused = any(
        location.weight == "layers.0.qkv" and not location.module.part for location in source.targets.values()
    )
    layers = saved_bytes(model, size, is_frozen=is_frozen, is_fused=is_fused)
    layers = [largest.tokens * n for n in layers]
    kept_layers = count_kept(layers, choose_activation_bytes(config.activation_bytes, unused))
    recomputed, kept = layers[: len(layers) - kept_layers], sum(layers[len(layers) - kept_layers :])
    activations = _outer_bytes(source, largest, size, is_frozen=is_frozen) + kept
    if recomputed:  # their inputs, and the widest one
        activations += len(recomputed) * largest.tokens * 4 * model.hidden_dim + max(recomputed)
    if adapters is not None:
        of_modules = [rank for location, rank in adapters.factors if location.n_experts == 1]
        activations += largest.tokens * sum(of_modules) * size * max(1, kept_layers) // len(layers)
        activations += sum(  # copies of the factors of experts
            4 * each.n_experts * rank * sum(each.matrix_shape) for each, rank in adapters.factors if each.n_experts > 1
        )
    return activations, kept_layers


def _sampling(
    parts: dict[str, int],
    source: ModelSource,
    config: TrainerConfig,
    lengths: Lengths,
    adapters: Adapted | None,
    weights: str | None,
    is_packed: bool,
) -> dict[str, int]:
    """Return the parts of sampling; the sampler's weights are added to ``parts`` if they are held during updates."""
    if not isinstance(config, OnlineConfig) or config.engine == "torch":
        return {}
    engine = estimate(source, weights, batch=MAX_BATCH)
    kv_cache = cache_bytes(source.config, engine.kv_format, *_n_pages_and_states(config, lengths))
    sampling = {"kv_cache": min(kv_cache, config.kv_bytes or KV_BYTES), "workspace": engine.workspace}
    if adapters is not None and adapters.is_separable and (is_packed or not adapters.use_dora):
        own = _adapter_bytes(adapters, "float32" if weights == "float32" else "bfloat16") + 4 * adapters.n_whole
        parts["sampler_weights"] = (0 if is_packed else engine.weights) + own
    elif not is_packed:  # released before the update
        sampling["sampler_weights"] = engine.weights
    if not config.async_lag:
        return sampling
    # One version is in the engine; of others that wait for it, a copy of what is trained, or in Ray's store of all.
    n_kept = config.async_lag if config.engine == "ray" else config.async_lag - 1
    trained = training(source.config).weights if adapters is None else 4 * adapters.n_parameters
    if config.engine == "ray" and adapters is None and weights == "bf16":
        trained //= 2
    parts |= {**sampling, "kept_versions": n_kept * trained}
    return {}


def _moment_bytes(source: ModelSource, adapters: Adapted | None, config: TrainerConfig) -> int:
    """Return the bytes of the optimizer's state, without masters of 16-bit parameters."""
    if adapters is None:
        own = [each for each in dict.fromkeys(source.targets.values()) if each.weight in source.config.slots()]
        arrays = [(each.weight, math.prod(each.shape), len(each.shape) == 2) for each in own]
        n_parameters = source.config.n_parameters
    else:
        of_factors = ((each, each.n_experts * rank * n) for each, rank in adapters.factors for n in each.matrix_shape)
        arrays = [(each.weight, n, True) for each, n in of_factors]
        arrays += [(each.weight, math.prod(each.shape), len(each.shape) == 2) for each in adapters.whole]
        n_parameters = adapters.n_parameters
    rest = n_parameters - sum(n for _, n, _ in arrays)  # biases and magnitudes
    if config.optimizer == "adamw_8bit":
        return 8 * rest + sum(moment_bytes(n) for _, n, _ in arrays)
    is_muon = config.optimizer == "muon"
    return 8 * rest + sum(
        n * (4 if is_muon and is_matrix and slot.startswith("layers.") else 8) for slot, n, is_matrix in arrays
    )


def _adapter_bytes(adapters: Adapted, format: str) -> int:
    """Return the bytes of all factors packed in a format."""
    shapes = [(each.n_experts, *each.matrix_shape, rank) for each, rank in adapters.factors]
    return sum(e * (slot_bytes((rank, k), format) + slot_bytes((n, rank), format)) for e, n, k, rank in shapes)


_TILE_BYTES, _TILE_ROWS = 16 << 20, (256, 2048)
"""Bytes of the widest array of a tile of rows, and the limits of its rows, as in cpp/learner."""
_RANGE_NUMBERS = 1 << 20
"""Weights that cpp/learner unpacks at once."""


def _learner_bytes(source: ModelSource, largest: _Pass, n_keys: int, size: int, adapters: Adapted) -> int:
    """Return the bytes that a learner allocates between the forward and the end of the backward pass of a micro-batch,
    except the kept activations of layers.

    The inputs of all layers are kept, in 3 bytes each if products are bfloat16; the other activations are of one layer
    at a time, its linear layers in tiles of rows. ``size``: bytes of an operand of a product.
    """
    model, n = source.config, largest.tokens
    heads, inputs_dim = _widest_heads(model), model.n_layers * model.layer_input_dim
    q = model.n_heads * max(model.layer_head_dim(i) for i in range(model.n_layers))
    hidden, per_dim = model.hidden_dim, 2 if model.gated else 1
    mlp, expert = _widest_mlp(model), model.expert_dim
    up, expert_up, inner = mlp * per_dim, expert * per_dim, max(mlp, expert)
    wide, mixed = _mixer_widths(model)
    least, most = _TILE_ROWS
    tile = min(n, max(least, min(most, _TILE_BYTES // 4 // max(up, wide, expert_up, hidden) // 32 * 32)))
    inputs = model.n_layers * n * hidden * (3 if size == 2 else 4)
    layer = n * 4 * (hidden + wide) + max(_layer_bytes(model, n, size, keeps=False))
    of_mixer = {
        # Sums of the gradients of keys and values are float32, for each sequence that reads them.
        "attention": n * _head_size(model, size) * (heads + q) + 4 * (heads - q) * n_keys,
        "conv": n * 4 * 3 * hidden,
        "delta": n * 4 * (model.delta_channels + model.n_delta_heads * (model.delta_dim + 4)),
    }
    of_mixer |= {"mamba": of_mixer["delta"], "none": 0}
    gradients = n * 4 * 2 * hidden + max(of_mixer[model.mixer(i)] for i in range(model.n_layers))
    converted = 2 * (max(inner, hidden, mixed) + max(up, expert_up, wide)) if size == 2 else 0
    rows = tile * (4 * (2 * hidden + max(hidden, mixed) + max(up, mixed) + inner * (1 if size == 2 else 2)) + converted)
    if expert:  # the rows of one expert, and the probabilities, weights and rows of all
        n_inputs = 2 if any(".experts_" in location.weight for location, _ in adapters.factors) else 1
        rows += tile * 4 * (expert_up + n_inputs * hidden + model.n_experts + 7 * model.n_used_experts)
    if inputs_dim:  # a layer's result before its input, the input's, and three arrays of its gate
        changed = (*(location for location, _ in adapters.factors), *adapters.whole)
        is_projected = any(location.weight.startswith("layer_inputs") for location in changed)
        layer += n * 4 * inputs_dim * (2 if is_projected else 1)
        rows += tile * 4 * (2 * hidden + 4 * model.layer_input_dim)
    for i in _kv_sources(model):  # keys and values that other layers read, and their gradients
        layer += n * 2 * model.n_kv_heads * model.layer_head_dim(i) * (_head_size(model, size) + 4)
    if adapters.use_dora:  # outputs before their scales
        rows += tile * 4 * max(up, wide, hidden)
    columns = min(model.vocab_size, max(16, _RANGE_NUMBERS // hidden // 16 * 16))
    states = largest.targets * 4 * 4 * hidden  # before and after the final norm, and their gradients
    head = largest.targets * (4 * 2 * columns + size * columns)
    unpacked = size * _RANGE_NUMBERS
    return inputs + layer + states + max(gradients + rows, head) + unpacked + n * 4 * _rotary_dims(model)


def _kv_sources(model: ModelConfig) -> set[int]:
    """Return the layers whose keys and values other layers read."""
    return {model.kv_layer(i) for i in range(model.n_layers) if model.kv_layer(i) != i}


def _widest_heads(model: ModelConfig) -> int:
    """Return the most elements of queries, keys and values of a layer, without gates."""
    n_kv = {i: 2 * model.n_kv_heads * (model.kv_layer(i) == i) for i in range(model.n_layers)}
    return max((model.n_heads + n) * model.layer_head_dim(i) for i, n in n_kv.items())


def _rotary_dims(model: ModelConfig) -> int:
    """Return the cosines and sines of a token."""
    return model.rotary_dim + 2 * len(model.local_inv_freq)


_DELTA_BLOCK = 64
"""Tokens of a block of the gradient of the gated delta rule, as in cpp/kernels."""


def _delta_scratch_bytes(model: ModelConfig, config: TrainerConfig, lengths: Lengths, n: int) -> int:
    """Return the scratch memory of all threads for the gradient of the gated delta rule, or of Mamba-2.

    A thread has the gradients of queries and keys of a head of a prompt and its completions, a state before each block
    of tokens of a sequence, and matrices of one block.
    """
    if not model.n_delta_heads:
        return 0
    group = min(n, lengths.prompt + config.completions_per_prompt() * lengths.completion)
    keys, values = (math.ceil(dim / 16) * 16 for dim in (model.delta_key_dim, model.delta_dim))
    n_states = 3 + math.ceil(max(lengths.prompt, lengths.completion) / _DELTA_BLOCK)
    block = _DELTA_BLOCK * (6 * keys + 7 * values + 5 * _DELTA_BLOCK) + 2 * keys * values
    return 4 * _core.num_threads() * (2 * group * keys + n_states * keys * values + block)


def _layer_bytes(model: ModelConfig, n: int, size: int, keeps: bool) -> list[int]:
    """Return the bytes of each layer's activations, of n tokens, that a learner keeps, or computes again."""
    learner = _core.Learner(_core.Weights(vars(model), []), size == 2)
    return [learner.layer_bytes(i, n, keeps) for i in range(model.n_layers)]


def _widest_mlp(model: ModelConfig) -> int:
    """Return the most columns of an MLP, or of a shared expert."""
    return max(map(model.mlp_dim, range(model.n_layers)))


def _mixer_widths(model: ModelConfig) -> tuple[int, int]:
    """Return the most outputs of the first matrix of a layer's mixer, and the most inputs of its last one."""
    matrices = ("qkv", "o"), ("conv_in", "conv_out"), ("delta_in", "delta_out")
    slots = {slot: shape for slot, shape in model.slots().items() if slot.startswith("layers.")}
    firsts, lasts = zip(*matrices, strict=True)
    return (
        max((shape[0] for slot, shape in slots.items() if slot.split(".", 2)[2] in firsts), default=0),
        max((shape[1] for slot, shape in slots.items() if slot.split(".", 2)[2] in lasts), default=0),
    )


def _head_size(model: ModelConfig, size: int) -> int:
    """Return the bytes of an element of a head: heads of an odd number of elements are float32."""
    return size if (model.head_dim | model.local_head_dim) % 2 == 0 else 4


def multiplies_bfloat16(config: TrainerConfig) -> bool:
    """Whether Whet's kernels multiply in bfloat16 during a step, on this machine."""
    return config.compute == "bfloat16" or (config.compute == "auto" and "bf16" in _core.isa())


def _converted_bytes(source: ModelSource, narrow: bool, is_packed: bool, n_models: int) -> int:
    """Return the bytes of converted copies: the largest matrix, unless multiplied as stored, and tiles of the head."""
    vocab, hidden = source.config.slots()["embedding"]
    tile = min(VOCAB_TILE, vocab)
    shapes = [location.shape for location in source.targets.values() if location.weight.startswith("layers.")]
    size = 2 if narrow else 4 if is_packed else 0
    tiles = {tile, vocab % VOCAB_TILE} - {0} if narrow else ()
    panels = sum(slot_bytes((n, hidden), "bfloat16") for n in tiles)
    return size * max(map(math.prod, [*shapes, (tile, hidden)])) + n_models * panels


def _n_pages_and_states(config: Any, lengths: Lengths) -> tuple[int, int]:
    """Return the KV pages and states of concurrently sampled sequences; completions share the pages of their prompt."""
    n_sequences = min(config.batch_size * config.completions_per_prompt(), MAX_BATCH)
    own = math.ceil((lengths.prompt + config.max_new_tokens - 1) / PAGE_TOKENS) - lengths.prompt // PAGE_TOKENS
    n_pages = config.batch_size * math.ceil(lengths.prompt / PAGE_TOKENS) + n_sequences * own
    return n_pages, config.batch_size + n_sequences


class _Pass(NamedTuple):
    """Tokens of a micro-batch; tokens that predict a counting token; whether it is only part of the step."""

    tokens: int
    targets: int
    is_part: bool


def _step_tokens(config: TrainerConfig, lengths: Lengths) -> _Pass:
    """Return the largest micro-batch."""
    per_prompt = config.completions_per_prompt()
    rows = config.batch_size * per_prompt
    if config.micro_batch_size:
        rows = min(rows, config.micro_batch_size * (2 if config.is_paired else 1))
    is_part = rows < config.batch_size * per_prompt
    targets = rows * lengths.completion
    tokens = math.ceil(rows / per_prompt) * lengths.prompt + targets - rows
    if config.trains_reward:  # the last token is an input too, and the only one that counts
        tokens, targets = tokens + rows, rows
    most = 0 if config.micro_batch_size else config.max_tokens_per_step
    if most and tokens > most:
        # Completions of one prompt fill a micro-batch to within half a completion.
        full = max(most - lengths.completion // 2, lengths.prompt + lengths.completion - 1)
        tokens, targets, is_part = full, targets * full // tokens, True
    return _Pass(tokens, targets, is_part)


def _outer_bytes(source: ModelSource, largest: _Pass, size: int, is_frozen: bool) -> int:
    """Return the bytes of tensors saved outside the layers, and of the head's at the start of the backward pass.

    Args:
        size: bytes of a matmul operand.
        is_frozen: whether only adapters train.
    """
    model, rounded, hidden = source.config, 2 if size == 2 else 0, source.config.hidden_dim
    per_token = 4 * hidden + (4 + (0 if is_frozen else size)) * model.n_layers * model.layer_input_dim
    logits, states = VOCAB_TILE * (4 + rounded), (4 + 2 * rounded) * hidden
    return largest.tokens * per_token + largest.targets * (size * hidden + logits + states)
