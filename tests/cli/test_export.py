"""``whet export``: what it prints, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.engine.tiny_models import tiny_model
from tests.models.test_export import N_ROWS, N_TOKENS, PRE_TOKENIZERS, save
from tests.models.tokenizers import vocab_files
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


def test_a_folder_in_a_mixture(folder, tmp_path, capsys):
    out = tmp_path / "tiny.gguf"
    assert main(["export", str(folder), str(out), "--quantize", "q4_k_m"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ") and open_gguf(out).config.hidden_dim == 64
    assert main(["export", str(out), str(tmp_path / "two.gguf"), "--quantize", "f16"]) == 0
    assert "F16 16" in capsys.readouterr().out


def test_a_file_that_is_another_model_is_removed(folder, tmp_path, capsys, monkeypatch):
    def negated(self, slot, order):
        return -values(self, slot, order) if slot.endswith("down") else values(self, slot, order)

    values = RowReader.values
    monkeypatch.setattr(RowReader, "values", negated)
    monkeypatch.setattr(RowReader, "stored_format", lambda *_: None)
    assert main(["export", str(folder), str(tmp_path / "tiny.gguf"), "--quantize", "f32"]) == 2
    error = capsys.readouterr().err
    assert "what was written is not this model: tokens 1 to 63" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_takes_too_long_is_not_compared_which_is_printed(folder, tmp_path, capsys, monkeypatch):
    assert main(["export", str(folder), str(tmp_path / "a.gguf"), "--quantize", "f32"]) == 0
    assert re.search(r"; log-probs \d\S* from the model's$", capsys.readouterr().out)
    monkeypatch.setattr(probe, "_MOST_SECONDS", 0.0)
    assert main(["export", str(folder), str(tmp_path / "b.gguf"), "--quantize", "f32"]) == 0
    captured = capsys.readouterr()
    assert "log-probs" not in captured.out and "that takes more than 30 s, or the memory" in captured.err


@pytest.mark.parametrize("case", ["llama-longrope", "llama-yarn", "llama-llama3", "llama-linear"])
def test_positions_beyond_the_original_context_are_compared(case, folder, tmp_path, capsys, monkeypatch):
    model, checked = tiny_model(case, vocab_size=N_ROWS), []
    tokenizer = vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), N_TOKENS)
    own = save(model, tokenizer, tmp_path / "model")
    monkeypatch.setattr(probe, "engine_logprobs", lambda source, each: checked.append(each) or np.zeros(1))
    monkeypatch.setattr(export, "engine_logprobs", lambda source, each: np.zeros(1))
    assert main(["export", str(own), str(tmp_path / "a.gguf"), "--quantize", "f32"]) == 0
    original = 21 if case == "llama-linear" else 16
    assert [(each.first, len(each.ids)) for each in checked] == [(1, 64), (original, original + 16)]
    assert {0, 1} <= set(checked[0].ids)  # BOS and EOS


def test_adapters_by_their_folder(folder, tmp_path):
    """Named with the model, or alone: they know their base."""
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(folder), b_std=0.1, target_modules=["o_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    assert main(["export", str(folder), str(tmp_path / "plain.gguf")]) == 0
    assert main(["export", str(folder), str(tmp_path / "one.gguf"), "--adapter", str(tmp_path / "adapter")]) == 0
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "two.gguf")]) == 0
    plain, one, two = ((tmp_path / f"{name}.gguf").read_bytes() for name in ("plain", "one", "two"))
    assert one == two != plain and len(one) == len(plain)


def test_adapters_alone(folder, tmp_path, capsys):
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(folder), b_std=0.1, target_modules=["o_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    out = str(tmp_path / "lora.gguf")
    assert main(["export", str(folder), out, "--adapter", str(tmp_path / "adapter"), "--adapter-only"]) == 0
    assert f"tensors: F32 4; adapters for {folder}" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "adapter"), out, "--adapter-only", "--quantize=f16", "--overwrite"]) == 0
    assert "tensors: F16 4" in capsys.readouterr().out
    assert main(["export", str(folder), out, "--adapter-only", "--overwrite"]) == 2
    assert "there are no adapters. Name them with --adapter FOLDER" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "adapter"), out, "--adapter-only", "--pre=qwen2", "--overwrite"]) == 2
    assert "--pre has no effect: with --adapter-only there is no tokenizer" in capsys.readouterr().err


def test_a_card_and_a_modelfile_beside_it(folder, tmp_path, capsys):
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(folder), b_std=0.1, target_modules=["o_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    out, card, ollamas = tmp_path / "tiny.gguf", tmp_path / "README.md", tmp_path / "Modelfile"
    asked = ["export", str(folder), str(out), "--card", "--modelfile"]
    assert main([*asked, "--quantize", "q8_0"]) == 0
    assert f"| Model | {folder.name} |" in card.read_text() and "llama-cli -m tiny.gguf" in card.read_text()
    tokenizer = read_tokenizer(out)
    [end] = tokenizer.stop_token_ids
    assert ollamas.read_text() == f'FROM ./tiny.gguf\nPARAMETER stop "{tokenizer.decode([end])}"\n'
    assert "the Modelfile has no TEMPLATE: where Ollama does not know the template" in capsys.readouterr().err
    out.unlink()
    assert main(asked) == 2 and not out.exists()
    assert f"{card} is there already" in capsys.readouterr().err
    assert main([*asked, "--adapter", str(tmp_path / "adapter"), "--overwrite"]) == 0
    assert "| Adapters, merged into it | adapter |" in card.read_text()
    alone = ["export", str(folder), str(tmp_path / "lora.gguf"), "--adapter", str(tmp_path / "adapter"), "--card"]
    assert main([*alone, "--modelfile", "--adapter-only", "--overwrite"]) == 2
    assert "Ollama takes no adapters since 0.34.1" in capsys.readouterr().err and not (tmp_path / "lora.gguf").exists()
    alone[1] = str(out)
    assert main([*alone, "--adapter-only", "--overwrite"]) == 0
    assert "llama-cli -m tiny.gguf --lora lora.gguf" in card.read_text()


def test_a_template_of_the_users(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[-1].content }}!")
    out = tmp_path / "tiny.gguf"
    options = ["--chat-template", str(tmp_path / "t.jinja"), "--pre", "smollm"]
    assert main(["export", str(folder), str(out), *options]) == 0
    metadata = read_gguf(out, "here").metadata
    assert metadata["tokenizer.chat_template"].endswith("!") and metadata["tokenizer.ggml.pre"] == "smollm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}", "{out}/there.gguf"], "there.gguf is there already"),
        (["{folder}", "{out}/no/model.gguf"], "there is no folder"),
        (["{out}/none", "{out}/model.gguf"], "Pass a model's folder or its .gguf file"),
        (["{out}/cut.gguf", "{out}/model.gguf"], "cut short"),
        (["{folder}", "{out}/model.gguf", "--pre", "qwen"], "pre is 'qwen', expected a name that llama.cpp has"),
    ],
)
def test_one_line_for_what_is_wrong(arguments, message, folder, tmp_path, capsys):
    assert main(["export", str(folder), str(tmp_path / "there.gguf"), "--quantize", "f32"]) == 0
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "there.gguf").read_bytes()[:-64])
    names = {path.name for path in tmp_path.iterdir()}
    capsys.readouterr()
    given = [argument.format(folder=folder, out=tmp_path) for argument in arguments]
    assert main(["export", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == names
