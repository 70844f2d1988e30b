"""Mixtures of experts: the definition worked out by hand, and every family against transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.tiny_models import MIXTURES, logits_of, naive_logits, tiny_model, token_ids
from tests.gguf_files import F32, Q8_0, values_by_module, values_by_slot, write_gguf
from tests.models.test_export import N_ROWS, save, tokenizer
from tests.raising import assert_raises
from tests.tiny import with_lora
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from whet.errors import WhetValueError
from whet.models.architecture import ModelConfig, find_difference
from whet.models.export import export_gguf
from whet.models.families import model_config
from whet.models.loading import list_slices
from whet.models.lora import LoraSettings, choose_adapted, core_matrix
from whet.models.packed_base import pack_base
from whet.models.reference import naive_forward, naive_route
from whet.models.sizes import source_of_config
from whet.models.sources.folder import open_folder
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import read_gguf
from whet.models.sources.gguf_model import load_gguf_model
from whet.models.sources.live import open_module
from whet.runs.models import add_adapters
from whet.runs.settings import RunConfig

__all__ = ["tokenizer"]
SIZES: dict[str, Any] = {
    "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 2, "hidden_dim": 2, "ffn_dim": 3, "vocab_size": 5,
    "max_position": 8, "norm": "rms", "norm_eps": 0.0, "windows": (0,), "attention_scale": 1.0, "n_experts": 4,
    "n_used_experts": 2, "expert_dim": 1,
}  # fmt: skip


def route(logits: list[float], correction: list[float] | None = None, **options: Any) -> tuple[list[int], np.ndarray]:
    """Route one token with these logits."""
    config = ModelConfig(**{**SIZES, "n_experts": len(logits), **options})
    layer = {"router": np.array([[logit, 0.0] for logit in logits])}
    if correction is not None:
        layer["router_correction"] = np.array(correction)
    chosen, weights = naive_route(config, layer, np.array([[1.0, 7.0]]))
    return chosen[0].tolist(), weights[0]


def test_softmax_router():
    """e^0, e^(log 2), e^(log 5), e^(log 2): probabilities 0.1, 0.2, 0.5, 0.2; of the equal ones, the first."""
    logits = [0.0, np.log(2), np.log(5), np.log(2)]
    chosen, weights = route(logits)
    assert chosen == [2, 1]
    np.testing.assert_allclose(weights, [0.5, 0.2], rtol=1e-12)
    np.testing.assert_allclose(route(logits, router_normalised=True)[1], [5 / 7, 2 / 7], rtol=1e-12)
    np.testing.assert_allclose(route(logits, n_used_experts=3, router_scale=2.0)[1], [1.0, 0.4, 0.4], rtol=1e-12)


def test_sigmoid_router_is_corrected_for_the_choice_only():
    logits = [np.log(3), 0.0, -np.log(3), -np.log(9)]
    options = {"router": "sigmoid", "router_correction": True, "router_normalised": True, "router_eps": 0.1}
    chosen, weights = route(logits, [-1.0, 0.0, 0.1, 0.35], **options)
    assert chosen == [1, 3]
    np.testing.assert_allclose(weights, [0.5 / 0.7, 0.1 / 0.7], rtol=1e-12)
    assert route(logits, [0.0] * 4, **options)[0] == [0, 1]


@pytest.mark.parametrize("gated", [True, False])
def test_output_of_a_mixture_and_its_shared_expert(gated):
    """One token of (3, 4), normalised to (3, 4) / sqrt(12.5); attention adds 0."""
    config = ModelConfig(
        **SIZES, gated=gated, activation="relu2", shared_dim=1, shared_gate=True, tied_head=True, router_normalised=True
    )
    weights = {slot: np.zeros(shape) for slot, shape in config.slots().items()}
    weights["embedding"][1] = [3.0, 4.0]
    for name in ("layers.0.norm1", "layers.0.norm2", "final_norm"):
        weights[f"{name}.weight"][:] = 1.0
    up = "gate_up" if gated else "up"
    weights["layers.0.router"][:] = [[0, 0], [1, 0], [0, 0], [1, 0]]  # experts 1 and 3, with weight 1/2
    rows = np.array([[1.0, 0.0], [0.0, 1.0]][: 2 if gated else 1])
    weights[f"layers.0.experts_{up}"][:] = np.concatenate([e * rows for e in range(4)])
    weights["layers.0.experts_down"][:] = np.repeat([0.0, 1.0, 10.0, 100.0], 2)[:, None]
    weights[f"layers.0.{up}"][:] = rows
    weights["layers.0.down"][:] = [[1000.0], [0.0]]
    a, b = 3 / np.sqrt(12.5), 4 / np.sqrt(12.5)
    expert = a * a * b if gated else a * a
    powers = {1: 1, 3: 27 if gated else 9}
    mixed = sum(0.5 * powers[e] * down * expert for e, down in ((1, 1.0), (3, 100.0)))
    hidden = np.array([3.0, 4.0]) + mixed + np.array([0.5 * 1000.0 * expert, 0.0])
    expected = hidden / np.sqrt((hidden**2).mean()) @ [3.0, 4.0]
    np.testing.assert_allclose(naive_forward(config, weights, [1])[0, 1], expected, rtol=1e-12)


def test_dense_layers_of_a_mixture_have_the_width_of_the_mlp():
    config = ModelConfig(**{**SIZES, "n_layers": 2, "windows": (0, 0), "moe_layers": (False, True)})
    slots = config.slots()
    assert slots["layers.0.gate_up"] == (6, 2) and "layers.1.gate_up" not in slots
    assert slots["layers.1.experts_gate_up"] == (8, 2) and slots["layers.1.experts_down"] == (8, 1)
    assert not config.is_moe(0) and config.is_moe(1)
    assert dataclasses.replace(config, moe_layers=()).is_moe(0)


@pytest.mark.filterwarnings("ignore:.*not read")
@pytest.mark.parametrize("case", MIXTURES)
def test_folders_have_experts_apart_or_together(case, tmp_path):
    """transformers 5 writes the names of older checkpoints; its own names are read too."""
    model = tiny_model(case)
    model.save_pretrained(tmp_path / "apart")
    model.config.save_pretrained(tmp_path / "together")
    save_file({name: t.clone() for name, t in model.state_dict().items()}, tmp_path / "together/model.safetensors")
    names = load_file(tmp_path / "apart/model.safetensors").keys()
    assert any("experts.3." in name or "input_linear" in name for name in names) != case.startswith("gpt_oss")
    live = open_module(model)
    for folder in ("apart", "together"):
        source = open_folder(tmp_path / folder)
        assert source.config == live.config and source.targets == live.targets
        for slot, values in values_by_slot(live).items():
            np.testing.assert_array_equal(values_by_slot(source)[slot], values, err_msg=slot)


def test_slices_of_experts_are_views(tmp_path):
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    fused = model.model.layers[1].mlp.experts.gate_up_proj
    slices = [each for each in list_slices(open_module(model), "here") if each.slot == "layers.1.experts_gate_up"]
    assert [(each.first_row, tuple(each.tensor.shape)) for each in slices] == [(28 * e, (28, 32)) for e in range(7)]
    assert [each.tensor.data_ptr() for each in slices] == [fused[e].data_ptr() for e in range(7)]
    stored = [each for each in list_slices(open_folder(tmp_path / "model"), "here") if ".experts_" in each.slot]
    assert len(stored) == 3 * 3 * 7 and not any(each.tensor.flags.owndata for each in stored)


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(EXPERT), f"tensor {EXPERT} is missing"),
        (lambda tensors: tensors.update({EXPERT: torch.ones(13, 32)}), ("has shape (13, 32)", "expected (14, 32)")),
        (lambda tensors: tensors.update({EXPERT.replace(".2.", ".7."): torch.ones(14, 32)}), "experts.7.up_proj"),
    ],
)
def test_incomplete_experts_are_rejected(change, message, tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "model")
    rewrite(tmp_path / "model", change)
    assert_raises(WhetValueError, message, open_folder, tmp_path / "model")


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, which the engine does not support"),
        ("olmoe", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, expected at most num_experts=5"),
        ("olmoe", {"num_experts": 5000}, "num_experts is 5000, expected an integer from 1 to 4096"),
        ("olmoe", {"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1, expected a list of layers"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers is -1"),
        ("lfm2_moe", {"routed_scaling_factor": "2"}, "routed_scaling_factor is '2', expected a finite number"),
        ("granite4-experts", {"layer_types": ["conv", "attention"]}, "layer_types"),
    ],
)
def test_options_are_checked(case, options, message):
    config = tiny_model(case).config.to_dict()
    assert_raises(WhetValueError, message, model_config, {**config, **options})


def test_mixtures_without_experts_are_dense():
    config = tiny_model("lfm2_moe").config.to_dict()
    dense = model_config({**config, "num_dense_layers": 4})
    assert (dense.n_experts, dense.router, dense.moe_layers) == (0, "softmax", ())
    assert "layers.3.gate_up" in dense.slots()
    mixed = model_config(config)
    assert mixed.moe_layers == (False, True, True, True) and mixed.router == "sigmoid"


def test_sizes_of_the_published_models():
    """Qwen3-30B-A3B."""
    config = model_config(
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False, "sliding_window": None,
            "max_window_layers": 48, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        }
    )  # fmt: skip
    assert config.slots()["layers.47.experts_gate_up"] == (128 * 1536, 2048) and config.windows == (0,) * 48
    assert 30.4e9 < config.n_parameters < 30.6e9


NOT_IN_FILES = "olmoe-normalised", "qwen3_moe-dense", "lfm2_moe-plain", "gpt_oss-kinds", "nemotron_h-mixed"
IN_FILES = [case for case in MIXTURES if case not in NOT_IN_FILES and not case.endswith("-vision")]
WHERE_ROTATED = {"granite4-experts": {"position_embedding_type": "rope"}}
WIDE = {
    "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "head_dim": 16, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "mamba_head_dim": 32, "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
"""Sizes whose rows are multiples of Q8_0's blocks, also per head."""


