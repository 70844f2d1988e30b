"""Learnt tokens of a conversation: from renderings, from generation marks, and errors if neither delimits the turns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.data.test_rows import ASSISTANT, EOS, USER, A, B, C, chat, words
from tests.raising import assert_raises
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from whet.data.rows import tokenize_completion, tokenize_turns
from whet.errors import WhetValueError
from whet.models.tokenizers import GGUFTokenizer

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"
QWEN25, QWEN3, PHI = "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "microsoft-Phi-3.5-mini-instruct"
NEMO, SMOL = "mistralai-Mistral-Nemo-Instruct-2407", "HuggingFaceTB-SmolLM3-3B"
EOS_OF = {PHI: "<|endoftext|>", NEMO: "</s>"}
SPECIAL = re.compile(r"<\|\w+\|>|\[/?[A-Z_]+\]|</?s>")


def tokenizer_of(template: str, eos: str = "<|im_end|>", is_own: bool = True) -> Any:
    """Return a tokenizer of bytes and a template's special tokens: a GGUF file's (``is_own``), or transformers'."""
    special = sorted({"<s>", eos, *SPECIAL.findall(template)})
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())],
        "token_type": [3] * len(special) + [1] * 256,
        "merges": [],
        "bos_token_id": special.index("<s>"),
        "eos_token_id": special.index(eos),
        "add_bos_token": False,
    }
    tokenizer = GGUFTokenizer(
        {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | {"tokenizer.chat_template": template}
    )
    return tokenizer if is_own else tokenizer.to_transformers()


def published(name: str, is_own: bool = True) -> Any:
    return tokenizer_of((TEMPLATES / f"{name}.jinja").read_text(), EOS_OF.get(name, "<|im_end|>"), is_own)


def learnt(row: dict[str, Any], tokenizer: Any) -> list[str]:
    """Return the texts of the runs of tokens that count."""
    prompt_ids, completion_ids, mask = tokenize_turns(row, tokenizer)
    messages = row.get("messages") or [*row["prompt"], *row["completion"]]
    options = {"tools": row.get("tools"), **row.get("chat_template_kwargs", {})}
    assert prompt_ids + completion_ids == tokenizer.apply_chat_template(messages, return_dict=False, **options)
    assert prompt_ids and len(mask) == len(completion_ids) and mask[0] is True
    runs: list[list[int]] = []
    for token, counts, before in zip(completion_ids, mask, [False, *mask], strict=False):
        if counts and not before:
            runs.append([])
        if counts:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


TALK = chat("user=two and two", "assistant=four", "user=and one", "assistant=five")
THOUGHT = chat("user=a", "assistant=<think>hm</think>b", "user=c", "assistant=<think>so</think>d")
TOOLS = [{"type": "function", "function": {"name": "clock", "description": "", "parameters": {}}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": {"zone": "x"}}}
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "what time is it"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "noon", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "it is noon"},
]


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        (QWEN25, {"messages": TALK}, ["four<|im_end|>\n", "five<|im_end|>\n"]),
        (QWEN25, {"messages": [*chat("system=be brief"), *TALK]}, ["four<|im_end|>\n", "five<|im_end|>\n"]),
        # The conversation ends with an EOS that it does not have in between.
        (PHI, {"messages": TALK}, ["four<|end|>\n", "five<|end|>\n<|endoftext|>"]),
        (NEMO, {"messages": TALK}, ["four</s>", "five</s>"]),
        (SMOL, {"messages": TALK}, ["four<|im_end|>\n", "five<|im_end|>\n"]),
        (
            SMOL,
            {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}},
            ["four<|im_end|>\n", "five<|im_end|>\n"],
        ),
        (
            QWEN25,
            {"messages": CALLS, "tools": TOOLS},
            [
                '<tool_call>\n{"name": "clock", "arguments": {"zone": "x"}}\n</tool_call><|im_end|>\n',
                "it is noon<|im_end|>\n",
            ],
        ),
        (
            NEMO,
            {"messages": CALLS, "tools": TOOLS},
            [
                '[TOOL_CALLS][{"name": "clock", "arguments": {"zone": "x"}, "id": "abcdefghi"}]</s>',
                "it is noon</s>",
            ],
        ),
    ],
)
def test_every_turn_of_published_templates(name: str, row: dict[str, Any], expected: list[str], is_own: bool) -> None:
    tokenizer = published(name, is_own)
    assert learnt(row, tokenizer) == expected


