"""Models whose layers are each a mixer, an MLP or a mixture of experts: their options, their files, and Mamba-2's least
step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.engine.tiny_models import logits_of, naive_logits, tiny_config, tiny_model, token_ids
from tests.gguf_files import write_gguf
from tests.models.test_export import N_ROWS, save, tokenizer
from tests.raising import assert_raises

from whet.cli import main
from whet.errors import WhetValueError
from whet.models.architecture import ModelConfig
from whet.models.export import export_gguf
from whet.models.families import model_config
from whet.models.sizes import source_of_config
from whet.models.sources.gguf import open_gguf
from whet.models.sources.live import open_module

__all__ = ["tokenizer"]
CASE = "nemotron_h-groups"
NANO = {
    "model_type": "nemotron_h", "num_hidden_layers": 52, "hidden_size": 2688, "vocab_size": 131072,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
    "mamba_head_dim": 64, "n_groups": 8,
    "ssm_state_size": 128, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "intermediate_size": 1856, "routed_scaling_factor": 2.5,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}  # fmt: skip


def config_of(case: str, **options: Any) -> ModelConfig:
    return model_config({**tiny_config(case).to_dict(), **options})


def test_sizes_of_the_published_model():
    """Nemotron 3 Nano 30B-A3B: 23 layers of Mamba-2, 23 mixtures and 6 of attention."""
    config = model_config(NANO)
    kinds = [config.mixer(i) for i in range(config.n_layers)]
    assert [kinds.count(kind) for kind in ("mamba", "none", "attention")] == [23, 23, 6]
    assert 31.5e9 < config.n_parameters < 31.7e9 and 3e9 < config.n_active_parameters < 3.7e9
    assert config.slots()["layers.1.experts_up"] == (128 * 1856, 2688)
    assert source_of_config(NANO).targets["model.layers.1.mixer.shared_experts.up_proj"].shape == (3712, 2688)


def test_kinds_of_older_configs():
    config = config_of(CASE)
    given = tiny_config(CASE).to_dict()
    kinds = given.pop("layers_block_type")
    assert model_config({**given, "hybrid_override_pattern": "*M-M", "num_hidden_layers": 9}) == config
    assert model_config({**given, "layers_block_type": ["attention", "mamba", "mlp", "mamba"]}) == config
    assert model_config({**given, "layer_types": kinds}) == config
    older = {"mamba_n_groups": given.pop("n_groups"), "mamba_d_conv": given.pop("conv_kernel"), "mamba_dt_min": 0.5}
    assert model_config({**given, **older, "layer_types": kinds}).delta_step_min == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers_block_type": ["mamba", "conv"]}, ("layers_block_type is", "linear_attention, full_attention, mlp")),
        ({"layers_block_type": []}, ("layers_block_type is []", "a list of layers' kinds")),
        ({"layers_block_type": 3}, ("layers_block_type is 3", "a list of layers' kinds")),
        ({"layers_block_type": None, "hybrid_override_pattern": "M*X"}, ("layers_block_type is ['M', '*', 'X']",)),
        ({"use_bias": True}, "use_bias is True"),
        ({"use_conv_bias": False}, "use_conv_bias is False"),
        ({"mamba_hidden_act": "gelu"}, ("mamba_hidden_act is 'gelu'", "expected 'silu'")),
        ({"n_group": 2}, "n_group is 2"),
        ({"moe_latent_size": 64}, "moe_latent_size is 64"),
        ({"time_step_min": -0.1}, "delta_step_min is -0.1"),
        ({"time_step_min": "0"}, ("time_step_min is '0'", "a finite number")),
    ],
)
def test_options_are_checked(options, message):
    assert_raises(WhetValueError, message, config_of, CASE, **options)


def test_layers_without_any_part_are_rejected():
    sizes = {
        "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 4, "hidden_dim": 8, "ffn_dim": 8, "vocab_size": 5,
        "max_position": 8, "norm": "rms", "norm_eps": 1e-5, "windows": (0, 0), "attention_scale": 1.0,
    }  # fmt: skip
    for options, message in [
        ({"mixers": ("none", "attention"), "ffn_dims": (0, 8)}, "a mixer or an MLP in layer 0"),
        ({"mixers": ("none", "attention"), "parallel_residual": True}, "a mixer and an MLP in each layer"),
        ({"ffn_dims": (0, 8), "layer_scale": True}, "a mixer and an MLP in each layer"),
        ({"delta_step_min": 0.1}, ("delta_step_min is 0.1", "0 without layers of mamba")),
    ]:
        assert_raises(WhetValueError, message, ModelConfig, **{**sizes, **options})


def test_steps_have_a_lower_bound():
    """The logits with it are transformers', and others than without it."""
    bounded, plain, ids = tiny_model("nemotron_h"), tiny_model("nemotron_h", time_step_min=1e-30), token_ids()
    with_bound, without = (naive_logits(open_module(model), ids) for model in (bounded, plain))
    np.testing.assert_allclose(with_bound, logits_of(bounded, ids), rtol=0, atol=1e-4)
    assert np.abs(with_bound - without).max() > 0.1


