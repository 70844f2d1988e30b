"""GRPO on episodes of an environment: what is trained, failures, reward functions, resuming, and what is rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import write_tiny_model
from tests.raising import assert_raises
from tests.rollout.test_episodes import TEMPLATE
from tests.tiny import assert_same_weights

from whet.algorithms import GRPO, OnlineDPO
from whet.errors import WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.models.tokenizers import load_tokenizer
from whet.tasks.environment import Step

ROWS = [{"name": name} for name in "abcdef"]
SETTINGS: Any = {
    "group_size": 4, "batch_size": 2, "max_new_tokens": 40, "max_turn_tokens": 10, "max_turns": 3, "seed": 3,
    "learning_rate": 0.01, "env_timeout_s": 60.0,
}  # fmt: skip


class Counts:
    """Rewards capital letters of each turn."""

    def reset(self, row: Any, seed: int) -> Any:
        return f"{row['name']}: write"

    def step(self, message: Any) -> Step:
        return Step("more", reward=sum(letter.isupper() for letter in message["content"]))


class Fails(Counts):
    def step(self, message: Any) -> Step:
        if any(letter in message["content"] for letter in "ABCD"):
            raise ValueError("one of the first letters")
        return super().step(message)


class NeverBegins(Counts):
    def reset(self, row: Any, seed: int) -> Any:
        raise ValueError("no game")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    return write_tiny_model(tmp_path_factory.mktemp("model"), TEMPLATE)


def model_of(folder: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def make(folder: Any, environment: Any = Counts, model: Any = None, **settings: Any) -> GRPO:
    model = model or model_of(folder)
    return GRPO(model, environment=environment, tokenizer=load_tokenizer(folder), **SETTINGS | settings)


def test_a_step_trains_on_the_turns(folder: Any) -> None:
    grpo = make(folder, compute="float32")
    metrics = grpo.train_step(ROWS[:2])
    assert metrics["episodes/mean_turns"] == 3 and metrics["episodes/ended_by_turns"] == 1
    assert metrics["completions/mean_length"] <= 30 and metrics["episodes/mean_read_tokens"] > 20
    assert metrics["mean_reward"] == metrics["rewards/environment_reward/mean"] > 0
    assert metrics["sampler/logprob_difference"] < 1e-4  # of sampled tokens, under the trained policy
    row = grpo.last_completions[0]
    assert row["prompt"] == [{"role": "user", "content": "a: write"}]
    assert [message["role"] for message in row["completion"]] == ["assistant", "user"] * 2 + ["assistant"]
    letters = sum(letter.isupper() for message in row["completion"][::2] for letter in message["content"])
    assert row["reward"] == row["rewards/environment_reward"] == letters


def test_the_update_is_by_hand(folder: Any) -> None:
    """With a learning rate of 0 the loss is minus the mean advantage of the sampled tokens."""
    grpo = make(folder, learning_rate=0.0)
    played: list[Any] = []
    play = grpo.player.play  # pyright: ignore[reportOptionalMemberAccess]
    grpo.player.play = lambda *a: played.extend(play(*a)) or played  # pyright: ignore
    metrics = grpo.train_step(ROWS[:2])
    rewards = np.array([episode.reward for episode in played]).reshape(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)).ravel()
    counts = np.array([episode.n_sampled for episode in played])
    assert metrics["loss"] == pytest.approx(-(advantages * counts).sum() / counts.sum(), abs=1e-6)


def test_an_episode_that_fails_leaves_its_group(folder: Any) -> None:
    grpo = make(folder, Fails)
    metrics = grpo.train_step(ROWS[:2])
    assert 0 < metrics["episodes/ended_by_error"] < 1
    rewards = [row["reward"] for row in grpo.last_completions]
    failed = [np.isnan(reward) for reward in rewards]
    assert np.mean(failed) == metrics["episodes/ended_by_error"]
    advantages = np.array([row["advantage"] for row in grpo.last_completions])
    assert not advantages[failed].any() and advantages.any() and abs(advantages.reshape(2, 4).sum(1)).max() < 1e-6


def test_other_reward_functions_do_not_bring_a_failed_episode_back(folder: Any) -> None:
    grpo = make(folder, Fails, reward_fn=lambda completions: [1.0] * len(completions))
    metrics = grpo.train_step(ROWS[:2])
    rewards = np.array([row["reward"] for row in grpo.last_completions])
    assert 0 < np.isnan(rewards).mean() == metrics["episodes/ended_by_error"] < 1


def test_a_step_without_an_episode_changes_nothing(folder: Any) -> None:
    grpo, expected = make(folder, NeverBegins), model_of(folder)
    metrics = grpo.train_step(ROWS[:2])
    assert metrics["episodes/ended_by_error"] == 1 and metrics["completions/mean_length"] == 0
    assert_same_weights(grpo.model, expected)


def test_reward_functions_get_messages(folder: Any) -> None:
    def turns(prompts: Any, completions: Any, name: Any) -> Any:
        assert all(prompt[0]["content"] == f"{each}: write" for prompt, each in zip(prompts, name, strict=True))
        return [sum(message["role"] == "assistant" for message in completion) for completion in completions]

    metrics = make(folder, reward_fn=turns, reward_weights=[0.0, 2.0]).train_step(ROWS[:2])
    assert metrics["rewards/turns/mean"] == 3 and metrics["mean_reward"] == 6


def test_a_run_resumes_to_the_bit(folder: Any, tmp_path: Any) -> None:
    whole = make(folder)
    whole.train(ROWS, 4)
    first = make(folder)
    first.train(ROWS, 2)
    first.save(tmp_path / "checkpoint")
    own = {"environment": Counts, "tokenizer": load_tokenizer(folder)}
    second = GRPO.from_checkpoint(tmp_path / "checkpoint", model=model_of(folder), **own)
    second.train(ROWS, 2)
    assert_same_weights(whole.model, second.model)


def test_adapters_of_a_learner_are_trained(folder: Any) -> None:
    learner = Learner(folder, weights="float32", lora_rank=4, lora_alpha=8)
    metrics = make(folder, model=learner).train_step(ROWS[:2])
    assert metrics["sampler/logprob_difference"] < 1e-4 and metrics["grad_norm"] > 0


def test_evaluation_plays_episodes(folder: Any) -> None:
    grpo = make(folder)
    assert grpo.evaluate(ROWS) == grpo.evaluate(ROWS) >= 0


def test_settings_without_effect_and_missing_tokenizers_are_rejected(folder: Any) -> None:
    model = model_of(folder)
    assert_raises(WhetTypeError, ("tokenizer", "chat template"), GRPO, model, environment=Counts)
    assert_raises(WhetTypeError, ("3", "reset(row, seed)"), make, folder, 3)
    assert_raises(
        WhetTypeError, ("OnlineDPO", "GRPO"), OnlineDPO, model, environment=Counts, tokenizer=load_tokenizer(folder),
        reward_fn=len,
    )  # fmt: skip
    assert_raises(WhetValueError, ("max_turns", "environment"), GRPO, model, reward_fn=len, max_turns=3)
    assert_raises(WhetTypeError, ("list", "rows"), make(folder).train_step, [[1, 2], [3]])


def test_sampling_ahead_is_refused(folder: Any) -> None:
    assert_raises(WhetValueError, ("async_lag", 1, "environment"), make, folder, async_lag=1)
