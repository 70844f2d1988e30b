"""Errors of Whet cross process boundaries: pickle restores them from their args, and they print the same."""

import copy
import inspect
import pickle

import pytest

import whet.engine  # noqa: F401  defines an error that is not in whet.errors
from whet.errors import WhetError


def subclasses(kind: type[WhetError]) -> set[type[WhetError]]:
    return {kind}.union(*(subclasses(each) for each in kind.__subclasses__()))


def make(kind):
    own = "__init__" in vars(kind)
    return kind(*inspect.signature(kind).parameters) if own else kind("message")


@pytest.mark.parametrize("kind", sorted(subclasses(WhetError), key=str))
def test_every_error_survives_copy_and_pickle(kind):
    error = make(kind)
    error.note = "kept"
    for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(again), str(again), again.note) == (kind, str(error), "kept")
