"""Calls of tools are separated from text, however the reply is cut into parts."""

from pathlib import Path

import pytest

from whet.text.tool_calls import FORMATS, UNREADABLE, ToolCall, ToolParser, tool_format

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "number"}, "text": {"type": "string"}, "flag": {"type": "boolean"},
        "list": {"type": "array"}, "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "choice": {"$ref": "#/$defs/Choice"}, "circle": {"$ref": "#/$defs/Circle"}},
        "$defs": {"Choice": {"enum": [1, 2], "type": "integer"}, "Circle": {"$ref": "#/$defs/Circle"}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
HERMES, XML = tool_format("... <tool_call> ..."), tool_format("<tool_call> <function=NAME>")
LFM2, PHI = tool_format("<|tool_call_start|>"), tool_format("<|tool_call|>")
GEMMA = tool_format("'<|tool_call>call:' + name")
NEMOTRON = tool_format("<TOOLCALL>[")
MINISTRAL = tool_format("[TOOL_CALLS] [ARGS]")
MISTRAL, LLAMA = tool_format("[TOOL_CALLS]"), tool_format('{"name": f, "parameters": {}}')
OPEN = "<|tool_call_start|>[add(open('f'))]<|tool_call_end|>"
ADD = ToolCall("add", {"a": 1, "text": "x"})
CASES = [
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "x"}}\n</tool_call>', [ADD]),
    (
        HERMES,
        'I add.\n<tool_call>{"name": "add", "arguments": {"a": 1, "text": "x"}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        ["I add.", ADD, ToolCall("now", {})],
    ),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call> end', [
        '<tool_call>{"name": "other", "arguments": {}}</tool_call> end']),
    (HERMES, "<tool_call>{broken</tool_call>", ["<tool_call>{broken</tool_call>"]),
    (HERMES, "a < b, <tool", ["a < b, <tool"]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}}', [ToolCall("now", {})]),
    (
        XML,
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=text>\n1\n</parameter>\n"
        "<parameter=flag>\nTrue\n</parameter>\n<parameter=list>\n[1, 2]\n</parameter>\n"
        "<parameter=b>\nhalf\n</parameter>\n</function>\n</tool_call>",
        [ToolCall("add", {"a": 1, "text": "1", "flag": True, "list": [1, 2], "b": "half"})],
    ),
    (
        XML,
        "<tool_call>\n<function=add>\n<parameter=maybe>\nnull\n</parameter>\n<parameter=choice>\n2\n</parameter>\n"
        "<parameter=circle>\n1\n</parameter>\n<parameter=text>\nnull\n</parameter>\n</function>\n</tool_call>",
        [ToolCall("add", {"maybe": None, "choice": 2, "circle": "1", "text": "null"})],
    ),
    (LFM2, "<|tool_call_start|>[add(a=1, text='x'), now()]<|tool_call_end|>Done.", [ADD, ToolCall("now", {}), "Done."]),
    (LFM2, OPEN, [OPEN]),
    (PHI, '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "text": "x"}}]<|/tool_call|>', [ADD]),
    (
        NEMOTRON,
        'Yes.\n<TOOLCALL>[{"name": "add", "arguments": {"a": 1, "text": "x"}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>',
        ["Yes.", ADD, ToolCall("now", {})],
    ),
    (
        GEMMA,
        'Yes. <|tool_call>call:add{a:1,text:<|"|>x<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
        ["Yes.", ADD, ToolCall("now", {})],
    ),
    (
        GEMMA,
        '<|tool_call>call:add{list:[1,{b:<|"|>{c:<|"|>,<|"|>d e<|"|>:null}],text:<|"|>"a, b:<|"|>}<tool_call|>',
        [ToolCall("add", {"list": [1, {"b": "{c:", "d e": None}], "text": '"a, b:'})],
    ),
    (GEMMA, "<|tool_call>call:add{a:}<tool_call|>", ["<|tool_call>call:add{a:}<tool_call|>"]),
    (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "text": "x"}}]', [ADD]),
    (MINISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1, "text": "x"}', [ADD]),
    (
        MINISTRAL,
        'Yes.[TOOL_CALLS]add[ARGS]{"a": 1, "text": "x"}[TOOL_CALLS]now[ARGS]{}',
        ["Yes.", ADD, ToolCall("now", {})],
    ),
    (MINISTRAL, "[TOOL_CALLS]add[ARGS]{broken", ["[TOOL_CALLS]add[ARGS]{broken"]),
    (MINISTRAL, '[TOOL_CALLS]add[CALL_ID]a1B2[ARGS]{"a": 1, "text": "x"}', [ADD]),
    (MINISTRAL, "[TOOL_CALLS]add", ["[TOOL_CALLS]add"]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1, "text": "x"}}', [ADD]),
    (LLAMA, "It is {so}.", ["It is {so}."]),
    (LLAMA, '{"a": 1}', ['{"a": 1}']),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("form", "reply", "expected"), CASES)
