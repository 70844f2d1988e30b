"""Contenders served in this process."""

import multiprocessing
import threading

import pytest

from benchmarks.contenders.training.contender import Session


def serve_here(serve, n_steps, *arguments):
    """Run ``n_steps`` steps of ``serve`` and return their values."""
    ours, theirs = multiprocessing.Pipe()
    found = []

    def request_steps():
        found.append(ours.recv())
        for _ in range(n_steps):
            ours.send("step")
            found.append(ours.recv().value)
        ours.close()

    thread = threading.Thread(target=request_steps, daemon=True)
    thread.start()
    with pytest.raises(SystemExit):
        serve(Session(theirs), *arguments)
    thread.join()
    assert found.pop(0) == "ready"
    return found
