"""Games of GEM and TextArena, played by scripted players and by a model, in an environment that has the libraries."""

from __future__ import annotations

import contextlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.algorithms.test_environments import SETTINGS, model_of
from tests.cli.conftest import write_tiny_model
from tests.raising import assert_raises
from tests.rollout.test_episodes import TEMPLATE

from whet.algorithms import GRPO
from whet.cli import main
from whet.data.sources import read_rows
from whet.errors import WhetValueError
from whet.models.tokenizers import load_tokenizer
from whet.rewards.processes import Guard
from whet.runs.inputs import read_inputs
from whet.tasks.environment import EpisodeProcess, Opening, Step, load_environment

ROOT = Path(__file__).parents[3]
OPPONENT = """
import random, re

def play(observation, seed):
    return random.Random(seed).choice(re.findall(r"'(\\[\\d\\])'", observation.split("Available")[-1]))
"""


def play(make: Any, player: Any, seed: int, row: Any = ()) -> tuple[list[str], list[float]]:
    """Play an episode in its process; return what the player read, and its rewards."""
    with Guard() as guard, contextlib.closing(EpisodeProcess(make, dict(row), seed, 60.0, guard)) as process:
        process.reset()
        found, read, rewards = process.outcome(), list[str](), list[float]()
        assert isinstance(found, Opening), found
        read.append(found.messages[-1]["content"])
        while True:
            process.step({"role": "assistant", "content": player(read)})
            found = process.outcome()
            assert isinstance(found, Step), found
            rewards.append(found.reward)
            if found.done:
                return read, rewards
            read.append(found.messages[-1]["content"])  # pyright: ignore


def halve(form: str) -> Any:
    """A player that halves the interval of a number."""

    def player(read: list[str]) -> str:
        low, high = (int(n) for n in re.findall(r"between (\d+) and (\d+)", read[0])[0])
        for answer in read[1:]:
            guess = (low + high) // 2
            low, high = (guess + 1, high) if "higher" in answer else (low, guess - 1)
        return form % ((low + high) // 2)

    return player


@pytest.mark.parametrize(
    ("spec", "form"),
    [("gem:game:GuessTheNumber-v0-easy", r"It is \boxed{%d}."), ("textarena:GuessTheNumber-v0", "It is [%d].")],
)
def test_a_player_that_halves_wins_a_guessing_game(spec: str, form: str) -> None:
    make = load_environment(spec)
    games = [play(make, halve(form), seed) for seed in range(5)]
    assert all(sum(rewards) == 1 for _, rewards in games) and len({len(read) for read, _ in games}) > 1
    assert [play(make, halve(form), seed) for seed in range(5)] == games  # a seed is a game


def test_options_and_rewards_of_gem() -> None:
    make = load_environment("gem:game:GuessTheNumber-v0-easy,max_turns=2")
    read, rewards = play(make, lambda read: "no idea", 3)
    assert "within 2 turns" in read[0] and rewards == [-0.1]


def test_a_game_for_two_needs_an_opponent(tmp_path: Path) -> None:
    (tmp_path / "players.py").write_text(OPPONENT)
    opponent = f"textarena:TicTacToe-v0,opponent={tmp_path / 'players.py'}:play"
    make = load_environment(opponent)

    def first(read: list[str]) -> str:
        return re.findall(r"'(\[\d\])'", read[-1].split("Available")[-1])[0]

    results = [play(make, first, seed) for seed in range(8)]
    assert [play(make, first, seed) for seed in range(8)] == results
    ends = {sum(rewards) for _, rewards in results}
    assert ends <= {-1.0, 0.0, 1.0} and 1.0 in ends and any(-1.0 in rewards for _, rewards in results)
    for read, _ in results:
        assert all("[Player" not in text and "symbol (X)" in text for text in read[1:])  # the opponent's moves are read
    assert_raises(WhetValueError, ("TicTacToe-v0", "2", "opponent"), load_environment, "textarena:TicTacToe-v0")


def test_mistakes_are_named() -> None:
    assert_raises(WhetValueError, ("gem:game:Nothing-v0", "not found"), load_environment, "gem:game:Nothing-v0")
    assert_raises(WhetValueError, ("textarena:Nothing-v0", "not found"), load_environment, "textarena:Nothing-v0")


@pytest.mark.parametrize("spec", ["gem:game:GuessTheNumber-v0-easy", "textarena:GuessTheNumber-v0"])
def test_a_step_trains_on_a_game(spec: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, TEMPLATE, max_position=4096)
    own: Any = {"environment": load_environment(spec), "tokenizer": load_tokenizer(folder), "compute": "float32"}
    metrics = GRPO(model_of(folder), **SETTINGS | own | {"regex": r"[0-9]{2} \[[0-9]\]"}).train_step([{}, {}])
    assert metrics["sampler/logprob_difference"] < 1e-4 and metrics["episodes/ended_by_error"] == 0
    assert metrics["episodes/mean_turns"] > 1 or spec.startswith("gem")


def test_the_example_of_a_game(tmp_path: Path, capsys: Any) -> None:
    example, model = ROOT / "examples" / "guess", write_tiny_model(tmp_path / "model", TEMPLATE, max_position=2048)
    runpy.run_path(str(example / "moves.py"), run_name="__main__")
    (tmp_path / "moves.jsonl").write_text(capsys.readouterr().out)
    games = read_rows(tmp_path / "moves.jsonl")
    assert len(games) == 200 and {len(game["messages"]) for game in games} == {2, 4, 6, 8}
    tiny = [f"--model={model}", "--steps=1", "--batch-size=1"]
    sft = [f"--data={tmp_path / 'moves.jsonl'}", f"--output-dir={tmp_path / 'sft'}"]
    assert main(["train", "sft", str(example / "sft.toml"), *tiny, *sft]) == 0
    grpo = [f"--adapter={tmp_path / 'sft' / 'model'}", f"--output-dir={tmp_path / 'grpo'}", "--group-size=2"]
    assert main(["train", "grpo", str(example / "grpo.toml"), *tiny, *grpo]) == 0
    players = runpy.run_path(str(example / "players.py"))
    make, rules = load_environment("gem:game:GuessTheNumber-v0-easy"), ("at_random", "by_last_hint", "by_all_hints")
    won = [sum(players["wins"](make, players[rule], seed) for seed in range(1000)) / 1000 for rule in rules]
    assert won == pytest.approx([0.344, 0.580, 0.762], abs=0.06)  # exact by enumeration
    assert main(["eval", str(tmp_path / "grpo" / "model"), "--env=gem:game:GuessTheNumber-v0-easy", "--size=2"]) == 0


def test_a_run_records_the_version_of_the_library(tmp_path: Path) -> None:
    from whet.runs import GRPORun

    for spec, package in (("gem:game:GuessTheNumber-v0-easy", "gem-llm"), ("textarena:Nim-v0", "textarena")):
        run = GRPORun(model=str(tmp_path), env=spec, output_dir=str(tmp_path / "run"))
        assert package in [name.lower() for name in read_inputs(run)["env"]]


def test_the_class_of_the_docs_plays_skyrl_gym() -> None:
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n# skyrl.py\n(.*?)```", text, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    row = {"prompt": "6 * 7 = ?", "answer": "42"}
    for answer, reward in (("It is\n#### 42", 1.0), ("#### 41", 0.0)):
        read, rewards = play(found["SkyRL"], lambda _, answer=answer: answer, 3, row)
        assert read == ["6 * 7 = ?"] and rewards == [reward]
