"""The native engine: batched sampling and scoring, with weights that a trainer updates between calls.

Continuous batching: a prompt is computed once for all its samples, and waiting prompts join as completions finish. The
tokens of a completion depend only on (seed, prompt, sample) and the weights, to the bit: not on the batch, its order,
the threads, or the size of the KV cache. ``Engine`` is a ``whet.rollout.RolloutEngine``. The forward pass is
cpp/engine/transformer.cpp, its definition ``whet.models.reference``.

The engine decodes text only to find stop strings, and does not train.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Integral
from typing import Any, Literal, NoReturn, cast

import numpy as np

from whet import _core
from whet.config.sampling import DISTRIBUTION_SETTINGS, Completion, SamplingParams, StreamKey, stream_keys
from whet.config.settings import Device
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
from whet.engine.draft import open_draft
from whet.engine.grammar import Constraint, Grammars
from whet.engine.session import (
    Call,
    CoreHandle,
    EngineBusyError,
    NewAdapter,
    Scores,
    Session,
    TokenStream,
    run_uninterruptible,
)  # fmt: skip
from whet.errors import WhetError, WhetTypeError, WhetValueError, check_choice, check_integer, check_temperature
from whet.gpu.device import open_device
from whet.gpu.program import Program
from whet.learner.learner import Learner
from whet.memory import register_holder
from whet.models.architecture import ModelConfig, RowSlice
from whet.models.formats import check_kv_dtype, choose_formats
from whet.models.loading import check_range, checksums, defer_slices, list_slices, pack_slices, split_deferrable
from whet.models.packed_base import PackedBase
from whet.models.sizes import KV_BYTES, MAX_BATCH, PREFILL_CHUNK
from whet.models.slots import ModelSource
from whet.models.sources.arrays import open_arrays
from whet.models.sources.frozen import freeze_source
from whet.models.sources.gguf import open_gguf
from whet.models.sources.gguf_container import GGUFFile
from whet.models.sources.live import open_module
from whet.models.sources.pretrained import open_pretrained
from whet.models.tokenizers.token_texts import TokenTexts, read_token_texts

Pooling = Literal["last", "mean"]
"""Reduction of a sequence's hidden states to its embedding."""

_PARTIAL_SYNC = "a sync was interrupted, and only part of the weights is new. Call sync again, or make a new engine"
_RELEASED = "release_weights freed the weights. Call sync(model) first"


