"""Memory of a language model on the native engine and in training.

No weights are loaded. The sizes are exact: matrices are counted in the core's panels, in the formats that the engine
chooses; the KV cache and the workspace are measured on a core without weights. Not included: the Python process, its
libraries, file caches, and activations in training.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from whet import _core
from whet.errors import WhetValueError, check_integer
from whet.models.architecture import TABLE_SLOT, ModelConfig
from whet.models.families import family_of, model_config, module_targets
from whet.models.formats import (
    FORMATS,
    KV_DTYPES,
    PAGE_TOKENS,
    FormatSpan,
    choose_formats,
    core_format,
    describe_spans,
    display_name,
    kv_format,
)
from whet.models.slots import ModelSource
from whet.models.sources.folder import read_config
from whet.models.sources.gguf import open_gguf
from whet.models.sources.mapped import is_mapped, map_file, parse_json
from whet.ops.quant import CORE_FORMATS
from whet.system.memory import machine_bytes

_PANEL_ROWS = 16
MAX_BATCH = 64
"""The engine's default: completions per batch."""
PREFILL_CHUNK = 256
"""The engine's default: prompt tokens per step, in addition to the decoded completions."""
VOCAB_TILE = 2048
"""Vocabulary entries of a tile of the LM head in training, whose logits exist at a time."""
KV_BYTES = 1 << 30
"""The engine's default: bytes of the KV cache."""


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
"""Name -> the sizes in the model's config.json."""


class Estimate(NamedTuple):
    """Bytes of a model on the engine.

    Attributes:
        n_parameters: number of parameters; a shared one counts once.
        linear: the weight matrices of all layers, with scales and padding.
        embeddings: embeddings, learned positions and head.
        norms: norms and biases, float32.
        kv_cache: the pages of all sequences at full length; the ``kv_bytes`` needed to run all of them at once.
        workspace: activations of a pass, logits of a tile of rows, and the sampler's memory.
        embedding_format: the core's name of the embedding's format.
        kv_format: format of keys and values, "float32" or "bfloat16".
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
    """Bytes of full training in float32 with AdamW.

    The sum is the same in bfloat16 or float16: weights and gradients take half, and the optimizer has float32 masters.

    Attributes:
        weights: the master weights.
        gradients: the gradients of all weights.
        moments: AdamW's two moments.
    """

    weights: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def reference(self) -> int:
        """A frozen reference in addition to the model."""
        return self.weights


class ModelMemory(NamedTuple):
    """A model's memory in every format, and the memory of this machine.

    Attributes:
        config: the model.
        context: tokens of each sequence.
        formats: display name of ``weights`` -> estimate.
        as_stored: estimate with the formats of a GGUF file.
        kv_bytes_per_token: format of keys and values -> bytes.
        training: estimate of training.
        machine: memory of this machine, or the limit of its container.
    """

    config: ModelConfig
    context: int
    formats: dict[str, Estimate]
    as_stored: Estimate
    kv_bytes_per_token: dict[str, int]
    training: TrainingEstimate
    machine: int

    def display_name(self, weights: str) -> str:
        """Return the key in ``formats`` of any name of a format: "bf16" for "bfloat16".

        Raises:
            WhetValueError: an unknown format.
        """
        return display_name(weights, "estimate")


def model_memory(
    source: ModelSource, context: int | None = None, batch: int = 1, embeddings: str | None = None
) -> ModelMemory:
    """Compute every estimate of a model; arguments and errors as in ``estimate``."""
    config = source.config
    estimates = [estimate(source, weights, context, batch, embeddings) for weights in (*FORMATS, None)]
    return ModelMemory(
        config=config,
        context=default_context(config) if context is None else context,
        formats=dict(zip(FORMATS, estimates, strict=False)),
        as_stored=estimates[-1],
        kv_bytes_per_token={name: cache_bytes(config, name, 1, 0) // PAGE_TOKENS for name in KV_DTYPES},
        training=training(config),
        machine=machine_bytes(),
    )


def default_context(config: ModelConfig) -> int:
    """Return the sequence length of estimates: 4,096 tokens, or the model's maximum if smaller."""
    return min(4096, config.max_position)


