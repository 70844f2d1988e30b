"""How much memory a language model takes, on the native engine and in training.

Nothing is loaded, and nothing is a rule of thumb: matrices are counted in the panels that the core packs them in, in
the formats that the engine chooses; pages of keys and values and the workspace are those of a core without weights.
Not counted: the Python process, its libraries, file caches, and in training the activations.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from whet import _core
from whet.errors import WhetValueError, check_integer
from whet.memory import machine_bytes
from whet.models.architecture import ModelConfig
from whet.models.families import model_config, module_targets
from whet.models.formats import (
    FORMATS,
    PAGE_TOKENS,
    choose_formats,
    core_format,
    describe_spans,
    display_name,
    kv_format,
)
from whet.models.slots import ModelSource
from whet.models.sources.folder import read_config
from whet.models.sources.gguf import open_gguf
from whet.models.sources.mapped import map_file, parse_json
from whet.ops.quant import CORE_FORMATS

_PANEL_ROWS = 16
MAX_BATCH = 64
"""The engine's default: completions that are computed at a time."""
PREFILL_CHUNK = 256
"""The engine's default: tokens of prompts that a step takes beside them."""
VOCAB_TILE = 2048
"""Vocabulary entries of a tile of the LM head in training, whose logits exist at a time."""
KV_BYTES = 1 << 30
"""The engine's default: memory for keys and values."""


def _llama(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        **more,
    }


_SMOLLM = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768}
PRESETS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(32000, 4096, 11008, 32, 32, 32),
    "llama-2-13b": _llama(32000, 5120, 13824, 40, 40, 40),
    "llama-3-8b": _llama(128256, 4096, 14336, 32, 32, 8, max_position_embeddings=8192),
    "mistral-7b": _llama(
        32000, 4096, 14336, 32, 32, 8, model_type="mistral", max_position_embeddings=32768, sliding_window=4096
    ),
    "smollm-135m": _llama(49152, 576, 1536, 30, 9, 3, **_SMOLLM),
    "smollm-360m": _llama(49152, 960, 2560, 32, 15, 5, **_SMOLLM),
    "smollm-1.7b": _llama(49152, 2048, 8192, 24, 32, 32, **_SMOLLM),
    "qwen2-0.5b": _llama(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True, **_QWEN2),
    "qwen2-1.5b": _llama(151936, 1536, 8960, 28, 12, 2, tie_word_embeddings=True, **_QWEN2),
    "qwen2-7b": _llama(152064, 3584, 18944, 28, 28, 4, **_QWEN2),
}
"""Name -> what the model's config.json says of its sizes."""


class Estimate(NamedTuple):
    """Bytes of a model on the engine.

    Attributes:
        n_parameters: every parameter, a shared one once.
        linear: the weight matrices of all layers, scales and padding counted.
        embeddings: embeddings, learned positions and head.
        norms: norms and biases, float32.
        kv_cache: the pages that the sequences come to need; what ``kv_bytes`` has to be for all of them at a time.
        workspace: activations of a pass, logits of a tile of rows, and the sampler's memory.
        embedding_format: the core's name of the embedding's format.
        kv_format: of keys and values, "float32" or "bfloat16".
    """

    n_parameters: int
    linear: int
    embeddings: int
    norms: int
    kv_cache: int
    workspace: int
    embedding_format: str
    kv_format: str

    @property
    def weights(self) -> int:
        return self.linear + self.embeddings + self.norms

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.workspace

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.weights / self.n_parameters


class TrainingEstimate(NamedTuple):
    """Bytes of a model whose every weight is trained in float32 with AdamW.

    In bfloat16 or float16 the sum is the same: weights and gradients take half, and the optimizer has float32 masters.

    Attributes:
        weights: the master weights.
        gradients: of all weights.
        moments: AdamW's two.
    """

    weights: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def reference(self) -> int:
        """A frozen reference beside the model."""
        return self.weights


class ModelMemory(NamedTuple):
    """A model's memory in every format, and this machine's.

    Attributes:
        config: the model.
        context: tokens of each sequence.
        formats: ``weights`` by its usual name -> what the engine takes.
        as_stored: what it takes with the formats of a GGUF file.
        kv_bytes_per_token: format of keys and values -> bytes.
        training: what training takes.
        machine: memory of this machine, or what its container may use of it.
    """

    config: ModelConfig
    context: int
    formats: dict[str, Estimate]
    as_stored: Estimate
    kv_bytes_per_token: dict[str, int]
    training: TrainingEstimate
    machine: int

    def display_name(self, weights: str) -> str:
        """The key in ``formats`` of a format by any of its names: "bf16" for "bfloat16".

        Raises:
            WhetValueError: there is no such format.
        """
        return display_name(weights, "estimate")


