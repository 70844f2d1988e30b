"""Episodes: the same on every engine and in every batch, their tokens and masks, limits, and failures."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.cli.conftest import write_tiny_model
from tests.raising import assert_mentions

from whet.config.sampling import SamplingParams
from whet.data.chat import Chat
from whet.engine import Engine
from whet.models.tokenizers import load_tokenizer
from whet.models.tokenizers.token_texts import read_token_texts
from whet.rollout.episodes import Episode, EpisodeLimits, Player
from whet.tasks.environment import Step
from whet.text.replies import ReplyFormat
from whet.text.seams import Seams

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = 1
SAMPLING = SamplingParams(max_new_tokens=60, stop_token_ids=(EOS,), seed=5)
LIMITS = EpisodeLimits(max_turns=4, max_turn_tokens=12, timeout_s=30.0)


class Game:
    """Answers each turn with its length, after a delay that differs from turn to turn."""

    def reset(self, row: Any, seed: int) -> Any:
        self.row, self.turns = row, 0
        return f"{row['name']}: your turn"

    def step(self, message: Any) -> Step:
        self.turns += 1
        time.sleep(0.003 * (hash(message["content"]) % 5))
        is_done = self.turns == self.row.get("turns", 9)
        return Step(f"{len(message['content'])} letters", reward=self.turns, done=is_done)


class Failing(Game):
    def step(self, message: Any) -> Step:
        if self.turns == 1 and self.row["name"] == "b":
            raise ValueError("out of moves")
        return super().step(message)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    return write_tiny_model(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(folder: Any) -> Any:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def engine(folder: Any) -> Any:
    with Engine.from_pretrained(folder) as engine:
        yield engine


class Batches:
    """Hides that an engine is native."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.policy_version, self.n_calls = engine, 0, 0

    def generate(self, prompt_ids: Any, n: int, sampling: SamplingParams, keys: Any = None) -> Any:
        self.n_calls += 1
        return self._engine.generate(prompt_ids, n, sampling, keys=keys)

    def sync(self, model: Any) -> None: ...


def player(tokenizer: Any, make: Any = Game, limits: EpisodeLimits = LIMITS, max_position: int = 512) -> Player:
    replies = ReplyFormat(tokenizer, read_token_texts(tokenizer, "test"))
    return Player(make, tokenizer, replies, [EOS], max_position, limits)


ROWS = [{"name": "a"}, {"name": "b", "turns": 2}, {"name": "c"}]


def facts(episode: Episode) -> Any:
    return (episode.prompt_ids, episode.token_ids, episode.sampled, episode.logprobs, episode.rewards, episode.end)


def test_episodes_depend_on_neither_engine_nor_batch(engine: Engine, tokenizer: Any) -> None:
    play = player(tokenizer).play
    whole = [facts(episode) for episode in play(engine, ROWS, 3, SAMPLING)]
    batches: Any = Batches(engine)
    assert [facts(episode) for episode in play(batches, ROWS, 3, SAMPLING)] == whole
    assert batches.n_calls == LIMITS.max_turns  # a call per turn
    assert [facts(episode) for episode in play(engine, ROWS[:1], 2, SAMPLING)] == whole[:2]
    assert len({tuple(episode[1]) for episode in whole}) == 9


def test_tokens_are_turns_and_what_the_template_adds(engine: Engine, tokenizer: Any) -> None:
    for episode in player(tokenizer).play(engine, ROWS, 2, SAMPLING):
        completion = episode.completion()
        n_turns = 2 if "b" in tokenizer.decode(episode.prompt_ids) else 4
        assert len(episode.rewards) == n_turns and episode.reward == sum(range(n_turns + 1))
        assert episode.end == ("done" if n_turns == 2 else "turns") and completion.finish_reason == "stop"
        assert completion.n_sampled == episode.n_sampled and len(completion.token_ids) == len(completion.logprobs or [])
        turns = "".join("s" if sampled else "r" for sampled in episode.sampled).replace("r", " ").split()
        assert len(turns) == n_turns and max(map(len, turns)) <= LIMITS.max_turn_tokens
        assert all((logprob < 0) == sampled for logprob, sampled in zip(episode.logprobs, episode.sampled, strict=True))
        # The tokens that were sampled have text that is not UTF-8, which a rendering would lose.
        seams = [m["content"] for m in episode.messages if m["role"] == "user"]
        text = tokenizer.decode(episode.prompt_ids + episode.token_ids, skip_special_tokens=False)
        assert text.startswith(Chat("test", {}, tokenizer).render(episode.messages[:1], add_generation_prompt=True))
        for content in seams[1:]:
            assert f"<eos>\n<user>{content}<eos>\n<assistant>" in text
        assert text.count("<assistant>") == n_turns


def test_an_episode_of_one_turn_is_a_completion(engine: Engine, tokenizer: Any) -> None:
    rows = [{"name": name, "turns": 1} for name in "ab"]
    limits = EpisodeLimits(timeout_s=30.0)
    episodes = player(tokenizer, limits=limits).play(engine, rows, 2, SAMPLING)
    prompts = [episodes[0].prompt_ids, episodes[2].prompt_ids]
    expected = [completion for group in engine.generate(prompts, 2, SAMPLING) for completion in group]
    for episode, completion in zip(episodes, expected, strict=True):
        assert episode.token_ids == completion.token_ids and episode.logprobs == completion.logprobs
        assert all(episode.sampled) and episode.completion().finish_reason == completion.finish_reason


