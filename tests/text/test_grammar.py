"""Grammars allow exactly the tokens that may follow."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from whet.errors import WhetValueError
from whet.text.grammar import Grammars

EOS = 256


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, EOS + 4, [EOS])


def texts(tokenizer, bitmap):
    bits = np.unpackbits(bitmap.view(np.uint8), bitorder="little")
    return {"<eos>" if i == EOS else tokenizer.decode([i]) for i in np.flatnonzero(bits[: EOS + 4])}


def test_a_choice_is_followed_to_its_end(tokenizer, grammars):
    constraint = grammars.constrain(grammars.from_choices(["no", "<n>"]))
    assert texts(tokenizer, constraint.allowed()) == {"n", "<"}
    constraint.add(tokenizer.encode("<n").ids)
    assert texts(tokenizer, constraint.allowed()) == {">"}
    constraint.add(tokenizer.encode(">").ids)
    assert texts(tokenizer, constraint.allowed()) == {"<eos>"}


def test_a_grammar_begins_behind_a_text(tokenizer, grammars):
    constraint = grammars.constrain(grammars.from_choices(["yes", "no"]), after="</think>")
    for part in ("I think </thi", "nk>"):
        assert (constraint.allowed() == -1).all()
        constraint.add(tokenizer.encode(part).ids)
    assert texts(tokenizer, constraint.allowed()) == {"y", "n"}


def test_deep_and_large_schemas_are_refused(grammars):
    schema = {}
    for _ in range(100):
        schema = {"properties": {"a": schema}}
    with pytest.raises(WhetValueError, match="64 levels"):
        grammars.from_schema(schema)
    with pytest.raises(WhetValueError, match="characters"):
        grammars.from_regex("a" * 300_000)
