"""Flags of sampling and model, shared by ``whet generate``, ``chat`` and ``eval``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from whet.config.fields import Count, PathText, check_types, reject_ineffective
from whet.config.sampling import TEXT_MAX_NEW_TOKENS, SamplingParams, SamplingSettings
from whet.config.settings import Device
from whet.models.formats import KvDtype, Weights


@dataclasses.dataclass(kw_only=True)
class TextConfig(SamplingSettings):
    """Settings of sampling and tokenizer."""

    max_new_tokens: int = TEXT_MAX_NEW_TOKENS
    seed: int = 0
    """Seed of the sampling: the same seed gives the same text."""
    tokenizer: PathText = ""
    """A folder or .gguf file with the tokenizer; empty: the model's."""
    chat_template: PathText = ""
    """A file with a Jinja chat template; empty: the one saved with the adapters, or else the tokenizer's."""

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
        check_types(self)
        reject_ineffective(self, self.unused_if_greedy(), self.sampling().temperature > 0, "temperature is 0: greedy")

    def unused_if_greedy(self) -> list[str]:
        """Return the settings that have no effect on greedy decoding."""
        return ["top_k", "top_p", "min_p", "seed"]


@dataclasses.dataclass(kw_only=True)
class EngineSettings:
    """Settings of the engine that every command has which opens one for a folder or file."""

    expert_bytes: Count = 0
    """Most bytes of a mixture's experts, packed from the file when they are first used, that stay packed after a step:
    the most recently used; 0: all."""
    device: Device = "cpu"
    """Processor that computes the model; gpu: any with Metal, Vulkan or Direct3D 12 (pip install 'whet[gpu]')."""


@dataclasses.dataclass(kw_only=True)
class ModelSettings(EngineSettings):
    """Settings of a command's only model."""

    model: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained or whet train wrote, a checkpoint, or a .gguf file (any part of a split one)."""
    weights: Weights | None = None
    """Weight format. Default: the format of the adapters' base, the GGUF file's own format, or bf16 for folders."""
    adapter: PathText = ""
    """A folder of LoRA adapters that PEFT or whet train saved, for this model."""


@dataclasses.dataclass(kw_only=True)
class DraftSettings:
    """The draft model of a command that samples from one model."""

    draft: PathText = ""
    """A smaller model with the same tokenizer, a folder or .gguf file, that proposes tokens: the same text, sooner if
    most proposals are right; empty: none."""


@dataclasses.dataclass(kw_only=True)
class OneModelConfig(TextConfig, ModelSettings, DraftSettings):
    """Settings of model and sampling."""

    kv_dtype: KvDtype | None = None
    """Format of keys and values; q8: 8 bits, about half of the memory of bfloat16. Default: float32 with float32
    weights, else bfloat16."""

    def check(self) -> None:
        super().check()
        sampling = self.sampling()
        names = sampling.grammar_settings() or sampling.penalties()
        why = f"{', '.join(names)}: tokens are drawn one by one"
        reject_ineffective(self, ["draft"], not names, why)
