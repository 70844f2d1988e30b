"""Folders that transformers 4 and 5 and other users read alike. tests/wide/test_versions.py reads them with both."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.numpy import save_file

pytest.importorskip("transformers")
import numpy as np
from tests.engine.tiny_models import CASES, tiny_config
from tests.tiny import letters_tokenizer, tiny_llama, with_lora
from transformers import AutoConfig

from whet.algorithms import SFT
from whet.checkpoint.unpack import unpack_model
from whet.models.families import model_config
from whet.models.written_folder import complete_folder


def written(folder: Path, config: dict, file: str = "config.json") -> dict:
    (folder / file).write_text(json.dumps(config))
    complete_folder(folder)
    return json.loads((folder / file).read_text())


def test_rotary_settings_are_readable_by_transformers_4(tmp_path):
    plain = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert written(tmp_path, plain) == plain | {"rope_theta": 5e5}
    scaled = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}
    after = written(tmp_path, scaled)
    assert after == scaled | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert written(tmp_path, after) == after
    kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert written(tmp_path, {"text_config": {"rope_parameters": kinds}}) == {
        "text_config": {"rope_parameters": kinds, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    }
    assert written(tmp_path, {"n_embd": 4}) == {"n_embd": 4}


@pytest.mark.parametrize("case", CASES)
def test_the_installed_transformers_reads_the_same_config(case, tmp_path):
    config = tiny_config(case)
    config.save_pretrained(tmp_path)
    complete_folder(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert (
        model_config(again) == model_config(config) == model_config(json.loads((tmp_path / "config.json").read_text()))
    )
    for n in (12, 60):
        assert model_config(again, max_position=n) == model_config(config, max_position=n)


def test_tokenizers_have_the_names_of_transformers_4(tmp_path):
    own = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<x>"]}
    assert written(tmp_path, own, "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<x>"],
    }
    qwen = {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": {"image_token": "<x>"}}
    assert written(tmp_path, qwen, "tokenizer_config.json") == qwen


def test_weights_get_the_default_file_mode(tmp_path):
    for name, mode in (("model.safetensors", 0o600), ("shared.safetensors", 0o640)):
        save_file({"x": np.zeros(2)}, tmp_path / name)
        (tmp_path / name).chmod(mode)
    before = os.umask(0o027)
    try:
        complete_folder(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "shared.safetensors").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "shared.safetensors"]


@pytest.mark.parametrize("adapters", [False, True])
def test_trainers_and_checkpoints_write_compatible_folders(adapters, tmp_path):
    model = with_lora(tiny_llama()) if adapters else tiny_llama()
    trainer = SFT(model, tokenizer=letters_tokenizer(), compute="torch")
    trainer.save_pretrained(tmp_path / "saved")
    trainer.save(tmp_path / "checkpoint")
    (tmp_path / "unpacked").mkdir()
    unpack_model(tmp_path / "checkpoint", tmp_path / "unpacked")
    tokenizer = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    for folder in (tmp_path / "saved", tmp_path / "unpacked"):
        [weights] = folder.glob("*.safetensors")
        assert weights.stat().st_mode == (folder / ("adapter_" * adapters + "config.json")).stat().st_mode
        if not adapters:
            assert json.loads((folder / "config.json").read_text())["rope_theta"] == 10000.0
