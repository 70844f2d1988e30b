"""Qwen3.5's value heads, grouped in folders and adapters and tiled in GGUF files, and its blocks for further tokens."""

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
from tests.engine.tiny_models import logits_of, naive_logits, tiny_model, token_ids
from tests.gguf_files import F32, Q8_0, as_tiled, values_by_module, write_gguf
from tests.models.test_export import N_ROWS, save, tokenizer
from tests.raising import assert_raises
from tests.tiny import with_lora

from whet.errors import WhetValueError
from whet.learner.trained import TrainedAdapter
from whet.models.export import export_gguf, read_adapters
from whet.models.export_adapters import export_adapters
from whet.models.families import FAMILIES, model_config
from whet.models.packed_base import pack_base
from whet.models.row_reader import RowReader
from whet.models.slots import group_heads, tile_heads
from whet.models.sources.folder import open_folder
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import read_gguf
from whet.models.sources.gguf_model import load_gguf_model
from whet.models.sources.live import open_module
from whet.models.written_folder import copy_predicting

__all__ = ["tokenizer"]
CASE = "qwen3_5_text"
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""Sizes whose rows are multiples of Q8_0's blocks, also per head."""
TARGETS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "o_proj", "down_proj"]


def placed(order: Any, config: Any, rows: list[str]) -> list[str]:
    found = [""] * len(rows)
    for first, view in order(config, np.array(rows)):
        found[first : first + len(view)] = view
    return found


def test_orders_of_value_heads():
    """Four heads on two key heads a and b, of two rows after two of queries and keys."""
    grouped = dataclasses.replace(
        open_module(tiny_model(CASE)).config, n_delta_heads=4, n_delta_key_heads=2, delta_dim=2, delta_key_dim=1
    )
    tiled = dataclasses.replace(grouped, delta_tiled=True)
    by_key = ["qk", "qk", "a0", "a0", "a1", "a1", "b0", "b0", "b1", "b1"]
    by_copy = ["qk", "qk", "a0", "a0", "b0", "b0", "a1", "a1", "b1", "b1"]
    assert placed(group_heads, tiled, by_key) == by_copy and placed(tile_heads, grouped, by_copy) == by_key
    assert placed(group_heads, grouped, by_key) == by_key and placed(tile_heads, tiled, by_copy) == by_copy
    assert placed(tile_heads, grouped, ["a0", "b0", "a1", "b1"]) == ["a0", "a1", "b0", "b1"]


