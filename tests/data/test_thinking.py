"""Separation of thinking and answer, for any tags, opened by the prompt or by the reply."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.tokenizers import vocab_files

from whet.data.thinking import Replies, Tags, answer_in, thinking_tags
from whet.models.tokenizers import read_tokenizer
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("HuggingFaceTB-SmolLM3-3B", ("<think>", "</think>")),
        ("mistralai-Ministral-3-14B-Reasoning-2512", ("[THINK]", "[/THINK]")),
        ("ByteDance-Seed-OSS", ("<seed:think>", "</seed:think>")),
    ],
)
def test_thinking_tags_of_published_templates(name, tags):
    assert thinking_tags(template(name)) == tags


def test_thinking_tags_of_channels():
    tags = thinking_tags("{{ '<|channel>thought\\n' + thinking_text + '\\n<channel|>' }}")
    assert tags == ("<|channel>", "<channel|>")
    assert answer_in("<|channel>thought\n2 + 2\n<channel|>4", tags) == "4"


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("{{ '<|START_THINKING|>' + m.thinking + '<|END_THINKING|>' }}", ("<|START_THINKING|>", "<|END_THINKING|>")),
        ("<reasoning>{{ m.reasoning }}</reasoning>", ("<reasoning>", "</reasoning>")),
        ("{{ '<thinking>' + m['thought'] + '</thinking>' }}", ("<thinking>", "</thinking>")),
        # A part of the system prompt, an index, and a name without a partner.
        ("<thinking_rules>a</thinking_rules>{{ m[thought] }}[THINK]<a:think></a:think>", ("<a:think>", "</a:think>")),
        ("{{ m.content.split('</think>')[-1] }}", ("<think>", "</think>")),
    ],
)
def test_thinking_tags_are_a_pair(text, tags):
    assert thinking_tags(text) == tags


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("1041", "1041"),
        ("<think>7</think> 1041", " 1041"),
        ("<think>\n1041", None),
        ("hm 7</think>1041", "1041"),
        ("[THINK]7[/THINK]1041", "1041"),
        ("[THINK]1041", None),
        ("7[/THINK]1041", "1041"),
        ("<seed:think>7</seed:think>1041", "1041"),
        ("<|START_THINKING|>7<|END_THINKING|>1041", "1041"),
        ("<|START_THINKING|>1041", None),
        ("7<|END_THINKING|>1041", "1041"),
        ("a < b > c", "a < b > c"),
    ],
)
def test_the_answer_in_a_reply(reply, answer):
    assert answer_in(reply) == answer


def test_the_answer_between_the_tags_of_a_template():
    assert answer_in("<think>a</think>b", Tags("[THINK]", "[/THINK]")) == "<think>a</think>b"


@pytest.mark.parametrize("kind", [vocab_files.CONTROL, vocab_files.USER_DEFINED])
def test_tags_that_are_special_tokens_are_decoded(kind):
    trained = vocab_files.train_byte_level(list(PRE_TOKENIZERS["qwen2"].patterns), 400)
    metadata = vocab_files.byte_level_metadata(trained, "qwen2")
    metadata["tokenizer.ggml.tokens"] += ["<think>", "</think>"]
    metadata["tokenizer.ggml.token_type"] += [kind, kind]
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}<think>\\n{# </think> #}"
    tokenizer = read_tokenizer(metadata)
    replies = Replies(tokenizer)
    ids = tokenizer.encode("hm</think> 12<|im_end|>")
    assert replies.text(ids) == "hm</think> 12"
    assert replies.opening_tag(tokenizer.encode("Hi<think>\n")) == "<think>"
    assert replies.opening_tag(tokenizer.encode("Hi<think> no")) == ""
    assert replies.closing_tag(tokenizer.encode("Hi<think>\n")) == "</think>"
    assert replies.closing_tag(tokenizer.encode("Hi<think> no")) == ""
    tokenizer.chat_template = None
    assert Replies(tokenizer).opening_tag(tokenizer.encode("Hi<think>\n")) == ""
