"""Exported files in llama.cpp: every family, RoPE scaling, head shape and attention window.

llama.cpp is in the wheel ``xllamacpp``, whose server runs in this process. Models that ``whet export`` rejects are
written anyway, to check that llama.cpp does not open them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.models.test_delta import add_block
from tests.models.test_export import N_ROWS, N_TOKENS, PRE_TOKENIZERS, save
from tests.models.tokenizers import vocab_files
from tests.raising import assert_raises

from whet.errors import WhetValueError
from whet.models.export import export_gguf
from whet.models.families import FAMILIES

pytest.importorskip("xllamacpp", reason="llama.cpp: pip install 'whet[wide]'")

LENGTH = 200
ENDS = (1, 30, 65, 130, LENGTH)
"""Lengths at which log-probs are compared: the first position, within the original context of 64, and beyond it."""
HEAD_DIM, WINDOW = 16, 32
_SIZES = {
    "vocab_size": N_ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_GPT2 = {"vocab_size": N_ROWS, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "eos_token_id": 1}
_GEMMA = {"num_hidden_layers": 6, "head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM, "sliding_window": WINDOW}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": HEAD_DIM},
    "mistral": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 64},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
    "gemma3_text": _GEMMA,
    "gemma4_text": {"num_hidden_layers": 6, "head_dim": HEAD_DIM, "global_head_dim": 2 * HEAD_DIM,
                    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 3,
                    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32,
                    "vocab_size_per_layer_input": N_ROWS, "final_logit_softcapping": 9.0},
    "granitemoehybrid": {"shared_intermediate_size": 96, "num_local_experts": 0, "mamba_n_heads": 4,
                         "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
                   "head_dim": HEAD_DIM, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2,
                   "ssm_state_size": 32, "time_step_min": 1e-30},
    "granite_swa": {"num_hidden_layers": 5, "sliding_window": WINDOW, "attention_multiplier": 0.4,
                    "logits_scaling": 1.7, "layer_rope_theta": [500.0, 0.0, 500.0, 500.0, 0.0]},
    "olmo3": {"num_hidden_layers": 5, "sliding_window": WINDOW},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "ernie4_5": {"head_dim": HEAD_DIM},
    "ministral3": {"head_dim": HEAD_DIM},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "arcee": {"head_dim": HEAD_DIM},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
             "block_multiple_of": 32},
    "qwen3_5_text": {"num_hidden_layers": 5, "layer_types": None, "head_dim": HEAD_DIM, "linear_num_key_heads": 3,
                     "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "num_key_value_heads": 4},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": HEAD_DIM,
                  "norm_topk_prob": True, "sliding_window": None},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_experts": 6,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": HEAD_DIM,
                "sliding_window": WINDOW, "num_hidden_layers": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granitemoe": {"num_local_experts": 6, "intermediate_size": 32},
    "granitemoeshared": {"num_local_experts": 6, "intermediate_size": 32, "shared_intermediate_size": 64},
}  # fmt: skip
_OWN["qwen3_5_moe_text"] = {**_OWN["qwen3_5_text"], "num_experts": 6, "num_experts_per_tok": 2,
                            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_PAIRS = np.arange(HEAD_DIM // 2)
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": _YARN,
    "yarn-betas": {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-not-truncated": {**_YARN, "truncate": False},
    "yarn-attention": {**_YARN, "attention_factor": 0.8},
    "yarn-mscale": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": 64,
        "short_factor": (1 + _PAIRS / 10).tolist(), "long_factor": (1 + _PAIRS / 2).tolist(),
    },
}  # fmt: skip
_HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_d_state": 32,
           "position_embedding_type": None}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "hybrid": {**_HYBRID, "mamba_n_groups": 2},
    "hybrid with rotations": {**_HYBRID, "position_embedding_type": "rope"},
    "hybrid with experts": {**_HYBRID, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32},
    "mixtures": {
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 2.5,
    },
    "wide heads": {"head_dim": 24, "query_pre_attn_scalar": 24},
    "narrow heads": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "tied": {"tie_word_embeddings": True},
    "window": {"sliding_window": WINDOW, "use_sliding_window": True},
}
_SQUARE = ("qwen2", "olmo2", "olmo3", "exaone4", "starcoder2", "phi3", "lfm2", "lfm2_moe")
REFUSED = {
    (family, rope)
    for family, ropes in {
        "qwen2": "yarn-betas yarn-not-truncated llama3 longrope",
        "qwen3": "yarn-betas yarn-not-truncated llama3 longrope",
        "smollm3": "yarn-betas yarn-not-truncated llama3 longrope",
        "olmo2": "yarn-betas yarn-not-truncated llama3 longrope",
        "gemma2": "yarn-betas yarn-not-truncated llama3 longrope",
        "gemma3_text": "yarn-betas yarn-not-truncated llama3 longrope yarn-attention yarn-mscale",
        "gemma4_text": "yarn yarn-betas yarn-not-truncated longrope yarn-attention yarn-mscale",
        "starcoder2": "yarn-betas yarn-not-truncated llama3 longrope",
        "gpt_neox": "yarn-betas yarn-not-truncated llama3 longrope",
        "stablelm": "yarn-betas yarn-not-truncated llama3 longrope",
        "phi": "yarn-betas yarn-not-truncated llama3 longrope",
        "olmo3": "yarn-betas yarn-not-truncated llama3 longrope yarn-attention yarn-mscale",
        "exaone4": "longrope",
        "ernie4_5": "yarn-betas yarn-not-truncated llama3 longrope",
        "hunyuan_v1_dense": "yarn-betas yarn-not-truncated llama3 longrope",
        "arcee": "longrope",
        "lfm2": "yarn-betas yarn-not-truncated llama3 longrope",
        "qwen3_5_text": "yarn-betas yarn-not-truncated llama3 longrope",
        "gpt_oss": "yarn yarn-betas yarn-attention yarn-mscale llama3 longrope",
        "olmoe": "yarn-betas yarn-not-truncated llama3 longrope",
        "qwen3_moe": "yarn-betas yarn-not-truncated llama3 longrope",
        "lfm2_moe": "yarn-betas yarn-not-truncated llama3 longrope",
        "qwen3_5_moe_text": "yarn-betas yarn-not-truncated llama3 longrope",
    }.items()
    for rope in ropes.split()
} | {(family, f"{size} heads") for family in _SQUARE for size in ("wide", "narrow")}
NO_SUCH_CONFIG = {("phi3", rope) for rope in ROPES if rope not in ("plain", "longrope")}
NO_SUCH_CONFIG |= {("ministral3", rope) for rope in ROPES if rope not in ("yarn", "yarn-mscale")}
NO_SUCH_CONFIG |= {("gemma4_text", "longrope")}
"""The configs of Phi-3 and Ministral 3 support no other scaling, and Gemma 4's heads of two sizes no longrope."""
_EXPORTED = [name for name, family in FAMILIES.items() if family.gguf is not None and name != "qwen3_vl_text"]
"""The last is a part of models, and its files are Qwen3's."""
CASES = [
    *((family, rope) for family, rope in itertools.product(_EXPORTED, ROPES)
      if FAMILIES[family].rope != "none" or rope == "plain"),
    *((family, shape) for family in _EXPORTED for shape in ("wide heads", "narrow heads")
      if "head_dim" in FAMILIES[family].keys),
    *((family, "tied") for family in _EXPORTED),
    *(("granitemoehybrid", shape) for shape in SHAPES if shape.startswith("hybrid")),
    ("nemotron_h", "mixtures"),
    *((family, "window") for family in _EXPORTED if FAMILIES[family].window == "all"),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), N_TOKENS)


