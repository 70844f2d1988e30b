"""Classes for TRL's ``environment_factory`` as environments: their public methods are tools.

    class Counter:
        def reset(self, **row):  # the row's columns; a text that it returns is appended to the prompt
            self.count = 0

        def add(self, n: int) -> int:
            \"\"\"Add to the counter.

            Args:
                n: number to add
            \"\"\"
            self.count += n
            return self.count

        def get_reward(self) -> float:
            return float(self.count == 10)

As in TRL 1.16, an episode ends with the first turn without a call. Departures: global random states are seeded before
``reset``, and ``get_reward`` is called after each turn, because limits may end an episode after any.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from whet.errors import WhetTypeError, is_number
from whet.tasks.environment import Message, Step
from whet.tasks.tools import Tools

_OTHERS = ("reset", "get_reward")


def list_tools(kind: type) -> list[str]:
    """Return the names of the methods that TRL offers to the model as tools."""
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in _OTHERS]


class TRLEnvironment:
    """An environment whose tools and reward are an object's methods.

    Args:
        make: makes the object; its class has ``reset(**row)``, tools, and optionally ``get_reward()``.

    Attributes:
        tools: the schemas.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._played = make()
        self._tools = Tools([getattr(self._played, name) for name in list_tools(type(self._played))])
        self.tools = self._tools.tools
        self._reward = 0.0

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
        """Return the prompt of the row, with the text that the object's ``reset`` returns at its end."""
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the state that the object's class may use)
        text = await _settled(self._played.reset(**row))
        if not isinstance(text, str | None):
            raise WhetTypeError(f"reset returned {text!r:.60}, expected a text, or None.")
        prompt = row.get("prompt") or ""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + (text or "")}]

    async def step(self, message: Message) -> Step:
        """Call the tools; the rewards of the turns add up to ``get_reward()``."""
        step = await self._tools.step(message)
        if not hasattr(self._played, "get_reward"):
            return step
        reward = await _settled(self._played.get_reward())
        if not is_number(reward):
            raise WhetTypeError(f"get_reward returned {reward!r:.60}, expected a finite number.")
        before, self._reward = self._reward, float(reward)
        return step._replace(reward=self._reward - before)


async def _settled(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
