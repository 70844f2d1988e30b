"""Every family against transformers: live modules through slices and the NumPy definition, every logit."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import re
from pathlib import Path
from types import MethodType

import gguf
import numpy as np
import peft
import pytest
import torch
from tests.engine.tiny_models import (
    CASES,
    VOCAB,
    family_name,
    foreign_model,
    logits_of,
    naive_logits,
    own_precision,
    rope,
    tiny_config,
    tiny_model,
    token_ids,
)
from tests.raising import assert_raises, mentions
from tests.tiny import with_lora
from torch import nn

from whet.algorithms import DPO, SFT
from whet.errors import WhetTypeError, WhetValueError
from whet.models import families
from whet.models.architecture import ModelConfig
from whet.models.families import FAMILIES, model_config, module_targets, short_position
from whet.models.reference import naive_forward, naive_weights
from whet.models.slots import locate_lora
from whet.models.sources.live import check_frequencies, open_module

KV = {"num_key_value_heads": 2}


def in_float64(model, config: ModelConfig):
    """Convert the model to float64, including norms and rotary tables, which transformers computes in float32."""
    model = copy.deepcopy(model).double()

    offset = families.family_of(model.config.to_dict(), "test").norm_offset

    def rms_norm(self, x):
        eps = getattr(self, "variance_epsilon", None) or self.eps
        return (getattr(self, "weight", 1.0) + offset) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def rotary(self, x, position_ids, kind=None):
        is_local = kind == "sliding_attention"
        position_ids = position_ids[0] if position_ids.ndim == 3 else position_ids  # of time, row and column
        frequencies = torch.tensor(config.local_inv_freq if is_local else config.inv_freq, dtype=torch.float64)
        angles = position_ids[..., None].double() * frequencies
        if model.config.model_type != "gpt_oss":  # which repeats them when it rotates
            angles = torch.cat((angles, angles), dim=-1)
        factor = 1.0 if is_local else config.attention_factor
        return factor * angles.cos(), factor * angles.sin()

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(rms_norm, module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(rotary, module)
        if hasattr(module, "embed_scale"):
            scale = getattr(module, "scalar_embed_scale", config.embedding_scale)
            module.embed_scale = torch.tensor(scale, dtype=torch.float64)
    return model


def test_worked_example_in_the_documentation():
    rows = re.findall(r"^    (?=\S|  )(.{30}) .* (\w+)=(\S+)$", families.__doc__ or "", re.MULTILINE)
    config = json.loads("{" + ", ".join(['"model_type": "qwen2"', *(left for left, *_ in rows if left.strip())]) + "}")
    result = model_config(config)
    assert len(rows) == 13 and {name: getattr(result, name) for _, name, _ in rows} == {
        name: ast.literal_eval(value) for _, name, value in rows
    }
    location = module_targets(FAMILIES["qwen2"], result)["model.layers.3.self_attn.k_proj"]
    assert (location.weight, location.first_row, location.shape) == ("layers.3.qkv", 896, (128, 896))
    assert 'rows 896 to 1023 of slot "layers.3.qkv"' in families.__doc__


def test_documentation_lists_every_family():
    root = Path(__file__).parents[2]
    readme, export = ((root / name).read_text("utf-8") for name in ("README.md", "docs/export.md"))

    def names(text: str, begin: str, end: str) -> set[str]:
        [listed] = re.findall(f"{begin} (.*?){end}", text, re.DOTALL)
        return {re.sub(r"\W|_", "", name.lower()) for name in re.split(r",\s| and ", listed)}

    known = {name.replace("_", "") for name in FAMILIES}
    renamed = {"phi", "granitemoehybrid", "granitemoeshared", "hunyuanv1dense"}
    assert names(readme, "It runs", ", from a module") == known - renamed | {
        "phi2",
        "granite4",
        "granitemoewithasharedexpert",
        "hunyuandense",
    }
    exported = {name.replace("_", "") for name, family in FAMILIES.items() if family.gguf is not None}
    assert names(export, "that GGUF supports:", r"\.") == exported - {"gemma3text"} | {"gemma3"}


def test_every_causal_language_model_of_transformers_is_run_or_refused_with_its_missing_part():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    others = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - FAMILIES.keys() - families._TEXT_PARTS["models"].keys()
    assert len(others) > 100
    for name in others:
        assert_raises(WhetValueError, f"model_type is '{name}', which has ", model_config, {"model_type": name})
    run = {
        family.gguf.get(key)
        for family in FAMILIES.values()
        if family.gguf
        for key in ("architecture", "hybrid", "mixture")
    }
    for name in {*gguf.MODEL_ARCH_NAMES.values()} - run:
        assert families.unsupported_reason(name), name
    assert not families._NOT_RUN.keys() & (FAMILIES.keys() - {"gptj"} | run)


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case):
    model, ids = tiny_model(case), token_ids()
    source = open_module(model)
    expected = logits_of(model, ids)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(naive_logits(source, ids), expected, rtol=0, atol=1e-4)
    parameters = {name: p for name, p in model.named_parameters() if not families.is_skipped(name)}
    parameters |= {
        name: b
        for name, b in model.named_buffers()
        if name.endswith(("expert_bias", "correction_bias", "layer_scalar"))
    }
    assert source.config.n_parameters == sum(p.numel() for p in parameters.values())
    assert model_config(model.config) == source.config == model_config(json.loads(model.config.to_json_string()))


_IN_FLOAT32 = ("gptj", "ernie4_5", "gpt2-reordered", "granite_swa-bases")


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith(_IN_FLOAT32)])
def test_logits_in_float64(case):
    # The others compute attention, or its rotations, in float32 whatever the weights.
    model, ids = tiny_model(case).double(), token_ids()
    source = open_module(model)
    model = in_float64(model, source.config)
    logits = naive_logits(source, ids, np.float64)
    # transformers computes ERNIE's rotations and Ministral's factors of queries in float32.
    tolerance = 2e-6 if case.startswith(("ernie4_5", "ministral3")) else 1e-10
    with own_precision(model):
        np.testing.assert_allclose(logits, logits_of(model, ids), rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_slices_fill_every_slot_once(case):
    source = open_module(tiny_model(case))
    rows = {slot: np.zeros(shape[0], int) for slot, shape in source.config.slots().items()}
    for row_slice in source.slices():
        rows[row_slice.slot][row_slice.first_row : row_slice.first_row + len(row_slice.tensor)] += 1
        assert tuple(row_slice.tensor.shape[1:]) == source.config.slots()[row_slice.slot][1:]
    assert all((count == 1).all() for count in rows.values())


@pytest.mark.parametrize("case", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
def test_length_dependent_rope_scaling_is_resolved_for_max_position(case):
    for n in (12, 80):
        ids = token_ids(n)
        model = tiny_model(case)
        source = open_module(model, max_position=n)
        assert source.config.max_position == n
        np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)


LONGROPE = {
    "original_max_position_embeddings": 16,
    **rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 4.0, 8.0, 16.0]),
}


def test_length_at_which_longrope_factors_change():
    config = tiny_config("phi3", **LONGROPE)
    assert short_position(config) == short_position(config.to_dict()) == 16
    assert open_module(tiny_model("phi3", **LONGROPE)).short_position == 16
    assert short_position(tiny_config("phi3", **{**LONGROPE, "max_position_embeddings": 16})) is None
    alike = {**LONGROPE["rope_parameters"], "short_factor": [2.0, 4.0, 8.0, 16.0]}
    assert short_position(tiny_config("phi3", **{**LONGROPE, "rope_parameters": alike})) is None
    others = [case for case in CASES if not case.endswith("longrope")]
    assert [short_position(tiny_config(case)) for case in others] == [None] * len(others)
    assert short_position(None) is short_position({"model_type": "opt"}) is None


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3"])
def test_partial_rotary_factor_is_read_only_in_rope_parameters(case):
    model, ids = tiny_model(case, partial_rotary_factor=0.5), token_ids()
    assert model.config.rope_parameters["partial_rotary_factor"] == 0.5
    np.testing.assert_allclose(naive_logits(open_module(model), ids), logits_of(model, ids), rtol=0, atol=1e-4)
    scaled = tiny_config(case, **rope("linear", factor=2.0, partial_rotary_factor=0.5)).to_dict()
    with pytest.raises(WhetValueError, match=mentions("partial_rotary_factor is 0.5", "rope_type 'linear'", case)):
        model_config(scaled)


def test_module_with_frequencies_that_contradict_its_config_is_rejected():
    model = tiny_model("llama")
    model.config.rope_parameters["rope_theta"] = 500.0
    with pytest.raises(WhetValueError, match=mentions("model.rotary_emb.inv_freq is", "config", "Make the model")):
        open_module(model)
    shorter = tiny_model("llama")
    shorter.model.rotary_emb.inv_freq = shorter.model.rotary_emb.original_inv_freq = torch.ones(2)
    with pytest.raises(WhetValueError, match=mentions("model.rotary_emb.inv_freq is (1.0, 1.0)", "config")):
        open_module(shorter)


def test_trainers_reject_frequencies_that_contradict_the_config():
    """transformers 4 builds such models from folders written by transformers 5."""
    model = tiny_model("llama").requires_grad_(True)
    check_frequencies(model, "t")
    reference = tiny_model("llama")
    reference.config.rope_parameters["rope_theta"] = model.config.rope_parameters["rope_theta"] * 50
    facts = "rotary_emb.inv_freq is", "transformers 5", "rope_theta"
    with pytest.raises(WhetValueError, match=mentions("DPO: ref_model: model.", *facts)):
        DPO(model, reference)
    with pytest.raises(WhetValueError, match=mentions("SFT: model: model.", *facts)):
        SFT(reference.requires_grad_(True))


def test_transformers_4_ignores_rope_parameters_of_any_family(monkeypatch):
    model = foreign_model()
    model.config.rope_theta, model.config.rope_parameters = 1e4, {"rope_theta": 5e5}
    check_frequencies(model, "t")
    monkeypatch.setattr("transformers.__version__", "4.57.3")
    with pytest.raises(WhetValueError, match=mentions("t", "the model has rope_theta 10000.0", "the config 500000.0")):
        check_frequencies(model, "t")
    model.config.rope_theta = 5e5
    check_frequencies(model, "t")


def test_models_without_rotary_frequencies_pass():
    for model in (tiny_model("gpt2"), foreign_model(), torch.nn.Linear(2, 2)):
        check_frequencies(model, "t")


@pytest.mark.parametrize("case", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_config_does_not_depend_on_earlier_long_texts(case, dtype):
    fresh, used = (tiny_model(case).to(dtype) for _ in range(2))
    with torch.no_grad():
        used(token_ids(80))
    for max_position in (None, 12, 80):
        expected = open_module(fresh, max_position=max_position).config
        found = open_module(used, max_position=max_position).config
        np.testing.assert_allclose(found.inv_freq, expected.inv_freq, rtol=2**-8)


def test_fields_read_from_configs():
    config = model_config(tiny_config("qwen3-biases-windows"))
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert config.windows == (4, 0) and config.qk_norm and config.qkv_bias and config.o_bias and not config.mlp_bias
    assert config.attention_scale == pytest.approx(8**-0.5) and config.rotary_dim == 8 and len(config.inv_freq) == 4
    slots = config.slots()
    assert slots["layers.1.qkv"] == (4 * 8 + 2 * 2 * 8, 32) and slots["layers.0.gate_up"] == (80, 32)
    assert slots["layers.0.q_norm.weight"] == (8,) and slots["head"] == (VOCAB, 32)
    neox = model_config(tiny_config("gpt_neox"))
    assert neox.parallel_residual and not neox.gated and neox.rotary_dim == 2 and neox.activation == "gelu"
    gptj = model_config(tiny_config("gptj"))
    assert gptj.shared_norm and not gptj.is_neox and gptj.head_bias and gptj.activation == "gelu_tanh"
    assert "layers.0.norm2.weight" not in gptj.slots() and "layers.0.norm1.bias" in gptj.slots()
    gpt2 = model_config(tiny_config("gpt2"))
    assert gpt2.learned_positions == gpt2.max_position == 64 and gpt2.tied_head and gpt2.rotary_dim == 0


def test_old_configs():
    """Configs in model repositories have rope settings in several places and omit options."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 48, "max_position_embeddings": 8192}
    llama = {
        **sizes,
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 1024,
            "rope_type": "llama3",
        },
    }
    config = model_config(llama)
    assert config.n_kv_heads == 4 and config.norm_eps == 1e-6 and not config.tied_head
    # Pairs 0 to 3 of 8 rotate by 500000^(-i/4); the last, 1.9e-5, is far below 1 / 1024 and is divided by 8.
    assert config.inv_freq[0] == 1.0 and config.inv_freq[3] == pytest.approx(500000**-0.75 / 8, rel=1e-12)
    neox = model_config({**sizes, "model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 100})
    assert neox.inv_freq == (1.0, pytest.approx(0.1))
    phi3 = {**sizes, "model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0] * 4}}
    phi3["rope_scaling"]["long_factor"] = [2.0, 2.0, 2.0, 2.0]
    config = model_config({**phi3, "original_max_position_embeddings": 4096})
    assert config.inv_freq[0] == 0.5 and config.attention_factor == pytest.approx((1 + 1 / 12) ** 0.5)
    assert model_config({**phi3, "original_max_position_embeddings": 8192}).inv_freq[0] == 1.0
    mistral = model_config({**sizes, "model_type": "mistral", "num_attention_heads": 16})
    assert mistral.n_kv_heads == 8 and mistral.windows == (4096, 4096)
    assert model_config({**sizes, "model_type": "mistral", "sliding_window": None, **KV}).windows == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, ("'mixtral'", "mixtures of experts", "gemma2, gemma3_text, gemma4_text, gpt2")),
        ({"model_type": "gemma3"}, ("model_type is 'gemma3'", "gemma3_text")),
        ({"model_type": "qwen2_moe"}, ("model_type is 'qwen2_moe'", "has mixtures of experts")),
        ({"model_type": ["llama"]}, ("model_type is ['llama']",)),
        ({"hidden_act": "relu"}, ("hidden_act is 'relu'", "silu")),
        ({"num_attention_heads": 0}, ("num_attention_heads is 0", "an integer from 1")),
        ({"num_attention_heads": True}, ("num_attention_heads is True", "an integer")),
        ({"num_attention_heads": 3}, ("hidden_size is 32", "a multiple of num_attention_heads=3")),
        ({"num_key_value_heads": 3}, ("n_heads is 4", "a multiple of n_kv_heads=3")),
        ({"num_hidden_layers": 10**12}, ("num_hidden_layers is 1000000000000", "an integer from 1 to 4096")),
        ({"hidden_size": 2**63}, ("hidden_size is 9223372036854775808, expected",)),
        ({"hidden_size": "32"}, ("hidden_size is '32'", "an integer")),
        ({"vocab_size": None}, ("vocab_size is None, expected",)),
        ({"head_dim": 7}, ("rotary embedding", "rotary_dim is 7", "an even number")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps is nan", "a finite number")),
        ({"rms_norm_eps": 10**400}, ("rms_norm_eps is 1000", "expected a finite number")),
        ({"rms_norm_eps": -1.0}, ("norm_eps is -1.0", "a finite number of at least 0")),
        ({"attention_bias": 1}, ("attention_bias is 1", "true or false")),
        ({"quantization_config": {"bits": 4}}, ("quantization_config is", "Load the model in float32")),
        ({"is_encoder_decoder": True}, ("is_encoder_decoder is True", "llama", "expected False")),
        ({"num_local_experts": 8}, ("num_local_experts is 8",)),
        (rope("spiral"), ("rope_type 'spiral'", "'default', 'linear'")),
        (rope("linear"), ("'factor'", "linear")),
        (rope("linear", factor=10**400), ("rotary embedding: ",)),
        (rope("default", mrope_section=[1]), ("'mrope_section'", "default")),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ("expected one object of settings",)),
        ({"rope_parameters": [1]}, ("expected one object of settings",)),
    ],
)
def test_unsupported_config_is_rejected_by_name(change, message):
    given = {**json.loads(tiny_config("llama").to_json_string()), **change}
    if "head_dim" not in change:
        del given["head_dim"]
    assert_raises(WhetValueError, ("here: ", *message), model_config, given, where="here")


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gptj", {"rotary_dim": None}, ("rotary_dim is None", "an even number")),
        ("gptj", {"rotary_dim": 5}, "rotary_dim is 5"),
        ("mistral", {"sliding_window": 0}, ("sliding_window is 0", "an integer of at least 1, or null")),
        ("qwen2-windows", {"layer_types": ["full_attention"]}, ("layer_types is", "2 of full_attention")),
        ("qwen2-windows", {"layer_types": ["linear_attention"] * 2}, ("layer_types is", "linear_attention")),
        ("qwen2-windows", {"layer_types": None, "max_window_layers": -1}, "max_window_layers is -1"),
        ("granite4", {"layer_types": ["full_attention", "conv"]}, ("layer_types is", "linear_attention or full_att")),
        ("granite4-hybrid", {"mamba_conv_bias": False}, "mamba_conv_bias is False"),
        ("granite4-hybrid", {"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        ("granite4-hybrid", {"mamba_n_groups": 3}, ("n_delta_heads is 4", "n_delta_key_heads=3")),
        ("granite4-hybrid", {"time_step_limit": [0.0, 1.0]}, ("time_step_limit is [0.0, 1.0]", "0 and infinity")),
        ("granite4", {"num_local_experts": -2}, "num_local_experts is -2"),
        ("granite_swa", {"layer_rope_theta": [1.0, 2.0]}, ("layer_rope_theta is", "for each of 5 layers")),
        ("granite_swa", {"layer_rope_theta": [1.0, 2.0, 3.0, 0.0, 1.0]}, ("layer_rope_theta is", "at most two")),
        ("granite_swa", {"layer_rope_theta": [-1.0] * 5}, ("layer_rope_theta is", "at least 0")),
        ("lfm2", {"layer_types": ["conv"] * 3}, ("layer_types is", "4 of conv and full_attention")),
        ("lfm2", {"layer_types": ["conv", "linear_attention"] * 2}, ("layer_types is", "conv or full_attention")),
        ("lfm2", {"layer_types": ["conv", "sliding_attention"] * 2}, ("layer_types is", "conv or full_attention")),
        ("lfm2", {"tie_embedding": "yes"}, ("tie_embedding is 'yes'", "true or false")),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [4]}, ("full_attn_idxs is [4]", "indices of 4 layers")),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [[1]]}, ("full_attn_idxs is", "indices")),
        ("qwen3_5_text", {"layer_types": ["conv"] * 3}, ("layer_types is", "linear_attention or full_attention")),
        ("qwen3_5_text", {"layer_types": ["linear_attention"]}, ("layer_types is", "3 of linear_attention and")),
        ("qwen3_5_text", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
        ("qwen3_5_text", {"linear_num_value_heads": 4}, ("n_delta_heads is 4", "n_delta_key_heads=3")),
        ("qwen3_5_text", {"linear_key_head_dim": None}, ("linear_key_head_dim is None", "an integer from 1")),
        ("lfm2", {"conv_L_cache": 17}, ("conv_length is 17", "from 1 to 16")),
        ("lfm2", {"conv_bias": True}, "conv_bias is True"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of is 0"),
        ("granite4", {"position_embedding_type": "learned"}, ("position_embedding_type is 'learned'", "rope, nope")),
    ],
)
def test_unsupported_option_of_a_family_is_rejected_by_name(case, change, message):
    assert_raises(WhetValueError, message, model_config, {**tiny_config(case).to_dict(), **change})


