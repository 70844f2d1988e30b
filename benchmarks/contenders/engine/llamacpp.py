# pyright: reportMissingImports=false
"""llama.cpp through its low-level API: one ``llama_decode`` per step, one sequence id per row, tokens by argmax.

Its samplers do not run, only a NumPy argmax over the logits, so a step is cheaper than for a user. Keys and values are
in float16, its default. Its fastest settings depend on machine and batch: before a case is timed, flash attention is
tried on and off, each with a unified KV cache and with a cache per sequence, and the fastest combination is used.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import whet
from benchmarks.contenders.engine.library import Library
from benchmarks.contenders.engine.models import ModelFiles, gguf_types, quiet_llama_cpp
from benchmarks.contenders.engine.workload import Sample, Workload, greedy_sample
from whet.bench.case import Call, Timed, seconds_of

_CELLS = 256
"""Granularity of context lengths, in tokens."""


class Settings(NamedTuple):
    """Settings of a context among which ``choose_fastest`` chooses."""

    flash: bool
    unified: bool

    def __str__(self) -> str:
        return (
            f"flash attention {'on' if self.flash else 'off'}, KV cache {'unified' if self.unified else 'per sequence'}"
        )


class LlamaCppModel:
    """A model from a GGUF file, on as many threads as Whet."""

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
    """Context of ``n_rows`` sequences of ``n_tokens`` each; other settings are llama.cpp's defaults.

    Attributes:
        logits: logits of the last call, (rows, V); a view that the next call overwrites.
    """

    def __init__(self, model: LlamaCppModel, n_rows: int, n_tokens: int, settings: Settings, ubatch: int = 512) -> None:
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
            raise RuntimeError(f"llama.cpp could not create a context of {n_rows} x {each} tokens, {settings}")
        self.memory: Any = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(n_rows * each, 0, 1)
        self.close = weakref.finalize(self, _free, self.context, self.batch)
        self.logits = np.zeros((0, model.vocab_size), np.float32)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Clear the KV cache and run prompt i as sequence i; a single prompt is copied to all sequences.

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

    def rewind(self, prompts: Sequence[Sequence[int]]) -> None:
        """Remove all tokens after the prompts; recurrent layers, which cannot, compute the prompts again."""
        import llama_cpp

        position = len(prompts[0])
        if not all(llama_cpp.llama_memory_seq_rm(self.memory, row, position, -1) for row in range(self.n_rows)):
            self.prefill(prompts)

    def generate(self, first: np.ndarray, position: int, n_steps: int) -> list[np.ndarray]:
        """Take ``n_steps`` greedy steps of all rows, whose tokens ``first`` are at ``position``.

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

    def complete(self, prompts: Sequence[Sequence[int]], n_steps: int) -> list[np.ndarray]:
        """Run prompts of equal length and ``n_steps`` steps after them.

        Returns:
            The logits of row 0 after the prompt and after each step.
        """
        first = self.prefill(prompts)
        start = self.logits[0].copy()
        return [start, *self.generate(first, len(prompts[0]), n_steps)]

    def fill(self, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, outputs: np.ndarray) -> None:
        """Write the batch: tokens, their positions and sequences, and the indices whose logits are required."""
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
        """Decode the batch; return the argmax of its ``n_outputs`` rows of logits."""
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
    """List the distinct settings; a single sequence always has a unified cache."""
    return [Settings(*pair) for pair in itertools.product((True, False), (True,) if n_rows == 1 else (True, False))]


def choose_fastest(model: LlamaCppModel, n_rows: int, n_tokens: int, trial: Callable[[Context], float]) -> Context:
    """Create the context in which ``trial``, a part of the work, takes the fewest seconds (minimum of two runs)."""
    took = {}
    for settings in every_setting(n_rows):
        context = Context(model, n_rows, n_tokens, settings)
        took[settings] = min(trial(context) for _ in range(2))
        context.close()
    return Context(model, n_rows, n_tokens, min(took, key=lambda settings: took[settings]))


