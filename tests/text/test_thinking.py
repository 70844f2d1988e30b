"""Replies are split into thinking and answer."""

from __future__ import annotations

import pytest

from whet.text.thinking import TextChunk, split_thinking


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "is_open", "thinking", "answer"),
    [
        ("hello <think>no</think>", False, "", "hello <think>no</think>"),
        ("\n<think>a < b </ c\n</think>\n\n yes </think>", False, "a < b </ c\n", "yes </think>"),
        ("a</think>b", True, "a", "b"),
        ("<think>a</thin", False, "a</thin", ""),
        ("<thi", False, "", "<thi"),
        ("  ", False, "", "  "),
        ("", False, "", ""),
        ("", True, "", ""),
        ("<think></think>", False, "", ""),
        ("<think>\n\n</think>\n\nyes", False, "\n\n", "yes"),
    ],
)
def test_thinking_is_split_from_the_answer(size, text, is_open, thinking, answer):
    chunks = list(split_thinking((text[i : i + size] for i in range(0, len(text), size)), is_open))
    assert all(chunks) and all(chunk.text for chunk in chunks)
    found = ["".join(chunk.text for chunk in chunks if chunk.is_thinking is kind) for kind in (True, False)]
    assert found == [thinking, answer]
    assert [chunk.is_thinking for chunk in chunks] == sorted((chunk.is_thinking for chunk in chunks), reverse=True)


def test_chunks_are_yielded_as_early_as_possible():
    texts = iter(["<think>", "one <", "/b", "</thi", "nk>", "\n", "two"])
    chunks = split_thinking(texts)
    assert next(chunks) == TextChunk("one ", True)
    assert next(texts) == "/b"
    assert [next(chunks), next(chunks)] == [TextChunk("<", True), TextChunk("two", False)]
