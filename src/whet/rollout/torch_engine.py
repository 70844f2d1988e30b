"""Rollouts from a live torch module: a Hugging Face model, a module with its own generate, or any forward.

The module's interface selects one of three backends:

- a Hugging Face causal model: its ``generate`` with the KV cache and left-padded prompts; sampling is done here, not by
  the generation config;
- a module with ``generate(input_ids, max_new_tokens=...) -> (B, P + T)``: that method, on groups of prompts of equal
  length. It returns no log-probs and uses torch's generator;
- any other module: ``forward(input_ids) -> logits`` on the whole sequence for every token.

Tokens are drawn by inverse CDF from uniforms keyed by (seed, prompt, sample, position), so that with the first and
third backend a completion does not depend on the rest of the batch if the logits do not.

Decodes text only to find stop strings, and computes a prompt once per sample.

Filters: top-k (Fan et al. 2018), top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024), repetition
penalty (Keskar et al. 2019).
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from whet.config.kept_tokens import KeptTokens
from whet.config.sampling import DISTRIBUTION_SETTINGS, Completion, SamplingParams, StreamKey, stream_keys
from whet.errors import WhetTypeError, WhetValueError, check_integer
from whet.models.tokenizers.token_texts import TokenTexts, read_token_texts
from whet.nn.causal_lm import causal_logits, padded_batch, token_lists
from whet.nn.modules import inner_module, module_device, module_mode, position_limit


class Sampler:
    """Token sampler with the settings of ``SamplingParams``.

    Logits are converted to float32 and processed in this order: min_new_tokens, logit bias, repetition penalty,
    frequency and presence penalty, temperature, top-k, top-p (of the tokens that top-k keeps), min-p. Ties at a
    threshold keep lower token ids. Temperature 0 selects the most probable token, regardless of filters; its
    log-probability is under the unfiltered distribution at temperature 1.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling

    def draw(self, logits: Tensor, uniforms: Tensor, **history: Any) -> tuple[Tensor, Tensor]:
        """Draw one token per row from ``filtered_logits(logits, **history)``; see ``draw_from``."""
        return self.draw_from(self.filtered_logits(logits, **history), uniforms)

    def draw_from(self, z: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token per row.

        Args:
            z: (R, V) float32, from ``filtered_logits``.
            uniforms: (R,) float64 in [0, 1): draws the first token, in order of token id, whose cumulative probability
                exceeds the uniform.

        Returns:
            ``(token_ids (R,) int64, logprobs (R,) float32)`` under the distribution drawn from. Logits with NaN or
            +inf, or only -inf, give a NaN log-prob.
        """
        if self.sampling.temperature == 0:
            token_ids = z.argmax(dim=-1, keepdim=True)
        else:
            # MPS has no float64.
            wide = torch.float32 if z.device.type == "mps" else torch.float64
            cdf = torch.softmax(z, dim=-1).cumsum(dim=-1, dtype=wide)
            total = cdf[:, -1:]
            below = torch.nextafter(total, torch.zeros_like(total))
            target = torch.minimum(uniforms.to(z.device, wide)[:, None] * total, below)
            token_ids = torch.searchsorted(cdf, target, right=True).clamp(max=z.shape[1] - 1)
        logprobs = z.gather(-1, token_ids) - torch.logsumexp(z, dim=-1, keepdim=True)
        logprobs = torch.where(torch.isfinite(logprobs), logprobs, torch.nan)
        return token_ids.squeeze(-1), logprobs.squeeze(-1)

    def alternatives(self, z: Tensor) -> list[list[tuple[int, float]]]:
        """Return the top_logprobs most probable tokens of each row of ``filtered_logits``, without filtered tokens.

        Tokens are in order of decreasing probability; ties in order of id.
        """
        best, ids = (part[:, : self.sampling.top_logprobs] for part in z.sort(dim=-1, descending=True, stable=True))
        logprobs = best - torch.logsumexp(z, dim=-1, keepdim=True)
        rows = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return [[pair for pair in zip(*row, strict=True) if pair[1] > -math.inf] for row in rows]

    def filtered_logits(
        self,
        logits: Tensor,
        seen: Tensor | None = None,
        counts: Tensor | None = None,
        n_drawn: int | None = None,
    ) -> Tensor:
        """Return (R, V) float32 logits of the distribution drawn from; -inf for filtered tokens.

        Args:
            logits: (R, V), any floating dtype.
            seen: (R, V) bool, True for tokens already in the sequence; for the repetition penalty only.
            counts: (R, V) integers, counts of tokens in the completion; for frequency and presence penalties only.
            n_drawn: number of tokens in the completions; for min_new_tokens only.
        """
        s = self.sampling
        z = self._adjusted_logits(logits.float(), seen, counts, n_drawn)
        if s.temperature == 0:
            return z
        z = z / s.temperature
        kept = self._top(z)
        if s.min_p > 0:
            kept = kept & (z >= z.amax(dim=-1, keepdim=True) + math.log(s.min_p))
        # NaN passes every filter, so that the log-prob is NaN.
        return z.masked_fill(~kept & ~z.isnan(), -torch.inf)

    def _adjusted_logits(self, z: Tensor, seen: Tensor | None, counts: Tensor | None, n_drawn: int | None) -> Tensor:
        """Apply biases and penalties to logits, and mask stop tokens during min_new_tokens."""
        s, vocab_size = self.sampling, z.shape[1]
        if n_drawn is not None and n_drawn < s.min_new_tokens:
            stops = [token for token in s.stop_token_ids if token < vocab_size]
            z = z.index_fill(1, torch.tensor(stops, dtype=torch.int64, device=z.device), -math.inf)
        if s.logit_bias:
            if max(s.logit_bias) >= vocab_size:
                raise WhetValueError(
                    f"TorchEngine.generate: logit_bias has token {max(s.logit_bias)}, outside 0 ... {vocab_size - 1}. "
                    f"Pass tokens of the model's tokenizer."
                )
            ids = torch.tensor(list(s.logit_bias), device=z.device)
            z = z.index_add(1, ids, torch.tensor([*s.logit_bias.values()]).to(z).expand(len(z), -1))
        if s.repetition_penalty != 1 and seen is not None:
            z = torch.where(seen, torch.where(z > 0, z / s.repetition_penalty, z * s.repetition_penalty), z)
        if counts is not None:
            z = torch.where(counts > 0, z - s.frequency_penalty * counts.to(z) - s.presence_penalty, z)
        return z

    def _top(self, z: Tensor) -> Tensor:
        """Return (R, V) bool, True for tokens kept by top-k and then top-p."""
        s = self.sampling
        width = min(s.top_k, z.shape[1]) if s.top_k else z.shape[1]
        if width == z.shape[1] and s.top_p == 1:
            return torch.ones_like(z, dtype=torch.bool)
        best = torch.topk(z, width, dim=-1).values
        n_kept = torch.full_like(best[:, :1], width, dtype=torch.int64)
        if s.top_p < 1:
            probs = torch.softmax(best, dim=-1)
            mass_before = probs.cumsum(dim=-1) - probs
            n_kept = (mass_before < s.top_p).sum(dim=-1, keepdim=True).clamp(min=1)
        threshold = best.gather(-1, n_kept - 1)
        above, ties = z > threshold, z == threshold
        return above | (ties & (ties.cumsum(dim=-1) <= n_kept - above.sum(dim=-1, keepdim=True)))


def token_uniforms(seed: int, prompt_index: int, sample_index: int, n: int) -> np.ndarray:
    """Return (n,) float64 uniforms in [0, 1), indexed by position.

    Philox (Salmon et al. 2011) with the key (seed, 0) and (prompt, sample) in the upper words of the counter, so that
    the first n values do not depend on n, and rows never share a counter.
    """
    key = np.array([seed % 2**64, 0], dtype=np.uint64)
    counter = np.array([0, 0, prompt_index, sample_index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(n)


def find_stop(text: bytes, stop: Sequence[bytes], n_searched: int = 0) -> int | None:
    """Return where to cut a text: before the stop string whose last byte occurs first, or the longest of several.

    None if there is no match. Matches that end within the first ``n_searched`` bytes are ignored.
    """
    found = [(text.find(string, max(0, n_searched + 1 - len(string))), len(string)) for string in stop]
    ends = [(begin + length, begin) for begin, length in found if begin >= 0]
    return min(ends)[1] if ends else None


class TorchEngine:
    """``RolloutEngine`` over a live torch module: ``generate`` samples with the current weights.

    Args:
        model: see the top of this file.
        pad_token_id: left padding of shorter prompts; masked, so that any valid id works. None: 0.
        max_batch: maximum number of rows decoded together; None: no limit.
        tokenizer: for ``SamplingParams.stop``, as in ``whet.Engine``.

    Raises:
        WhetTypeError: model is not an ``nn.Module``.
        WhetValueError: max_batch is not an integer above 0, or pad_token_id is not a token id.
    """

    records_experts = False
    """Whether completions can have the experts of their tokens."""

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int | None = None,
        max_batch: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._texts: tuple[Any, TokenTexts] | None = None  # cached per tokenizer, which may be replaced
        self.model = _check_module(model, "TorchEngine")
        self.pad_token_id = check_integer("TorchEngine", "pad_token_id", pad_token_id, 0, optional=True) or 0
        self.max_batch = check_integer("TorchEngine", "max_batch", max_batch, 1, optional=True)
        self.policy_version = 0

    def sync(self, model: nn.Module) -> None:
        """Sample from ``model``, which is used live, without a copy."""
        self.model = _check_module(model, "TorchEngine.sync")
        self.policy_version += 1

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        n: int,
        sampling: SamplingParams,
        *,
        keys: Sequence[StreamKey] | None = None,
    ) -> list[list[Completion]]:
        """Sample ``n`` completions for each prompt: ``result[prompt][sample]``.

        Runs without gradients and in eval mode; every submodule's mode is restored. Completions end with, and include,
        the first of ``sampling.stop_token_ids``, or end with ``sampling.stop``; the model's own configuration is
        ignored. A completion that reaches the model's position limit is truncated there, with finish reason "length".

        Args:
            prompt_ids: rows of token ids without padding, at least one token each.
            n: completions per prompt.
            sampling: a module's own ``generate`` must accept settings of ``DISTRIBUTION_SETTINGS`` that are not at
                their defaults, and does not support top_logprobs.
            keys: as for the native engine. Not supported by a module's own ``generate``, which uses torch's generator.

        Raises:
            WhetTypeError: token ids are not integers, or a model output is not logits.
            WhetValueError: n below 1, an empty prompt, a prompt that leaves no room for a token within the model's
                position limit, logits with NaN or infinity, a setting that the module's own ``generate`` does not
                support, or ``stop`` without a tokenizer.
        """
        where = "TorchEngine.generate"
        n = check_integer(where, "n", n, 1)
        prompts = token_lists(prompt_ids, where, "prompt_ids", allow_empty=False)
        budgets = [self._budget(i, len(prompt), sampling) for i, prompt in enumerate(prompts)]
        names = [*sampling.grammar_settings(), *(["experts"] if sampling.experts else [])]
        if names:
            raise WhetValueError(f"{where}: {names[0]} is set, which only the native engine supports. Use whet.Engine.")
        texts = self._texts_for(sampling)
        if texts is not None:
            stops = (*sampling.stop_token_ids, *texts.special_among(sampling.stop))
            sampling = dataclasses.replace(sampling, stop_token_ids=stops)
        if keys is not None and _has_own_generate(self.model) and not _is_hugging_face(self.model):
            raise WhetValueError(
                f"{where}: keys are not supported by the model's own generate, which uses torch's generator."
            )
        rows = [
            _Row(prompt, budget, key.prompt_index, key.first_sample + sample, texts)
            for prompt, budget, key in zip(prompts, budgets, stream_keys(keys, len(prompts), where), strict=True)
            for sample in range(n)
        ]
        with module_mode(self.model, training=False):
            if _is_hugging_face(self.model):
                # One budget per call: a finished row that remains in the batch does not exceed the limit.
                for batch in self._batches(rows, lambda row: row.budget):
                    self._decode_cached(batch, sampling)
            elif _has_own_generate(self.model):
                with _torch_seed(sampling.seed):
                    for batch in self._batches(rows, lambda row: (row.budget, len(row.prompt))):
                        self._decode_own(batch, sampling)
            else:
                for batch in self._batches(rows, lambda row: 0):
                    self._decode_recomputing(batch, sampling)
        completions = [row.completion(self.policy_version) for row in rows]
        return [completions[start : start + n] for start in range(0, len(rows), n)]

    def _texts_for(self, sampling: SamplingParams) -> TokenTexts | None:
        if not sampling.stop:
            return None
        if self.tokenizer is None:
            raise WhetValueError(
                f"TorchEngine.generate: stop is {sampling.stop!r}, but there is no tokenizer to search the text. "
                f"Pass tokenizer to TorchEngine, or stop_token_ids."
            )
        if self._texts is None or self._texts[0] is not self.tokenizer:
            self._texts = self.tokenizer, read_token_texts(self.tokenizer, "TorchEngine.generate")
        return self._texts[1]

    def _budget(self, index: int, prompt_length: int, sampling: SamplingParams) -> int:
        limit = position_limit(self.model)
        if limit is not None and prompt_length >= limit:
            raise WhetValueError(
                f"TorchEngine.generate: prompt_ids[{index}] has {prompt_length} tokens, which leaves no room "
                f"to generate: the model's position limit is {limit}. Shorten or drop the prompt."
            )
        room = math.inf if limit is None else limit - prompt_length
        return int(min(sampling.max_new_tokens, room))

    def _batches(self, rows: list[_Row], key: Any) -> Iterator[list[_Row]]:
        """Yield batches of rows with equal key, at most max_batch, sorted by prompt length."""
        ordered = sorted(rows, key=lambda row: (key(row), len(row.prompt)))
        for _, group in itertools.groupby(ordered, key=key):
            members = list(group)
            size = self.max_batch or len(members)
            yield from (members[start : start + size] for start in range(0, len(members), size))

    def _decode_cached(self, rows: list[_Row], sampling: SamplingParams) -> None:
        """Decode with Hugging Face ``generate``, whose greedy search selects the only token not masked by our draw."""
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        decoding = _Decoding(rows, sampling)
        device = module_device(self.model)
        input_ids, mask = padded_batch([row.prompt for row in rows], device=device, pad_id=self.pad_token_id, left=True)
        inner: Any = inner_module(self.model)
        own_config = inner.generation_config
        # transformers fills unset fields from the model's generation config, so that config has to be replaced.
        inner.generation_config = GenerationConfig()
        try:
            self.model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=input_ids,
                attention_mask=mask.long(),
                generation_config=GenerationConfig(max_new_tokens=rows[0].budget, do_sample=False),
                logits_processor=LogitsProcessorList([_ForceDrawnToken(decoding)]),  # pyright: ignore
                stopping_criteria=StoppingCriteriaList([_RowFinished(decoding)]),  # pyright: ignore
            )
        finally:
            inner.generation_config = own_config

    def _decode_recomputing(self, rows: list[_Row], sampling: SamplingParams) -> None:
        """Decode by recomputing: forward over the whole sequence, draw, append; finished rows are removed."""
        decoding = _Decoding(rows, sampling)
        device = module_device(self.model)
        while decoding.live:
            sequences = [rows[i].prompt + rows[i].token_ids for i in decoding.live]
            input_ids, mask = padded_batch(sequences, device=device, pad_id=self.pad_token_id)
            last = mask.sum(dim=1) - 1
            n_last = input_ids.shape[1] - int(last.min())
            logits = causal_logits(self.model, input_ids, mask, n_last, where="TorchEngine.generate")
            column = last - (input_ids.shape[1] - logits.shape[1])
            decoding.step(logits[torch.arange(len(sequences), device=device), column])

    def _decode_own(self, rows: list[_Row], sampling: SamplingParams) -> None:
        """Decode prompts of equal length with the module's own ``generate``."""
        model: Any = self.model
        if sampling.top_logprobs:
            raise WhetValueError(
                f"TorchEngine.generate: top_logprobs is {sampling.top_logprobs}, but {type(model).__name__}.generate "
                f"returns no log-probs. Leave it at 0."
            )
        prompts = torch.tensor([row.prompt for row in rows], device=module_device(self.model))
        budget = rows[0].budget
        output = model.generate(prompts, max_new_tokens=budget, **_own_settings(self.model, sampling))
        n_rows, length = prompts.shape
        expected = f"({n_rows}, {length} + up to {budget}): each prompt followed by its completion"
        name = f"TorchEngine.generate: {type(self.model).__name__}.generate"
        if not isinstance(output, Tensor) or output.ndim != 2:
            got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise WhetTypeError(f"{name} returned {got}, expected a token tensor {expected}.")
        fits = len(output) == n_rows and output.shape[1] <= length + budget
        if not fits or not output[:, :length].equal(prompts):
            raise WhetValueError(f"{name} returned shape {tuple(output.shape)}, expected {expected}.")
        for row, tokens in zip(rows, output[:, length:].tolist(), strict=True):
            row.has_logprobs = False
            for token in tokens:
                row.token_ids.append(token)
                if row.has_stopped(sampling):
                    break


@dataclass
class _Row:
    """State of a completion during sampling."""

    prompt: list[int]
    budget: int
    prompt_index: int
    sample_index: int
    texts: TokenTexts | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    kept: list[KeptTokens] = field(default_factory=list)
    has_logprobs: bool = True
    finish_reason: Literal["stop", "length"] = "length"
    n_cut_bytes: int = 0

    def has_stopped(self, s: SamplingParams) -> bool:
        """Whether the last token ends the completion: a stop token, or the end of a stop string."""
        if self.texts is not None and len(self.token_ids) > s.min_new_tokens:
            text = self.texts.bytes_of(self.token_ids)
            searched = self.texts.bytes_of(self.token_ids[:-1])
            cut = find_stop(text, [string.encode() for string in s.stop], len(searched))
            if cut is not None:
                self.finish_reason, self.n_cut_bytes = "stop", len(text) - cut
        if self.token_ids[-1] in s.stop_token_ids:
            self.finish_reason = "stop"
        return self.finish_reason == "stop"

    def completion(self, policy_version: int) -> Completion:
        logprobs = self.logprobs if self.has_logprobs else None
        text = None if self.texts is None else self.texts.text_of(self.token_ids, self.n_cut_bytes)
        kept = KeptTokens.concatenate(self.kept) if self.kept else None
        return Completion(
            self.token_ids, logprobs, self.finish_reason, policy_version, text, self.top_logprobs or None, kept
        )


class _Decoding:
    """State of rows decoded in lockstep: draws and records tokens, and tracks unfinished rows."""

    def __init__(self, rows: list[_Row], sampling: SamplingParams) -> None:
        self.rows = rows
        self.live = list(range(len(rows)))
        self.sampler = Sampler(sampling)
        longest = max(row.budget for row in rows)
        self.uniforms = torch.from_numpy(
            np.stack([token_uniforms(sampling.seed, r.prompt_index, r.sample_index, longest) for r in rows])
        )
        self.seen: Tensor | None = None
        self.counts: Tensor | None = None
        self.n_steps = 0

    def step(self, logits: Tensor) -> Tensor:
        """Draw the next token of every live row from logits (n_live, V); remove finished rows from ``live``."""
        live, sampling = self.live, self.sampler.sampling
        z = self.sampler.filtered_logits(logits, self._seen(logits), self._counts(logits), self.n_steps)
        token_ids, logprobs = self.sampler.draw_from(z, self.uniforms[live, self.n_steps])
        if self.seen is not None:
            self.seen[live, token_ids] = True
        if self.counts is not None:
            self.counts[live, token_ids] += 1
        if sampling.top_logprobs:
            for i, best in zip(live, self.sampler.alternatives(z), strict=True):
                self.rows[i].top_logprobs.append(best)
        if sampling.kept_tokens:
            for i, kept in zip(live, (z > -torch.inf).cpu().numpy(), strict=True):
                self.rows[i].kept.append(KeptTokens.from_ids([np.flatnonzero(kept)], len(kept)))
        self.n_steps += 1
        self.live = []
        # One transfer from the device per step; float32 has all ids below 2^24.
        for i, (token, logprob) in zip(live, torch.stack((token_ids.float(), logprobs), 1).tolist(), strict=True):
            row = self.rows[i]
            if math.isnan(logprob):
                raise WhetValueError(
                    f"TorchEngine.generate: the model's logits for prompt {row.prompt_index}, sample "
                    f"{row.sample_index}, token {len(row.token_ids)} contain NaN or +inf, or are all -inf. "
                    f"Check the model's weights for NaN."
                )
            row.token_ids.append(int(token))
            row.logprobs.append(logprob)
            if not row.has_stopped(sampling) and len(row.token_ids) < row.budget:
                self.live.append(i)
        return token_ids

    def _seen(self, logits: Tensor) -> Tensor | None:
        """Return (n_live, V) bool, tokens in each live row's sequence; None without a repetition penalty."""
        if self.sampler.sampling.repetition_penalty == 1:
            return None
        if self.seen is None:
            self.seen = torch.zeros(len(self.rows), logits.shape[1], dtype=torch.bool, device=logits.device)
            for i, row in enumerate(self.rows):
                self.seen[i, row.prompt] = True
        return self.seen[self.live]

    def _counts(self, logits: Tensor) -> Tensor | None:
        """Return (n_live, V) int64, token counts of each live row's completion; None without count penalties."""
        s = self.sampler.sampling
        if s.frequency_penalty == 0 and s.presence_penalty == 0:
            return None
        if self.counts is None:
            self.counts = torch.zeros(len(self.rows), logits.shape[1], dtype=torch.int64, device=logits.device)
        return self.counts[self.live]


class _ForceDrawnToken:
    """Logits processor that draws a token for each live row and masks all others."""

    def __init__(self, decoding: _Decoding) -> None:
        self.decoding = decoding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        live = self.decoding.live
        if live:
            token_ids = self.decoding.step(scores[live])
            scores.fill_(-torch.inf)
            scores[live, token_ids] = 0.0
        return scores


class _RowFinished:
    """Stopping criterion per row: (R,) bool, True for finished completions."""

    def __init__(self, decoding: _Decoding) -> None:
        self.decoding = decoding

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        finished = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        finished[self.decoding.live] = False
        return finished


def _check_module(model: Any, where: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise WhetTypeError(f"{where}: model is {type(model).__name__}, expected a torch.nn.Module.")
    return model


def _is_hugging_face(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(inner_module(model), transformers.GenerationMixin)


def _has_own_generate(model: nn.Module) -> bool:
    """Whether the module has a generate method with the parameter ``max_new_tokens``."""
    generate = getattr(model, "generate", None)
    return callable(generate) and "max_new_tokens" in inspect.signature(generate).parameters


def _own_settings(model: Any, sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling settings for the module's own generate, by its parameter names."""
    parameters = inspect.signature(model.generate).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    neutral = SamplingParams()
    settings = {}
    for name in DISTRIBUTION_SETTINGS:
        value = getattr(sampling, name)
        at_default = value == getattr(neutral, name)
        if name in parameters:
            # None means "off" in such methods; any other default may differ from the requested value.
            if not (at_default and parameters[name].default is None):
                settings[name] = value
        elif not at_default:
            if not takes_any:
                raise WhetValueError(
                    f"TorchEngine.generate: {name} is {value}, but {type(model).__name__}.generate has no "
                    f"such parameter. Leave {name} at {getattr(neutral, name)}, or add it to that generate."
                )
            settings[name] = value
    return settings


@contextmanager
def _torch_seed(seed: int) -> Iterator[None]:
    """Context that seeds torch's generators, and restores them on exit."""
    with torch.random.fork_rng():
        torch.manual_seed(seed % 2**63)
        yield
