"""The engine: a transformer that samples batches natively, on weights that a trainer changes between its calls.

Prompts are computed once for all their samples; finished rows leave and waiting ones enter. What a completion says
depends on (seed, prompt, sample) and the weights alone, to the bit: not on the batch, its order, the threads, or the
memory for keys and values. It is a ``whet.rollout.RolloutEngine``. The forward pass is cpp/engine/transformer.cpp, its
definition ``whet.engine.reference``.

Does not decode text, and does not train.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from whet import _core
from whet.engine.adapters import adapter_parts
from whet.engine.architecture import ModelConfig
from whet.engine.folder import open_folder
from whet.engine.formats import choose_formats
from whet.engine.gguf import open_gguf
from whet.engine.live import describe_module
from whet.engine.loading import checked, load
from whet.engine.pieces import LoRA, Source
from whet.errors import WhetError, WhetTypeError, WhetValueError
from whet.ops.quant import CORE_FORMATS
from whet.sampling import Completion, SamplingParams

LogprobsMode = Literal["sampling", "model"]


class EngineBusyError(WhetError, RuntimeError):
    """The engine is asked to change its weights while a completion is under way."""


class Token(NamedTuple):
    """One token of a stream."""

    token_id: int
    logprob: float


class Engine:
    """Samples completions and scores sequences. Made by ``from_model``, ``from_pretrained`` or ``from_gguf``.

    All three take, beside their source:

        max_position: tokens of the longest sequence; None: what the model's config says. Rotary frequencies that depend
            on the length are resolved for it: those of longrope are transformers' for sequences of up to the original
            length with a max_position of up to that, and else those for longer ones.
        weights: "bf16" (default), "float32", "int8" (per output row), "int4" (q4_0), "q8_0", "q4_k". A matrix whose
            rows are no whole blocks of the format takes the next one that fits: q4_k, q4_0 or q8_0, int8. Norms, biases
            and learned positions are float32.
        embedding, head: formats of their own. By default that of weights, but q8_0 with the 4-bit ones (int8 where it
            does not fit). A tied head is the embedding, in the head's format.
        kv_bytes: memory for keys and values; work that does not fit waits. It is asked of the system as it is used.
        max_batch: completions that are computed at a time.
        prefill_chunk: tokens of prompts that a step takes beside them.

    Attributes:
        config: what the model is.
        policy_version: how many times ``sync`` has been called; every completion carries the version it came from.
        formats: slot -> format of every matrix.

    Keys and values are float32 with float32 weights, else bfloat16; everything between products is float32.
    Calls from several threads take turns, a step at a time.
    """

    def __init__(
        self,
        source: Source,
        *,
        weights: str | None = "bf16",
        embedding: str | None = None,
        head: str | None = None,
        kv_bytes: int = 1 << 30,
        max_batch: int = 64,
        prefill_chunk: int = 256,
        where: str = "Engine",
    ) -> None:
        for name, value in (("kv_bytes", kv_bytes), ("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise WhetValueError(f"{where}: {name} is {value!r}, expected an integer >= 1.")
        self.config: ModelConfig = source.config
        self.policy_version = 0
        self.formats = choose_formats(source, weights, embedding, head, where)
        pieces = checked(source, self.formats, where)
        slots = [
            (slot, CORE_FORMATS.get(self.formats.get(slot, "")), shape[0], shape[-1])
            for slot, shape in source.config.slots().items()
        ]
        bf16_cache = self.formats["layers.0.o"] != "float32"
        options = (kv_bytes, max_batch, prefill_chunk, bf16_cache)
        self._core: Any = _core.Engine(vars(source.config), slots, *options)  # None once closed
        self._lock = threading.RLock()
        self._n_open = 0
        self._adapters: set[int] = set()
        self._own_adapter = 0
        load(self._core, pieces, self.formats)
        self._targets = source.targets
        self._use(source.adapters)

    @classmethod
    def from_model(
        cls, model: Any, *, merge_adapters: bool = False, max_position: int | None = None, **options: Any
    ) -> Engine:
        """From a live Hugging Face module, whose weights are packed as they are now; see ``sync``.

        Args:
            model: Llama, Mistral, Qwen2, Qwen3, GPT-NeoX, GPT-2, GPT-J or Phi-3, perhaps in PEFT's LoRA.
            merge_adapters: pack W + scaling B A; else adapters are computed beside W, and ``sync`` takes them alone
                where nothing else trains.
            max_position: see the class; ``sync`` keeps it.
            options: see the class.

        Raises:
            WhetValueError: a model or an option that the engine does not run, by its name.
        """
        source = describe_module(model, merged=merge_adapters, max_position=max_position)
        engine = cls(source, where="Engine.from_model", **options)
        engine._merged = merge_adapters
        return engine

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, max_position: int | None = None, **options: Any
    ) -> Engine:
        """From a Hugging Face folder: config.json and safetensors, sharded or not; neither torch nor transformers.

        Raises:
            WhetValueError: the folder holds no such model, or is damaged.
        """
        return cls(open_folder(path, max_position=max_position), where="Engine.from_pretrained", **options)

    @classmethod
    def from_gguf(
        cls,
        path: str | os.PathLike[str],
        *,
        max_position: int | None = None,
        weights: str | None = None,
        **options: Any,
    ) -> Engine:
        """From a GGUF file of F32, F16, BF16, Q8_0 and Q4_K tensors.

        Args:
            weights: None keeps the file's Q8_0 and Q4_K as they are, to the bit, and takes its floats as bf16.

        Raises:
            WhetValueError: the file holds no such model, or is damaged.
        """
        return cls(open_gguf(path, max_position=max_position), weights=weights, where="Engine.from_gguf", **options)

    _merged = False

    # ------------------------------------------------------------------ sampling

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int = 1,
        sampling: SamplingParams | None = None,
        *,
        adapter: int | Sequence[int | None] | None = None,
        logprobs_mode: LogprobsMode = "sampling",
    ) -> list[list[Completion]]:
        """Sample ``n`` completions for each prompt: ``result[prompt][sample]``.

        Args:
            prompt_ids: rows of token ids without padding, at least one token each.
            n: completions per prompt.
            sampling: the distribution, and when a completion ends. A completion that reaches the model's last position
                ends there, with the finish reason "length".
            adapter: what ``add_adapter`` returned, for all prompts or for each; None: the model's own adapters, if any.
            logprobs_mode: "sampling": of the distribution that was drawn from; "model": of the model's own, at
                temperature 1 and without filters.

        Raises:
            WhetValueError: n below 1, an empty prompt, a token outside the vocabulary, a prompt that leaves no room for
                a token, one sequence larger than ``kv_bytes``, or logits that hold NaN or infinity.
            WhetTypeError: token ids that are no integers.
        """
        where = "Engine.generate"
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise WhetValueError(f"{where}: n is {n!r}, expected an integer >= 1.")
        prompts = self._token_rows(prompt_ids, where, "prompt_ids")
        adapters = self._adapter_ids(adapter, len(prompts), where)
        sampling = sampling or SamplingParams()
        model_logprobs = _is_model_mode(logprobs_mode, where)
        jobs: list[int] = []
        with self._open(where):
            try:
                for i, (prompt, one) in enumerate(zip(prompts, adapters, strict=True)):
                    jobs.append(self._add(where, f"prompt_ids[{i}]", prompt, n, sampling, i, one, model_logprobs))
                self._run(jobs, where)
                return [[self._completion(job, j) for j in range(n)] for job in jobs]
            finally:
                self._forget(jobs)

    def stream(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        adapter: int | None = None,
        logprobs_mode: LogprobsMode = "sampling",
    ) -> TokenStream:
        """The tokens of one completion, as they are drawn: ``for token in stream`` or ``async for token in stream``.

        The same tokens as ``generate([prompt], 1, sampling)``. Leaving the loop early, ``close()`` and a ``with`` block
        cancel what is left.
        """
        where = "Engine.stream"
        [ids] = self._token_rows([prompt], where, "prompt")
        [one] = self._adapter_ids(adapter, 1, where)
        self._enter(where)
        try:
            mode = _is_model_mode(logprobs_mode, where)
            job = self._add(where, "prompt", ids, 1, sampling or SamplingParams(), 0, one, mode)
        except BaseException:
            self._leave()
            raise
        return TokenStream(self, job)

    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        start: int | Sequence[int] = 1,
        temperature: float = 1.0,
        return_entropy: bool = False,
        adapter: int | Sequence[int | None] | None = None,
    ) -> Any:
        """Teacher-forced log-probs of given tokens.

            logprobs[i][t] = log softmax(logits(tokens before start + t) / temperature)[sequence[start + t]]

        Args:
            sequences: rows of token ids.
            start: the first token that is scored, for all sequences or for each: the length of the prompt. What comes
                before is computed once for sequences that share it (in pages of 64 tokens).
            temperature: above 0.
            return_entropy: also the entropy, in nats, of every distribution.
            adapter: as in ``generate``.

        Returns:
            A list of float32 arrays, of ``len(sequence) - start`` numbers each; with return_entropy, two lists.

        Raises:
            WhetValueError, WhetTypeError: as ``generate``; start outside 1 ... len(sequence).
        """
        where = "Engine.logprobs"
        rows = self._token_rows(sequences, where, "sequences")
        starts = [start] * len(rows) if isinstance(start, int) else list(start)
        if len(starts) != len(rows):
            raise WhetValueError(f"{where}: start has {len(starts)} numbers, expected one for each of {len(rows)}.")
        for row, first in zip(rows, starts, strict=True):
            if not 1 <= first <= len(row):
                raise WhetValueError(f"{where}: start is {first} for a row of {len(row)}, expected 1 to that.")
        if not (temperature > 0 and np.isfinite(temperature)):
            raise WhetValueError(f"{where}: temperature is {temperature}, expected a finite number > 0.")
        adapters = self._adapter_ids(adapter, len(rows), where)
        scores = self._score(rows, starts, adapters, temperature, return_entropy, False, where)
        logprobs = [one[0] for one in scores]
        return (logprobs, [one[1] for one in scores]) if return_entropy else logprobs

    def logits(self, sequence: Sequence[int], *, adapter: int | None = None) -> np.ndarray:
        """(T, V) float32: the logits after every token of a sequence.

        Raises:
            WhetValueError, WhetTypeError: as ``generate``.
        """
        where = "Engine.logits"
        [row] = self._token_rows([sequence], where, "sequence")
        [score] = self._score([row], [1], self._adapter_ids(adapter, 1, where), 1.0, False, True, where)
        return score[2].reshape(len(row), self.config.vocab_size)

    # ------------------------------------------------------------------ weights

    def sync(self, model: Any) -> None:
        """Take over the weights of ``model`` as they are now, all or none; ``policy_version`` goes up by one.

        Shapes and finiteness are checked before the first weight changes. Where the model's LoRA adapters are kept
        apart and nothing else trains, the adapters alone are taken.

        Raises:
            EngineBusyError: a completion is under way.
            WhetValueError: another model than the engine was made for, or weights that hold NaN or infinity.
        """
        where = "Engine.sync"
        with self._lock:
            self._check_open(where)
            if self._n_open:
                raise EngineBusyError(
                    f"{where}: {self._n_open} calls are under way, and their tokens have to come from one version of "
                    f"the weights. Finish or close them first."
                )
            source = describe_module(model, merged=self._merged, max_position=self.config.max_position)
            if source.config != self.config:
                raise WhetValueError(f"{where}: {_difference(self.config, source.config)}. Make a new engine for it.")
            if not (source.adapters and _only_adapters_train(model)):
                load(self._core, checked(source, self.formats, where), self.formats)
            self._use(source.adapters)
            self.policy_version += 1

    def add_adapter(self, adapter: Any) -> int:
        """Takes in a LoRA adapter that ``generate(adapter=...)`` then names, beside others and in one batch with them.

        Args:
            adapter: a model in PEFT; the folder that PEFT saves; or by the module's name in the Hugging Face model
                ("model.layers.0.self_attn.q_proj") a ``MicroLoRA`` or (A (r, k), B (n, r), scaling).

        Raises:
            WhetValueError: a module that the model does not have, other shapes, or more than plain LoRA.
        """
        parts = adapter_parts(self._targets, self.config, adapter, "Engine.add_adapter")
        with self._lock:
            self._check_open("Engine.add_adapter")
            number = self._core.add_adapter(parts)
            self._adapters.add(number)
            return number

    def remove_adapter(self, adapter: int) -> None:
        """Forgets an adapter.

        Raises:
            EngineBusyError: a completion is under way.
            WhetValueError: there is no such adapter.
        """
        where = "Engine.remove_adapter"
        with self._lock:
            self._check_open(where)
            if adapter not in self._adapters:
                raise WhetValueError(f"{where}: there is no adapter {adapter!r}; there are {sorted(self._adapters)}.")
            if self._n_open:
                raise EngineBusyError(f"{where}: {self._n_open} calls are under way. Finish or close them first.")
            self._core.remove_adapter(adapter)
            self._adapters.remove(adapter)

    # ------------------------------------------------------------------ life

    @property
    def memory(self) -> dict[str, int]:
        """Bytes: weights_bytes, kv_bytes (the budget in whole pages), kv_used_bytes, kv_page_bytes, workspace_bytes."""
        self._check_open("Engine.memory")
        return self._core.memory()

    def close(self) -> None:
        """Gives the memory back. Twice is once."""
        with self._lock:
            self._core = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        return f"Engine({c.n_layers} layers, hidden_dim={c.hidden_dim}, {c.n_parameters:,} parameters)"

    # ------------------------------------------------------------------ its own

    def _use(self, adapters: Sequence[LoRA]) -> None:
        """The model's own adapters in place of those before."""
        number = self._core.add_adapter(adapter_parts({}, self.config, adapters, "Engine")) if adapters else 0
        if self._own_adapter:
            self._core.remove_adapter(self._own_adapter)
        self._own_adapter = number

    def _check_open(self, where: str) -> None:
        if self._core is None:
            raise WhetValueError(f"{where}: the engine is closed. Make a new one.")

    def _enter(self, where: str) -> None:
        with self._lock:
            self._check_open(where)
            self._n_open += 1

    def _leave(self) -> None:
        with self._lock:
            self._n_open -= 1

    def _open(self, where: str) -> _Open:
        return _Open(self, where)

    def _token_rows(self, rows: Any, where: str, name: str) -> list[np.ndarray]:
        if isinstance(rows, (str, bytes)) or not hasattr(rows, "__iter__"):
            raise WhetTypeError(f"{where}: {name} is a {type(rows).__name__}, expected rows of token ids.")
        return [self._token_row(row, where, f"{name}[{i}]") for i, row in enumerate(rows)]

    def _token_row(self, row: Any, where: str, name: str) -> np.ndarray:
        ids = np.asarray(row.tolist() if hasattr(row, "tolist") else row)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise WhetTypeError(f"{where}: {name} is no row of integer token ids.")
        if not ids.size:
            raise WhetValueError(f"{where}: {name} is empty. Begin it with at least one token, such as BOS.")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.config.vocab_size)][0]
            raise WhetValueError(f"{where}: {name} holds token {wrong}, outside 0 ... {self.config.vocab_size - 1}.")
        if len(ids) > self.config.max_position:
            raise WhetValueError(
                f"{where}: {name} has {len(ids)} tokens, and the model's last position is {self.config.max_position}."
            )
        return ids.astype(np.int32)

    def _adapter_ids(self, adapter: Any, n: int, where: str) -> list[int]:
        each = list(adapter) if isinstance(adapter, Sequence) else [adapter] * n
        if len(each) != n:
            raise WhetValueError(f"{where}: adapter has {len(each)} entries, expected one for each of {n} rows.")
        for one in each:
            if one is not None and one not in self._adapters:
                raise WhetValueError(f"{where}: there is no adapter {one!r}; there are {sorted(self._adapters)}.")
        return [self._own_adapter if one is None else one for one in each]

    def _add(
        self,
        where: str,
        name: str,
        prompt: np.ndarray,
        n: int,
        s: SamplingParams,
        index: int,
        adapter: int,
        model_logprobs: bool,
    ) -> int:
        if len(prompt) >= self.config.max_position:
            raise WhetValueError(
                f"{where}: {name} has {len(prompt)} tokens, which leaves no room to generate: the model's position "
                f"limit is {self.config.max_position}. Shorten or drop the prompt."
            )
        # A stop token outside the vocabulary is never drawn.
        stops = np.array([t for t in s.stop_token_ids if 0 <= t < self.config.vocab_size], np.int32)
        filters = (s.temperature, min(s.top_k, self.config.vocab_size), s.top_p, s.min_p, s.repetition_penalty)
        keys = (s.seed % 2**64, index, 0, adapter)
        try:
            with self._lock:
                return self._core.add_prompt(prompt, n, s.max_new_tokens, stops, *keys, *filters, model_logprobs)
        except ValueError as error:
            raise WhetValueError(f"{where}: {name}: {error}. Raise kv_bytes or lower max_new_tokens.") from None

    def _score(
        self,
        rows: list[np.ndarray],
        starts: list[int],
        adapters: list[int],
        temperature: float,
        entropy: bool,
        logits: bool,
        where: str,
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(log-probs, entropies, logits) of every row."""
        jobs: list[int] = []
        with self._open(where):
            try:
                for row, start, adapter in zip(rows, starts, adapters, strict=True):
                    try:
                        with self._lock:
                            jobs.append(self._core.add_score(row, start, temperature, entropy, logits, adapter))
                    except ValueError as error:
                        raise WhetValueError(f"{where}: row {len(jobs)}: {error}. Raise kv_bytes.") from None
                self._run(jobs, where)
                return [self._core.scores(job) for job in jobs]
            finally:
                self._forget(jobs)

    def _run(self, jobs: Sequence[int], where: str) -> None:
        """Steps until these are done. Between two, other threads and Ctrl-C have their turn."""
        for job in jobs:
            while not self._core.done(job):
                self._step(where)
            self._check_logits(job, where)

    def _step(self, where: str) -> None:
        with self._lock:
            self._check_open(where)
            self._core.step()

    def _check_logits(self, job: int, where: str) -> None:
        if error := self._core.error(job):
            raise WhetValueError(f"{where}: {error}. Look for NaN in the model's weights.")

    def _completion(self, job: int, sample: int) -> Completion:
        tokens, logprobs, finish = self._core.sample(job, sample, 0)
        return Completion(tokens.tolist(), logprobs.tolist(), finish, self.policy_version)

    def _forget(self, jobs: Sequence[int]) -> None:
        with self._lock:
            if self._core is not None:
                for job in jobs:
                    self._core.remove(job)


class _Open:
    """A call that is under way."""

    def __init__(self, engine: Engine, where: str) -> None:
        self.engine, self.where = engine, where

    def __enter__(self) -> None:
        self.engine._enter(self.where)

    def __exit__(self, *_: object) -> None:
        self.engine._leave()


class TokenStream(Iterator[Token], AsyncIterator[Token]):
    """The tokens of one completion, from ``Engine.stream``.

    Attributes:
        finish_reason: "running", then "stop", "length" or "cancelled".
    """

    def __init__(self, engine: Engine, job: int) -> None:
        self._engine, self._job = engine, job
        self._taken = 0
        self._closed = False
        self.finish_reason = "running"

    def __next__(self) -> Token:
        while not self._closed:
            tokens, logprobs, finish = self._engine._core.sample(self._job, 0, self._taken)
            if len(tokens):
                self._taken += 1
                return Token(int(tokens[0]), float(logprobs[0]))
            try:
                self._engine._check_logits(self._job, "Engine.stream")
                if finish != "running":
                    self.finish_reason = finish
                    self.close()
                    break
                self._engine._step("Engine.stream")
            except BaseException:
                self.close()
                raise
        raise StopIteration

    def __iter__(self) -> TokenStream:
        return self

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        token = await asyncio.to_thread(next, self, None)
        if token is None:
            raise StopAsyncIteration
        return token

    def cancel(self) -> None:
        """Ends the completion where it is."""
        if not self._closed and self.finish_reason == "running":
            self.finish_reason = "cancelled"
        self.close()

    def close(self) -> None:
        """Forgets the completion. Twice is once."""
        if not self._closed:
            self._closed = True
            self._engine._forget([self._job])
            self._engine._leave()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


def _is_model_mode(mode: str, where: str) -> bool:
    if mode not in ("sampling", "model"):
        raise WhetValueError(f"{where}: logprobs_mode is {mode!r}, expected 'sampling' or 'model'.")
    return mode == "model"


def _difference(mine: ModelConfig, other: ModelConfig) -> str:
    name = next(name for name, value in vars(mine).items() if value != getattr(other, name))
    return f"the model's {name} is {getattr(other, name)!r:.60}, the engine's {getattr(mine, name)!r:.60}"


def _only_adapters_train(model: Any) -> bool:
    parameters: Mapping[str, Any] = dict(model.named_parameters())
    return not any(p.requires_grad for name, p in parameters.items() if ".lora_" not in name)
