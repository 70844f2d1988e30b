"""Flags of sampling and model, shared by ``whet generate``, ``chat`` and ``eval``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

import tyro

from whet.config.fields import PathText, reject_ineffective
from whet.config.sampling import TEXT_MAX_NEW_TOKENS, SamplingParams
from whet.models.formats import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Settings of sampling and tokenizer."""

    max_new_tokens: int = TEXT_MAX_NEW_TOKENS
    """Maximum number of sampled tokens."""
    min_new_tokens: int = SamplingParams.min_new_tokens
    """Minimum number of sampled tokens."""
    stop: Sequence[str] = ()
    """Strings that end the completion, and are not part of it."""
    temperature: float = SamplingParams.temperature
    """Divides the logits; 0: greedy."""
    top_k: int = SamplingParams.top_k
    """Sample from the k most probable tokens; 0: from all."""
    top_p: float = SamplingParams.top_p
    """Nucleus sampling: sample from the most probable tokens with this total probability; 1: from all."""
    min_p: float = SamplingParams.min_p
    """Exclude tokens less probable than min_p times the most probable token; 0: none."""
    repetition_penalty: float = SamplingParams.repetition_penalty
    """Penalises tokens that occur in prompt or completion; 1: off."""
    presence_penalty: float = SamplingParams.presence_penalty
    """Subtracted from the logits of tokens that occur in the completion; -2 to 2."""
    frequency_penalty: float = SamplingParams.frequency_penalty
    """Subtracted from the logits of tokens once per occurrence in the completion; -2 to 2."""
    logit_bias: Annotated[Mapping[int, float], tyro.conf.arg(metavar="[TOKEN BIAS [TOKEN BIAS ...]]")] = (
        dataclasses.field(default_factory=dict)
    )
    """Token ids and values that are added to their logits; -100 to 100."""
    seed: int = 0
    """Seed of the sampling: the same seed gives the same text."""
    tokenizer: PathText = ""
    """A folder or .gguf file with the tokenizer; empty: the model's."""
    chat_template: PathText = ""
    """A file with a Jinja chat template; empty: the tokenizer's."""

    def sampling(self, stop_token_ids: Sequence[int] = ()) -> SamplingParams:
        """Return the sampling settings for an engine, with the model's stop tokens.

        Raises:
            WhetValueError: a setting is out of range.
        """
        return SamplingParams.from_settings(self, stop_token_ids=stop_token_ids)

    def check(self) -> None:
        """Check the settings, before anything is loaded.

        Raises:
            WhetValueError: names the setting.
        """
        reject_ineffective(self, self.unused_if_greedy(), self.sampling().temperature > 0, "temperature is 0: greedy")

    def unused_if_greedy(self) -> list[str]:
        """Return the settings that have no effect on greedy decoding."""
        return ["top_k", "top_p", "min_p", "seed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneModelConfig(TextConfig):
    """Settings of model and sampling."""

    model: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained or whet train wrote, a checkpoint, or a .gguf file (any part of a split one)."""
    weights: Weights | None = None
    """Weight format. Default: the format of the adapters' base, the GGUF file's own format, or bf16 for folders."""
    adapter: PathText = ""
    """A folder of LoRA adapters that PEFT or whet train saved, for this model."""