@pytest.mark.parametrize("name", [QWEN25, QWEN3, PHI, NEMO, SMOL])
def test_a_single_turn_equals_the_completion(name: str) -> None:
    tokenizer = published(name)
    for row in ({"messages": TALK[:2]}, {"prompt": TALK[:3], "completion": TALK[3:]}):
        prompt_ids, completion_ids = tokenize_completion(row, tokenizer)
        assert tokenize_turns(row, tokenizer) == (prompt_ids, completion_ids, [True] * len(completion_ids))


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize(
    ("name", "row", "turn", "isolated", "whole"),
    [
        # The last turn has an empty thought, earlier turns none.
        (QWEN3, {"messages": TALK}, 1, r"up to it as \.\.\.'.*<think>\\n\\n<", r"\.\.\.'.*four<\|im_end\|>"),
        # The system message is in the last user's turn, and tools precede it.
        (NEMO, {"messages": [*chat("system=be brief"), *TALK]}, 2, r"before it as .*be brief", "two and two"),
        (NEMO, {"messages": TALK, "tools": TOOLS}, 1, r"before it as .*AVAILABLE_TOOLS", "two and"),
    ],
)
def test_turns_that_cannot_be_located_are_rejected(
    name: str, row: dict[str, Any], turn: int, isolated: str, whole: str, is_own: bool
) -> None:
    fix = r"--chat-template.*row.*loss_on='last_turn'"
    message = rf"tokenize_turns: messages\[{turn}\] .* {isolated}.* as .*{whole}.*{fix}"
    assert_raises(WhetValueError, message, tokenize_turns, row, published(name, is_own))


FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content if loop.last or preserve_thinking else m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("is_own", [True, False])
def test_generation_marks_delimit_turns_if_renderings_do_not(is_own: bool) -> None:
    tokenizer = tokenizer_of(FORGETS, is_own=is_own)
    assert learnt({"messages": TALK}, tokenizer) == ["four<|im_end|>\n", "five<|im_end|>\n"]
    assert learnt({"messages": THOUGHT}, tokenizer) == ["b<|im_end|>\n", "<think>so</think>d<|im_end|>\n"]
    kept = {"messages": THOUGHT, "chat_template_kwargs": {"preserve_thinking": True}}
    assert learnt(kept, tokenizer)[0] == "<think>hm</think>b<|im_end|>\n"
    split = {"prompt": THOUGHT[:3], "completion": [*THOUGHT[3:], *TALK]}
    assert learnt(split, tokenizer) == ["d<|im_end|>\n", "four<|im_end|>\n", "five<|im_end|>\n"]


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content.split('>')[-1] if not "
    "loop.last else m.content }}{% endgeneration %}<|end|>\n{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.mark.parametrize("is_own", [True, False])
def test_end_tokens_of_the_last_turn_end_marked_turns(is_own: bool) -> None:
    tokenizer = tokenizer_of(MARKED, is_own=is_own)
    assert learnt({"messages": THOUGHT}, tokenizer) == ["b<|end|>\n", "<think>so</think>d<|end|>\n"]


def test_missing_generation_marks_are_rejected() -> None:
    tokenizer = tokenizer_of(
        MARKED.replace("{% generation %}", "{% if loop.last %}{% generation %}", 1).replace(
            "{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content[-1:] }}{% endif %}"
        )
    )
    message = ("messages[1]", "1 spans for 2 turns")
    assert_raises(WhetValueError, message, tokenize_turns, {"messages": THOUGHT}, tokenizer)


