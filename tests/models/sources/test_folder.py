"""Hugging Face folders: the same logits as transformers, and an error for every way a file can be wrong."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.engine.tiny_models import logits_of, naive_logits, tiny_model, token_ids
from tests.processes import printed_by
from tests.raising import assert_raises, mentions

from whet.errors import WhetValueError
from whet.models.families import model_config
from whet.models.reference import naive_weights
from whet.models.sources.folder import open_folder, parse_safetensors, read_safetensors
from whet.models.sources.live import open_module
from whet.models.sources.mapped import _unique as unique

FAMILIES = ("llama-biases-tied", "mistral", "qwen2-windows", "qwen3", "gpt_neox", "gpt2", "gptj", "phi3-longrope",
            "granite_swa-bases", "lfm2", "qwen3_5_text-sizes")  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", num_hidden_layers=1).save_pretrained(path)
    return path


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of a small model for a test to modify."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def header_of(path: Path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def rewrite(path: Path, change) -> None:
    """Rewrite a file's header by ``change(header)``, which may return the text of the header."""
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + n])
    text = change(header) or json.dumps(header)
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + n :])


def change_config(folder: Path, **options) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **options}))


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_match_transformers(case, tmp_path):
    model, ids = tiny_model(case), token_ids()
    model.save_pretrained(tmp_path)
    source = open_folder(tmp_path)
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)
    live = open_module(model)
    assert source.config == live.config and source.targets == live.targets
    converted = [location.weight for location in source.targets.values() if not location.module.is_stored]
    for row_slice in source.slices():
        is_view = not row_slice.tensor.flags.owndata and not row_slice.tensor.flags.writeable
        assert is_view == (row_slice.slot not in converted)


