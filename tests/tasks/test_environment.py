"""Episodes in child processes: openings, steps, and environments that fail."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.raising import assert_mentions, assert_raises

from whet.errors import WhetTypeError
from whet.rewards.processes import CallTimeout, Guard, RaisedInChild
from whet.tasks.environment import EpisodeProcess, Opening, Step, as_environment, load_environment


@pytest.fixture(scope="module")
def guard() -> Iterator[Guard]:
    with Guard() as guard:
        yield guard


class Echo:
    tools = ({"type": "function", "function": {"name": "f"}},)

    def reset(self, row: Any, seed: int) -> Any:
        self.turns, self.seed = 0, seed
        return row.get("opening", f"seed {seed}")

    def step(self, message: Any) -> Any:
        self.turns += 1
        text = message["content"]
        if text == "raise":
            raise ValueError("no such move")
        if text == "die":
            os._exit(3)
        if text == "hang":
            time.sleep(60)
        if text.startswith("return "):
            return eval(text.removeprefix("return "))
        return Step(f"{self.turns}: {text}", reward=0.5, done=text == "end")


class Waits(Echo):
    async def reset(self, row: Any, seed: int) -> Any:
        await asyncio.sleep(0)
        return super().reset(row, seed)

    async def step(self, message: Any) -> Any:
        await asyncio.sleep(0)
        return super().step(message)


def begin(make: Any, guard: Guard, row: Any = (), timeout_s: float = 20.0) -> EpisodeProcess:
    episode = EpisodeProcess(make, dict(row), 7, timeout_s, guard)
    episode.reset()
    return episode


def answer(episode: EpisodeProcess, text: str) -> Any:
    episode.step({"role": "assistant", "content": text})
    return episode.outcome()


@pytest.mark.parametrize("make", [Echo, Waits])
def test_an_episode_keeps_its_state(make: Any, guard: Guard) -> None:
    episode = begin(make, guard)
    assert episode.outcome() == Opening([{"role": "user", "content": "seed 7"}], list(Echo.tools))
    for turn in (1, 2):
        assert answer(episode, "é") == Step([{"role": "user", "content": f"{turn}: é"}], 0.5, False)
    assert answer(episode, "end").done
    episode.close()


def test_episodes_run_at_the_same_time(guard: Guard) -> None:
    episodes = [begin(Echo, guard, {"opening": f"row {i}"}) for i in range(3)]
    assert [episode.outcome().messages[0]["content"] for episode in episodes] == ["row 0", "row 1", "row 2"]  # pyright: ignore
    for episode in episodes:
        episode.close()


def test_without_an_opening_the_prompt_of_the_row_begins(guard: Guard) -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for given, expected in ((prompt, prompt), ("u", prompt[1:])):
        episode = begin(Echo, guard, {"opening": None, "prompt": given})
        found = episode.outcome()
        assert isinstance(found, Opening) and found.messages == expected
        episode.close()
    episode = begin(Echo, guard, {"opening": None})
    found = episode.outcome()
    assert isinstance(found, RaisedInChild)
    assert_mentions(found.summary, "reset", "None", "content")
    episode.close()


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("raise", ("ValueError", "no such move")),
        ("die", ("exit code 3",)),
        ("return 3", ("3", "Step")),
        ("return Step('a', float('nan'))", ("nan", "finite")),
        ("return Step([{'content': 'a'}])", ("content", "role")),
        ("return Step()", ("()", "role")),
        ("return Step([{'role': 'user', 'content': {1}}])", ("set",)),
    ],
)
def test_a_failure_is_an_outcome(text: str, facts: Any, guard: Guard) -> None:
    episode = begin(Echo, guard)
    episode.outcome()
    found = answer(episode, text)
    assert isinstance(found, RaisedInChild)
    assert_mentions(found.summary, *facts)
    episode.close()


def test_a_call_that_hangs_times_out(guard: Guard) -> None:
    episode = begin(Echo, guard, timeout_s=1.0)
    assert isinstance(episode.outcome(), Opening)
    assert isinstance(answer(episode, "hang"), CallTimeout)
    episode.close()


def test_environments_are_loaded_by_name(tmp_path: Any) -> None:
    file = tmp_path / "game.py"
    file.write_text(
        "class Game:\n    def reset(self, row, seed): ...\n    def step(self, message): ...\nclass No: ...\n"
    )
    assert hasattr(load_environment(f"{file}:Game")(), "reset")
    assert_raises(WhetTypeError, ("No", "reset and no step"), load_environment, f"{file}:No")
    assert_raises(WhetTypeError, ("3", "reset(row, seed)"), as_environment, 3, "here")
