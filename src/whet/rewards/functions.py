"""Calls reward and preference functions with the arguments they declare, checks their results, and sums rewards.

A reward function declares by name which of ``prompts``, ``completions``, ``completion_ids`` and the dataset's other
columns it gets. It returns a number per completion, or None for completions that it does not score, and may be async. A
RewardError in place of a number is a completion that could not be scored.
Depending on the policy, a failure is an error that names the function and the sample, or the score is skipped or zero.

Does not tokenise or normalise rewards, and defines no reward functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from whet.errors import RewardError, WhetTypeError, WhetValueError, is_number
from whet.rewards.processes import CallTimeout, call_here, call_in_children, check_timeout, summary

_BATCH_FIELDS = ("prompts", "completions", "completion_ids")


@dataclass
class RewardBatch:
    """The rewards of a batch.

    Attributes:
        rewards: (N,) float64, ``sum_f weight_f * score_f`` over the functions that scored the sample; NaN without any.
        by_name: function name -> (N,) float64 unweighted scores; NaN: not scored.
        n_errors: number of scores that the policy replaced, or that are a RewardError, over all functions.
    """

    rewards: np.ndarray
    by_name: dict[str, np.ndarray]
    n_errors: int


class RewardFunctions:
    """Several reward functions as one, with weights, a policy for errors, and an optional timeout.

    A function is called once per batch with the arguments that it declares by name: ``prompts``, ``completions``,
    ``completion_ids``, any column; ``**kwargs`` gets all of them. If a function has one required positional parameter
    with another name, that parameter gets the completions. A function returns a list, tuple, array or tensor of N
    numbers or Nones. Async functions run concurrently on an event loop that lives as long as the process, even if
    another loop is running.

    After an exception the function is called again on halves of the batch, to find the samples that raise.

    Args:
        functions: one function or several; equal names get a suffix: ``score``, ``score_2``.
        weights: a finite number per function. None: 1 for each.
        on_error: policy for exceptions, wrong lengths, timeouts and scores that are not finite numbers: "raise" a
            RewardError, "skip" (the function does not score these samples), or "zero" (they score 0). "skip" and
            "zero" warn once per function and count the errors.
        timeout_s: time limit of a call in seconds. Each call then runs in a forked child process, all functions in
            parallel, with torch on one thread; after the call the child and its descendants are killed, and its
            changes of memory are lost. None: calls run in this process.

    Raises:
        WhetTypeError: an entry of functions is not callable.
        WhetValueError: there are no functions, or weights, on_error or timeout_s is out of range.
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
        values = [1.0] * len(several) if weights is None else list(weights)
        if len(values) != len(several) or not all(map(is_number, values)):
            raise WhetValueError(
                f"RewardFunctions: weights is {weights!r}, expected {len(several)} finite numbers, one per function."
            )
        if on_error not in ("raise", "skip", "zero"):
            raise WhetValueError(f"RewardFunctions: on_error is {on_error!r}, expected 'raise', 'skip' or 'zero'.")
        check_timeout("RewardFunctions", "timeout_s", timeout_s)
        self.functions = dict(zip(_unique_names(several), several, strict=True))
        self.weights = np.array(values, np.float64)
        self.on_error = on_error
        self.timeout_s = timeout_s
        self._warned: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Names of the functions, in order: the keys of ``RewardBatch.by_name``."""
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
            prompts: N prompts, in the form that the functions expect.
            completions: N completions, in the form that the functions expect.
            completion_ids: token ids of N completions.
            columns: other columns of the dataset, N values each.

        Raises:
            RewardError: a function failed and ``on_error`` is "raise", or it requires an argument that does not exist.
            WhetValueError: there are no completions, lengths differ, or a column has the name of another argument.
        """
        reserved = [name for name in columns if name in _BATCH_FIELDS]
        if reserved:
            raise WhetValueError(
                f"RewardFunctions: columns has {reserved[0]!r}, which is the name of another argument. "
                f"Rename that column of the dataset."
            )
        data = dict(zip(_BATCH_FIELDS, (prompts, completions, completion_ids), strict=True)) | dict(columns)
        n = len(completions)
        for name, values in data.items():
            if len(values) != n or n == 0:
                raise WhetValueError(
                    f"RewardFunctions: {name} has {len(values)} values, but completions has {n}. "
                    f"Pass one value per completion, at least one."
                )
        by_name: dict[str, np.ndarray] = {}
        n_errors = 0
        for name, outcome in zip(self.names, self._outcomes(self.names, data), strict=True):
            scores = np.full(n, np.nan)
            failures = self._find_failures(name, data, list(range(n)), outcome, scores)
            n_errors += self._apply_policy(name, data, failures, outcome, scores)
            n_errors += outcome.n_unscored if isinstance(outcome, _Checked) else 0
            by_name[name] = scores
        table = np.stack(list(by_name.values()))
        total = np.where(np.isnan(table), 0.0, self.weights[:, None] * table).sum(axis=0)
        return RewardBatch(np.where(np.isnan(table).all(axis=0), np.nan, total), by_name, n_errors)

    def _apply_policy(
        self,
        name: str,
        data: Mapping[str, Sequence[Any]],
        failures: Iterator[_Failure],
        outcome: _Checked | BaseException,
        scores: np.ndarray,
    ) -> int:
        """Raise the first failure, or replace the scores of all failures and return their number."""
        if self.on_error == "raise":
            failure = next(failures, None)
            if failure is None and isinstance(outcome, BaseException):
                reason = f"it raised {summary(outcome)}, but not on parts of the batch"
                failure = _Failure(list(range(len(scores))), reason, outcome)
            if failure is not None:
                fix = "Return a finite number or None per completion, or pass on_error='skip' or 'zero'."
                raise RewardError(f"{failure.message(name, data)} {fix}") from failure.cause
            return 0
        found = list(failures)
        for failure in found:
            scores[failure.indices] = np.nan if self.on_error == "skip" else 0.0
        if found and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{found[0].message(name, data)} on_error={self.on_error!r} applies; further warnings are suppressed.",
                stacklevel=3,
            )
        return sum(len(failure.indices) for failure in found)

    def _find_failures(
        self,
        name: str,
        data: Mapping[str, Sequence[Any]],
        indices: list[int],
        outcome: _Checked | BaseException,
        scores: np.ndarray,
    ) -> Iterator[_Failure]:
        """Write the scores of the samples ``indices`` and yield their failures; after an exception, bisect."""
        if isinstance(outcome, _Checked) and outcome.batch_fault is not None:
            yield _Failure(indices, outcome.batch_fault, None)
        elif isinstance(outcome, _Checked):
            scores[indices] = [np.nan if value is None else value for value in outcome.values]
            for i, reason in outcome.faults:
                yield _Failure([indices[i]], reason, None)
        elif isinstance(outcome, CallTimeout):
            yield _Failure(indices, str(outcome), outcome)
        elif len(indices) == 1:
            yield _Failure(indices, f"it raised {summary(outcome)}", outcome)
        else:
            middle = len(indices) // 2
            for half in (indices[:middle], indices[middle:]):
                part = {key: [values[i] for i in half] for key, values in data.items()}
                [again] = self._outcomes([name], part)
                yield from self._find_failures(name, data, half, again, scores)

    def _outcomes(self, names: list[str], data: Mapping[str, Sequence[Any]]) -> list[_Checked | BaseException]:
        """Call the named functions on ``data``: the result of each, or its exception."""
        n = len(data["completions"])
        calls = [_bind_arguments(name, self.functions[name], data) for name in names]
        check = partial(_check_scores, n)
        if self.timeout_s is None:
            return [r if isinstance(r, BaseException) else check(r) for r in call_here(calls)]
        results = call_in_children(calls, check, self.timeout_s)
        return [r if isinstance(r, BaseException) else _Checked(*r) for r in results]


