"""``whet merge`` and ``whet convert``: the folders that they write, and errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.engine.tiny_models import tiny_model
from tests.models.test_delta import with_predicting
from tests.models.test_export import N_ROWS, N_TOKENS, PRE_TOKENIZERS, make_texts, save
from tests.models.tokenizers import vocab_files
from tests.raising import assert_mentions
from tests.tiny import with_lora
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from whet.cli import main
from whet.models.base_record import write_record
from whet.models.packed_base import pack_base
from whet.models.sources.folder import read_entries
from whet.models.sources.gguf_container import read_gguf
from whet.models.sources.pretrained import open_pretrained
from whet.models.tokenizers import read_tokenizer
from whet.nn import frozen_model
from whet.runs.models import load_model


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def folder(request, tmp_path_factory) -> Path:
    tokenizer = vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), N_TOKENS)
    sizes = {"n_embd": 64} if request.param == "gpt2" else {"hidden_size": 64, "intermediate_size": 64}
    model = tiny_model(request.param, vocab_size=N_ROWS, **sizes)
    return save(model, tokenizer, tmp_path_factory.mktemp("merge") / request.param)


def adapters_of(model: Any, path: Path, is_gpt2: bool) -> Any:
    names = ["c_attn", "c_fc"] if is_gpt2 else ["q_proj", "down_proj"]
    adapted = with_lora(model, b_std=0.1, target_modules=names, fan_in_fan_out=is_gpt2)
    adapted.save_pretrained(path)
    return adapted


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_convert_and_export_round_trip(folder, dtype, tmp_path, capsys):
    first, second = tmp_path / "1.gguf", tmp_path / "2.gguf"
    half = {"f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    AutoModelForCausalLM.from_pretrained(folder, dtype=half).save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "half")
    assert main(["export", str(tmp_path / "half"), str(first), "--quantize", dtype]) == 0
    assert main(["convert", str(first), str(tmp_path / "folder")]) == 0
    assert str(half).removeprefix("torch.") in capsys.readouterr().out.splitlines()[-1]
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "Converted by Whet" in card and "| Model | 1.gguf |" in card
    assert main(["export", str(tmp_path / "folder"), str(second), "--quantize", dtype]) == 0
    a, b = (read_gguf(path, "here").tensors for path in (first, second))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name].tensor.view(np.uint8), b[name].tensor.view(np.uint8), err_msg=name)
    ours, again = read_tokenizer(first), read_tokenizer(second)
    assert all(ours.encode(text) == again.encode(text) for text in make_texts(300, seed=1))


def test_merged_weights_equal_pefts(folder, tmp_path):
    adapted = adapters_of(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "lora", folder.name == "gpt2")
    expected = adapted.merge_and_unload().state_dict()
    assert main(["merge", str(folder), str(tmp_path / "a"), "--adapter", str(tmp_path / "lora")]) == 0
    assert main(["merge", str(tmp_path / "lora"), str(tmp_path / "b")]) == 0
    for found in map(weights_of, (tmp_path / "a", tmp_path / "b")):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "a").encode("Hello") == AutoTokenizer.from_pretrained(
        folder
    ).encode("Hello")


@pytest.mark.parametrize("command", ["merge", "convert"])
def test_folder_with_wrong_logprobs_is_removed(command, folder, tmp_path, capsys, monkeypatch):
    def save_other(module, path, **options):
        module.get_input_embeddings().weight.data.neg_()
        save_pretrained(module, path, **options)

    adapters_of(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "lora", folder.name == "gpt2")
    assert main(["export", str(folder), str(tmp_path / "m.gguf"), "--quantize", "f16"]) == 0
    save_pretrained = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_other)
    capsys.readouterr()
    given = {"merge": [str(folder), "--adapter", str(tmp_path / "lora")], "convert": [str(tmp_path / "m.gguf")]}[
        command
    ]
    assert main([command, *given, str(tmp_path / "out")]) == 2
    assert_mentions(capsys.readouterr().err, f"whet {command}", "is not this model")
    assert not (tmp_path / "out").exists()


def test_adapters_of_a_quantised_base_are_merged_into_its_dequantised_weights(folder, tmp_path):
    base = pack_base(open_pretrained(folder), weights="q4_0")
    names = ["c_fc"] if folder.name == "gpt2" else ["down_proj"]
    adapted = peft.get_peft_model(frozen_model(folder, base), peft.LoraConfig(r=2, target_modules=names))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "lora")
    write_record(tmp_path / "lora", base.record())
    given = [str(folder), str(tmp_path / "merged"), "--adapter", str(tmp_path / "lora"), "--dtype", "float32"]
    assert main(["merge", *given]) == 0
    ids = torch.arange(12)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        torch.testing.assert_close(merged, adapted(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("target", ["head", "embedding", "both"])
def test_merging_adapters_of_a_tied_head_or_embedding_unties_them(folder, target, tmp_path):
    """The merged folder and the loaded folder of adapters have PEFT's logits."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "tied")
    names = {"head": "lm_head", "embedding": "wte" if folder.name == "gpt2" else "embed_tokens"}
    names = list(names.values()) if target == "both" else [names[target]]
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(tmp_path / "tied"), target_modules=names)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)
    adapted.save_pretrained(tmp_path / "lora")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "lora")
    assert main(["merge", str(tmp_path / "lora"), str(tmp_path / "merged")]) == 0
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = adapted(ids).logits
        assert (expected - AutoModelForCausalLM.from_pretrained(tmp_path / "tied")(ids).logits).abs().max() > 0.1
        for found in (
            AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
            load_model(str(tmp_path / "lora"), "float32")[0],
        ):
            torch.testing.assert_close(found(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_missing_peft_names_its_extra(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(["merge", str(folder), str(tmp_path / "new"), "--adapter", str(tmp_path)]) == 2
    assert_mentions(capsys.readouterr().err, "peft", "pip install 'whet[peft]'")


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["merge", "{folder}", "{out}/new"], ("{folder}", "no adapters", "--adapter")),
        (["merge", "{folder}", "{folder}", "--adapter", "{out}"], ("{folder}", "exists", "--overwrite")),
        (["merge", "{folder}", "{out}/no/new", "--adapter", "{out}"], ("folder", "{out}/no")),
        (["merge", "{folder}", "{out}/new", "--adapter", "{out}"], ("{out}", "does not fit", "{folder}")),
        (["merge", "{out}/none", "{out}/new", "--adapter", "{out}"], ("{out}/none", "folder", ".gguf")),
        (["convert", "{folder}", "{out}/new"], ("{folder}", "is a folder", ".gguf")),
        (["convert", "{out}/cut.gguf", "{out}/new"], ("{out}/cut.gguf", "byte")),
    ],
)
def test_errors_are_one_line_and_leave_no_files(arguments, facts, folder, tmp_path, capsys):
    assert main(["export", str(folder), str(tmp_path / "whole.gguf")]) == 0
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:-64])
    names = {path.name for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main([argument.format(folder=folder, out=tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert_mentions(error, *(fact.format(folder=folder, out=tmp_path) for fact in facts))
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("case", ["qwen3_5_text", "qwen3_5-vision"])
def test_folders_keep_wide_parameters_and_blocks_for_further_tokens(case, tmp_path, capsys):
    """A_log is float32 in folders of bfloat16, and transformers does not load the blocks."""
    tokenizer = vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), N_TOKENS)
    model = tiny_model(case, vocab_size=N_ROWS, initializer_range=0.1).bfloat16()
    logs = {name: p.float() + 2**-20 for name, p in model.named_parameters() if name.endswith("A_log")}
    for name, values in logs.items():
        model.get_parameter(name).data = values
    folder = save(model, tokenizer, tmp_path / "model")
    more = with_predicting(folder)
    with_lora(model, b_std=0.02, target_modules=["in_proj_z", "out_proj", "o_proj"]).save_pretrained(tmp_path / "lora")
    assert main(["merge", str(folder), str(tmp_path / "out"), "--adapter", str(tmp_path / "lora")]) == 0
    assert "are not read" in capsys.readouterr().err
    found = read_entries(tmp_path / "out", "here")
    assert found.keys() == read_entries(folder, "here").keys()
    written = {
        name: value for file in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(file).items()
    }
    for name, values in {**logs, **more}.items():
        assert torch.equal(written[name], values) and written[name].dtype == values.dtype
