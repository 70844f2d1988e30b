"""Every reply that a grammar of tool calls allows is read as calls of the offered tools, with valid arguments."""

import json

import numpy as np
import pytest
from tests.byte_tokenizer import EOS, byte_tokenizer

from whet.engine.grammar import Grammars
from whet.text.call_grammar import call_grammar
from whet.text.tool_calls import FORMATS, ToolCall, ToolParser

TOOLS = [
    {"function": {"name": "now"}},
    {
        "function": {
            "name": "find_flights",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 8},
                    "days": {"type": "integer", "minimum": 0, "maximum": 99},
                    "is_direct": {"type": "boolean"},
                    "sort": {"enum": ["price", "time", 3, None, True]},
                    "limit": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 1}, {"type": "null"}]},
                    "via": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                    "where": {"$ref": "#/$defs/Place"},
                },
                "required": ["city", "is_direct"],
                "additionalProperties": False,
                "$defs": {"Place": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"],
                                    "additionalProperties": False}},
            },
        }
    },
    {"function": {"name": "sleep", "parameters": {"type": "object", "properties": {"s": {"type": "number"}},
                                                 "additionalProperties": False}}},
]  # fmt: skip
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def mark(text):
    return json.dumps(text) if text else ""


def walk(tokenizer, constraint, rng, most=600):
    """Return a text that a grammar allows; None: it has not ended.

    It is of random ASCII characters, except that it often ends where it may, and strings do.
    """
    ids = []
    for _ in range(most):
        bits = np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")[: EOS + 1]
        allowed = [int(i) for i in np.flatnonzero(bits[:EOS]) if tokenizer.decode([int(i)]).isascii()]
        if bits[EOS] and (not allowed or rng.random() < 0.5):
            return tokenizer.decode(ids)
        ends = [i for i in allowed if tokenizer.decode([i]) in '"<\n/']
        ids.append(int(rng.choice(ends if ends and rng.random() < 0.6 else allowed)))
        constraint.add(ids[-1:])
    return None


CHECKS = {
    "city": lambda x: isinstance(x, str),
    "days": lambda x: type(x) is int and 0 <= x <= 99,
    "is_direct": lambda x: isinstance(x, bool),
    "sort": lambda x: x in ["price", "time", 3, None, True, "3", "null", "true"],  # text is not typed by an enum
    "limit": lambda x: x is None or 1 <= x <= 9,
    "via": lambda x: len(x) <= 3 and all(isinstance(each, bool) for each in x),
    "where": lambda x: x["x"] in (1, 2) and len(x) == 1,
    "s": lambda x: isinstance(x, (int, float)),
}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.content + form.opening)
def test_allowed_replies_are_calls(form, tokenizer):
    rng = np.random.default_rng(5)
    grammars = Grammars(tokenizer, EOS + 4, [EOS])
    grammar = grammars.from_lark(call_grammar(form, TOOLS, mark))
    names, n_read = set(), 0
    for _ in range(60):
        reply = walk(tokenizer, grammars.constrain(grammar), rng)
        if reply is None:
            continue
        calls = ToolParser(form, TOOLS).add(reply, is_last=True)
        assert calls and all(isinstance(call, ToolCall) for call in calls), reply
        for call in calls:
            schema = SCHEMAS[call.name]
            assert set(schema.get("required", ())) <= call.arguments.keys() <= schema.get("properties", {}).keys()
            assert all(CHECKS[key](value) for key, value in call.arguments.items()), call
            names.add(call.name)
        n_read += 1
    assert names == SCHEMAS.keys() and n_read >= 20


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.content + form.opening)
def test_calls_with_all_arguments_are_allowed(form, tokenizer):
    replies = {
        "xml": """\
<tool_call>
<function=find_flights>
<parameter=city>
Rome
</parameter>
<parameter=is_direct>
true
</parameter>
<parameter=days>
3
</parameter>
<parameter=where>
{"x": 2}
</parameter>
</function>
</tool_call>""",
        "python": '<|tool_call_start|>[now(), find_flights(city="Rome", is_direct=True, days=3, where={"x": 2})]'
        "<|tool_call_end|>",
        "braces": '<|tool_call>call:find_flights{city:<|"|>Rome<|"|>,is_direct:true,days:3,where:{"x": 2}}<tool_call|>',
    }
    if form.content not in replies:
        pytest.skip("JSON is tested by the server")
    grammars = Grammars(tokenizer, EOS + 4, [EOS])
    constraint = grammars.constrain(grammars.from_lark(call_grammar(form, TOOLS, mark)))
    for token_id in tokenizer.encode(replies[form.content]).ids:
        bits = np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")
        assert bits[token_id], tokenizer.decode([token_id])
        constraint.add([token_id])
    assert np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")[EOS]
    call = ToolParser(form, TOOLS).add(replies[form.content], is_last=True)[-1]
    assert call == ToolCall("find_flights", {"city": "Rome", "is_direct": True, "days": 3, "where": {"x": 2}})
