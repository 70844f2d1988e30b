"""Grammars allow exactly the tokens that may follow."""

import json

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


def chain(n, wrap):
    """Return a schema of n definitions, each of which refers to the next."""
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)} | {f"d{n}": {"const": 1}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize("number", [-1e308, -(2**63) + 1, 2**80, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["enum", "minimum"])
def test_numbers_that_would_end_the_process_are_refused(grammars, key, number):
    """llguidance overflows its stack."""
    schema = {"type": "integer", key: [1, number] if key == "enum" else number}
    for make in (
        lambda: grammars.from_schema({"items": schema}),
        lambda: grammars.from_lark(f"start: %json {json.dumps(schema)}"),
    ):
        with pytest.raises(WhetValueError, match="number out of range"):
            make()


def test_levels_that_would_end_the_process_are_refused(grammars):
    """llguidance overflows its stack at chains of 1,000 definitions or rules."""
    for schema in (chain(1000, lambda part: {"properties": {"a": part}}), chain(5000, lambda part: part)):
        for make, given in ((grammars.from_schema, schema), (grammars.from_lark, f"start: %json {json.dumps(schema)}")):
            with pytest.raises(WhetValueError, match="levels with its definitions"):
                make(given)
    elsewhere = {"properties": {f"p{i}": {"items": {"$ref": f"#/properties/p{i + 1}"}} for i in range(1000)}}
    with pytest.raises(WhetValueError, match="levels with its definitions"):
        grammars.from_schema(elsewhere)
    rules = "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(5000)), 'a5000: "x"'])
    with pytest.raises(WhetValueError, match="5,002 lines"):
        grammars.from_lark(rules)
    with pytest.raises(WhetValueError, match="not followed by a schema"):
        grammars.from_lark("start: %json {")
    assert grammars.from_schema(chain(150, lambda part: {"items": part, "type": "array"}))
    assert grammars.from_schema({"properties": {"definitions": {"type": "array", "items": {"$ref": "#"}}}})


def test_panics_of_the_library_are_errors(grammars):
    with pytest.raises(WhetValueError, match="schema is not supported"):
        grammars.from_schema({"type": "integer", "multipleOf": "é" * 50})
