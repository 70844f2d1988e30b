"""Grammars allow exactly the tokens that may follow."""

import json
import re

import numpy as np
import pytest
from tests.byte_tokenizer import EOS, byte_tokenizer
from tests.engine.tiny_models import tiny_model
from tests.raising import assert_raises
from tests.tiny import ScriptedEngine

from whet.config.sampling import SamplingParams, StreamKey
from whet.engine import Engine
from whet.engine.grammar import Grammars
from whet.errors import WhetTypeError, WhetValueError
from whet.rollout import rollout
from whet.rollout.torch_engine import TorchEngine


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


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


@pytest.mark.parametrize("schema", [{"type": "object", "additionalProperties": {"type": "integer"}}, {}, True])
def test_a_schema_allows_indentation_but_no_endless_whitespace(tokenizer, grammars, schema):
    grammar = grammars.from_schema(schema)
    for text in ('{"a":1}', '{"a": 1, "b": 2}', '{\n  "a": 1,\n  "b": 2\n}'):
        constraint = grammars.constrain(grammar)
        constraint.add(tokenizer.encode(text).ids)
        assert "<eos>" in texts(tokenizer, constraint.allowed())
    for text in ("{ ", "{\n" + " " * 32):
        constraint = grammars.constrain(grammar)
        constraint.add(tokenizer.encode(text).ids)
        assert texts(tokenizer, constraint.allowed()) == {'"', "}"}
    own = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    constraint = grammars.constrain(grammars.from_schema(own))
    constraint.add(tokenizer.encode("{").ids)
    assert texts(tokenizer, constraint.allowed()) == {'"', "}"}


def test_completions_of_one_grammar_are_independent(tokenizer, grammars):
    grammar = grammars.from_choices(["ab", "cd"])
    first, second = grammars.constrain(grammar), grammars.constrain(grammar)
    first.add(tokenizer.encode("a").ids)
    assert texts(tokenizer, first.allowed()) == {"b"}
    assert texts(tokenizer, second.allowed()) == texts(tokenizer, grammars.constrain(grammar).allowed()) == {"a", "c"}


def test_grammars_that_are_no_longer_kept_can_be_followed(tokenizer, grammars):
    grammar = grammars.from_choices(["first"])
    for i in range(50):
        grammars.from_choices([f"other {i}"])
    constraint = grammars.constrain(grammar)
    assert texts(tokenizer, constraint.allowed()) == {"f"}


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


# --- through the engine -----------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}


@pytest.fixture(scope="module")
def engine(tokenizer):
    model = tiny_model("llama", vocab_size=EOS + 4, max_position_embeddings=256)
    with Engine.from_model(model, weights="float32", tokenizer=tokenizer) as engine:
        yield engine


def test_every_way_of_sampling_follows_a_grammar(engine, tokenizer):
    sampling = SamplingParams(regex="(ab|cd){2,5}x", stop_token_ids=(EOS,), max_new_tokens=40, seed=2)
    prompts = [[5, 6], [7]]
    groups = engine.generate(prompts, 3, sampling)
    for group in groups:
        for sample in group:
            assert re.fullmatch("(ab|cd){2,5}x", tokenizer.decode(sample.token_ids))
            assert sample.finish_reason == "stop" and sample.token_ids[-1] == EOS
    assert [token.token_id for token in engine.stream(prompts[0], sampling)] == groups[0][0].token_ids
    others = engine.generate(prompts[1:], 3, sampling, keys=[StreamKey(1)])
    assert [sample.token_ids for sample in others[0]] == [sample.token_ids for sample in groups[1]]
    free = engine.generate(
        prompts, 1, SamplingParams(max_new_tokens=5)
    )  # in the same batch as a stream under a grammar
    with engine.stream(prompts[0], sampling) as stream:
        first = next(stream)
        assert engine.generate(prompts, 1, SamplingParams(max_new_tokens=5)) == free
        assert [first.token_id, *(token.token_id for token in stream)] == groups[0][0].token_ids


