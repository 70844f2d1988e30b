"""Environments: episodes of many turns, in which a model acts and something answers.

    class Guess:
        \"\"\"The model guesses a number from 1 to 100.\"\"\"

        def reset(self, row, seed):
            self.number = random.Random(seed).randint(1, 100)
            return [{"role": "user", "content": "Guess my number from 1 to 100. Answer with a number."}]

        def step(self, message):
            guess = int(re.search(r"\\d+", message["content"] + " 0")[0])
            if guess == self.number:
                return Step(reward=1.0, done=True)
            return Step([{"role": "user", "content": "higher" if guess < self.number else "lower"}])

An object plays one episode at a time. User code runs in child processes with a time limit (``open_episode``).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from whet.data.messages import is_messages
from whet.errors import WhetTypeError, is_number
from whet.rewards.functions import load_function
from whet.rewards.processes import ChildObject, Guard
from whet.tasks.settings import split_options

Message = Mapping[str, Any]


class Step(NamedTuple):
    """An environment's answer to a turn.

    Attributes:
        messages: what the model reads next; a text is a user's message.
        reward: of this turn; the rewards of an episode are added up.
        done: whether the episode has ended.
    """

    messages: Sequence[Message] | str = ()
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """Plays episodes. Methods may be async. ``close()``, if there is one, is called after an episode.

    An attribute ``tools`` lists tools in OpenAI's form, which the chat template describes to the model. The calls of a
    turn are in its message, as ``tool_calls``.
    """

    def reset(
        self, row: Mapping[str, Any], seed: int
    ) -> Sequence[Message] | str | Awaitable[Sequence[Message] | str | None] | None:
        """Begin an episode.

        Args:
            row: a row of the data set; empty without one.
            seed: determines the episode, if the environment draws random numbers.

        Returns:
            The messages before the first turn; a text is a user's message; None: the prompt of the row.
        """
        ...

    def step(self, message: Message) -> Step | Awaitable[Step]:
        """Answer a turn of the model.

        Args:
            message: ``role``, ``content``, and if the turn has them ``reasoning_content`` and ``tool_calls``.
        """
        ...


class Opening(NamedTuple):
    """The beginning of an episode: messages and tools."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def load_environment(spec: str, **options: Any) -> Callable[[], Environment]:
    """Return a function that makes the environment that a text names.

    Args:
        spec: "path/file.py:Game" or "package.module:Game", a class; or a game, see ``whet.tasks.games``. Options may
            follow, as in "file.py:Game,level=3".
        **options: further options.

    Raises:
        WhetValueError: there is no such class or game.
        WhetTypeError: the class has no ``reset`` or ``step``.
    """
    name, given = split_options(spec, "load_environment")
    options = {**given, **options}
    if name.partition(":")[0] in ("gem", "textarena"):
        from whet.tasks.games import load_game

        return load_game(name, options)
    make = load_function(name)
    return as_environment(partial(make, **options) if options else make, f"load_environment: {name}")


def as_environment(make: Any, where: str) -> Callable[[], Environment]:
    """Return a class, or a function that makes environments; a class for TRL is wrapped (``whet.tasks.trl``).

    Raises:
        WhetTypeError: it cannot make an environment.
    """
    if not callable(make):
        raise WhetTypeError(f"{where} is {make!r:.60}, expected a class with reset(row, seed) and step(message).")
    kind = make.func if isinstance(make, partial) else make
    missing = [name for name in ("reset", "step") if not hasattr(kind, name)] if inspect.isclass(kind) else []
    if missing == ["step"]:
        from whet.tasks.trl import TRLEnvironment, list_tools

        if list_tools(cast(type, kind)):
            return partial(TRLEnvironment, cast(Any, make))
    if missing:
        raise WhetTypeError(f"{where} has no {' and no '.join(missing)}, which an environment needs.")
    return cast(Any, make)


class EpisodeProcess:
    """An episode in a child process. ``reset`` or ``step`` starts a call, ``outcome`` waits for it.

    Args:
        make: makes the environment, in the child.
        row: row of the data set.
        seed: of the episode.
        timeout_s: seconds of a call.
        guard: kills the child if this process dies.
    """

    def __init__(
        self, make: Callable[[], Any], row: Mapping[str, Any], seed: int, timeout_s: float, guard: Guard
    ) -> None:
        self.child = ChildObject(partial(_Hosted, make, row, seed), lambda result: result, timeout_s, guard)

    def reset(self) -> None:
        """Begin the episode; the outcome is an ``Opening``."""
        self.child.start("reset")

    def step(self, message: Message) -> None:
        """Answer a turn; the outcome is a ``Step`` whose messages are dicts."""
        self.child.start("step", message)

    def outcome(self) -> Opening | Step | BaseException:
        """Wait for the call; exceptions, crashes and time-outs of the environment are returned."""
        found = self.child.outcome()
        if isinstance(found, BaseException):
            return found
        return Opening(*found["opening"]) if "opening" in found else Step(*found["step"])

    def close(self) -> None:
        """End the child."""
        self.child.__exit__()


class _Hosted:
    """An environment in its child process: results are checked, and become JSON values."""

    def __init__(self, make: Callable[[], Any], row: Mapping[str, Any], seed: int) -> None:
        self._row, self._seed = row, seed
        self._environment = make()

    async def reset(self) -> dict[str, Any]:
        found = await _settle(self._environment.reset(self._row, self._seed))
        if found is None:
            found = self._row.get("prompt")
        tools = getattr(self._environment, "tools", ())
        return {"opening": [_as_messages(found, "reset", is_opening=True), [dict(tool) for tool in tools]]}

    async def step(self, message: Message) -> dict[str, Any]:
        found = await _settle(self._environment.step(message))
        if not (isinstance(found, tuple) and len(found) == 3):
            raise WhetTypeError(f"step returned {found!r:.80}, expected whet.tasks.Step(messages, reward, done).")
        messages, reward, done = found
        if not is_number(reward):
            raise WhetTypeError(f"step returned the reward {reward!r:.60}, expected a finite number.")
        if done and (close := getattr(self._environment, "close", None)) is not None:
            await _settle(close())
        return {"step": [_as_messages(messages, "step", is_opening=bool(not done)), float(reward), bool(done)]}


async def _settle(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _as_messages(found: Any, method: str, *, is_opening: bool) -> list[dict[str, Any]]:
    """Return messages as dicts, of which there has to be one if a turn follows."""
    messages: Any = [{"role": "user", "content": found}] if isinstance(found, str) and found else found
    if not messages and not is_opening:
        return []
    if not is_messages(messages):
        raise WhetTypeError(
            f"{method} returned the messages {found!r:.80}, expected a text, or a list of dicts with role and content."
        )
    return [dict(message) for message in messages]
