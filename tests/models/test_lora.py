"""Adapters by their settings, or in a folder of PEFT's, against a model of which only the config is known."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tests.raising import assert_raises
from tests.tiny import tiny_llama, with_lora

from whet.errors import CheckpointError, WhetValueError
from whet.models.lora import LoraSettings, choose_adapted, read_adapted
from whet.models.sizes import source_of_config

pytest.importorskip("peft")

SETTINGS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "by name": {"target_modules": ["self_attn.q_proj", "down_proj"]},
    "outer": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "whole": {"target_modules": ["up_proj"], "modules_to_save": ["norm", "lm_head"]},
    "two ranks": {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 5}},
}


def source(**options: Any) -> Any:
    return source_of_config(tiny_llama(**options).config.to_dict())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.")
def test_trained_parameters_match_peft(name, tmp_path):
    settings = SETTINGS[name]
    model = with_lora(tiny_llama(), **settings)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model.save_pretrained(tmp_path)
    read = read_adapted(tmp_path, source(), "test")
    assert read.n_parameters == trained and not read.special
    if "rank_pattern" not in settings:
        layers = settings["target_modules"]
        layers = [layers] if isinstance(layers, str) else layers
        chosen = choose_adapted(source(), LoraSettings(4, layers, settings.get("modules_to_save", ())))
        assert {location.names[0]: rank for location, rank in chosen.factors} == {
            p.names[0]: r for p, r in read.factors
        }
        assert set(chosen.whole) == set(read.whole) and chosen.n_parameters == trained
    assert read.is_separable == (name not in ("outer", "whole"))
    assert read.floats_reason(False) == ("lm_head in modules_to_save" if name == "whole" else "")


def test_features_beyond_lora_are_reported(tmp_path):
    with_lora(tiny_llama(), use_dora=True, target_modules=["q_proj"]).save_pretrained(tmp_path)
    adapted = read_adapted(tmp_path, source(), "test")
    assert adapted.use_dora and adapted.is_separable and not adapted.special
    assert (adapted.floats_reason(True), adapted.floats_reason(False)) == ("use_dora=True", "")
    assert adapted.n_parameters == adapted.n_special + sum(
        rank * sum(location.matrix_shape) for location, rank in adapted.factors
    )
    with_lora(tiny_llama(), trainable_token_indices=[3], target_modules=["q_proj"]).save_pretrained(tmp_path)
    adapted = read_adapted(tmp_path, source(), "test")
    assert adapted.special == adapted.floats_reason(False) == "trainable_token_indices=[3]"
    assert not adapted.is_separable


def test_adapters_of_another_model_are_rejected_by_name_or_shape(tmp_path):
    with_lora(tiny_llama(), target_modules=["q_proj", "up_proj"]).save_pretrained(tmp_path)
    for other, message in (
        ({"num_hidden_layers": 1}, ("no model.layers.1.", "Did you mean model.layers.0")),
        ({"intermediate_size": 48}, ("model.layers.0.mlp.up_proj", (32, 16), (48, 16))),
    ):
        assert_raises(CheckpointError, message, read_adapted, tmp_path, source(**other), "test")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    assert_raises(CheckpointError, ("peft_type is 'IA3'", "'LORA'"), read_adapted, tmp_path, source(), "test")
    assert_raises(CheckpointError, "cannot be read", read_adapted, tmp_path / "nothing", source(), "test")


def test_unknown_layers_and_large_ranks_are_rejected():
    for arguments, message in (
        ((4, ["qproj"]), ("lora_layers", "'qproj'", "Did you mean q_proj")),
        ((4, ["zzz"]), ("'zzz'", "It has embed_tokens, ")),
        ((4, ["norm"]), ("model.norm", "modules_to_save")),
        ((4, ["q_proj"], ["q_proj"]), ("q_proj is in modules_to_save", "adapter")),
        ((17,), ("lora_rank is 17", "model.layers.0.self_attn.q_proj is 16 x 16", "Pass 16")),
    ):
        assert_raises(WhetValueError, message, choose_adapted, source(), LoraSettings(*arguments))
    choose_adapted(source(), LoraSettings(16, ["q_proj"]))
    assert math.isclose(choose_adapted(source(), LoraSettings(8)).n_parameters, 2 * 8 * (2 * 32 + 2 * 24 + 3 * 48))