RewardFn = Callable[..., Any] | Sequence[Callable[..., Any]] | RewardFunctions


def call_preference(
    preference_fn: Callable[..., Any], pairs: Sequence[tuple[Any, Any]], prompts: Sequence[Any] = ()
) -> list[int | None]:
    """Return which completion of each pair is preferred: 0 the first, 1 the second, None a tie.

    ``preference_fn`` takes the pairs, and their ``prompts`` if it has a parameter of this name, and may be async.

    Raises:
        RewardError: the function raised, or did not return 0, 1 or None for each pair.
    """
    try:
        takes_prompts = "prompts" in inspect.signature(preference_fn).parameters
    except ValueError:  # some builtins have no signature
        takes_prompts = False
    call = partial(preference_fn, pairs, **({"prompts": prompts} if takes_prompts else {}))
    [name] = _unique_names([preference_fn])
    values = _call_for_each(call, f"call_preference: {name}", "preferences", len(pairs), "pair")
    for i, value in enumerate(values):
        if value is not None and not (hasattr(value, "__index__") and operator.index(value) in (0, 1)):
            raise RewardError(
                f"call_preference: {name} returned {value!r:.60} for pair {i}, expected 0 (the first is "
                f"preferred), 1 (the second) or None (a tie)."
            )
    return [None if value is None else operator.index(value) for value in values]