def test_tokens_of_a_conversation() -> None:
    talk = chat("user=a", "assistant=b", "user=c c", "assistant=a b")
    completion = [B, EOS, USER, C, C, ASSISTANT, A, B, EOS]
    mask = [True, True, False, False, False, False, True, True, True]
    assert tokenize_turns({"messages": talk}, words()) == ([USER, A, ASSISTANT], completion, mask)
    assert tokenize_turns({"prompt": talk[:1], "completion": talk[1:]}, words()) == (
        [USER, A, ASSISTANT], completion, mask
    )  # fmt: skip
    # The prompt's own turn of the assistant is not learnt.
    row = {"prompt": talk[:3], "completion": [*talk[3:], *chat("assistant=c")]}
    assert tokenize_turns(row, words()) == (
        [USER, A, ASSISTANT, B, EOS, USER, C, C, ASSISTANT],
        [A, B, EOS, ASSISTANT, C, EOS],
        [True, True, True, False, True, True],
    )
    assert tokenize_turns({"prompt": "a", "completion": " b"}, words())[2] == [True, True]
    assert tokenize_turns({"text": "a b"}, words())[2] == [True] * 3


def test_a_token_across_the_start_belongs_to_the_turn() -> None:
    core = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2, "c": 3, "ab": 4}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'ca' if m.role == 'assistant' }}{{ m.content }}"
        "{{ eos_token if m.role == 'assistant' }}{% endfor %}{{ 'ca' if add_generation_prompt }}"
    )
    row = {"messages": chat("user=b", "assistant=b", "user=c", "assistant=c")}
    assert tokenize_turns(row, tokenizer) == ([2, 3], [4, 0, 3, 3, 1, 3, 0], [True] * 2 + [False] * 3 + [True] * 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": chat("assistant=a", "user=b", "assistant=c")}, "messages begins with the assistant's turn"),
        ({"messages": chat("user=a", "assistant=b", "user=c")}, "the last message has the role 'user'"),
        ({"messages": chat("user=a", "assistant=b", "tool=c", "assistant=a")}, r"chat template rejects .*no tools"),
        ({"messages": chat("user=a", "user=b")}, "the last message has the role 'user'"),
        ({"messages": chat("assistant=a")}, "expected two chat messages or more"),
    ],
)
def test_bad_conversations(row: dict[str, Any], message: str) -> None:
    assert_raises(WhetValueError, message, tokenize_turns, row, words())


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("template", [QWEN25, FORGETS])
def test_a_turn_of_weight_0_is_not_learnt(template: str, is_own: bool) -> None:
    tokenizer = tokenizer_of(template, is_own=is_own) if "{%" in template else published(template, is_own)
    turns = THOUGHT if template == FORGETS else TALK
    both = learnt({"messages": turns}, tokenizer)
    for kept in (0, 1):
        weights = [{}, {"weight": 1 - kept}, {"weight": None}, {"weight": kept}]
        weighted = [{**message, **weight} for message, weight in zip(turns, weights, strict=True)]
        assert learnt({"messages": weighted}, tokenizer) == both[kept : kept + 1]


@pytest.mark.parametrize(
    ("weights", "read", "message"),
    [
        ((0, 0), tokenize_turns, "every message of the assistant has weight 0"),
        ((1, 0), tokenize_completion, "a message of the assistant has weight 0, which only loss_on='completion'"),
        ((1, 0.5), tokenize_turns, "the weight of a message is 0.5, expected 1, or 0"),
    ],
)
def test_bad_weights_are_rejected(weights: tuple[float, float], read: Any, message: str) -> None:
    first, second = weights
    talk = [TALK[0], {**TALK[1], "weight": first}, TALK[2], {**TALK[3], "weight": second}]
    assert_raises(WhetValueError, message, read, {"messages": talk}, published(QWEN25))
