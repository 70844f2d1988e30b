"""GGUF files as models of transformers: the same logits, and a Hugging Face folder of them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tests.engine.tiny_models import logits_of, naive_logits, tiny_model, token_ids
from tests.gguf_files import F32, Q8_0, write_gguf
from tests.models.sources.test_mapped import resident_kib
from tests.raising import assert_raises

from whet.errors import WhetValueError
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import read_gguf
from whet.models.sources.gguf_model import _check_same, load_gguf_model
from whet.models.sources.live import open_module

KEYS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|im_end|>", "</s>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 4,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}
CASES = ("llama", "llama-biases-tied", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt_neox-serial", "gpt2", "phi3",
         "granite", "smollm3-interval", "olmo2", "gemma2", "gemma3", "starcoder2", "stablelm", "stablelm-parallel",
         "phi", "olmo3-kinds", "exaone4", "exaone4-windows", "ernie4_5", "ministral3",
         "arcee", "hunyuan", "granite_swa", "lfm2", "qwen3_5_text",
         "granite4-hybrid", "nemotron_h-groups", "gemma4")  # fmt: skip


def make(tmp_path: Path, case: str, kind: Any = F32, *, keys: Any = KEYS, change: Any = None, extra: Any = None,
         **options: Any) -> Path:  # fmt: skip
    return write_gguf(tiny_model(case, **options), tmp_path / "model.gguf", kind, keys=keys, change=change, extra=extra)


def check(path: Path, n: int = 24) -> Any:
    """The loaded model, and its saved folder, match the definition on the file's weights."""
    model, tokenizer = load_gguf_model(path)
    ids = token_ids(n)
    expected = naive_logits(open_gguf(path), ids)
    np.testing.assert_allclose(logits_of(model, ids), expected, rtol=0, atol=1e-4)
    folder = path.parent / "folder"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    np.testing.assert_array_equal(logits_of(again, ids), logits_of(model, ids))
    return model


@pytest.mark.parametrize("case", CASES)
def test_every_family(case, tmp_path):
    model = check(make(tmp_path, case))
    original = tiny_model(case)
    assert type(model) is type(original) and all(parameter.requires_grad for parameter in model.parameters())
    for name, parameter in original.named_parameters():
        # Files store norms plus the 1 that Gemma and Qwen3.5 add, and -exp(A_log).
        has_offset = case in ("gemma2", "gemma3", "qwen3_5_text") and "norm" in name
        bound = 2**-23 if has_offset or name.endswith("A_log") else 0
        np.testing.assert_allclose(model.get_parameter(name).detach(), parameter, rtol=0, atol=bound, err_msg=name)
    assert model.config.sliding_window == original.config.sliding_window if case in ("mistral", "phi3") else True


@pytest.mark.parametrize("case", ["llama", "gpt_neox", "gpt2"])
def test_blocks_are_dequantised(case, tmp_path):
    check(make(tmp_path, case, Q8_0, **({} if case == "gpt2" else {"intermediate_size": 64})))


@pytest.mark.parametrize("case", ["llama-linear", "llama-yarn"])
def test_scaling_in_the_metadata(case, tmp_path):
    settings = tiny_model(case).config.rope_parameters

    def change(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(settings["rope_type"]))
        writer.add_rope_scaling_factor(settings["factor"])
        writer.add_rope_scaling_orig_ctx_len(settings.get("original_max_position_embeddings", 64))

    model = check(make(tmp_path, case, change=change))
    assert model.config.rope_parameters["rope_type"] == settings["rope_type"]


@pytest.mark.parametrize(("original", "kind"), [(16, "longrope"), (8192, "llama3")])
def test_llama3_rope_scaling_is_recognised(original, kind, tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    options = {"rope_parameters": {**rope, "original_max_position_embeddings": original}}
    options |= {"max_position_embeddings": 16384, "head_dim": 32}
    exact = open_module(tiny_model("llama", **options)).config
    divisors = (5e5 ** (-np.arange(16) / 16) / exact.inv_freq).astype(np.float32)
    model = check(make(tmp_path, "llama", extra={"rope_freqs.weight": divisors}, **options))
    assert model.config.rope_parameters["rope_type"] == kind
    np.testing.assert_allclose(open_module(model).config.inv_freq, exact.inv_freq, rtol=1e-6)


@pytest.mark.parametrize("n", [12, 24])
def test_longrope(n, tmp_path):
    settings = tiny_model("phi3-longrope").config.rope_parameters
    extra = {f"rope_factors_{k}.weight": np.array(settings[f"{k}_factor"], np.float32) for k in ("long", "short")}

    def change(writer: Any) -> None:
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_rope_scaling_attn_factors(open_module(tiny_model("phi3-longrope")).config.attention_factor)

    path = make(tmp_path, "phi3-longrope", change=change, extra=extra)
    model, _ = load_gguf_model(path)
    ids = token_ids(n)
    np.testing.assert_allclose(logits_of(model, ids), logits_of(tiny_model("phi3-longrope"), ids), rtol=0, atol=1e-4)


def test_tokenizer_and_stop_tokens(tmp_path):
    model, tokenizer = load_gguf_model(make(tmp_path, "llama"))
    assert tokenizer("ab")["input_ids"] == [2] and tokenizer.chat_template
    assert (model.config.eos_token_id, model.config.bos_token_id, model.config.pad_token_id) == (4, None, None)
    assert model.generation_config.eos_token_id == [3, 4]


def test_bfloat16_rounds_only_the_weights(tmp_path):
    path = make(tmp_path, "llama")
    whole, _ = load_gguf_model(path)
    model, _ = load_gguf_model(path, "bfloat16")
    for name, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.bfloat16())
    assert open_module(model).config == open_module(whole).config


def test_unsupported_files_are_rejected(tmp_path):
    path = make(tmp_path, "llama")
    assert_raises(WhetValueError, ("dtype is 'float16'", "float32 or bfloat16"), load_gguf_model, path, "float16")
    assert_raises(WhetValueError, ("nothing.gguf", "pass a path"), load_gguf_model, tmp_path / "nothing.gguf")
    many = {**KEYS, "tokenizer.ggml.tokens": [*KEYS["tokenizer.ggml.tokens"], *map(str, range(60))]}
    message = "the tokenizer has 65 tokens and the embedding 48 rows"
    assert_raises(WhetValueError, message, load_gguf_model, make(tmp_path, "llama", keys=many))
    config = open_gguf(path).config
    other = dataclasses.replace(config, norm_eps=1.0)
    assert_raises(
        WhetValueError, ("here", "norm_eps is 1.0", "in transformers it would be"), _check_same, other, config, "here"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts resident pages")
def test_pages_of_the_file_are_released_while_reading(tmp_path):
    path = make(tmp_path, "llama", vocab_size=2048, hidden_size=256, intermediate_size=512)
    file = read_gguf(path, "test")
    load_gguf_model(file)
    assert path.stat().st_size > 3 << 20
    assert resident_kib(path) < 512  # its head
