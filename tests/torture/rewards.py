"""Reward functions that hang, fork, raise, exit, crash, print or return invalid values: runs end as documented.

Side effects of a function that scores must not disturb the run, whose weights equal a run without side effects.
A failing function ends the run with a line that names it ("raise"), or its completions are excluded or scored 0, with a
warning and a count ("skip", "zero"). No process is leaked. A run that a function ended continues from its checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

from tests.torture import functions
from tests.torture.common import Tally, Workshop, finished, forked, require, results, scaled, workshop
from tests.torture.signals import require_same_but_checkpoints

_STEPS = 3
_SCORE = ("forks", "starts_threads", "prints_a_megabyte", "changes_the_process")
_FAIL = {
    "hangs": "it did not return within timeout_s=1.0",
    "computes_for_hours": "it did not return within timeout_s=1.0",
    "raises": "it raised ZeroDivisionError: fault of the function",
    "recurses": "it raised RecursionError",
    "exits": "it raised SystemExit",
    "ends_the_process": "its process died with exit code 3",
    "crashes": "its process died with exit code -11",
    "takes_all_memory": "it raised MemoryError",
    "returns_nan": "it returned nan, which is not a finite number",
    "returns_too_much": "which is not a finite number",
    "returns_too_few": "it returned 1 scores for",
    "returns_text": "it returned '1.0', which is not a finite number",
    "returns_nothing": "it returned NoneType",
    "returns_itself": "it returned function",
}
_ONLY_IN_A_CHILD = ("hangs", "computes_for_hours", "ends_the_process", "crashes")


def torture(scale: float) -> Iterator[Tally]:
    tally = Tally("reward functions")
    with workshop() as shop:
        weights = ""
        with tally.case("share"):
            weights = _run(shop, "share", "raise", 60.0)[1]["model/model.safetensors"]
        for name in _SCORE if weights else ():
            with tally.case(name):
                text, found = _run(shop, name, "raise", 60.0)
                require(found["model/model.safetensors"] == weights, "it changed the weights")
                if name == "prints_a_megabyte":
                    require(text.count("x") >= 6 << 20, "its output is lost")
        for name in list(_FAIL)[: scaled(len(_FAIL), scale)]:
            for policy in ("raise", "skip", "zero"):
                for timeout_s in (1.0, None):
                    if timeout_s is None and name in _ONLY_IN_A_CHILD:
                        continue
                    with tally.case(f"{name}, {policy}, timeout_s={timeout_s}"):
                        _failing(shop, name, policy, timeout_s)
    yield tally
    yield _continued(scale)


_FAULTY = """
import time
from pathlib import Path
from tests.torture.functions import share
fault = Path({fault!r})  # holds a byte per call, since each call is in a new process

def faulty(completions, answer):
    if fault.exists():
        fault.write_text(fault.read_text() + "x")
        if len(fault.read_text()) == {call}:
            fault.unlink()
            {act}
    return share(completions, answer)
"""


def _continued(scale: float) -> Tally:
    """Let a reward function raise or hang in the middle of a run; the same command continues from its last step."""
    tally = Tally("reward function fails: train, and the same command")
    acts = {"raises": "raise OSError('fault')", "hangs": "time.sleep(3600)"}
    cases = [(name, call) for call in (6, 5, 3, 1) for name in acts]
    with workshop() as shop:
        for name, call in cases[: scaled(len(cases), scale)]:
            with tally.case(f"{name} at call {call}"):
                fault, file = shop.folder / "fault", shop.folder / f"{name}_{call}.py"
                file.write_text(_FAULTY.format(fault=str(fault), call=call, act=acts[name]))
                settings = {"reward": f"{file}:faulty", "reward_timeout_s": 5.0, "eval_data": None, "eval_every": None}
                settings |= {"reward_policy": "raise"}
                expected = finished(shop, "grpo", **settings)
                shutil.rmtree(shop.folder / "undisturbed-grpo")
                command = shop.command("grpo", folder := shop.folder / f"{name}-{call}", **settings)
                fault.touch()
                end = forked(command)
                reason = "OSError: fault" if name == "raises" else "timeout_s=5.0"
                lines = [line for line in end.text.splitlines() if "faulty failed on " in line]
                require(end.status == 2 and len(lines) == 1 and reason in lines[0], f"{end}")
                require("Traceback" not in end.text, f"a traceback: {end.text}")
                newest = max((path.name for path in (folder / "checkpoints").glob("step-*")), default="step-000000")
                require(newest == f"step-{call - 1:06d}", f"call {call} failed, and the newest checkpoint is {newest}")
                again = forked(command)
                require(again.status == 0, f"the same command failed: {again.text}")
                require_same_but_checkpoints(folder, expected)
    return tally


def _run(
    shop: Workshop, name: str, policy: str, timeout_s: float | None, status: int = 0
) -> tuple[str, dict[str, str]]:
    folder = shop.folder / "rewarded"
    shutil.rmtree(folder, ignore_errors=True)
    reward = f"{functions.__file__}:{name}"
    settings = {"steps": _STEPS, "reward": reward, "reward_policy": policy, "eval_data": None, "eval_every": None}
    settings |= {} if timeout_s is None else {"reward_timeout_s": timeout_s}
    end = forked(shop.command("grpo", folder, **settings) + (["--reward-timeout-s=None"] if timeout_s is None else []))
    require(end.status == status, f"status {end.status}, not {status}: {end.text}")
    return end.text, results(folder)


def _failing(shop: Workshop, name: str, policy: str, timeout_s: float | None) -> None:
    text, _ = _run(shop, name, policy, timeout_s, status=2 if policy == "raise" else 0)
    named = f"RewardFunctions: {name} failed on "
    lines = [line for line in text.splitlines() if named in line]
    require(len(lines) == 1 and _FAIL[name] in lines[0], f"{len(lines)} lines name it: {text}")
    if policy == "raise":
        require("Traceback" not in text, f"a traceback: {text}")
        return
    rows = [json.loads(line) for line in (shop.folder / "rewarded" / "metrics.jsonl").read_text().splitlines()]
    require([row["step"] for row in rows] == [1, 2, 3], "steps are missing")
    require(all(row["reward_errors"] == 16 for row in rows), f"counted {[row['reward_errors'] for row in rows]}")
    expected = "NaN" if policy == "skip" else 0
    require(all(row["mean_reward"] == expected for row in rows), f"rewards {[row['mean_reward'] for row in rows]}")
