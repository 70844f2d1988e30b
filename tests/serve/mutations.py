"""Mutations of requests: a value is replaced by a strange one, or removed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

STRANGE = [
    None, True, False, 0, -1, 1, 2**63, 2**80, -(2**70), 0.5, -0.0, 1e308, -1e308, "", "a", "\ud800", "\x00", "é" * 50,
    [], [[]], [None], {}, {"a": {}}, [[1], "a"], {"": None}, [1.5], ["a", 1], "token_id:3", 10**30, [10**30], "NaN",
    float("nan"), float("inf"),
]  # fmt: skip


def _places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths of all values of a body."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from _places(each, (*path, key))


def mutate(body: Any, bits: random.Random) -> Any:
    """Return a copy of a body with a value replaced, removed or added."""
    found = copy.deepcopy(body)
    path = bits.choice([path for path in _places(found) if path] or [("model",)])
    holder = found
    for key in path[:-1]:
        holder = holder[key]
    if bits.random() < 0.15 and isinstance(holder, dict):
        holder.pop(path[-1], None)
    else:
        holder[path[-1]] = copy.deepcopy(bits.choice(STRANGE))
    return found


_TYPES = [None, True, 0.5, 7, "a", [], [1], ["a"], {}, {"a": 1}, float("inf")]


def replace_each(body: Any) -> Iterator[tuple[str, Any]]:
    """Yield the place of each value, without numbers of list items, and a copy of the body with another value there."""
    for path in _places(body):
        for i, value in enumerate(_TYPES if path else ()):
            found = copy.deepcopy(body)
            holder = found
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = copy.deepcopy(value)
            yield ".".join("[]" if isinstance(key, int) else key for key in path) + f" {i}", found
