"""Environments and tools that hang, fork, print a megabyte, return 10 MB, raise or never end: runs go on as documented.

Side effects that play on do not disturb the run, whose weights equal a run without them. An episode whose environment
fails leaves its group and is counted; an exception of a tool goes back to the model, and a tool that hangs or dies ends
its episode. No process is leaked.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cli.conftest import write_tiny_model
from tests.rollout.test_tool_episodes import HERMES
from tests.torture import games
from tests.torture.common import Tally, Workshop, forked, require, results, scaled, workshop

_PLAY = ("forks_game", "starts_threads_game", "prints_a_megabyte_game", "changes_the_process_game")
_FAIL = {
    "hangs_game": "it did not return within timeout_s=2.0",
    "hangs_at_the_beginning": "it did not return within timeout_s=2.0",
    "hangs_at_the_end": "it did not return within timeout_s=2.0",
    "never_returns_game": "it did not return within timeout_s=2.0",
    "computes_for_hours_game": "it did not return within timeout_s=2.0",
    "ends_the_process_game": "its process died with exit code 3",
    "crashes_game": "its process died with exit code -11",
    "raises_game": "ZeroDivisionError: fault of the function",
    "recurses_game": "RecursionError",
    "exits_game": "SystemExit: 3",
    "takes_all_memory_game": "MemoryError",
    "begins_with_ten_megabytes": "the opening does not fit into the model's 1,024 positions",
    "returns_text": "expected whet.tasks.Step",
    "returns_nan": "expected a finite number",
    "returns_itself": "not JSON serializable",
}
_END = {"answers_with_ten_megabytes": "context", "never_ends": "turns"}
_TOOLS_ANSWER = {
    "nothing": "null", "forks": "null", "starts_threads": "null", "prints_a_megabyte": "null",
    "changes_the_process": "null", "raises": "error: ZeroDivisionError: fault", "recurses": "error: RecursionError",
    "exits": "error: SystemExit: 3", "takes_all_memory": "error: MemoryError",
    "returns_ten_megabytes": "[truncated: the first 100 of 10,000,000 characters]",
}  # fmt: skip
_TOOLS_END = ("hangs", "never_returns", "computes_for_hours", "ends_the_process", "crashes")


def torture(scale: float) -> Iterator[Tally]:
    with workshop() as shop:
        model = write_tiny_model(shop.folder / "chat", HERMES, max_position=1024)
        rows = shop.folder / "prompts.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(8)))
        shop = Workshop(shop.folder, model, rows, shop.pairs)
        yield _environments(shop, scale)
        yield _tools(shop, scale)


def _environments(shop: Workshop, scale: float) -> Tally:
    tally, weights = Tally("environments"), ""
    with tally.case("nothing_game"):
        weights = _play(shop, "nothing_game", 60.0)[1]
    for name in _PLAY if weights else ():
        with tally.case(name):
            text, found, _ = _play(shop, name, 60.0)
            require(found == weights, "it changed the weights")
            if name == "prints_a_megabyte_game":
                require(text.count("x") >= 6 << 20, "its output is lost")
    for name in list(_FAIL)[: scaled(len(_FAIL), scale)]:
        with tally.case(name):
            _, _, table = _play(shop, name, 2.0)
            require(all(row["end"] == "error" and _FAIL[name] in row["error"] for row in table), f"{table[0]}")
            require(all(row["reward"] == "NaN" for row in table), "a failed episode has a reward")
    for name, end in _END.items():
        with tally.case(name):
            _, _, table = _play(shop, name, 60.0)
            require({row["end"] for row in table} == {end}, f"{table[0]['end']}")
    return tally


def _tools(shop: Workshop, scale: float) -> Tally:
    tally = Tally("tools")
    for name in list(_TOOLS_ANSWER)[: scaled(len(_TOOLS_ANSWER), scale)]:
        with tally.case(name):
            _, _, table = _call(shop, name, 60.0)
            answers = [m for row in table for m in row["completion"] if m["role"] == "tool"]
            require(answers, "no call was answered")
            require(all(_TOOLS_ANSWER[name] in each["content"] for each in answers), f"{answers[0]['content'][:200]}")
            failed = "error" in _TOOLS_ANSWER[name]
            require(all(each.get("is_error", False) == failed for each in answers), "is_error")
            require({row["end"] for row in table} <= {"done", "turns", "context"}, "an episode failed")
    for name in _TOOLS_END[: scaled(len(_TOOLS_END), scale)]:
        with tally.case(name):
            _, _, table = _call(shop, name, 2.0)
            called = [bool(row["completion"][0].get("tool_calls")) for row in table]
            require(any(called) and not all(called), "the model called always or never")
            ends = ["error" if each else "done" for each in called]
            require([row["end"] for row in table] == ends, f"{[row['end'] for row in table]}")
    return tally


def _play(shop: Workshop, name: str, timeout_s: float) -> tuple[str, str, list[Any]]:
    limits = {"max_new_tokens": 30, "max_turn_tokens": 8, "max_turns": 3, "env_timeout_s": timeout_s}
    return _run(shop, env=f"{games.__file__}:{name}", reward=None, reward_timeout_s=None, **limits)


def _call(shop: Workshop, name: str, timeout_s: float) -> tuple[str, str, list[Any]]:
    reward = shop.folder / "length.py"
    reward.write_text("def length(completions):\n    return [float(len(each)) for each in completions]\n")
    regex = rf'A[0-9]|<tool_call>\{{"name": "{name}", "arguments": \{{\}}\}}</tool_call>'
    limits = {"max_new_tokens": 300, "max_turns": 2, "env_timeout_s": timeout_s, "max_tool_characters": 100}
    return _run(shop, tools=f"{games.__file__}:{name}", reward=f"{reward}:length", regex=regex, **limits)


def _run(shop: Workshop, **settings: Any) -> tuple[str, str, list[Any]]:
    """Run two steps; return the output, the digest of the weights and the table of episodes."""
    folder = shop.folder / "played"
    shutil.rmtree(folder, ignore_errors=True)
    own = {"steps": 2, "eval_data": None, "eval_every": None, "beta": None}
    end = forked(shop.command("grpo", folder, **own | settings))
    require(end.status == 0, f"status {end.status}: {end.text[-2000:]}")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    require([row["step"] for row in metrics] == [1, 2], "steps are missing")
    table = [json.loads(line) for line in Path(folder / "completions.jsonl").read_text().splitlines()]
    shares = [sum(row["end"] == "error" for row in table if row["step"] == step) / 16 for step in (1, 2)]
    require([row["episodes/ended_by_error"] for row in metrics] == shares, "failures are not counted")
    return end.text, results(folder)["model/model.safetensors"], table
