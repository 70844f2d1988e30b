"""Verify a written file or folder: compare its log-probs of a text with the original model's.

The text has 80 tokens, including special ones: it covers the first positions and a page boundary at 64. If rotary
frequencies are scaled for a longer context, a second text exceeds the original length. The result is read in float32.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.engine.engine import Engine
from whet.errors import WhetError, WhetValueError
from whet.models.architecture import ModelConfig
from whet.models.families import is_scaled, rope_scaling, trained_position
from whet.models.row_reader import merge_slots
from whet.models.slots import ModelSource, is_separable, untie_adapted
from whet.models.sources.pretrained import open_pretrained
from whet.system.memory import available_bytes, resident_bytes

_N_TOKENS = 80
_N_BEYOND = 16
_MOST_SECONDS = 30.0
_SECONDS_PER_PARAMETER = 1.5e-8
"""Time to read both models and to compute the first text, on two cores: 2 s for 135 M parameters."""
_LEAST_SPREAD = 0.01
"""Lower bound of the spread of log-probs around their mean; an untrained model's are all equal."""
_TEXT = "The quick brown fox jumps over 13 lazy dogs.\n\n  def f(x): return x ** 2  # 3.14\nDas ist schön, 日本語 too."


class Probe(NamedTuple):
    """Tokens whose log-probs are compared from ``first`` on."""

    ids: list[int]
    first: int


class Comparison:
    """A model's log-probs of probe texts, as the reference of files written from it.

    Args:
        config: the model's config.
        tokenizer: the model's tokenizer, of transformers or of a GGUF file.
        original: tokens of the context before rotary frequencies were scaled; None: not scaled.
        where: prefix of error messages.

    Attributes:
        skipped: a sentence on what is not compared because of time (30 s) or memory; empty: everything is compared.
    """

    def __init__(self, config: ModelConfig, tokenizer: Any, original: int | None, where: str) -> None:
        self.skipped, self._where = "", where
        self._expected: list[tuple[Probe, np.ndarray]] = []
        longest = min(_N_TOKENS, config.max_position)
        self._probes = [Probe(_probe_ids(tokenizer, config.vocab_size, longest), 1)]
        if original is not None and original + _N_BEYOND <= config.max_position:
            self._probes.append(Probe(_probe_ids(tokenizer, config.vocab_size, original + _N_BEYOND), original))
        if config.n_parameters * _SECONDS_PER_PARAMETER > _MOST_SECONDS or 5 * config.n_parameters > _free_bytes():
            self.skipped = "its log-probs are not compared with the model's: that takes more than 30 s, or the memory"
            self._probes = []

    def measure(self, logprobs: Callable[[Probe], np.ndarray]) -> None:
        """Store the model's log-probs of each text, (n - first,), for ``check``."""
        seconds = 0.0
        for probe in self._probes:
            if self._expected and seconds * len(probe.ids) / _N_TOKENS > _MOST_SECONDS:
                self.skipped = (
                    f"its log-probs beyond {probe.first:,} tokens are not compared: that takes more than 30 s"
                )
                break
            start = time.perf_counter()
            self._expected.append((probe, np.asarray(logprobs(probe), np.float64)))
            seconds = time.perf_counter() - start

    def check(self, path: Path, tolerance: float, *, by_length: bool = False) -> float | None:
        """Return the mean difference of log-probs; None: nothing was compared.

        Args:
            path: the file or folder.
            by_length: resolve length-dependent rotary frequencies for the probe, as transformers does. Default: for the
                model's longest sequence.
            tolerance: bound of the norm of the differences, relative to the norm of the centred log-probs.

        Raises:
            WhetValueError: the differences exceed the tolerance.
        """
        means = []
        for probe, expected in self._expected:
            source = open_pretrained(path, max_position=len(probe.ids) if by_length else None)
            difference = engine_logprobs(source, probe) - expected
            means.append(float(np.abs(difference).mean()))
            spread = max(np.linalg.norm(expected - expected.mean()), _LEAST_SPREAD * len(expected) ** 0.5)
            error = float(np.linalg.norm(difference) / spread)
            if not error <= tolerance:
                raise WhetValueError(
                    f"{self._where}: the result is not this model: log-probs of tokens {probe.first} to "
                    f"{len(probe.ids) - 1} of a probe text differ from the model's by {means[-1]:.3g} in the mean "
                    f"(relative error {error:.2g}, expected up to {tolerance:g}). It was removed. Try more bits."
                )
        return max(means, default=None)


def engine_logprobs(source: ModelSource, probe: Probe) -> np.ndarray:
    """Compute the log-probs of a probe by a source with its adapters, in float32."""
    formats = dict.fromkeys(("weights", "embedding", "head"), "float32")
    with Engine(_as_floats(source), max_batch=1, where="probe", **formats) as engine:
        return np.asarray(engine.logprobs([probe.ids], start=probe.first)[0], np.float64)


def _as_floats(source: ModelSource) -> ModelSource:
    """Dequantise a packed base, whose products round their inputs, to float32, and merge its adapters.

    Without a base, only adapters outside layers, and more than plain LoRA, are merged; the engine computes the others
    separately.
    """
    source = untie_adapted(source)
    changed = {each.slot for each in source.adapters if not (each.slot.startswith("layers.") and is_separable(each))}
    if source.base is not None:
        changed = set(source.config.slots())
    return merge_slots(source, "probe", changed) if changed else source


def _free_bytes() -> float:
    try:
        return available_bytes() - resident_bytes()
    except WhetError:  # not Linux
        return math.inf


def original_position(config: Mapping[str, Any], where: str) -> int | None:
    """Return the context of a Hugging Face config before rotary scaling, in tokens; None: not scaled."""
    if not is_scaled(config, where):
        return None
    scaling = rope_scaling(config, where)
    if scaling["rope_type"] == "linear":
        return max(1, int(trained_position(config, where) / scaling["factor"]))
    original = scaling.get("original_max_position_embeddings")
    return int(original) if original else None


def _probe_ids(tokenizer: Any, vocab_size: int, n: int) -> list[int]:
    special = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if isinstance(i, int)]
    text = tokenizer.encode(_TEXT, add_special_tokens=False)
    ids = [i for i in (*special[:1], *text[: len(text) // 2], *special, *text[len(text) // 2 :]) if i < vocab_size]
    return list(itertools.islice(itertools.cycle(ids or [0]), n))
