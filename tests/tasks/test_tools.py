"""Tools in a child process: results in the order of calls, errors as texts, truncation, and rejected functions."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.raising import assert_mentions, assert_raises

from whet.config.episodes import EpisodeSettings
from whet.errors import WhetTypeError, WhetValueError
from whet.rewards.processes import CallTimeout, Guard, RaisedInChild
from whet.tasks.environment import EpisodeProcess, Opening, Step
from whet.tasks.tools import ToolProcess, Tools, load_tools, truncate

STARTED: list[float] = []


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def show(what: str) -> Any:
    """Return a value of a kind.

    Args:
        what: the kind
    """
    kinds: dict[str, Any] = {
        "text": "é", "dict": {"é": [1, None, True]}, "nothing": None, "set": {1}, "long": "x" * 10_000_000,
        "half": "\ud800", "many": 10**5000,
    }  # fmt: skip
    return kinds[what]


def fail(how: str) -> str:
    """Fail.

    Args:
        how: the way
    """
    if how == "exit":
        raise SystemExit(2)
    if how == "die":
        os._exit(3)
    if how == "hang":
        time.sleep(60)
    if how == "recurse":
        return fail(how)
    return str(1 / 0)


async def wait(label: str, seconds: float) -> str:
    """Wait.

    Args:
        label: returned
        seconds: to wait for
    """
    STARTED.append(time.monotonic())
    await asyncio.sleep(seconds)
    if label == "fail":
        raise LookupError(label)
    return f"{label} {len(STARTED)}"


FUNCTIONS = [add, show, fail, wait]


@pytest.fixture(scope="module")
def guard() -> Iterator[Guard]:
    with Guard() as guard:
        yield guard


def call(name: str, i: int = 0, error: str = "", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call{i:05d}", "function": function, **({"error": error} if error else {})}


def answers(guard: Guard, *calls: Any, timeout_s: float = 30.0, **settings: Any) -> Any:
    """Return the step after a turn with calls, in a child process."""
    tools = Tools(FUNCTIONS, **settings)
    episode = EpisodeProcess(lambda: tools, {"prompt": "Begin"}, 7, timeout_s, guard)
    episode.reset()
    opening = episode.outcome()
    assert isinstance(opening, Opening) and opening.messages == [{"role": "user", "content": "Begin"}]
    assert [tool["function"]["name"] for tool in opening.tools] == ["add", "show", "fail", "wait"]
    episode.step({"role": "assistant", "content": "", **({"tool_calls": list(calls)} if calls else {})})
    found = episode.outcome()
    episode.close()
    return found


def texts(step: Any) -> list[str]:
    assert isinstance(step, Step) and not step.done and step.reward == 0
    return [message["content"] for message in step.messages]  # pyright: ignore[reportArgumentType]


def test_a_turn_without_calls_ends_the_episode(guard: Guard) -> None:
    assert answers(guard) == Step([], 0.0, True)


def test_results_keep_the_order_of_calls(guard: Guard) -> None:
    calls = [wait_call("slow", 0.2), call("add", 1, a=1, b=2), wait_call("fast", 0.0), call("add", 3, a=1, b=2)]
    step = answers(guard, *calls)
    assert texts(step) == ["slow 2", "3", "fast 2", "3"]  # both had begun before the first was done
    assert [message["tool_call_id"] for message in step.messages] == [each["id"] for each in calls]
    assert [message["name"] for message in step.messages] == ["wait", "add", "wait", "add"]
    assert {message["role"] for message in step.messages} == {"tool"} and "is_error" not in step.messages[0]


def wait_call(label: str, seconds: float) -> dict[str, Any]:
    return call("wait", 7, label=label, seconds=seconds)


def test_results_are_texts(guard: Guard) -> None:
    step = answers(guard, *(call("show", what=what) for what in ("text", "dict", "nothing", "set", "half")))
    assert texts(step) == ["é", '{"é": [1, null, true]}', "null", "{1}", "?"]


def test_failures_go_back_to_the_model(guard: Guard) -> None:
    step = answers(
        guard, call("fail", how="raise"), call("fail", how="exit"), call("fail", how="recurse"),
        wait_call("fail", 0.0), call("add", a=1), call("add", a="1", b=2, c=3),
        call("sub", error="there is no tool 'sub'; the tools are add", a=1), call("add", a=1, b=1),
    )  # fmt: skip
    found = texts(step)
    assert found[0] == "error: ZeroDivisionError: division by zero" and found[1] == "error: SystemExit: 2"
    assert found[2].startswith("error: RecursionError: ") and found[3] == "error: LookupError: fail"
    assert found[4] == "error: b is missing"
    assert found[5] == "error: there is no parameter 'c'; a is \"1\", expected integer"
    assert found[6] == "error: there is no tool 'sub'; the tools are add" and found[7] == "2"
    assert [message.get("is_error", False) for message in step.messages] == [True] * 7 + [False]


def test_long_results_are_truncated_and_marked(guard: Guard) -> None:
    [text] = texts(answers(guard, call("show", what="long"), max_characters=20))
    assert text == "x" * 20 + "\n[truncated: the first 20 of 10,000,000 characters]"
    [text] = texts(answers(guard, call("show", what="long")))
    assert len(text) < 4100 and text.startswith("x" * 4000 + "\n[")
    [text] = texts(answers(guard, call("show", what="many")))  # Python limits the digits of a number
    assert text.startswith("error: ValueError: Exceeds the limit")
    assert truncate("abc", 3) == "abc"


def test_tools_that_hang_or_die_end_the_episode(guard: Guard) -> None:
    assert isinstance(answers(guard, call("fail", how="hang"), timeout_s=0.5), CallTimeout)
    dead = answers(guard, call("fail", how="die"))
    assert isinstance(dead, RaisedInChild)
    assert_mentions(dead.summary, "died", "3")


def test_functions_that_are_rejected() -> None:
    assert_raises(WhetTypeError, ("[]", "one or more"), Tools, [])
    assert_raises(WhetTypeError, ("add", "list"), Tools, add)
    assert_raises(WhetValueError, "'add'", Tools, [add, add])
    assert_raises(WhetTypeError, ("<lambda>", "type hint"), Tools, [_documented(lambda a: a)])
    assert_raises(WhetValueError, "docstring", Tools, [lambda: 1])


def _documented(function: Any) -> Any:
    function.__doc__ = "Doc.\n\nArgs:\n    a: x"
    return function


def test_specs_name_several_functions(tmp_path: Any) -> None:
    file = tmp_path / "own.py"
    file.write_text("def f(): ...\ndef g(): ...\nnumber = 3\n")
    assert [each.__name__ for each in load_tools([f"{file}:f,g", f"{file}:g"])] == ["f", "g", "g"]
    assert_raises(WhetValueError, ("number", "f, g"), load_tools, [f"{file}:number"])
    assert_raises(WhetValueError, "file.py", load_tools, ["calculate"])


def test_a_process_of_tools_survives_its_functions() -> None:
    def turn(*calls: Any) -> Any:
        return {"role": "assistant", "content": "", "tool_calls": list(calls)}

    with ToolProcess(FUNCTIONS, EpisodeSettings(env_timeout_s=1.0, max_tool_characters=2)) as tools:
        assert [tool["function"]["name"] for tool in tools.schemas] == ["add", "show", "fail", "wait"]
        for _ in range(2):
            found = tools.answer(turn(call("add", 1, a=100, b=2), call("add", 2, a=1, b=1)))
            assert [message["content"] for message in found] == ["10\n[truncated: the first 2 of 3 characters]", "2"]
            for how, fact in (("hang", "timeout_s=1.0"), ("die", "exit code 3")):
                hung = tools.answer(turn(call("add", 1, a=1, b=2), call("fail", 2, how=how)))
                assert [message["tool_call_id"] for message in hung] == ["call00001", "call00002"]
                assert all(message["is_error"] and fact in message["content"] for message in hung)
