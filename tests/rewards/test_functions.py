"""Reward functions: argument binding, totals, async, failures under every policy, timeouts."""

from __future__ import annotations

import asyncio
import gc
import math
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_mentions, assert_raises, mentions

from whet.errors import RewardError, WhetTypeError, WhetValueError
from whet.rewards.functions import RewardBatch, RewardFunctions, call_preference, load_function

TEXTS = ["a", "bb", "ccc", "dddd"]


def score(functions: Any, columns: dict[str, Any] | None = None, n: int = 4, **options: Any) -> RewardBatch:
    return RewardFunctions(functions, **options)(
        prompts=[f"p{i}" for i in range(n)],
        completions=TEXTS[:n],
        completion_ids=[[i] * (i + 1) for i in range(n)],
        columns=columns or {},
    )


def length(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


def fails_on_c(completions: list[str]) -> list[float]:
    return [1 / (3 - len(c)) for c in completions]


# --- arguments of functions -----------------------------------------------------------------------


def test_functions_get_declared_arguments() -> None:
    got: dict[str, Any] = {}

    def reward(prompts, answer, *, completion_ids, unit="none", **rest):
        got.update(prompts=prompts, answer=answer, completion_ids=completion_ids, unit=unit, rest=rest)
        return [0] * 4

    columns = {"answer": [1, 2, 3, 4], "level": ["x"] * 4}
    score(reward, columns)
    assert got["prompts"] == ["p0", "p1", "p2", "p3"] and got["answer"] == [1, 2, 3, 4]
    assert got["completion_ids"] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]] and got["unit"] == "none"
    assert got["rest"] == {"completions": TEXTS, "level": ["x"] * 4}


def test_one_required_positional_parameter_of_any_name_gets_the_completions() -> None:
    class Judge:
        def __call__(self, texts: list[str], /, scale: float = 2.0) -> list[float]:
            return [scale * len(t) for t in texts]

    batch = score([lambda c: [len(x) for x in c], Judge(), partial(lambda k, x: [k] * len(x), 5)])
    assert [batch.by_name[name].tolist() for name in batch.by_name] == [[1, 2, 3, 4], [2, 4, 6, 8], [5] * 4]
    answer = score(lambda answer: answer, {"answer": [9, 8, 7, 6]})
    assert answer.rewards.tolist() == [9, 8, 7, 6]


def test_missing_column_is_an_error_under_every_policy() -> None:
    def reward(completions: list[str], solution: list[str]) -> list[float]:
        return [0.0] * len(completions)

    facts = "reward", "'solution'", "answer, completion_ids, completions, prompts"
    assert_raises(RewardError, facts, score, reward, {"answer": [0] * 4}, on_error="skip")


