"""Conversations: what is sent to the model, what is computed of it, and what is kept of what it says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import tiny_llama
from transformers.utils.chat_template_utils import render_jinja_template

from whet.cli.conversation import Conversation, Piece, Turn, tell_apart
from whet.config.sampling import SamplingParams
from whet.data.rows import tokenize_completion
from whet.engine import Engine, Token
from whet.errors import WhetError, WhetValueError
from whet.models.families import FAMILIES
from whet.models.tokenizers import read_tokenizer

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


def talk(engine: Engine, tokenizer: Any, **options: Any) -> Conversation:
    sampling = SamplingParams(**{"max_new_tokens": 8, "stop_token_ids": [1], "seed": 3, **options.pop("sampling", {})})
    return Conversation(engine, tokenizer, sampling, **options)


def say(turn: Turn) -> str:
    return "".join(piece.text for piece in turn.pieces())


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_families_have_a_published_template():
    # smollm3's says the date; phi and starcoder2 publish none; the others' are not at hand.
    assert set(FAMILIES) - set(FILES) == {
        "gemma2", "gemma3_text", "granite", "olmo2", "phi", "smollm3", "stablelm", "starcoder2"
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
def test_the_published_template_of_a_family_renders_as_transformers_renders_it(family, tokenizer):
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
def test_a_turn_in_a_familys_template_computes_what_is_new(family, system, engine, tokenizer):
    tokenizer.chat_template = template(FILES[family])
    conversation = talk(engine, tokenizer, system=system, sampling={"seed": 5, "temperature": 0.3})
    said: list[int] = []
    for text in ("Hi", "And why is that so?", "I see."):
        turn = conversation.ask(text)
        prompt, _ = turn._prompt.ids, say(turn)
        reply_ids = conversation._past.reply_ids
        assert 0 not in reply_ids  # by this seed: a control token has no text, which the next prompt could repeat
        if said and (family, system) == ("mistral", "Be brief."):  # which it moves to the last message
            assert turn.n_reused == len(common_prefix(prompt, said))
        elif said:
            assert prompt[: len(said)] == said and turn.n_reused == len(said) - 1
        said = [*prompt, *reply_ids]
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system"] * bool(system) + ["user", "assistant"] * 3


def common_prefix(a: list[int], b: list[int]) -> list[int]:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def test_a_reply_stays_as_it_was_drawn(engine, tokenizer):
    """Bytes that are no UTF-8 are shown as U+FFFD, and are not tokenised from it."""
    conversation = talk(engine, tokenizer, sampling={"max_new_tokens": 40, "temperature": 2.0})
    turn = conversation.ask("Hi")
    assert "\ufffd" in say(turn)
    reply_ids = list(conversation._past.reply_ids)
    assert reply_ids != ids_of(tokenizer, conversation.messages[-1]["content"])
    then = conversation.ask("And?")
    begin = turn._prompt.ids + reply_ids
    assert then._prompt.ids == begin + ids_of(tokenizer, "<eos><user>And?<eos><assistant>")
    say(then)
    assert then.n_reused >= len(begin) - 1


def test_a_template_that_strips_a_reply_makes_another_prompt(engine, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    conversation = talk(engine, tokenizer)
    turn = conversation.ask("Hi")
    say(turn)
    text = "  padded "
    conversation._end(turn, turn._prompt, ids_of(tokenizer, text), text)
    assert conversation.ask("And?")._prompt.ids == ids_of(tokenizer, "[Hi][padded][And?]>")


def test_earlier_thinking_is_dropped_as_the_template_says(engine, tokenizer):
    for name, is_kept in (("Qwen-Qwen3-0.6B", False), ("HuggingFaceTB-SmolLM3-3B", True)):
        tokenizer.chat_template = template(name)
        conversation = talk(engine, tokenizer, system="/think Be brief.")
        turn = conversation.ask("Hi")
        say(turn)
        conversation._end(turn, turn._prompt, ids_of(tokenizer, CLOSED), CLOSED)
        then = conversation.ask("And?")
        text = tokenizer.decode(then._prompt.ids)
        assert ("hm" in text) is is_kept and "yes<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>" in text
        say(then)
        assert then.n_reused >= turn.n_prompt - 1
        row = conversation.row()
        assert row["messages"][2]["content"] == "yes"
        assert conversation.row(thinking=True)["messages"][2]["content"] == CLOSED


@pytest.mark.parametrize("opened", [False, True])
def test_other_tags_of_thinking(opened, engine, tokenizer):
    prefix = "" if opened else "<|START_THINKING|>"
    begin = "{% if add_generation_prompt %}<|START_THINKING|>{% endif %}" if opened else ""
    tokenizer.chat_template += f"{{# <|START_THINKING|> <|END_THINKING|> #}}{begin}"
    conversation = talk(engine, tokenizer)
    assert conversation.tags == ("<|START_THINKING|>", "<|END_THINKING|>")
    turn = conversation.ask("Hi")
    assert bool(conversation._replies.opening_tag(turn._prompt.ids)) is opened
    texts = [f"{prefix}hm <|END", "_THINKING|>\n", "yes"]
    assert list(tell_apart(texts, opened, conversation.tags)) == [Piece("hm ", True), Piece("yes", False)]
    text = "<|START_THINKING|>hm<|END_THINKING|>yes"
    conversation._end(turn, turn._prompt, ids_of(tokenizer, text), text)
    assert conversation.row()["messages"][1]["content"] == "yes"


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "is_open", "thought", "said"),
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
def test_thinking_is_told_from_what_is_said(size, text, is_open, thought, said):
    pieces = list(tell_apart((text[i : i + size] for i in range(0, len(text), size)), is_open))
    assert all(pieces) and all(piece.text for piece in pieces)
    found = ["".join(piece.text for piece in pieces if piece.is_thinking is kind) for kind in (True, False)]
    assert found == [thought, said]
    assert [piece.is_thinking for piece in pieces] == sorted((piece.is_thinking for piece in pieces), reverse=True)


def test_pieces_come_as_soon_as_they_are_sure():
    texts = iter(["<think>", "one <", "/b", "</thi", "nk>", "\n", "two"])
    pieces = tell_apart(texts)
    assert next(pieces) == Piece("one ", True)
    assert next(texts) == "/b"
    assert [next(pieces), next(pieces)] == [Piece("<", True), Piece("two", False)]


def test_tags_that_are_special_tokens_are_not_lost(engine, tokenizer):
    opening, closing = ids_of(tokenizer, "ab")

    class Tagged:
        """The tokenizer, but that the tags are two special tokens, which decoding leaves out."""

        chat_template = tokenizer.chat_template + "{% if add_generation_prompt %}<think>{% endif %}"

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            tags = {"<think>": [opening], "</think>": [closing]}
            return {"input_ids": tags[text]} if text in tags else tokenizer(text, **options)

        def decode(self, ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
            shown = [i for i in ids if not (skip_special_tokens and i in (opening, closing))]
            return tokenizer.decode(shown, skip_special_tokens=skip_special_tokens, **options)

    conversation = talk(engine, Tagged())
    ids = [opening, *ids_of(tokenizer, "xé"), closing, *ids_of(tokenizer, "z")]
    expected = ["<think>", "x", "é", "</think>", "z"]
    assert list(conversation.texts((Token(i, 0.0) for i in ids), conversation.sampling)) == expected
    # With stop strings the engine tells the text, and of these tokens none.
    texts = ["", "x", "", "é", "", "z"]
    tokens = (Token(i, 0.0, text) for i, text in zip(ids, texts, strict=True))
    assert list(conversation.texts(tokens, dataclasses.replace(conversation.sampling, stop="!"))) == expected


def test_a_reply_that_begins_inside_its_thinking(engine, tokenizer):
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    conversation = talk(engine, tokenizer)
    turn = conversation.ask("Hi")
    assert {piece.is_thinking for piece in turn.pieces()} == {True}
    assert turn.finish_reason == "length" and not turn.is_kept and conversation.messages == ()


def test_another_reply_has_another_key(engine, tokenizer):
    conversation = talk(engine, tokenizer, sampling={"max_new_tokens": 30})
    first = say(conversation.ask("Hi"))
    turn = conversation.ask_again()
    second = say(turn)
    assert first != second and turn.n_reused == turn.n_prompt - 1
    assert [m["content"] for m in conversation.messages] == ["Hi", second]
    again = talk(engine, tokenizer, sampling={"max_new_tokens": 30})
    assert [say(again.ask("Hi")), say(again.ask_again())] == [first, second]


def test_a_reply_that_is_left_early_stays_as_far_as_it_came(engine, tokenizer):
    conversation = talk(engine, tokenizer, sampling={"max_new_tokens": 100})
    with contextlib.closing((turn := conversation.ask("Hi")).pieces()) as pieces:
        said = next(pieces).text + next(pieces).text
    assert turn.finish_reason == "cancelled" and turn.is_kept
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    reply_ids = conversation._past.reply_ids
    then = conversation.ask("And?")
    say(then)
    begin = [*turn._prompt.ids, *reply_ids]
    assert then._prompt.ids == begin + ids_of(tokenizer, "<eos><user>And?<eos><assistant>")
    assert then.n_reused == turn.n_prompt + len(reply_ids) - 1


def test_a_reply_that_said_nothing_is_not_kept(engine, tokenizer):
    conversation = talk(engine, tokenizer)
    say(conversation.ask("Hi"))
    before = conversation.messages
    turn = conversation.ask("And?")
    turn.pieces().close()  # before the first token
    assert conversation.messages == before and not turn.is_kept
    say(conversation.ask_again())
    assert [m["content"] for m in conversation.messages[::2]] == ["Hi", "And?"]


def test_a_full_context_drops_the_oldest_turns_and_keeps_the_system_prompt(engine, tokenizer):
    conversation = talk(engine, tokenizer, system="S", context=200)
    dropped, reused = [], []
    for i in range(12):
        turn = conversation.ask(f"message {i:02}")
        say(turn)
        dropped.append(turn.n_dropped)
        reused.append(turn.n_reused)
        assert turn.n_prompt + turn.n_tokens <= 200
        assert conversation.messages[0] == {"role": "system", "content": "S"}
        kept = [m["content"] for m in conversation.messages if m["role"] == "user"]
        assert kept == [f"message {j:02}" for j in range(sum(dropped), i + 1)]
    assert sum(dropped) > 3
    # Several at once, so that the turns after it begin as it did.
    assert all(n == 0 for n, before in zip(dropped[1:], dropped, strict=False) if before)
    with pytest.raises(WhetValueError, match=r"the message takes 22[0-9] tokens .* leaves 192\. Shorten it, or raise"):
        conversation.ask("x" * 200)
    assert kept == [m["content"] for m in conversation.messages if m["role"] == "user"]


def test_a_reply_has_room_for_its_least_tokens(engine, tokenizer):
    sampling = {"max_new_tokens": 100, "min_new_tokens": 60}
    conversation = talk(engine, tokenizer, context=120, sampling=sampling)
    for _ in range(4):
        turn = conversation.ask("Hi")
        say(turn)
        assert turn.n_tokens >= 60
    with pytest.raises(WhetValueError, match=r"of a context of 120 a reply needs 60, which leaves 60\."):
        conversation.ask("x" * 60)


def test_a_conversation_starts_over(engine, tokenizer):
    conversation = talk(engine, tokenizer, system="S")
    say(conversation.ask("Hi"))
    assert conversation.last is not None
    conversation.restart()
    assert conversation.last is None  # which is of no use beside another context
    assert conversation.messages == ({"role": "system", "content": "S"},) and conversation.system == "S"
    conversation.restart("T")
    assert conversation.system == "T"
    assert conversation.ask("Hi")._prompt.ids == ids_of(tokenizer, "<system>T<eos><user>Hi<eos><assistant>")
    conversation.restart("")
    assert conversation.messages == ()
    with pytest.raises(WhetValueError, match="no message that could be answered again"):
        conversation.ask_again()
    with pytest.raises(WhetValueError, match="no turn to save"):
        conversation.row()


def test_a_saved_conversation_is_a_row_to_train_on(engine, tokenizer):
    conversation = talk(engine, tokenizer)
    say(conversation.ask("Hi"))
    say(conversation.ask("And?"))
    row = json.loads(json.dumps(conversation.row()))
    prompt, completion = tokenize_completion(row, tokenizer)
    text = conversation.messages[-1]["content"]
    assert completion == ids_of(tokenizer, text + "<eos>") and prompt


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {}, "no chat template.*Pass --chat-template with a Jinja file.*or --tokenizer with a folder"),
        ("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}", {"system": "S"}, "leaves the system prompt out"),
        ("{{ raise_exception('no system') if messages[0].role == 'system' }}x", {"system": "S"}, "no system"),
        ("{{ messages[9].role }}", {}, "cannot render"),
        ("", {"context": 5000}, "no chat template"),
        ("{{ messages[0].content }}", {"context": 5000}, "context is 5000 tokens, and the model's last position is 40"),
    ],
)
def test_what_cannot_work_is_said_before_the_first_message(change, options, message, engine, tokenizer):
    tokenizer.chat_template = change
    with pytest.raises(WhetError, match=message):
        talk(engine, tokenizer, **options)


def test_the_same_reply_is_not_asked_for_twice(engine, tokenizer):
    conversation = talk(engine, tokenizer, sampling={"temperature": 0.0})
    say(conversation.ask("Hi"))
    with pytest.raises(WhetValueError, match="temperature is 0, so the same reply would come again"):
        conversation.ask_again()


def test_all_of_an_engines_memory_is_context(model, engine, tokenizer):
    """And no turn of a conversation that fills it lacks a page, or says anything else than with more memory."""
    with Engine.from_model(model, weights="float32", kv_bytes=6 * engine.memory["kv_page_bytes"]) as small:
        conversation, other = talk(small, tokenizer), talk(engine, tokenizer, context=5 * 64)
        assert conversation.context == other.context
        for n in (30, 100, 7, 150, 64, 20, 90):
            assert say(conversation.ask("x" * n)) == say(other.ask("x" * n))
        assert conversation.messages == other.messages and len(other.messages) < 14
        with pytest.raises(WhetValueError, match=r"context is 4000 tokens, and the engine has memory for 320"):
            talk(small, tokenizer, context=4000)
