"""The bytes of single tokens, one after the other, are what the tokenizer decodes tokens to."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tests.models.tokenizers import vocab_files
from tests.models.tokenizers.texts import make_texts
from tests.raising import mentions
from tests.tiny import letters_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from whet.errors import WhetTypeError, WhetValueError
from whet.models.tokenizers import GGUFTokenizer, open_tokenizer, read_tokenizer
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from whet.models.tokenizers.token_texts import TextStream, read_token_texts


def check(tokenizer: Any, backend: Any, is_pieces: bool = False) -> None:
    """Check whole texts, and texts that begin and end at any token."""
    texts = read_token_texts(tokenizer, "test")
    rng = random.Random(0)
    for text in make_texts(600, ["<|im_end|>", "<|tool|>", "<s>", "</s>"]):
        ids = backend.encode(text).ids
        assert texts.text_of(ids) == backend.decode(ids, skip_special_tokens=True)
        begin = rng.randrange(len(ids) + 1)
        part = ids[begin : begin + rng.randrange(12)]
        expected = backend.decode(part, skip_special_tokens=True)
        found = texts.text_of(part)
        # SentencePiece's decoder replaces each byte of a run with invalid UTF-8 by U+FFFD.
        assert found == expected or (is_pieces and "\ufffd" in found and "\ufffd" in expected)
        stream = TextStream(texts)
        assert "".join(stream.add(token, 0, i == len(part) - 1) for i, token in enumerate(part)) == found


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_bpe(pre: str) -> None:
    trained = vocab_files.train_byte_level(list(PRE_TOKENIZERS[pre].patterns))
    check(trained, trained)
    ours = GGUFTokenizer(vocab_files.byte_level_metadata(trained, pre))
    check(ours, ours.backend)
    theirs = open_tokenizer(vocab_files.byte_level_metadata(trained, pre))
    check(theirs, ours.backend)


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("add_dummy_prefix", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(kind: str, add_dummy_prefix: bool, byte_fallback: bool, tmp_path: Path) -> None:
    model = vocab_files.train_sentencepiece(kind, add_dummy_prefix=add_dummy_prefix, byte_fallback=byte_fallback)
    tokenizer = read_tokenizer(vocab_files.write_file(tmp_path / "a.gguf", vocab_files.sentencepiece_metadata(model)))
    check(tokenizer, tokenizer.backend, is_pieces=True)
    assert read_token_texts(tokenizer, "test").drops_first_space == add_dummy_prefix


def test_metaspace_and_unigram_decoders() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "▁say": 1, "▁hel": 2, "lo": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    words.decoder = decoders.Metaspace()  # type: ignore[assignment]
    texts = read_token_texts(words, "test")
    for ids in ([1, 2, 3], [3, 2], [2], []):
        assert texts.text_of(ids) == words.decode(ids)
    assert read_token_texts(letters_tokenizer(), "test").text_of([1, 4, 3, 5, 2]) == "a b"


def test_folder_with_tokenizer_json(tmp_path: Path) -> None:
    trained = vocab_files.train_byte_level(list(PRE_TOKENIZERS["gpt-2"].patterns))
    transformers.PreTrainedTokenizerFast(tokenizer_object=trained).save_pretrained(tmp_path)
    ids = trained.encode("naïve 日本").ids
    assert read_token_texts(tmp_path, "test").text_of(ids) == "naïve 日本"
    with pytest.raises(WhetValueError, match=mentions("test", "stop", "tokenizer.json")):
        read_token_texts(tmp_path / "other", "test")
    metadata = vocab_files.byte_level_metadata(trained, "gpt-2")
    file = vocab_files.write_file(tmp_path / "a.gguf", metadata)
    assert read_token_texts(str(file), "test").text_of(ids) == "naïve 日本"


def test_decoders_that_depend_on_neighbours_are_rejected() -> None:
    def refused(decoder: Any, why: str, vocab: dict[str, int] | None = None) -> None:
        tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab or {"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
        if decoder is not None:
            tokenizer.decoder = decoder
        with pytest.raises(WhetValueError, match=mentions("test: stop", "stop_token_ids", why)):
            read_token_texts(tokenizer, "test")

    refused(None, "it has no decoder")
    refused(decoders.WordPiece(), "step WordPiece")
    refused(decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), "Replace")
    refused(decoders.Sequence([decoders.Strip("_", 1, 0)]), "step Strip")
    # Metaspace strips all leading spaces of a first token.
    refused(decoders.Metaspace(), "'▁▁a'", {"▁▁a": 0, "[UNK]": 1, "a": 2})
    for other in (None, 3, object()):
        with pytest.raises(WhetTypeError, match=mentions("tokenizer is a", "transformers", "GGUF")):
            read_token_texts(other, "test")


def test_byte_alphabet_is_gpt2s() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(sorted(alphabet))}, []))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    trained.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    texts = read_token_texts(trained, "test")
    assert sorted(texts.tokens) == [bytes([i]) for i in range(256)]
    assert json.loads(trained.decoder.__getstate__()) == json.loads(trained.to_str())["decoder"]
