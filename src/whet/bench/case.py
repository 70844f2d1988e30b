"""Parts of a benchmark: a suite has tables, a table has cases, and providers answer each case.

A suite is one short module in a ``suites`` folder with a ``SUITE``; there is no other registration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Call = Callable[[], Any]
"""The timed function: it takes no arguments and returns the answer. Every call except the first does the work
``n_repeats`` times, if it has this attribute."""


class NotMeasured(Exception):
    """A provider does not support a case; the message is the reason in the report."""


@dataclass(frozen=True)
class Provider:
    """A contender.

    Attributes:
        name: name in the report: "whet", "rlox (loop)", "torch float32".
        prepare: takes the case's inputs and returns the call to be timed. It imports its library itself: after an
            ImportError the provider is not measured.
        reference: reference answer of a provider with a different definition; None: the case's reference.
        tolerance: tolerance of a provider that computes in a narrower dtype; None: the case's tolerance.
        note: remark shown under the table.
    """

    name: str
    prepare: Callable[[Any], Call]
    reference: Callable[[Any], Any] | None = None
    tolerance: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One size of a workload.

    Attributes:
        name: unique in its table: "256 x 16".
        inputs: creates the inputs from a seeded generator; they are passed to providers.
        reference: computes the correct answer from the inputs, in float64 or wider.
        tolerance: largest error that passes, as defined by ``Table.error``.
        n_bytes: minimum memory traffic: each input read once, each result written once.
        n_flops: floating-point operations, a multiply-add counted as two; operations without an agreed count, such as
            exponentials, do not count.
        flop_dtype: dtype whose FMA rate bounds n_flops: float32, float64, bfloat16 or int8.
        footprint: total bytes touched, which determine the cache level that bounds n_bytes; 0: n_bytes.
        device: where the answers are computed: "cpu", or a CUDA device, whose ceilings then bound the case. A batch of
            calls ends when the device is done.
        cache: "warm": the inputs were just used; "cold": the caches are evicted before the call.
        n_items: number of items (``Table.item``, such as tokens) in the case; reported per second.
        size: position on the x axis of the scaling plot; None: not in the plot.
        thread_scaling: whether to measure the case on fewer threads too, for the plot over threads.
        published: provider -> seconds published for this row, on the publication's machine.
        note: remark about the row.
    """

    name: str
    inputs: Callable[[np.random.Generator], Any]
    reference: Callable[[Any], Any]
    tolerance: float
    n_bytes: float = 0
    n_flops: float = 0
    flop_dtype: Literal["float32", "float64", "bfloat16", "int8"] = "float32"
    footprint: float = 0
    device: str = "cpu"
    cache: Literal["warm", "cold"] = "warm"
    n_items: float = 0
    size: float | None = None
    thread_scaling: bool = False
    published: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def to_array(answer: Any) -> np.ndarray:
    """Convert an answer of NumPy or torch, including bfloat16 tensors, to float64."""
    return np.asarray(answer.double() if hasattr(answer, "double") else answer, np.float64)


def relative_error(answer: Any, reference: Any) -> float:
    """Compute max |answer - reference| / max(1, |reference|); infinite if shapes differ or only one is NaN."""
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
    """Cases with the same providers.

    Attributes:
        title: unique in its suite.
        cases: cases by ascending size.
        providers: the first is the subject of the ratios, usually Whet.
        allocation: allocations within the timed call: "inside: the result is a new array".
        note: context for the reader, in a sentence or two.
        item: unit of ``Case.n_items``: "tokens".
        size_label: meaning of ``Case.size``: "tokens per sequence".
        peak_memory: whether to measure a call's peak memory too.
        error: (answer, reference) -> error to compare with the tolerance; 0 for an exact answer.
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
    """Return value of a call that times its own parts.

    Attributes:
        value: the answer.
        parts: seconds of each part.
        counted: the part that is the call's sample; "": the whole call.
        note: the provider's choice for this case, shown under the table.
        peak_bytes: peak memory of the call, if only the provider can measure it.
    """

    value: Any
    parts: Mapping[str, float]
    counted: str = ""
    note: str = ""
    peak_bytes: int | None = None


@dataclass(frozen=True)
class WholeRun:
    """Return value of a call that is made once: a whole run in a separate process, or several.

    Attributes:
        value: the answer.
        samples_s: seconds of each counted step, or of each run: the row's samples.
        start_s: seconds from the start of the process to its first step; None: part of the samples.
        parts: seconds of the parts of each counted step.
        peak_bytes: peak memory of the process; None if the system does not report it.
        memory: memory by owner at the peak step, by the names in ``whet.memory.PARTS``; empty: unknown.
        curve: (step, score) of a training run.
        scores: (score before, score after) of each of several training runs.
        note: remark about these runs, shown under the table.
    """

    value: Any
    samples_s: Sequence[float]
    start_s: float | None
    parts: Mapping[str, Sequence[float]]
    peak_bytes: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    curve: Sequence[tuple[int, float]] = ()
    scores: Sequence[tuple[float, float]] = ()
    note: str = ""


def seconds_of(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return the result of ``work(*arguments)`` and its seconds."""
    started = time.perf_counter()
    answer = work(*arguments)
    return answer, time.perf_counter() - started


@dataclass(frozen=True)
class BenchOptions:
    """Settings of a benchmark run."""

    quick: bool = False
    """Measure fewer rounds, and only quick cases."""
    only: str = ""
    """Measure only the rows whose "table / case" contains this, ignoring case."""
    peers: tuple[str, ...] = ()
    """Measure only these providers and Whet, by the beginning of their names. Default: all."""
    threads: int = 0
    """Threads of each provider; 0: one per processor of this process."""
    out: str = ""
    """Folder for results.json, report.md, report.html and the plots. Default: runs/bench/SUITE."""
    seed: int = 0
    """Seed of the inputs and of the order of providers in each round."""


@dataclass(frozen=True)
class Suite:
    """Tables of ``whet bench NAME``.

    Attributes:
        name: name on the command line.
        title: heading of the report.
        summary: a sentence or two below the heading.
        tables: creates the tables from the options.
        options: dataclass of the options; a subclass of ``BenchOptions`` if the suite has its own.
    """

    name: str
    title: str
    summary: str
    tables: Callable[[Any], Sequence[Table]]
    options: type[BenchOptions] = BenchOptions
