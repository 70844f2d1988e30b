"""Reward and preference functions: called with the arguments they declare, checked, and summed.

A reward function gets, by name, what it declares of ``prompts``, ``completions``, ``completion_ids`` and
the dataset's other columns, and returns one number per completion, or None for a completion that it
does not score. It may be async. A failure is an error that names the function and the
sample, or, by policy, a score left out or set to zero.

Does not tokenise, does not normalise rewards, and defines no reward functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from whet.errors import RewardError, WhetTypeError, WhetValueError, is_number
from whet.rewards.processes import CallTimeout, call_here, call_in_children, summary

_BATCH_FIELDS = ("prompts", "completions", "completion_ids")


@dataclass
class RewardBatch:
    """The rewards of one batch.

    Attributes:
        rewards: (N,) float64, ``sum_f weight_f * score_f`` over the functions that scored the sample;
            NaN where none did.
        by_name: per function, its (N,) float64 scores without its weight; NaN = not scored.
        n_errors: samples, summed over functions, whose score the policy replaced.
    """

    rewards: np.ndarray
    by_name: dict[str, np.ndarray]
    n_errors: int


class RewardFunctions:
    """Several reward functions as one, with weights, a policy for errors, and an optional timeout.

    A function is called once per batch with the arguments it declares by name: ``prompts``,
    ``completions``, ``completion_ids``, any column; ``**kwargs`` gets all of them. A function with one required
    positional parameter of another name gets the completions in it. It returns a list,
    tuple, array or tensor of N numbers or Nones. Async functions run together, on an event loop that
    lives as long as the process, also where a loop is already running.

    After an exception the function is called again on halves of the batch, to tell the sample that
    raises from those that do not.

    Args:
        functions: one function or several; equal names get a suffix: ``score``, ``score_2``.
        weights: one finite number per function; None is 1 for each.
        on_error: the effect of an exception, a wrong length, a timeout, or a score that is no finite
            number: "raise" a RewardError, "skip" (the samples concerned are not scored by this
            function), or "zero" (they score 0). The last two warn once per function and are counted.
        timeout_s: seconds that one call may take. With it each call runs in a forked child process,
            all functions at once, torch there on one thread; the child and the processes it
            started are killed after the call, and its changes of memory are lost. None: called in this process.

    Raises:
        WhetTypeError: something in functions is not callable.
        WhetValueError: no functions, or weights, on_error or timeout_s out of range.
    """

    def __init__(
        self,
        functions: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        weights: Sequence[float] | None = None,
        on_error: Literal["raise", "skip", "zero"] = "raise",
        timeout_s: float | None = None,
    ) -> None:
        several = [functions] if callable(functions) else list(functions)
        if not several:
            raise WhetValueError("RewardFunctions: functions is empty. Pass at least one reward function.")
        for i, function in enumerate(several):
            if not callable(function):
                raise WhetTypeError(f"RewardFunctions: functions[{i}] is {function!r:.60}, expected a callable.")
        chosen = [1.0] * len(several) if weights is None else list(weights)
        if len(chosen) != len(several) or not all(map(is_number, chosen)):
            raise WhetValueError(
                f"RewardFunctions: weights is {weights!r}, expected {len(several)} finite numbers, one per function."
            )
        if on_error not in ("raise", "skip", "zero"):
            raise WhetValueError(f"RewardFunctions: on_error is {on_error!r}, expected 'raise', 'skip' or 'zero'.")
        if timeout_s is not None and not (is_number(timeout_s) and timeout_s > 0):
            raise WhetValueError(f"RewardFunctions: timeout_s is {timeout_s!r}, expected seconds > 0, or None.")
        if timeout_s is not None and not hasattr(os, "fork"):
            raise WhetValueError("RewardFunctions: timeout_s needs os.fork, which this system lacks. Pass None.")
        self.functions = dict(zip(_unique_names(several), several, strict=True))
        self.weights = np.array(chosen, np.float64)
        self.on_error = on_error
        self.timeout_s = timeout_s
        self._warned: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The functions' names, in order: the keys of ``RewardBatch.by_name``."""
        return list(self.functions)

    def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
    ) -> RewardBatch:
        """Score N completions.

        Args:
            prompts: N prompts, in the form the functions expect.
            completions: N completions, in the form the functions expect.
            completion_ids: N rows of token ids.
            columns: further columns of the dataset, N values each.

        Raises:
            RewardError: a function failed and ``on_error`` is "raise", or it requires an argument that
                does not exist.
            WhetValueError: no completions, lengths that differ, or a column named like one of the
                three other arguments.
        """
        reserved = [name for name in columns if name in _BATCH_FIELDS]
        if reserved:
            raise WhetValueError(
                f"RewardFunctions: columns has {reserved[0]!r}, which is an argument of its own. "
                f"Rename that column of the dataset."
            )
        data = dict(zip(_BATCH_FIELDS, (prompts, completions, completion_ids), strict=True)) | dict(columns)
        n = len(completions)
        for name, values in data.items():
            if len(values) != n or n == 0:
                raise WhetValueError(
                    f"RewardFunctions: {name} has {len(values)} values and completions has {n}. "
                    f"Pass one value per completion, at least one."
                )
        by_name: dict[str, np.ndarray] = {}
        n_errors = 0
        for name, outcome in zip(self.names, self._outcomes(self.names, data), strict=True):
            scores = np.full(n, np.nan)
            problems = self._problems(name, data, list(range(n)), outcome, scores)
            n_errors += self._apply_policy(name, data, problems, outcome, scores)
            by_name[name] = scores
        table = np.stack(list(by_name.values()))
        total = np.where(np.isnan(table), 0.0, self.weights[:, None] * table).sum(axis=0)
        return RewardBatch(np.where(np.isnan(table).all(axis=0), np.nan, total), by_name, n_errors)

    def _apply_policy(
        self,
        name: str,
        data: Mapping[str, Sequence[Any]],
        problems: Iterator[_Problem],
        outcome: _Scored | BaseException,
        scores: np.ndarray,
    ) -> int:
        """Raise the first problem, or replace the scores of all; how many scores were replaced."""
        if self.on_error == "raise":
            problem = next(problems, None)
            if problem is None and isinstance(outcome, BaseException):
                what = f"it raised {summary(outcome)}, and on no smaller part of the batch"
                problem = _Problem(list(range(len(scores))), what, outcome)
            if problem is not None:
                fix = "Return a finite number or None per completion, or pass on_error='skip' or 'zero'."
                raise RewardError(f"{problem.message(name, data)} {fix}") from problem.cause
            return 0
        found = list(problems)
        for problem in found:
            scores[problem.indices] = np.nan if self.on_error == "skip" else 0.0
        if found and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{found[0].message(name, data)} on_error={self.on_error!r} applies; there is no further warning.",
                stacklevel=3,
            )
        return sum(len(problem.indices) for problem in found)

    def _problems(
        self,
        name: str,
        data: Mapping[str, Sequence[Any]],
        indices: list[int],
        outcome: _Scored | BaseException,
        scores: np.ndarray,
    ) -> Iterator[_Problem]:
        """Write the scores of the samples ``indices`` and yield their failures, bisecting after exceptions."""
        if isinstance(outcome, _Scored) and outcome.whole is not None:
            yield _Problem(indices, outcome.whole, None)
        elif isinstance(outcome, _Scored):
            scores[indices] = [np.nan if value is None else value for value in outcome.values]
            for i, what in outcome.faults:
                yield _Problem([indices[i]], what, None)
        elif isinstance(outcome, CallTimeout):
            yield _Problem(indices, str(outcome), outcome)
        elif len(indices) == 1:
            yield _Problem(indices, f"it raised {summary(outcome)}", outcome)
        else:
            middle = len(indices) // 2
            for half in (indices[:middle], indices[middle:]):
                part = {key: [values[i] for i in half] for key, values in data.items()}
                [again] = self._outcomes([name], part)
                yield from self._problems(name, data, half, again, scores)

    def _outcomes(self, names: list[str], data: Mapping[str, Sequence[Any]]) -> list[_Scored | BaseException]:
        """Call the named functions on ``data``: the result of each, or its exception."""
        n = len(data["completions"])
        calls = [_bind_arguments(name, self.functions[name], data) for name in names]
        check = partial(_check_scores, n)
        if self.timeout_s is None:
            return [r if isinstance(r, BaseException) else check(r) for r in call_here(calls)]
        results = call_in_children(calls, check, self.timeout_s)
        return [r if isinstance(r, BaseException) else _Scored(*r) for r in results]


