"""Engines in pages: Whet and its peers load a file and generate; the page measures the time."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import whet
from benchmarks.contenders.engine import native
from benchmarks.contenders.engine.workload import Sample, Workload, sample_error, scores
from benchmarks.contenders.web.page import WEB, Page, install_peers
from whet.bench import formatting
from whet.bench.case import Call, Timed, WholeRun, seconds_of

CONTEXT = 512
"""Context length of every contender, in tokens."""


@dataclass(frozen=True)
class OnThreads:
    """A workload and the number of threads of all contenders."""

    workload: Workload
    threads: int

    @property
    def file(self) -> Path:
        """GGUF file of the workload's model."""
        return self.workload.files.gguf(self.kind)

    @property
    def kind(self) -> str:
        """Format of the file."""
        return self.workload.files.shape.kind  # type: ignore[attr-defined]


class Greedy(NamedTuple):
    """A greedy completion of a contender that returns no log-probs."""

    prompt_ids: list[int]
    token_ids: list[int]


def completion_error(answer: Any, expected: Workload) -> float:
    """Return ``sample_error``; for a ``Greedy``, the mean gap of its tokens' log-probs to the model's argmax.

    The gap is in standard deviations of log-probs over the vocabulary, as in ``sample_error``.
    """
    if not isinstance(answer, Greedy):
        return sample_error(answer, expected)
    if len(answer.token_ids) != expected.n_tokens:
        return float("inf")
    every = scores(answer.prompt_ids, answer.token_ids, expected.model)
    chosen = every[np.arange(expected.n_tokens), answer.token_ids]
    return float(((every.max(axis=1) - chosen) / every.std(axis=1)).mean())


@dataclass(frozen=True)
class Engine:
    """An engine in a page.

    Attributes:
        module: module of web/bench.
        downloads: files of its packages that a page downloads.
        peers: folder in which its packages are installed; None: Whet.
        prompt: makes the argument of a prompt from its ids and the model's file.
        model: returns folder and arguments of the model to load.
    """

    module: str
    downloads: tuple[str, ...]
    peers: Path | None = None
    prompt: Callable[[list[int], Path], Mapping[str, Any]] = lambda ids, _: {"ids": ids}
    model: Callable[[OnThreads], tuple[Path, dict[str, Any]]] = field(
        default=lambda x: (x.file.parent, {"url": f"/files/{x.file.name}", "contextLength": CONTEXT})
    )

    def decode(self, x: OnThreads) -> Call:
        """Time ``n_steps`` steps after the first token."""
        page, _ = self._load(x)
        return lambda: self._generate(page, x, x.workload.n_tokens, "decode")

    def prefill(self, x: OnThreads) -> Call:
        """Time an uncached prompt up to its first token."""
        page, _ = self._load(x)
        return lambda: self._generate(page, x, 1, "prefill")

    def load(self, x: OnThreads) -> Call:
        """Time loading the file from the page's memory; a completion outside of the timing checks the engine."""
        note = self._sizes()

        def call() -> Timed:
            page, load_s = self._load(x)
            answer = self._generate(page, x, x.workload.n_tokens, "decode").value
            page.call("close")
            return Timed(answer, {"load": load_s}, "load", note)

        return call

    def lifetime(self, x: OnThreads) -> Call:
        """Load and generate in a separate page, whose renderer's memory peak is reported."""

        def call() -> WholeRun:
            (page, load_s), start_s = seconds_of(lambda: self._load(x, isStreamed=True))
            answer, generate_s = seconds_of(self._generate, page, x, x.workload.n_tokens, "decode")
            return WholeRun(answer.value, [load_s + generate_s], start_s, {}, page.peak_bytes())

        return call

    def _served(self) -> dict[str, Path]:
        return {} if self.peers is None else {"peers": install_peers(self.peers)}

    def _load(self, x: OnThreads, **how: bool) -> tuple[Page, float]:
        """Open a page and load the model; return the page and the seconds of loading."""
        folder, arguments = self.model(x)
        page = Page(self.module, {**self._served(), "files": folder})
        return page, page.call("load", threads=x.threads, **arguments, **how)

    def _generate(self, page: Page, x: OnThreads, n: int, part: str) -> Timed:
        prompts = x.workload.fresh() if self.peers is None else x.workload.prompts
        ids = list(prompts[0])
        found = page.call("generate", n=n, **self.prompt(ids, x.file))
        tokens = [each["token"] for each in found["tokens"]]
        answer = Greedy(ids, tokens)
        if all("logprob" in each for each in found["tokens"]):
            answer = Sample(ids, tokens, [each["logprob"] for each in found["tokens"]])
        return Timed(answer, {part: found[part]}, part)

    def _sizes(self) -> str:
        """Describe the sizes of a page's downloads by kind."""
        root = WEB / "dist" if self.peers is None else install_peers(self.peers)
        return "; ".join(
            f"{kind}: {formatting.size(raw)}, compressed {formatting.size(small)}"
            for kind, (raw, small) in _download_sizes(tuple(root / name for name in self.downloads)).items()
        )


@cache
def _download_sizes(files: tuple[Path, ...]) -> dict[str, tuple[int, int]]:
    """Map the kinds of files to their bytes and gzip-compressed bytes."""
    found: dict[str, tuple[int, int]] = {}
    for file in files:
        content, kind = file.read_bytes(), "wasm" if file.suffix == ".wasm" else "scripts"
        raw, small = found.get(kind, (0, 0))
        found[kind] = raw + len(content), small + len(gzip.compress(content, 9))
    return found


def as_text(ids: list[int], file: Path) -> dict[str, str]:
    """Make the prompt of an engine that accepts only text.

    Raises:
        RuntimeError: tokenising the text gives other ids.
    """
    from whet.models.tokenizers.tokenizer import read_tokenizer

    tokenizer = read_tokenizer(file)
    text = tokenizer.decode(ids)
    if list(tokenizer.encode(text)) != ids:
        raise RuntimeError("tokenising the prompt's text does not give the ids of the prompt")
    return {"text": text}


def whet_in_page() -> Engine:
    """Create the engine of Whet's npm package."""
    return Engine("whet.js", ("index.js", "worker.js", "thread.js", "threads.wasm"))


def wllama(folder: Path) -> Engine:
    """Create the engine of wllama, llama.cpp as published on npm, installed in a folder."""
    package = "@wllama/wllama/esm"
    return Engine("wllama.js", (f"{package}/index.min.js", f"{package}/wasm/wllama.wasm"), folder, as_text)


# --- native Whet on the same threads ---------------------------------------------------------------------


def on_native(task: str) -> Callable[[OnThreads], Call]:
    """Prepare a task of native Whet with the page's file and threads."""

    def prepare(x: OnThreads) -> Call:
        with_threads = _with_threads(x.threads)
        work = with_threads(lambda: getattr(native.WhetFromGguf(), task)(x.kind, x.workload))
        return lambda: with_threads(work)

    return prepare


def _with_threads(n: int) -> Callable[[Call], Any]:
    def run(call: Call) -> Any:
        before = whet.get_num_threads()
        whet.set_num_threads(n)
        try:
            return call()
        finally:
            whet.set_num_threads(before)

    return run
