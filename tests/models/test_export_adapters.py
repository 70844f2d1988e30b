"""Adapters exported as GGUF: with the base model's file, llama.cpp computes the merged model's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.engine.tiny_models import logits_of, tiny_model, token_ids
from tests.models.test_export import N_ROWS, N_TOKENS, PRE_TOKENIZERS, save
from tests.models.tokenizers import vocab_files
from tests.raising import assert_raises
from tests.tiny import with_lora

from whet.errors import WhetValueError
from whet.models.export import export_gguf, read_adapters
from whet.models.export_adapters import export_adapters
from whet.models.slots import NormValues
from whet.models.sources.pretrained import open_pretrained

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "down_proj", "lm_head"],
    "qwen3": ["o_proj", "gate_proj", "up_proj"],
    "gpt_neox": ["query_key_value", "dense_4h_to_h"],
    "gpt2": ["c_attn", "c_fc"],
    "phi3-longrope": ["qkv_proj", "gate_up_proj"],
    "granite4-hybrid": ["in_proj", "out_proj", "q_proj", "o_proj"],
    "nemotron_h-groups": ["in_proj", "q_proj", "o_proj", "up_proj", "down_proj"],
    "nemotron_h-experts": ["in_proj", "q_proj", "up_proj"],
    "qwen3_5_text": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "o_proj"],
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), N_TOKENS)


def adapt(model: Any, folder: Path, case: str, **options: Any) -> Any:
    given = {"target_modules": TARGETS[case], "fan_in_fan_out": case == "gpt2", "lora_alpha": 12, **options}
    adapted = with_lora(model, b_std=0.1, **given)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted


def logits_of_llama_cpp(path: Path, ids: Any, **options: Any) -> np.ndarray:
    import llama_cpp

    llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1, **options)
    llama.eval(ids[0].tolist())
    scores = llama.scores[: ids.shape[1]].copy()
    llama.close()
    return scores


@pytest.mark.needs("llama_cpp")
@pytest.mark.parametrize("quantize", ["f32", "f16"])
@pytest.mark.parametrize("case", TARGETS)
def test_llama_cpp_applies_exported_adapters(case, quantize, tokenizer, tmp_path):
    """Reordered rows, and different ranks and alphas."""
    model, ids = tiny_model(case, vocab_size=N_ROWS), token_ids(24)
    folder = save(model, tokenizer, tmp_path / "model")
    patterns = {"rank_pattern": {TARGETS[case][0]: 2}, "alpha_pattern": {TARGETS[case][1]: 7}, "use_rslora": True}
    adapted = adapt(model, tmp_path / "lora", case, **patterns)
    source = open_pretrained(folder)
    export_gguf(folder, tmp_path / "model.gguf", "f32")
    adapters = read_adapters(tmp_path / "lora", source, "here")
    written = export_adapters(folder, tmp_path / "lora.gguf", adapters, quantize)
    assert written.size_bytes == (tmp_path / "lora.gguf").stat().st_size
    found = logits_of_llama_cpp(tmp_path / "model.gguf", ids, lora_path=str(tmp_path / "lora.gguf"))
    plain = logits_of_llama_cpp(tmp_path / "model.gguf", ids)
    expected = logits_of(adapted.merge_and_unload(), ids)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.05)
    assert np.abs(plain - expected).mean() > 20 * np.abs(found - expected).mean()


def test_adapters_for_a_file_equal_adapters_for_its_folder(tokenizer, tmp_path):
    folder = save(tiny_model("llama", vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    adapt(tiny_model("llama", vocab_size=N_ROWS), tmp_path / "lora", "llama")
    export_gguf(folder, tmp_path / "model.gguf", "q8_0")
    for i, model in enumerate((folder, tmp_path / "model.gguf")):
        adapters = read_adapters(tmp_path / "lora", open_pretrained(model), "here")
        export_adapters(model, tmp_path / f"{i}.gguf", adapters, name="one")
    assert (tmp_path / "0.gguf").read_bytes() == (tmp_path / "1.gguf").read_bytes()


def test_adapters_of_a_fused_tensor_are_joined(tokenizer, tmp_path):
    """Two adapters of a fused tensor become one, whose rank is their sum."""
    folder = save(tiny_model("phi3", vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    adapt(tiny_model("phi3", vocab_size=N_ROWS), tmp_path / "lora", "phi3-longrope")
    source = open_pretrained(folder)
    [first, *_] = read_adapters(tmp_path / "lora", source, "here")
    q = first._replace(b=first.b[:32], scaling=2.0)
    k = first._replace(b=first.b[32:48], a=first.a[:2] + 1, first_row=first.first_row + 32)
    k = k._replace(b=k.b[:, :2], scaling=0.5)
    export_adapters(folder, tmp_path / "a.gguf", [q, k])
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    alpha = float(reader.fields["adapter.lora.alpha"].parts[-1][0])
    a, b = (next(data for name, data in tensors.items() if name.endswith(end)) for end in ("lora_a", "lora_b"))
    assert a.shape[0] == 6 and len(tensors) == 2
    found = alpha / 6 * b @ a
    np.testing.assert_allclose(found[:32], 2.0 * q.b @ q.a, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[32:48], 0.5 * k.b @ k.a, rtol=1e-5, atol=1e-6)
    assert not found[48:].any()


def test_unsupported_adapter_exports_are_rejected(tokenizer, tmp_path):
    folder = save(tiny_model("qwen2", vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    adapt(tiny_model("qwen2", vocab_size=N_ROWS), tmp_path / "lora", "llama", target_modules=["lm_head"])
    out, source = tmp_path / "lora.gguf", open_pretrained(folder)
    adapters = read_adapters(tmp_path / "lora", source, "here")
    refused = [
        ("an adapter changes the head, which is the embedding in this model", (adapters,)),
        ("there are no adapters", ([],)),
        ("final_norm.weight is trained too", ([*adapters, NormValues("final_norm.weight", np.ones(32))],)),
        (("quantize is 'q8_0'", "f32, f16 or bf16"), (adapters, "q8_0")),
        ("quantize is 'q9', expected one of", (adapters, "q9")),
    ]
    for message, arguments in refused:
        assert_raises(WhetValueError, message, export_adapters, folder, out, *arguments)
    bad = adapters[0]._replace(slot="embedding", a=adapters[0].a * np.nan)
    assert_raises(WhetValueError, "adapter of embedding holds NaN or infinity", export_adapters, folder, out, [bad])
    assert not out.exists()


def test_adapters_that_llama_cpp_ignores_are_refused(tokenizer, tmp_path):
    folder = save(tiny_model("gemma4", vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    adapted = with_lora(tiny_model("gemma4", vocab_size=N_ROWS), target_modules=["per_layer_model_projection"])
    adapted.save_pretrained(tmp_path / "lora", save_embedding_layers=False)
    adapters = read_adapters(tmp_path / "lora", open_pretrained(folder), "here")
    facts = ("per_layer_model_proj", "llama.cpp ignores", "omit --adapter-only")
    assert_raises(WhetValueError, facts, export_adapters, folder, tmp_path / "lora.gguf", adapters)
