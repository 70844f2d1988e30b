"""Replies are parsed by the response templates of tokenizers, however they are cut into parts."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl

from whet.errors import WhetValueError
from whet.text.response_template import ResponseTemplate, find_response_template
from whet.text.thinking import TextChunk
from whet.text.tool_calls import UNREADABLE, ToolCall

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "number"}, "text": {"type": "string"}, "flag": {"type": "boolean"},
        "list": {"type": "array"}, "ids": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
PLAIN = {"close_pattern": r"<end>\s*|$"}
QWEN = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<end>\s*", "content": "text", "optional": False},
    },
}  # fmt: skip
XML = {
    "start_anchor_pattern": r"<(?:assistant|model)>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>\s*<f=(?P<name>\w+)>", "close": ["</call>", "</call>\n"], "repeats": True,
            "content": "xml-inline", "transform": FUNCTION,
            "content_args": {
                "tag_pattern": r"<p=(?P<key>\w+)>(?P<value>.*?)</p>", "merge_duplicates": True,
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
        },
        "content": PLAIN,
    },
}  # fmt: skip
GEMMA = {
    "start_anchor": ["<model>", "<user>"],
    "fields": {
        "thinking": {"open": "<thought>", "close": "</thought>", "repeats": True, "join": "; "},
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)", "close_pattern": r"/>(?P<end>\.?)", "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<"', '">']]},
            "transform": FUNCTION | {"id": "{end}"},
        },
        "content": PLAIN,
    },
}  # fmt: skip
PYTHON = {
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<|", "close": "|>", "content": "python-call-list", "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {"content_args": {"strip": False}},
    },
}  # fmt: skip
LINES = {
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+)\n", "close": "\nEND", "content": "kv-lines", "transform": FUNCTION,
            "content_args": {"line_sep": ";", "kv_sep": "=", "value_parser": {"name": "int"}},
        },
        "content": {"open": "SAY ", "close": "\n"},
        "reasoning": {},
    },
}  # fmt: skip
AHEAD = {
    "start_anchor": "<assistant><think>\n",
    "fields": {
        "reasoning_content": {"open_pattern": r"(?=[\s\S]*?</think>)", "close_pattern": r"</think>\s*"},
        "content": PLAIN,
    },
}
ADD = ToolCall("add", {"a": 1, "text": "x"})
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "x"}}\n</tool_call>'


def thinking(content):
    return TextChunk(content, True)


def text(content):
    return TextChunk(content, False)


CASES = [
    (QWEN, f"<think>\nHm. \n</think>\n\nI add.\n{CALL}\n{CALL}<end>\n", [thinking("Hm."), text("I add."), ADD, ADD]),
    (QWEN, "a  <think> b\n", [text("a"), thinking("b")]),
    (QWEN, "a </thin <tool_ca", [text("a </thin <tool_ca")]),
    (QWEN, f"a {CALL} b {CALL} c <end> d", [text("a"), ADD, text("b"), ADD, text("cd")]),
    (QWEN, "a <tool_call>{broken}</tool_call>  b", [text("a <tool_call>{broken}</tool_call>  b")]),
    (QWEN, '<tool_call>{"name": "other"}</tool_call>', [text('<tool_call>{"name": "other"}</tool_call>')]),
    (QWEN, '<tool_call>{"name": "now", "arguments": "{}"}', [ToolCall("now", {})]),
    (XML, '<call> <f=add><p=a>1</p><p=text>1</p><p=flag>True</p><p=b>half</p></call>\n<call><f=now></call>', [
        ToolCall("add", {"a": 1, "text": 1, "flag": True, "b": "half"}), ToolCall("now", {})]),
    (XML, "<call><f=add><p=ids>1</p><p=ids>x</p><p=list>1</p><p=list>2</p></call> Yes", [
        ToolCall("add", {"ids": [1, "x"], "list": [1, 2]}), text("Yes")]),
    (GEMMA, '<thought>a</thought><thought>b </thought> <call:add{a: 1, text: <"x: "y"">, b:0.5}/>.', [
        thinking("a; b"), ToolCall("add", {"a": 1, "text": 'x: "y"', "b": 0.5})]),
    (PYTHON, " a <|[add(a=1, text='x'), now()]|> b\n", [text(" a "), ADD, ToolCall("now", {}), text(" b\n")]),
    (PYTHON, "<|[add(1)]|>", [text("<|[add(1)]|>")]),
    (LINES, "hm\nSAY hello\nCALL add\na=1; ids = 22\nEND", [
        thinking("hm"), text("hello"), ToolCall("add", {"a": 1, "ids": 22})]),
    (LINES, "CALL add\na=one\nEND", [text("CALL add\na=one\nEND")]),
    (AHEAD, "so </think> it <end>", [thinking("so"), text("it")]),
    (AHEAD, "so it", [text("so it")]),
    (GEMMA, "a <end> <end><end>b\n<end>", [text("ab")]),
]  # fmt: skip


def parse(spec, parts, prompt="", tools=TOOLS):
    parser = ResponseTemplate(spec).parser(tools, prompt)
    found = [each for part in parts for each in parser.add(part)] + parser.add("", is_last=True)
    merged = []
    for each in found:
        same = merged and isinstance(each, TextChunk) and isinstance(merged[-1], TextChunk)
        if same and each.is_thinking == merged[-1].is_thinking:
            merged[-1] = TextChunk(merged[-1].text + each.text, each.is_thinking)
        else:
            merged.append(each)
    return merged


@pytest.mark.parametrize(("spec", "reply", "expected"), CASES)
def test_replies_are_parsed_in_all_cuts(spec, reply, expected):
    n = len(reply)
    assert parse(spec, [reply]) == expected
    assert parse(spec, list(reply)) == expected
    for i in range(n):
        assert parse(spec, [reply[:i], reply[i:]]) == expected
    for i, j in itertools.combinations(range(0, n, 3), 2):
        assert parse(spec, [reply[:i], reply[i:j], reply[j:]]) == expected


def test_text_is_not_withheld():
    parser = ResponseTemplate(QWEN).parser(TOOLS)
    assert parser.add("Hello <b") == [text("Hello <b")]
    assert parser.add(" <tool") == []
    assert parser.add("box>") == [text(" <toolbox>")]
    assert parser.add("<think>") == []
    assert parser.add("a") == [thinking("a")]


def test_a_prompt_may_begin_the_reply():
    prompt = "<user>Hi <assistant>\nOld<end><user>Hi <assistant>\n<think>\nWell, "
    assert parse(QWEN, ["so.</think>Yes"], prompt) == [thinking(" so."), text("Yes")]
    assert parse(QWEN, ["so.</think>Yes"], "no anchor <think>") == [text("so.</think>Yes")]


def test_calls_without_tools_are_text():
    assert parse(QWEN, [CALL], tools=()) == [text(CALL)]


def change(path, value):
    """Return QWEN with another value."""
    *keys, last = path.split(".")
    found = {**QWEN, "fields": {name: dict(field) for name, field in QWEN["fields"].items()}}
    part = found
    for key in keys:
        part = part[key]
    part[last] = value
    return found


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("text", ["'text'", "expected an object"]),
        (change("version", 2), ["version is 2", "expected 1"]),
        (change("colour", 1), ["'colour'", "start_anchor"]),
        (change("fields.citations", {}), ["'citations'", "reasoning_content"]),
        (change("defaults", {"name": "x"}), ["'name'"]),
        (change("start_anchor", ""), ["start_anchor", "''"]),
        ({"fields": QWEN["fields"]}, ["no start_anchor"]),
        (change("fields.content.colour", 1), ["field content", "'colour'"]),
        (change("fields.content.content", "json"), ["field content", "'json'", "only text"]),
        (change("fields.content.transform", "{content}"), ["field content", "transform"]),
        (change("fields.tool_calls.content", "yaml"), ["field tool_calls", "'yaml'", "xml-inline"]),
        (change("fields.tool_calls.content_args", {"colour": 1}), ["content_args of json", "'colour'"]),
        (change("fields.tool_calls.open_pattern", "x"), ["field tool_calls", "both open and open_pattern"]),
        (change("fields.tool_calls.close_pattern", "("), ["close_pattern", "'('", "not a pattern"]),
        (change("fields.tool_calls.open", [""]), ["field tool_calls", "open is ['']"]),
        (change("fields.tool_calls.transform", "call {content}"), ["mixes"]),
        (change("fields.content.join", " "), ["join", "repeats"]),
        (change("fields.reasoning_content", {}), ["reasoning_content and content have no open"]),
        (change("fields.tool_calls", {"open": "x", "transform_each": True}), ["transform_each"]),
        (change("fields.tool_calls", {"open": "x", "content": "xml-inline"}), ["tag_pattern"]),
        (
            change("fields.tool_calls", {
                "open": "x", "content": "xml-inline", "content_args": {"tag_pattern": "(?P<key>.)"}}),
            ["['key']", "expected key and value"],
        ),
        (
            change("fields.tool_calls", {
                "open": "x", "content": "kv-lines", "content_args": {"value_parser": {"name": "date"}}}),
            ["'date'", "int"],
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(spec, words):
    with pytest.raises(WhetValueError) as error:
        ResponseTemplate(spec)
    assert all(word in str(error.value) for word in ["response_template", *words]), str(error.value)
    with pytest.warns(UserWarning, match="chosen by the chat template"):
        assert find_response_template(SimpleNamespace(response_template=spec)) is None


def test_tokenizers_without_a_response_template_have_none():
    assert find_response_template(SimpleNamespace()) is None
    assert find_response_template(SimpleNamespace(response_template=QWEN)) is not None


GPT_OSS = (Path(trl.__file__).parent / "chat_templates/gptoss.jinja").read_text("utf-8")
SUM = ToolCall("add", {"a": 1, "text": "x"})


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<|channel|>final<|message|>Hi.<|return|>", [TextChunk("Hi.", False)]),
        (
            "<|channel|>analysis<|message|>Two\nlines.<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
            [TextChunk("Two\nlines.", True), TextChunk("Hi.", False)],
        ),
        (
            "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1, "text": "x"}<|call|>',
            [TextChunk("Sum.", True), SUM],
        ),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": "1", "text": "x"}', [SUM]),
        (
            "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>commentary to=functions.now"
            "<|message|>{}<|call|>",
            [TextChunk("First.", False), ToolCall("now", {})],
        ),
    ],
)
def test_harmony(reply, expected):
    """Channels of gpt-oss, whose tokenizer has no response template; whole, and character by character."""
    template = find_response_template(SimpleNamespace(chat_template=GPT_OSS))
    assert template is not None and template.has_calls
    for parts in ([reply], list(reply)):
        parser, found = template.parser(TOOLS, "<|start|>user<|message|>Add.<|end|><|start|>assistant"), []
        for part in parts:
            found += parser.add(part)
        found += parser.add("", is_last=True)
        joined = []
        for each in found:
            before = joined[-1] if joined else None
            if isinstance(each, TextChunk) and isinstance(before, TextChunk) and before[1] == each[1]:
                joined[-1] = TextChunk(before.text + each.text, each.is_thinking)
            else:
                joined.append(each)
        assert joined == expected


def test_calls_that_fail_are_returned_with_the_reason():
    template = find_response_template(SimpleNamespace(chat_template=GPT_OSS))
    assert template is not None
    reply = (
        "<|channel|>commentary to=functions.other<|message|>{}<|call|><|start|>assistant"
        "<|channel|>commentary to=functions.now<|message|>{broken<|call|>"
    )
    unknown, broken = template.parser(TOOLS, "<|start|>assistant", with_errors=True).add(reply, is_last=True)
    assert isinstance(unknown, ToolCall) and isinstance(broken, ToolCall)
    assert unknown[:2] == ("other", {}) and "no tool 'other'" in unknown.error
    assert broken[:2] == (UNREADABLE, {"text": "{broken"}) and "cannot be read" in broken.error