def test_a_grammar_that_begins_behind_a_text(engine, tokenizer):
    [q] = tokenizer.encode("q").ids
    bias = {q: 4.0, **dict.fromkeys(tokenizer.encode("ab").ids, -4.0)}
    settings = {"logit_bias": bias, "stop_token_ids": (EOS,), "max_new_tokens": 200}
    sampling = SamplingParams(regex="[ab]{4}", grammar_after="q", kept_tokens=True, **settings)
    for sample in engine.generate([[5, 6]], 8, sampling)[0]:
        text = tokenizer.decode(sample.token_ids)
        free, found, rest = text.partition("q")
        assert found and (re.fullmatch("[ab]{4}", rest) or sample.finish_reason == "length")
        assert all(sample.kept_tokens[t] is None for t in range(len(free)))
    with pytest.raises(WhetValueError, match="grammar_after"):
        SamplingParams(grammar_after="q")


def test_rollouts_begin_a_grammar_behind_the_thinking_that_prompts_open(tokenizer):
    class Tokenizer:
        chat_template = "{{ messages }}<think>{# </think> #}"

        def __call__(self, text, add_special_tokens):
            return {"input_ids": tokenizer.encode(text).ids}

        def decode(self, ids, skip_special_tokens):
            return tokenizer.decode(ids)

    def sampled(*texts, **settings):
        engine = ScriptedEngine([[[5]]] * len(texts))
        ids = [tokenizer.encode(text).ids for text in texts]
        rollout.sample(engine, rollout.Prompts(ids, list(texts), {}), 1, SamplingParams(**settings), Tokenizer())
        return engine.asked[0][2].grammar_after

    assert sampled("a<think>\n", "b<think>", regex="x") == "</think>"
    assert sampled("a", "b", regex="x") == sampled("a<think>") == ""
    with pytest.raises(WhetValueError, match="thinking"):
        sampled("a", "b<think>", regex="x")


def test_a_schema_is_followed_greedily_and_by_several_samples(engine, tokenizer):
    for settings in ({"temperature": 0.0}, {"temperature": 2.0}):
        sampling = SamplingParams(schema=SCHEMA, stop_token_ids=(EOS,), max_new_tokens=250, seed=1, **settings)
        for sample in engine.generate([[9]], 4, sampling)[0]:
            text = tokenizer.decode(sample.token_ids)
            if sample.finish_reason == "stop":
                assert json.loads(text)["n"] <= 99
            else:  # random weights may write blanks for ever
                assert text.startswith("{")


def test_log_probs_are_of_the_allowed_tokens(engine, tokenizer):
    sampling = SamplingParams(lark='start: "q" /[ab]/', stop_token_ids=(EOS,), max_new_tokens=9, top_logprobs=5)
    [[sample]] = engine.generate([[4]], 1, sampling)
    assert sample.logprobs[0] == pytest.approx(0, abs=1e-6) and len(sample.top_logprobs[0]) == 1
    assert sum(np.exp(logprob) for _, logprob in sample.top_logprobs[1]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"schema": {"type": "text"}}, ("Engine.generate", "schema", "not supported")),
        ({"regex": "("}, ("Engine.generate", "regex", "not supported")),
        ({"lark": "start: other"}, ("Engine.generate", "grammar", "not supported")),
        ({"regex": "a", "stop_token_ids": ()}, ("Engine.generate", "regex needs stop_token_ids")),
    ],
)
def test_grammars_that_cannot_be_followed_are_refused(engine, settings, facts):
    sampling = SamplingParams(**{"stop_token_ids": (EOS,), **settings})
    assert_raises(WhetValueError, facts, engine.generate, [[1]], 1, sampling)
    assert engine.memory["kv_used_bytes"] == 0


def test_grammars_need_a_tokenizer_and_the_native_engine():
    sampling = SamplingParams(regex="a", stop_token_ids=(1,))
    model = tiny_model("llama")
    with Engine.from_model(model, weights="float32") as engine:
        assert_raises(WhetValueError, ("regex is set", "no tokenizer"), engine.generate, [[1]], 1, sampling)
    assert_raises(WhetValueError, ("regex is set", "native engine"), TorchEngine(model).generate, [[1]], 1, sampling)
    assert_raises(WhetValueError, ("schema and regex", "at most one"), SamplingParams, schema={}, regex="a")
    assert_raises(WhetTypeError, ("schema is '{}'", "dict"), SamplingParams, schema="{}")
