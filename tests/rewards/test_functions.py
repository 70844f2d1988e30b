"""Reward functions: binding, totals, async, every way to fail under every policy, timeouts."""

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
from tests.raising import assert_raises

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


# --- what a function is called with ---------------------------------------------------------------


def test_functions_get_what_they_declare() -> None:
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


def test_a_missing_argument_is_named_whatever_the_policy() -> None:
    def reward(completions: list[str], solution: list[str]) -> list[float]:
        return [0.0] * len(completions)

    expected = (
        r"reward requires 'solution', and there is no such column. "
        r"There are: answer, completion_ids, completions, prompts\."
    )
    assert_raises(RewardError, expected, score, reward, {"answer": [0] * 4}, on_error="skip")


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


def test_one_sample() -> None:
    assert score(length, n=1).rewards.tolist() == [1.0]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_an_exception_names_the_function_and_the_sample(timeout_s: float | None) -> None:
    message = (
        r"fails_on_c failed on sample 2 \(completion 'ccc'\): it raised ZeroDivisionError: .*"
        r"division.*by zero\. Return a finite number or None per completion, or pass on_error='skip'"
    )
    with pytest.raises(RewardError, match=message) as caught:
        score([length, fails_on_c], timeout_s=timeout_s)
    if timeout_s is None:
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    else:
        assert "in fails_on_c" in str(caught.value.__cause__)  # the child's traceback


def test_an_exception_that_only_the_whole_batch_provokes() -> None:
    def reward(completions: list[str]) -> list[float]:
        if len(completions) == 4:
            raise RuntimeError("too many")
        return [1.0] * len(completions)

    assert_raises(RewardError, "samples 0 to 3: it raised RuntimeError: too many, and on no smaller", score, reward)
    assert score(reward, on_error="skip").rewards.tolist() == [1.0] * 4


@pytest.mark.parametrize("timeout_s", [None, 30.0])
@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1, 2, 3], "samples 0 to 3: it returned 3 scores for 4 completions"),
        ([], "it returned 0 scores for 4 completions"),
        (None, "it returned NoneType, expected a list of 4 numbers"),
        (7.0, "it returned float, expected a list"),
        (np.float64(7), "it returned float64, expected a list"),
        ({0: 1}, "it returned dict"),
        ("1234", "it returned str"),
        ([1, 2, "3", 4], r"sample 2 \(completion 'ccc'\): it gave '3', which is no finite number"),
        ([1, math.nan, 3, 4], r"sample 1 .*: it gave nan, which is no finite number"),
        ([1, 2, 3, -math.inf], r"sample 3 .*: it gave -inf"),
        ([[1], 2, 3, 4], r"sample 0 .*: it gave \[1\]"),
        ([1j, 2, 3, 4], r"sample 0 .*: it gave 1j"),
        ([10**400, 2, 3, 4], r"sample 0 .*: it gave 10000"),
        (np.ones((4, 1)), r"sample 0 .*: it gave \[1.0\]"),
        ([np.ones(1), 1, 1, 1], r"sample 0 .*: it gave array"),
    ],
)
def test_results_that_are_no_scores(result: Any, message: str, timeout_s: float | None) -> None:
    assert_raises(RewardError, message, score, lambda c: result, timeout_s=timeout_s)


@pytest.mark.parametrize(("policy", "value"), [("skip", math.nan), ("zero", 0.0)])
@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_policies_replace_the_failing_samples_only(policy: str, value: float, timeout_s: float | None) -> None:
    bad = lambda c: [5, math.inf, None, "x"]  # noqa: E731
    with pytest.warns(UserWarning) as caught:
        batch = score([fails_on_c, bad], on_error=policy, timeout_s=timeout_s)
    np.testing.assert_array_equal(batch.by_name["fails_on_c"], [0.5, 1, value, -1])
    np.testing.assert_array_equal(batch.by_name["<lambda>"], [5, value, math.nan, value])
    assert batch.n_errors == 3
    assert len(caught) == 2 and "sample 2 (completion 'ccc')" in str(caught[0].message)
    assert f"on_error={policy!r} applies" in str(caught[0].message)