def test_exported_files_have_no_lower_bound(tokenizer, tmp_path, capsys):
    folder = save(tiny_model("nemotron_h", vocab_size=N_ROWS), tokenizer, tmp_path / "model")
    note = export_gguf(folder, tmp_path / "file.gguf", "f32").note
    assert "at least 0.6" in note and "time_step_min" in note
    plain, ids = tiny_model("nemotron_h", vocab_size=N_ROWS, time_step_min=1e-30), token_ids()
    np.testing.assert_allclose(
        naive_logits(open_gguf(tmp_path / "file.gguf"), ids), logits_of(plain, ids), rtol=0, atol=1e-4
    )
    assert main(["export", str(folder), str(tmp_path / "compared.gguf"), "--quantize", "f32"]) == 0
    assert "time_step_min" in capsys.readouterr().err


@pytest.mark.parametrize("case", [CASE, "nemotron_h-experts"])
def test_blocks_that_predict_tokens_follow_the_layers_of_a_file(case, tmp_path):
    """The last block attends and has an MLP or a mixture."""
    model, ids = tiny_model(case), token_ids()
    n, width = model.config.num_hidden_layers, model.config.moe_intermediate_size
    width = width if "experts" in case else model.config.intermediate_size
    kinds, n_kv = model.config.layer_types, model.config.num_key_value_heads

    def change(writer: Any) -> None:
        for name in ("block_count", "feed_forward_length", "attention.head_count_kv"):
            del writer.kv_data[0][f"{writer.arch}.{name}"]
        writer.add_block_count(n + 1)
        writer.add_feed_forward_length([*(width * (kind in ("mlp", "moe")) for kind in kinds), width])
        writer.add_head_count_kv([*(n_kv * (kind == "full_attention") for kind in kinds), n_kv])
        writer.add_nextn_predict_layers(1)

    extra = {f"blk.{n}.nextn.eh_proj.weight": np.ones((2, 3), np.float32)}
    source = open_gguf(write_gguf(model, tmp_path / "model.gguf", change=change, extra=extra))
    assert source.config == open_gguf(write_gguf(model, tmp_path / "plain.gguf")).config
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("feed_forward_length", 22, ("feed_forward_length is 22", "a number for each of 4 layers")),
        ("feed_forward_length", [0, 0, 22], ("feed_forward_length is", "a number for each of 4 layers")),
        ("feed_forward_length", [8, 0, 22, 0], ("feed_forward_length is", "the same in all layers")),
        ("moe_latent_size", 64, "option nemotron_h.moe_latent_size is not supported"),
        ("expert_group_count", 2, "nemotron_h.expert_group_count is 2, expected 1"),
        ("ssm.inner_size", 41, ("ssm.inner_size is 41", "a multiple of ssm.time_step_rank=4")),
    ],
)
def test_options_of_files_are_checked(name, value, message, tmp_path):
    def change(writer: Any) -> None:
        writer.kv_data[0].pop(key := f"{writer.arch}.{name}", None)
        kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else gguf.GGUFValueType.UINT32
        writer.add_key_value(key, value, kind)

    path: Path = write_gguf(tiny_model(CASE), tmp_path / "model.gguf", change=change)
    assert_raises(WhetValueError, message, open_gguf, path)
