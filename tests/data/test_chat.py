"""The forms of published chats, content that chat templates drop, and texts that are not Unicode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tests.data.test_rows import words
from tests.data.test_turns import NEMO, QWEN3, QWEN25, SMOL, published, tokenizer_of
from tests.raising import assert_raises
from torch.utils.data import DataLoader, Subset

from whet.data.batches import batches_in_order
from whet.data.messages import drop_nulls
from whet.data.rows import tokenize_completion, tokenize_preference, tokenize_prompt, tokenize_turns
from whet.data.sources import read_rows
from whet.errors import WhetTypeError, WhetValueError

SMOL2 = "HuggingFaceTB-SmolLM2-135M-Instruct"
READERS = [tokenize_completion, tokenize_turns]


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    """Return a conversation with a tool call."""
    function = {"id": "abcdefghi", "type": "function", "function": {"name": "w", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "weather in Paris?"},
            {"role": "assistant", "content": "", "tool_calls": [function], **more},
            {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
            {"role": "assistant", "content": "It is sunny."},
        ]
    }


def talk(*contents: Any, **more: Any) -> dict[str, Any]:
    """Return turns of user and assistant; ``more`` are fields of the last one."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    messages[-1] |= more
    return {"messages": messages}


def text_of(row: dict[str, Any], tokenizer: Any) -> str:
    prompt_ids, completion_ids = tokenize_completion(row, tokenizer)
    return tokenizer.decode(prompt_ids + completion_ids, skip_special_tokens=False)


# --- arguments of tool calls ----------------------------------------------------------------------

WANTS_TEXT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name + '('"
    " + c.function.arguments + ')' }}{% endfor %}<|im_end|>{% endfor %}"
)
PRINTS = WANTS_TEXT.replace("c.function.name + '(' + c.function.arguments + ')'", "c.function.arguments")


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN25, '{"name": "w", "arguments": {"city": "Paris é"}}'),
        (NEMO, '{"name": "w", "arguments": {"city": "Paris é"}, "id": "abcdefghi"}'),
        (WANTS_TEXT, 'w({"city": "Paris é"})'),  # refuses a dict
        (PRINTS, ':{"city": "Paris é"}<'),  # prints a dict as Python does
    ],
)
def test_arguments_as_json_or_dicts_render_alike(template: str, expected: str, is_own: bool) -> None:
    tokenizer = tokenizer_of(template, is_own=is_own) if "{%" in template else published(template, is_own)
    texts = {text_of(call(arguments), tokenizer) for arguments in ({"city": "Paris é"}, '{"city": "Paris é"}')}
    assert len(texts) == 1 and expected in texts.pop()


def test_content_that_repeats_the_arguments_has_no_effect() -> None:
    row = call({"city": "Paris"})
    row["messages"][2]["content"] = "{'city': 'Paris'}"
    assert '"arguments": {"city": "Paris"}' in text_of(row, published(QWEN25))
    row["messages"][1]["tool_calls"] = [{"name": "w", "arguments": '{"city": "Paris"}'}]  # not in a function
    assert '"arguments": {"city": "Paris"}' in text_of(row, published(QWEN25))


def test_arguments_that_are_not_an_object_are_unchanged() -> None:
    assert '"arguments": "Paris"' in text_of(call("Paris"), published(QWEN25))
    assert '"arguments": {}' in text_of(call(""), published(QWEN25)) == text_of(call({}), published(QWEN25))


def test_tool_calls_as_json() -> None:
    row = call({"city": "Paris"})
    expected = text_of(row, published(QWEN25))
    row["messages"][1]["tool_calls"] = '[{"function": {"name": "w", "arguments": "{\\"city\\": \\"Paris\\"}"}}]'
    assert text_of(row, published(QWEN25)) == expected
    row["messages"][1]["tool_calls"] = "w(Paris)"
    message = ("tool_calls", "'w(Paris)'", "list of dicts")
    assert_raises(WhetTypeError, message, tokenize_completion, row, published(QWEN25))


