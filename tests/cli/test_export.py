"""``whet export``: output and errors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.engine.tiny_models import tiny_model
from tests.models.test_export import N_ROWS, N_TOKENS, PRE_TOKENIZERS, save
from tests.models.tokenizers import vocab_files
from tests.raising import assert_mentions
from tests.tiny import with_lora
from transformers import AutoModelForCausalLM

from whet.cli import export, main
from whet.engine import probe
from whet.models.row_reader import RowReader
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import read_gguf
from whet.models.tokenizers import read_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    tokenizer = vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), N_TOKENS)
    model = tiny_model("qwen3", vocab_size=N_ROWS, hidden_size=64, intermediate_size=64)
    return save(model, tokenizer, tmp_path_factory.mktemp("export") / "tiny")


def test_folder_in_mixed_types(folder, tmp_path, capsys):
    out = tmp_path / "tiny.gguf"
    assert main(["export", str(folder), str(out), "--quantize", "q4_k_m"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ") and open_gguf(out).config.hidden_dim == 64
    assert main(["export", str(out), str(tmp_path / "two.gguf"), "--quantize", "f16"]) == 0
    assert "F16 16" in capsys.readouterr().out


def test_file_with_wrong_logprobs_is_removed(folder, tmp_path, capsys, monkeypatch):
    def negated(self, slot, order):
        return -values(self, slot, order) if slot.endswith("down") else values(self, slot, order)

    values = RowReader.values
    monkeypatch.setattr(RowReader, "values", negated)
    monkeypatch.setattr(RowReader, "stored_format", lambda *_: None)
    assert main(["export", str(folder), str(tmp_path / "tiny.gguf"), "--quantize", "f32"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert_mentions(error, "is not this model", "tokens 1 to 63")
    assert not list(tmp_path.iterdir())


def test_slow_comparison_is_skipped_with_a_note(folder, tmp_path, capsys, monkeypatch):
    assert main(["export", str(folder), str(tmp_path / "a.gguf"), "--quantize", "f32"]) == 0
    assert re.search(r"; log-probs \d\S* from the model's$", capsys.readouterr().out)
    monkeypatch.setattr(probe, "_MOST_SECONDS", 0.0)
    assert main(["export", str(folder), str(tmp_path / "b.gguf"), "--quantize", "f32"]) == 0
    captured = capsys.readouterr()
    assert "log-probs" not in captured.out and "more than 30 s" in captured.err


@pytest.mark.parametrize("case", ["llama-longrope", "llama-yarn", "llama-llama3", "llama-linear"])
def test_logprobs_beyond_the_original_context_are_compared(case, folder, tmp_path, capsys, monkeypatch):
    model, checked = tiny_model(case, vocab_size=N_ROWS), []
    tokenizer = vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), N_TOKENS)
    own = save(model, tokenizer, tmp_path / "model")
    monkeypatch.setattr(probe, "engine_logprobs", lambda source, each: checked.append(each) or np.zeros(1))
    monkeypatch.setattr(export, "engine_logprobs", lambda source, each: np.zeros(1))
    assert main(["export", str(own), str(tmp_path / "a.gguf"), "--quantize", "f32"]) == 0
    original = 21 if case == "llama-linear" else 16
    assert [(each.first, len(each.ids)) for each in checked] == [(1, 64), (original, original + 16)]
    assert {0, 1} <= set(checked[0].ids)  # BOS and EOS


def test_adapters_are_merged(folder, tmp_path):
    """Passed with the model, or as the model: they record their base."""
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(folder), b_std=0.1, target_modules=["o_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    assert main(["export", str(folder), str(tmp_path / "plain.gguf")]) == 0
    assert main(["export", str(folder), str(tmp_path / "one.gguf"), "--adapter", str(tmp_path / "adapter")]) == 0
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "two.gguf")]) == 0
    plain, one, two = ((tmp_path / f"{name}.gguf").read_bytes() for name in ("plain", "one", "two"))
    assert one == two != plain and len(one) == len(plain)


def test_adapter_only(folder, tmp_path, capsys):
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(folder), b_std=0.1, target_modules=["o_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    out = str(tmp_path / "lora.gguf")
    assert main(["export", str(folder), out, "--adapter", str(tmp_path / "adapter"), "--adapter-only"]) == 0
    assert f"tensors: F32 4; adapters for {folder}" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "adapter"), out, "--adapter-only", "--quantize=f16", "--overwrite"]) == 0
    assert "tensors: F16 4" in capsys.readouterr().out
    assert main(["export", str(folder), out, "--adapter-only", "--overwrite"]) == 2
    assert_mentions(capsys.readouterr().err, "no adapters", "--adapter")
    assert main(["export", str(tmp_path / "adapter"), out, "--adapter-only", "--pre=qwen2", "--overwrite"]) == 2
    assert_mentions(capsys.readouterr().err, "--pre has no effect", "--adapter-only")


def test_card_and_modelfile(folder, tmp_path, capsys):
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(folder), b_std=0.1, target_modules=["o_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    out, card, ollamas = tmp_path / "tiny.gguf", tmp_path / "README.md", tmp_path / "Modelfile"
    argv = ["export", str(folder), str(out), "--card", "--modelfile"]
    assert main([*argv, "--quantize", "q8_0"]) == 0
    assert f"| Model | {folder.name} |" in card.read_text() and "llama-cli -m tiny.gguf" in card.read_text()
    tokenizer = read_tokenizer(out)
    [end] = tokenizer.stop_token_ids
    assert ollamas.read_text() == f'FROM ./tiny.gguf\nPARAMETER stop "{tokenizer.decode([end])}"\n'
    assert_mentions(capsys.readouterr().err, "Modelfile has no TEMPLATE", "Ollama")
    out.unlink()
    assert main(argv) == 2 and not out.exists()
    assert_mentions(capsys.readouterr().err, card, "--overwrite")
    assert main([*argv, "--adapter", str(tmp_path / "adapter"), "--overwrite"]) == 0
    assert "| Adapters, merged into it | adapter |" in card.read_text()
    adapter_only = [
        "export",
        str(folder),
        str(tmp_path / "lora.gguf"),
        "--adapter",
        str(tmp_path / "adapter"),
        "--card",
    ]
    assert main([*adapter_only, "--modelfile", "--adapter-only", "--overwrite"]) == 2
    assert_mentions(capsys.readouterr().err, "--modelfile has no effect", "--adapter-only", "Ollama", "0.34.1")
    assert not (tmp_path / "lora.gguf").exists()
    adapter_only[1] = str(out)
    assert main([*adapter_only, "--adapter-only", "--overwrite"]) == 0
    assert "llama-cli -m tiny.gguf --lora lora.gguf" in card.read_text()


def test_custom_chat_template_and_pre_tokenizer(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[-1].content }}!")
    out = tmp_path / "tiny.gguf"
    options = ["--chat-template", str(tmp_path / "t.jinja"), "--pre", "smollm"]
    assert main(["export", str(folder), str(out), *options]) == 0
    metadata = read_gguf(out, "here").metadata
    assert metadata["tokenizer.chat_template"].endswith("!") and metadata["tokenizer.ggml.pre"] == "smollm"


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["{folder}", "{out}/there.gguf"], ("{out}/there.gguf", "--overwrite")),
        (["{folder}", "{out}/no/model.gguf"], ("folder", "{out}/no")),
        (["{out}/none", "{out}/model.gguf"], ("{out}/none", "folder", ".gguf")),
        (["{out}/cut.gguf", "{out}/model.gguf"], ("{out}/cut.gguf", "byte")),
        (["{folder}", "{out}/model.gguf", "--pre", "qwen"], ("pre is 'qwen'", "llama.cpp")),
    ],
)
def test_errors_are_one_line_and_leave_no_files(arguments, facts, folder, tmp_path, capsys):
    assert main(["export", str(folder), str(tmp_path / "there.gguf"), "--quantize", "f32"]) == 0
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "there.gguf").read_bytes()[:-64])
    names = {path.name for path in tmp_path.iterdir()}
    capsys.readouterr()
    given = [argument.format(folder=folder, out=tmp_path) for argument in arguments]
    assert main(["export", *given]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert_mentions(error, *(fact.format(folder=folder, out=tmp_path) for fact in facts))
    assert {path.name for path in tmp_path.iterdir()} == names
