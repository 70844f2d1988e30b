"""Layers of different sizes, shared keys and values, and inputs by token (Gemma 4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.engine.tiny_models import logits_of, naive_logits, tiny_config, tiny_model, token_ids
from tests.gguf_files import F32, Q8_0, write_gguf
from tests.raising import assert_raises
from tests.tiny import with_lora
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from whet import Engine
from whet.errors import WhetError, WhetValueError
from whet.models.architecture import TABLE_SLOT
from whet.models.export import export_gguf
from whet.models.families import model_config
from whet.models.lora import LoraSettings, choose_adapted, read_adapted
from whet.models.packed_base import pack_base
from whet.models.reference import slice_values
from whet.models.sizes import cache_bytes
from whet.models.sources.folder import open_folder
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import read_gguf
from whet.models.sources.live import open_module
from whet.models.tokenizers import read_tokenizer


def save(model: Any, folder: Path, **tensors: np.ndarray) -> Path:
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})
    return folder


def test_sizes_of_layers():
    config = open_module(tiny_model("gemma4")).config
    assert [config.layer_head_dim(i) for i in range(7)] == [8, 8, 12, 8, 8, 8, 12]
    assert [config.kv_layer(i) for i in range(7)] == [0, 1, 2, 3, 3, 3, 2]
    assert [config.mlp_dim(i) for i in range(7)] == [40] * 4 + [80] * 3
    assert config.part_sizes(2) == {"q": 48, "k": 24, "v": 24} and config.part_sizes(6) == {"q": 48, "k": 0, "v": 0}


def test_pages_have_no_keys_of_layers_that_read_others():
    own, shared = (open_module(tiny_model("gemma4", num_kv_shared_layers=n)).config for n in (0, 3))
    sizes = [cache_bytes(config, "float32", 1, 0) for config in (own, shared)]
    heads = [[config.layer_head_dim(i) for i in range(7) if config.kv_layer(i) == i] for config in (own, shared)]
    # Keys are not padded, and values to a multiple of 16 numbers.
    assert sizes == [64 * 2 * 4 * sum(d + -(-d // 16) * 16 for d in each) for each in heads]


def test_files_may_have_keys_that_no_layer_reads(tmp_path):
    model, ids = tiny_model("gemma4"), token_ids()
    unread = {
        f"model.layers.{i}.self_attn.{name}.weight": np.full(shape, np.nan, np.float32)
        for i in (4, 5)
        for name, shape in (("k_proj", (16, 32)), ("v_proj", (16, 32)), ("k_norm", (8,)))
    }
    source = open_folder(save(model, tmp_path, **unread))
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)
    extra = {f"blk.4.attn_{name}.weight": np.ones((16, 32), np.float32) for name in "kv"}
    open_gguf(write_gguf(model, tmp_path / "model.gguf", extra=extra))
    wrong = {"model.layers.0.self_attn.v_norm.weight": np.ones(8, np.float32)}
    assert_raises(WhetValueError, "has no model.layers.0.self_attn.v_norm", open_folder, save(model, tmp_path, **wrong))


@pytest.mark.parametrize("kind", [F32, Q8_0])
def test_the_table_is_read_from_the_file(kind, tmp_path):
    """The table of a file is not in the engine's memory, and its rows are exact; a live module's is copied."""
    model, ids = tiny_model("gemma4", hidden_size_per_layer_input=32), token_ids()[0].tolist()
    kinds = {"model.embed_tokens_per_layer.weight": kind}
    source = open_gguf(write_gguf(model, tmp_path / "model.gguf", lambda name: kinds.get(name, F32)))
    base, table = pack_base(source, weights="float32"), TABLE_SLOT
    copied = pack_base(open_module(model), weights="float32")
    size = np.prod(source.config.slots()[table])
    assert copied.nbytes - base.nbytes == 4 * size
    [rows] = [each for each in source.slices() if each.slot == table]
    numbers = slice_values(rows)
    found = base.gather("model.embed_tokens_per_layer", np.array([5, 0, 5]), np.empty((3, 32 * 7), np.float32))
    np.testing.assert_array_equal(found, numbers[[5, 0, 5]])
    if kind == F32:
        logits = [Engine(each, weights=None).logits(ids) for each in (base.source(), copied.source())]
        np.testing.assert_array_equal(*logits)
        assert base.digest() == copied.digest()
        model.model.embed_tokens_per_layer.weight.data[0] += 1
        assert pack_base(open_module(model), weights="float32").digest() != base.digest()


def test_changed_tables_of_modules_reach_the_engine_by_sync():
    model, ids = tiny_model("gemma4"), token_ids()[0].tolist()
    with Engine.from_model(model, weights="float32") as engine:
        before = engine.logits(ids)
        model.model.embed_tokens_per_layer.weight.data.mul_(-1)
        np.testing.assert_array_equal(engine.logits(ids), before)
        engine.sync(model)
        with Engine.from_model(model, weights="float32") as other:
            np.testing.assert_array_equal(engine.logits(ids), other.logits(ids))
        assert np.abs(engine.logits(ids) - before).max() > 0.1


@pytest.mark.parametrize("weights", ["float32", "q8_0"])
def test_adapters_of_all_linear_layers_are_separate(weights, tmp_path):
    """Also of the projection of the layers' inputs, which belongs to no layer, and which ours omits."""
    model, ids = tiny_model("gemma4"), token_ids()[0].tolist()
    source = open_module(model)
    chosen = choose_adapted(source, LoraSettings(2, ["all-linear", "per_layer_model_projection"]))
    adapted = with_lora(tiny_model("gemma4"), b_std=0.2, r=2, target_modules="all-linear").eval()
    adapted.save_pretrained(tmp_path)
    read = read_adapted(tmp_path, source, "here")
    assert read.is_separable and set(read.factors) == set(chosen.factors)
    ours = choose_adapted(source, LoraSettings(2))
    assert set(chosen.factors) - set(ours.factors) == {
        each for each in read.factors if each[0].names[0] == "model.per_layer_model_projection"
    }
    with (
        Engine.from_model(model, weights=weights) as engine,
        Engine.from_model(adapted, weights=weights) as separate,
        Engine.from_model(adapted, weights="float32", merge_adapters=True) as merged,
    ):
        plain, found = engine.logits(ids), engine.logits(ids, adapter=engine.add_adapter(tmp_path))
        np.testing.assert_array_equal(engine.logits(ids), plain)
        np.testing.assert_array_equal(separate.logits(ids), found)
        expected = logits_of(adapted, token_ids()[:1])
        np.testing.assert_allclose(merged.logits(ids), expected, rtol=0, atol=1e-4)
        # Rounded weights change most the rows whose values are almost 0 before their norm.
        assert np.abs(found - expected).mean() < 0.1 * np.abs(expected - plain).mean()
        if weights == "float32":
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_rows_of_the_table_with_nan_are_refused_when_they_are_read(tmp_path):
    model = tiny_model("gemma4")
    model.model.embed_tokens_per_layer.weight.data[7, 3] = np.nan
    assert_raises(WhetValueError, ("layer_embedding", "NaN or infinity"), Engine.from_model, model)
    with Engine.from_pretrained(save(model, tmp_path)) as engine:
        engine.logits([1, 2, 3])
        assert_raises((WhetError, RuntimeError), "NaN or infinity", engine.logits, [1, 7, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_k_eq_v": True}, ("attention_k_eq_v is True", "does not support")),
        ({"enable_moe_block": True, "num_experts": 8}, ("enable_moe_block is True", "does not support")),
        ({"vocab_size_per_layer_input": 40}, ("vocab_size_per_layer_input is 40", "vocab_size=48")),
        (
            {"layer_types": ["full_attention", *["sliding_attention"] * 6], "per_layer_config": None},
            ("layer_types", "in the last layer"),
        ),
        ({"num_kv_shared_layers": 7}, ("num_kv_shared_layers is 7",)),
        ({"num_kv_shared_layers": (1 << 31) - 1}, ("num_kv_shared_layers is 2147483647", "num_hidden_layers=7")),
        ({"num_kv_shared_layers": 5}, ("n_shared_kv_layers is 5", "no layer has their keys and values")),
        ({"per_layer_config": {"2": {"head_dim": 12}}}, ("per_layer_config", "one head_dim of all layers")),
        ({"per_layer_config": {i: {"head_dim": 12, "num_key_value_heads": 1} for i in "26"}}, ("per_layer_config",)),
        ({"use_bidirectional_attention": "all"}, ("use_bidirectional_attention is 'all'",)),
        ({"hidden_size_per_layer_input": -1}, ("hidden_size_per_layer_input is -1",)),
    ],
)
def test_variants_that_are_not_run_are_refused(change, message):
    given = json.loads(tiny_config("gemma4").to_json_string())
    assert_raises(WhetValueError, message, model_config, {**given, **change})


