"""Phases: nesting, exceptions, threads and contexts, and the cost outside of a record."""

import contextvars
import threading
import time
import timeit

import pytest
from tests.clock import TICK_S, Clock
from tests.timed import timed

from whet.training.phases import phase, record


@pytest.fixture
def wait(monkeypatch):
    """Return a function that advances the clock of phases."""
    clock = Clock()
    monkeypatch.setattr("whet.training.phases.time", clock)
    return clock.sleep


def near(seconds):
    """Match seconds plus ticks of a clock that is read several times."""
    return pytest.approx(seconds, abs=8 * TICK_S)


def test_a_phase_excludes_nested_phases(wait):
    with record() as seconds:
        wait(0.25)
        with phase("loss"):
            wait(1)
            with phase("kl"):
                wait(2)
            wait(4)
    assert seconds == {"other": near(0.25), "loss": near(5), "kl": near(2)}
    assert sum(seconds.values()) == 7.25 + 5 * TICK_S  # a tick at both ends of each phase and record


def test_equal_names_add_up(wait):
    with record() as seconds:
        for _ in range(2):
            with phase("loss"):
                wait(1)
        with phase("kl"), phase("loss"), phase("loss"):
            wait(2)
    assert seconds["loss"] == near(4)
    assert seconds["kl"] == near(0)


def test_exceptions_are_recorded_and_propagate(wait):
    with pytest.raises(ZeroDivisionError), record() as seconds:
        with pytest.raises(KeyError), phase("loss"), phase("kl"):
            wait(1)
            raise KeyError
        with phase("loss"):
            wait(2)
            raise ZeroDivisionError
    assert (seconds["kl"], seconds["loss"]) == (near(1), near(2))
    with phase("loss"):
        wait(4)
    assert seconds["loss"] == near(2)


def test_nested_records_are_independent_and_count_in_the_outer_phase(wait):
    with record() as outer, phase("reward"):
        with record() as inner, phase("loss"):
            wait(1)
        with phase("kl"):
            wait(2)
    assert inner.keys() == {"other", "loss"} and inner["loss"] == near(1)
    assert outer["reward"] == near(1) and outer["kl"] == near(2)
    assert "loss" not in outer


def test_seconds_are_wall_clock_time():
    started = time.perf_counter()
    with record() as seconds, phase("loss"):
        time.sleep(0.01)
    assert 0.01 <= seconds["loss"] <= time.perf_counter() - started


@pytest.mark.parametrize("copies_context", [False, True])
def test_other_threads_are_not_recorded(copies_context):
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


def test_threads_record_independently():
    found = {}

    def work(name):
        with record() as seconds, phase(name):
            time.sleep(0.01)
        found[name] = seconds

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: seconds.keys() for name, seconds in found.items()} == {"a": {"other", "a"}, "b": {"other", "b"}}


@timed
def test_a_phase_without_a_record_is_cheap():
    def empty():
        with phase("loss"):
            pass

    assert min(timeit.repeat(empty, number=1000, repeat=20)) / 1000 < 1e-6