def test_a_skipped_sample_keeps_its_other_rewards_and_a_lonely_one_has_none() -> None:
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


def test_sys_exit_in_a_function_does_not_end_the_run() -> None:
    async def leaves(completions: list[str]) -> list[float]:
        sys.exit("bye")

    for function in (lambda c: sys.exit("bye"), leaves):
        assert_raises(RewardError, "raised SystemExit: bye", score, function, n=1)


# --- async ----------------------------------------------------------------------------------------


def test_async_functions_run_together() -> None:
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
def test_async_functions_where_a_loop_is_running(timeout_s: float | None) -> None:
    async def judge(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return length(completions)

    async def notebook() -> RewardBatch:
        return score(judge, timeout_s=timeout_s)

    assert asyncio.run(notebook()).rewards.tolist() == [1, 2, 3, 4]
    assert score(judge, timeout_s=timeout_s).rewards.tolist() == [1, 2, 3, 4]


def test_async_failures_are_found_too_and_do_not_disturb_the_others() -> None:
    async def fails(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return fails_on_c(completions)

    assert_raises(RewardError, r"fails failed on sample 2 .*ZeroDivisionError", score, [fails, length])
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


def test_a_function_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def hangs(completions: list[str]) -> list[float]:
        sleeper = subprocess.Popen(["sleep", "60"])
        pids.write_text(f"{os.getpid()} {sleeper.pid}")
        sleeper.wait()
        return [0.0] * 4

    start = time.monotonic()
    with pytest.raises(RewardError, match=r"hangs failed on samples 0 to 3: it did not return within timeout_s=2"):
        score([length, hangs], timeout_s=2.0)
    assert time.monotonic() - start < 20
    child, grandchild = map(int, pids.read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert ends(grandchild)


def ends(pid: int) -> bool:
    """Whether a process, of anybody's, has ended or soon does."""
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
def test_children_and_what_they_started_die_with_a_killed_trainer(thread: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HANGING, thread], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2
        trainer.kill()
        assert all(map(ends, pids))


def test_a_hang_leaves_the_other_functions_scores() -> None:
    def hangs(completions: list[str]) -> list[float]:
        time.sleep(60)
        return []

    with pytest.warns(UserWarning, match="did not return within"):
        batch = score([hangs, length], timeout_s=0.3, on_error="skip")
    assert batch.rewards.tolist() == [1, 2, 3, 4] and batch.n_errors == 4


def test_with_a_timeout_functions_run_side_by_side_in_processes_of_their_own() -> None:
    def clocked(completions: list[str]) -> list[float]:
        start = time.monotonic()
        time.sleep(0.6)
        return [start, time.monotonic(), os.getpid()]

    starts, ends, pids = np.stack(list(score([clocked] * 3, timeout_s=30.0, n=3).by_name.values())).T
    assert starts.max() < ends.min()
    assert len({*pids, os.getpid()}) == 4


def test_a_child_that_dies_is_an_error() -> None:
    def dies(completions: list[str]) -> list[float]:
        if "bb" in completions:
            os.kill(os.getpid(), signal.SIGKILL)
        return [1.0] * len(completions)

    assert_raises(RewardError, r"sample 1 .*its process died with exit code -9", score, dies, timeout_s=30.0)


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


def test_what_a_child_prints_arrives_once(capfd: pytest.CaptureFixture[str]) -> None:
    def prints(completions: list[str]) -> list[float]:
        print("in the child")
        return [0.0] * len(completions)

    print("before", end="")
    score(prints, timeout_s=30.0)
    assert capfd.readouterr().out == "beforein the child\n"


def test_children_leave_no_descriptors_or_processes_behind() -> None:
    score(length, timeout_s=30.0)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(10):
        score(length, timeout_s=30.0)
    assert set(os.listdir("/proc/self/fd")) == before
    assert multiprocessing.active_children() == []


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"functions": []}, WhetValueError, "functions is empty"),
        ({"functions": [length, "f"]}, WhetTypeError, r"functions\[1\] is 'f', expected a callable"),
        ({"functions": length, "weights": [1, 2]}, WhetValueError, "expected 1 finite numbers"),
        ({"functions": length, "weights": [math.nan]}, WhetValueError, r"weights is \[nan\]"),
        ({"functions": length, "on_error": "ignore"}, WhetValueError, "on_error is 'ignore'"),
        ({"functions": length, "timeout_s": 0}, WhetValueError, "timeout_s is 0"),
        ({"functions": length, "weights": ["1"]}, WhetValueError, "expected 1 finite numbers"),
        ({"functions": length, "weights": [True]}, WhetValueError, "expected 1 finite numbers"),
        ({"functions": length, "timeout_s": True}, WhetValueError, "timeout_s is True"),
        ({"functions": length, "timeout_s": "5"}, WhetValueError, "timeout_s is '5'"),
        ({"functions": length, "timeout_s": math.nan}, WhetValueError, "timeout_s is nan"),
        ({"functions": length, "timeout_s": math.inf}, WhetValueError, "timeout_s is inf"),
    ],
)
def test_bad_constructor_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    assert_raises(error, message, RewardFunctions, **arguments)