def call_feedback(
    function: Callable[..., Any], *, prompts: Sequence[Any], completions: Sequence[Any],
    completion_ids: Sequence[Any], columns: Mapping[str, Sequence[Any]],
) -> list[str | None]:  # fmt: skip
    """Return the text that a feedback function gives each of N completions, such as an error message; None: none.

    The function declares the arguments that it gets by name, as a reward function, and may be async.

    Raises:
        RewardError: the function raised, or did not return a text or None for each completion.
    """
    [name] = _unique_names([function])
    data = dict(zip(_BATCH_FIELDS, (prompts, completions, completion_ids), strict=True)) | dict(columns)
    call = _bind_arguments(name, function, data)
    values = _call_for_each(call, f"call_feedback: {name}", "texts", len(completions), "completion")
    for i, value in enumerate(values):
        if not (value is None or isinstance(value, str)):
            raise RewardError(
                f"call_feedback: {name} returned {value!r:.60} for completion {i}, expected a text, or None."
            )
    return values


def _call_for_each(call: Callable[[], Any], who: str, values: str, n: int, item: str) -> list[Any]:
    """Return the n values of a call, one for each item, such as the preferences of pairs."""
    [result] = call_here([call])
    if isinstance(result, BaseException):
        raise RewardError(f"{who} raised {summary(result)} on {item}s 0 to {n - 1}.") from result
    found = _as_list(result)
    if found is None or len(found) != n:
        returned = type(result).__name__ if found is None else f"{len(found)} {values}"
        raise RewardError(f"{who} returned {returned} for {n} {item}s, expected one per {item}.")
    return found


def load_function(spec: str) -> Callable[..., Any]:
    """Import the function that ``"package.module:name"`` or ``"path/file.py:name"`` names.

    Raises:
        WhetValueError: the text is malformed, the module or file cannot be imported, or it has no such callable.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name.isidentifier():
        raise WhetValueError(
            f"load_function: {spec!r} is not of the form 'package.module:name' or 'path/file.py:name'."
        )
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        hint = "" if where.endswith(".py") else " Name a file that is not installed as 'path/file.py:name'."
        raise WhetValueError(f"load_function: cannot import {where!r}: {summary(error)}.{hint}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v)) or "none"
        raise WhetValueError(f"load_function: {where!r} has no callable {name!r}. Functions: {functions}.")
    return function


class _Failure(NamedTuple):
    """Samples on which a function failed, the reason, and the exception, if any."""

    indices: list[int]
    reason: str
    cause: BaseException | None

    def message(self, name: str, data: Mapping[str, Sequence[Any]]) -> str:
        first, last = self.indices[0], self.indices[-1]
        completion = f"completion {data['completions'][first]!r:.80}"
        where = f"sample {first} ({completion})" if first == last else f"samples {first} to {last}"
        return f"RewardFunctions: {name} failed on {where}: {self.reason}."


class _Checked(NamedTuple):
    """Checked result of a function: a score or None per sample, faults as (sample, reason), or a fault of the batch;
    and the number of RewardErrors in place of scores."""

    values: list[float | None]
    faults: list[tuple[int, str]]
    batch_fault: str | None = None
    n_unscored: int = 0


def _as_list(result: Any) -> list[Any] | None:
    """Convert a list, tuple, array or tensor to a list; None for other types."""
    if hasattr(result, "tolist") and getattr(result, "ndim", 0) > 0:
        return result.tolist()
    return list(result) if isinstance(result, (list, tuple)) else None


def _check_scores(n: int, result: Any) -> _Checked:
    """Check the result of a function for ``n`` samples."""
    values = _as_list(result)
    if values is None:
        return _Checked([], [], f"it returned {type(result).__name__}, expected a list of {n} numbers")
    if len(values) != n:
        return _Checked([], [], f"it returned {len(values)} scores for {n} completions")
    n_unscored = sum(isinstance(value, RewardError) for value in values)
    scores = [None if isinstance(value, RewardError) else as_score(value) for value in values]
    bad = [i for i, score in enumerate(scores) if score is not None and not math.isfinite(score)]
    faults = [(i, f"it returned {values[i]!r:.60}, which is not a finite number") for i in bad]
    return _Checked([None if i in set(bad) else s for i, s in enumerate(scores)], faults, n_unscored=n_unscored)


def as_score(value: Any) -> float | None:
    """Convert ``value`` to a float; None stays None, and values that are not numbers become NaN."""
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
    """Bind the arguments that a function declares."""
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
        f"RewardFunctions: {name} requires {missing[0].name!r}, but there is no such column. "
        f"Columns: {', '.join(sorted(data))}."
    )


def _import_file(path: Path) -> Any:
    """Import the file ``path`` under a separate module name."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"whet_loaded_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
