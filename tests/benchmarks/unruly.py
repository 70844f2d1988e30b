"""Trainers that break, for ``Contender``: in a module that imports next to nothing, as each has a fresh interpreter."""

import os
from types import SimpleNamespace


def broken(session, how):
    if how == "before":
        raise ImportError("no such thing", name="trl")
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
    """Steps whose loss is the rank."""
    while True:
        session.begin()
        session.end(SimpleNamespace(loss=float(os.environ["RANK"]), grad_norm=1.0, seconds=1.0), {})


def of_all_ranks(session):
    """Steps that tell the process's environment, all alike."""
    names = ("WORLD_SIZE", "MASTER_ADDR", "WHET_NUM_THREADS", "OMP_NUM_THREADS")
    session.begin()
    session.end(SimpleNamespace(loss=1.0, grad_norm=1.0, seconds=1.0, told={n: os.environ[n] for n in names}), {})