@pytest.mark.parametrize("n_heads", [3, 6, 9])
def test_folder_and_file_and_folder(n_heads, tokenizer, tmp_path):
    model, ids = tiny_model(CASE, vocab_size=N_ROWS, linear_num_value_heads=n_heads), token_ids()
    export_gguf(save(model, tokenizer, tmp_path / "model"), tmp_path / "model.gguf", "f32")
    source = open_gguf(tmp_path / "model.gguf")
    assert source.config.delta_tiled == (n_heads != 3)
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)
    again, _ = load_gguf_model(tmp_path / "model.gguf")
    assert again.config.rope_parameters["mrope_section"] == [1, 1, 1]
    again.save_pretrained(tmp_path / "again")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "model"))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        is_sum = "norm" in name and "linear_attn" not in name
        bound = 2**-23 if name.endswith("A_log") or is_sum else 0
        torch.testing.assert_close(found[name], values, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_file_has_the_bytes_of_the_converter(kind, tokenizer, tmp_path):
    """Heads are reordered before rows are quantised."""
    model = tiny_model(CASE, vocab_size=N_ROWS, **WIDE)
    export_gguf(save(model, tokenizer, tmp_path / "model"), tmp_path / "ours.gguf", kind)
    theirs = write_gguf(model, tmp_path / "theirs.gguf", {"f32": F32, "q8_0": Q8_0}[kind])
    found, expected = (
        {tensor.name: (tensor.tensor_type, tensor.data) for tensor in gguf.GGUFReader(path).tensors}
        for path in (tmp_path / "ours.gguf", theirs)
    )
    assert found.keys() == expected.keys()
    for name, (tensor_type, data) in expected.items():
        assert found[name][0] == tensor_type, name
        np.testing.assert_array_equal(found[name][1], data, err_msg=name)


def test_packed_rows_of_a_file_are_the_modules(tmp_path):
    """Rows and parameters on a packed base have Hugging Face's order, and A_log is the logarithm of the decay."""
    model = tiny_model(CASE)
    base = pack_base(open_gguf(write_gguf(model, tmp_path / "model.gguf")), weights="float32")
    assert base.config.delta_tiled
    parameters = dict(model.named_parameters())
    for name, location in base.targets.items():
        whole = parameters.get(f"{name}.weight" if location.module.parameter == "weight" else name)
        if whole is not None:
            values = whole.reshape(location.shape[::-1]).T if location.module.transposed else whole
            bound = 0 if location.module.is_stored else 2**-23
            torch.testing.assert_close(base.rows(name, torch.empty(location.shape)), values, rtol=0, atol=bound)


def test_adapters_of_a_file_are_as_in_the_folder(tokenizer, tmp_path):
    model, ids = tiny_model(CASE, vocab_size=N_ROWS), token_ids()
    path = write_gguf(model, tmp_path / "model.gguf")
    folder = save(model, tokenizer, tmp_path / "model")
    adapted = with_lora(model, b_std=0.3, target_modules=TARGETS)
    adapted.save_pretrained(tmp_path / "lora", save_embedding_layers=False)
    for i, base in enumerate((folder, path)):
        source = (open_folder if base is folder else open_gguf)(base)
        adapters = read_adapters(tmp_path / "lora", source, "here")
        rows = RowReader(source._replace(adapters=tuple(adapters)), "here")
        merged = {slot: rows.values(slot, np.arange(shape[0])) for slot, shape in source.config.slots().items()}
        slices = [s._replace(tensor=merged[s.slot], format="float32", first_row=0) for s in source.slices()]
        found = naive_logits(source._replace(slices=lambda slices=slices: iter(slices)), ids)
        np.testing.assert_allclose(found, logits_of(adapted, ids), rtol=0, atol=1e-4)
        export_adapters(base, tmp_path / f"{i}.gguf", adapters, name="one")
    assert (tmp_path / "0.gguf").read_bytes() == (tmp_path / "1.gguf").read_bytes()
    exported = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "0.gguf").tensors}
    factors = {name: p.detach().numpy() for name, p in adapted.named_parameters() if ".lora_" in name}
    prefix = "base_model.model.model.layers.0.linear_attn"
    a, b = factors[f"{prefix}.out_proj.lora_A.default.weight"], factors[f"{prefix}.in_proj_qkv.lora_B.default.weight"]
    found = exported["blk.0.ssm_out.weight.lora_a"]
    np.testing.assert_array_equal(found, as_tiled(model.config, "x.out_proj.x", a))
    np.testing.assert_array_equal(exported["blk.0.attn_qkv.weight.lora_b"], as_tiled(model.config, "", b))


def test_trained_adapters_are_saved_as_in_the_folder(tmp_path):
    model = tiny_model(CASE)
    source, rng = open_gguf(write_gguf(model, tmp_path / "model.gguf")), np.random.default_rng(0)
    for name in ("model.layers.0.linear_attn.in_proj_z", "model.layers.0.linear_attn.out_proj"):
        location = source.targets[name]
        adapter = TrainedAdapter(location, 2, 4.0, rng, source.config)
        n, k = location.shape
        a, b = rng.standard_normal((2, k)).astype(np.float32), rng.standard_normal((n, 2)).astype(np.float32)
        arrays = adapter.from_module(a, b)
        stored = as_tiled(model.config, f"{name}.weight", b @ a)
        np.testing.assert_allclose(arrays[1].T @ arrays[0], stored, rtol=0, atol=1e-6)
        for found, given in zip(adapter.to_module(*arrays), (a, b), strict=True):
            np.testing.assert_array_equal(found, given)


def with_predicting(folder: Path) -> dict[str, torch.Tensor]:
    """Add tensors that predict further tokens to a folder's file, and return them."""
    tensors = load_file(folder / "model.safetensors")
    more = {"mtp.fc.weight": torch.arange(6.0).reshape(2, 3).bfloat16(), "mtp.norm.weight": torch.ones(3)}
    save_file({**tensors, **more}, folder / "model.safetensors", {"format": "pt"})
    return more


