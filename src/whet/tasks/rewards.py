"""A reward function that a text of the settings names, with options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from whet.errors import WhetTypeError
from whet.rewards.functions import load_function
from whet.tasks.settings import split_options


def load_reward(spec: str) -> Callable[..., Any]:
    """Return the reward function that a text such as ``"file.py:score"`` names.

    A class, or a function with options, as in ``"file.py:Score,level=3"``, is called with the options and returns the
    reward function.

    Raises:
        WhetValueError: as for ``load_function``, or an option is malformed or out of range.
        WhetTypeError: there is no such option, one is missing, or the result is not a function.
    """
    name, options = split_options(spec, "load_reward")
    function = load_function(name)
    if not options and not inspect.isclass(function):
        return function
    signature = inspect.signature(function)
    names = ", ".join(signature.parameters) or "none"
    try:
        signature.bind(**options)
    except TypeError as error:
        raise WhetTypeError(f"load_reward: {spec!r}: {error}. Options of {name}: {names}.") from error
    made = function(**options)
    if not callable(made):
        raise WhetTypeError(
            f"load_reward: {spec!r} returns {type(made).__name__}, expected a reward function, since {name} has "
            f"options ({names})."
        )
    return made