RewardFn = Callable[..., Any] | Sequence[Callable[..., Any]] | RewardFunctions


def call_preference(preference_fn: Callable[..., Any], pairs: Sequence[tuple[Any, Any]]) -> list[int | None]:
    """Ask which completion of each pair is preferred: 0 the first, 1 the second, None neither (a tie).

    ``preference_fn`` takes the pairs and may be async.

    Raises:
        RewardError: it raised, or did not return 0, 1 or None for each pair.
    """
    [name] = _unique_names([preference_fn])
    [result] = call_here([partial(preference_fn, pairs)])
    if isinstance(result, BaseException):
        raise RewardError(
            f"call_preference: {name} raised {summary(result)} on pairs 0 to {len(pairs) - 1}."
        ) from result
    values = _as_list(result)
    if values is None or len(values) != len(pairs):
        got = type(result).__name__ if values is None else f"{len(values)} preferences"
        raise RewardError(f"call_preference: {name} returned {got} for {len(pairs)} pairs, expected one per pair.")

    for i, value in enumerate(values):
        if value is not None and not (hasattr(value, "__index__") and operator.index(value) in (0, 1)):
            raise RewardError(
                f"call_preference: {name} gave {value!r:.60} for pair {i}, expected 0 (the first is "
                f"preferred), 1 (the second) or None (a tie)."
            )
    return [None if value is None else operator.index(value) for value in values]