@pytest.mark.parametrize("case", [CASE, "qwen3_5-vision"])
@pytest.mark.parametrize("shards", [1, 3])
def test_blocks_for_further_tokens_are_skipped_and_kept(case, shards, tmp_path):
    import transformers

    from whet.nn.modules import auto_class

    model, ids = tiny_model(case), token_ids()
    model.save_pretrained(tmp_path / "model")
    more = with_predicting(tmp_path / "model")
    with pytest.warns(UserWarning, match="not read"):
        source = open_folder(tmp_path / "model")
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)
    size = {} if shards == 1 else {"max_shard_size": sum(p.nbytes for p in model.parameters()) // shards}
    model.save_pretrained(tmp_path / "written", **size)
    copy_predicting(tmp_path / "model", tmp_path / "written")
    with pytest.warns(UserWarning, match="mtp|visual"):
        written = open_folder(tmp_path / "written")
    ours, theirs = values_by_module(written), values_by_module(source)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    found = load_file(tmp_path / "written" / "model-mtp.safetensors")
    assert found.keys() == more.keys() and all(torch.equal(found[name], more[name]) for name in more)
    assert found["mtp.fc.weight"].dtype == torch.bfloat16
    index = json.loads((tmp_path / "written" / "model.safetensors.index.json").read_text())
    assert {name for name in index["weight_map"] if name.startswith("mtp.")} == more.keys()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "written")
    again = auto_class(config).from_pretrained(tmp_path / "written")
    np.testing.assert_array_equal(logits_of(again, ids), logits_of(model, ids))


def test_other_folders_are_written_without_an_index(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    copy_predicting(tmp_path / "model", tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} >= {"model.safetensors"}
    assert not list((tmp_path / "model").glob("*.index.json"))


def predicting(writer: Any) -> None:
    """A block after the layers, as converters write it."""
    writer.add_block_count(4)
    writer.add_nextn_predict_layers(1)
    flags = [True, False, True, False]
    writer.kv_data[0].pop("qwen35.attention.recurrent_layers", None)
    writer.add_array("qwen35.attention.recurrent_layers", flags)


BLOCK = {"blk.3.nextn.eh_proj.weight": np.ones((2, 3), np.float32), "blk.3.attn_norm.weight": np.ones(5, np.float32)}


def test_blocks_of_a_file_are_read_past_and_kept(tmp_path):
    model, ids = tiny_model(CASE, vocab_size=N_ROWS), token_ids()
    path = write_gguf(model, tmp_path / "model.gguf", change=predicting, extra=BLOCK)
    source = open_gguf(path)
    assert source.config.n_layers == 3
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)
    export_gguf(path, tmp_path / "again.gguf", "f16")
    again = read_gguf(tmp_path / "again.gguf", "here")
    assert again.metadata["qwen35.nextn_predict_layers"] == 1
    assert all(np.array_equal(again.tensors[name].tensor, values) for name, values in BLOCK.items())
    assert open_gguf(tmp_path / "again.gguf").config == source.config