def load_source(model: str) -> ModelSource:
    """Open a preset, a config.json, a folder with one, or a .gguf file; the first three without weights.

    Raises:
        WhetValueError: no such preset or file, or an unsupported model.
    """
    if model in PRESETS:
        return source_of_config(PRESETS[model], model)
    path, where = Path(model), f"estimate: {model}"
    if path.is_dir():
        return source_of_config(read_config(path, where), where)
    if not path.is_file():
        close = difflib.get_close_matches(model.lower(), PRESETS, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"The presets are {', '.join(PRESETS)}."
        raise WhetValueError(f"estimate: {model!r} is neither a preset nor an existing file or folder. {hint}")
    if path.suffix == ".gguf":
        return open_gguf(path)
    return source_of_config(parse_json(map_file(path, where).tobytes(), where), where)


def source_of_config(config: Mapping[str, Any], where: str = "config") -> ModelSource:
    """Return the model of a Hugging Face config (the keys of config.json), without weights.

    Raises:
        WhetValueError: an unsupported model_type, option or size.
    """
    described = model_config(config, where=where)
    return ModelSource(described, lambda: iter(()), module_targets(family_of(config, where), described))


def estimate(
    source: ModelSource,
    weights: str | None = "bf16",
    context: int | None = None,
    batch: int = 1,
    embeddings: str | None = None,
) -> Estimate:
    """Estimate the memory of the engine for decoding a batch of sequences.

    Args:
        source: the model.
        weights: see ``Engine``. None: as stored in a GGUF file.
        context: tokens of each sequence, prompt and completion together. Default: ``default_context``.
        batch: concurrent sequences; the engine's ``max_batch`` if above its default.
        embeddings: format of embeddings and head. Default: the engine's choice.

    Raises:
        WhetValueError: an unknown format, a context or batch below 1, or a context beyond the model's positions.
    """
    config = source.config
    context = default_context(config) if context is None else context
    for name, value in (("context", context), ("batch", batch)):
        check_integer("estimate", name, value, 1)
    if context > config.max_position:
        raise WhetValueError(
            f"estimate: context is {context}, and the model's maximum is {config.max_position} tokens. Pass at most "
            f"that."
        )
    if embeddings is not None:
        core_format(embeddings, "embeddings", "estimate")
    formats = choose_formats(source, weights, embeddings, embeddings, "estimate")
    outside_layers = {"embedding", "positions", "head"}
    sizes = {
        slot: sum(slot_bytes((n, *shape[1:]), format) for n, format in _parts(config, slot, shape[0], formats))
        for slot, shape in config.slots().items()
        if slot != TABLE_SLOT
    }
    copied = (each.tensor.nbytes for each in source.slices() if each.slot == TABLE_SLOT and not is_mapped(each.tensor))
    matrices = {slot: size for slot, size in sizes.items() if slot in formats}
    kv = kv_format(formats)
    # The prompt's last page, if it is not full, is copied for the sequence that continues it. The last token is sampled
    # and never computed.
    n_pages = math.ceil((context - 1) / PAGE_TOKENS) + 1
    return Estimate(
        n_parameters=config.n_parameters,
        linear=sum(size for slot, size in matrices.items() if slot not in outside_layers),
        embeddings=sum(size for slot, size in matrices.items() if slot in outside_layers)
        + (sum(copied) if config.layer_input_dim else 0),
        norms=sum(sizes.values()) - sum(matrices.values()),
        kv_cache=cache_bytes(config, kv, batch * n_pages, batch * STATES),
        workspace=_workspace_bytes(config, batch, kv) + _sampler_bytes(config.vocab_size),
        embedding_format=describe_spans(formats["embedding"]),
        kv_format=kv,
    )


def _parts(
    config: ModelConfig, slot: str, rows: int, formats: Mapping[str, tuple[FormatSpan, ...]]
) -> Iterator[tuple[int, str | None]]:
    """Yield rows and format of each part of a weight that has its own panels: of one format, and of one expert."""
    if slot not in formats or ".experts_" not in slot:
        yield from formats.get(slot, [(rows, None)])
        return
    per_expert, at = rows // config.n_experts, 0
    for n, format in formats[slot]:
        end = at + n
        while at < end:
            step = min(end, (at // per_expert + 1) * per_expert) - at
            yield step, format
            at += step


def training(config: ModelConfig) -> TrainingEstimate:
    """Estimate the memory of full training without activations: float32, AdamW."""
    weights = 4 * config.n_parameters
    return TrainingEstimate(weights, weights, 2 * weights)


def slot_bytes(shape: tuple[int, ...], format: str | None) -> int:
    """Return the bytes of a matrix (outputs, inputs) packed in a format of the core, or of a float32 vector."""
    if format is None:
        return 4 * shape[0]
    return math.ceil(shape[0] / _PANEL_ROWS) * _panel_bytes(format, shape[1])


STATES = 2
"""States of a sequence's recurrent mixers that it may hold at once: before and after a step of its prompt."""


def cache_bytes(config: ModelConfig, format: str, n_pages: int, n_states: int) -> int:
    """Return the bytes of a cache of keys and values, in a format of ``KV_DTYPES``, and of states."""
    memory = _core_memory(config, MAX_BATCH, format)
    return n_pages * memory["kv_page_bytes"] + n_states * memory["kv_state_bytes"]


@lru_cache
def _panel_bytes(format: str, k: int) -> int:
    return _core.PackedWeight(CORE_FORMATS[format], _PANEL_ROWS, k).size_bytes


@lru_cache
def _core_memory(config: ModelConfig, max_batch: int, format: str) -> dict[str, int]:
    """Return the memory of a core without weights and pages."""
    kv_type = _core.KvType[format]
    try:
        weights = _core.Weights(vars(config), [])
        return _core.Engine(weights, kv_bytes=1, max_batch=max_batch, chunk=PREFILL_CHUNK, kv_type=kv_type).memory()
    except ValueError as error:
        raise WhetValueError(f"estimate: the engine does not support this model: {error}.") from None


def _workspace_bytes(config: ModelConfig, batch: int, format: str) -> int:
    """Return the workspace for the default max_batch, or a larger batch; it is linear in the batch."""
    n = MAX_BATCH
    small, large = (_core_memory(config, max_batch, format)["workspace_bytes"] for max_batch in (n, 2 * n))
    return small + (large - small) * max(0, batch - n) // n


def _sampler_bytes(vocab_size: int) -> int:
    """Return the bytes of the sampler from its first step: 24 per thread and vocabulary entry, 1/64 more for sums."""
    return _core.num_threads() * (24 * vocab_size * 65 // 64 + (1 << 14))