def load_function(spec: str) -> Callable[..., Any]:
    """The function that ``"package.module:name"`` or ``"path/file.py:name"`` names.

    Raises:
        WhetValueError: the text has another form, the module or file cannot be imported, or it has
            no callable of that name.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name.isidentifier():
        raise WhetValueError(
            f"load_function: {spec!r} is not of the form 'package.module:name' or 'path/file.py:name'."
        )
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        hint = "" if where.endswith(".py") else " A file that is not installed is named 'path/file.py:name'."
        raise WhetValueError(f"load_function: cannot import {where!r}: {summary(error)}.{hint}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v)) or "no functions"
        raise WhetValueError(f"load_function: {where!r} has nothing callable named {name!r}; it has {there}.")
    return function


class _Problem(NamedTuple):
    """Samples that one function failed on, how, and the exception behind it, if any."""

    indices: list[int]
    what: str
    cause: BaseException | None

    def message(self, name: str, data: Mapping[str, Sequence[Any]]) -> str:
        first, last = self.indices[0], self.indices[-1]
        completion = f"completion {data['completions'][first]!r:.80}"
        where = f"sample {first} ({completion})" if first == last else f"samples {first} to {last}"
        return f"RewardFunctions: {name} failed on {where}: {self.what}."


class _Scored(NamedTuple):
    """The result of a function: a score or None per sample; faults (sample, message); or one fault of the whole."""

    values: list[float | None]
    faults: list[tuple[int, str]]
    whole: str | None = None


def _as_list(result: Any) -> list[Any] | None:
    """A list, tuple, array or tensor as a list; None for anything else."""
    if hasattr(result, "tolist") and getattr(result, "ndim", 0) > 0:
        return result.tolist()
    return list(result) if isinstance(result, (list, tuple)) else None


def _check_scores(n: int, result: Any) -> _Scored:
    """Check the result of a function for ``n`` samples."""
    values = _as_list(result)
    if values is None:
        return _Scored([], [], f"it returned {type(result).__name__}, expected a list of {n} numbers")
    if len(values) != n:
        return _Scored([], [], f"it returned {len(values)} scores for {n} completions")
    scores = [as_score(value) for value in values]
    bad = [i for i, score in enumerate(scores) if score is not None and not math.isfinite(score)]
    faults = [(i, f"it gave {values[i]!r:.60}, which is no finite number") for i in bad]
    return _Scored([None if i in set(bad) else score for i, score in enumerate(scores)], faults)


def as_score(value: Any) -> float | None:
    """``value`` as a float; None stays None, and anything that is no number becomes NaN."""
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or getattr(value, "ndim", 0):
        return math.nan
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except Exception:
        return math.nan


def _unique_names(functions: Sequence[Callable[..., Any]]) -> list[str]:
    names: list[str] = []
    for function in functions:
        bare = function.func if isinstance(function, partial) else function
        base = getattr(bare, "__name__", type(bare).__name__)
        name, count = base, 1
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names.append(name)
    return names


def _bind_arguments(name: str, function: Callable[..., Any], data: Mapping[str, Sequence[Any]]) -> Callable[[], Any]:
    """``function`` with the arguments it declares."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some builtins have no signature
        return partial(function, data["completions"])
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = {p.name: data[p.name] for p in by_name if p.name in data}
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p for p in required if p.name not in named]
    positional = [p for p in required if p.kind is not p.KEYWORD_ONLY]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        named = dict(data)
    if not missing:
        return partial(function, **named)
    if missing == positional[:1] and len(positional) == 1:
        return partial(function, data["completions"], **named)
    raise RewardError(
        f"RewardFunctions: {name} requires {missing[0].name!r}, and there is no such column. "
        f"There are: {', '.join(sorted(data))}."
    )


def _import_file(path: Path) -> Any:
    """Import the file ``path`` under a name of its own."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"whet_loaded_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
