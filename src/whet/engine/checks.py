"""Check the arguments of an engine's calls against the model. Independent of the core and of sessions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from whet.config.sampling import SamplingParams
from whet.errors import WhetTypeError, WhetValueError, check_choice
from whet.models.architecture import ModelConfig

if TYPE_CHECKING:
    from whet.models.packed_base import PackedBase

LogprobsMode = Literal["sampling", "model"]


def check_token_rows(rows: Any, config: ModelConfig, where: str, name: str) -> list[np.ndarray]:
    """Convert rows of token ids to int32 arrays, each with at least one token.

    Raises:
        WhetTypeError: token ids that are not integers.
        WhetValueError: an empty row, a token outside the vocabulary, or more tokens than the model has positions.
    """
    if isinstance(rows, (str, bytes)) or not hasattr(rows, "__iter__"):
        raise WhetTypeError(f"{where}: {name} is a {type(rows).__name__}, expected rows of token ids.")
    return [check_token_row(row, config, where, f"{name}[{i}]") for i, row in enumerate(rows)]


def check_token_row(row: Any, config: ModelConfig, where: str, name: str) -> np.ndarray:
    """Convert one row, see ``check_token_rows``."""
    ids = np.asarray(row.tolist() if hasattr(row, "tolist") else row)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise WhetTypeError(f"{where}: {name} is not a row of integer token ids.")
    if not ids.size:
        raise WhetValueError(f"{where}: {name} is empty. Begin it with at least one token, such as BOS.")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        wrong = ids[(ids < 0) | (ids >= config.vocab_size)][0]
        raise WhetValueError(f"{where}: {name} holds token {wrong}, outside 0 ... {config.vocab_size - 1}.")
    if len(ids) > config.max_position:
        raise WhetValueError(
            f"{where}: {name} has {len(ids)} tokens, and the model's position limit is {config.max_position}."
        )
    return ids.astype(np.int32)


def check_can_continue(prompt: np.ndarray, config: ModelConfig, where: str, name: str) -> None:
    """Raise if a prompt leaves no room for a token.

    Raises:
        WhetValueError: naming the prompt.
    """
    if len(prompt) >= config.max_position:
        raise WhetValueError(
            f"{where}: {name} has {len(prompt)} tokens, which leaves no room to generate: the model's position "
            f"limit is {config.max_position}. Shorten or drop the prompt."
        )


def as_sampling(sampling: Any, where: str) -> SamplingParams:
    """Return the settings. Default: ``SamplingParams()``.

    Raises:
        WhetTypeError: ``sampling`` is not a SamplingParams.
    """
    if not isinstance(sampling, (SamplingParams, type(None))):
        raise WhetTypeError(f"{where}: sampling is a {type(sampling).__name__}, expected SamplingParams.")
    return sampling or SamplingParams()


def check_sampling(sampling: SamplingParams, config: ModelConfig, where: str) -> None:
    """Raise if a named token can never be sampled, or no token can be.

    Raises:
        WhetValueError: naming the setting and the token.
    """
    for name in ("stop_token_ids", "logit_bias"):
        if never_drawn := [token for token in getattr(sampling, name) if not 0 <= token < config.vocab_size]:
            raise WhetValueError(
                f"{where}: {name} holds {never_drawn[0]}, outside 0 ... {config.vocab_size - 1}, which is never "
                f"sampled. Pass ids of the model's tokenizer."
            )
    if sampling.min_new_tokens and len(set(sampling.stop_token_ids)) == config.vocab_size:
        raise WhetValueError(
            f"{where}: min_new_tokens is {sampling.min_new_tokens}, and stop_token_ids holds the whole vocabulary: no "
            f"token may be sampled. Remove some."
        )


def check_starts(start: int | Sequence[int], rows: Sequence[np.ndarray], where: str) -> list[int]:
    """Return the first scored token of each row, from 1 to its length.

    Raises:
        WhetValueError: a start is out of range, or their number is not the number of rows.
    """
    if not isinstance(start, (Integral, Iterable)):
        raise WhetTypeError(f"{where}: start is {start!r:.60}, expected an integer, or one for each row.")
    starts: list[Any] = list(start) if isinstance(start, Iterable) else [start] * len(rows)
    if len(starts) != len(rows):
        raise WhetValueError(f"{where}: start has {len(starts)} numbers, expected one for each of {len(rows)}.")
    for row, first in zip(rows, starts, strict=True):
        if not isinstance(first, Integral) or not 1 <= int(first) <= len(row):
            raise WhetValueError(f"{where}: start is {first} for a row of {len(row)}, expected 1 to that.")
    return [int(first) for first in starts]


def is_model_mode(mode: str, where: str) -> bool:
    """Whether ``logprobs_mode`` is "model".

    Raises:
        WhetValueError: an unknown mode.
    """
    check_choice(where, "logprobs_mode", mode, LogprobsMode)
    return mode == "model"


def check_same_base(mine: PackedBase | None, other: PackedBase | None, where: str) -> None:
    """Raise if a model's packed base is not the engine's.

    Raises:
        WhetValueError: naming which has a base.
    """
    if mine is other:
        return
    if mine is None:
        raise WhetValueError(
            f"{where}: the model is on a packed base, and the engine has separate weights. Make the engine with "
            f"Engine.from_base(base)."
        )
    whose = "has separate weights" if other is None else "is on another base"
    raise WhetValueError(
        f"{where}: the engine is on a packed base, and the model {whose}. Pass a model on engine.base, or make a new "
        f"engine for this one with Engine.from_model(model)."
    )


def check_same_model(mine: ModelConfig, other: ModelConfig, where: str) -> None:
    """Raise if a model is not the engine's.

    Raises:
        WhetValueError: naming the first field that differs.
    """
    for name, value in vars(mine).items():
        if value != getattr(other, name):
            raise WhetValueError(
                f"{where}: the model's {name} is {getattr(other, name)!r:.60}, the engine's {value!r:.60}. Make a new "
                f"engine for it."
            )