def test_granite_4_without_its_options_is_a_hybrid_with_experts():
    config = {key: value for key, value in tiny_config("granite4").to_dict().items() if key != "layer_types"}
    hybrid = model_config({**config, "mamba_d_head": "auto"})
    assert (hybrid.mixers, hybrid.delta_dim) == (("mamba", "mamba"), 16)
    del config["num_local_experts"], config["num_experts_per_tok"]
    found = model_config({**config, "layer_types": ["attention"] * 2})
    assert (found.n_experts, found.n_used_experts, found.expert_dim, found.shared_dim) == (8, 2, 40, 24)


def test_ministral_3_scales_queries_by_their_position():
    config = tiny_config("ministral3").to_dict()
    found = model_config(config)
    assert (found.query_log_scale, found.query_scale_length, found.attention_factor) == (0.1, 8, 1.0)
    given = config["rope_parameters"]
    plain = model_config({**config, "rope_parameters": {**given, "llama_4_scaling_beta": 0.0}})
    assert (plain.query_log_scale, plain.query_scale_length) == (0.0, 1)
    defaults = model_config({"model_type": "ministral3"})
    assert (defaults.n_layers, defaults.head_dim, defaults.max_position) == (34, 128, 262144)
    assert (defaults.query_log_scale, defaults.query_scale_length) == (0.1, 16384)
    wrong = {**config, "rope_parameters": {**given, "llama_4_scaling_beta": -1.0}}
    assert_raises(WhetValueError, ("rope_parameters", "llama_4_scaling_beta"), model_config, wrong)
    del given["original_max_position_embeddings"]
    assert_raises(WhetValueError, ("rope_parameters", "original_max_position_embeddings"), model_config, config)


