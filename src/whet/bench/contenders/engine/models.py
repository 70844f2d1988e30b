# pyright: reportMissingImports=false
"""Models with random weights of true shapes, in memory, as a folder and as GGUF files.

Weights are drawn from a normal distribution of deviation 0.02 and rounded to bfloat16 once, so that float32 and
bfloat16 are the same model to the bit, and what narrower formats lose is theirs. The GGUF file in bfloat16 is written
by the ``gguf`` package; every other type is made from it by llama.cpp's own quantizer.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from whet.models.architecture import ModelConfig
from whet.models.families import model_config
from whet.models.sizes import PRESETS
from whet.models.sources.gguf import tensor_name

DEVIATION = 0.02
SEED = 20_240
_FTYPES = {"f16": 1, "q4_0": 2, "q8_0": 7, "q4_K_M": 15}
"""``enum llama_ftype``."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model.

    Attributes:
        name: as titles have it.
        hf_config: what config.json says of the sizes, its keys as ``whet.models.sizes.PRESETS`` has them.
    """

    name: str
    hf_config: Mapping[str, Any] = field(hash=False)

    def resized(self, name: str, **sizes: Any) -> ModelShape:
        """The same kind of model with other values of config.json."""
        return ModelShape(name, {**self.hf_config, **sizes})

    @cached_property
    def config(self) -> ModelConfig:
        return model_config(self.hf_config)

    @property
    def n_weights(self) -> int:
        """Weights of the matrices that a decode step reads, the tied embedding once: as the head."""
        return sum(math.prod(shape) for shape in self.config.slots().values() if len(shape) == 2)

    def kv_bytes(self, n_tokens: int) -> int:
        """Bytes of keys and values of so many tokens, two bytes a number."""
        return 2 * 2 * self.config.n_layers * self.config.n_kv_heads * self.config.head_dim * n_tokens

    def forward_flops(self, n_tokens: int, n_logits: int, context: float) -> float:
        """Operations of running ``n_tokens`` that see ``context`` keys on average, ``n_logits`` of them to the end."""
        config = self.config
        head = config.vocab_size * config.hidden_dim
        attention = 2 * config.n_layers * config.n_heads * config.head_dim * context
        return 2 * (n_tokens * (self.n_weights - head + attention) + n_logits * head)


LLAMA_135M = ModelShape("135 M Llama", PRESETS["smollm-135m"])
QWEN2_500M = ModelShape(
    "0.5 B Qwen2",
    {
        **PRESETS["qwen2-0.5b"],
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
)


def random_model(shape: ModelShape) -> Any:
    """A Hugging Face model in float32 whose weights are bfloat16 numbers, without stop tokens.

    Raises:
        ImportError: torch or transformers is missing.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **shape.hf_config,
        rms_norm_eps=1e-5,
        initializer_range=DEVIATION,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms are made of ones and biases of zeros, and would hide being forgotten
                parameter.add_(torch.randn_like(parameter), alpha=DEVIATION)
            parameter.copy_(parameter.bfloat16())
            parameter.requires_grad_(False)
    return model


class ModelFiles:
    """A model, and on disk what is asked for; the files go with the object."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.path = Path(tempfile.mkdtemp(prefix="whet-bench-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    @cached_property
    def model(self) -> Any:
        """In float32."""
        return random_model(self.shape)

    @cached_property
    def folder(self) -> Path:
        """Hugging Face's folder, safetensors in bfloat16."""
        import copy

        import torch

        path = self.path / "folder"
        copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(path)
        return path

    def gguf(self, kind: str) -> Path:
        """The GGUF file in ``kind``: bf16, f16, q8_0, q4_K_M or q4_0."""
        path = self.path / f"{kind}.gguf"
        if not path.exists():
            if kind == "bf16":
                write_gguf(self.model, self.shape, path)
            else:
                quantize_gguf(self.gguf("bf16"), path, kind)
        return path


def write_gguf(model: Any, shape: ModelShape, path: Path) -> None:
    """Write a model of ``random_model``: matrices in bfloat16, norms and biases in float32, no tokenizer.

    llama.cpp rotates neighbouring elements in the family "llama", where Hugging Face rotates the two halves of a head:
    the rows of q and k are put in its order.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config, model_type = shape.config, shape.hf_config["model_type"]
    writer = GGUFWriter(path, model_type)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for hf_name, parameter in model.named_parameters():
        name, values = tensor_name(model_type, hf_name), parameter.detach().numpy()
        if model_type == "llama" and hf_name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = values.reshape(-1, 2, config.head_dim // 2, config.hidden_dim)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize_gguf(source: Path, path: Path, kind: str) -> None:
    """Have llama.cpp quantize a file, its own rules deciding where a tensor gets another type.

    Raises:
        RuntimeError: it could not.
    """
    import llama_cpp

    quiet_llama_cpp()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = _FTYPES[kind]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.pointer(parameters)):
        raise RuntimeError(f"llama.cpp could not quantize {source.name} to {kind}")


def gguf_types(path: Path) -> str:
    """The types of a file's matrices, in words: "121 of q4_K, 90 of q5_0"."""
    from gguf import GGUFReader

    kinds = Counter(tensor.tensor_type.name for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1)
    return ", ".join(f"{n} of {kind}" for kind, n in kinds.most_common())


_keep_alive: list[Any] = []


def quiet_llama_cpp() -> None:
    """Have llama.cpp print nothing."""
    import llama_cpp

    if not _keep_alive:
        _keep_alive.append(llama_cpp.llama_log_callback(lambda level, text, data: None))
        llama_cpp.llama_log_set(_keep_alive[0], ctypes.c_void_p())