class Engine:
    """Samples completions and scores sequences.

    Created by ``from_model``, ``from_pretrained``, ``from_gguf`` or ``from_base``, which share these options (a packed
    base fixes the first three):

        max_position: tokens of the longest sequence. Default: the model's. Rotary frequencies that depend on the length
            are resolved for it: longrope's short factors up to the original length, its long factors above.
        weights: a format in ``whet.models.formats.FORMATS``: "bf16" (the default for modules and folders), "float32",
            "int8" (per output row), "int4" (q4_0), GGUF's blocks such as "q8_0" and "q4_k", or llama.cpp's mixtures
            "q4_k_m" and "q5_k_m". A matrix whose row length is not a multiple of a K-quant's 256 falls back as in
            llama.cpp (q5_0 for q4_k, q5_1 for q5_k, q8_0 for q6_k), and to int8 if not a multiple of 32. Norms, biases
            and learned positions are float32.
            GGUF's formats have float16 scales: a block of q8_0 whose largest weight is below 4e-6 becomes 0, as in
            llama.cpp. A tensor that loses more than half of its norm this way is rejected, as is a weight beyond the
            format's range (8e6 in q8_0, 3.39e38 in bf16).
        embedding, head: separate formats. Default: the mixture's, q8_0 with the 4- and 5-bit formats, else
            ``weights``. A tied head is the embedding, in the head's format.
        kv_bytes: size of the KV cache, committed lazily; prompts that do not fit wait.
        kv_dtype: format of keys and values. Default: "float32" with float32 weights, else "bfloat16". "q8" takes about
            half of the memory of "bfloat16": keys of 9 bits and values of 8, with scales per token and KV head.
        max_batch: completions per batch.
        prefill_chunk: prompt tokens per step, in addition to the decoded completions.
        speculation: compute up to 15 more tokens of a completion in a step where its text repeats its prompt or itself
            (prompt lookup, Saxena 2023), and keep those that decoding one by one draws: the same tokens and log-probs,
            to the bit. Their number follows the measured share of right tokens and the measured time of a step. Without
            effect for models with convolutions or linear attention, and with penalties, grammars or recorded sets of
            tokens.
        draft: a smaller model with the same tokenizer, whose draws speculation computes ahead where the text does not
            repeat: the path of a folder or GGUF file, or a ``PackedBase``. It needs memory for its weights, and per
            token of a sequence for its keys and values, in addition to ``kv_bytes``. None: no draft model.
        expert_bytes: of a mixture's experts that are packed from a file when a token is first given to them, the most
            that stay packed after a step, the most recently used; 0: all.
        device: "cpu"; or "gpu", through WebGPU (``pip install 'whet[gpu]'``), with the weights in the GPU's memory (a
            packed base also stays in the process's) and activations in float32. Tokens are drawn with the same random
            numbers: they are the CPU's with float32 activations, except where rounding decides. "The same bits" is a
            promise of the CPU only. What has no kernel is refused: kv_dtype "q8", heads of more than 256 elements, and
            adapters with norms or of experts.
        tokenizer: decodes tokens for ``SamplingParams.stop``: a fast tokenizer of transformers, a tokenizer from
            ``whet.models.tokenizers.read_tokenizer``, or the path of a folder or GGUF file with one, which is read when
            stop is first used. Default in ``from_pretrained`` and ``from_gguf``: the model's.

    Attributes:
        config: the architecture.
        policy_version: number of ``sync`` calls, or the version passed to the last one; every completion carries the
            version that sampled it.
        formats: slot -> format of every matrix; "q4_k, q6_k" if it has several.
        draft: the packed weights of the draft model, or None.
        base: the packed weights that the engine shares; None: it has separate weights, which ``sync`` replaces.
        merged_adapter: the folder of the adapter that its weights have (``whet.text.model.load_engine``); empty: none.

    Activations between products are float32.
    Thread-safe: concurrent calls interleave per step. In a process forked while another thread was in a step, the
    engine's methods raise a WhetError; a new engine works. Engines cannot be copied or pickled.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        weights: str | None = "bf16",
        embedding: str | None = None,
        head: str | None = None,
        kv_bytes: int = KV_BYTES,
        kv_dtype: str | None = None,
        max_batch: int = MAX_BATCH,
        prefill_chunk: int = PREFILL_CHUNK,
        speculation: bool = True,
        draft: str | os.PathLike[str] | GGUFFile | PackedBase | None = None,
        expert_bytes: int = 0,
        device: Device = "cpu",
        tokenizer: Any = None,
        where: str = "Engine",
    ) -> None:
        if not isinstance(source, ModelSource):
            raise WhetTypeError(
                f"{where}: source is {type(source).__name__}. Use Engine.from_pretrained for the path of a folder or "
                f"GGUF file, Engine.from_model for a module or a Learner."
            )
        for name, value in (("kv_bytes", kv_bytes), ("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            check_integer(where, name, value, 1)
        check_integer(where, "expert_bytes", expert_bytes, 0)
        check_choice(where, "device", device, Device)
        if not isinstance(speculation, bool):
            raise WhetTypeError(f"{where}: speculation is {speculation!r:.60}, expected True or False.")
        if draft is not None and not speculation:
            raise WhetValueError(f"{where}: draft is set, and speculation is False. Omit one of them.")
        self.config: ModelConfig = source.config
        self.policy_version = 0
        self._reading = threading.Lock()
        self.tokenizer = tokenizer
        self.merged_adapter: str | os.PathLike[str] = ""
        self.base = source.base
        packed = source.base or PackedBase(source, choose_formats(source, weights, embedding, head, where))
        self.formats = packed.formats
        if expert_bytes and device != "cpu":
            raise WhetValueError(
                f"{where}: expert_bytes is {expert_bytes}, and on a GPU all experts stay in memory. Omit one of them."
            )
        self.draft = None if draft is None else open_draft(draft, source.config, tokenizer, where)
        slices = list_slices(source, where)
        if expert_bytes and not split_deferrable(slices, self.formats)[1]:
            reason = "converts them when it loads them" if self.config.n_experts else "has none"
            raise WhetValueError(
                f"{where}: expert_bytes is {expert_bytes}, of experts that are packed on demand, and the model "
                f"{reason}. Omit it, or pass a mixture of experts in its file's own format."
            )
        kv_type = _core.KvType[check_kv_dtype(where, kv_dtype, packed.kv_format)]
        self._program: Program | None = None
        if device == "gpu":
            self._program = Program(
                open_device(where), packed.core, kv_type=kv_type, kv_bytes=kv_bytes,
                max_rows=max_batch + prefill_chunk, n_used_experts=source.config.n_used_experts, where=where,
            )  # fmt: skip
            kv_bytes = min(kv_bytes, self._program.kv_bytes)
        core = _core.Engine(
            packed.core, kv_bytes=kv_bytes, max_batch=max_batch, chunk=prefill_chunk, kv_type=kv_type,
            expert_bytes=expert_bytes, speculation=speculation, draft=self.draft and self.draft.core,
            device=self._program,
        )  # fmt: skip
        self._calls = CoreHandle(core)
        self._stored: Any = None
        self._targets = source.targets
        self._replace(slices, source, where)
        register_holder(self)

    @classmethod
    def from_model(
        cls, model: Any, *, merge_adapters: bool = False, max_position: int | None = None, **options: Any
    ) -> Engine:
        """Create an engine from the current weights of a live Hugging Face module, or of a ``Learner``; see ``sync``.

        Args:
            model: a model of a family in ``whet.models.families``, optionally with PEFT's LoRA; or a ``Learner``, whose
                base the engine shares.
            merge_adapters: pack W + scaling B A. Default: compute adapters separately; if nothing else has changed,
                ``sync`` updates only the adapters.
            max_position: see the class; ``sync`` keeps it.
            options: see the class. A model on a packed base keeps its formats.

        Raises:
            WhetValueError: an unsupported model or option, or weights out of range for their format.
        """
        where = "Engine.from_model"
        source = _open_live(model, merge_adapters, max_position, where)
        if source.base is not None:
            _reject_formats(options, where)
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
        """Create an engine from a Hugging Face folder (config.json and safetensors) or a GGUF file, without torch.

        Args:
            weights: see the class. Default: bf16 for a folder, see ``from_gguf`` for a GGUF file.

        Raises:
            WhetTypeError: ``path`` is not a path.
            WhetValueError: the model is missing, damaged or not supported, or its weights are out of range for their
                format.
        """
        return cls._from_path(open_pretrained, path, max_position, "Engine.from_pretrained", weights=weights, **options)

    @classmethod
    def from_gguf(
        cls,
        path: str | os.PathLike[str],
        *,
        max_position: int | None = None,
        weights: str | None = None,
        **options: Any,
    ) -> Engine:
        """Create an engine from a GGUF file, or from any file of a split model; see ``open_gguf``.

        Args:
            weights: see the class. Default: keep the file's integers and scales, and pack floats as bf16. Q2_K and
                IQ4_XS become Q8_0, whose scales are rounded (cpp/engine/quantize.h).

        Raises:
            WhetTypeError, WhetValueError: as ``from_pretrained``.
        """
        return cls._from_path(open_gguf, path, max_position, "Engine.from_gguf", weights=weights, **options)

    @classmethod
    def _from_path(cls, open_model: Any, path: Any, max_position: int | None, where: str, **options: Any) -> Engine:
        if not isinstance(path, (str, os.PathLike, GGUFFile)):
            raise WhetTypeError(f"{where}: path is {path!r:.60}, expected the path of a model.")
        return cls(open_model(path, max_position=max_position), where=where, **{"tokenizer": path, **options})

    @classmethod
    def from_base(cls, base: PackedBase, **options: Any) -> Engine:
        """Create an engine on weights from ``whet.models.packed_base.pack_base``, shared without a copy.

        ``sync`` accepts models on the same base, and copies their LoRA adapters.

        Args:
            base: immutable weights.
            options: see the class, except formats and max_position, which the base fixes.

        Raises:
            WhetTypeError: ``base`` is not a PackedBase.
            WhetValueError: an option that the base fixes.
        """
        where = "Engine.from_base"
        if not isinstance(base, PackedBase):
            raise WhetTypeError(f"{where}: base is a {type(base).__name__}, expected the result of pack_base(source).")
        _reject_formats(options, where)
        return cls(base.source(), where=where, **options)

    _merged = False
    _fingerprint = ""  # of weights that are only on a GPU

    def __reduce__(self) -> NoReturn:
        raise WhetTypeError(
            "Engine: an engine cannot be copied or pickled. Make another one from the model; with Engine.from_base "
            "several engines share packed weights."
        )

    @property
    def tokenizer(self) -> Any:
        """The tokenizer for ``SamplingParams.stop``, or None. Can be set."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer, self._texts, self._grammars = tokenizer, None, None

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
            sampling: distribution, stop conditions and reported values. A completion that reaches the model's last
                position ends with the finish reason "length".
            adapter: number from ``add_adapter``, for all prompts or for each; None: the model's adapters, if any.
            logprobs_mode: "sampling": log-probs of the sampled distribution; "model": of the model's distribution at
                temperature 1, without filters, penalties and bias. Applies to ``top_logprobs`` too.
            keys: keys of the random numbers of each prompt's completions. Default: prompts 0, 1, 2, ...

        Raises:
            WhetValueError: n below 1, an empty prompt, a token outside the vocabulary, a prompt without room for a
                token, a sequence larger than ``kv_bytes``, logits with NaN or infinity, or ``stop`` without a suitable
                tokenizer.
            WhetTypeError: token ids that are not integers.
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
        """Yield the results of ``generate`` in the order of the prompts, each as soon as it is complete.

        All prompts are sampled in one batch. The weights are locked until the iterator ends or is closed.
        """
        where = "Engine.generate"
        n = check_integer(where, "n", n, 1)
        prompts = check_token_rows(prompt_ids, self.config, where, "prompt_ids")
        chosen = stream_keys(keys, len(prompts), where)
        sampling = as_sampling(sampling, where)
        texts = self._texts_for(sampling, where)
        request = self._make_request(n, sampling, is_model_mode(logprobs_mode, where), texts, where)
        constrain = self._constrain_by(sampling, where)
        if sampling.experts and not self.config.n_experts:
            raise WhetValueError(f"{where}: experts is set, and the model has none. Omit it.")
        with (session := Session(self._calls, where)), session:
            session.begin()
            adapters = self._adapter_ids(adapter, len(prompts), where)
            calls = [
                self._open_call(session, where, f"prompt_ids[{i}]", prompt, request, key, number, texts, constrain)
                for i, (prompt, key, number) in enumerate(zip(prompts, chosen, adapters, strict=True))
            ]
            for call in session.run_calls(calls):
                yield self.completions(call, n, sampling)

    def stream(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        adapter: int | None = None,
        logprobs_mode: LogprobsMode = "sampling",
        keep: bool = False,
    ) -> TokenStream:
        """Stream one completion: ``for token in stream`` or ``async for token in stream``.

        The tokens equal the ones from ``generate([prompt], 1, sampling)``. Leaving the loop early, ``close()`` and a
        ``with`` block cancel the completion. With ``SamplingParams.stop`` the text of a token never contains a stop
        string or a possible beginning of one.

        Args:
            keep: retain the keys and values of prompt and completion after the stream, however it ends, from the first
                token on. A later prompt with the same prefix computes only the tokens after it: exactly if its stream
                has ``keep`` too, else in pages of 64. Sampled tokens do not change. Retained pages are evicted, least
                recently used first, when a call needs memory, and by ``sync``, ``remove_adapter`` and ``close``; until
                then they count as ``kv_kept_bytes`` in ``memory``.
        """
        where = "Engine.stream"
        for name in ("kept_tokens", "experts"):
            if getattr(as_sampling(sampling, where), name):
                raise WhetValueError(f"{where}: {name} is set, which only completions report. Omit it.")
        call = self.open_prompt(
            prompt, 1, sampling, adapter=adapter, logprobs_mode=logprobs_mode, keep=keep, where=where
        )
        return TokenStream(call)

    def open_prompt(
        self,
        prompt: Sequence[int],
        n: int = 1,
        sampling: SamplingParams | None = None,
        *,
        adapter: int | None = None,
        logprobs_mode: LogprobsMode = "sampling",
        keep: bool = False,
        key: StreamKey | None = None,
        constrain: Callable[[], Constraint] | None = None,
        prompt_logprobs: int | None = None,
        where: str = "Engine.open_prompt",
    ) -> Call:
        """Begin ``n`` completions of a prompt whose steps the caller runs; arguments as in ``generate`` and ``stream``.

        The weights are locked until the call is closed.

        Args:
            key: of the random numbers of the completions. Default: the first prompt's.
            constrain: makes the constraint of a sample. Default: of the grammar in ``sampling``.
            prompt_logprobs: also score the prompt, with this many alternatives per token, from 0 to 20: ``Call.scores``
                returns the values of ``open_score`` once a token has been drawn. None: do not.
        """
        if prompt_logprobs is not None:
            _check_alternatives(where, "prompt_logprobs", prompt_logprobs)
        ids = check_token_row(prompt, self.config, where, "prompt")
        sampling = as_sampling(sampling, where)
        [key] = stream_keys(None if key is None else [key], 1, where)
        texts = self._texts_for(sampling, where)
        request = self._make_request(n, sampling, is_model_mode(logprobs_mode, where), texts, where)
        constrain = constrain or self._constrain_by(sampling, where)
        session = Session(self._calls, where)
        try:
            session.begin()
            [number] = self._adapter_ids(adapter, 1, where)
            return self._open_call(
                session, where, "prompt", ids, request, key, number, texts, constrain, keep, prompt_logprobs
            )  # fmt: skip
        except BaseException:
            session.end()
            raise

    def completions(self, call: Call, n: int = 1, sampling: SamplingParams | None = None) -> list[Completion]:
        """Return the ``n`` completions of an ``open_prompt`` call with these settings, once it is complete."""
        sampling = as_sampling(sampling, "Engine.completions")
        return [
            call.session.completion(call.job, j, self.policy_version, call.texts, sampling, self.config)
            for j in range(n)
        ]

    def open_score(
        self,
        sequence: Sequence[int],
        *,
        start: int = 1,
        top_logprobs: int = 0,
        adapter: int | None = None,
        keep: bool = False,
    ) -> Call:
        """Begin the computation of ``logprobs([sequence], ...)``, whose steps the caller runs.

        Args:
            keep: retain keys, values and scores of the full pages (64 tokens), as ``stream`` does. A later sequence
                with the same prefix takes them from the cache, if its ``top_logprobs`` is at most 1 and not more than
                this one. It waits for a sequence in progress that will leave them there.
        """
        where = "Engine.open_score"
        row = check_token_row(sequence, self.config, where, "sequence")
        [start] = check_starts(start, [row], where)
        return self._open_score(row, start, adapter, where, top_logprobs=top_logprobs, keep=keep)

    def _open_score(self, row: np.ndarray, start: int, adapter: Any, where: str, **values: Any) -> Call:
        session = Session(self._calls, where)
        try:
            session.begin()
            [job] = self._add_scores(session, [row], [start], adapter, where, **values)
            return Call(session, job, None)
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
        top_logprobs: int = 0,
        adapter: int | Sequence[int | None] | None = None,
    ) -> Any:
        """Compute teacher-forced log-probs of given tokens.

            logprobs[i][t] = log softmax(logits(tokens before start + t) / temperature)[sequence[start + t]]

        Args:
            sequences: rows of token ids.
            start: index of the first scored token, for all sequences or for each: the length of the prompt. A shared
                prefix is computed once (in pages of 64 tokens).
            temperature: above 0.
            return_entropy: also return the entropy of every distribution, in nats.
            top_logprobs: from 0 to 20; above 0, also return the most probable tokens of every distribution, as
                (token id, log-prob), most probable first.
            adapter: see ``generate``.

        Returns:
            A list of float32 arrays with ``len(sequence) - start`` numbers each; with return_entropy or top_logprobs,
            a tuple of that list and of the lists of entropies and alternatives that are requested.

        Raises:
            WhetValueError, WhetTypeError: as ``generate``, or start outside 1 ... len(sequence).
        """
        where = "Engine.logprobs"
        rows = check_token_rows(sequences, self.config, where, "sequences")
        starts = check_starts(start, rows, where)
        check_temperature(where, temperature)
        _check_alternatives(where, "top_logprobs", top_logprobs)
        scores = self._score(
            rows, starts, adapter, where, temperature=temperature, entropy=return_entropy, top_logprobs=top_logprobs
        )
        found: list[list[Any]] = [[score.logprobs for score in scores]]
        if return_entropy:
            found.append([score.entropies for score in scores])
        if top_logprobs:
            found.append([score.alternatives for score in scores])
        return tuple(found) if len(found) > 1 else found[0]

    def logits(self, sequence: Sequence[int], *, adapter: int | None = None) -> np.ndarray:
        """Compute the logits (T, V) float32 after every token of a sequence.

        Raises:
            WhetValueError, WhetTypeError: as ``generate``.
        """
        where = "Engine.logits"
        row = check_token_row(sequence, self.config, where, "sequence")
        [score] = self._score([row], [1], adapter, where, logits=True)
        return score.logits.reshape(len(row), self.config.vocab_size)

    def embed(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        pooling: Pooling = "last",
        adapter: int | Sequence[int | None] | None = None,
    ) -> np.ndarray:
        """Compute embeddings (n, hidden_dim) float32 of sequences from their final hidden states, after the last norm.

        Not normalised. An embedding depends only on its sequence, to the bit, as completions do.

        Args:
            sequences: rows of token ids.
            pooling: "last": the hidden state of the last token; "mean": the mean over all tokens, summed in float64.
            adapter: see ``generate``.

        Raises:
            WhetValueError, WhetTypeError: as ``generate``, or an unknown pooling.
        """
        where = "Engine.embed"
        check_choice(where, "pooling", pooling, Pooling)
        rows = check_token_rows(sequences, self.config, where, "sequences")
        starts = [_first_pooled(row, pooling) for row in rows]
        scores = self._score(rows, starts, adapter, where, hidden=True)
        found = [self.pool(each.hidden) for each in scores]
        return np.stack(found) if found else np.empty((0, self.config.hidden_dim), np.float32)

    def open_embed(self, sequence: Sequence[int], *, pooling: Pooling = "last", adapter: int | None = None) -> Call:
        """Begin the computation of ``embed([sequence], ...)``, whose steps the caller runs; ``pool`` completes it."""
        where = "Engine.open_embed"
        row = check_token_row(sequence, self.config, where, "sequence")
        check_choice(where, "pooling", pooling, Pooling)
        return self._open_score(row, _first_pooled(row, pooling), adapter, where, hidden=True)

    def pool(self, hidden: np.ndarray) -> np.ndarray:
        """Return the mean (hidden_dim,) of hidden states (T * hidden_dim,): ``Scores.hidden`` of ``open_embed``.

        Raises:
            WhetValueError: they hold NaN or infinity.
        """
        rows = hidden.reshape(-1, self.config.hidden_dim)
        if not np.isfinite(rows).all():
            raise WhetValueError("Engine.embed: hidden states hold NaN or infinity. Check the model's weights for NaN.")
        return (rows.mean(0, dtype=np.float64) / self.config.logits_scale).astype(np.float32)

    # ------------------------------------------------------------------ weights

    def sync(self, model: Any, version: int | None = None) -> None:
        """Copy the current weights of ``model``, all or none.

        Shapes and values are checked before the first weight changes; an interrupt is deferred until all are replaced.
        Only the LoRA adapters are copied if they are separate and a 64-bit checksum shows that the other weights have
        not changed, or if model and engine share a packed base.

        Args:
            model: a live module; a ``Learner`` on the engine's base, whose adapters are copied; the path of a folder or
                GGUF file, whose weights are converted to the engine's formats; a ``snapshot``; or, for an engine in
                another process, arrays from ``whet.models.sources.arrays.named_arrays``: all weights, the adapters, or
                both. Adapters without weights apply to the current weights.
            version: the new ``policy_version``, at least 1. Default: incremented by 1.

        Raises:
            EngineBusyError: a completion is in progress.
            WhetValueError: a different model or base, weights with NaN or infinity or out of range for their format, or
                adapters without weights after an interrupted sync or ``release_weights``.
            WhetTypeError: arrays of other types.
        """
        where = "Engine.sync"
        if version is not None:
            check_integer(where, "version", version, 1)
        with (session := Session(self._calls, where)), session:
            session.begin(exclusive=True)
            weights = self._calls.use(where).weights
            if isinstance(model, (Mapping, ModelSource)):
                is_source, arrays = isinstance(model, ModelSource), cast(Any, model)
                source = arrays if is_source else open_arrays(arrays, self.config, self._targets, self.base, where)
                slices = list(check_range(source.slices(), where, weights, self.config))
                if not slices and self._calls.unusable:
                    raise WhetValueError(
                        f"{where}: the arrays are adapters without weights, and {self._calls.unusable}."
                    )
            else:
                is_path = isinstance(model, (str, os.PathLike, GGUFFile))
                limit = self.config.max_position
                source = open_pretrained(model, max_position=limit) if is_path else None
                source = source or _open_live(model, self._merged, limit, where)
                check_same_model(self.config, source.config, where)
                check_same_base(self.base, source.base, where)
                slices = list(check_range(list_slices(source, where), where, weights, self.config))
            self._replace(slices, source, where, self.policy_version + 1 if version is None else version)

    def snapshot(self, model: Any) -> ModelSource:
        """Copy the weights of a module or a ``Learner`` for a later ``sync`` of this engine; see ``sync``.

        Copies the adapters only if nothing else has changed since the last ``sync``.
        """
        where = "Engine.snapshot"
        source = _open_live(model, self._merged, self.config.max_position, where)
        check_same_model(self.config, source.config, where)
        check_same_base(self.base, source.base, where)
        slices = list_slices(source, where)
        is_known = self._stored is not None and source.adapters and checksums(slices) == self._stored
        return freeze_source(source, [] if is_known else slices)

    def add_adapter(self, adapter: Any) -> int:
        """Add a LoRA adapter and return its number for ``generate(adapter=...)``; one batch may mix adapters.

        Norms in PEFT's ``modules_to_save`` are part of an adapter.

        Args:
            adapter: a PEFT model, a PEFT folder, a ``Learner``, or a mapping from module names of the Hugging Face
                model ("model.layers.0.self_attn.q_proj") to ``MicroLoRA`` or (A (r, k), B (n, r), scaling), or, for a
                norm, to {"weight": (n,)} and its "bias", if any.

        Raises:
            WhetValueError: an unknown module, wrong shapes, more than plain LoRA and norms, or a reward model.
        """
        where = "Engine.add_adapter"
        given = () if self.merged_adapter and adapter == self.merged_adapter else adapter
        parts = adapter_parts(self._targets, self.config, given, where)
        with (new := NewAdapter(self._calls)), new:
            self._add_adapter(new.number, parts, where)
            self._calls.adapters.add(new.number)
            return new.number

    def remove_adapter(self, adapter: int) -> None:
        """Remove an adapter. Calls in progress complete with it.

        Retained pages are evicted at once if no call is in progress, else when a call needs memory.

        Raises:
            WhetValueError: there is no such adapter.
        """
        where = "Engine.remove_adapter"
        with (session := Session(self._calls, where)), session:
            session.begin()
            self._check_adapter(adapter, where)

            def remove() -> None:
                self._calls.adapters.discard(adapter)
                self._calls.use(where).remove_adapter(adapter)

            run_uninterruptible(remove)
        with suppress(EngineBusyError):
            self.clear_prefix_cache()

    # ------------------------------------------------------------------ memory and lifetime

    @property
    def memory(self) -> dict[str, int]:
        """Sizes in bytes, by name.

        weights_bytes; experts_resident_bytes: experts of a file that are packed; adapters_bytes; kv_bytes: the budget
        in whole pages; kv_used_bytes: pages of calls in progress; kv_kept_bytes: retained pages of ended streams,
        evicted when a call needs memory; kv_page_bytes; kv_state_bytes: pages of the state of a sequence's convolutions
        and linear attention; workspace_bytes; kv_committed_bytes and workspace_committed_bytes: memory committed by the
        operating system for pages used since the last release; draft_bytes: weights of the draft model and committed
        memory of its keys, values and workspace; gpu_bytes: all buffers on a GPU.
        """
        memory = self._calls.use("Engine.memory").memory()
        if self._program is None:
            return {**memory, "gpu_bytes": 0}
        weights_bytes = memory["weights_bytes"] if self.base else 0
        return {**memory, "weights_bytes": weights_bytes, "gpu_bytes": self._program.nbytes}

    @property
    def drafts(self) -> tuple[int, int]:
        """Number of tokens that speculation has computed ahead, and how many of them were right."""
        return self._calls.use("Engine.drafts").drafts()

    def clear_prefix_cache(self) -> None:
        """Evict all retained pages, see ``stream``.

        Raises:
            EngineBusyError: a completion is in progress.
        """
        with (session := Session(self._calls, "Engine.clear_prefix_cache")), session:
            session.begin(exclusive=True)

    def release_memory(self) -> int:
        """Return the memory of free pages and of the workspace to the operating system, such as before a training step.

        Calls in progress and retained pages are not affected. Later calls commit memory again as needed.

        Returns:
            Upper bound of the released bytes.
        """
        return self._calls.use("Engine.release_memory").release_memory()

    def release_weights(self) -> int:
        """Return the memory of the weights to the operating system until the next ``sync``, which packs them again.

        A full training step can use it for gradients. A no-op if ``sync`` does not replace the weights: on a packed
        base, and with separate adapters; and on a GPU, whose engine has no weights in the process's memory.

        Returns:
            The released bytes.

        Raises:
            EngineBusyError: a completion is in progress.
        """
        where = "Engine.release_weights"
        with (session := Session(self._calls, where)), session:
            session.begin(exclusive=True)
            if self.base is not None or self._stored is not None or self._program is not None:
                return 0
            self._calls.unusable = _RELEASED
            return self._calls.use(where).weights.release()

    def memory_blocks(self) -> Iterator[tuple[str, Hashable, int]]:
        """Yield the memory of the engine for ``whet.memory_report``; nothing after ``close``."""
        core = self._calls.core
        if core is None:
            return
        try:
            memory = core.memory()
        except WhetError:  # forked while a thread of the parent was in a step: unusable
            return
        if self.base is not None:
            yield from self.base.memory_blocks()
        has_weights = self.base is None and self._calls.unusable != _RELEASED and self._program is None
        weights = ["weights_bytes"] if has_weights else []
        if self.draft is not None:
            yield from self.draft.memory_blocks()
        for part, *names in (
            ("sampler_weights", *weights, "adapters_bytes"),
            ("kv_cache", "kv_committed_bytes"),
            ("workspace", "workspace_committed_bytes"),
        ):
            yield part, (part, id(core)), sum(memory[name] for name in names)

    def fingerprint(self) -> str:
        """Return a digest of the current weights, in hexadecimal; equal weights in equal formats have equal digests."""
        weights = self._calls.use("Engine.fingerprint").weights
        return self._fingerprint or self._digest_weights(weights)

    def _digest_weights(self, weights: Any) -> str:
        slots = (f"{slot} {format} {weights.checksum(slot):x}" for slot, format in self.formats.items())
        return hashlib.sha256("\n".join(slots).encode()).hexdigest()

    def close(self) -> None:
        """Free all memory and end the calls in progress. Idempotent."""
        self._calls.close()
        self._program = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.config
        return f"Engine({c.n_layers} layers, hidden_dim={c.hidden_dim}, {c.n_parameters:,} parameters)"

    # ------------------------------------------------------------------ private

    def _replace(self, slices: Sequence[RowSlice], source: ModelSource, where: str, version: int = 0) -> None:
        """Replace the weights by checked ones; a new engine's, version 0, are checked while they are packed."""
        calls = self._calls
        core = calls.use(where)
        stored = self._stored if not slices else checksums(slices) if source.adapters else None
        is_packed = not slices or (stored is not None and stored == self._stored and not calls.unusable)
        with (new := NewAdapter(calls)), new:
            if source.adapters:
                self._add_adapter(new.number, adapter_parts({}, self.config, source.adapters, where), where)
            own_adapter, before = new.number if source.adapters else 0, calls.own_adapter

            def replace() -> None:
                if not is_packed:
                    calls.unusable, self._stored = _PARTIAL_SYNC, None
                    eager, deferred = (slices, []) if self._program else split_deferrable(slices, self.formats)
                    pack_slices(
                        core.weights, eager if version else check_range(eager, where, core.weights, self.config)
                    )
                    defer_slices(core.weights, deferred)
                if self._program is not None and not (version and is_packed):
                    self._program.upload()
                    if self.base is None:
                        self._fingerprint = self._digest_weights(core.weights)
                        core.weights.release()
                calls.own_adapter, self.policy_version, self._stored, calls.unusable = own_adapter, version, stored, ""
                core.remove_adapter(before)

            if version == 0:
                replace()
            else:
                run_uninterruptible(replace)  # a second interrupt leaves a partial sync

    def _add_adapter(self, number: int, parts: tuple[Any, Any], where: str) -> None:
        try:
            self._calls.use(where).add_adapter(number, *parts)
        except ValueError as error:
            if self._program is None or isinstance(error, WhetValueError):
                raise
            raise WhetValueError(
                f"{where}: device is 'gpu', which has no kernel for {error}. Merge the adapter: merge_adapters=True; "
                f"or omit device."
            ) from None

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
        """Return the texts of all tokens if there are stop strings, else None."""
        if not sampling.stop:
            return None
        if self._tokenizer is None:
            raise WhetValueError(
                f"{where}: stop is {sampling.stop!r}, and the engine has no tokenizer to decode with. Set "
                f"engine.tokenizer, make the engine with tokenizer=..., or pass stop_token_ids."
            )
        with self._reading:  # once, for calls from many threads
            if self._texts is None:
                self._texts = read_token_texts(self._tokenizer, where)
            return self._texts

    def _constrain_by(self, sampling: SamplingParams, where: str) -> Callable[[], Constraint] | None:
        """Return a function that makes the constraint of a sample; None: samples are free."""
        names = sampling.grammar_settings()
        if not names:
            return None
        if self._tokenizer is None:
            raise WhetValueError(
                f"{where}: {names[0]} is set, and the engine has no tokenizer. Set engine.tokenizer, or make the "
                f"engine with tokenizer=..."
            )
        if not sampling.stop_token_ids:
            raise WhetValueError(f"{where}: {names[0]} needs stop_token_ids: the tokens that end a completion.")
        with self._reading:
            if self._grammars is None or self._grammars.stop_ids != sampling.stop_token_ids:
                self._grammars = Grammars(self._tokenizer, self.config.vocab_size, sampling.stop_token_ids)
            grammars = self._grammars
        try:
            return partial(grammars.constrain, grammars.compile(sampling), sampling.grammar_after)
        except WhetValueError as error:
            raise WhetValueError(f"{where}: {error}") from None

    def _make_request(
        self, n: int, s: SamplingParams, model_logprobs: bool, texts: TokenTexts | None, where: str
    ) -> dict[str, Any]:
        """Build the part of the core's requests that all prompts of a call share."""
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
            "records_kept": s.kept_tokens,
            "records_experts": s.experts,
        }

    def _open_call(
        self,
        session: Session,
        where: str,
        name: str,
        prompt: np.ndarray,
        request: dict[str, Any],
        key: StreamKey,
        adapter: int,
        texts: TokenTexts | None,
        constrain: Callable[[], Constraint] | None,
        keep: bool = False,
        prompt_logprobs: int | None = None,
    ) -> Call:
        check_can_continue(prompt, self.config, where, name)
        hint = "Raise kv_bytes or lower max_new_tokens."
        fields = {"tokens": prompt, "adapter": adapter, "keep": keep, **key._asdict()}
        fields |= {"scored_alternatives": -1 if prompt_logprobs is None else prompt_logprobs}
        job = session.add("prompt", name, hint, constrained=constrain is not None, **fields, **request)
        return Call(session, job, texts, [constrain() for _ in range(request["n"])] if constrain else ())

    def _score(
        self, rows: list[np.ndarray], starts: list[int], adapter: Any, where: str, **values: Any
    ) -> list[Scores]:
        """Return the scores of every row; ``values`` as in ``_add_scores``."""
        with (session := Session(self._calls, where)), session:
            session.begin()
            jobs = self._add_scores(session, rows, starts, adapter, where, **values)
            session.run(jobs)
            return [session.scores(job) for job in jobs]

    def _add_scores(
        self,
        session: Session,
        rows: list[np.ndarray],
        starts: list[int],
        adapter: Any,
        where: str,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        logits: bool = False,
        hidden: bool = False,
        top_logprobs: int = 0,
        keep: bool = False,
    ) -> list[int]:
        adapters = self._adapter_ids(adapter, len(rows), where)
        return [
            session.add(
                "score",
                f"row {i}",
                "Raise kv_bytes.",
                tokens=row,
                score_from=start,
                temperature=temperature,
                entropy=entropy,
                logits=logits,
                hidden=hidden,
                top_logprobs=top_logprobs,
                adapter=number,
                keep=keep,
            )
            for i, (row, start, number) in enumerate(zip(rows, starts, adapters, strict=True))
        ]