def test_frequencies_of_hunyuan_do_not_depend_on_the_length():
    config = tiny_config("hunyuan-alpha").to_dict()
    short, long = (model_config(config, max_position=length).inv_freq for length in (16, 1 << 16))
    assert short == long
    theta = config["rope_parameters"]["rope_theta"] * 50.0 ** (10 / 8)
    assert short == pytest.approx([theta ** (-i / 5) for i in range(5)], rel=1e-12)
    for alpha in (-1.0, "fast"):
        wrong = {**config, "rope_parameters": {**config["rope_parameters"], "alpha": alpha}}
        assert_raises(WhetValueError, ("rope_parameters", "alpha"), model_config, wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 0}, ("n_heads is 0", "an integer from 1")),
        ({"n_kv_heads": 3}, ("n_heads is 4", "a multiple of n_kv_heads=3")),
        ({"norm": "batch"}, ("norm is batch", "rms, layer")),
        ({"activation": "relu"}, ("activation is relu",)),
        ({"norm_eps": float("inf")}, ("norm_eps is inf", "a finite number")),
        ({"windows": (0,)}, ("windows is 1 numbers", "one for each of n_layers=2")),
        ({"windows": (0, -1)}, ("windows is -1",)),
        ({"rotary_dim": 7}, ("rotary_dim is 7", "an even number")),
        ({"rotary_dim": 10}, ("rotary_dim is 10", "an integer from 0 to 8")),
        ({"inv_freq": (1.0,)}, ("inv_freq is 1 numbers", "4")),
        ({"inv_freq": (1.0, 1.0, 1.0, float("nan"))}, ("inv_freq is nan",)),
        ({"shared_norm": True}, ("shared_norm is True", "False")),
        ({"parallel_residual": True, "post_norm": True}, ("post_norm is True", "False where parallel_residual")),
        ({"qk_norm_whole": True}, ("qk_norm_whole is True", "False where qk_norm is")),
        ({"qk_norm_rotated": True}, ("qk_norm_rotated is True", "False where qk_norm is")),
        ({"query_log_scale": -0.1}, ("query_log_scale is -0.1", "at least 0")),
        ({"query_scale_length": 0}, ("query_scale_length is 0", "an integer from 1")),
        ({"local_layers": (True,)}, ("local_layers is", "n_layers=2 of true and false")),
        ({"local_layers": (True, False)}, ("local_inv_freq is 0 numbers", "4")),
        ({"learned_positions": 10}, ("max_position is 64", "at most learned_positions=10")),
        ({"attention_scale": None}, ("attention_scale is None",)),
    ],
)
def test_invalid_model_config_is_rejected(change, message):
    with pytest.raises(WhetValueError, match=mentions("ModelConfig: ", *message)):
        dataclasses.replace(model_config(tiny_config("llama")), **change)


