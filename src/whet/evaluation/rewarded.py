"""Rows of a file with reward functions, as a task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.data.sources import Source, as_sources, read_rows
from whet.errors import WhetValueError
from whet.rewards.functions import RewardFunctions


class RewardedRows:
    """A task whose rows are those of a file, each with a ``prompt``, and whose score is the sum of reward functions.

    A function is called for one completion at a time, so that a score does not depend on what else is scored.

    Args:
        source, columns: as ``read_rows`` takes them.
        functions: as for training, but that they get no ``completion_ids``.

    Raises:
        WhetValueError: as ``read_rows``; a row without a prompt, or a function that declares ``completion_ids``.
    """

    def __init__(
        self,
        source: Source | Sequence[Source],
        functions: Sequence[Callable[..., Any]],
        columns: Mapping[str, str] | None = None,
    ) -> None:
        self.name = ", ".join(Path(each).stem for each in as_sources(source))
        self.system_prompt = ""
        self.rows = read_rows(source, columns)
        self._functions = RewardFunctions(functions)
        for i, row in enumerate(self.rows):
            if row.get("prompt") is None:
                raise WhetValueError(f"RewardedRows: {self.rows.place(i)} has no prompt. Give every row one.")
        for name, function in self._functions.functions.items():
            if "completion_ids" in inspect.signature(function).parameters:
                raise WhetValueError(
                    f"RewardedRows: {name} declares completion_ids, and evaluation scores texts. Have it take "
                    f"completions."
                )

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """The sum of the functions' scores; NaN where none of them gives one."""
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        scored = self._functions(
            prompts=[row["prompt"]], completions=[completion], completion_ids=[()], columns=columns
        )
        return float(scored.rewards[0])
