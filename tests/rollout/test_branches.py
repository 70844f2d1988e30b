"""Episodes with a chat template that drops earlier thinking, as Qwen3's does: branches to the token, and training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import write_tiny_model
from tests.raising import assert_raises
from tests.rollout.test_episodes import EOS, Batches, facts, player
from tests.tiny import changed

from whet.algorithms import GRPO, RLOO
from whet.config.sampling import SamplingParams
from whet.data.chat import Chat
from whet.engine import Engine
from whet.learner import Learner
from whet.models.tokenizers import load_tokenizer
from whet.nn.causal_lm import completion_logprobs
from whet.rollout.episodes import Episode, EpisodeLimits, rollout_of
from whet.tasks.environment import Step
from whet.text.seams import RewrittenHistoryError

TEMPLATE = (
    "{% set last = namespace(user=0) %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' and loop.index0 > last.user %}"
    "<think>{{ message.reasoning_content or '' }}</think>{% endif %}{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
THOUGHT: Any = {"regex": "[a-z]{1,4}</think>[a-z]{1,4}", "max_new_tokens": 80, "stop_token_ids": (EOS,), "seed": 5}
SAMPLING = SamplingParams(**THOUGHT, kept_tokens=True)
LIMITS = EpisodeLimits(max_turns=3, timeout_s=30.0, may_branch=True)


class Asks:
    """Answers the second turn as a tool, after which the template keeps the thinking."""

    def reset(self, row: Any, seed: int) -> Any:
        self.turns = 0
        return f"{row['name']}?"

    def step(self, message: Any) -> Step:
        self.turns += 1
        role = "tool" if self.turns == 2 else "user"
        return Step([{"role": role, "content": f"{self.turns}"}], reward=ord(message["content"][0]) - 97.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    return write_tiny_model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(folder: Any) -> Any:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def engine(folder: Any, tokenizer: Any) -> Any:
    with Engine.from_pretrained(folder) as engine:
        engine.tokenizer = tokenizer
        yield engine


def play(engine: Any, tokenizer: Any, n: int = 4, **limits: Any) -> list[Episode]:
    chosen = EpisodeLimits(**{**LIMITS.__dict__, **limits})
    return player(tokenizer, Asks, chosen).play(engine, [{"name": "a"}], n, SAMPLING)


def earlier(episode: Episode) -> list[Any]:
    found = [(branch.prompt_ids, branch.completion) for branch in episode.earlier]
    return [(ids, each.token_ids, each.logprobs, each.sampled) for ids, each in found]


def sampled_text(tokenizer: Any, completion: Any) -> str:
    pairs = zip(completion.token_ids, completion.sampled, strict=True)
    return "".join(tokenizer.decode([i]) if sampled else "·" for i, sampled in pairs)


def test_a_template_that_drops_thinking_is_refused_unless_episodes_may_branch(engine: Any, tokenizer: Any) -> None:
    facts = ("<think>", "rewritten_history", "--chat-template")
    assert_raises(RewrittenHistoryError, facts, play, engine, tokenizer, may_branch=False)


def test_an_answer_is_marked_on_the_branch_that_reads_it_first(engine: Any, tokenizer: Any) -> None:
    for episode in play(engine, tokenizer, marks_answers=True):
        _, rows = rollout_of([episode]).split_branches([0])
        texts = map(tokenizer.decode, ([i] for ids in rows.completion_ids for i in ids))
        marks = [mark for of_row in rows.answered(range(2)) for mark in of_row]
        assert [text for text, mark in zip(texts, marks, strict=True) if mark] == ["1", "2"]


def test_branches_to_the_token(engine: Any, tokenizer: Any) -> None:
    for episode in play(engine, tokenizer):
        question, one, _, two, _, three = episode.messages
        assert all(turn["reasoning_content"] and turn["content"] for turn in (one, two, three))
        _, split = rollout_of([episode]).split_branches([0])
        texts = [sampled_text(tokenizer, completion) for completion in split.completions]
        thoughts = [f"{turn['reasoning_content']}</think>{turn['content']}<eos>" for turn in (one, two, three)]
        # The user's message after the first turn removes its thinking; the tool's after the second removes nothing.
        seam = len("\n<tool>2<eos>\n<assistant><think>".replace("<eos>", "·"))
        history = len(f"{one['content']}·\n<user>1·\n<assistant><think>")
        assert texts == [thoughts[0], "·" * history + thoughts[1] + "·" * seam + thoughts[2]]
        rendered = [
            Chat("test", {}, tokenizer).render(messages, add_generation_prompt=True)
            for messages in ([question], episode.messages[:3], episode.messages[:5])
        ]
        wholes = [
            tokenizer.decode(prompt + c.token_ids, skip_special_tokens=False)
            for prompt, c in zip(split.prompt_ids, split.completions, strict=True)
        ]
        assert wholes == [rendered[0] + thoughts[0], rendered[2] + thoughts[2]]
        assert wholes[1].startswith(rendered[1] + thoughts[1])
        # Both begin with the opening up to the thinking, which the history lacks: computed once per prompt.
        shared = [tokenizer.decode(ids, skip_special_tokens=False) for ids in split.prompt_ids]
        assert shared == ["<user>a?<eos>\n<assistant><think>", "<user>a?<eos>\n<assistant>"]
        n_sampled = sum(len(tokenizer(thought)["input_ids"]) for thought in thoughts)
        assert episode.n_sampled == sum(c.n_sampled for c in split.completions) == n_sampled
        assert episode.n_read == texts[1].count("·")


def test_log_probs_of_branches_are_the_samplers(engine: Any, tokenizer: Any) -> None:
    _, split = rollout_of(play(engine, tokenizer)).split_branches(range(4))
    for prompt, completion in zip(split.prompt_ids, split.completions, strict=True):
        logits = engine.logits(prompt + completion.token_ids)[len(prompt) - 1 : -1]
        assert completion.kept_tokens is not None and completion.logprobs is not None and completion.sampled is not None
        assert len(completion.kept_tokens) == len(completion.logprobs) == len(logits)
        for t, row in enumerate(logits.astype(np.float64)):
            row = row[completion.kept_tokens[t]].ravel() if completion.sampled[t] else row
            expected = logits[t, completion.token_ids[t]] - np.logaddexp.reduce(row) if completion.sampled[t] else 0.0
            assert abs(completion.logprobs[t] - expected) < 1e-3


def test_branches_depend_on_neither_engine_nor_batch(engine: Any, tokenizer: Any) -> None:
    whole = play(engine, tokenizer)
    batched = play(Batches(engine), tokenizer)
    assert [facts(episode) for episode in batched] == [facts(episode) for episode in whole]
    assert [earlier(episode) for episode in batched] == [earlier(episode) for episode in whole]
    assert [facts(episode) for episode in play(engine, tokenizer, 2)] == [facts(episode) for episode in whole[:2]]


def test_a_branch_that_does_not_fit_is_not_begun(engine: Any, tokenizer: Any) -> None:
    for episode in play(engine, tokenizer, max_read_tokens=20):
        assert episode.end == "context" and not episode.earlier and len(episode.messages) == 2


@pytest.mark.parametrize("is_learner", [False, True])
def test_every_branch_is_trained_with_the_episodes_advantage(folder: Any, tokenizer: Any, is_learner: bool) -> None:
    from transformers import AutoModelForCausalLM

    settings: Any = {**THOUGHT, "group_size": 4, "batch_size": 2, "max_turns": 3, "env_timeout_s": 60.0}
    del settings["stop_token_ids"]
    model = (
        Learner(folder, weights="float32", lora_rank=4) if is_learner else AutoModelForCausalLM.from_pretrained(folder)
    )
    own = {"learning_rate": 0.0, "compute": None if is_learner else "float32", "rewritten_history": "branch"}
    own = {name: value for name, value in own.items() if value is not None}
    grpo = GRPO(model, environment=Asks, tokenizer=tokenizer, **settings | own)
    played: list[Any] = []
    inner = grpo.player.play  # pyright: ignore[reportOptionalMemberAccess]
    grpo.player.play = lambda *a: played.extend(inner(*a)) or played  # pyright: ignore
    metrics = grpo.train_step([{"name": "a"}, {"name": "b"}])
    assert metrics["episodes/mean_branches"] == 2 and metrics["sampler/logprob_difference"] < 1e-4
    rewards = np.array([episode.reward for episode in played]).reshape(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)).ravel()
    counts = np.array([episode.n_sampled for episode in played])
    assert metrics["loss"] == pytest.approx(-(advantages * counts).sum() / counts.sum(), abs=1e-6)
    assert metrics["completions/mean_length"] == counts.mean()


def test_the_kl_of_an_episode_is_over_the_sampled_tokens_of_its_branches(folder: Any, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    settings: Any = {**THOUGHT, "group_size": 4, "batch_size": 2, "max_turns": 3, "env_timeout_s": 60.0}
    del settings["stop_token_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    reference = changed(model)
    own = {"learning_rate": 0.0, "compute": "float32", "rewritten_history": "branch", "beta": 0.5}
    rloo = RLOO(model, reference, environment=Asks, tokenizer=tokenizer, **settings | own)
    rollouts: list[Any] = []
    inner = rloo.sample_step
    rloo.sample_step = lambda *a, **b: rollouts.append(inner(*a, **b)) or rollouts[-1]  # pyright: ignore
    metrics = rloo.train_step([{"name": "a"}, {"name": "b"}])
    owners, rows = rollouts[0].split_branches(range(8))
    kl, n_tokens = np.zeros(8), 0
    for i, prompt, completion in zip(owners, rows.prompt_ids, rows.completions, strict=True):
        given: Any = {"kept_tokens": [completion.kept_tokens], "completion_mask": [completion.sampled]}
        texts = [prompt], [list(completion.token_ids)]
        policy, ref = (completion_logprobs(each, *texts, **given).logprobs.sum() for each in (model, reference))
        kl[i] += float(policy - ref)
        n_tokens += sum(completion.sampled)
    assert len(owners) == 16 and abs(kl).max() > 0.1
    assert metrics["kl"] == pytest.approx(kl.sum() / n_tokens, abs=1e-5)
    assert metrics["mean_kl"] == pytest.approx(kl.mean(), abs=1e-4)
    shaped = np.array([row["reward"] for row in rloo.last_completions]) - 0.5 * kl
    expected = [shaped[i] - np.delete(shaped[i // 4 * 4 : i // 4 * 4 + 4], i % 4).mean() for i in range(8)]
    assert [row["advantage"] for row in rloo.last_completions] == pytest.approx(expected, abs=1e-4)
    assert metrics["loss"] == pytest.approx(-np.array(expected)[owners].mean(), abs=1e-4)  # each branch is a row


def test_turns_of_branches_have_their_advantages(folder: Any, tokenizer: Any) -> None:
    learner = Learner(folder, weights="float32", lora_rank=4)
    settings: Any = {**THOUGHT, "group_size": 4, "batch_size": 2, "max_turns": 3, "env_timeout_s": 60.0}
    del settings["stop_token_ids"]
    own = {"learning_rate": 0.0, "rewritten_history": "branch", "advantage_level": "turn", "micro_batch_size": 3}
    grpo = GRPO(learner, environment=Asks, tokenizer=tokenizer, **settings | own)
    played: list[Any] = []
    inner = grpo.player.play  # pyright: ignore[reportOptionalMemberAccess]
    grpo.player.play = lambda *a: played.extend(inner(*a)) or played  # pyright: ignore
    metrics = grpo.train_step([{"name": "a"}, {"name": "b"}])
    assert metrics["episodes/mean_branches"] == 2
    total, n_tokens = 0.0, 0
    for group in (played[:4], played[4:]):
        to_go = np.array([[sum(episode.rewards[t:]) for t in range(3)] for episode in group])
        advantages = (to_go - to_go.mean()) / to_go.std()
        for episode, of_turns in zip(group, advantages, strict=True):
            branches = [*(branch.completion.sampled for branch in episode.earlier), episode.sampled]
            text = " ".join("".join("s" if sampled else " " for sampled in branch) for branch in branches)
            counts = [len(run) for run in text.split()]  # a turn is sampled on one branch
            assert len(counts) == 3
            total += (of_turns * counts).sum()
            n_tokens += sum(counts)
    assert metrics["loss"] == pytest.approx(-total / n_tokens, abs=1e-6) and abs(metrics["loss"]) > 1e-3
