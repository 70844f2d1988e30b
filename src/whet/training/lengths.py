"""The longest row that is trained, and what happens to longer ones: an error, or they are cut or left out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from whet.config.settings import TrainerConfig
from whet.errors import WhetValueError
from whet.nn.modules import position_limit


class Fitted(NamedTuple):
    """Rows within a limit.

    Attributes:
        rows: each as it is, or cut; None where it is left out.
        metrics: ``frac_cut`` and ``frac_dropped``, shares of the rows, where longer ones are no error.
    """

    rows: list[list[Any] | None]
    metrics: dict[str, float]


class LengthLimit:
    """Fits rows of token ids into a number of tokens.

    Args:
        model: its last position is the limit, where the settings have no ``max_length``.
        config: ``max_length`` and ``truncation``, of an algorithm that has them; longer rows of others are an error.
        where: the algorithm's name, for errors.

    Attributes:
        n_tokens: the longest row.

    Raises:
        WhetValueError: ``max_length`` is past the model's last position.
    """

    def __init__(self, model: nn.Module, config: TrainerConfig, where: str) -> None:
        max_length, positions = getattr(config, "max_length", 0), position_limit(model)
        if positions is not None and max_length > positions:
            raise WhetValueError(f"{where}: max_length is {max_length}, and the model's last position is {positions}.")
        self.n_tokens = max_length or positions or math.inf
        self._what = "max_length" if max_length else "the model's last position"
        self._truncation, self._where = getattr(config, "truncation", "error"), where
        self._has_warned = False

    def fit(self, rows: Sequence[Sequence[Any]]) -> Fitted:
        """Rows within the limit; each is a prompt and its completions, perhaps with masks of their tokens.

        A cut row loses the ends of its completions; one whose prompt leaves no room for them is left out.

        Raises:
            WhetValueError: a row is longer, and ``truncation`` is "error".
        """
        lengths = [len(row[0]) + max(map(len, row[1:]), default=0) for row in rows]
        if self._truncation == "error":
            self._check(lengths)
            return Fitted([list(row) for row in rows], {})
        fitted = [self._shorten(row, n) for row, n in zip(rows, lengths, strict=True)]
        n_dropped = fitted.count(None)
        n_cut = sum(n > self.n_tokens for n in lengths) - n_dropped
        if (n_cut or n_dropped) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._where}: {n_cut + n_dropped} of {len(rows)} rows have more than {self.n_tokens:,} tokens "
                f"({self._what}): {n_cut} are cut, {n_dropped} left out. frac_cut and frac_dropped are their shares "
                f"of every batch.",
                stacklevel=4,
            )
        return Fitted(fitted, {"frac_cut": n_cut / len(rows), "frac_dropped": n_dropped / len(rows)})

    def check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a completion.

        Raises:
            WhetValueError: naming the first one.
        """
        for i, prompt in enumerate(prompts):
            if len(prompt) >= self.n_tokens:
                which = f"prompt {i}" if len(prompts) > 1 else "the prompt"
                raise WhetValueError(
                    f"{self._where}: {which} has {len(prompt):,} tokens, which leaves no room to generate: "
                    f"{self._what} is {self.n_tokens:,}. Shorten or drop it."
                )

    def _check(self, lengths: Sequence[int]) -> None:
        for i, n in enumerate(lengths):
            if n > self.n_tokens:
                which = f"row {i} of the batch" if len(lengths) > 1 else "the row"
                raise WhetValueError(
                    f"{self._where}: {which} has {n:,} tokens, and {self._what} is {self.n_tokens:,}. Shorten it, or "
                    f"set truncation to 'cut' or 'drop'."
                )

    def _shorten(self, row: Sequence[Any], n_tokens: int) -> list[Any] | None:
        if n_tokens <= self.n_tokens:
            return list(row)
        room = int(self.n_tokens) - len(row[0])
        return [row[0], *(part[:room] for part in row[1:])] if self._truncation == "cut" and room > 0 else None