def test_bad_call_arguments() -> None:
    assert_raises(WhetValueError, "answer has 3 values and completions has 4", score, length, {"answer": [1, 2, 3]})
    with pytest.raises(WhetValueError, match=r"columns has 'completion_ids'.*Rename"):
        score(length, {"completion_ids": [1, 2, 3, 4]})
    assert_raises(WhetValueError, "at least one", score, length, n=0)


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
    ("result", "message"),
    [
        ([0, 2, 1], "gave 2 for pair 1, expected 0 .* 1 .* or None"),
        ([0, 1, -1], "gave -1 for pair 2"),
        ([0.0, 1, 1], "gave 0.0 for pair 0"),
        (["0", 1, 1], "gave '0' for pair 0"),
        ([0, 1], "returned 2 preferences for 3 pairs"),
        (None, "returned NoneType for 3 pairs"),
    ],
)
def test_results_that_are_no_preferences(result: Any, message: str) -> None:
    assert_raises(RewardError, f"call_preference: <lambda> {message}", call_preference, lambda pairs: result, PAIRS)


def test_a_preference_function_that_raises() -> None:
    with pytest.raises(RewardError, match="raised KeyError: 'x' on pairs 0 to 2") as caught:
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
    ("spec", "message"),
    [
        ("math.sqrt", "'math.sqrt' is not of the form"),
        ("math:", "is not of the form"),
        (":f", "is not of the form"),
        ("math:a b", "is not of the form"),
        ("no_such_module:f", "cannot import 'no_such_module': ModuleNotFoundError.*path/file.py:name"),
        ("no/such/file.py:f", "cannot import .*FileNotFoundError: no file no/such/file.py"),
        ("math:nothing", "'math' has nothing callable named 'nothing'; it has no functions"),
        ("math:pi", "nothing callable named 'pi'"),
    ],
)
def test_load_function_errors(spec: str, message: str) -> None:
    assert_raises(WhetValueError, message, load_function, spec)


def test_load_function_names_what_a_file_has_and_what_breaks_in_it(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("def score(c): ...\n")
    bad.write_text("import nothing_like_it\n")
    assert_raises(WhetValueError, "named 'scores'; it has score", load_function, f"{good}:scores")
    with pytest.raises(WhetValueError, match="No module named 'nothing_like_it'") as caught:
        load_function(f"{bad}:f")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
