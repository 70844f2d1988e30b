"""Evaluation of episodes: rewards, success, turns, failures, and the scorers of tasks and reward functions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import write_tiny_model
from tests.raising import assert_raises
from tests.rollout.test_episodes import EOS
from tests.rollout.test_tool_episodes import HERMES, SAMPLING, add

from whet.config.episodes import EpisodeSettings
from whet.engine import Engine
from whet.errors import WhetTypeError, WhetValueError
from whet.evaluation import EpisodesResult, RewardedRows, compare, evaluate_episodes, mean, proportion
from whet.models.tokenizers import load_tokenizer
from whet.rollout.episodes import Player
from whet.rollout.players import make_player
from whet.tasks.environment import Step

SETTINGS = EpisodeSettings(max_turns=3, env_timeout_s=60.0)


class Turns:
    """A game of as many turns as the row has, with 0.5 for each turn."""

    def reset(self, row: Any, seed: int) -> str:
        self.left = row["turns"]
        return "Begin"

    def step(self, message: Any) -> Step:
        self.left -= 1
        if self.left < -1:
            raise ValueError("too many turns")
        return Step("on", reward=0.5, done=self.left == 0)


class Digits:
    """A completion scores its digit, divided by 10."""

    name, system_prompt = "digits", "Answer A and a digit."
    rows = tuple({"prompt": f"number {i}"} for i in range(6))

    def score(self, completion: str, row: Any) -> float:
        return int(completion[1]) / 10 if completion else 0.0


@pytest.fixture(scope="module")
def opened(tmp_path_factory: Any) -> Any:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), HERMES, max_position=2048)
    tokenizer = load_tokenizer(str(folder))
    with Engine.from_pretrained(folder) as engine:
        engine.tokenizer = tokenizer
        yield engine, tokenizer


def player(tokenizer: Any, environment: Any = None, tools: Any = ()) -> Player:
    return make_player(environment, tools, tokenizer, [EOS], 2048, SETTINGS, "test")


def rows_of(tmp_path: Any, rows: Any, functions: Any = ()) -> RewardedRows:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RewardedRows(str(tmp_path / "rows.jsonl"), functions, is_played=True)


def test_rewards_of_turns_are_summed(opened: Any, tmp_path: Any) -> None:
    engine, tokenizer = opened
    task = rows_of(tmp_path, [{"turns": n} for n in (1, 2, 3, 2, 9)])
    seen: list[int] = []
    result = evaluate_episodes(
        engine, player(tokenizer, Turns), task, n=2, sampling=SAMPLING, on_item=lambda: seen.append(1)
    )
    assert result.scores.tolist() == [[0.5] * 2, [1.0] * 2, [1.5] * 2, [1.0] * 2, [1.5] * 2] and len(seen) == 5
    assert result.accuracy == proportion(np.array([0.0, 1, 1, 1, 1]), 2) and not result.failures
    assert result.turns == mean(np.array([1.0, 2, 3, 2, 3])) and result.is_graded
    assert result.ended_by == {"done": 0.8, "turns": 0.2, "length": 0.0, "context": 0.0, "error": 0.0}
    stricter = evaluate_episodes(engine, player(tokenizer, Turns), task, n=2, sampling=SAMPLING, success=1.5)
    assert stricter.accuracy.value == 0.4 and stricter.texts == result.texts
    assert compare(result, stricter)["p_value"] == 1
    summary = stricter.summary()
    assert summary["success_reward"] == 1.5 and summary["turns"] == result.turns._asdict()
    assert summary["ended_by"] == result.ended_by and summary["calls"] == 0
    record = json.loads(json.dumps(result.records()))[1]
    assert [message["role"] for message in record["completions"][0]["messages"]] == ["user", "assistant"] * 2
    assert record["turns"] == 2 and record["completions"][1]["rewards"] == [0.5, 0.5]
    assert record["completions"][1]["end"] == "done"


def test_episodes_whose_environment_fails_count_as_0(opened: Any, tmp_path: Any) -> None:
    engine, tokenizer = opened
    task = rows_of(tmp_path, [{"turns": 2}, {"turns": 0}, {"turns": 2}], [lambda completions: [1.0] * len(completions)])
    result = evaluate_episodes(engine, player(tokenizer, Turns), task, sampling=SAMPLING)
    assert result.scores.tolist() == [[2.0], [0.0], [2.0]] and list(result.failures) == [(1, 0)]
    assert "too many turns" in result.failures[1, 0] and result.summary()["scoring_failures"] == 1


def rows_with_prompts(tmp_path: Any, functions: Any) -> RewardedRows:
    return rows_of(tmp_path, [{"prompt": f"number {i}"} for i in range(6)], functions)


def test_a_task_scores_the_last_turn_and_functions_get_messages(opened: Any, tmp_path: Any) -> None:
    engine, tokenizer = opened
    result = evaluate_episodes(engine, player(tokenizer, tools=[add]), Digits(), n=4, sampling=SAMPLING)
    assert isinstance(result, EpisodesResult) and 1 < result.turns.value < 3
    for texts, scores, group in zip(result.texts, result.scores, result.episodes, strict=True):
        for text, score, episode in zip(texts, scores, group, strict=True):
            last = episode.messages[-1]
            assert text == ("" if last.get("tool_calls") else last["content"])
            assert score == (int(text[1]) / 10 if text else 0)
            assert episode.messages[0]["content"].startswith("Answer A and a digit.\n\nnumber ")
    assert result.summary()["calls"] > result.summary()["failed_calls"] > 0

    def count(prompts: Any, completions: Any) -> Any:
        assert prompts[0][0]["content"].startswith("number ")
        return [sum(message["role"] == "tool" for message in completion) for completion in completions]

    counted = evaluate_episodes(
        engine, player(tokenizer, tools=[add]), rows_with_prompts(tmp_path, [count]), n=4, sampling=SAMPLING
    )
    expected = [[sum(m["role"] == "tool" for m in e.messages) for e in group] for group in counted.episodes]
    assert counted.scores.tolist() == expected and counted.scores.any()


def test_results_do_not_depend_on_the_number_of_items(opened: Any) -> None:
    engine, tokenizer = opened
    one = player(tokenizer, tools=[add])
    few = evaluate_episodes(engine, one, Digits(), rows=Digits.rows[:2], n=2, sampling=SAMPLING)
    all_of_them = evaluate_episodes(engine, one, Digits(), n=2, sampling=SAMPLING)
    assert few.texts == all_of_them.texts[:2] and few.scores.tolist() == all_of_them.scores[:2].tolist()


def test_what_is_rejected(opened: Any) -> None:
    engine, tokenizer = opened
    assert_raises(
        WhetValueError, ("digits", "no items"), evaluate_episodes, engine, player(tokenizer, Turns), Digits(), rows=[],
        sampling=SAMPLING,
    )  # fmt: skip
    assert_raises(WhetTypeError, ("test", "tools", "environment"), player, tokenizer, Turns, [add])
