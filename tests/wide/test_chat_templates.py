"""TRL's chat templates: equivalent forms of messages render equally, nothing is lost, and turns are found."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.data.test_chat import call, parts, talk
from tests.data.test_turns import TALK, tokenizer_of

from whet.data.chat import Chat
from whet.data.rows import tokenize_turns
from whet.data.thinking import DEFAULT_TAGS
from whet.errors import WhetValueError
from whet.text.replies import MarkedParser
from whet.text.tool_calls import ToolCall, tool_format

trl = pytest.importorskip("trl", reason="templates: pip install 'whet[peers]'")

FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
OF_IMAGES = ("idefics3", "llava_next", "smolvlm")
"""Families whose templates accept only content in parts."""


def tokenizer(name: str, is_own: bool) -> Any:
    return tokenizer_of((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), is_own=is_own)


def render(row: dict[str, Any], tokenizer: Any) -> str | None:
    """Render a row completely; None if it is rejected."""
    chat = Chat("test", row, tokenizer)
    try:
        chat.check_complete(row["messages"], first_learnt=0)
        return chat.render(row["messages"])
    except WhetValueError:
        return None


@pytest.mark.parametrize(("name", "is_own"), itertools.product(TEMPLATES, [True, False]))
def test_equivalent_messages_render_equally_and_completely(name: str, is_own: bool) -> None:
    template = tokenizer(name, is_own)
    texts = {render(call(arguments), template) for arguments in ({"city": "Paris é"}, '{"city": "Paris é"}')}
    assert len(texts) == 1
    text = texts.pop()
    assert text is None or ("Paris é" in text and "\\u00e9" not in text and "{'city'" not in text)
    assert (render(talk("a", "b", reasoning="so it is"), template) or "so it is").count("so it is") == 1
    text = render(talk(parts("hello"), parts("yes")), template)
    assert text is not None and "hello" in text and "yes" in text
    assert name.startswith(OF_IMAGES) or text == render(talk("hello", "yes"), template)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "_training" in name and not name.startswith(OF_IMAGES)])
def test_training_templates_separate_turns(name: str) -> None:
    template = tokenizer(name, is_own=False)
    _, completion_ids, mask = tokenize_turns({"messages": TALK}, template)
    learnt = template.decode([token for token, counts in zip(completion_ids, mask, strict=True) if counts])
    assert learnt.count("four") == learnt.count("five") == 1 and "and one" not in learnt


QWEN = ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")


@pytest.mark.parametrize(("name", "is_own"), itertools.product(QWEN, [True, False]))
def test_replies_of_qwen_are_parsed_as_their_templates_write_them(name: str, is_own: bool) -> None:
    """The prompt opens the thinking, or closes an empty one, and the reply calls a tool in XML."""
    template = tokenizer(name, is_own)
    row = call({"city": "Paris é"}, reasoning_content="so it is")
    tools = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object", "properties": {}}}}]
    options = {"tools": tools, "tokenize": False, "chat_template": None}
    prompt = template.apply_chat_template(row["messages"][:1], add_generation_prompt=True, **options)
    whole = template.apply_chat_template(row["messages"][:2], **options)
    is_open = prompt.endswith("<think>\n")
    assert is_open != prompt.endswith("<think>\n\n</think>\n\n") and is_open != (name == "qwen3_5_nothink")
    begin = prompt if is_open else prompt.removesuffix("<think>\n\n</think>\n\n")
    assert whole.startswith(begin)
    parser = MarkedParser(is_open, DEFAULT_TAGS, tool_format((FOLDER / f"{name}.jinja").read_text("utf-8")), tools)
    *chunks, found = parser.add(whole.removeprefix(begin).partition("<|im_end|>")[0], is_last=True)
    assert found == ToolCall("w", {"city": "Paris é"})
    assert "".join(chunk.text for chunk in chunks if chunk.is_thinking).strip() == "so it is"
    assert not "".join(chunk.text for chunk in chunks if not chunk.is_thinking).strip()
