# pyright: reportMissingImports=false
"""llama.cpp through its low-level API: one ``llama_decode`` per step, one sequence id per row, tokens by argmax.

Nothing of its samplers runs, only a NumPy argmax over the logits, so a step costs it less than a user would see. Keys
and values are in float16, its default. Which of its settings is fastest differs with the machine and the batch:
before a case is timed, flash attention is tried on and off, each with one pool of cells for all sequences and with a
pool of each, and the fastest is taken.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import whet
from whet.bench.case import Call, Timed
from whet.bench.contenders.engine.models import gguf_types, quiet_llama_cpp
from whet.bench.contenders.engine.workload import Sample, Workload, greedy_sample, load_once

_CELLS = 256
"""Contexts are made in steps of so many tokens."""


class Settings(NamedTuple):
    """Of a context: what ``choose_quickest`` chooses between."""

    flash: bool
    unified: bool

    def __str__(self) -> str:
        return f"flash attention {'on' if self.flash else 'off'}, {'one pool' if self.unified else 'a pool each'}"


class LlamaCpp:
    """A model from a GGUF file, on the threads that Whet uses."""

    def __init__(self, path: Path, mmap: bool = True) -> None:
        import llama_cpp

        quiet_llama_cpp()
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_mmap, parameters.n_gpu_layers = mmap, 0
        self.model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path.name}")
        vocab: Any = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.close = weakref.finalize(self, llama_cpp.llama_model_free, self.model)


class Context:
    """Room for ``n_rows`` sequences of ``n_tokens`` each; settings that are not named are llama.cpp's defaults.

    Attributes:
        logits: of the last call, (rows, V); a view that the next call overwrites.
    """

    def __init__(self, model: LlamaCpp, n_rows: int, n_tokens: int, settings: Settings, ubatch: int = 512) -> None:
        import llama_cpp

        self.model, self.n_rows, self.settings = model, n_rows, settings
        each = -(-n_tokens // _CELLS) * _CELLS
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = n_rows * each
        parameters.n_batch = n_rows * each
        parameters.n_ubatch = ubatch
        parameters.n_seq_max = n_rows
        parameters.n_threads = parameters.n_threads_batch = whet.get_num_threads()
        parameters.flash_attn_type = int(settings.flash)
        parameters.kv_unified = settings.unified
        parameters.no_perf = True
        self.context: Any = llama_cpp.llama_init_from_model(model.model, parameters)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not make a context of {n_rows} x {each} tokens, {settings}")
        self.memory: Any = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(n_rows * each, 0, 1)
        self.close = weakref.finalize(self, _free, self.context, self.batch)
        self.logits = np.zeros((0, model.vocab_size), np.float32)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Forget everything, and run prompt i as sequence i; a single prompt becomes that of all sequences.

        Returns:
            The argmax after each sequence, (n_rows,).
        """
        import llama_cpp

        llama_cpp.llama_memory_clear(self.memory, False)
        lengths = [len(prompt) for prompt in prompts]
        self.fill(
            np.concatenate([np.asarray(prompt, np.int32) for prompt in prompts]),
            np.concatenate([np.arange(n) for n in lengths]),
            np.repeat(np.arange(len(prompts)), lengths),
            np.cumsum(lengths) - 1,
        )
        first = self.run(len(prompts))
        for row in range(len(prompts), self.n_rows):
            llama_cpp.llama_memory_seq_cp(self.memory, 0, row, -1, -1)
        return np.resize(first, self.n_rows)

    def rewind(self, position: int) -> None:
        """Forget what every sequence has from ``position`` on."""
        import llama_cpp

        for row in range(self.n_rows):
            llama_cpp.llama_memory_seq_rm(self.memory, row, position, -1)

    def generate(self, first: np.ndarray, position: int, n_steps: int) -> list[np.ndarray]:
        """``n_steps`` greedy steps of all rows, whose tokens ``first`` are at ``position``.

        Returns:
            The logits of row 0 after each step.
        """
        tokens, logits, n_rows = first, [], len(first)
        self.fill(first, np.zeros(n_rows), np.arange(n_rows), np.arange(n_rows))
        token_view = np.ctypeslib.as_array(self.batch.token, (n_rows,))
        position_view = np.ctypeslib.as_array(self.batch.pos, (n_rows,))
        for step in range(n_steps):
            token_view[:], position_view[:] = tokens, position + step
            tokens = self.run(n_rows)
            logits.append(self.logits[0].copy())
        return logits

    def fill(self, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, outputs: np.ndarray) -> None:
        """Write the batch: tokens, their positions and sequences, and the places whose logits are wanted."""
        n = self.batch.n_tokens = len(tokens)
        wanted = np.zeros(n, np.int8)
        wanted[outputs] = 1
        np.ctypeslib.as_array(self.batch.token, (n,))[:] = tokens
        np.ctypeslib.as_array(self.batch.pos, (n,))[:] = positions
        np.ctypeslib.as_array(self.batch.n_seq_id, (n,))[:] = 1
        np.ctypeslib.as_array(self.batch.logits, (n,))[:] = wanted
        for i, row in enumerate(rows.tolist()):
            self.batch.seq_id[i][0] = row

    def run(self, n_outputs: int) -> np.ndarray:
        """Decode the batch, and return the argmax of its ``n_outputs`` rows of logits."""
        import llama_cpp

        status = llama_cpp.llama_decode(self.context, self.batch)
        if status:
            raise RuntimeError(f"llama_decode: status {status}, {self.settings}")
        self.logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self.context), (n_outputs, self.model.vocab_size)
        )
        return self.logits.argmax(axis=1)


