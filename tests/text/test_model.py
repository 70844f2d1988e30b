"""Incremental detokenisation."""

from __future__ import annotations

import pytest

from whet.text.model import detokenise_stream


@pytest.fixture
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_detokenised_parts_are_whole_characters_and_add_up_to_the_text(tokenizer):
    text = "naïve 日本 👩‍🚀 x"
    ids = ids_of(tokenizer, text)
    assert len(ids) == len(text.encode())  # a token is a byte
    assert list(detokenise_stream(tokenizer, ids)) == list(text)
    # Invalid UTF-8 is yielded too, and does not block later characters.
    broken = [*ids[:2], *ids_of(tokenizer, "日")[:2], *ids_of(tokenizer, "xyz")]
    assert "".join(detokenise_stream(tokenizer, broken)) == tokenizer.decode(broken)
    assert "".join(detokenise_stream(tokenizer, broken[:4])) == "na\ufffd"
    assert list(detokenise_stream(tokenizer, [])) == []
    assert list(detokenise_stream(tokenizer, [1])) == []  # <eos>


def test_detokenised_parts_keep_leading_spaces():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["<unk>", "▁say", "▁hel", "lo", "▁you"])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.decoder = decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    assert list(detokenise_stream(words, [1, 2, 3, 4])) == ["say", " hel", "lo", " you"]