# --- what templates leave out ---------------------------------------------------------------------


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    ("name", "row", "what"),
    [
        (SMOL2, call({"city": "Paris"}), "tool_calls"),
        (SMOL2, talk("a", "b", reasoning_content="hm"), "reasoning"),
        (QWEN25, talk("a", "b", thinking="hm"), "reasoning"),
    ],
)
def test_content_that_a_template_drops_is_rejected(name: str, row: dict[str, Any], what: str, is_own: bool) -> None:
    tokenizer = published(name, is_own)
    for read in READERS:
        message = (f"the row has {what}", "chat template", "--chat-template")
        assert_raises(WhetValueError, message, read, row, tokenizer)
    pair = {"prompt": row["messages"][:-1], "chosen": row["messages"][-1:], "rejected": row["messages"][-1:]}
    assert_raises(WhetValueError, (what, "chat template"), tokenize_preference, pair, tokenizer)


@pytest.mark.parametrize("is_own", [True, False])
def test_text_next_to_tool_calls_is_rejected_if_learnt(is_own: bool) -> None:
    row, tokenizer = call({"city": "Paris"}, content="let me look"), published(NEMO, is_own)
    assert_raises(WhetValueError, ("texts", "tool_calls", "chat template"), tokenize_turns, row, tokenizer)
    assert tokenize_completion(row, tokenizer)  # of the last turn


def test_a_prompt_is_rejected_only_if_its_tool_calls_are_dropped() -> None:
    # Templates leave the reasoning of earlier turns out of prompts by design.
    prompt = {"prompt": call({"city": "Paris"})["messages"][:3]}
    assert_raises(WhetValueError, "the row has tool_calls", tokenize_prompt, prompt, published(SMOL2))
    thought = [*talk("a", "b", reasoning_content="hm")["messages"], {"role": "user", "content": "c"}]
    answers = [[{"role": "assistant", "content": content}] for content in "de"]
    for name in (QWEN3, SMOL2):
        assert tokenize_prompt({"prompt": thought}, published(name))
        assert tokenize_completion({"prompt": thought, "completion": answers[0]}, published(name))
        assert tokenize_preference({"chosen": thought + answers[0], "rejected": thought + answers[1]}, published(name))


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_each_name_of_reasoning_is_read(name: str, is_own: bool) -> None:
    assert "<think>\nhm\n</think>\n\nb" in text_of(talk("a", "b", **{name: "hm"}), published(QWEN3, is_own))


# --- content in parts -----------------------------------------------------------------------------


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


TAKES_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)
AS_JSON = "{% for m in messages %}{{ m.content if m.content is string else m.content | tojson }}<|im_end|>{% endfor %}"
AS_PYTHON = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
FORGETS = "{% for m in messages %}{{ m.content if m.content is string }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("template", [SMOL2, QWEN25, QWEN3, NEMO, SMOL, AS_JSON, AS_PYTHON, FORGETS])
def test_parts_are_joined_if_a_template_reads_text(template: str, is_own: bool) -> None:
    tokenizer = tokenizer_of(template, is_own=is_own) if "{%" in template else published(template, is_own)
    rows = talk("a b", "c\nd"), talk(parts("a b"), parts("c", "d")), talk(parts("a b"), "c\nd")
    assert len({text_of(row, tokenizer) for row in rows}) == 1
    turns = talk(parts("a"), parts("b"), parts("c"), parts("d"))
    if template not in (QWEN3,):
        assert tokenize_turns(turns, tokenizer) == tokenize_turns(talk(*"abcd"), tokenizer)


def test_parts_are_kept_if_a_template_reads_them() -> None:
    assert text_of(talk(parts("a", "b"), "c"), tokenizer_of(TAKES_PARTS)) == "user:ab<|im_end|>assistant:c<|im_end|>"


