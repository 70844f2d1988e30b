"""GRPO on agents that talk to an OpenAI URL: what is trained, resuming, and what is rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest
from tests.algorithms.test_environments import Counts, model_of
from tests.cli.conftest import write_tiny_model
from tests.raising import assert_raises
from tests.rollout.test_episodes import TEMPLATE
from tests.tiny import assert_same_weights

from whet.algorithms import GRPO, OnlineDPO
from whet.errors import WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.models.tokenizers import load_tokenizer
from whet.serve.agents import Server

ROWS = [{"name": name} for name in "abcdef"]
SETTINGS: Any = {
    "group_size": 4, "batch_size": 2, "max_new_tokens": 40, "max_turn_tokens": 10, "max_turns": 4, "seed": 3,
    "learning_rate": 0.01, "env_timeout_s": 60.0,
}  # fmt: skip


def play(row: Any, server: Server) -> float:
    """Rewards capital letters; the last request forgets the first turn."""
    capitals = 0
    with openai.OpenAI() as client:
        messages: list[Any] = [{"role": "user", "content": f"{row['name']}: write"}]
        for _ in range(3):
            found = client.chat.completions.create(model=server.model, messages=messages)
            text = found.choices[0].message.content or ""
            capitals += sum(letter.isupper() for letter in text)
            messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}][-3:]
    if row["name"] == "b" and capitals % 3 == 0:
        raise ValueError("three of a kind")
    return float(capitals)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    return write_tiny_model(tmp_path_factory.mktemp("model"), TEMPLATE)


def make(folder: Any, model: Any = None, **settings: Any) -> GRPO:
    own = {"agent": play, "tokenizer": load_tokenizer(folder)}
    return GRPO(model or model_of(folder), **own | SETTINGS | settings)


@pytest.mark.parametrize("is_learner", [False, True])
def test_a_step_trains_what_the_agent_sampled(folder: Any, is_learner: bool) -> None:
    learner = Learner(folder, weights="float32", lora_rank=4) if is_learner else None
    grpo = make(folder, learner, learning_rate=0.0, **({} if is_learner else {"compute": "float32"}))
    played: list[Any] = []
    inner = grpo.player.play  # pyright: ignore[reportOptionalMemberAccess]
    grpo.player.play = lambda *a: played.extend(inner(*a)) or played  # pyright: ignore
    metrics = grpo.train_step(ROWS[:2])
    assert metrics["sampler/logprob_difference"] < 1e-4
    assert metrics["episodes/mean_turns"] > 2 and metrics["episodes/mean_branches"] > 1.5
    rewards = np.array([row["reward"] for row in grpo.last_completions]).reshape(2, 4)
    assert np.array_equal(np.isnan(rewards).ravel(), [episode.end == "error" for episode in played])
    assert np.isnan(rewards).mean() == metrics["episodes/ended_by_error"] < 1
    spread = np.nanstd(rewards, axis=1, keepdims=True)
    advantages = np.nan_to_num((rewards - np.nanmean(rewards, axis=1, keepdims=True)) / spread).ravel()
    counts = np.array([0 if episode.end == "error" else episode.n_sampled for episode in played])
    assert metrics["loss"] == pytest.approx(-(advantages * counts).sum() / counts.sum(), abs=1e-6)


def test_a_run_resumes_to_the_bit(folder: Any, tmp_path: Any) -> None:
    whole = make(folder)
    whole.train(ROWS, 4)
    first = make(folder)
    first.train(ROWS, 2)
    first.save(tmp_path / "checkpoint")
    own = {"agent": play, "tokenizer": load_tokenizer(folder)}
    second = GRPO.from_checkpoint(tmp_path / "checkpoint", model=model_of(folder), **own)
    second.train(ROWS, 2)
    assert_same_weights(whole.model, second.model)


def test_evaluation_plays_agents(folder: Any) -> None:
    grpo = make(folder)
    assert grpo.evaluate(ROWS[:1]) == grpo.evaluate(ROWS[:1]) >= 0


def test_mistakes_are_named(folder: Any) -> None:
    assert_raises(WhetTypeError, ("agent", "3"), make, folder, agent=3)
    assert_raises(WhetTypeError, ("agent", "environment"), make, folder, environment=Counts)
    assert_raises(WhetTypeError, ("chat template", "tokenizer"), make, folder, tokenizer=None)
    assert_raises(
        WhetValueError, ("serve_port", "no agent"), make, folder, agent=None, environment=Counts, serve_port=1
    )
    assert_raises(WhetValueError, ("max_read_tokens", "agent"), make, folder, max_read_tokens=9)
    assert_raises(WhetValueError, ("echo_alpha", "agent"), make, folder, echo_alpha=0.1)
    own = {"tokenizer": load_tokenizer(folder), "reward_fn": len, "agent": play}
    assert_raises(WhetTypeError, ("OnlineDPO", "agent"), OnlineDPO, model_of(folder), **own)
    grpo = make(folder, engine="torch")
    assert_raises(WhetTypeError, ("TorchEngine", "native"), grpo.train_step, ROWS[:2])
