"""GRPO on episodes of an environment: what is trained, failures, reward functions, resuming, and what is rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.conftest import write_tiny_model
from tests.engine.tiny_models import tiny_model
from tests.raising import assert_raises
from tests.rollout.test_episodes import TEMPLATE
from tests.rollout.test_tool_episodes import HERMES, TURN, add
from tests.tiny import assert_same_weights

from whet.algorithms import GRPO, OnlineDPO
from whet.errors import WhetTypeError, WhetValueError
from whet.learner import Learner
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module
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
    assert row["reward"] == row["rewards/environment_reward"] == letters == sum(row["turn_rewards"])
    assert row["end"] == "turns" and row["error"] == "" and len(row["turn_rewards"]) == 3


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


def places_of(answer: str, episode: Any, tokenizer: Any) -> Any:
    """Return the tokens of an answer that the template wraps as <user>ANSWER<eos>, by the texts of all tokens."""
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in episode.token_ids]
    mask, n = torch.zeros(len(texts), dtype=torch.bool), 0
    for begin in (i for i in range(1, len(texts)) if not episode.sampled[i] and episode.sampled[i - 1]):
        end = next((i for i in range(begin, len(texts)) if episode.sampled[i]), len(texts))
        ends = np.cumsum(list(map(len, texts[begin:end])))
        first = "".join(texts[begin:end]).index(f"<user>{answer}<eos>") + len("<user>")
        mask[begin:end] = torch.tensor((ends > first) & (ends <= first + len(answer)))
        n += 1
    assert mask.sum() == n * len(tokenizer(answer, add_special_tokens=False)["input_ids"]) > 0
    return mask


@pytest.mark.parametrize("as_learner", [False, True])
def test_echo_is_autograds_and_learns_the_answers(folder: Any, as_learner: bool) -> None:
    """The update adds alpha times the mean cross-entropy of the answers, without the template's tokens."""
    model, tokenizer, settings = model_of(folder), load_tokenizer(folder), {"echo_alpha": 0.3, "micro_batch_size": 3}
    trained = Learner(folder, weights="float32", lora_rank=4, compute="float32") if as_learner else model
    settings |= {} if as_learner else {"compute": "float32", "max_grad_norm": 0.0}
    grpo = make(folder, model=trained, learning_rate=0.0, **settings)
    played: list[Any] = []
    play = grpo.player.play  # pyright: ignore[reportOptionalMemberAccess]
    grpo.player.play = lambda *a: played.extend(play(*a)) or played  # pyright: ignore
    metrics = grpo.train_step(ROWS[:2])
    rewards = np.array([episode.reward for episode in played]).reshape(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)).ravel()
    policy, answers, entropies = [], [], []
    for episode, advantage in zip(played, advantages, strict=True):
        ids = torch.tensor([episode.prompt_ids + episode.token_ids])
        every = model(ids).logits[0, len(episode.prompt_ids) - 1 : -1].log_softmax(-1)
        logprobs = every.gather(1, ids[0, len(episode.prompt_ids) :, None])[:, 0]
        sampled = torch.tensor(episode.sampled)
        policy.append(-advantage * (logprobs - logprobs.detach()).exp()[sampled])
        answers.append(-logprobs[places_of("more", episode, tokenizer)])
        entropies.append(-(every.exp() * every).sum(-1)[sampled])
    loss = torch.cat(policy).mean() + 0.3 * torch.cat(answers).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=2e-5)
    assert metrics["echo/nll"] == pytest.approx(torch.cat(answers).mean().item(), rel=1e-5)
    assert metrics["echo/num_tokens"] == len(torch.cat(answers)) == 8 * 2 * len("more")
    assert metrics["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-4)
    if not as_learner:  # the gradient of adapters is another one
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    grpo = make(folder, model=trained, **settings)
    history = [grpo.train_step(ROWS[:2])["echo/nll"] for _ in range(12)]
    assert history[-1] < history[0] - 0.2


@pytest.mark.parametrize("more", [{}, {"max_new_tokens": 12}])
def test_the_update_by_turns_is_by_hand(folder: Any, more: Any) -> None:
    """With a learning rate of 0 the loss is minus the mean over sampled tokens of the advantage of their turn."""
    grpo = make(
        folder, learning_rate=0.0, advantage_level="turn", regex="[A-Za-z]{1,9}",
        reward_weights=[0.5, 2.0], micro_batch_size=3,
        reward_fn=lambda completions: [float(len(completion[-1]["content"])) for completion in completions], **more,
    )  # fmt: skip
    played: list[Any] = []
    play = grpo.player.play  # pyright: ignore[reportOptionalMemberAccess]
    grpo.player.play = lambda *a: played.extend(play(*a)) or played  # pyright: ignore
    metrics = grpo.train_step(ROWS[:2])
    total, n_tokens = 0.0, 0
    for group in (played[:4], played[4:]):
        to_go, counts = [], []
        for episode in group:
            text = "".join("s" if sampled else " " for sampled in episode.sampled)
            turns = [len(run) for run in text.split()]
            rewards = [0.5 * reward for reward in episode.rewards] + [0.0] * (len(turns) - len(episode.rewards))
            rewards[-1] += 2.0 * len(episode.messages[-1]["content"])
            to_go += [sum(rewards[t:]) for t in range(len(turns))]
            counts += turns
        values = np.array(to_go)
        total += ((values - values.mean()) / values.std() * counts).sum()
        n_tokens += sum(counts)
    assert metrics["loss"] == pytest.approx(-total / n_tokens, abs=1e-6) and metrics["loss"] != 0
    assert any(episode.end == "length" for episode in played) == bool(more)
    row = grpo.last_completions[0]
    assert len(row["advantage"]) == sum(message["role"] == "assistant" for message in row["completion"])


def test_turns_without_differences_are_filtered(folder: Any) -> None:
    grpo = make(folder, Same, advantage_level="turn", filter_zero_variance=True)
    assert grpo.train_step(ROWS[:2])["loss"] == 0  # each turn has the same reward to go in all episodes


class Same(Counts):
    """Rewards the last of two turns."""

    def reset(self, row: Any, seed: int) -> Any:
        self.turns = 0
        return super().reset(row, seed)

    def step(self, message: Any) -> Step:
        self.turns += 1
        return Step("more", reward=self.turns == 2, done=self.turns == 2)


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


@pytest.mark.parametrize("more", [{}, {"echo_alpha": 0.1, "steps_per_generation": 2}])
def test_a_run_resumes_to_the_bit(folder: Any, tmp_path: Any, more: Any) -> None:
    whole = make(folder, **more)
    whole.train(ROWS, 4)
    first = make(folder, **more)
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


def graded(completions: Any, bonus: Any) -> Any:
    """Score of the results that the model read, and a bonus of the row."""
    calls = [[m for m in completion if m["role"] == "tool"] for completion in completions]
    return [sum(m["content"].isdigit() for m in each) + extra for each, extra in zip(calls, bonus, strict=True)]


def test_tools_are_called_and_counted(tmp_path: Any) -> None:
    folder = write_tiny_model(tmp_path / "model", HERMES, max_position=2048)
    rows = [{"prompt": f"sum {i}", "bonus": i} for i in range(2)]
    settings = SETTINGS | {"max_new_tokens": 400, "max_turn_tokens": 0, "regex": TURN}
    make_tools = lambda **more: GRPO(  # noqa: E731
        model_of(folder), tools=[add], tokenizer=load_tokenizer(folder), **settings | more
    )
    grpo = make_tools(reward_fn=graded, echo_alpha=0.1)
    metrics = grpo.train_step(rows)
    assert metrics["episodes/mean_calls"] > metrics["episodes/mean_failed_calls"] > 0
    assert metrics["episodes/mean_turns"] > 1 and metrics["episodes/ended_by_error"] == 0
    assert "rewards/environment_reward/mean" not in metrics  # tools give none
    table, tokenizer = grpo.last_completions, load_tokenizer(folder)
    read = [  # results that a turn follows
        message["content"]
        for row in table
        for i, message in enumerate(row["completion"])
        if message["role"] == "tool" and any(later["role"] == "assistant" for later in row["completion"][i:])
    ]
    counts = [len(tokenizer(content, add_special_tokens=False)["input_ids"]) for content in read]
    assert metrics["echo/num_tokens"] == sum(counts) > 0
    assert [row["reward"] for row in table] == [row["rewards/graded"] for row in table]
    assert graded([row["completion"] for row in table], [0] * 4 + [1] * 4) == [row["reward"] for row in table]
    assert {row["reward"] for row in table} > {0.0, 1.0}
    assert_raises(WhetTypeError, "reward_fn is None", make_tools)
    assert_raises(
        WhetTypeError, ("tools", "environment"), make_tools, environment=Counts, reward_fn=graded
    )  # fmt: skip
    assert_raises(
        WhetValueError, ("advantage_level", "no environment"), make_tools, advantage_level="turn", reward_fn=graded
    )  # fmt: skip
    assert_raises(WhetValueError, ("max_tool_characters", "no tools"), make, folder, max_tool_characters=9)


def test_settings_without_effect_and_missing_tokenizers_are_rejected(folder: Any) -> None:
    model = model_of(folder)
    assert_raises(WhetTypeError, ("tokenizer", "chat template"), GRPO, model, environment=Counts)
    assert_raises(WhetTypeError, ("3", "reset(row, seed)"), make, folder, 3)
    assert_raises(
        WhetTypeError, ("OnlineDPO", "GRPO"), OnlineDPO, model, environment=Counts, tokenizer=load_tokenizer(folder),
        reward_fn=len,
    )  # fmt: skip
    assert_raises(WhetValueError, ("max_turns", "environment"), GRPO, model, reward_fn=len, max_turns=3)
    assert_raises(WhetValueError, ("echo_alpha is 0.1", "no tools"), GRPO, model, reward_fn=len, echo_alpha=0.1)
    assert_raises(WhetValueError, ("echo_alpha is -1", ">= 0"), make, folder, echo_alpha=-1.0)
    assert_raises(WhetTypeError, ("list", "rows"), make(folder).train_step, [[1, 2], [3]])


def test_sampling_ahead_is_refused(folder: Any) -> None:
    assert_raises(WhetValueError, ("async_lag", 1, "environment"), make, folder, async_lag=1)


def test_the_experts_of_all_turns_are_replayed(folder: Any) -> None:
    """With the sampler's weights in float32, the learner chooses nearly all of its experts itself."""
    tiny = {"max_position_embeddings": 512, "num_experts": 16, "num_experts_per_tok": 4}
    mixture = tiny_model("qwen3_moe", vocab_size=len(load_tokenizer(folder)), **tiny)
    learner = Learner(pack_base(open_module(mixture), weights="float32"), lora_rank=2)
    step = make(folder, model=learner).train_step(ROWS[:2])
    assert step["episodes/mean_turns"] == 3 and step["sampler/logprob_difference"] < 1e-4
    assert step["sampler/replaced_experts"] < 0.01


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_the_tokens_that_turns_were_drawn_from_are_kept(folder: Any, engine: str) -> None:
    step = make(folder, engine=engine, compute="float32", top_k=5, top_p=0.9).train_step(ROWS[:2])
    assert step["episodes/mean_turns"] == 3 and 0 <= step["sampler/logprob_difference"] < 1e-4
