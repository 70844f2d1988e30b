"""The engine: a transformer that samples batches natively, on weights that a trainer changes between its calls.

Prompts are computed once for all their samples; finished rows leave and waiting ones enter. What a completion says
depends only on (seed, prompt, sample) and the weights, to the bit: not on the batch, its order, the threads, or the
memory for keys and values. It is a ``whet.rollout.RolloutEngine``. The forward pass is cpp/engine/transformer.cpp, its
definition ``whet.models.reference``.

Decodes text only to find stop strings, and does not train.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn

import numpy as np

from whet import _core
from whet.config.sampling import DISTRIBUTION_SETTINGS, Completion, SamplingParams, StreamKey, stream_keys
from whet.engine.adapters import adapter_parts
from whet.engine.checks import (
    LogprobsMode,
    as_sampling,
    check_can_continue,
    check_same_base,
    check_same_model,
    check_sampling,
    check_starts,
    check_token_row,
    check_token_rows,
    is_model_mode,
)  # fmt: skip
from whet.engine.session import Calls, NewAdapter, Session, TokenStream, run_to_its_end
from whet.errors import WhetError, WhetTypeError, WhetValueError, check_integer, check_temperature
from whet.memory import register_holder
from whet.models.architecture import ModelConfig, RowSlice
from whet.models.formats import choose_formats
from whet.models.loading import check_range, checksums, list_slices, pack_slices
from whet.models.packed_base import PackedBase
from whet.models.sizes import KV_BYTES, MAX_BATCH, PREFILL_CHUNK
from whet.models.slots import ModelSource
from whet.models.sources.arrays import open_arrays
from whet.models.sources.gguf import open_gguf
from whet.models.sources.live import open_module
from whet.models.sources.pretrained import open_pretrained
from whet.models.tokenizers.token_texts import TokenTexts, read_token_texts

_TORN = (
    "a sync was stopped among the weights, which are neither those before nor those after. Call sync again, or make a "
    "new engine"
)
_RELEASED = "release_weights gave the memory of the weights back. Call sync(model) before"


class Engine:
    """Samples completions and scores sequences.

    Made by ``from_model``, ``from_pretrained``, ``from_gguf`` or ``from_base``.

    All take, beside their source (a packed base has the first three already):

        max_position: tokens of the longest sequence; None: what the model's config says. Rotary frequencies that depend
            on the length are resolved for it: those of longrope are transformers' for sequences of up to the original
            length with a max_position of up to that, and else those for longer ones.
        weights: "bf16" (the default of a module or a folder), "float32", "int8" (per output row), "int4" (q4_0), GGUF's
            "q8_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k" and "q6_k", or llama.cpp's mixtures "q4_k_m" and "q5_k_m". A
            matrix whose rows are no whole blocks of 256 takes what llama.cpp takes (q5_0 for q4_k, q5_1 for q5_k, q8_0
            for q6_k), and int8 where they are no whole blocks of 32. Norms, biases and learned positions are float32.
            GGUF's formats have float16 scales: a block of q8_0 whose largest weight is below 4e-6 becomes 0, as in
            llama.cpp. A tensor that loses more than half of its norm to that is rejected, as is a weight beyond the
            format's range (8e6 in q8_0, 3.39e38 in bf16).
        embedding, head: formats of their own. By default those of the mixture, q8_0 with the 4- and 5-bit formats, and
            else that of weights. A tied head is the embedding, in the head's format.
        kv_bytes: memory for keys and values; work that does not fit waits. It is asked of the system as it is used.
        max_batch: completions that are computed at a time.
        prefill_chunk: tokens of prompts that a step takes beside them.
        tokenizer: for ``SamplingParams.stop``, which needs the texts of tokens: a fast tokenizer of transformers, or
            what ``whet.models.tokenizers.read_tokenizer`` gives; or the path of a folder or GGUF file that has one,
            which is that of the model in ``from_pretrained`` and ``from_gguf``. It is read when stop is first used.

    Attributes:
        config: what the model is.
        policy_version: how many times ``sync`` has been called, or what the last call said; every completion carries
            the version it came from.
        formats: slot -> format of every matrix; "q4_k, q6_k" where its parts have several.
        base: the packed weights that the engine shares with others; None: it has its own, which ``sync`` replaces.

    Keys and values are float32 with float32 weights, else bfloat16; everything between products is float32.
    Calls from several threads take turns, a step at a time. In a process that was forked while another thread was in a
    step, the engine's methods raise a WhetError; a new engine works there. An engine is neither copied nor pickled.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        weights: str | None = "bf16",
        embedding: str | None = None,
        head: str | None = None,
        kv_bytes: int = KV_BYTES,
        max_batch: int = MAX_BATCH,
        prefill_chunk: int = PREFILL_CHUNK,
        tokenizer: Any = None,
        where: str = "Engine",
    ) -> None:
        for name, value in (("kv_bytes", kv_bytes), ("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            check_integer(where, name, value, 1)
        self.config: ModelConfig = source.config
        self.policy_version = 0
        self._reading = threading.Lock()
        self.tokenizer = tokenizer
        self.base = source.base
        packed = source.base or PackedBase(source, choose_formats(source, weights, embedding, head, where))
        self.formats = packed.formats
        slices = list_slices(source, where)
        core = _core.Engine(
            packed.core, kv_bytes=kv_bytes, max_batch=max_batch, chunk=prefill_chunk,
            bf16_cache=packed.kv_format == "bfloat16",
        )  # fmt: skip
        self._calls = Calls(core)
        self._stored: Any = None
        self._targets = source.targets
        self._replace(slices, source, where)
        register_holder(self)

    @classmethod
    def from_model(
        cls, model: Any, *, merge_adapters: bool = False, max_position: int | None = None, **options: Any
    ) -> Engine:
        """From a live Hugging Face module, whose weights are packed as they are now; see ``sync``.

        Args:
            model: of a family in ``whet.models.families``, perhaps in PEFT's LoRA.
            merge_adapters: pack W + scaling B A; else adapters are computed beside W, and ``sync`` updates only them
                where nothing else has changed.
            max_position: see the class; ``sync`` keeps it.
            options: see the class. A model on a packed base keeps its formats.

        Raises:
            WhetValueError: a model or an option that the engine does not run, by its name, or weights beyond the range
                of their format.
        """
        where = "Engine.from_model"
        source = open_module(model, merged=merge_adapters, max_position=max_position)
        if source.base is not None:
            _refuse_formats(options, where)
        engine = cls(source, where=where, **options)
        engine._merged = merge_adapters
        return engine

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        max_position: int | None = None,
        weights: str | None = None,
        **options: Any,
    ) -> Engine:
        """From a Hugging Face folder (config.json and safetensors, sharded or not) or a GGUF file; torch is not needed.

        Args:
            weights: None: bf16 of a folder, and of a GGUF file as in ``from_gguf``.

        Raises:
            WhetValueError: there is no such model, it is damaged, or its weights are beyond the range of their format.
        """
        source = open_pretrained(path, max_position=max_position)
        return cls(source, weights=weights, where="Engine.from_pretrained", **{"tokenizer": path, **options})

    @classmethod
    def from_gguf(
        cls,
        path: str | os.PathLike[str],
        *,
        max_position: int | None = None,
        weights: str | None = None,
        **options: Any,
    ) -> Engine:
        """From a GGUF file, or any of the files of a model in parts; ``open_gguf`` says of which types.

        Args:
            weights: None keeps the file's integers and scales as they are, and takes its floats as bf16. Q2_K and
                IQ4_XS become Q8_0, whose scales are rounded (cpp/engine/quantize.h).

        Raises:
            WhetValueError: the file holds no such model, is damaged, or its weights are beyond the range of their
                format.
        """
        source = open_gguf(path, max_position=max_position)
        return cls(source, weights=weights, where="Engine.from_gguf", **{"tokenizer": path, **options})

    @classmethod
    def from_base(cls, base: PackedBase, **options: Any) -> Engine:
        """On weights that ``whet.models.packed_base.pack_base`` packed, which are not copied: others may hold them too.

        ``sync`` takes models on the same base, and copies their LoRA adapters.

        Args:
            base: weights that never change.
            options: see the class, but for formats and max_position, which are the base's.

        Raises:
            WhetTypeError: no base.
            WhetValueError: an option that is the base's.
        """
        where = "Engine.from_base"
        if not isinstance(base, PackedBase):
            raise WhetTypeError(f"{where}: base is a {type(base).__name__}, expected what pack_base(source) returns.")
        _refuse_formats(options, where)
        return cls(base.source(), where=where, **options)

    _merged = False

    def __reduce__(self) -> NoReturn:
        raise WhetTypeError(
            "Engine: an engine is neither copied nor pickled. Make another one from the model, where it is needed; on "
            "one packed base, Engine.from_base, several share the weights."
        )

    @property
    def tokenizer(self) -> Any:
        """Whose tokens' texts ``SamplingParams.stop`` is found in; None: there is none. Can be set."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer, self._texts = tokenizer, None

    # ------------------------------------------------------------------ sampling

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int = 1,
        sampling: SamplingParams | None = None,
        *,
        adapter: int | Sequence[int | None] | None = None,
        logprobs_mode: LogprobsMode = "sampling",
        keys: Sequence[StreamKey] | None = None,
    ) -> list[list[Completion]]:
        """Sample ``n`` completions for each prompt: ``result[prompt][sample]``.

        Args:
            prompt_ids: rows of token ids without padding, at least one token each.
            n: completions per prompt.
            sampling: the distribution, when a completion ends, and what is reported of it. A completion that reaches
                the model's last position ends there, with the finish reason "length".
            adapter: what ``add_adapter`` returned, for all prompts or for each; None: the model's own adapters, if any.
            logprobs_mode: "sampling": of the distribution that was drawn from; "model": of the model's own, at
                temperature 1, without filters, penalties and bias. ``top_logprobs`` are of the same.
            keys: the random numbers of each prompt's completions; None: those of prompts 0, 1, 2, ...

        Raises:
            WhetValueError: n below 1, an empty prompt, a token outside the vocabulary, a prompt that leaves no room for
                a token, one sequence larger than ``kv_bytes``, logits that hold NaN or infinity, or ``stop`` without a
                tokenizer that tells the texts of its tokens.
            WhetTypeError: token ids that are no integers.
        """
        return list(
            self.generate_each(prompt_ids, n, sampling, adapter=adapter, logprobs_mode=logprobs_mode, keys=keys)
        )

    def generate_each(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int = 1,
        sampling: SamplingParams | None = None,
        *,
        adapter: int | Sequence[int | None] | None = None,
        logprobs_mode: LogprobsMode = "sampling",
        keys: Sequence[StreamKey] | None = None,
    ) -> Iterator[list[Completion]]:
        """The results of ``generate``, prompt after prompt, each as soon as it and those before it are complete.

        All prompts are sampled in one batch meanwhile, whose weights are fixed until the iterator ends or is closed.
        """
        where = "Engine.generate"
        n = check_integer(where, "n", n, 1)
        prompts = check_token_rows(prompt_ids, self.config, where, "prompt_ids")
        chosen = stream_keys(keys, len(prompts), where)
        sampling = as_sampling(sampling, where)
        texts = self._texts_for(sampling, where)
        request = self._make_request(n, sampling, is_model_mode(logprobs_mode, where), texts, where)
        with (session := Session(self._calls, where)), session:
            session.begin()
            adapters = self._adapter_ids(adapter, len(prompts), where)
            jobs = [
                self._add_prompt(session, where, f"prompt_ids[{i}]", prompt, request, key, number)
                for i, (prompt, key, number) in enumerate(zip(prompts, chosen, adapters, strict=True))
            ]
            for job in jobs:
                session.run([job])
                yield [session.completion(job, j, self.policy_version, texts) for j in range(n)]

    def stream(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        adapter: int | None = None,
        logprobs_mode: LogprobsMode = "sampling",
        keep: bool = False,
    ) -> TokenStream:
        """The tokens of one completion, as they are drawn: ``for token in stream`` or ``async for token in stream``.

        The same tokens as ``generate([prompt], 1, sampling)``. Leaving the loop early, ``close()`` and a ``with`` block
        cancel what is left. With ``SamplingParams.stop`` every token has the text that may be shown once it is there:
        never a stop string, nor what could be the beginning of one.

        Args:
            keep: keep the keys and values of prompt and completion after the stream, whichever way it ends once its
                first token is drawn. A later prompt that begins with the same tokens computes only what follows them:
                to the token where its stream keeps its own, else in pages of 64. The tokens are the same. They are
                given up, least recently used first, when a call needs their memory, and all of them by ``sync``,
                ``remove_adapter`` and ``close``; until then they are ``kv_kept_bytes`` of ``memory``.
        """
        where = "Engine.stream"
        ids = check_token_row(prompt, self.config, where, "prompt")
        sampling = as_sampling(sampling, where)
        texts = self._texts_for(sampling, where)
        request = self._make_request(1, sampling, is_model_mode(logprobs_mode, where), texts, where)
        session = Session(self._calls, where)
        try:
            session.begin()
            [number] = self._adapter_ids(adapter, 1, where)
            job = self._add_prompt(session, where, "prompt", ids, request, StreamKey(0), number, keep)
            return TokenStream(session, job, texts)
        except BaseException:
            session.end()
            raise

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
        rows = check_token_rows(sequences, self.config, where, "sequences")
        starts = check_starts(start, rows, where)
        check_temperature(where, temperature)
        scores = self._score(rows, starts, adapter, temperature, return_entropy, False, where)
        logprobs = [of_row for of_row, _, _ in scores]
        return (logprobs, [entropy for _, entropy, _ in scores]) if return_entropy else logprobs

    def logits(self, sequence: Sequence[int], *, adapter: int | None = None) -> np.ndarray:
        """(T, V) float32: the logits after every token of a sequence.

        Raises:
            WhetValueError, WhetTypeError: as ``generate``.
        """
        where = "Engine.logits"
        row = check_token_row(sequence, self.config, where, "sequence")
        [score] = self._score([row], [1], adapter, 1.0, False, True, where)
        return score[2].reshape(len(row), self.config.vocab_size)

    # ------------------------------------------------------------------ weights

    def sync(self, model: Any, version: int | None = None) -> None:
        """Take over the weights of ``model`` as they are now, all or none.

        Shapes and finiteness are checked before the first weight changes; an interrupt that falls between two weights
        is raised when all are replaced. Where the model's LoRA adapters are kept apart and its other weights are, by a
        64-bit checksum of all their bytes, those that the engine has, only the adapters are copied. So they are of a
        model on the engine's base, whose other weights nobody changes.

        Args:
            model: a live module; or, for an engine far from it, the arrays that
                ``whet.models.sources.arrays.named_arrays`` makes of one: all weights, the adapters, or both. Adapters
                alone are put beside the weights that the engine has.
            version: what ``policy_version`` becomes, at least 1; None: one more than it is.

        Raises:
            EngineBusyError: a completion is under way.
            WhetValueError: another model than the engine was made for, one on another base or on none where the engine
                is on one, weights that hold NaN or infinity or are beyond the range of their format, or
                adapters alone where the weights are torn or released.
            WhetTypeError: arrays of other types.
        """
        where = "Engine.sync"
        if version is not None:
            check_integer(where, "version", version, 1)
        with (session := Session(self._calls, where)), session:
            session.begin(exclusive=True)
            weights = self._calls.use(where).weights
            if isinstance(model, Mapping):
                source = open_arrays(model, self.config, self._targets, self.base, where)
                slices = list(check_range(source.slices(), where, weights, self.config))
                if not slices and self._calls.unusable:
                    raise WhetValueError(f"{where}: these are adapters alone, and {self._calls.unusable}.")
            else:
                source = open_module(model, merged=self._merged, max_position=self.config.max_position)
                check_same_model(self.config, source.config, where)
                check_same_base(self.base, source.base, where)
                slices = list(check_range(list_slices(source, where), where, weights, self.config))
            self._replace(slices, source, where, self.policy_version + 1 if version is None else version)

    def add_adapter(self, adapter: Any) -> int:
        """Take in a LoRA adapter that ``generate(adapter=...)`` then names, beside others and in one batch with them.

        Args:
            adapter: a model in PEFT; the folder that PEFT saves; or by the module's name in the Hugging Face model
                ("model.layers.0.self_attn.q_proj") a ``MicroLoRA`` or (A (r, k), B (n, r), scaling).

        Raises:
            WhetValueError: a module that the model does not have, other shapes, or more than plain LoRA.
        """
        where = "Engine.add_adapter"
        parts = adapter_parts(self._targets, self.config, adapter, where)
        with (new := NewAdapter(self._calls)), new:
            self._calls.use(where).add_adapter(new.number, parts)
            self._calls.adapters.add(new.number)
            return new.number

    def remove_adapter(self, adapter: int) -> None:
        """Forget an adapter.

        Raises:
            EngineBusyError: a completion is under way.
            WhetValueError: there is no such adapter.
        """
        where = "Engine.remove_adapter"
        with (session := Session(self._calls, where)), session:
            session.begin(exclusive=True)
            self._check_adapter(adapter, where)

            def forget() -> None:
                self._calls.adapters.discard(adapter)
                self._calls.use(where).remove_adapter(adapter)

            run_to_its_end(forget)

    # ------------------------------------------------------------------ life

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by name.

        weights_bytes; adapters_bytes; kv_bytes: the budget in whole pages; kv_used_bytes: of calls that are under way;
        kv_kept_bytes: of streams that ended and keep theirs, given up where a call needs them; kv_page_bytes;
        workspace_bytes. Of the budget and the workspace, kv_committed_bytes and workspace_committed_bytes are what the
        system has given for them: pages that were ever used, and not released since.
        """
        return self._calls.use("Engine.memory").memory()

    def release_memory(self) -> int:
        """Give the memory of free pages and of the workspace back to the system, such as before a training step.

        Nothing else changes: calls that are under way go on, what streams keep stays, and the next call asks the system
        for memory again as it needs it.

        Returns:
            How many bytes it was, at most.
        """
        return self._calls.use("Engine.release_memory").release_memory()

    def release_weights(self) -> int:
        """Give the memory of weights that the next ``sync`` packs anew back to the system, until then.

        Before a training step that changes all of them, which then has it for gradients. Nothing happens where ``sync``
        keeps weights: those of a base, and those beside adapters that are kept apart.

        Returns:
            How many bytes it was.

        Raises:
            EngineBusyError: a completion is under way.
        """
        where = "Engine.release_weights"
        with (session := Session(self._calls, where)), session:
            session.begin(exclusive=True)
            if self.base is not None or self._stored is not None:
                return 0
            self._calls.unusable = _RELEASED
            return self._calls.use(where).weights.release()

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """The memory that the engine holds, for ``whet.memory_report``; nothing once it is closed."""
        core = self._calls.core
        if core is None:
            return
        try:
            memory = core.memory()
        except WhetError:  # a thread of the parent process left it in the middle of a step, and nobody can use it here
            return
        if self.base is not None:
            yield from self.base.memory_blocks()
        own = ["weights_bytes"] if self.base is None and self._calls.unusable != _RELEASED else []
        for part, *names in (
            ("sampler_weights", *own, "adapters_bytes"),
            ("kv_cache", "kv_committed_bytes"),
            ("workspace", "workspace_committed_bytes"),
        ):
            yield part, (part, id(core)), sum(memory[name] for name in names)

    def close(self) -> None:
        """Give the memory back, and end the calls that are under way. Idempotent."""
        self._calls.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        return f"Engine({c.n_layers} layers, hidden_dim={c.hidden_dim}, {c.n_parameters:,} parameters)"

    # ------------------------------------------------------------------ its own

    def _replace(self, slices: Sequence[RowSlice], source: ModelSource, where: str, version: int = 0) -> None:
        """The weights in place of those before, once all has been checked that can be wrong with them.

        Those of a new engine, version 0, are checked as they are packed: nobody has it yet.
        """
        calls = self._calls
        core = calls.use(where)
        stored = self._stored if not slices else checksums(slices) if source.adapters else None
        is_packed = not slices or (stored is not None and stored == self._stored and not calls.unusable)
        with (new := NewAdapter(calls)), new:
            if source.adapters:
                core.add_adapter(new.number, adapter_parts({}, self.config, source.adapters, where))
            own_adapter, before = new.number if source.adapters else 0, calls.own_adapter

            def replace() -> None:
                if not is_packed:
                    calls.unusable, self._stored = _TORN, None
                    pack_slices(
                        core.weights, slices if version else check_range(slices, where, core.weights, self.config)
                    )
                calls.own_adapter, self.policy_version, self._stored, calls.unusable = own_adapter, version, stored, ""
                core.remove_adapter(before)

            if version == 0:
                replace()
            else:
                run_to_its_end(replace)  # half of the weights would be neither; a second interrupt leaves them torn

    def _adapter_ids(self, adapter: Any, n: int, where: str) -> list[int]:
        each = list(adapter) if isinstance(adapter, Sequence) else [adapter] * n
        if len(each) != n:
            raise WhetValueError(f"{where}: adapter has {len(each)} entries, expected one for each of {n} rows.")
        for number in each:
            if number is not None:
                self._check_adapter(number, where)
        return [self._calls.own_adapter if number is None else number for number in each]

    def _check_adapter(self, adapter: Any, where: str) -> None:
        if not isinstance(adapter, Integral) or adapter not in self._calls.adapters:
            known = sorted(self._calls.adapters)
            raise WhetValueError(f"{where}: there is no adapter {adapter!r:.60}; there are {known}.")

    def _texts_for(self, sampling: SamplingParams, where: str) -> TokenTexts | None:
        """The texts of the tokens, where there are stop strings to be found in them."""
        if not sampling.stop:
            return None
        if self._tokenizer is None:
            raise WhetValueError(
                f"{where}: stop is {sampling.stop!r}, and the engine has no tokenizer to find it in the text with. Set "
                f"engine.tokenizer, make the engine with tokenizer=..., or pass stop_token_ids."
            )
        with self._reading:  # once, for calls from many threads
            if self._texts is None:
                self._texts = read_token_texts(self._tokenizer, where)
            return self._texts

    def _make_request(
        self, n: int, s: SamplingParams, model_logprobs: bool, texts: TokenTexts | None, where: str
    ) -> dict[str, Any]:
        """The common part of a call's requests, as the core takes it."""
        check_sampling(s, self.config, where)
        names = [*DISTRIBUTION_SETTINGS, "top_logprobs"]
        settings = {name: getattr(s, name) for name in names} | {"top_k": min(s.top_k, self.config.vocab_size)}
        special = texts.special_among(s.stop) if texts else []
        return {
            "n": n,
            "min_new_tokens": min(s.min_new_tokens, self.config.max_position),
            "max_new_tokens": min(s.max_new_tokens, self.config.max_position),
            "stop_tokens": np.array([*s.stop_token_ids, *special], np.int32),
            "stop_strings": texts and _core.StopStrings(texts.core, [text.encode() for text in s.stop]),
            "seed": s.seed % 2**64,
            "sampling": {**settings, "model_logprobs": model_logprobs},
        }

    def _add_prompt(
        self,
        session: Session,
        where: str,
        name: str,
        prompt: np.ndarray,
        request: dict[str, Any],
        key: StreamKey,
        adapter: int,
        keep: bool = False,
    ) -> int:
        check_can_continue(prompt, self.config, where, name)
        hint = "Raise kv_bytes or lower max_new_tokens."
        own = {"tokens": prompt, "adapter": adapter, "keep": keep, **key._asdict()}
        return session.add("prompt", name, hint, **own, **request)

    def _score(
        self,
        rows: list[np.ndarray],
        starts: list[int],
        adapter: Any,
        temperature: float,
        entropy: bool,
        logits: bool,
        where: str,
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(log-probs, entropies, logits) of every row."""
        with (session := Session(self._calls, where)), session:
            session.begin()
            adapters = self._adapter_ids(adapter, len(rows), where)
            jobs = [
                session.add(
                    "score",
                    f"row {i}",
                    "Raise kv_bytes.",
                    tokens=row,
                    score_from=start,
                    temperature=temperature,
                    entropy=entropy,
                    logits=logits,
                    adapter=number,
                )
                for i, (row, start, number) in enumerate(zip(rows, starts, adapters, strict=True))
            ]
            session.run(jobs)
            return [session.scores(job) for job in jobs]


def _refuse_formats(options: dict[str, Any], where: str) -> None:
    for name in ("weights", "embedding", "head"):
        if name in options:
            raise WhetValueError(
                f"{where}: {name} is {options[name]!r}, and the weights are packed already. Leave it out, or pass it "
                f"to pack_base."
            )
