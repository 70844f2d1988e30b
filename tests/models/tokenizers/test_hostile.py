"""Tokenizer keys as an enemy writes them: an error that names the key, or a tokenizer. Nothing else."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.tokenizers import vocab_files
from tests.raising import mentions

from whet.errors import WhetError, WhetValueError
from whet.models.tokenizers import GGUFTokenizer, read_tokenizer

BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|im_end|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
PIECES = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
    "tokenizer.ggml.token_type": [2, 3, 3, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0],
}
ONE = {"tokenizer.ggml.token_type": [1], "tokenizer.ggml.scores": [0.0], "tokenizer.ggml.add_eos_token": False}
UNIGRAM = {**PIECES, "tokenizer.ggml.model": "t5", "tokenizer.ggml.unknown_token_id": 0}


@pytest.mark.parametrize(
    ("base", "key", "value", "reason"),
    [
        (BPE, "model", "bert", "WordPiece"),
        (BPE, "model", "rwkv", "RWKV"),
        (BPE, "model", "none", "without one"),
        (BPE, "model", "magic", "not known"),
        (BPE, "model", None, "not known"),
        (BPE, "model", 3, "expected a text"),
        (BPE, "pre", "magic", "a known pre-tokenizer"),
        (BPE, "pre", 3, "expected a text"),
        (BPE, "tokens", 5, "expected an array of texts"),
        (BPE, "tokens", [], "1 to"),
        (BPE, "tokens", None, "1 to"),
        (BPE, "tokens", ["a", "b", "ab", "a"], "no duplicate tokens"),
        (BPE, "tokens", ["a", "b", "ab", 7], "7, expected an array of texts"),
        (BPE, "token_type", [1, 1, 1], "3 items', expected one for each of the 4 tokens"),
        (BPE, "token_type", [1, 1, 1, 9], "9, expected 0 to 6"),
        (BPE, "token_type", [1, 1, 1, 1.0], "1.0, expected an array of integers"),
        (BPE, "token_type", "1113", "expected an array of integers"),
        (BPE, "merges", None, "expected an array of texts"),
        (BPE, "merges", ["a c"], "'a c', expected two tokens"),
        (BPE, "merges", ["b a"], "'b a', expected two tokens"),
        (BPE, "merges", ["ab"], "'ab', expected two tokens"),
        (BPE, "merges", [" "], "' ', expected two tokens"),
        (BPE, "merges", [1], "1, expected an array of texts"),
        (BPE, "eos_token_id", 4, "4, expected one of the 4 tokens"),
        (BPE, "bos_token_id", 1 << 31, "expected one of the 4 tokens"),
        (BPE, "eos_token_id", True, "True, expected an id"),
        (BPE, "fim_pre_token_id", 99, "99, expected one of the 4 tokens"),
        (BPE, "add_bos_token", True, "None, expected an id"),
        (BPE, "add_bos_token", 1, "1, expected a bool"),
        (PIECES, "scores", None, "an array of 4 numbers"),
        (PIECES, "scores", [0.0, 0.0], "expected one for each of the 4 tokens"),
        (PIECES, "scores", [0.0, 0.0, 0.0, float("nan")], "nan, expected finite numbers"),
        (PIECES, "scores", ["a"] * 4, "'a', expected an array of numbers"),
        (PIECES, "add_space_prefix", "yes", "expected a bool"),
        (UNIGRAM | {"tokenizer.ggml.tokens": ["a"], **ONE}, "unknown_token_id", None, "None, expected an id"),
        (UNIGRAM, "precompiled_charsmap", [1, 2], "a size, a trie"),
        (UNIGRAM, "precompiled_charsmap", [255, 255, 255, 127, 0, 0], "a size, a trie"),
        (UNIGRAM, "precompiled_charsmap", [4, 0, 0, 0, 1, 2, 3, 4, 0], "a size, a trie"),
        (UNIGRAM, "precompiled_charsmap", [300, 2], "an array of bytes"),
    ],
)
def test_invalid_key_is_named(base: dict[str, Any], key: str, value: Any, reason: str) -> None:
    metadata = {**base, f"tokenizer.ggml.{key}": value}
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(WhetValueError, match=rf"tokenizer\.ggml\.(bos_token_id|{key}) is .*{reason}.*folder"):
        GGUFTokenizer(metadata)


def test_template_of_another_type_is_named() -> None:
    with pytest.raises(WhetValueError, match=mentions("tokenizer.chat_template (default) is 3", "a text")):
        GGUFTokenizer({**BPE, "tokenizer.chat_template": 3})


def test_endless_template_is_rejected_before_transformers_renders_it() -> None:
    tokenizer = GGUFTokenizer({**BPE, "tokenizer.chat_template": "{% for i in range(9999999) %}{% endfor %}"})
    with pytest.raises(WhetValueError, match=mentions("tokenizer.chat_template", "steps")):
        tokenizer.to_transformers()
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"  # but a template may refuse messages
    assert tokenizer.to_transformers().chat_template == tokenizer.chat_template


@functools.cache
def trained_charsmap() -> bytes:
    model = vocab_files.train_sentencepiece("unigram", normalization_rule_name="nmt_nfkc")
    return vocab_files.sentencepiece_metadata(model)["tokenizer.ggml.precompiled_charsmap"]


@settings(max_examples=150)
@given(
    at=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=20),
    begin=st.lists(st.integers(0, 255), max_size=1100),
    cut=st.floats(0, 1),
    text=st.text("ａｂ ﬁé\u0301½", max_size=8),
)
def test_random_charsmap_is_rejected_or_harmless(
    at: list[tuple[float, int]], begin: list[int], cut: float, text: str
) -> None:
    charsmap = bytearray(trained_charsmap())
    charsmap[4 : 4 + len(begin)] = bytes(begin)
    for place, byte in at:
        charsmap[int(place * (len(charsmap) - 1))] = byte
    if cut < 0.2:
        del charsmap[int(cut * 5 * len(charsmap)) :]
    metadata = {**UNIGRAM, "tokenizer.ggml.precompiled_charsmap": list(charsmap)}
    with contextlib.suppress(WhetError):
        GGUFTokenizer(metadata).encode(text)


def test_tokens_with_invalid_utf8_are_named(tmp_path: Path) -> None:
    path = vocab_files.write_file(tmp_path / "a.gguf", {**BPE, "tokenizer.ggml.tokens": ["xyzzy", "b"]})
    path.write_bytes(path.read_bytes().replace(b"xyzzy", b"\xff\xfe\xfd\xfc\xfb"))
    with pytest.raises(WhetValueError, match=mentions("a.gguf", "tokenizer.ggml.tokens has a text that", "UTF-8")):
        read_tokenizer(path)


@pytest.mark.parametrize("value", [7, [1, 2], "a b"])
@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_wrong_array_type_is_named(key: str, value: Any, tmp_path: Path) -> None:
    path = vocab_files.write_file(tmp_path / "a.gguf", {**BPE, key: value})
    with pytest.raises(WhetValueError, match=rf"a\.gguf.*{key} is .*array of (strings|texts)"):
        read_tokenizer(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text("ab <>|▁é", max_size=4),
    lambda items: st.lists(items, max_size=5),
    max_leaves=6,
)
KEYS = sorted({*BPE, *PIECES, "tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.add_eos_token",
               "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces",
               "tokenizer.ggml.padding_token_id"})  # fmt: skip


@settings(max_examples=300)
@given(
    base=st.sampled_from([BPE, PIECES, UNIGRAM, {**BPE, "tokenizer.ggml.model": "gemma4"}]),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    text=st.text(max_size=20),
)
def test_random_metadata_give_a_tokenizer_or_a_named_error(
    base: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    try:
        tokenizer = GGUFTokenizer({**base, **changes})
    except WhetError:
        return
    ids = tokenizer.encode(text + "<|im_end|>")
    assert all(0 <= token < len(tokenizer) for token in ids)
    assert isinstance(tokenizer.decode(ids), str)
    assert all(0 <= token < len(tokenizer) for token in tokenizer.stop_token_ids)
    with contextlib.suppress(WhetError):
        assert isinstance(tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False), str)