class Reference:
    """llama.cpp on a GGUF file, called as a Hugging Face model: ``(ids, logits_to_keep=n).logits``."""

    def __init__(self, path: Path) -> None:
        self._model = LlamaCppModel(path)

    def __call__(self, ids: Any, logits_to_keep: int) -> Any:
        import torch

        tokens = ids[0].numpy()
        n = len(tokens)
        context = Context(self._model, 1, n, Settings(True, True))
        context.fill(tokens, np.arange(n), np.zeros(n, int), np.arange(n - logits_to_keep, n))
        context.run(logits_to_keep)
        logits = torch.from_numpy(context.logits.copy())[None]
        context.close()
        return SimpleNamespace(logits=logits)


# --- the provider ---------------------------------------------------------------------------------------


class LlamaCpp(Library):
    """llama.cpp; ``weights`` is the type of a GGUF file, which is read, not mapped, if loading is timed."""

    name = "llama.cpp"

    def of_model(self, files: ModelFiles, weights: str) -> LlamaCppModel:
        return LlamaCppModel(files.gguf(weights))

    def source(self, files: ModelFiles, weights: str) -> Path:
        return files.gguf(weights)

    def load(self, path: Path, weights: str) -> LlamaCppModel:
        return LlamaCppModel(path, mmap=False)

    def generate(self, model: Any, prompts: Sequence[Sequence[int]], n_tokens: int, n_samples: int = 1) -> Sample:
        """Generate with flash attention and a KV cache per row, the fastest settings in most cases."""
        n_rows = len(prompts) * n_samples
        context = Context(model, n_rows, len(prompts[0]) + n_tokens, Settings(True, n_rows == 1))
        logits = context.complete(prompts, n_tokens - 1)
        context.close()
        return greedy_sample(prompts[0], logits)

    def decode(self, weights: str, x: Workload) -> Call:
        """Time ``n_steps`` steps after cached prompts."""
        context = self._fastest_decode(weights, x)
        note, first = _note(x, weights, context), context.prefill(x.prompts)
        start = [context.logits[0].copy()]

        def call() -> Timed:
            context.rewind(x.prompts)
            logits, decode_s = seconds_of(context.generate, first, x.prompt_length, x.n_steps)
            return Timed(greedy_sample(x.prompts[0], start + logits), {"decode": decode_s}, "decode", note)

        return call

    def prefill(self, weights: str, x: Workload) -> Call:
        def prompts_s(context: Context) -> float:
            return seconds_of(context.prefill, x.prompts)[1]

        context = choose_fastest(self.model(x, weights), x.n_rows, x.prompt_length, prompts_s)
        note = _note(x, weights, context)

        def call() -> Timed:
            prompts = x.fresh()
            _, prefill_s = seconds_of(context.prefill, prompts)
            return Timed(greedy_sample(prompts[0], [context.logits[0]]), {"prefill": prefill_s}, "prefill", note)

        return call

    def group(self, weights: str, x: Workload) -> Call:
        """Time a group: the prompt runs once, and its completions share its cache."""
        context = self._fastest_decode(weights, x)
        note = _note(x, weights, context)

        def call() -> Timed:
            prompts = x.fresh()
            logits, group_s = seconds_of(context.complete, prompts, x.n_steps)
            return Timed(greedy_sample(prompts[0], logits), {"group": group_s}, "group", note)

        return call

    def _fastest_decode(self, weights: str, x: Workload) -> Context:
        """Choose the context that is fastest at the workload's steps."""

        def steps_s(context: Context) -> float:
            first = context.prefill(x.prompts)
            return seconds_of(context.generate, first, x.prompt_length, min(6, x.n_steps))[1]

        return choose_fastest(self.model(x, weights), x.n_rows, x.prompt_length + x.n_tokens, steps_s)


def _note(x: Workload, weights: str, context: Context) -> str:
    types = f"its matrices: {gguf_types(x.files.gguf(weights))}; " if weights.startswith("q") else ""
    return f"{types}{context.n_rows} rows: {context.settings}"