def test_names_are_unique() -> None:
    def length_2(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    functions = RewardFunctions([length, length, length_2, partial(length), abs])
    assert functions.names == ["length", "length_2", "length_2_2", "length_3", "abs"]


# --- totals ---------------------------------------------------------------------------------------


def test_totals_by_hand_with_none_as_unscored() -> None:
    first = lambda c: [1, None, 3, None]  # noqa: E731
    second = lambda c: [0.5, 10, None, None]  # noqa: E731
    batch = score([first, second], weights=[2, -1])
    np.testing.assert_array_equal(batch.rewards, [1.5, -10, 6, math.nan])
    assert batch.rewards.dtype == np.float64 and batch.n_errors == 0
    np.testing.assert_array_equal(batch.by_name["<lambda>_2"], [0.5, 10, math.nan, math.nan])


@pytest.mark.parametrize(
    "result",
    [
        (1, 2.5, True, None),
        [np.float32(1), np.int64(2) + 0.5, np.bool_(True), None],
        [torch.tensor(1), torch.tensor(2.5, requires_grad=True), Decimal(1), None],
        np.array([1, 2.5, 1, None], dtype=object),
    ],
)
@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_numbers_of_every_kind(result: Any, timeout_s: float | None) -> None:
    batch = score(lambda c: result, timeout_s=timeout_s)
    np.testing.assert_array_equal(batch.rewards, [1, 2.5, 1, math.nan])


@pytest.mark.parametrize("result", [np.array([1, 2, 3, 4]), torch.tensor([1.0, 2, 3, 4])])
def test_arrays_and_tensors(result: Any) -> None:
    assert score(lambda c: result).rewards.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_an_error_in_place_of_a_score_is_unscored_and_counted(timeout_s: float | None) -> None:
    """Under every policy, also of a function in a child process."""

    for policy in ("raise", "zero"):
        result = [1.0, RewardError("the server did not answer"), None]
        batch = score(lambda completions, result=result: result, n=3, on_error=policy, timeout_s=timeout_s)
        assert batch.n_errors == 1 and np.isnan(batch.rewards).tolist() == [False, True, True]


def test_one_sample() -> None:
    assert score(length, n=1).rewards.tolist() == [1.0]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_exception_names_the_function_and_the_sample(timeout_s: float | None) -> None:
    facts = "fails_on_c", "sample 2", "'ccc'", "ZeroDivisionError: ", "by zero", "on_error='skip'"
    with pytest.raises(RewardError, match=mentions(*facts)) as caught:
        score([length, fails_on_c], timeout_s=timeout_s)
    if timeout_s is None:
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    else:
        assert "in fails_on_c" in str(caught.value.__cause__)  # the child's traceback


def test_exception_that_only_the_whole_batch_raises() -> None:
    def reward(completions: list[str]) -> list[float]:
        if len(completions) == 4:
            raise RuntimeError("too many")
        return [1.0] * len(completions)

    assert_raises(RewardError, ("reward", "samples 0 to 3", "RuntimeError: too many", "parts"), score, reward)
    assert score(reward, on_error="skip").rewards.tolist() == [1.0] * 4


@pytest.mark.parametrize("timeout_s", [None, 30.0])
@pytest.mark.parametrize(
    ("result", "facts"),
    [
        ([1, 2, 3], ("samples 0 to 3", "3 scores", "4 completions")),
        ([], ("0 scores", "4 completions")),
        (None, ("NoneType", "4 numbers")),
        (7.0, ("float", "4 numbers")),
        (np.float64(7), ("float64", "4 numbers")),
        ({0: 1}, ("dict", "4 numbers")),
        ("1234", ("str", "4 numbers")),
        ([1, 2, "3", 4], ("sample 2 ", "'ccc'", "returned '3'", "finite")),
        ([1, math.nan, 3, 4], ("sample 1 ", "returned nan", "finite")),
        ([1, 2, 3, -math.inf], ("sample 3 ", "returned -inf", "finite")),
        ([[1], 2, 3, 4], ("sample 0 ", "returned [1]")),
        ([1j, 2, 3, 4], ("sample 0 ", "returned 1j")),
        ([10**400, 2, 3, 4], ("sample 0 ", "returned 10000")),
        (np.ones((4, 1)), ("sample 0 ", "returned [1.0]")),
        ([np.ones(1), 1, 1, 1], ("sample 0 ", "returned array")),
    ],
)
def test_invalid_results_are_named(result: Any, facts: tuple[object, ...], timeout_s: float | None) -> None:
    assert_raises(RewardError, facts, score, lambda c: result, timeout_s=timeout_s)


@pytest.mark.parametrize(("policy", "value"), [("skip", math.nan), ("zero", 0.0)])
@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_policies_replace_only_the_scores_of_failing_samples(
    policy: str, value: float, timeout_s: float | None
) -> None:
    bad = lambda c: [5, math.inf, None, "x"]  # noqa: E731
    with pytest.warns(UserWarning) as caught:
        batch = score([fails_on_c, bad], on_error=policy, timeout_s=timeout_s)
    np.testing.assert_array_equal(batch.by_name["fails_on_c"], [0.5, 1, value, -1])
    np.testing.assert_array_equal(batch.by_name["<lambda>"], [5, value, math.nan, value])
    assert batch.n_errors == 3
    assert len(caught) == 2
    assert_mentions(str(caught[0].message), "sample 2", "'ccc'", f"on_error={policy!r}")


def test_skipped_sample_keeps_the_rewards_of_other_functions() -> None:
    with pytest.warns(UserWarning):
        batch = score([fails_on_c, length], on_error="skip")
    np.testing.assert_array_equal(batch.rewards, [1.5, 3, 3, 3])
    with pytest.warns(UserWarning):
        assert np.isnan(score(lambda c: [1, 2], on_error="skip").rewards).all()


def test_each_function_warns_once() -> None:
    functions = RewardFunctions(fails_on_c, on_error="zero")
    data: Any = {"prompts": TEXTS, "completions": TEXTS, "completion_ids": TEXTS, "columns": {}}
    with pytest.warns(UserWarning):
        functions(**data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert functions(**data).n_errors == 1


def test_sys_exit_in_a_function_is_an_error() -> None:
    async def exits(completions: list[str]) -> list[float]:
        sys.exit("bye")

    for function in (lambda c: sys.exit("bye"), exits):
        assert_raises(RewardError, ("sample 0", "SystemExit: bye"), score, function, n=1)


# --- async ----------------------------------------------------------------------------------------


def test_async_functions_run_concurrently() -> None:
    meeting: list[str] = []

    async def one(completions: list[str]) -> list[float]:
        meeting.append("one")
        while "two" not in meeting:
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    async def two(completions: list[str]) -> list[float]:
        while "one" not in meeting:
            await asyncio.sleep(0.001)
        meeting.append("two")
        return [2.0] * len(completions)

    assert score([one, two, length]).rewards.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_async_functions_within_a_running_loop(timeout_s: float | None) -> None:
    async def judge(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return length(completions)

    async def notebook() -> RewardBatch:
        return score(judge, timeout_s=timeout_s)

    assert asyncio.run(notebook()).rewards.tolist() == [1, 2, 3, 4]
    assert score(judge, timeout_s=timeout_s).rewards.tolist() == [1, 2, 3, 4]


def test_async_failures_do_not_affect_other_functions() -> None:
    async def fails(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return fails_on_c(completions)

    assert_raises(RewardError, ("fails", "sample 2", "ZeroDivisionError"), score, [fails, length])
    with pytest.warns(UserWarning):
        batch = score([fails, length], on_error="zero")
    assert batch.rewards.tolist() == [1.5, 3, 3, 3]


def test_many_instances_share_one_loop() -> None:
    async def judge(completions: list[str]) -> list[float]:
        return length(completions)

    score(judge)
    threads = threading.active_count()
    for _ in range(50):
        score(judge)
    assert threading.active_count() == threads


# --- timeouts -------------------------------------------------------------------------------------


def test_hanging_function_is_killed_with_its_descendants(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def hangs(completions: list[str]) -> list[float]:
        sleeper = subprocess.Popen(["sleep", "60"])
        pids.write_text(f"{os.getpid()} {sleeper.pid}")
        sleeper.wait()
        return [0.0] * 4

    start = time.monotonic()
    with pytest.raises(RewardError, match=mentions("hangs", "samples 0 to 3", "timeout_s=2")):
        score([length, hangs], timeout_s=2.0)
    assert time.monotonic() - start < 20
    child, grandchild = map(int, pids.read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert ends(grandchild)


def ends(pid: int) -> bool:
    """Whether any process ends within 30 s."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([watch], [], [], 30)
    os.close(watch)
    return bool(ended)


HANGING = """
import os, subprocess, sys, threading
from whet.rewards.functions import RewardFunctions

def hangs(completions):
    sleeper = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    os.write(1, f"{os.getpid()} {sleeper.pid}\\n".encode())
    if sys.argv[1] == "main":
        sleeper.wait()
    while True:
        pass

def score():
    RewardFunctions(hangs, timeout_s=600)(prompts=[""], completions=["a"], completion_ids=[[1]], columns={})

thread = threading.Thread(target=score)
score() if sys.argv[1] == "main" else thread.start()
"""


@pytest.mark.parametrize("thread", ["main", "other"])
def test_children_and_their_descendants_die_with_a_killed_trainer(thread: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HANGING, thread], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2
        trainer.kill()
        assert all(map(ends, pids))


def test_timeout_does_not_affect_other_functions() -> None:
    def hangs(completions: list[str]) -> list[float]:
        time.sleep(60)
        return []

    with pytest.warns(UserWarning, match=mentions("hangs", "timeout_s=0.3")):
        batch = score([hangs, length], timeout_s=0.3, on_error="skip")
    assert batch.rewards.tolist() == [1, 2, 3, 4] and batch.n_errors == 4


def test_functions_with_a_timeout_run_in_parallel_processes() -> None:
    def clocked(completions: list[str]) -> list[float]:
        start = time.monotonic()
        time.sleep(0.6)
        return [start, time.monotonic(), os.getpid()]

    starts, ends, pids = np.stack(list(score([clocked] * 3, timeout_s=30.0, n=3).by_name.values())).T
    assert starts.max() < ends.min()
    assert len({*pids, os.getpid()}) == 4


def test_dead_child_is_an_error() -> None:
    def dies(completions: list[str]) -> list[float]:
        if "bb" in completions:
            os.kill(os.getpid(), signal.SIGKILL)
        return [1.0] * len(completions)

    assert_raises(RewardError, ("dies", "sample 1 ", "exit code -9"), score, dies, timeout_s=30.0)


def test_torch_works_in_the_child_after_the_parent_used_its_threads() -> None:
    a = torch.randn(300, 300)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = float((a @ a).sum())

        def reward(completions: list[str]) -> list[float]:
            return [float((a @ a).sum()), float(torch.get_num_threads())]

        batch = score(reward, timeout_s=30.0, n=2)
    finally:
        torch.set_num_threads(threads)
    assert batch.rewards[0] == pytest.approx(expected, rel=1e-3, abs=1) and batch.rewards[1] == 1


def test_output_of_a_child_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    def prints(completions: list[str]) -> list[float]:
        print("in the child")
        return [0.0] * len(completions)

    print("before", end="")
    score(prints, timeout_s=30.0)
    assert capfd.readouterr().out == "beforein the child\n"


def test_children_leak_no_descriptors_or_processes() -> None:
    score(length, timeout_s=30.0)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(10):
        score(length, timeout_s=30.0)
    assert set(os.listdir("/proc/self/fd")) == before
    assert multiprocessing.active_children() == []


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "facts"),
    [
        ({"functions": []}, WhetValueError, ("functions is empty",)),
        ({"functions": [length, "f"]}, WhetTypeError, ("functions[1] is 'f'", "callable")),
        ({"functions": length, "weights": [1, 2]}, WhetValueError, ("weights is [1, 2]", 1)),
        ({"functions": length, "weights": [math.nan]}, WhetValueError, ("weights is [nan]", "finite")),
        ({"functions": length, "on_error": "ignore"}, WhetValueError, ("on_error is 'ignore'", "'skip'")),
        ({"functions": length, "timeout_s": 0}, WhetValueError, ("timeout_s is 0", "> 0")),
        ({"functions": length, "weights": ["1"]}, WhetValueError, ("weights is ['1']",)),
        ({"functions": length, "weights": [True]}, WhetValueError, ("weights is [True]",)),
        ({"functions": length, "timeout_s": True}, WhetValueError, ("timeout_s is True",)),
        ({"functions": length, "timeout_s": "5"}, WhetValueError, ("timeout_s is '5'",)),
        ({"functions": length, "timeout_s": math.nan}, WhetValueError, ("timeout_s is nan",)),
        ({"functions": length, "timeout_s": math.inf}, WhetValueError, ("timeout_s is inf",)),
    ],
)
def test_invalid_constructor_arguments(arguments: Any, error: type[Exception], facts: tuple[object, ...]) -> None:
    assert_raises(error, facts, RewardFunctions, **arguments)


def test_invalid_call_arguments() -> None:
    facts = "answer has 3 values", "completions has 4"
    assert_raises(WhetValueError, facts, score, length, {"answer": [1, 2, 3]})
    assert_raises(WhetValueError, ("'completion_ids'", "Rename"), score, length, {"completion_ids": [1, 2, 3, 4]})
    assert_raises(WhetValueError, ("prompts has 0 values",), score, length, n=0)


# --- preferences ----------------------------------------------------------------------------------


PAIRS = [("a", "b"), ("c", "d"), ("e", "f")]


@pytest.mark.parametrize(
    "result", [[0, 1, None], (False, True, None), np.array([0, 1, None]), [torch.tensor(0), np.int64(1), None]]
)
def test_preferences(result: Any) -> None:
    async def asynchronous(pairs: list[tuple[str, str]]) -> Any:
        return result

    for function in (lambda pairs: result, asynchronous):
        preferred = call_preference(function, PAIRS)
        assert preferred == [0, 1, None] and {type(p) for p in preferred} == {int, type(None)}


@pytest.mark.parametrize(
    ("result", "facts"),
    [
        ([0, 2, 1], ("returned 2 for pair 1", "None")),
        ([0, 1, -1], ("returned -1 for pair 2",)),
        ([0.0, 1, 1], ("returned 0.0 for pair 0",)),
        (["0", 1, 1], ("returned '0' for pair 0",)),
        ([0, 1], ("2 preferences", "3 pairs")),
        (None, ("NoneType", "3 pairs")),
    ],
)
def test_invalid_preferences_are_named(result: Any, facts: tuple[object, ...]) -> None:
    facts = "call_preference", "<lambda>", *facts
    assert_raises(RewardError, facts, call_preference, lambda pairs: result, PAIRS)


def test_a_preference_function_gets_prompts_if_it_names_them() -> None:
    def longer(pairs: Any, prompts: Any) -> list[int]:
        assert prompts == ["p", "q", "r"]
        return [0, 1, 0]

    assert call_preference(longer, PAIRS, ["p", "q", "r"]) == [0, 1, 0]


def test_exception_of_a_preference_function() -> None:
    with pytest.raises(RewardError, match=mentions("call_preference", "KeyError: 'x'", "pairs 0 to 2")) as caught:
        call_preference(lambda pairs: {}["x"], PAIRS)
    assert isinstance(caught.value.__cause__, KeyError)


# --- load_function --------------------------------------------------------------------------------


def test_load_function_from_a_module_and_from_a_file(tmp_path: Path) -> None:
    assert load_function("math:sqrt") is math.sqrt
    assert load_function("os.path:join") is os.path.join
    file = tmp_path / "my_rewards.py"
    file.write_text("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f(c): return [A(1).x]\n")
    assert load_function(f"{file}:f")([""]) == [1]


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ("math.sqrt", ("'math.sqrt'", "path/file.py:name")),
        ("math:", ("'math:'", "path/file.py:name")),
        (":f", ("':f'", "path/file.py:name")),
        ("math:a b", ("'math:a b'", "path/file.py:name")),
        ("no_such_module:f", ("'no_such_module'", "ModuleNotFoundError", "path/file.py:name")),
        ("no/such/file.py:f", ("FileNotFoundError", "no/such/file.py")),
        ("math:nothing", ("'math'", "'nothing'", "none")),
        ("math:pi", ("'math'", "'pi'")),
    ],
)
def test_load_function_errors(spec: str, facts: tuple[object, ...]) -> None:
    assert_raises(WhetValueError, ("load_function", *facts), load_function, spec)


def test_load_function_lists_the_functions_of_a_file_and_its_import_errors(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("def score(c): ...\n")
    bad.write_text("import nothing_like_it\n")
    assert_raises(WhetValueError, (good, "'scores'", ": score."), load_function, f"{good}:scores")
    with pytest.raises(WhetValueError, match=mentions(bad, "No module named 'nothing_like_it'")) as caught:
        load_function(f"{bad}:f")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
