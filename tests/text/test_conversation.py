"""Conversations: the prompts sent to the model, reuse of the KV cache, and the history of replies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.raising import assert_raises, mentions
from tests.rollout.test_tool_episodes import HERMES
from tests.tiny import tiny_llama
from transformers.utils.chat_template_utils import render_jinja_template

from whet.config.sampling import SamplingParams
from whet.data.messages import tool_result
from whet.data.rows import tokenize_completion
from whet.engine import Engine, Token
from whet.errors import WhetError, WhetValueError
from whet.models.families import FAMILIES
from whet.models.tokenizers import read_tokenizer
from whet.text.conversation import Conversation, Turn
from whet.text.thinking import TextChunk, split_thinking

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"
FILES = {
    "llama": "HuggingFaceTB-SmolLM2-135M-Instruct",
    "mistral": "mistralai-Mistral-Nemo-Instruct-2407",
    "qwen2": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3": "Qwen-Qwen3-0.6B",
    "gpt_neox": "gpt2-gpt_neox-gptj",
    "gpt2": "gpt2-gpt_neox-gptj",
    "gptj": "gpt2-gpt_neox-gptj",
    "phi3": "microsoft-Phi-3.5-mini-instruct",
}
CHAT_ML = "<|im_start|>{role}\n{content}<|im_end|>\n"
CLOSED = "<think>\nhm\n</think>\n\nyes"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(
        vocab_size=258, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        eos_token_id=1, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip


@pytest.fixture
def engine(model) -> Iterator[Engine]:
    with Engine.from_model(model, weights="float32") as engine:
        yield engine


@pytest.fixture
def tokenizer(tiny_gguf) -> Any:
    return read_tokenizer(tiny_gguf)  # every byte a token


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def start_conversation(engine: Engine, tokenizer: Any, **options: Any) -> Conversation:
    sampling = SamplingParams(**{"max_new_tokens": 8, "stop_token_ids": [1], "seed": 3, **options.pop("sampling", {})})
    return Conversation(engine, tokenizer, sampling, **options)


def read_reply(turn: Turn) -> str:
    return "".join(chunk.text for chunk in turn.chunks())


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_families_have_published_templates():
    # smollm3's depends on the date; phi and starcoder2 publish none; the others are gated or not among the fixtures.
    assert set(FAMILIES) - set(FILES) == {
        "arcee", "ernie4_5", "exaone4", "gemma2", "gemma3_text", "gemma4_text", "granite", "granite_swa", "granitemoe",
        "granitemoehybrid", "granitemoeshared", "hunyuan_v1_dense", "lfm2", "lfm2_moe", "ministral3",
        "nemotron_h", "olmo2", "olmo3",
        "olmoe", "phi", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_vl_text", "smollm3", "stablelm",
        "starcoder2", "gpt_oss",
    }  # fmt: skip


EXPECTED = {
    "llama": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "Hello<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "mistral": "<s>[INST]Hi[/INST]Hello</s>[INST]Be brief.\n\nWhy?[/INST]",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nWhy?<|end|>\n"
    "<|assistant|>\n",
    "gpt2": "Be brief.</s>Hi</s>Hello</s>Why?</s>",
}
EXPECTED |= dict.fromkeys(("qwen2", "qwen3"), EXPECTED["llama"])
EXPECTED |= dict.fromkeys(("gptj", "gpt_neox"), EXPECTED["gpt2"])


@pytest.mark.parametrize("family", FILES)
def test_published_templates_render_as_in_transformers(family, tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Why?"},
    ]
    tokenizer.chat_template = template(FILES[family])
    tokenizer.special_tokens_map = special = {"bos_token": "<s>", "eos_token": "</s>"}
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    [theirs], _ = render_jinja_template(
        [messages], chat_template=tokenizer.chat_template, add_generation_prompt=True, tools=None, **special
    )
    assert found == theirs == EXPECTED[family]


@pytest.mark.parametrize("family", FILES)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_turns_compute_only_new_tokens_in_each_template(family, system, engine, tokenizer):
    tokenizer.chat_template = template(FILES[family])
    conversation = start_conversation(engine, tokenizer, system=system, sampling={"seed": 5, "temperature": 0.3})
    sequence: list[int] = []
    for text in ("Hi", "And why is that so?", "I see."):
        turn = conversation.ask(text)
        prompt, _ = turn._prompt.ids, read_reply(turn)
        reply_ids = conversation._history.reply_ids
        assert 0 not in reply_ids  # with this seed: the next prompt could not repeat a control token, which has no text
        if sequence and (family, system) == ("mistral", "Be brief."):  # the template moves it to the last message
            assert turn.n_reused == len(common_prefix(prompt, sequence))
        elif sequence:
            assert prompt[: len(sequence)] == sequence and turn.n_reused == len(sequence) - 1
        sequence = [*prompt, *reply_ids]
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system"] * bool(system) + ["user", "assistant"] * 3


def common_prefix(a: list[int], b: list[int]) -> list[int]:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def test_prompts_contain_the_sampled_ids_of_replies(engine, tokenizer):
    """Invalid UTF-8 is shown as U+FFFD, but not tokenised from it."""
    conversation = start_conversation(engine, tokenizer, sampling={"max_new_tokens": 40, "temperature": 2.0})
    turn = conversation.ask("Hi")
    assert "\ufffd" in read_reply(turn)
    reply_ids = list(conversation._history.reply_ids)
    assert reply_ids != ids_of(tokenizer, conversation.messages[-1]["content"])
    then = conversation.ask("And?")
    begin = turn._prompt.ids + reply_ids
    assert then._prompt.ids == begin + ids_of(tokenizer, "<eos><user>And?<eos><assistant>")
    read_reply(then)
    assert then.n_reused >= len(begin) - 1


def test_template_that_strips_replies_changes_the_prompt(engine, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    conversation = start_conversation(engine, tokenizer)
    turn = conversation.ask("Hi")
    read_reply(turn)
    text = "  padded "
    conversation._end(turn, turn._prompt, ids_of(tokenizer, text), text)
    assert conversation.ask("And?")._prompt.ids == ids_of(tokenizer, "[Hi][padded][And?]>")


def test_template_determines_whether_earlier_thinking_is_dropped(engine, tokenizer):
    for name, is_kept in (("Qwen-Qwen3-0.6B", False), ("HuggingFaceTB-SmolLM3-3B", True)):
        tokenizer.chat_template = template(name)
        conversation = start_conversation(engine, tokenizer, system="/think Be brief.")
        turn = conversation.ask("Hi")
        read_reply(turn)
        conversation._end(turn, turn._prompt, ids_of(tokenizer, CLOSED), CLOSED)
        then = conversation.ask("And?")
        text = tokenizer.decode(then._prompt.ids)
        assert ("hm" in text) is is_kept and "yes<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>" in text
        read_reply(then)
        assert then.n_reused >= turn.n_prompt - 1
        row = conversation.row()
        assert row["messages"][2]["content"] == "yes"
        assert conversation.row(thinking=True)["messages"][2]["content"] == CLOSED


@pytest.mark.parametrize("opened", [False, True])
def test_other_thinking_tags(opened, engine, tokenizer):
    prefix = "" if opened else "<|START_THINKING|>"
    begin = "{% if add_generation_prompt %}<|START_THINKING|>{% endif %}" if opened else ""
    tokenizer.chat_template += f"{{# <|START_THINKING|> <|END_THINKING|> #}}{begin}"
    conversation = start_conversation(engine, tokenizer)
    assert conversation.tags == ("<|START_THINKING|>", "<|END_THINKING|>")
    turn = conversation.ask("Hi")
    assert bool(conversation._replies.opening_tag(turn._prompt.ids)) is opened
    texts = [f"{prefix}hm <|END", "_THINKING|>\n", "yes"]
    assert list(split_thinking(texts, opened, conversation.tags)) == [TextChunk("hm ", True), TextChunk("yes", False)]
    text = "<|START_THINKING|>hm<|END_THINKING|>yes"
    conversation._end(turn, turn._prompt, ids_of(tokenizer, text), text)
    assert conversation.row()["messages"][1]["content"] == "yes"


def test_thinking_tags_that_are_special_tokens(engine, tokenizer):
    opening, closing = ids_of(tokenizer, "ab")

    class Tagged:
        """The tokenizer with two special tokens as tags, which decoding skips."""

        chat_template = tokenizer.chat_template + "{% if add_generation_prompt %}<think>{% endif %}"

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            tags = {"<think>": [opening], "</think>": [closing]}
            return {"input_ids": tags[text]} if text in tags else tokenizer(text, **options)

        def decode(self, ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
            shown = [i for i in ids if not (skip_special_tokens and i in (opening, closing))]
            return tokenizer.decode(shown, skip_special_tokens=skip_special_tokens, **options)

    conversation = start_conversation(engine, Tagged())
    ids = [opening, *ids_of(tokenizer, "xé"), closing, *ids_of(tokenizer, "z")]
    expected = ["<think>", "x", "é", "</think>", "z"]
    assert list(conversation.texts((Token(i, 0.0) for i in ids), conversation.sampling)) == expected
    # With stop strings the engine decodes the text, and special tokens have none.
    texts = ["", "x", "", "é", "", "z"]
    tokens = (Token(i, 0.0, text) for i, text in zip(ids, texts, strict=True))
    assert list(conversation.texts(tokens, dataclasses.replace(conversation.sampling, stop="!"))) == expected


def test_reply_that_begins_within_thinking(engine, tokenizer):
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    conversation = start_conversation(engine, tokenizer)
    turn = conversation.ask("Hi")
    assert {chunk.is_thinking for chunk in turn.chunks()} == {True}
    assert turn.finish_reason == "length" and not turn.is_kept and conversation.messages == ()


def test_regenerated_reply_has_another_seed(engine, tokenizer):
    conversation = start_conversation(engine, tokenizer, sampling={"max_new_tokens": 30})
    first = read_reply(conversation.ask("Hi"))
    turn = conversation.ask_again()
    second = read_reply(turn)
    assert first != second and turn.n_reused == turn.n_prompt - 1
    assert [m["content"] for m in conversation.messages] == ["Hi", second]
    again = start_conversation(engine, tokenizer, sampling={"max_new_tokens": 30})
    assert [read_reply(again.ask("Hi")), read_reply(again.ask_again())] == [first, second]


def test_cancelled_reply_keeps_its_text(engine, tokenizer):
    conversation = start_conversation(engine, tokenizer, sampling={"max_new_tokens": 100})
    with contextlib.closing((turn := conversation.ask("Hi")).chunks()) as chunks:
        text = next(chunks).text + next(chunks).text
    assert turn.finish_reason == "cancelled" and turn.is_kept
    assert conversation.messages[-1] == {"role": "assistant", "content": text}
    reply_ids = conversation._history.reply_ids
    then = conversation.ask("And?")
    read_reply(then)
    begin = [*turn._prompt.ids, *reply_ids]
    assert then._prompt.ids == begin + ids_of(tokenizer, "<eos><user>And?<eos><assistant>")
    assert then.n_reused == turn.n_prompt + len(reply_ids) - 1


def test_empty_reply_is_discarded(engine, tokenizer):
    conversation = start_conversation(engine, tokenizer)
    read_reply(conversation.ask("Hi"))
    before = conversation.messages
    turn = conversation.ask("And?")
    turn.chunks().close()  # before the first token
    assert conversation.messages == before and not turn.is_kept
    read_reply(conversation.ask_again())
    assert [m["content"] for m in conversation.messages[::2]] == ["Hi", "And?"]


def test_full_context_drops_oldest_turns_but_not_the_system_prompt(engine, tokenizer):
    conversation = start_conversation(engine, tokenizer, system="S", context=200)
    dropped, reused = [], []
    for i in range(12):
        turn = conversation.ask(f"message {i:02}")
        read_reply(turn)
        dropped.append(turn.n_dropped)
        reused.append(turn.n_reused)
        assert turn.n_prompt + turn.n_tokens <= 200
        assert conversation.messages[0] == {"role": "system", "content": "S"}
        kept = [m["content"] for m in conversation.messages if m["role"] == "user"]
        assert kept == [f"message {j:02}" for j in range(sum(dropped), i + 1)]
    assert sum(dropped) > 3
    # Several at once, so that the cache of the following turns stays valid.
    assert all(n == 0 for n, before in zip(dropped[1:], dropped, strict=False) if before)
    with pytest.raises(WhetValueError, match=mentions("message", "tokens", 200, 192, "--context")):
        conversation.ask("x" * 200)
    assert kept == [m["content"] for m in conversation.messages if m["role"] == "user"]


def test_context_reserves_min_new_tokens(engine, tokenizer):
    sampling = {"max_new_tokens": 100, "min_new_tokens": 60}
    conversation = start_conversation(engine, tokenizer, context=120, sampling=sampling)
    for _ in range(4):
        turn = conversation.ask("Hi")
        read_reply(turn)
        assert turn.n_tokens >= 60
    with pytest.raises(WhetValueError, match=mentions("at most 60", 120, "60 are reserved", "--context")):
        conversation.ask("x" * 60)


def test_restart_clears_the_history(engine, tokenizer):
    conversation = start_conversation(engine, tokenizer, system="S")
    read_reply(conversation.ask("Hi"))
    assert conversation.last is not None
    conversation.restart()
    assert conversation.last is None  # statistics of the previous history
    assert conversation.messages == ({"role": "system", "content": "S"},) and conversation.system == "S"
    conversation.restart("T")
    assert conversation.system == "T"
    assert conversation.ask("Hi")._prompt.ids == ids_of(tokenizer, "<system>T<eos><user>Hi<eos><assistant>")
    conversation.restart("")
    assert conversation.messages == ()
    with pytest.raises(WhetValueError, match=mentions("Conversation", "no message")):
        conversation.ask_again()
    with pytest.raises(WhetValueError, match=mentions("Conversation", "no turn")):
        conversation.row()


def test_saved_conversation_is_a_training_row(engine, tokenizer):
    conversation = start_conversation(engine, tokenizer)
    read_reply(conversation.ask("Hi"))
    read_reply(conversation.ask("And?"))
    row = json.loads(json.dumps(conversation.row()))
    prompt, completion = tokenize_completion(row, tokenizer)
    text = conversation.messages[-1]["content"]
    assert completion == ids_of(tokenizer, text + "<eos>") and prompt


@pytest.mark.parametrize(
    ("change", "options", "facts"),
    [
        (None, {}, ("no chat template", "--chat-template", "Jinja", "--tokenizer")),
        ("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}", {"system": "S"}, ("template", "system prompt")),
        ("{{ raise_exception('no system') if messages[0].role == 'system' }}x", {"system": "S"}, ("no system",)),
        ("{{ messages[9].role }}", {}, ("template", "render")),
        ("", {"context": 5000}, ("no chat template",)),
        ("{{ messages[0].content }}", {"context": 5000}, ("context is 5000", "4096 tokens", "--context")),
    ],
)
def test_unusable_templates_and_contexts_are_errors_at_the_start(change, options, facts, engine, tokenizer):
    tokenizer.chat_template = change
    with pytest.raises(WhetError, match=mentions(*facts)):
        start_conversation(engine, tokenizer, **options)


def test_regenerating_a_greedy_reply_is_an_error(engine, tokenizer):
    conversation = start_conversation(engine, tokenizer, sampling={"temperature": 0.0})
    read_reply(conversation.ask("Hi"))
    with pytest.raises(WhetValueError, match=mentions("temperature is 0", "same reply")):
        conversation.ask_again()


def test_context_uses_all_memory_of_the_engine(model, engine, tokenizer):
    """Turns that fill it never run out of pages, and give the same replies as with more memory."""
    with Engine.from_model(model, weights="float32", kv_bytes=6 * engine.memory["kv_page_bytes"]) as small:
        conversation, other = (
            start_conversation(small, tokenizer),
            start_conversation(engine, tokenizer, context=5 * 64),
        )
        assert conversation.context == other.context
        for n in (30, 100, 7, 150, 64, 20, 90):
            assert read_reply(conversation.ask("x" * n)) == read_reply(other.ask("x" * n))
        assert conversation.messages == other.messages and len(other.messages) < 14
        with pytest.raises(WhetValueError, match=mentions("context is 4000", "memory", "320 tokens")):
            start_conversation(small, tokenizer, context=4000)


ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}]
CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [0-9]\}\}</tool_call>'


def tool_conversation(engine: Engine, tokenizer: Any, regex: str, **options: Any) -> Conversation:
    tokenizer.chat_template = HERMES
    engine.tokenizer = tokenizer
    sampling = {"regex": regex, "max_new_tokens": 200}
    return start_conversation(engine, tokenizer, sampling=sampling, tools=TOOLS, **options)


def test_calls_of_tools_are_answered(engine, tokenizer):
    conversation = tool_conversation(engine, tokenizer, f"I add: {CALL}")
    turn = conversation.ask("Add one")
    assert read_reply(turn) == "I add:" and read_prompt(conversation).count('"add"') == 1
    assert turn.message["content"] == "I add:" and len(turn.message["tool_calls"]) == 1
    [call] = turn.message["tool_calls"]
    number = call["function"]["arguments"]["a"]
    after = conversation.answer([tool_result(call, str(number + 1))])
    assert read_reply(after) == "I add:"
    prompt = read_prompt(conversation)
    assert f"</tool_call><eos>\n<tool>{number + 1}<eos>\n<assistant>" in prompt
    assert after.n_reused >= turn.n_prompt
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    # The user goes on without the result of the last call.
    read_reply(conversation.ask("Thanks"))
    assert "<tool>error: it was not carried out<eos>\n<user>Thanks<eos>" in read_prompt(conversation)
    row = conversation.row()
    assert row["tools"] == TOOLS and row["messages"][1]["tool_calls"] == [call]


def read_prompt(conversation: Conversation) -> str:
    assert conversation._last_prompt is not None
    return conversation.tokenizer.decode(conversation._last_prompt.ids, skip_special_tokens=False)


def test_a_full_context_drops_questions_with_their_results(engine, tokenizer):
    conversation = tool_conversation(engine, tokenizer, CALL, context=900)
    dropped = 0
    for i in range(6):
        turn = conversation.ask(f"question {i}")
        read_reply(turn)
        dropped += turn.n_dropped
        turn = conversation.answer([tool_result(turn.message["tool_calls"][0], "1")])
        read_reply(turn)
        dropped += turn.n_dropped
    kept = [message["content"] for message in conversation.messages if message["role"] == "user"]
    assert dropped > 0 and kept == [f"question {i}" for i in range(dropped, 6)]
    assert conversation.messages[0]["role"] == "user"


def test_templates_that_cannot_call_tools_are_rejected(engine, tokenizer):
    facts = ("no form of calls", "--chat-template")
    assert_raises(WhetValueError, facts, start_conversation, engine, tokenizer, tools=TOOLS)
    tokenizer.chat_template = HERMES.replace("if tools", "if false")
    assert_raises(WhetValueError, ("drops", "tools"), start_conversation, engine, tokenizer, tools=TOOLS)
