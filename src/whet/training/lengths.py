"""Maximum length of trained rows, and handling of longer rows: an error, truncated, or dropped."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from whet.config.settings import TrainerConfig
from whet.errors import WhetValueError


class FittedRows(NamedTuple):
    """Rows within a length limit.

    Attributes:
        rows: each row unchanged or truncated; None if dropped.
        metrics: ``frac_truncated`` and ``frac_dropped``, shares of rows; empty if longer rows are errors.
    """

    rows: list[list[Any] | None]
    metrics: dict[str, float]


class LengthLimit:
    """Maximum number of tokens per row.

    Args:
        positions: the model's positions, the limit if ``max_length`` is 0; None: unlimited.
        config: settings, with ``max_length`` and ``truncation`` for some algorithms; else longer rows are errors.
        where: the algorithm's name, for errors.

    Attributes:
        n_tokens: the limit.

    Raises:
        WhetValueError: ``max_length`` exceeds the model's last position.
    """

    def __init__(self, positions: int | None, config: TrainerConfig, where: str) -> None:
        max_length = getattr(config, "max_length", 0)
        if positions is not None and max_length > positions:
            raise WhetValueError(f"{where}: max_length is {max_length}, and the model's last position is {positions}.")
        self.n_tokens = max_length or positions or math.inf
        self._limit_name = "max_length" if max_length else "the model's last position"
        self._truncation, self._where = getattr(config, "truncation", "error"), where
        self._has_warned = False

    def fit(self, rows: Sequence[Sequence[Any]]) -> FittedRows:
        """Fit rows into the limit; a row is a prompt and its completions, with optional masks.

        Truncation shortens the completions; a row whose prompt leaves no room for them is dropped.

        Raises:
            WhetValueError: a row is too long and ``truncation`` is "error".
        """
        lengths = [len(row[0]) + max(map(len, row[1:]), default=0) for row in rows]
        if self._truncation == "error":
            self._check(lengths)
            return FittedRows([list(row) for row in rows], {})
        fitted = [self._shorten(row, n) for row, n in zip(rows, lengths, strict=True)]
        n_dropped = fitted.count(None)
        n_truncated = sum(n > self.n_tokens for n in lengths) - n_dropped
        if (n_truncated or n_dropped) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._where}: {n_truncated + n_dropped} of {len(rows)} rows have more than {self.n_tokens:,} tokens "
                f"({self._limit_name}): {n_truncated} are truncated, {n_dropped} dropped. frac_truncated and "
                f"frac_dropped are their shares of every batch.",
                stacklevel=4,
            )
        return FittedRows(fitted, {"frac_truncated": n_truncated / len(rows), "frac_dropped": n_dropped / len(rows)})

    def check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Reject prompts that leave no room for a completion.

        Raises:
            WhetValueError: names the first such prompt.
        """
        for i, prompt in enumerate(prompts):
            if len(prompt) >= self.n_tokens:
                which = f"prompt {i}" if len(prompts) > 1 else "the prompt"
                raise WhetValueError(
                    f"{self._where}: {which} has {len(prompt):,} tokens, which leaves no room to generate: "
                    f"{self._limit_name} is {self.n_tokens:,}. Shorten or drop it."
                )

    def _check(self, lengths: Sequence[int]) -> None:
        for i, n in enumerate(lengths):
            if n > self.n_tokens:
                which = f"row {i} of the batch" if len(lengths) > 1 else "the row"
                raise WhetValueError(
                    f"{self._where}: {which} has {n:,} tokens, and {self._limit_name} is {self.n_tokens:,}. Shorten "
                    f"it, or set truncation to 'truncate' or 'drop'."
                )

    def _shorten(self, row: Sequence[Any], n_tokens: int) -> list[Any] | None:
        if n_tokens <= self.n_tokens:
            return list(row)
        room = int(self.n_tokens) - len(row[0])
        return [row[0], *(part[:room] for part in row[1:])] if self._truncation == "truncate" and room > 0 else None