def make_model(family: str, case: str) -> Any:
    options = {**(_GPT2 if family == "gpt2" else _SIZES), "initializer_range": 0.2, **_OWN.get(family, {})}
    if case in ROPES and FAMILIES[family].rope != "none":
        rope = {"rope_theta": 10000.0, **ROPES[case]}
        if FAMILIES[family].partial_rotary and family != "phi3":
            rope["partial_rotary_factor"] = 1.0
        if FAMILIES[family].query_scale:
            rope["llama_4_scaling_beta"] = 0.1
        if FAMILIES[family].rope_local:
            rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
        options["rope_parameters"] = rope
    options |= SHAPES.get(case, {})
    if family == "gpt_neox":
        del options["num_key_value_heads"]
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if "n_experts" in FAMILIES[family].keys:
        model.set_experts_implementation("eager")  # the default needs rows of a multiple of 16 bytes
    for parameter in model.parameters():
        if parameter.ndim == 1:
            offset = FAMILIES[family].norm_offset
            parameter.data.uniform_(0.5 - offset, 1.5 - offset)
        elif parameter.ndim == 2 and not parameter.any():  # biases of experts
            parameter.data.uniform_(-4, 4)
    return model.requires_grad_(False)


def llama_cpp_logprobs(path: Path, prefixes: Sequence[list[int]]) -> np.ndarray:
    """Return log-probs of the next token, (prefixes, vocabulary).

    Raises:
        RuntimeError: llama.cpp does not open the file.
    """
    import xllamacpp  # pyright: ignore[reportMissingImports]

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = str(path), 256, 1, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    # Choose a token with text, since the server reports log-probs only then; they cover the whole vocabulary.
    asked = {"n_predict": 1, "n_probs": N_ROWS, "logit_bias": [[72, 1000.0]], "temperature": 0.0}
    found = np.full((len(prefixes), N_ROWS), np.nan)
    for row, prefix in zip(found, prefixes, strict=True):
        answer: Any = server.handle_completions({**asked, "prompt": prefix})
        for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            row[token["id"]] = token["logprob"]
    return found


