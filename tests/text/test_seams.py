"""Seams between turns: appending them equals rendering, truncated turns end, and rewritten turns are rejected."""

from __future__ import annotations

from typing import Any

import pytest
from tests.data.test_turns import NEMO, PHI, QWEN3, QWEN25, SMOL, published, tokenizer_of
from tests.raising import assert_raises

from whet.data.chat import Chat
from whet.errors import WhetValueError
from whet.text.seams import RewrittenHistoryError, Seams, content_mask

STOP_OF = {PHI: "<|end|>", NEMO: "</s>"}
QUESTION, NEXT = {"role": "user", "content": "Who?"}, {"role": "user", "content": "Sure?"}
ANSWER = {"role": "assistant", "content": "Me é"}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "find", "arguments": {"what": "é"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "find", "content": "it", "tool_call_id": "abcdefghi"}
SCHEMA = {"type": "object", "properties": {"what": {"type": "string", "description": "x"}}, "required": ["what"]}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA}}]


def seams_of(name: str, tokenizer: Any, row: dict[str, Any] | None = None) -> Seams:
    return Seams(tokenizer, tokenizer(STOP_OF.get(name, "<|im_end|>"), add_special_tokens=False)["input_ids"], row)


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    ("name", "turns"),
    [
        (QWEN25, [ANSWER, NEXT]),
        (QWEN25, [CALLS, RESULT]),
        (QWEN3, [{**CALLS, "reasoning_content": "so"}, RESULT]),
        (PHI, [ANSWER, NEXT]),
        (NEMO, [ANSWER, NEXT]),
        (NEMO, [CALLS, RESULT]),
    ],
)
def test_appending_equals_rendering(name: str, turns: list[Any], is_own: bool) -> None:
    tokenizer, row = published(name, is_own), {"tools": TOOLS} if RESULT in turns else {}
    seams = seams_of(name, tokenizer, row)
    chat, messages = Chat("test", row, tokenizer), [QUESTION]
    ids = seams.opening(messages)
    for _ in range(3):
        reply, new = turns
        rendered = chat.render([*messages, reply])
        sampled = rendered.removeprefix(tokenizer.decode(ids, skip_special_tokens=False))
        assert len(sampled) < len(rendered)
        end = STOP_OF.get(name, "<|im_end|>")
        ids += tokenizer(sampled[: sampled.rfind(end)] + end, add_special_tokens=False)["input_ids"]
        messages += [reply, new]
        ids += seams.ids(seams.seam(messages[:-1], [new]), is_ended=True)
        whole = chat.render(messages, add_generation_prompt=True)
        assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_truncated_turn_gets_its_end(is_own: bool) -> None:
    tokenizer = published(QWEN25, is_own)
    seams = seams_of(QWEN25, tokenizer)
    seam = seams.seam([QUESTION, ANSWER], [NEXT])
    ended, truncated = seams.ids(seam, is_ended=True), seams.ids(seam, is_ended=False)
    assert truncated == [*tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"], *ended]
    assert tokenizer.decode(ended).startswith("\n") and tokenizer.decode(ended).endswith("assistant\n")


def test_a_template_that_drops_earlier_thinking_is_rejected() -> None:
    seams = seams_of(QWEN3, published(QWEN3))
    thought = {**ANSWER, "reasoning_content": "so it is"}
    facts = ("'user'", "becomes", "--chat-template")
    assert_raises(RewrittenHistoryError, facts, seams.check, [(thought, NEXT)])


def test_a_template_without_thinking_is_rejected() -> None:
    thought = {**ANSWER, "reasoning_content": "so it is"}
    assert_raises(WhetValueError, "reasoning", seams_of(SMOL, published(SMOL)).check, [(thought, NEXT)])


def test_a_template_that_drops_empty_thinking_is_rejected() -> None:
    seams = seams_of(QWEN3, published(QWEN3), {"tools": TOOLS})
    seams.check([({**CALLS, "reasoning_content": "so"}, RESULT)])
    assert_raises(RewrittenHistoryError, ("'tool'", "<think>"), seams.check, [(CALLS, RESULT)])


@pytest.mark.parametrize("name", [QWEN25, QWEN3, NEMO])
def test_templates_with_tools_pass_the_check(name: str) -> None:
    seams_of(name, published(name), {"tools": TOOLS}).check_calls("find")


@pytest.mark.parametrize("name", [SMOL, PHI])
def test_templates_without_tools_are_rejected(name: str) -> None:
    facts = ("drops", "tools", "--chat-template")
    assert_raises(WhetValueError, facts, seams_of(name, published(name), {"tools": TOOLS}).check_calls, "find")


def test_several_messages_follow_a_turn() -> None:
    tokenizer = published(QWEN25)
    seams = seams_of(QWEN25, tokenizer, {"tools": TOOLS})
    twice = {**CALLS, "tool_calls": [CALL, CALL]}
    results = [{**RESULT, "content": text} for text in ("first", "second")]
    text = seams.seam([QUESTION, twice], results).text
    assert text.index("first") < text.index("second")


def test_turns_without_a_stop_token_are_rejected() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = tokenizer_of(template)
    facts = ("Me é", "<|im_end|>", "stop_token_ids")
    assert_raises(WhetValueError, facts, seams_of("", tokenizer).seam, [QUESTION, ANSWER], [NEXT])
    assert_raises(WhetValueError, "there is none", Seams(tokenizer, []).seam, [QUESTION, ANSWER], [NEXT])


def test_a_stop_token_that_text_does_not_give_is_rejected() -> None:
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content }}ab{% endfor %}")
    [a, b] = tokenizer("ab", add_special_tokens=False)["input_ids"]
    seams = Seams(tokenizer, [b])
    seam = seams.seam([QUESTION, ANSWER], [NEXT])
    assert seam.end == "b" and seams.ids(seam, is_ended=True)
    merged = Seams(tokenizer, [a, b])
    assert merged.seam([QUESTION, ANSWER], [NEXT]).end == "b"


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    ("name", "new"),
    [
        *((QWEN25, [{"role": "user", "content": text}]) for text in ("Sure?", "0", "x", "0x", "user", "\n", "", " é")),
        (PHI, [NEXT]),
        (NEMO, [NEXT]),
        (NEMO, [RESULT]),
        (QWEN25, [{**RESULT, "content": "first"}, RESULT]),
    ],
)
def test_contents_are_separate_from_what_the_template_adds(name: str, new: list[Any], is_own: bool) -> None:
    is_result = new[0]["role"] == "tool"
    tokenizer, row = published(name, is_own), {"tools": TOOLS} if is_result else {}
    seams, reply = seams_of(name, tokenizer, row), CALLS if is_result else ANSWER

    def render(messages: Any) -> list[int]:
        return seams.ids(seams.seam([QUESTION, reply], messages), is_ended=True)

    ids = render(new)
    found = [i for i, inside in zip(ids, content_mask(render, ids, new), strict=True) if inside]
    assert tokenizer.decode(found, skip_special_tokens=False) == "".join(message["content"] for message in new)