def test_head_sizes_of_older_configs():
    given = json.loads(tiny_config("gemma4").to_json_string())
    older = {**given, "global_head_dim": 12}
    del older["per_layer_config"]
    assert model_config(older) == model_config(given)
    assert_raises(
        WhetValueError,
        "per_layer_config",
        model_config,
        {**tiny_config("llama").to_dict(), "per_layer_config": {"0": {}}},
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("feed_forward_length", [40] * 6 + [80], ("feed_forward_length", "twice that")),
        ("attention.value_length_swa", 12, ("value_length_swa is 12", "key_length_swa=8")),
        ("attention.shared_kv_layers", -1, ("shared_kv_layers is -1", "at least 0")),
        ("embedding_length_per_layer_input", 5, ("per_layer_token_embd", "(48, 42)")),
    ],
)
def test_invalid_sizes_in_files_are_refused(key, value, message, tmp_path):
    def change(writer: Any) -> None:
        writer.kv_data[0].pop(f"gemma4.{key}")
        (writer.add_array if isinstance(value, list) else writer.add_int32)(f"gemma4.{key}", value)

    path = write_gguf(tiny_model("gemma4"), tmp_path / "model.gguf", change=change)
    assert_raises(WhetValueError, message, open_gguf, path)


@pytest.mark.parametrize("key", ["attention.key_length_swa", "attention.shared_kv_layers"])
def test_sizes_of_layers_in_other_architectures_are_refused(key, tmp_path):
    path = write_gguf(tiny_model("llama"), tmp_path / "model.gguf", change=lambda w: w.add_uint32(f"llama.{key}", 3))
    assert_raises(WhetValueError, (key, "is 3", "or none"), open_gguf, path)


def test_tokenizers_keep_their_merges_in_files(tmp_path):
    """BPE over characters with the pre-tokenizer of Gemma, which llama.cpp reads with merges as "gemma4"."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["the cat and the hat\tare there", "def of(x): return x"] * 3, trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:5]
    steps = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    made["decoder"] = json.loads(steps.__getstate__())
    folder = save(tiny_model("gemma4", vocab_size=400), tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    export_gguf(folder, tmp_path / "model.gguf", "f32")
    metadata = read_gguf(tmp_path / "model.gguf", "test").metadata
    assert metadata["tokenizer.ggml.model"] == "gemma4"
    assert len(metadata["tokenizer.ggml.merges"]) == len(made["model"]["merges"]) > 20
    found, text = read_tokenizer(tmp_path / "model.gguf"), "the  cat's\n\nhat \u00e9<turn|>\n x"
    assert found.encode(text, add_special_tokens=False) == Tokenizer.from_str(json.dumps(made)).encode(text).ids
