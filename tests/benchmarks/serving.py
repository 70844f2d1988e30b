"""The processes of contenders, run here."""

import multiprocessing
import threading

import pytest

from benchmarks.contenders.training.contender import Session


def served_here(serve, n_steps, *arguments):
    """The values of so many steps of ``serve``."""
    ours, theirs = multiprocessing.Pipe()
    found = []

    def ask():
        found.append(ours.recv())
        for _ in range(n_steps):
            ours.send("step")
            found.append(ours.recv().value)
        ours.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    with pytest.raises(SystemExit):
        serve(Session(theirs), *arguments)
    thread.join()
    assert found.pop(0) == "ready"
    return found
