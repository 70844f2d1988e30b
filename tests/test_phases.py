"""Phases: what is inside which, exceptions, threads and contexts, and the cost outside of a record."""

import contextvars
import subprocess
import sys
import threading
import time
import timeit

import pytest

from timed import timed
from whet.phases import phase, record


def wait(seconds):
    """Sleep, and tell how long it really took."""
    started = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - started


def near(*waits):
    return pytest.approx(sum(waits), abs=8e-3)


@timed
def test_a_phase_counts_what_is_not_in_the_phase_inside_it():
    started = time.perf_counter()
    with record() as seconds:
        outside = wait(0.02)
        with phase("loss"):
            before = wait(0.02)
            with phase("kl"):
                inside = wait(0.03)
            after = wait(0.02)
    total = time.perf_counter() - started
    assert seconds == {"other": near(outside), "loss": near(before, after), "kl": near(inside)}
    assert sum(seconds.values()) == pytest.approx(total, abs=8e-3)


@timed
def test_a_name_adds_up_wherever_it_comes():
    waits = []
    with record() as seconds:
        for _ in range(2):
            with phase("loss"):
                waits.append(wait(0.02))
        with phase("kl"), phase("loss"), phase("loss"):
            waits.append(wait(0.02))
    assert seconds["loss"] == near(*waits)
    assert seconds["kl"] < 8e-3


@timed
def test_an_exception_is_recorded_and_goes_on():
    with pytest.raises(ZeroDivisionError), record() as seconds:
        with pytest.raises(KeyError), phase("loss"), phase("kl"):
            inner = wait(0.02)
            raise KeyError
        with phase("loss"):
            outer = wait(0.02)
            raise ZeroDivisionError
    assert (seconds["kl"], seconds["loss"]) == (near(inner), near(outer))
    with phase("loss"):
        wait(0.001)
    assert seconds["loss"] == near(outer)


@timed
def test_a_record_in_a_record_is_its_own_and_counts_in_the_phase_around_it():
    with record() as outer, phase("reward"):
        with record() as inner, phase("loss"):
            first = wait(0.02)
        with phase("kl"):
            second = wait(0.03)
    assert inner.keys() == {"other", "loss"} and inner["loss"] == near(first)
    assert outer["reward"] == near(first) and outer["kl"] == near(second)
    assert "loss" not in outer


@pytest.mark.parametrize("copies_context", [False, True])
def test_another_thread_records_nothing_here(copies_context):
    def work():
        with phase("elsewhere"):
            time.sleep(0.005)

    with record() as seconds:
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(work,)) if copies_context else threading.Thread(target=work)
        with phase("generation"):
            thread.start()
            thread.join()
    assert seconds.keys() == {"other", "generation"}
    assert seconds["generation"] > 0.004


def test_threads_record_side_by_side():
    found = {}

    def work(name):
        with record() as seconds, phase(name):
            wait(0.02)
        found[name] = seconds

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: seconds.keys() for name, seconds in found.items()} == {"a": {"other", "a"}, "b": {"other", "b"}}


@timed
def test_without_a_record_a_phase_is_almost_free():
    def empty():
        with phase("loss"):
            pass

    assert min(timeit.repeat(empty, number=1000, repeat=20)) / 1000 < 1e-6


def test_it_needs_no_torch():
    code = "import sys, whet.phases; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