def test_limits_end_episodes(engine: Engine, tokenizer: Any) -> None:
    short = SamplingParams(max_new_tokens=20, stop_token_ids=(EOS,), seed=5)
    for episode in player(tokenizer).play(engine, ROWS[:1], 3, short):
        assert episode.end == "length" and episode.n_sampled == 20 and episode.completion().finish_reason == "length"
    unread = EpisodeLimits(max_turns=9, max_turn_tokens=12, max_read_tokens=50, timeout_s=30.0)
    for episode in player(tokenizer, limits=unread).play(engine, ROWS[:1], 3, SAMPLING):
        assert episode.end == "context" and 20 < episode.n_read <= 50 and episode.sampled[-1]
    long = SamplingParams(max_new_tokens=400, stop_token_ids=(EOS,), seed=5)
    for episode in player(tokenizer, max_position=160).play(engine, ROWS[:1], 3, long):
        assert episode.end in ("context", "turns") and len(episode.prompt_ids) + len(episode.token_ids) < 160


def test_a_turn_that_a_stop_string_ends_gets_its_stop_token(engine: Engine, tokenizer: Any) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    sampling = SamplingParams(max_new_tokens=60, stop_token_ids=(EOS,), stop=tuple(letters), seed=5)
    episodes = player(tokenizer).play(engine, ROWS[:1], 4, sampling)
    turns = [message["content"] for episode in episodes for message in episode.messages if message["role"] != "user"]
    assert not any(letter in turn for turn in turns for letter in letters)
    n_stopped = 0
    for episode in episodes:
        ends = [i for i in range(1, len(episode.sampled)) if episode.sampled[i - 1] and not episode.sampled[i]]
        n_stopped += sum(tokenizer.decode(episode.token_ids[i - 1 : i]) in letters for i in ends)
        assert len(ends) == 3 and all(episode.token_ids[i] == EOS for i in ends if episode.token_ids[i - 1] != EOS)
    assert n_stopped > 5


def test_a_failed_environment_has_no_reward(engine: Engine, tokenizer: Any) -> None:
    good, bad, other = player(tokenizer, Failing).play(engine, ROWS, 1, SAMPLING)
    assert bad.end == "error" and bad.reward is None and len(bad.rewards) == 1
    assert_mentions(bad.error, "ValueError", "out of moves")
    expected = player(tokenizer).play(engine, ROWS, 1, SAMPLING)
    assert [facts(good), facts(other)] == [facts(expected[0]), facts(expected[2])]


def test_a_turn_computes_its_new_tokens_only(engine: Engine, tokenizer: Any, monkeypatch: Any) -> None:
    reused: list[tuple[int, int]] = []
    completions = Engine.completions

    def recorded(self: Engine, call: Any, *rest: Any) -> Any:
        reused.append((len(reused), call.n_reused))
        return completions(self, call, *rest)

    monkeypatch.setattr(Engine, "completions", recorded)
    [episode] = player(tokenizer).play(engine, ROWS[:1], 1, SAMPLING)
    lengths, sampled = [len(episode.prompt_ids)], episode.sampled
    lengths += [lengths[0] + i for i in range(1, len(sampled)) if sampled[i] and not sampled[i - 1]]
    turns = [n for _, n in reused]
    assert len(turns) == len(lengths) == 4
    # All but the seam, and the last sampled token, whose keys and values have not been computed.
    seam = len(tokenizer("<eos>\n<user>12 letters<eos>\n<assistant>", add_special_tokens=False)["input_ids"])
    assert all(n >= length - seam - 1 for n, length in list(zip(turns, lengths, strict=True))[1:])


class Long(Game):
    """Begins or answers with a text of the row's length."""

    def reset(self, row: Any, seed: int) -> Any:
        self.row = row
        return "x" * row.get("opening", 1)

    def step(self, message: Any) -> Step:
        return Step("x" * self.row.get("answer", 1), reward=1.0)


def test_messages_that_do_not_fit_end_the_episode_only(engine: Engine, tokenizer: Any, monkeypatch: Any) -> None:
    lengths: list[int] = []
    for name in ("opening", "seam"):
        method = getattr(Seams, name)

        def recorded(self: Seams, *messages: Any, method: Any = method) -> Any:
            lengths.append(max(len(message["content"]) for message in messages[-1]))
            return method(self, *messages)

        monkeypatch.setattr(Seams, name, recorded)
    rows = [{}, {"opening": 505}, {"opening": 10_000_000}, {"answer": 400}, {"answer": 10_000_000}]
    first, *failed = player(tokenizer, Long).play(engine, rows, 1, SAMPLING)
    assert first.end == "turns" and [episode.end for episode in failed] == ["error", "error", "context", "context"]
    for episode in failed[:2]:
        assert_mentions(episode.error, "opening", "512 positions")
    assert [episode.reward for episode in failed] == [None, None, 2.0, 1.0]
    assert max(lengths) == 505  # megabytes are not tokenised
