"""Tools: typed Python functions that the model calls, as an environment.

    def calculate(expression: str) -> float:
        \"\"\"Compute an arithmetic expression.

        Args:
            expression: numbers and + - * / ( ), as in "2 * (3 + 4)"
        \"\"\"

``whet train grpo --tools file.py:calculate``, or ``GRPO(model, tools=[calculate], ...)``. An episode begins with the
prompt of a row and ends with the first turn without a call. It has no rewards by turn: reward functions, or the
verifier of a task, score it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from whet.config.episodes import EpisodeSettings
from whet.data.messages import failed_calls, tool_calls, tool_result
from whet.errors import WhetTypeError, WhetValueError
from whet.rewards.functions import load_function
from whet.rewards.processes import Guard, check_timeout, settle, summary
from whet.tasks.environment import EpisodeProcess, Message, Step
from whet.tasks.schemas import find_fault, tool_schema


class ToolError(Exception):
    """A call that cannot be carried out; the model reads the reason."""


class Tools:
    """An environment in which the model calls functions.

    The functions of a turn are called in its order, of async ones all at once; results keep the order of the calls. An
    argument is a JSON value that fits the schema; a parameter whose hint is an Enum gets the member's value. A result
    that is not a text is written as JSON. An exception, an unknown name, and arguments that do not fit go to the model
    as the result, in a message with ``is_error``.

    Args:
        functions: with type hints and docstrings, see ``tool_schema``.
        max_characters: of a result; a longer one is truncated, and ends with a mark that gives both lengths. None: the
            default of ``EpisodeSettings``.

    Attributes:
        tools: the schemas.

    Raises:
        WhetTypeError, WhetValueError: as for ``tool_schema``; there is no function, or two have the same name.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], max_characters: int | None = None) -> None:
        if callable(functions) or not functions:
            raise WhetTypeError(f"Tools: functions is {functions!r:.60}, expected a list of one or more functions.")
        self.tools = [tool_schema(function) for function in functions]
        names = [tool["function"]["name"] for tool in self.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise WhetValueError(f"Tools: two functions have the name {twice[0]!r}. Rename one of them.")
        self._functions = dict(zip(names, functions, strict=True))
        self._parameters = {name: tool["function"]["parameters"] for name, tool in zip(names, self.tools, strict=True)}
        self._max_characters = max_characters or EpisodeSettings.max_tool_characters

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begin with the prompt of the row."""

    async def step(self, message: Message) -> Step:
        """Call the functions that a turn calls; without a call, the episode has ended."""
        calls = tool_calls(message)
        begun = [self._begin(call) for call in calls]
        results = await asyncio.gather(*map(settle, begun))
        return Step([self._answer(*each) for each in zip(calls, results, strict=True)], done=not calls)

    def _begin(self, call: Mapping[str, Any]) -> Any:
        """Return the result of a function, which may be awaitable, or the exception."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if error := call.get("error") or find_fault(arguments, self._parameters[name]):
            return ToolError(error)
        try:
            return self._functions[name](**arguments)
        except (Exception, SystemExit) as error:
            return error

    def _answer(self, call: Mapping[str, Any], result: Any) -> dict[str, Any]:
        text, error = "", result if isinstance(result, BaseException) else None
        if error is None:
            try:
                text = _as_text(result)
            except Exception as raised:  # by the user's __str__, or for a number with too many digits
                error = raised
        if error is not None:
            text = f"error: {error if isinstance(error, ToolError) else summary(error)}"
        text = truncate(text.encode(errors="replace").decode(), self._max_characters)
        return tool_result(call, text, is_error=error is not None)


def _as_text(result: Any) -> str:
    try:
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def truncate(text: str, max_characters: int) -> str:
    """Return the beginning of a text, with a mark if it is not the whole."""
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}\n[truncated: the first {max_characters:,} of {len(text):,} characters]"


class ToolProcess:
    """Tools in a child process, for calls one turn at a time.

    A process that hangs or dies is replaced, and the model reads that its calls failed.

    Args:
        functions: as for ``Tools``.
        settings: time and length of results.

    Raises:
        WhetTypeError, WhetValueError: as for ``Tools``, or this system cannot end a call after its time.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], settings: EpisodeSettings) -> None:
        check_timeout("ToolProcess", "env_timeout_s", settings.env_timeout_s)
        self._tools, self._timeout_s = Tools(functions, settings.max_tool_characters), settings.env_timeout_s
        self.schemas, self._process = self._tools.tools, None
        self._guard = Guard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()
        self._guard.__exit__()

    def answer(self, message: Message) -> list[Message]:
        """Return the messages that answer the calls of a turn, in their order."""
        if self._process is None:
            self._process = EpisodeProcess(lambda: self._tools, {}, 0, self._timeout_s, self._guard)
        found: Any = None
        try:
            self._process.step(message)
            found = self._process.outcome()
        finally:
            if not isinstance(found, Step):  # it failed, or Ctrl-C interrupts it
                self._end()
        if not isinstance(found, Step):
            return [*failed_calls(message, summary(found))]
        assert not isinstance(found.messages, str), "a step from a child has messages"
        return [*found.messages]

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None


def load_tools(specs: Sequence[str]) -> list[Callable[..., Any]]:
    """Return the functions that texts such as ``"file.py:calculate,search"`` or ``"package.module:name"`` name.

    Raises:
        WhetValueError: as for ``load_function``.
    """
    split = [spec.rpartition(":") for spec in specs]
    return [load_function(f"{where}{colon}{name}") for where, colon, names in split for name in names.split(",")]
