"""Failing trainers for ``Contender``, in a module with few imports, since each runs in a fresh interpreter."""

import os
from types import SimpleNamespace


def broken(session, how):
    if how == "before":
        raise ImportError("not found", name="trl")
    session.begin()
    if how == "raises":
        raise ValueError("the step is broken")
    os._exit(3)


def waiting(session, last_word):
    try:
        session.begin()
        session.end(os.getpid(), {})
        session.begin()
    finally:
        last_word.write_text("left")


def of_own_rank(session):
    """Take steps whose loss is the rank."""
    while True:
        session.begin()
        session.end(SimpleNamespace(loss=float(os.environ["RANK"]), grad_norm=1.0, seconds=1.0), {})


def of_all_ranks(session):
    """Take a step that reports the process's environment; loss and gradient norm are equal on all ranks."""
    names = ("WORLD_SIZE", "MASTER_ADDR", "WHET_NUM_THREADS", "OMP_NUM_THREADS")
    session.begin()
    session.end(
        SimpleNamespace(loss=1.0, grad_norm=1.0, seconds=1.0, environment={n: os.environ[n] for n in names}), {}
    )