# --- live modules ---------------------------------------------------------------------------------------------------


def test_slices_are_views():
    for case in ("llama", "gpt_neox", "gpt2", "phi3"):
        model = tiny_model(case)
        storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
        assert {p.tensor.untyped_storage().data_ptr() for p in open_module(model).slices()} <= storages


def test_in_place_updates_are_visible():
    model, ids = tiny_model("llama"), token_ids()
    source = open_module(model)
    model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)


def test_bfloat16_and_resized_embeddings():
    model, ids = tiny_model("qwen2").bfloat16(), token_ids()
    model.resize_token_embeddings(VOCAB + 5)
    source = open_module(model)
    assert source.config.vocab_size == VOCAB + 5
    assert {row_slice.format for row_slice in source.slices()} == {"bfloat16"}
    expected = logits_of(model.float(), ids)
    np.testing.assert_allclose(naive_logits(source, ids), expected, rtol=0, atol=1e-4)


def test_rotary_frequencies_keep_the_rounding_of_the_module():
    assert open_module(tiny_model("llama")).config == model_config(tiny_config("llama"))
    rounded = open_module(tiny_model("llama").bfloat16()).config.inv_freq
    assert rounded == tuple(torch.tensor(model_config(tiny_config("llama")).inv_freq).bfloat16().double().tolist())
    # After a long text transformers stores other frequencies, which are not rounded ones.
    model = tiny_model("llama-longrope", max_position_embeddings=16)
    logits_of(model, token_ids(40))
    assert open_module(model).config == model_config(model.config)


