"""Reward functions that the texts of settings name, with options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from whet.errors import WhetTypeError
from whet.rewards.functions import load_function
from whet.tasks.code import prepare
from whet.tasks.settings import split_options


def load_rewards(specs: Sequence[str], *, unsafe_local: bool = False) -> list[Callable[..., Any]]:
    """Return the reward functions that texts such as ``"file.py:score"`` name.

    A class, or a function with options, as in ``"file.py:Score,level=3"``, is called with the options and returns the
    reward function. Programs among the functions are prepared, see ``whet.tasks.code.prepare``.

    Raises:
        WhetValueError: as for ``load_function`` and ``prepare``, or an option is malformed or out of range.
        WhetTypeError: there is no such option, one is missing, or the result is not a function.
    """
    return prepare(map(_load_reward, specs), unsafe_local=unsafe_local)


def _load_reward(spec: str) -> Callable[..., Any]:
    name, options = split_options(spec, "load_rewards")
    function = load_function(name)
    if not options and not inspect.isclass(function):
        return function
    signature = inspect.signature(function)
    names = ", ".join(signature.parameters) or "none"
    try:
        signature.bind(**options)
    except TypeError as error:
        raise WhetTypeError(f"load_rewards: {spec!r}: {error}. Options of {name}: {names}.") from error
    made = function(**options)
    if not callable(made):
        raise WhetTypeError(
            f"load_rewards: {spec!r} returns {type(made).__name__}, expected a reward function, since {name} has "
            f"options ({names})."
        )
    return made
