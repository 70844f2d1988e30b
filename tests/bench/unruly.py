"""Trainers that break, for ``Contender``: in a module that imports next to nothing, as each has a fresh interpreter."""

import os


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