def relative_errors(model: Any, path: Path) -> np.ndarray:
    """Compute errors of llama.cpp's log-probs after each of ``ENDS`` tokens, relative to their spread."""
    ids = torch.randint(0, N_TOKENS, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    expected = model(ids).logits[0].log_softmax(-1).numpy()[np.array(ENDS) - 1]
    found = llama_cpp_logprobs(path, [ids[0, :end].tolist() for end in ENDS])
    spread = expected - expected.mean(-1, keepdims=True)
    return np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(spread, axis=-1)


@pytest.mark.parametrize(("family", "case"), [each for each in CASES if each not in NO_SUCH_CONFIG])
def test_llama_cpp_agrees_with_exported_models(family, case, tokenizer, tmp_path, monkeypatch):
    model = make_model(family, case)
    folder, out = save(model, tokenizer, tmp_path / "model"), tmp_path / "model.gguf"
    if (family, case) in REFUSED:
        assert_raises(WhetValueError, "GGUF cannot express", export_gguf, folder, out, "f32")
        assert_not_opened_by_llama_cpp(family, folder, out, monkeypatch)
        return
    written = export_gguf(folder, out, "f32")
    if rounds := not FAMILIES[family].truncates and case.startswith("yarn"):
        assert "llama.cpp rounds the pairs" in written.note
        model = make_model(family, "yarn")  # with the same weights
    errors = relative_errors(model, out)
    if case == "window":
        assert "llama.cpp has no sliding window in " in written.note
        assert errors[1] < 0.05 < errors[2]
    else:
        assert rounds or not written.note
        # llama.cpp's keys and values are float16, which moves near ties of experts: a few positions differ.
        is_mixture = "n_experts" in FAMILIES[family].keys
        assert errors[0] < 0.05 and (np.median(errors) if is_mixture else max(errors)) < 0.05


@pytest.mark.filterwarnings("ignore:.*not read")
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_llama_cpp_opens_files_with_a_block_that_predicts(family, tokenizer, tmp_path):
    model = make_model(family, "plain")
    folder, out = save(model, tokenizer, tmp_path / "model"), tmp_path / "model.gguf"
    add_block(folder, f"model.layers.{model.config.layer_types.index('full_attention')}.", model)
    assert export_gguf(folder, out, "f32").size_bytes > sum(parameter.nbytes for parameter in model.parameters())
    assert np.median(relative_errors(model, out)) < 0.05


def assert_not_opened_by_llama_cpp(family: str, folder: Path, out: Path, monkeypatch: Any) -> None:
    """Write a rejected model by another table, except models that llama.cpp opens and computes wrongly."""
    own = FAMILIES[family]
    table = {**(own.gguf or {}), "rope": ("divisors", "longrope"), "square": False}
    monkeypatch.setitem(FAMILIES, family, replace(own, gguf=table))
    with contextlib.suppress(WhetValueError):  # Gemma 3's attention_factor, which no table has
        export_gguf(folder, out, "f32")
        with pytest.raises(RuntimeError):
            llama_cpp_logprobs(out, [[1]])
