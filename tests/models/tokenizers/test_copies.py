"""Copies of a GGUF file's tokenizer, which worker processes get."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from tests.models.tokenizers import vocab_files

from whet.models.tokenizers import GGUFTokenizer, read_tokenizer
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_encodes_and_renders_the_same(make: Any, used: bool, tmp_path) -> None:
    trained = vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), 400)
    metadata = vocab_files.byte_level_metadata(trained, "qwen2")
    metadata["tokenizer.chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    tokenizer: GGUFTokenizer = read_tokenizer(vocab_files.write_file(tmp_path / "v.gguf", metadata))
    if used:
        tokenizer.apply_chat_template(MESSAGES)
    found = make(tokenizer)
    assert found.encode("Hello, world") == tokenizer.encode("Hello, world")
    assert found.apply_chat_template(MESSAGES) == tokenizer.apply_chat_template(MESSAGES)
    assert found.stop_token_ids == tokenizer.stop_token_ids