def model_memory(
    source: ModelSource, context: int | None = None, batch: int = 1, embeddings: str | None = None
) -> ModelMemory:
    """Every estimate of a model; arguments and errors are those of ``estimate``."""
    config = source.config
    estimates = [estimate(source, weights, context, batch, embeddings) for weights in (*FORMATS, None)]
    return ModelMemory(
        config=config,
        context=default_context(config) if context is None else context,
        formats=dict(zip(FORMATS, estimates, strict=False)),
        as_stored=estimates[-1],
        kv_bytes_per_token={name: page_bytes(config, name) // PAGE_TOKENS for name in ("float32", "bfloat16")},
        training=training(config),
        machine=machine_bytes(),
    )


def default_context(config: ModelConfig) -> int:
    """Tokens of a sequence that estimates are for: 4,096, or all positions of the model where those are fewer."""
    return min(4096, config.max_position)


def load_source(model: str) -> ModelSource:
    """A preset, a config.json, the folder that holds one, or a .gguf file; of the first three without weights.

    Raises:
        WhetValueError: there is no such preset or file, or it describes a model that the engine does not run.
    """
    if model in PRESETS:
        return source_of_config(PRESETS[model], model)
    path, where = Path(model), f"estimate: {model}"
    if path.is_dir():
        return source_of_config(read_config(path, where), where)
    if not path.is_file():
        close = difflib.get_close_matches(model.lower(), PRESETS, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"The presets are {', '.join(PRESETS)}."
        raise WhetValueError(f"estimate: {model!r} is no preset, and there is no such file or folder. {hint}")
    if path.suffix == ".gguf":
        return open_gguf(path)
    return source_of_config(parse_json(map_file(path, where).tobytes(), where), where)


def source_of_config(config: Mapping[str, Any], where: str = "config") -> ModelSource:
    """The model that a Hugging Face config (the keys of config.json) describes, without its weights.

    Raises:
        WhetValueError: a model_type, an option or a size that the engine does not run.
    """
    described = model_config(config, where=where)
    return ModelSource(described, lambda: iter(()), module_targets(config["model_type"], described))


def estimate(
    source: ModelSource,
    weights: str | None = "bf16",
    context: int | None = None,
    batch: int = 1,
    embeddings: str | None = None,
) -> Estimate:
    """The memory that the engine takes to decode a batch of sequences.

    Args:
        source: the model, from ``load_source`` or another.
        weights: as ``Engine`` takes it. None: as a GGUF file stores them.
        context: tokens of each sequence, prompt and completion together; None: ``default_context``.
        batch: sequences at a time; the engine's ``max_batch`` where that is more than its default.
        embeddings: format of embeddings and head; None: the engine's choice.

    Raises:
        WhetValueError: an unknown format, a context or batch below 1, or a context beyond the model's positions.
    """
    config = source.config
    context = default_context(config) if context is None else context
    for name, value in (("context", context), ("batch", batch)):
        check_integer("estimate", name, value, 1)
    if context > config.max_position:
        raise WhetValueError(
            f"estimate: context is {context}, and the model's last position is {config.max_position}. Ask for fewer "
            f"tokens."
        )
    if embeddings is not None:
        core_format(embeddings, "embeddings", "estimate")
    formats = choose_formats(source, weights, embeddings, embeddings, "estimate")
    outer = {"embedding", "positions", "head"}
    sizes = {
        slot: sum(slot_bytes((n, *shape[1:]), format) for n, format in formats.get(slot, [(shape[0], None)]))
        for slot, shape in config.slots().items()
    }
    matrices = {slot: size for slot, size in sizes.items() if slot in formats}
    kv = kv_format(formats)
    # The prompt's last page, where it is not full, is copied for the sequence that goes on from it. The last token is
    # drawn and not computed.
    n_pages = math.ceil((context - 1) / PAGE_TOKENS) + 1
    return Estimate(
        n_parameters=config.n_parameters,
        linear=sum(size for slot, size in matrices.items() if slot not in outer),
        embeddings=sum(size for slot, size in matrices.items() if slot in outer),
        norms=sum(sizes.values()) - sum(matrices.values()),
        kv_cache=batch * n_pages * page_bytes(config, kv),
        workspace=_workspace_bytes(config, batch, kv) + _sampler_bytes(config.vocab_size),
        embedding_format=describe_spans(formats["embedding"]),
        kv_format=kv,
    )


def training(config: ModelConfig) -> TrainingEstimate:
    """The memory that training takes beside activations: every weight trained, float32, AdamW."""
    weights = 4 * config.n_parameters
    return TrainingEstimate(weights, weights, 2 * weights)


def slot_bytes(shape: tuple[int, ...], format: str | None) -> int:
    """Bytes that the engine takes for a matrix (outputs, inputs) in a format of the core's, or for a float32 vector."""
    if format is None:
        return 4 * shape[0]
    return math.ceil(shape[0] / _PANEL_ROWS) * _panel_bytes(format, shape[1])


def page_bytes(config: ModelConfig, format: str) -> int:
    """Bytes of a page of keys and values, of all layers and in "float32" or "bfloat16"."""
    return _core_memory(config, MAX_BATCH, format)["kv_page_bytes"]


@lru_cache
def _panel_bytes(format: str, k: int) -> int:
    return _core.PackedWeight(CORE_FORMATS[format], _PANEL_ROWS, k).size_bytes


@lru_cache
def _core_memory(config: ModelConfig, max_batch: int, format: str) -> dict[str, int]:
    """Memory of a core without weights and pages."""
    bf16 = format == "bfloat16"
    try:
        weights = _core.Weights(vars(config), [])
        return _core.Engine(weights, kv_bytes=1, max_batch=max_batch, chunk=PREFILL_CHUNK, bf16_cache=bf16).memory()
    except ValueError as error:
        raise WhetValueError(f"estimate: the engine does not run this model: {error}.") from None


def _workspace_bytes(config: ModelConfig, batch: int, format: str) -> int:
    """For the engine's default of max_batch, or a greater batch: each of its rows takes as much as any other."""
    few = MAX_BATCH
    small, large = (_core_memory(config, n, format)["workspace_bytes"] for n in (few, 2 * few))
    return small + (large - small) * max(0, batch - few) // few


def _sampler_bytes(vocab_size: int) -> int:
    """Bytes that the sampler allocates at its first step: 24 per thread and vocabulary entry, 1/64 more for sums."""
    return _core.num_threads() * (24 * vocab_size * 65 // 64 + (1 << 14))