def model_of(case: str, **options: Any) -> Any:
    known = tiny_model(case).config.to_dict()
    wide = {name: value for name, value in options.items() if name in known or name not in WIDE}
    return tiny_model(case, vocab_size=N_ROWS, **WHERE_ROTATED.get(case, {}), **wide)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", IN_FILES)
def test_files_of_the_converter_are_read(case, fused, tmp_path):
    model, ids = model_of(case), token_ids()
    path = write_gguf(model, tmp_path / "model.gguf", fused=fused, fused_experts=fused and case != "gpt_oss")
    source, live = open_gguf(path), open_module(model)
    assert find_difference(dataclasses.replace(source.config, delta_tiled=False), live.config) is None
    np.testing.assert_allclose(
        naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=2e-4 if case == "qwen3_5_moe_text" else 1e-4
    )
    ours, theirs = values_by_module(source), values_by_module(live)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=1e-6, err_msg=name)


def tensors_of(path: Path) -> dict[str, tuple[Any, np.ndarray]]:
    return {tensor.name: (tensor.tensor_type, tensor.data) for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("case", IN_FILES)
def test_file_has_the_tensors_and_keys_of_the_converter(case, kind, tokenizer, tmp_path):
    model = model_of(case, **WIDE)
    export_gguf(save(model, tokenizer, tmp_path / "model"), tmp_path / "ours.gguf", kind)
    theirs = write_gguf(model, tmp_path / "theirs.gguf", {"f32": F32, "q8_0": Q8_0}[kind])
    found, expected = tensors_of(tmp_path / "ours.gguf"), tensors_of(theirs)
    assert found.keys() == expected.keys()
    for name, (tensor_type, data) in expected.items():
        assert found[name][0] == tensor_type, name
        np.testing.assert_array_equal(found[name][1], data, err_msg=name)
    ours, others = (read_gguf(path, "here").metadata for path in (tmp_path / "ours.gguf", theirs))
    expert_keys = [key for key in {*ours, *others} if "expert" in key or "leading_dense" in key]
    if "nemotron" in case:  # llama.cpp knows the router, and reads one group and one shared expert
        expert_keys = [key for key in expert_keys if not key.endswith(("gating_func", "shared_count", "group_count"))]
    assert len(expert_keys) >= 2 and {key: ours.get(key) for key in expert_keys} == {
        key: others.get(key) for key in expert_keys
    }


@pytest.mark.parametrize("case", IN_FILES)
def test_folder_and_file_and_folder(case, tokenizer, tmp_path):
    model, ids = model_of(case), token_ids()
    export_gguf(save(model, tokenizer, tmp_path / "model"), tmp_path / "model.gguf", "f32")
    source = open_gguf(tmp_path / "model.gguf")
    np.testing.assert_allclose(
        naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=2e-4 if case == "qwen3_5_moe_text" else 1e-4
    )
    again, _ = load_gguf_model(tmp_path / "model.gguf")
    assert again.config.model_type in (model.config.model_type, "granitemoeshared")
    again.save_pretrained(tmp_path / "again")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "model"))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        is_sum = ("qwen3_5" in case and "norm" in name) or name.endswith("A_log")
        torch.testing.assert_close(found[name], values, rtol=0, atol=2**-22 if is_sum else 0)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("olmoe-normalised", {"num_key_value_heads": 4}, ("router_normalised", "is True", "would have False")),
        ("olmoe", {"num_key_value_heads": 2}, ("n_kv_heads", "it is 2", "in olmoe it has to be n_heads, 4")),
        ("qwen3_moe", {"norm_topk_prob": False}, ("router_normalised", "is False")),
        ("qwen3_moe-dense", {"attention_bias": False, "norm_topk_prob": True}, ("moe_layers",)),
        ("lfm2_moe", {"routed_scaling_factor": 2.0}, ("router_scale", "is 2.0", "would have 1.0")),
        ("granite4-experts", {}, ("rotary_dim", "it is 0")),
    ],
)
def test_mixtures_that_llama_cpp_lacks_are_refused(case, options, message, tokenizer, tmp_path):
    folder = save(tiny_model(case, vocab_size=N_ROWS, **options), tokenizer, tmp_path / "model")
    assert_raises(
        WhetValueError, ("GGUF cannot express", *message), export_gguf, folder, tmp_path / "model.gguf", "f32"
    )