def test_head_is_tied_if_it_shares_the_embeddings_memory():
    model = tiny_model("qwen2")
    assert open_module(model).config.tied_head
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    assert not open_module(model).config.tied_head
    untied = tiny_model("llama")
    untied.lm_head.weight = untied.model.embed_tokens.weight
    assert open_module(untied).config.tied_head


def test_a_compiled_model():
    model, ids = tiny_model("llama"), token_ids()
    source = open_module(torch.compile(model))
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)


def lora_of(case, targets, **options):
    settings = {"r": 4, "lora_alpha": 6, "target_modules": targets, "task_type": None, **options}
    return with_lora(tiny_model(case), b_std=0.3, **settings).eval()


LORA_CASES = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gpt2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "gptj": ["q_proj", "out_proj", "fc_in"],
    "phi3": ["qkv_proj", "gate_up_proj"],
}


@pytest.mark.parametrize("case", LORA_CASES)
def test_lora_separate_and_merged(case):
    model, ids = lora_of(case, LORA_CASES[case], fan_in_fan_out=case == "gpt2"), token_ids()
    expected, plain = logits_of(model, ids), logits_of(tiny_model(case), ids)
    assert np.abs(expected - plain).max() > 0.1
    merged = open_module(model, merged=True)
    assert not merged.adapters
    np.testing.assert_allclose(naive_logits(merged, ids), expected, rtol=0, atol=1e-4)
    apart = open_module(model)
    np.testing.assert_allclose(naive_logits(apart, ids), plain, rtol=0, atol=1e-4)
    weights = naive_weights(apart.config, apart.slices(), np.float32)
    for lora in apart.adapters:
        rows = slice(lora.first_row, lora.first_row + len(lora.b))
        weights[lora.slot][rows] += lora.scaling * (lora.b @ lora.a).numpy()
    logits = naive_forward(apart.config, weights, ids[0].numpy())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_lora_on_tied_embedding_and_head():
    for targets in (["embed_tokens"], ["lm_head"]):
        model, ids = lora_of("qwen2", targets), token_ids()
        merged = open_module(model, merged=True)
        assert not merged.config.tied_head
        np.testing.assert_allclose(naive_logits(merged, ids), logits_of(model, ids), rtol=0, atol=1e-4)
    (lora,) = open_module(model).adapters
    assert (lora.slot, lora.first_row) == ("head", 0)
    with pytest.raises(WhetValueError, match=mentions("changes the embedding", "Pass merged=True")):
        open_module(lora_of("qwen2", ["embed_tokens"]))


