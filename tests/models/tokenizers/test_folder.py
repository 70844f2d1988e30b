"""Tokenizers of folders against transformers' own reading of the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.tokenizers.vocab_files import byte_level_keys
from tests.processes import run_python
from tests.raising import assert_raises

from whet.errors import WhetValueError
from whet.models.tokenizers import BackendTokenizer, GGUFTokenizer, load_tokenizer
from whet.models.tokenizers.folder import read_folder_tokenizer
from whet.text.model import load_chat_tokenizer

transformers = pytest.importorskip("transformers")
PROBES = ("Hello, world!  It's 12:30.\n\n\tx", "naïve 日本語", " a", "", "don't<|im_end|> x", "a  b")
CHAT = [{"role": "user", "content": " héllo <|im_end|> "}, {"role": "assistant", "content": "well "}]


def save(folder: Path, name: str, **settings: Any) -> Any:
    """Save a tokenizer of a class of transformers, and return it as transformers reads it."""
    made = json.loads(GGUFTokenizer(byte_level_keys()).backend.to_str())["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in made["merges"]]
    tokenizer = getattr(transformers, name)(vocab=made["vocab"], merges=merges, **settings)
    tokenizer.chat_template = GGUFTokenizer(byte_level_keys()).chat_template
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Qwen2Tokenizer", {}),
        ("GPT2Tokenizer", {}),
        ("GPT2Tokenizer", {"add_bos_token": True}),
        ("LlamaTokenizer", {}),
        ("LlamaTokenizer", {"add_bos_token": True, "bos_token": "<s>"}),
        ("CohereTokenizer", {}),
        ("GPTNeoXTokenizer", {}),
    ],
)
def test_a_folder_gives_the_tokens_of_transformers(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = save(tmp_path, name, **settings)
    ours = read_folder_tokenizer(tmp_path, "test")
    assert isinstance(ours, BackendTokenizer)
    for text in PROBES:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    for special in ("bos", "eos", "pad", "unk"):
        assert getattr(ours, f"{special}_token_id") == getattr(theirs, f"{special}_token_id")
    for options in ({"add_generation_prompt": True}, {"continue_final_message": True}):
        expected = theirs.apply_chat_template(CHAT, return_dict=False, **options)
        assert ours.apply_chat_template(CHAT, return_dict=False, **options) == expected


def test_a_saved_folder_is_read_again(tmp_path: Path) -> None:
    theirs = save(tmp_path / "first", "Qwen2Tokenizer")
    load_tokenizer(tmp_path / "first").save_pretrained(tmp_path / "second")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "second")
    for text in PROBES:
        assert again(text)["input_ids"] == theirs(text)["input_ids"]
    assert again.chat_template == theirs.chat_template and again.eos_token == theirs.eos_token


def test_a_response_template_is_kept(tmp_path: Path) -> None:
    template = {"start_anchor": "<|im_start|>assistant", "fields": {"content": {}}}
    save(tmp_path / "a", "Qwen2Tokenizer")
    settings = tmp_path / "a" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "response_template": template}))
    tokenizer = read_folder_tokenizer(tmp_path / "a", "test")
    assert tokenizer is not None and tokenizer.response_template == template
    tokenizer.save_pretrained(tmp_path / "b")
    again = read_folder_tokenizer(tmp_path / "b", "test")
    assert again is not None and again.response_template == template
    assert tokenizer.to_transformers().response_template == template
    jinja = tmp_path / "other.jinja"
    jinja.write_text("{{ messages[0].content }}")
    replaced = load_chat_tokenizer(str(tmp_path / "a"), "test", str(jinja))
    assert replaced.chat_template == jinja.read_text() and replaced.response_template is None


def test_tokenizers_that_transformers_changes_are_left_to_it(tmp_path: Path) -> None:
    save(tmp_path, "Qwen2Tokenizer")
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for change in ({"eos_token": "<not there>"}, {"add_bos_token": True, "bos_token": "a"}, {"auto_map": {}}):
        file.write_text(json.dumps(settings | change))
        assert read_folder_tokenizer(tmp_path, "test") is None
    (tmp_path / "tokenizer.json").unlink()
    assert read_folder_tokenizer(tmp_path, "test") is None


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, "Qwen2Tokenizer")
    (tmp_path / "tokenizer.json").write_text("{")
    assert_raises(WhetValueError, "test: .*tokenizer.json cannot be read", read_folder_tokenizer, tmp_path, "test")


def test_reading_a_folder_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    save(tmp_path, "Qwen2Tokenizer")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from whet.models.tokenizers import load_tokenizer\n"
        f"print(load_tokenizer({str(tmp_path)!r}).encode('a'))"
    )
    assert run_python(code).stdout.startswith("[")