def test_calls_are_separated_from_text(form, reply, expected, size):
    parser = ToolParser(form, TOOLS)
    found = []
    for start in range(0, len(reply), size):
        found += parser.add(reply[start : start + size])
    found += parser.add("", is_last=True)
    merged = []
    for each in found:
        if isinstance(each, str) and merged and isinstance(merged[-1], str):
            merged[-1] += each
        else:
            merged.append(each)
    assert merged == expected


def test_text_is_not_withheld():
    assert HERMES is not None
    parser = ToolParser(HERMES, TOOLS)
    assert parser.add("Hello <b") == ["Hello <b"]
    assert parser.add(" <tool") == []
    assert parser.add("box>") == [" <toolbox>"]


def test_a_template_has_at_most_one_format():
    assert tool_format("no tools") is None
    assert [tool_format(form.marker + form.opening) for form in FORMATS] == list(FORMATS)


def test_special_tokens_name_the_format_of_a_template_that_lists_tools_without_a_marker():
    special = ["<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"]
    assert tool_format("{% for tool in tools %}", special) == LFM2
    assert tool_format("{{ messages }}", special) is tool_format("{% for tool in tools %}", special[:1]) is None


def test_the_format_of_ministral_3_is_found_in_its_template():
    template = Path(__file__).parents[1] / "fixtures/templates/mistralai-Ministral-3-14B-Reasoning-2512.jinja"
    assert tool_format(template.read_text("utf-8")) == MINISTRAL


def failed(form, reply):
    found = ToolParser(form, TOOLS, with_errors=True).add(reply, is_last=True)
    return [(each.name, each.arguments, each.error) if isinstance(each, ToolCall) else each for each in found]


def test_calls_that_fail_are_returned_with_the_reason():
    unknown = "there is no tool 'other'; the tools are add, now"
    assert failed(HERMES, 'a <tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>') == [
        "a", ("other", {"a": 1}, unknown)]  # fmt: skip
    assert failed(LFM2, "<|tool_call_start|>[now(), other(a=1)]<|tool_call_end|>") == [
        ("now", {}, ""), ("other", {"a": 1}, unknown)]  # fmt: skip
    for form, reply, text in (
        (HERMES, "<tool_call>\n{broken</tool_call>", "{broken"),
        (HERMES, '<tool_call>{"name": "now"', '{"name": "now"'),  # truncated
        (XML, "<tool_call>add</tool_call>", "add"),
        (LFM2, OPEN, "[add(open('f'))]"),
        (MISTRAL, "[TOOL_CALLS] none", "none"),
        (LLAMA, '{"parameters": {}}', '{"parameters": {}}'),
    ):
        [(name, arguments, error)] = failed(form, reply)
        assert name == UNREADABLE and arguments == {"text": text} and "cannot be read" in error
    assert failed(LLAMA, '{"answer": 4}') == ['{"answer": 4}']