def test_only_active_adapters_count():
    model, ids = lora_of("llama", ["q_proj"]), token_ids()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    assert {lora.slot for lora in open_module(model).adapters} == {"layers.0.qkv", "layers.1.qkv"}
    assert {lora.first_row for lora in open_module(model).adapters} == {0}
    model.set_adapter("other")
    assert {lora.first_row for lora in open_module(model).adapters} == {48}
    with model.disable_adapter():
        assert open_module(model).adapters == ()
        expected = logits_of(model, ids)
        np.testing.assert_allclose(naive_logits(open_module(model, merged=True), ids), expected, rtol=0, atol=1e-4)
    expected = logits_of(model, ids)
    model.merge_adapter()
    source = open_module(model)
    assert source.adapters == ()
    np.testing.assert_allclose(naive_logits(source, ids), expected, rtol=0, atol=1e-4)


def test_modules_that_peft_trains_whole():
    model, ids = lora_of("llama", ["q_proj"], modules_to_save=["lm_head"]), token_ids()
    model.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(1.5)
    merged = open_module(model, merged=True)
    np.testing.assert_allclose(naive_logits(merged, ids), logits_of(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), ("q_proj", "is DoRA", "merged=True")),
        (peft.LoraConfig(target_modules=["q_proj"], lora_bias=True), "is more than W \\+ scaling B A"),
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), ("k_proj", "only LoRA of PEFT")),
        (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "learned prompts"),
    ],
)
def test_adapters_beyond_lora_are_rejected_by_name(config, message):
    assert_raises(WhetValueError, message, open_module, peft.get_peft_model(tiny_model("llama"), config))


