"""How much memory a language model takes: parameters, weights in each format, KV cache and workspace.

Pure arithmetic on a model's shape; nothing is loaded. Counted to the byte: every parameter, the scales of quantised
formats, the KV cache of the heads that really have one (GQA) up to the sliding window. The workspace is an estimate.
Not counted: the Python process, libraries, file caches, gradients and optimiser.

The table of RuvLLM 2.0's document (2 bytes per parameter, half a byte for INT4) leaves out scales, KV cache and
workspace.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from whet.engine.families import FAMILIES, layer_windows
from whet.errors import WhetValueError

FORMATS = ("float32", "bfloat16", "float16", "int8", "q8_0", "q4_0", "q4_k")
FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
# Weights in a block, and its bytes with scales, as GGUF lays them out.
_BLOCKS = {"q8_0": (32, 34), "q4_0": (32, 18), "q4_k": (256, 144)}
PASS_TOKENS = 512
"""Tokens that go through the model at a time while a prompt is read."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder with gated MLPs and RMS norms: Llama and its relatives.

    Attributes:
        tied: the head shares the embeddings' matrix.
        qkv_bias, out_bias, mlp_bias: whether these layers have biases.
        qk_norm: whether queries and keys have a norm of head_dim weights each.
        window: how many tokens back a windowed layer looks; None: all.
        n_windowed: layers with that window.
    """

    vocab_size: int
    hidden_dim: int
    ffn_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    n_windowed: int = 0

    def matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) = (outputs, inputs) of every weight matrix of one layer."""
        d, q, kv = self.hidden_dim, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return [(q, d), (kv, d), (kv, d), (d, q), (self.ffn_dim, d), (self.ffn_dim, d), (d, self.ffn_dim)]

    def n_vector(self) -> int:
        """Weights of all norms and biases, which stay float32."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        per_layer = 2 * self.hidden_dim
        per_layer += (q + 2 * kv) * self.qkv_bias + self.hidden_dim * self.out_bias
        per_layer += (2 * self.ffn_dim + self.hidden_dim) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        return self.n_layers * per_layer + self.hidden_dim

    def n_embedding(self) -> int:
        """Weights of the embeddings and, unless tied, of the head."""
        return self.vocab_size * self.hidden_dim * (1 if self.tied else 2)

    def n_parameters(self) -> int:
        """Every parameter, a shared one once."""
        return self.n_layers * sum(n * k for n, k in self.matrices()) + self.n_embedding() + self.n_vector()


PRESETS = {
    "llama-2-7b": ModelShape(32000, 4096, 11008, 32, 32, 32, 128),
    "llama-2-13b": ModelShape(32000, 5120, 13824, 40, 40, 40, 128),
    "llama-3-8b": ModelShape(128256, 4096, 14336, 32, 32, 8, 128),
    "mistral-7b": ModelShape(32000, 4096, 14336, 32, 32, 8, 128, window=4096, n_windowed=32),
    "smollm-135m": ModelShape(49152, 576, 1536, 30, 9, 3, 64, tied=True),
    "smollm-360m": ModelShape(49152, 960, 2560, 32, 15, 5, 64, tied=True),
    "smollm-1.7b": ModelShape(49152, 2048, 8192, 24, 32, 32, 64, tied=True),
    "qwen2-0.5b": ModelShape(151936, 896, 4864, 24, 14, 2, 64, tied=True, qkv_bias=True),
    "qwen2-1.5b": ModelShape(151936, 1536, 8960, 28, 12, 2, 128, tied=True, qkv_bias=True),
    "qwen2-7b": ModelShape(152064, 3584, 18944, 28, 28, 4, 128, qkv_bias=True),
}

# Hugging Face's model_type, and what its layers have that the config does not say.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "phi3": {},
    "gemma": {"tied": True},
}


def load_shape(model: str) -> ModelShape:
    """The shape of a preset, of a config.json, or of the folder that holds one.

    Raises:
        WhetValueError: there is no such preset or file, or it describes a model of another kind.
    """
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        close = difflib.get_close_matches(model.lower(), PRESETS, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"The presets are {', '.join(PRESETS)}."
        raise WhetValueError(f"estimate: {model!r} is no preset, and {path} is no file. {hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}")
    except ValueError as error:
        raise WhetValueError(f"estimate: {path} is no config: {error}.") from None
    return shape_of_config(config, str(path))


def shape_of_config(config: Mapping[str, Any], where: str = "config") -> ModelShape:
    """The shape that a Hugging Face config (the keys of config.json) describes.

    Raises:
        WhetValueError: an unknown model_type, or a size that is missing or below 1.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise WhetValueError(f"estimate: {where} has model_type {family!r}, expected {', '.join(_FAMILIES)}.")

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise WhetValueError(f"estimate: {where}: {key} is {value!r}, expected an integer of at least 1.")
        return value

    n_layers, n_heads, hidden_dim = size("num_hidden_layers"), size("num_attention_heads"), size("hidden_size")
    bias = bool(config.get("attention_bias")) and family in ("llama", "qwen3", "gemma")
    windows = layer_windows(config, f"estimate: {where}") if family in FAMILIES else (0,)
    shape: dict[str, Any] = {
        "vocab_size": size("vocab_size"),
        "hidden_dim": hidden_dim,
        "ffn_dim": size("intermediate_size"),
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": size("num_key_value_heads", n_heads),
        "head_dim": size("head_dim", hidden_dim // n_heads),
        "tied": bool(config.get("tie_word_embeddings")),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")) and family == "llama",
        "window": max(windows) or None,
        "n_windowed": sum(window > 0 for window in windows),
    }
    return ModelShape(**{**shape, **_FAMILIES[family]})


class Estimate(NamedTuple):
    """Bytes.

    Attributes:
        n_parameters: every parameter, a shared one once.
        linear: the weight matrices of all layers, scales counted.
        embeddings: embeddings and head.
        norms: norms and biases, float32.
        kv_cache: keys and values of every sequence.
        workspace: activations of one pass, float32.
    """

    n_parameters: int
    linear: int
    embeddings: int
    norms: int
    kv_cache: int
    workspace: int

    @property
    def weights(self) -> int:
        return self.linear + self.embeddings + self.norms

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.workspace

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.weights / self.n_parameters


def matrix_bytes(rows: int, columns: int, format: str) -> int:
    """Bytes of a weight matrix (outputs, inputs), scales counted.

    int8 has a float32 scale per row. q8_0, q4_0 and q4_k have GGUF's blocks (8.5, 4.5 and 4.5 bits per weight). Rows
    that the 256 of q4_k do not divide are counted as q4_0, and those that 32 do not divide as int8.
    """
    if format in FLOATS:
        return rows * columns * FLOATS[format]
    if format == "q4_k" and columns % 256:
        format = "q4_0"
    if format == "int8" or columns % 32:
        return rows * (columns + 4)
    weights, size = _BLOCKS[format]
    return rows * columns // weights * size


def embeddings_format(weights: str) -> str:
    """The format of embeddings and head where none is given: that of the weights if it is a float, else bfloat16."""
    return weights if weights in FLOATS else "bfloat16"


def estimate(
    shape: ModelShape,
    weights: str = "bfloat16",
    context: int = 4096,
    batch: int = 1,
    embeddings: str | None = None,
    kv_cache: str = "bfloat16",
) -> Estimate:
    """The memory that inference takes.

    Workspace, float32, for the tokens of one pass (512 of a prompt, or one per sequence, whichever is more): per token
    the residual, its norm and the attention's output projection (hidden each), queries and attention (heads x
    head_dim each), keys and values (KV heads x head_dim each), and the MLP's gate and up (ffn each); and one row of
    logits (vocabulary) per sequence.

    Args:
        shape: of the model.
        weights: format of the layers' matrices, one of FORMATS.
        context: tokens of each sequence, prompt and completion together.
        batch: sequences at once.
        embeddings: format of embeddings and head; that of the weights if that is a float, else bfloat16.
        kv_cache: float32, bfloat16 or float16.

    Raises:
        WhetValueError: an unknown format, or a context or batch below 1.
    """
    embeddings = embeddings or embeddings_format(weights)
    for name, format, known in (
        ("weights", weights, FORMATS),
        ("embeddings", embeddings, FORMATS),
        ("kv_cache", kv_cache, tuple(FLOATS)),
    ):
        if format not in known:
            raise WhetValueError(f"estimate: {name} is {format!r}, expected one of {', '.join(known)}.")
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise WhetValueError(f"estimate: {name} is {value}, expected at least 1.")
    heads = shape.n_heads * shape.head_dim
    kv = shape.n_kv_heads * shape.head_dim
    per_token = 3 * shape.hidden_dim + 2 * heads + 2 * kv + 2 * shape.ffn_dim
    n_tokens = max(batch, min(PASS_TOKENS, batch * context))
    kept = shape.n_layers * context
    if shape.window is not None:
        kept -= shape.n_windowed * max(0, context - shape.window)
    return Estimate(
        n_parameters=shape.n_parameters(),
        linear=shape.n_layers * sum(matrix_bytes(n, k, weights) for n, k in shape.matrices()),
        embeddings=(1 if shape.tied else 2) * matrix_bytes(shape.vocab_size, shape.hidden_dim, embeddings),
        norms=4 * shape.n_vector(),
        kv_cache=2 * kv * kept * batch * FLOATS[kv_cache],
        workspace=4 * (n_tokens * per_token + batch * shape.vocab_size),
    )