def _free(context: Any, batch: Any) -> None:
    import llama_cpp

    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)


def every_setting(n_rows: int) -> list[Settings]:
    """All that differ: a single sequence has but one pool."""
    return [Settings(*pair) for pair in itertools.product((True, False), (True,) if n_rows == 1 else (True, False))]


def choose_quickest(contexts: Callable[[Settings], Context], n_rows: int, piece: Callable[[Context], float]) -> Context:
    """The context in which ``piece`` of the work takes the least seconds."""
    took = {}
    for settings in every_setting(n_rows):
        context = contexts(settings)
        took[settings] = piece(context)
        context.close()
    return contexts(min(took, key=lambda settings: took[settings]))


# --- the providers --------------------------------------------------------------------------------------


def llama_model(x: Workload, kind: str) -> LlamaCpp:
    """The workload's model from its GGUF file of a kind."""
    return load_once((x.files.shape, "llama.cpp", kind), lambda: LlamaCpp(x.files.gguf(kind)))


def _note(x: Workload, kind: str, context: Context) -> str:
    types = f"its matrices: {gguf_types(x.files.gguf(kind))}; " if kind.startswith("q") else ""
    return f"{types}{context.n_rows} rows: {context.settings}"


def _decode_context(x: Workload, kind: str) -> Context:
    """A context that is quick at the workload's steps."""
    model, n_tokens = llama_model(x, kind), x.prompt_length + x.n_tokens

    def steps(context: Context) -> float:
        first, took = context.prefill(x.prompts), []
        for _ in range(2):
            context.rewind(x.prompt_length)
            started = time.perf_counter()
            context.generate(first, x.prompt_length, min(6, x.n_steps))
            took.append(time.perf_counter() - started)
        return min(took)

    return choose_quickest(lambda settings: Context(model, x.n_rows, n_tokens, settings), x.n_rows, steps)


def llama_decode(kind: str) -> Callable[[Workload], Call]:
    """``n_steps`` steps after prompts that are in the cache already."""

    def prepare(x: Workload) -> Call:
        context = _decode_context(x, kind)
        note, first = _note(x, kind, context), context.prefill(x.prompts)
        start = [context.logits[0].copy()]

        def call() -> Timed:
            context.rewind(x.prompt_length)
            started = time.perf_counter()
            logits = context.generate(first, x.prompt_length, x.n_steps)
            decode_s = time.perf_counter() - started
            return Timed(greedy_sample(x.prompts[0], start + logits), {"decode": decode_s}, "decode", note)

        return call

    return prepare


def llama_prefill(kind: str) -> Callable[[Workload], Call]:
    """Prompts, to the first token of each."""

    def prepare(x: Workload) -> Call:
        model = llama_model(x, kind)

        def piece(context: Context) -> float:
            took = []
            for _ in range(2):
                started = time.perf_counter()
                context.prefill(x.prompts)
                took.append(time.perf_counter() - started)
            return min(took)

        context = choose_quickest(lambda settings: Context(model, x.n_rows, x.prompt_length, settings), x.n_rows, piece)
        note = _note(x, kind, context)

        def call() -> Timed:
            prompts, started = x.fresh(), time.perf_counter()
            context.prefill(prompts)
            prefill_s = time.perf_counter() - started
            return Timed(greedy_sample(prompts[0], [context.logits[0]]), {"prefill": prefill_s}, "prefill", note)

        return call

    return prepare


def llama_group(kind: str) -> Callable[[Workload], Call]:
    """A prompt, run once, and all its completions, which share its cache."""

    def prepare(x: Workload) -> Call:
        context = _decode_context(x, kind)
        note = _note(x, kind, context)

        def call() -> Timed:
            [prompt], started = x.fresh(), time.perf_counter()
            first = context.prefill([prompt])
            start = [context.logits[0].copy()]
            logits = context.generate(first, x.prompt_length, x.n_steps)
            group_s = time.perf_counter() - started
            return Timed(greedy_sample(prompt, start + logits), {"group": group_s}, "group", note)

        return call

    return prepare


def _complete(model: LlamaCpp, x: Workload) -> Sample:
    """Generate, flash attention on and a pool for each row, as in most cases is fastest."""
    context = Context(model, x.n_rows, x.prompt_length + x.n_tokens, Settings(True, x.n_rows == 1))
    first = context.prefill(x.prompts)
    start = [context.logits[0].copy()]
    logits = start + context.generate(first, x.prompt_length, x.n_steps)
    context.close()
    return greedy_sample(x.prompts[0], logits)


def llama_load(x: Workload) -> Call:
    """Load the bfloat16 file, without mapping it; that it can generate is seen outside the time."""
    path, first = x.files.gguf("bf16"), replace(x, prompts=x.prompts[:1])

    def call() -> Timed:
        started = time.perf_counter()
        model = LlamaCpp(path, mmap=False)
        load_s = time.perf_counter() - started
        sample = _complete(model, first)
        model.close()
        return Timed(sample, {"load": load_s}, "load")

    return call


def llama_lifetime(x: Workload) -> Call:
    """Load the bfloat16 file, without mapping it; generate; forget."""
    path = x.files.gguf("bf16")

    def call() -> Sample:
        model = LlamaCpp(path, mmap=False)
        sample = _complete(model, x)
        model.close()
        return sample

    return call