def _check_alternatives(where: str, name: str, n: Any) -> None:
    if not 0 <= check_integer(where, name, n, 0) <= 20:
        raise WhetValueError(f"{where}: {name} is {n}, expected an integer from 0 to 20.")


def _first_pooled(row: np.ndarray, pooling: Pooling) -> int:
    """Return the number of tokens up to the first whose hidden state counts."""
    return len(row) if pooling == "last" else 1


def _open_live(model: Any, merged: bool, max_position: int | None, where: str) -> ModelSource:
    """Open a live module or a learner."""
    if not isinstance(model, Learner):
        return open_module(model, merged=merged, max_position=max_position)
    if merged:
        raise WhetValueError(f"{where}: a Learner's base is packed and shared. Omit merge_adapters.")
    if max_position not in (None, model.base.config.max_position):
        raise WhetValueError(
            f"{where}: max_position is {max_position}, and the learner's base was packed for "
            f"{model.base.config.max_position}. Omit it."
        )
    return model.source()


def _reject_formats(options: dict[str, Any], where: str) -> None:
    for name in ("weights", "embedding", "head"):
        if name in options:
            raise WhetValueError(
                f"{where}: {name} is {options[name]!r}, and the weights are already packed. Omit it, or pass it to "
                f"pack_base."
            )