def test_missing_corrections_are_zeros_in_files(tokenizer, tmp_path):
    model, ids = tiny_model("lfm2_moe", vocab_size=N_ROWS, use_expert_bias=False), token_ids()
    export_gguf(save(model, tokenizer, tmp_path / "model"), tmp_path / "model.gguf", "f32")
    source = open_gguf(tmp_path / "model.gguf")
    assert source.config.router_correction and not values_by_slot(source)["layers.2.router_correction"].any()
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)


def save_mxfp4(tokenizer: Any, path: Path) -> tuple[Any, Path]:
    """Return gpt-oss with random MXFP4 experts, and its folder, which has their blocks and scales as OpenAI's has."""
    model, rng = tiny_model("gpt_oss", vocab_size=N_ROWS, **WIDE), np.random.default_rng(3)
    folder, blocks = save(model, tokenizer, path), {}
    for name, values in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            n_experts, k, n = values.shape
            numbers = torch.from_numpy(rng.integers(0, 256, (n_experts, n, k // 32, 16), np.uint8))
            scales = torch.from_numpy(rng.integers(122, 127, (n_experts, n, k // 32), np.uint8))
            values.copy_(convert_moe_packed_tensors(numbers, scales, dtype=torch.float32))
            blocks |= {name: None, f"{name}_blocks": numbers, f"{name}_scales": scales}

    def change(tensors: dict[str, Any]) -> None:
        tensors.update(blocks)
        for name in [name for name, tensor in tensors.items() if tensor is None]:
            del tensors[name]

    rewrite(folder, change)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return model, folder


def test_mxfp4_experts_of_a_folder_keep_their_numbers(tokenizer, tmp_path):
    model, folder = save_mxfp4(tokenizer, tmp_path / "model")
    source, expected = open_folder(folder), values_by_slot(open_module(model))
    assert {each.format for each in source.slices() if ".experts_" in each.slot and "bias" not in each.slot} == {
        "mxfp4"
    }
    for slot, values in values_by_slot(source).items():
        np.testing.assert_array_equal(values, expected[slot], err_msg=slot)
    np.testing.assert_allclose(naive_logits(source, token_ids()), logits_of(model, token_ids()), rtol=0, atol=1e-4)
    base = pack_base(source)
    assert {base.formats[slot] for slot in base.formats if ".experts_" in slot} == {"mxfp4"}
    for slot in (slot for slot in expected if ".experts_" in slot):
        packed = np.empty_like(expected[slot])
        base.core.rows(slot, 0, len(packed), packed)
        np.testing.assert_array_equal(packed, expected[slot], err_msg=slot)
    export_gguf(folder, tmp_path / "model.gguf", "mxfp4_moe")
    kinds = {name: kind for name, (kind, _) in tensors_of(tmp_path / "model.gguf").items()}
    assert kinds["blk.1.ffn_up_exps.weight"].name == "MXFP4" and kinds["blk.1.attn_q.weight"] == Q8_0
    written = open_gguf(tmp_path / "model.gguf")
    for slot, values in values_by_slot(written).items():
        if ".experts_" in slot:
            np.testing.assert_array_equal(values, expected[slot], err_msg=slot)


def test_mxfp4_blocks_without_scales_are_refused(tokenizer, tmp_path):
    _, folder = save_mxfp4(tokenizer, tmp_path / "model")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    rewrite(folder, lambda tensors: tensors.pop(name))
    assert_raises(WhetValueError, ("down_proj_blocks is (5, 64, 1, 16)", f"{name} ()"), open_folder, folder)
    dense = save(tiny_model("llama", vocab_size=N_ROWS), tokenizer, tmp_path / "dense")
    out, message = tmp_path / "x.gguf", "'mxfp4_moe', and the model is not a mixture"
    assert_raises(WhetValueError, message, export_gguf, dense, out, "mxfp4_moe")


@pytest.mark.parametrize("n_experts", [6, 8])
def test_k_quants_are_mixed_as_by_llama_quantize(n_experts, tokenizer, tmp_path):
    """8 layers: more bits in the first, the last and two others. Models of 8 experts, as Mixtral, have another rule."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    model = tiny_model("qwen3_moe", vocab_size=N_ROWS, num_experts=n_experts, **sizes)
    export_gguf(save(model, tokenizer, tmp_path / "model"), tmp_path / "model.gguf", "q4_k_m")
    found = {name: kind.name for name, (kind, _) in tensors_of(tmp_path / "model.gguf").items()}
    more = [i for i in range(8) if i < 1 or i >= 7 or (i - 1) % 3 == 2]
    for i in range(8):
        few, values = ("Q6_K" if i in more else "Q4_K"), "Q8_0" if n_experts == 8 else None
        kinds = {name: found[f"blk.{i}.{name}.weight"] for name in (
            "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_q", "attn_k", "attn_v",
            "attn_output",
        )}  # fmt: skip
        assert kinds == {
            "ffn_gate_inp": "F32", "ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": few,
            "attn_q": "Q4_K", "attn_k": values or "Q4_K", "attn_v": values or few,
            "attn_output": "Q5_K" if n_experts == 8 else "Q4_K",
        }, i  # fmt: skip


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        ("qwen3_moe", "expert_used_count", 8, ("num_experts_per_tok is 8", "at most num_experts=7")),
        ("qwen3_moe", "expert_gating_func", 2, ("expert_gating_func is 2", "1, softmax, or none")),
        ("qwen3_moe", "expert_weights_norm", False, ("expert_weights_norm is False", "true or none")),
        ("qwen3_moe", "expert_weights_scale", 2.0, ("expert_weights_scale is 2.0",)),
        ("lfm2_moe", "leading_dense_block_count", -1, ("leading_dense_block_count is -1", "at least 1")),
        ("qwen3_moe", "expert_feed_forward_length", 12, ("blk.0.ffn_gate_exps.weight", "(7, 14, 32)", "(7, 12, 32)")),
        ("llama", "expert_count", 2, ("llama.expert_count is 2", "0 or none")),
        ("llama", "expert_gating_func", 2, ("llama.expert_gating_func is 2", "0 or none")),
    ],
)  # fmt: skip
def test_contradictory_keys_are_rejected(case, key, value, message, tmp_path):
    def change(writer: Any) -> None:
        full = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(full, None)
        add = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_int32}[type(value)]
        add(full, value)

    path = write_gguf(tiny_model(case), tmp_path / "model.gguf", change=change)
    assert_raises(WhetValueError, ("open_gguf", *message), open_gguf, path)


@pytest.mark.parametrize("case", ["qwen3_moe", "lfm2_moe", "granite4-experts", "qwen3_5_moe_text"])
def test_adapters_are_of_attention_and_shared_experts(case):
    """PEFT's "all-linear" would add routers and, for the parameters of Qwen3 MoE and OLMoE, experts."""
    model = tiny_model(case)
    source = source_of_config(model.config.to_dict())
    chosen = choose_adapted(source, LoraSettings(2)).factors
    assert all(core_matrix(location.weight) is not None for location, _ in chosen)
    adapted = add_adapters(model, RunConfig(lora_rank=2))
    theirs = {name.partition(".lora_A.")[0] for name, _ in adapted.named_parameters() if ".lora_A." in name}
    assert {location.names[0] for location, _ in chosen} == {name.removeprefix("base_model.model.") for name in theirs}
    assert not any("experts." in name or name.endswith(("gate", "router")) for name in theirs)


def test_adapters_of_a_shared_expert_are_merged(tmp_path):
    model, ids = tiny_model("qwen3_5_moe_text"), token_ids()
    adapted = with_lora(model, b_std=0.1, target_modules=["q_proj", "gate_proj", "down_proj"])
    expected = logits_of(adapted, ids)
    np.testing.assert_allclose(naive_logits(open_module(adapted, merged=True), ids), expected, rtol=0, atol=1e-4)
    assert {each.slot.split(".")[2] for each in open_module(adapted).adapters} == {"qkv", "gate_up", "down"}


def test_active_parameters_of_the_published_models():
    """OLMoE 1B-7B: 6.9 billion parameters, 1.3 of them for a token."""
    config = model_config(
        {
            "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304, "num_experts": 64,
            "num_experts_per_tok": 8, "tie_word_embeddings": False,
        }
    )  # fmt: skip
    assert 6.9e9 < config.n_parameters < 6.93e9 and 1.27e9 < config.n_active_parameters < 1.29e9
    dense = ModelConfig(**{**SIZES, "n_experts": 0, "n_used_experts": 0, "expert_dim": 0})
    assert dense.n_active_parameters == dense.n_parameters


def test_keys_of_hybrids_in_files_of_dense_models_are_read_past(tmp_path):
    """llama.cpp's converter writes them for every Granite 4."""

    def change(writer: Any) -> None:
        writer.add_expert_shared_feed_forward_length(24)
        for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
            getattr(writer, f"add_ssm_{name}")(4)

    model, ids = tiny_model("granite4"), token_ids()
    source = open_gguf(write_gguf(model, tmp_path / "model.gguf", change=change))
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)