@pytest.mark.parametrize("case", ["gemma3-vision", "mistral3-vision", "qwen3_vl-vision"])
@pytest.mark.parametrize("is_old", [False, True])
def test_language_model_of_a_folder_with_towers(case, is_old, tmp_path):
    """Names of transformers 4 and 5; heads for several tokens, and towers, are skipped with one warning."""
    model, ids = tiny_model(case), token_ids()
    model.save_pretrained(tmp_path)
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    if is_old:
        old = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
        for new, name in ((new, name) for new in old for name in list(tensors) if name.startswith(new)):
            tensors[old[new] + name.removeprefix(new)] = tensors.pop(name)
    tensors["mtp.fc.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="tensors, such as .*runs the language model") as warned:
        source = open_folder(tmp_path)
    assert len(warned) == 1
    np.testing.assert_allclose(naive_logits(source, ids), logits_of(model, ids), rtol=0, atol=1e-4)
    assert source.targets == open_module(model).targets
    assert next(iter(source.targets)) == "model.language_model.embed_tokens"  # PEFT's names
    save_file({**tensors, "model.experts.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert_raises(WhetValueError, (case.removesuffix("-vision"), "model.experts.weight"), open_folder, tmp_path)


def test_text_config_of_gemma_3_has_only_what_differs_from_the_defaults():
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = model_config({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.tied_head and config.windows[:6] == (1024,) * 5 + (0,)
    quantised = {"model_type": "gemma3", "text_config": text, "quantization_config": {"quant_method": "fp8"}}
    assert_raises(WhetValueError, ("quantization_config", "float32"), model_config, quantised)


def test_shards(tmp_path):
    model, ids = tiny_model("qwen2"), token_ids()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    np.testing.assert_allclose(naive_logits(open_folder(tmp_path), ids), logits_of(model, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_half_precision_without_torch(dtype, name, tmp_path):
    model = tiny_model("llama").to(dtype)
    model.save_pretrained(tmp_path)
    source = open_folder(tmp_path)
    assert {row_slice.format for row_slice in source.slices()} == {name}
    live = open_module(model)
    for slot, array in naive_weights(source.config, source.slices(), np.float32).items():
        np.testing.assert_array_equal(array, naive_weights(live.config, live.slices(), np.float32)[slot])
    code = "import sys; from whet.models.sources.folder import open_folder;"
    code += f"list(open_folder({str(tmp_path)!r}).slices());"
    code += "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    printed_by(code)


def test_names_without_prefix_and_old_buffers(tmp_path):
    """GPT-2's repository has names without "transformer.", and attention masks."""
    model, ids = tiny_model("gpt2"), token_ids()
    model.save_pretrained(tmp_path)
    tensors = {n.removeprefix("transformer."): t.contiguous() for n, t in model.transformer.state_dict().items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    np.testing.assert_allclose(naive_logits(open_folder(tmp_path), ids), logits_of(model, ids), rtol=0, atol=1e-4)


def test_head_file_contradicting_a_tied_config(tmp_path):
    model, ids = tiny_model("llama-biases-tied"), token_ids()
    model.save_pretrained(tmp_path)
    assert open_folder(tmp_path).config.tied_head
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_folder(tmp_path).config.tied_head
    tensors["lm_head.weight"] *= 2
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_folder(tmp_path)
    assert not source.config.tied_head
    np.testing.assert_allclose(naive_logits(source, ids), 2 * logits_of(model, ids), rtol=0, atol=1e-4)


def test_unaligned_tensors(tmp_path):
    """Misaligned tensors are copied, the others are views."""
    path = tmp_path / "odd.safetensors"
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        "c": {"dtype": "F32", "shape": [0, 4], "data_offsets": [9, 9]},
    }
    text = json.dumps(header)
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + b"\0" + struct.pack("<2f", 1.5, -2.0))
    assert read_safetensors(path, "here")["b"].shape == (2,)
    assert read_safetensors(path, "here")["c"].shape == (0, 4)
    assert safetensors.safe_open(path, "np").get_tensor("b").tolist() == [1.5, -2.0]


# --- damaged files -------------------------------------------------------------------------------------------------


def test_cut_short_at_every_byte(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.ones(4, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    data = path.read_bytes()
    assert set(read_safetensors(path, "here")) == {"a", "b"}
    for n in range(len(data)):
        with pytest.raises(WhetValueError, match=r"^here: .*(again|safetensors file|and its header|within)"):
            parse_safetensors(np.frombuffer(data[:n], np.uint8), "here")
    path.write_bytes(data + b"\0")
    assert_raises(WhetValueError, ("33 bytes of tensors", "32"), read_safetensors, path, "here")


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 2**31, 2**63, 2**64 - 1])
def test_header_lengths(folder, length):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", length) + data[8:])
    message = f"model.safetensors: the file has {len(data)} bytes and a header of {length} bytes"
    assert_raises(WhetValueError, message, open_folder, folder)


NAME = "model.layers.0.mlp.up_proj.weight"


def set_entry(**entry):
    def change(header):
        header[NAME].update(entry)

    return change


def duplicate(header):
    return json.dumps(header)[:-1] + ', "model.norm.weight": ' + json.dumps(header["model.norm.weight"]) + "}"


def overlap(header):
    header["model.norm.weight"]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]


def rename(header):
    header["model.layers.7.mlp.up_proj.weight"] = header.pop(NAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_entry(shape=[2**32, 2**32]), ("has shape [4294967296, 4294967296]", "sizes")),
        (set_entry(shape=[2**62, 2**62, 0]), ("expected sizes of at least 0 that do not overflow",)),
        (set_entry(shape=[-40, -32]), ("has shape [-40, -32]", "sizes")),
        (set_entry(shape=[40.0, 32]), ("has shape [40.0, 32]",)),
        (set_entry(shape=[True, 1280]), ("has shape [true, 1280]",)),
        (set_entry(shape="40"), ('has shape "40"',)),
        (set_entry(shape=[10**400]), ("has shape",)),
        (set_entry(shape=[40, 31]), ("has 5120 bytes", "F32 of shape (40, 31) has 4960")),
        (set_entry(shape=[32, 40]), (f"{NAME} has shape (32, 40)", "(40, 32)")),
        (set_entry(shape=[40, 32, 1]), ("has shape (40, 32, 1)", "(40, 32)")),
        (set_entry(dtype="Q4"), ("has dtype 'Q4'", "this engine reads F32, F16, BF16, F64")),
        (set_entry(dtype=["F32"]), ("has dtype ",)),
        (set_entry(dtype="I32"), ("model.safetensors", f"{NAME} is I32", "F32")),
        (set_entry(data_offsets=[-1, 5119]), ("has data_offsets [-1, 5119]", "two within")),
        (set_entry(data_offsets=[5120, 0]), ("has data_offsets [5120, 0]",)),
        (set_entry(data_offsets=[0, 10**9]), ("has data_offsets [0, 1000000000]",)),
        (set_entry(data_offsets=[2**63, 2**63 + 5120]), ("has data_offsets",)),
        (set_entry(data_offsets=[0]), ("has data_offsets [0]",)),
        (set_entry(data_offsets=None), ("has data_offsets null",)),
        (set_entry(extra=1), ("expected dtype, shape and data_offsets",)),
        (lambda header: header[NAME].pop("dtype") and None, ("expected dtype, shape and data_offsets",)),
        (lambda header: header.update({NAME: 5}), (f"{NAME} is 5, expected dtype",)),
        (duplicate, ("header", "JSON", "'model.norm.weight'", "duplicate")),
        (overlap, ("tensors overlap or leave a gap",)),
        (lambda header: header.pop(NAME) and None, ("tensors overlap or leave a gap",)),
        (
            rename,
            (
                NAME,
                "config.json belongs to another model",
            ),
        ),
        (lambda header: header.update({"a\x1b[31m": header.pop(NAME)}), ("the name of a tensor is 'a\\x1b",)),
        (lambda header: " " + json.dumps(header), ("does not begin with '{'",)),
        (lambda header: "{" * 100_000, ("header", "JSON")),
        (lambda header: '{"a":' + "[" * 100_000, ("header", "JSON")),
        (
            lambda header: '{"a": ' + "9" * 5000 + "}",
            (
                "a is 999",
                "..., expected dtype",
            ),
        ),
        (lambda header: json.dumps(header) + "x", ("header", "JSON")),
    ],
)
def test_hostile_headers(folder, change, message):
    rewrite(folder / "model.safetensors", change)
    assert_raises(WhetValueError, ("open_folder", *message), open_folder, folder)


def test_invalid_utf8_is_rejected(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:10] + b"\xff" + data[11:])
    assert_raises(WhetValueError, ("header", "JSON"), open_folder, folder)


def test_unknown_tensor_is_rejected(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.up_proj.bias": torch.ones(40)}, folder / "model.safetensors")
    with pytest.raises(
        WhetValueError, match=mentions("a llama with this config has no model.layers.0.mlp.up_proj.bias")
    ):
        open_folder(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_attention_heads": 0}, ("num_attention_heads is 0", "an integer from 1")),
        ({"num_key_value_heads": 0}, ("num_key_value_heads is 0", "an integer from 1")),
        ({"num_hidden_layers": 2}, ("model.layers.1.input_layernorm.weight", "missing")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers is 1000000000",)),
        ({"hidden_size": 2**31 - 4}, ("model.embed_tokens.weight has shape (48, 32)", "(48, 2147483644)")),
        ({"vocab_size": 47}, ("model.embed_tokens.weight has shape (48, 32)", "(47, 32)")),
        ({"model_type": "mixtral"}, ("model_type is 'mixtral'", "has mixtures of experts")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config is",)),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings is 'yes'", "true or false")),
    ],
)
def test_configs_that_contradict_the_tensors_are_rejected(folder, options, message):
    change_config(folder, **options)
    assert_raises(WhetValueError, ("open_folder", *message), open_folder, folder)


def test_code_in_a_model_folder_is_not_executed(folder):
    (folder / "modeling_evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert open_folder(folder).config.n_layers == 1
    assert not (folder / "ran").exists()


class Evil:
    """Creates a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_pickles_are_rejected_unopened(folder):
    ran = folder / "ran"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(str(ran))))
    assert_raises(WhetValueError, ("pytorch_model.bin is a pickle", "any code", "not opened"), open_folder, folder)
    assert not ran.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes()).close()
    assert ran.exists()
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    assert_raises(WhetValueError, ("model.safetensors", "safetensors"), open_folder, folder)


def test_folders_without_a_model_are_rejected(folder, tmp_path):
    with pytest.raises(WhetValueError, match=mentions('open_folder("', "nowhere", "does not exist")):
        open_folder(tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes(b"")
    assert_raises(WhetValueError, r"model\.safetensors is empty", open_folder, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WhetValueError, match=mentions("neither model.safetensors nor model.safetensors.index.json")):
        open_folder(folder)
    for text, message in (
        ("[1]", "holds a list"),
        ("{", "not valid JSON"),
        ('{"a": 1, "a": 2}', "'a' is a duplicate name"),
    ):
        (folder / "config.json").write_text(text)
        assert_raises(WhetValueError, ("config.json", message), open_folder, folder)
    (folder / "config.json").unlink()
    assert_raises(WhetValueError, ("config.json", "pass a path"), open_folder, folder)
    (folder / "b.gguf").touch()
    assert_raises(
        WhetValueError, ("no config.json, but GGUF files", "Pass the path of one", "b.gguf"), open_folder, folder
    )
    (folder / "b.gguf").unlink()
    (folder / "adapter_config.json").write_text("{}")
    assert_raises(WhetValueError, ("this is an adapter", "Open the model it was trained on"), open_folder, folder)


@pytest.fixture
def shards(tmp_path) -> Path:
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path, max_shard_size="12KB")
    return tmp_path


def change_index(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "C:\\x.safetensors", "x.bin", 5, None,
     ".safetensors", "\x00.safetensors", "model.safetensors\n"],
)  # fmt: skip
def test_shards_outside_the_folder_are_rejected(shards, file):
    change_index(shards, lambda files: files.update({"lm_head.weight": file}))
    with pytest.raises(WhetValueError, match=mentions("lm_head.weight is in", "the name of a .safetensors file there")):
        open_folder(shards)


def test_index_contradicting_its_shards_is_rejected(shards):
    path = shards / "model.safetensors.index.json"
    good = path.read_text()
    files = json.loads(good)["weight_map"]
    other = next(file for file in files.values() if file != files["lm_head.weight"])
    change_index(shards, lambda files: files.update({"lm_head.weight": other}))
    assert_raises(WhetValueError, ("has lm_head.weight", "lists in model"), open_folder, shards)
    path.write_text(good)
    change_index(shards, lambda files: files.update({"more.weight": other}))
    assert_raises(WhetValueError, "lacks more.weight", open_folder, shards)
    path.write_text(good)
    change_index(shards, lambda files: files.pop("lm_head.weight"))
    assert_raises(WhetValueError, ("has lm_head.weight", "does not list"), open_folder, shards)
    path.write_text('{"weight_map": []}')
    assert_raises(WhetValueError, ("has weight_map []", "tensor names"), open_folder, shards)
    path.write_text(good)
    (shards / other).unlink()
    assert_raises(WhetValueError, f"{other} is not a file", open_folder, shards)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 400), byte=st.integers(0, 255))
def test_mutated_header_bytes_are_safe(saved, tmp_path, at, byte):
    """Opening succeeds or raises a WhetValueError; whatever safetensors rejects is rejected."""
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[at] = byte
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    try:
        entries = read_safetensors(path, "here")
    except WhetValueError:
        return
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == set(entries)


def test_duplicate_names_are_found_in_linear_time():
    comparisons = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal comparisons
            comparisons += 1
            return str.__eq__(self, other)

    names = [Name(i) for i in range(1000)]
    assert_raises(ValueError, ("'999'", "duplicate"), unique, [(name, None) for name in [*names, Name(999)]])
    assert comparisons < 2000
