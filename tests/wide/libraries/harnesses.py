"""verifiers as an agent: the episodes that the server recorded are the branches of verifiers' own traces."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from tests.cli.conftest import write_tiny_model
from tests.rollout.test_episodes import EOS, TEMPLATE

from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.models.tokenizers import load_tokenizer
from whet.rollout.episodes import Episode, EpisodeLimits, rollout_of
from whet.serve.agents import AgentPlayer

ROOT = Path(__file__).parents[3]
SUMS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def digits(self, trace: vf.Trace) -> float:
        return float(sum(map(len, [node.token_ids for node in trace.nodes if any(node.mask)])) % 7)

class Sums(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self) -> list[Task]:
        return [Task(Data(idx=i, name=f"sum{i}", prompt=f"{i}+1="), self.config.task) for i in range(2)]

__all__ = ["Sums"]
"""
GUESS = """
import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena.taskset import TextArenaData, TextArenaEnv, TextArenaTask

class Guess(vf.Taskset[TextArenaTask, vf.TasksetConfig]):
    # The games that its taskset lists need word lists, which nltk downloads.
    def load(self) -> list[TextArenaTask]:
        info = {"game": "GuessTheNumber-v0", "seed": 1}
        data = [TextArenaData(idx=i, name=f"game{i}", prompt="Guess my number.", info=info) for i in range(2)]
        return [TextArenaTask(each, self.config.task) for each in data]

__all__ = ["Guess", "TextArenaEnv"]
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a model and the tasksets; return the agent of the docs, whose traces are written, and the folders."""
    folder = write_tiny_model(tmp_path / "model", TEMPLATE, max_position=2048)
    (tmp_path / "sums.py").write_text(SUMS)
    (tmp_path / "guess.py").write_text(GUESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n# harness.py\n(.*?)```", text, re.DOTALL)
    found: dict[str, Any] = {}
    code = textwrap.dedent(code).replace("path/to/the/tokenizer", str(folder))
    exec(code, found)
    from verifiers.v1.tasksets.textarena.taskset import TextArenaEnvConfig  # pyright: ignore[reportMissingImports]

    def config_of(taskset: Any, agent: Any) -> Any:
        is_single = taskset["id"] == "sums"
        single = single_agent(taskset=taskset, agent=agent) if is_single else None
        return single or TextArenaEnvConfig(taskset=taskset, player=agent)

    single_agent = vf.SingleAgentEnvConfig
    monkeypatch.setattr(vf, "SingleAgentEnvConfig", config_of)
    run_slot = vf.Env.run_slot

    async def recorded(env: Any, *arguments: Any, **options: Any) -> Any:
        episode = await run_slot(env, *arguments, **options)
        [trace] = episode.traces
        branches = [(b.token_ids, b.sampled_mask, b.logprobs) for b in trace.branches]
        facts = {"branches": branches, "reward": trace.reward, "errors": [str(error) for error in episode.errors]}
        (tmp_path / f"{os.environ['OPENAI_API_KEY']}.json").write_text(json.dumps(facts))
        return episode

    monkeypatch.setattr(vf.Env, "run_slot", recorded)
    return found["play"], folder, tmp_path


def branches_of(episode: Episode) -> list[Any]:
    _, split = rollout_of([episode]).split_branches([0])
    found = []
    for prompt, each in zip(split.prompt_ids, split.completions, strict=True):
        unsampled = len(prompt)
        mask = [False] * unsampled + (each.sampled or [])
        found.append(([*prompt, *each.token_ids], mask, [0.0] * unsampled + (each.logprobs or [])))
    return sorted(found)


@pytest.mark.parametrize(("taskset", "least_turns"), [("sums", 1), ("guess", 2)])
def test_recorded_episodes_are_verifiers_traces(agent: Any, taskset: str, least_turns: int) -> None:
    play, folder, written = agent
    sampling = SamplingParams(max_new_tokens=200, stop_token_ids=(EOS,), seed=5, regex=r"\[[1-9]\] [a-z]{3}")
    player = AgentPlayer(play, load_tokenizer(folder), [EOS], EpisodeLimits(max_turns=6, timeout_s=120.0))
    rows = [{"taskset": taskset, "index": 1}]
    with Engine.from_pretrained(folder) as engine:
        engine.tokenizer = load_tokenizer(folder)
        episodes = player.play(engine, rows, 3, sampling)
    assert [episode.error for episode in episodes] == [""] * 3
    traces = [json.loads(file.read_text()) for file in sorted(written.glob("session-*.json"))]
    assert not any(trace["errors"] for trace in traces)
    recorded = sorted((branches_of(episode), episode.reward) for episode in episodes)
    expected = sorted((sorted(map(tuple, trace["branches"])), trace["reward"]) for trace in traces)
    for (ours, reward), (theirs, their_reward) in zip(recorded, expected, strict=True):
        assert reward == their_reward and len(ours) == len(theirs)
        for (ids, mask, logprobs), (their_ids, their_mask, their_logprobs) in zip(ours, theirs, strict=True):
            assert ids == their_ids and mask == their_mask and sum(mask) > 0
            assert max(abs(a - b) for a, b in zip(logprobs, their_logprobs, strict=True)) < 1e-4
    assert max(len(episode.rewards) for episode in episodes) >= least_turns
