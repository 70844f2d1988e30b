"""The parts of a benchmark: a suite of tables, a table of cases, and the providers that answer each case.

A suite is one short module in ``suites/`` with a ``SUITE``; it is registered nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Call = Callable[[], Any]
"""The function that is timed: takes nothing, returns the answer."""


class NotMeasured(Exception):
    """Raised by a provider that cannot answer a case, with the reason that the report shows."""


@dataclass(frozen=True)
class Provider:
    """A contender.

    Attributes:
        name: as the report shows it: "whet", "rlox (loop)", "torch float32".
        prepare: takes the case's inputs, and returns the call to be timed. It imports its library itself: an
            ImportError means that it is not measured.
        reference: what this provider should answer, where that is not the case's reference (another definition of
            the same thing).
        tolerance: in place of the case's, for a provider that computes in a narrower dtype.
        note: what is particular about it, shown under the table.
    """

    name: str
    prepare: Callable[[Any], Call]
    reference: Callable[[Any], Any] | None = None
    tolerance: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One size of one piece of work.

    Attributes:
        name: unique in its table: "256 x 16".
        inputs: makes the inputs from a seeded generator; providers get what it returns.
        reference: the right answer from the inputs, in float64 or wider.
        tolerance: largest error that passes, as ``Table.error`` defines it.
        n_bytes: bytes that have to move: each input read once, each result written once.
        n_flops: floating-point operations that have to be done, a multiply-add counted as two. Leave out (0) what has
            no agreed count, such as an exponential.
        flop_dtype: which rate bounds them: float32, float64, bfloat16 or int8.
        footprint: bytes touched in all, which decides the cache level that bounds n_bytes; 0: n_bytes.
        cache: "warm": the inputs were just used; "cold": everything was pushed out of the caches before the call.
        n_items: how many items (``Table.item``, tokens for one) the case handles; shown per second.
        size: place on the x axis of the scaling plot; None: not in the plot.
        thread_scaling: measured again on fewer threads, for the plot over threads.
        published: provider -> seconds that a publication gives for this row, on whatever machine it used.
        note: shown beside the row.
    """

    name: str
    inputs: Callable[[np.random.Generator], Any]
    reference: Callable[[Any], Any]
    tolerance: float
    n_bytes: float = 0
    n_flops: float = 0
    flop_dtype: Literal["float32", "float64", "bfloat16", "int8"] = "float32"
    footprint: float = 0
    cache: Literal["warm", "cold"] = "warm"
    n_items: float = 0
    size: float | None = None
    thread_scaling: bool = False
    published: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def to_array(answer: Any) -> np.ndarray:
    """An answer in float64, of NumPy or torch, which alone has bfloat16."""
    return np.asarray(answer.double() if hasattr(answer, "double") else answer, np.float64)


def relative_error(answer: Any, reference: Any) -> float:
    """max |answer - reference| / max(1, |reference|); infinite where shapes differ or only one is NaN."""
    got, right = to_array(answer), np.asarray(reference, np.float64)
    if got.shape != right.shape or not np.array_equal(np.isfinite(got), np.isfinite(right)):
        return float("inf")
    finite = np.isfinite(right)
    if not np.array_equal(got[~finite], right[~finite], equal_nan=True):
        return float("inf")
    errors = np.abs(got[finite] - right[finite]) / np.maximum(1.0, np.abs(right[finite]))
    return float(errors.max(initial=0.0))


@dataclass(frozen=True)
class Table:
    """Cases that the same providers answer.

    Attributes:
        title: unique in its suite.
        cases: by rising size.
        providers: the first is the subject of the ratios, Whet as a rule.
        allocation: what of allocation is inside the timing: "inside: the result is a new array".
        note: what a reader must know, in a sentence or two.
        item: what ``Case.n_items`` counts: "tokens".
        size_label: what ``Case.size`` is: "tokens per sequence".
        peak_memory: whether a call's peak memory is measured too.
        error: (answer, reference) -> a number, 0 for a perfect answer, compared with the tolerance.
    """

    title: str
    cases: Sequence[Case]
    providers: Sequence[Provider]
    allocation: str
    note: str = ""
    item: str = ""
    size_label: str = ""
    peak_memory: bool = False
    error: Callable[[Any, Any], float] = relative_error


@dataclass(frozen=True)
class Timed:
    """The return value of a call that also timed its own parts.

    Attributes:
        value: its answer.
        parts: the seconds of each part.
        counted: the part that is the call's sample, where the rest is not what is measured; "": the whole call.
        note: what the provider chose for this case, shown under the table.
        peak_bytes: peak memory of the call, where only the provider can measure it.
    """

    value: Any
    parts: Mapping[str, float]
    counted: str = ""
    note: str = ""
    peak_bytes: int | None = None


@dataclass(frozen=True)
class WholeRun:
    """The return value of a call that is made once: a run of a process of its own, from its start to its end.

    Attributes:
        value: its answer.
        samples_s: the seconds of each of its steps that counts, which are the row's samples.
        start_s: the seconds from the start of the process to its first step.
        parts: the seconds of the parts of each of these steps.
        peak_bytes: the most memory that the process ever had; None where the system does not tell.
        memory: who held it in the fullest step, by the names in ``whet.memory.PARTS``; empty: unknown.
        curve: (step, score) of a run that learns.
    """

    value: Any
    samples_s: Sequence[float]
    start_s: float
    parts: Mapping[str, Sequence[float]]
    peak_bytes: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    curve: Sequence[tuple[int, float]] = ()


def seconds_of(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result of ``work(*arguments)``, and the seconds it took."""
    started = time.perf_counter()
    answer = work(*arguments)
    return answer, time.perf_counter() - started


@dataclass(frozen=True)
class BenchOptions:
    """Settings of a benchmark run."""

    quick: bool = False
    """Fewer rounds, and only what is quick to measure."""
    only: str = ""
    """Only the rows whose "table / case" contains this, whatever the case of the letters."""
    peers: tuple[str, ...] = ()
    """Only these providers beside Whet, by the beginning of their name; all, if none is given."""
    threads: int = 0
    """Threads of every provider alike; 0: one per processor of this process."""
    out: str = ""
    """Folder for results.json, report.md, report.html and the plots; runs/bench/SUITE if not given."""
    seed: int = 0
    """Of the inputs, and of the order in which providers take turns."""


@dataclass(frozen=True)
class Suite:
    """The tables of ``whet bench NAME``.

    Attributes:
        name: as on the command line.
        title: heading of the report.
        summary: a sentence or two under it.
        tables: the tables, from the options.
        options: dataclass of the options; a subclass of ``BenchOptions`` where the suite has its own.
    """

    name: str
    title: str
    summary: str
    tables: Callable[[Any], Sequence[Table]]
    options: type[BenchOptions] = BenchOptions