@pytest.mark.parametrize(
    "part", [{"type": "image", "image": b""}, {"type": "image_url", "image_url": {}}, {"text": 3}, "a"]
)
def test_parts_other_than_text_are_rejected(part: Any) -> None:
    row = talk([*parts("a"), part], "b")
    assert_raises(WhetValueError, ("content", "images"), tokenize_completion, row, words())
    assert_raises(WhetValueError, ("content", "images"), tokenize_prompt, {"prompt": row["messages"][:1]}, words())


@pytest.mark.parametrize("name", ["image", "images", "videos", "pixel_values"])
def test_columns_of_images_are_rejected(name: str) -> None:
    message = (repr(name), "only text")
    for read, row in ((tokenize_completion, talk("a", "b")), (tokenize_prompt, {"prompt": "a"})):
        assert_raises(WhetValueError, message, read, {**row, name: [{"bytes": b"", "path": None}]}, words())
        assert read({**row, name: []}, words()) == read({**row, name: None}, words())
    for named in ("python:3.12", 7, None):
        assert tokenize_prompt({"prompt": "a", "image": named}, words())


# --- nulls of Arrow -------------------------------------------------------------------------------


def test_nulls_of_arrow_are_dropped() -> None:
    row = {
        **call({"city": "Paris", "n": None, "deep": [{"x": None, "y": [None]}]}, content=None),
        "tools": [{"type": "function", "function": {"parameters": {"required": None, "properties": {}}}}],
        "chat_template_kwargs": {"enable_thinking": None},
        "answer": {"a": None},
        "prompt": None,
    }
    dropped = drop_nulls(row)
    assert dropped["messages"][1]["tool_calls"][0]["function"]["arguments"] == {
        "city": "Paris",
        "deep": [{"y": [None]}],
    }
    assert dropped["messages"][1]["content"] is None and dropped["messages"][0] == row["messages"][0]
    assert dropped["tools"] == [{"type": "function", "function": {"parameters": {"properties": {}}}}]
    assert (dropped["chat_template_kwargs"], dropped["answer"], dropped["prompt"]) == ({}, {"a": None}, None)


def test_arrow_round_trip_preserves_rows(tmp_path: Path) -> None:
    rows = [call({"city": "Paris"}), call({"a": 1, "b": 2})]
    texts = [text_of(row, published(QWEN25)) for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [text_of(row, published(QWEN25)) for row in read_rows(tmp_path / "rows.parquet")] == texts
    dataset = pytest.importorskip("datasets").Dataset.from_list(rows)
    assert text_of(dataset[0], published(QWEN25)) != texts[0]  # "a": null, "b": null
    loader = DataLoader(dataset, batch_size=2, collate_fn=list)
    for form in (dataset, dataset.to_iterable_dataset(), Subset(dataset, [0, 1]), loader):
        [[read]] = batches_in_order(form, 2, ("prompt", "completion"), dict, "train")
        assert [text_of(row, published(QWEN25)) for row in read] == texts


# --- Unicode --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    ("read", "row"),
    [
        (tokenize_prompt, {"prompt": "4+4= \ud83d"}),
        (tokenize_completion, {"prompt": "4+4=", "completion": "\ud83d"}),
        (tokenize_completion, {"text": "\ud83d"}),
        (tokenize_turns, talk("a", "b\ud83d")),
        (tokenize_prompt, {"prompt": talk("\ud83d")["messages"]}),
        (tokenize_preference, {"prompt": "a", "chosen": "b", "rejected": "\udcff"}),
    ],
)
def test_lone_surrogates_are_rejected(read: Any, row: dict[str, Any], is_own: bool) -> None:
    message = ("lone surrogate", r"'\ud", "not UTF-8")
    assert_raises(WhetValueError, message, read, row, published(SMOL2, is_own))


def test_lone_surrogates_in_calls_of_a_tokenizer() -> None:
    tokenizer = published(SMOL2)
    assert_raises(WhetValueError, "encode: the text has the lone surrogate", tokenizer.encode, "a\udcff")
    assert_raises(
        WhetValueError, "apply_chat_template: .*lone surr", tokenizer.apply_chat_template, talk("\ud83d")["messages"]
    )