def test_adapters_are_located_by_module_name():
    source = open_module(tiny_model("gpt_neox"))
    location = source.targets["gpt_neox.layers.1.attention.query_key_value"]
    a, b = np.ones((2, 32), np.float32), np.arange(96 * 2, dtype=np.float32).reshape(96, 2)
    [lora] = locate_lora(source.config, location, a, b, 2.0, "here")
    assert (lora.slot, lora.first_row, lora.scaling) == ("layers.1.qkv", 0, 2.0)
    # Head 1's keys, rows 24 + 8 to 24 + 15 of the module, are rows 32 + 8 to 32 + 15 of the slot.
    np.testing.assert_array_equal(lora.b[40:48], b[32:40])
    with pytest.raises(WhetValueError, match=mentions("here", "gpt_neox.layers.1.", "shapes")):
        locate_lora(source.config, location, a, b[1:], 1.0, "here")
    assert_raises(WhetValueError, "has ranks 2 and 1", locate_lora, source.config, location, a, b[:, :1], 1.0, "here")


def test_modified_models_are_rejected_by_name():
    model = tiny_model("llama")
    assert_raises(WhetTypeError, ("model is a Linear", "a Hugging Face model"), open_module, nn.Linear(2, 2))
    with pytest.raises(
        WhetValueError, match=mentions("the model has no model.embed_tokens", "Pass the causal language model")
    ):
        open_module(model.model)
    with pytest.raises(WhetValueError, match=mentions("weight is on meta", "the engine runs on the CPU")):
        open_module(copy.deepcopy(model).to("meta"))
    wider = tiny_model("llama")
    wider.model.layers[1].mlp.up_proj = nn.Linear(32, 44, bias=False)
    with pytest.raises(WhetValueError, match=mentions("layers.1.mlp.up_proj.weight has shape (44, 32)", "(40, 32)")):
        open_module(wider)
    biased = tiny_model("llama")
    biased.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.ones(40))
    assert_raises(WhetValueError, ("model.layers.0.mlp.up_proj.bias", "not support"), open_module, biased)
    quantised = tiny_model("llama")
    weight = quantised.model.layers[0].mlp.up_proj.weight
    quantised.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)
    assert_raises(WhetValueError, ("up_proj.weight is int8", "float32"), open_module, quantised)


def test_cases_cover_every_family():
    assert set(map(family_name, CASES)) == set(FAMILIES)