def add_block(folder: Path, layer: str, model: Any) -> dict[str, torch.Tensor]:
    """Add a block with the weights of a layer with attention to a folder, and return its other tensors."""
    d, like = model.config.get_text_config().hidden_size, load_file(folder / "model.safetensors")
    more = {"mtp.fc.weight": torch.randn(d, 2 * d)}
    more |= {f"mtp.{name}.weight": torch.randn(d) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    copies = {name.replace(layer, "mtp.layers.0."): x.clone() for name, x in like.items() if name.startswith(layer)}
    save_file({**like, **more, **copies}, folder / "model.safetensors", {"format": "pt"})
    return more


@pytest.mark.parametrize(
    ("case", "prefix", "kind"),
    [
        (CASE, "model", "q8_0"),
        ("qwen3_5-vision", "model.language_model", "f32"),
        ("qwen3_5_moe_text", "model", "f32"),
    ],
)
def test_the_block_of_a_folder_is_a_files_last_block(case, prefix, kind, tokenizer, tmp_path):
    """A block with the weights of layer i is written as block i."""
    sizes = WIDE if kind == "q8_0" else {}
    model, ids = tiny_model(case, vocab_size=N_ROWS, **sizes), token_ids()
    i = model.config.get_text_config().layer_types.index("full_attention")
    folder = save(model, tokenizer, tmp_path / "model")
    more = add_block(folder, f"{prefix}.layers.{i}.", model)
    with pytest.warns(UserWarning, match="not read"):
        export_gguf(folder, tmp_path / "model.gguf", kind)
    file = read_gguf(tmp_path / "model.gguf", "here")
    arch, n = file.metadata["general.architecture"], model.config.get_text_config().num_hidden_layers
    assert file.metadata[f"{arch}.nextn_predict_layers"] == 1 and file.metadata[f"{arch}.block_count"] == n + 1
    assert list(file.metadata[f"{arch}.attention.recurrent_layers"])[i :: n - i] == [False, False]
    block = {name: tensor for name, tensor in file.tensors.items() if name.startswith(f"blk.{n}.")}
    kinds, known = gguf.MODEL_TENSOR, gguf.TENSOR_NAMES
    for ours, theirs in (
        ("fc", kinds.NEXTN_EH_PROJ),
        ("pre_fc_norm_embedding", kinds.NEXTN_ENORM),
        ("pre_fc_norm_hidden", kinds.NEXTN_HNORM),
        ("norm", kinds.NEXTN_SHARED_HEAD_NORM),
    ):
        values = more[f"mtp.{ours}.weight"].numpy()
        found = block.pop(f"{known[theirs].format(bid=n)}.weight")
        assert found.format == ("float32" if values.ndim == 1 else {"f32": "float32"}.get(kind, kind))
        if found.format == "float32":
            np.testing.assert_array_equal(found.tensor, values + (values.ndim == 1))
    like = {name: tensor for name, tensor in file.tensors.items() if name.startswith(f"blk.{i}.")}
    assert [name.replace(f"blk.{n}.", f"blk.{i}.") for name in block] == list(like)
    for tensor, expected in zip(block.values(), like.values(), strict=True):
        assert tensor.format == expected.format
        np.testing.assert_array_equal(tensor.tensor, expected.tensor)
    if kind == "f32":
        source = open_gguf(tmp_path / "model.gguf")
        np.testing.assert_allclose(
            naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=2e-4 if case == "qwen3_5_moe_text" else 1e-4
        )


def test_layers_by_interval(tmp_path):
    """Files of older converters have no list of layers."""
    model = tiny_model(CASE, num_hidden_layers=5, layer_types=None)

    def change(writer: Any) -> None:
        del writer.kv_data[0]["qwen35.attention.recurrent_layers"]

    source = open_gguf(write_gguf(model, tmp_path / "model.gguf", change=change))
    assert source.config.mixers == ("delta", "delta", "delta", "attention", "delta")


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        (CASE, "ssm.inner_size", 61, ("ssm.inner_size is 61", "a multiple of ssm.time_step_rank=6")),
        (CASE, "ssm.group_count", 0, ("ssm.group_count is 0", "at least 1")),
        (CASE, "ssm.group_count", 4, ("n_delta_heads is 6", "a multiple of n_delta_key_heads=4")),
        (CASE, "nextn_predict_layers", 3, ("nextn_predict_layers is 3", "below block_count=3")),
        (CASE, "attention.recurrent_layers", [True], ("recurrent_layers is [True]", "3 of true and false")),
        (CASE, "full_attention_interval", 0, ("full_attention_interval is 0", "at least 1")),
        ("llama", "ssm.state_size", 8, ("llama.ssm.state_size is 8", "expected none")),
        ("llama", "attention.recurrent_layers", [True], ("recurrent_layers is [True]", "expected none")),
    ],
)
def test_contradictory_keys_are_rejected(name, key, value, message, tmp_path):
    def change(writer: Any) -> None:
        full = f"{writer.arch}.{key}"
        writer.kv_data[0].pop(full, None)
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(full, value)

    path = write_gguf(tiny_model(name), tmp_path / "model.gguf", change=change)
    assert_raises(WhetValueError, ("open_gguf", *message), open_gguf, path)


def test_sizes_that_llama_cpp_lacks_are_refused(tokenizer, tmp_path):
    folder = save(tiny_model(CASE, vocab_size=N_ROWS, linear_value_head_dim=8), tokenizer, tmp_path / "model")
    message = ("GGUF cannot express", "keys have 10 numbers and its values 8")
    assert_raises(WhetValueError, message, export_gguf, folder, tmp_path / "model.gguf", "f32")


def test_sizes_of_the_published_models():
    """The 4B model: 32 value heads on 16 key heads, every fourth layer attends with gated heads."""
    config = model_config(
        {
            "model_type": "qwen3_5",
            "tie_word_embeddings": True,
            "text_config": {
                "model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
                "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
                "attn_output_gate": True, "full_attention_interval": 4, "linear_num_value_heads": 32,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                                    "mrope_section": [11, 11, 10], "mrope_interleaved": True},
            },
        }
    )  # fmt: skip
    assert config.mixers == ("delta", "delta", "delta", "attention") * 8 and config.rotary_dim == 64
    assert (config.output_gate, config.tied_head, config.conv_length) == (True, True, 4)
    slots = config.slots()
    assert slots["layers.0.delta_in"] == (8192 + 4096 + 64, 2560) and slots["layers.3.qkv"] == (10240, 2560)
    assert FAMILIES["qwen3_5_text"].head_norms == ["q_norm", "k_norm"]
    assert 4.1e9 < config.n_parameters < 4.3e9
