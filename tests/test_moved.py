"""Modules by the names that they had."""

import importlib
import sys

import pytest

from whet.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_module_is_found_by_its_old_name(old):
    module = importlib.import_module(MOVED[old])
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {MOVED[old]}"):
        assert importlib.import_module(old) is module
    assert module.__name__ == module.__spec__.name == MOVED[old]
