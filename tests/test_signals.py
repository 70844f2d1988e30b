"""Signal handlers deferred until a change is complete."""

from __future__ import annotations

import signal
import threading

import pytest

from whet.signals import DeferredSignals


@pytest.fixture
def came():
    """Signals whose handlers have run; the handler of SIGTERM raises."""
    numbers = []

    def note(number, frame):
        numbers.append(number)
        if number == signal.SIGTERM:
            raise TimeoutError

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    yield numbers
    assert all(signal.getsignal(number) is note for number in before), "the handlers are restored"
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_are_deferred_until_release_and_run_in_order(came):
    with DeferredSignals() as signals:
        signal.raise_signal(signal.SIGALRM)
        assert came == [signal.SIGALRM], "nothing is deferred before hold"
        signals.hold()
        signals.hold()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGALRM)
        assert came == [signal.SIGALRM]
        signals.release()
        assert came == [signal.SIGALRM, signal.SIGINT, signal.SIGALRM]
        signals.hold()
        signal.raise_signal(signal.SIGINT)
    assert came[3:] == [signal.SIGINT]


def test_exception_of_a_handler_is_raised_after_the_change(came):
    done = []
    with pytest.raises(TimeoutError), DeferredSignals() as signals:
        signals.hold()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done and came == [signal.SIGTERM, signal.SIGINT], "other handlers run in spite of an exception"


def test_exception_of_the_change_itself_is_not_replaced(came):
    with pytest.raises(KeyError), DeferredSignals() as signals:
        signals.hold()
        signal.raise_signal(signal.SIGINT)
        raise KeyError
    assert came == [signal.SIGINT]


def test_nothing_is_deferred_outside_of_the_context_or_in_other_threads(came):
    signals = DeferredSignals()
    signals.hold()
    signal.raise_signal(signal.SIGINT)
    assert came == [signal.SIGINT]

    def hold():
        with DeferredSignals() as other:
            other.hold()
            other.release()

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert not signals._handlers
