"""Episodes with tools on a real model, whose turns a grammar limits to calls, wrong calls and answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.cli.conftest import write_tiny_model
from tests.raising import assert_raises
from tests.rollout.test_episodes import EOS, TEMPLATE, facts

from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.errors import WhetValueError
from whet.models.tokenizers import load_tokenizer
from whet.models.tokenizers.token_texts import read_token_texts
from whet.rollout.episodes import EpisodeLimits, Player, episode_metrics
from whet.tasks.tools import Tools
from whet.text.replies import ReplyFormat

HERMES = (
    "{% if tools %}<system>{{ tools | tojson }}<eos>\n{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_CALL = r'<tool_call>\{"name": "(add|sub)", "arguments": \{"a": [1-9], "b": (4|null)\}\}</tool_call>'
TURN = rf"A[0-9]|({_CALL}){{1,2}}|<tool_call>[xyz]</tool_call>"
SAMPLING = SamplingParams(max_new_tokens=600, stop_token_ids=(EOS,), seed=5, regex=TURN)
LIMITS = EpisodeLimits(max_turns=3, timeout_s=60.0)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    return write_tiny_model(tmp_path_factory.mktemp("model"), HERMES, max_position=2048)


def player(tokenizer: Any, limits: EpisodeLimits = LIMITS, max_position: int = 2048) -> Player:
    tools = Tools([add])
    return Player(
        lambda: tools, tokenizer, ReplyFormat(tokenizer, read_token_texts(tokenizer, "test")), [EOS], max_position,
        limits,
    )  # fmt: skip


def test_calls_are_answered_until_a_turn_without_one(folder: Any) -> None:
    tokenizer = load_tokenizer(str(folder))
    rows = [{"prompt": f"sum {i}"} for i in range(8)]
    with Engine.from_pretrained(folder) as engine:
        engine.tokenizer = tokenizer
        episodes = player(tokenizer).play(engine, rows, 4, SAMPLING)
        again = player(tokenizer).play(engine, rows[:3], 4, SAMPLING)
        assert [facts(episode) for episode in again] == [facts(episode) for episode in episodes[:12]]
    seen, n_calls, n_failed = set(), 0, 0
    for episode in episodes:
        turns = [message for message in episode.messages if message["role"] == "assistant"]
        assert episode.end == ("turns" if turns[-1].get("tool_calls") else "done") and len(turns) <= LIMITS.max_turns
        results = iter(message for message in episode.messages if message["role"] == "tool")
        for turn in turns:
            for call in turn.get("tool_calls", []):
                function, error = call["function"], call.get("error", "")
                arguments, name = function["arguments"], function["name"]
                n_calls += 1
                is_good = name == "add" and arguments.get("b") is not None
                n_failed += not is_good
                if turn is turns[-1]:  # no turn follows to read the result
                    continue
                result = next(results)
                assert result["name"] == name and result["tool_call_id"] == call["id"]
                assert result.get("is_error", False) == (not is_good)
                if is_good:
                    seen.add("good")
                    assert result["content"] == str(arguments["a"] + arguments["b"])
                elif name == "sub":
                    seen.add("unknown")
                    assert result["content"] == f"error: {error}" and "no tool 'sub'; the tools are add" in error
                elif name == "add":
                    seen.add("wrong")
                    assert result["content"] == "error: b is null, expected integer"
                else:
                    seen.add("malformed")
                    assert arguments["text"] in "xyz" and "cannot be read" in result["content"]
            seen |= {"two"} if len(turn.get("tool_calls", [])) == 2 else set()
        assert next(results, None) is None
        text = tokenizer.decode(episode.prompt_ids + episode.token_ids, skip_special_tokens=False)
        schema = json.dumps(Tools([add]).tools[0])
        assert '"name": "add"' in text and len(schema) < len(text)
        for message in episode.messages:
            assert message["role"] != "tool" or f"<tool>{message['content']}<eos>\n" in text
    assert seen == {"good", "unknown", "wrong", "malformed", "two"}
    metrics = episode_metrics(episodes)
    assert metrics["episodes/mean_calls"] == n_calls / 32 and metrics["episodes/mean_failed_calls"] == n_failed / 32
    assert metrics["episodes/ended_by_turns"] + metrics["episodes/ended_by_done"] == 1
    assert 0 < metrics["episodes/ended_by_turns"] < 1


def test_a_full_context_ends_an_episode(folder: Any) -> None:
    tokenizer = load_tokenizer(str(folder))
    with Engine.from_pretrained(folder) as engine:
        engine.tokenizer = tokenizer
        limits = EpisodeLimits(max_turns=3, max_read_tokens=10, timeout_s=60.0)
        episodes = player(tokenizer, limits).play(engine, [{"prompt": "sum"}], 6, SAMPLING)
    assert {episode.end for episode in episodes} == {"context", "done"}
    assert 0 < episode_metrics(episodes)["episodes/ended_by_context"] < 1


def test_templates_without_tools_are_rejected(folder: Any) -> None:
    def play(template: str) -> Any:
        tokenizer = load_tokenizer(str(folder))
        tokenizer.chat_template = template
        with Engine.from_pretrained(folder) as engine:
            player(tokenizer).play(engine, [{"prompt": "sum"}], 1, SAMPLING)

    assert_raises(WhetValueError, ("no form of calls", "--chat-template"), play, TEMPLATE)
    assert_raises(WhetValueError, ("drops", "tools"), play, HERMES.replace("if tools", "if false"))
    assert_raises(WhetValueError, ("drops", "tool_calls"), play, HERMES.replace("m.tool_calls or []", "[]"))
    without_results = HERMES.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' else '' }}")
    assert_raises(WhetValueError, ("results", "'tool'"), play, without_results)
