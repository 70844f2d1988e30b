"""Rows of a file with reward functions, or empty rows for an environment, as a task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.data.sources import Source, as_sources, read_rows
from whet.errors import WhetValueError
from whet.rewards.functions import RewardFunctions


class RewardedRows:
    """A task of the rows of files, each with a ``prompt``, scored by the sum of reward functions.

    Functions are called with one completion at a time, so that its score does not depend on others.

    Args:
        source: as for ``read_rows``.
        columns: as for ``read_rows``.
        functions: as for training, but without ``completion_ids``. Empty: the score is 0.
        is_played: whether an environment begins episodes and rewards turns; rows need no prompt then.

    Raises:
        WhetValueError: as for ``read_rows``; a row has no prompt, or a function declares ``completion_ids``.
    """

    def __init__(
        self,
        source: Source | Sequence[Source],
        functions: Sequence[Callable[..., Any]],
        columns: Mapping[str, str] | None = None,
        *,
        is_played: bool = False,
    ) -> None:
        self.name = ", ".join(Path(each).stem for each in as_sources(source))
        self.system_prompt = ""
        self.rows = read_rows(source, columns)
        self._functions = RewardFunctions(functions) if functions else None
        for i, row in enumerate(self.rows):
            if row.get("prompt") is None and not is_played:
                raise WhetValueError(f"RewardedRows: {self.rows.place(i)} has no prompt, which every row needs.")
        for name, function in (self._functions.functions if self._functions else {}).items():
            if "completion_ids" in inspect.signature(function).parameters:
                raise WhetValueError(
                    f"RewardedRows: {name} declares completion_ids, but evaluation scores texts. Declare completions."
                )

    def score(self, completion: Any, row: Mapping[str, Any]) -> float:
        """Return the sum of the functions' scores; NaN if all return None.

        Args:
            completion: a text; of an episode its messages.
        """
        if self._functions is None:
            return 0.0
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        scored = self._functions(
            prompts=[row.get("prompt")], completions=[completion], completion_ids=[()], columns=columns
        )
        return float(scored.rewards[0])


class EmptyRows:
    """A task of empty rows, for an environment that begins episodes by their seeds and rewards their turns.

    Args:
        name: of the environment.
        size: number of episodes.
    """

    system_prompt = ""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.rows = name, [dict[str, Any]()] * size

    def score(self, completion: Any, row: Mapping[str, Any]) -> float:
        """Return 0, the score next to the turns' rewards."""
        return 0.0
