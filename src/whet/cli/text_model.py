"""Models that generate text, from flags to decoded text; shared by ``whet generate``, ``chat`` and ``eval``.

A GGUF file is self-contained: its tokenizer, chat template and end-of-turn tokens are used, without torch and
transformers.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from whet.cli.checkpoint_model import resolve_model
from whet.config.fields import PathText, reject_ineffective
from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.errors import WhetError, WhetValueError
from whet.models import tokenizers
from whet.models.adapter_files import base_name
from whet.models.base_record import check_formats, pack_recorded, read_binding
from whet.models.formats import PAGE_TOKENS, Weights, choose_formats, kv_format
from whet.models.sizes import page_bytes
from whet.models.sources.gguf_container import GGUFFile, read_gguf
from whet.models.sources.mapped import map_file, parse_json
from whet.models.sources.pretrained import open_pretrained

_KV_BYTES = 1 << 30
"""KV cache of an engine, unless a single sequence needs more."""
SPARE_PAGES = 1
"""Additional pages of a sequence: the last page of a prompt, if not full, is copied for the completion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Settings of sampling and tokenizer."""

    max_new_tokens: int = 256
    """Maximum number of sampled tokens."""
    min_new_tokens: int = 0
    """Minimum number of sampled tokens."""
    stop: Sequence[str] = ()
    """Strings that end the completion, and are not part of it."""
    temperature: float = 1.0
    """Divides the logits; 0: greedy."""
    top_k: int = 0
    """Sample from the k most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the most probable tokens with this total probability; 1: from all."""
    min_p: float = 0.0
    """Exclude tokens less probable than min_p times the most probable token; 0: none."""
    repetition_penalty: float = 1.0
    """Penalises tokens that occur in prompt or completion; 1: off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the completion; -2 to 2."""
    frequency_penalty: float = 0.0
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


def resolve_adapter(model: str, adapter: str, where: str) -> tuple[str, str]:
    """Return the paths of a model and its adapters; for a folder of adapters, their base model and the folder.

    Args:
        model: a model, adapters, or a run or checkpoint of ``whet train``.
        adapter: adapters for the model; empty: none.

    Raises:
        WhetValueError: both contain adapters, or the base model does not exist.
    """
    model, adapter = resolve_model(model, where), adapter and resolve_model(adapter, where)
    if not (Path(model) / "adapter_config.json").is_file():
        return model, adapter
    base = base_name(model, where)
    if adapter:
        raise WhetValueError(f"{where}: {model!r} contains adapters of {base!r}. Pass {base} with --adapter {adapter}.")
    if not Path(base).exists():
        raise WhetValueError(
            f"{where}: {model!r} contains adapters of {base!r}, which does not exist. Pass the model that they were "
            f"trained on, and --adapter {model}."
        )
    return base, model


def find_model(path: str, where: str) -> str | GGUFFile:
    """Return the path of a folder, or an open GGUF file, whose header engine and tokenizer share.

    Raises:
        WhetValueError: the path does not exist, or the file is damaged.
    """
    if not Path(path).exists():
        raise WhetValueError(f"{where}: {path!r} does not exist. Pass a model's folder or .gguf file.")
    return path if Path(path).is_dir() else read_gguf(Path(path), f"{where}: {path}")


def load_engine(
    model: str | GGUFFile, weights: str | None, n_tokens: int | None, where: str, adapter: str = ""
) -> Engine:
    """Create the engine of a model, for sequences of up to ``n_tokens``; None: limited by a KV cache of 1 GiB.

    Length-dependent RoPE frequencies (longrope) are chosen for ``n_tokens``, as in transformers; None: for the model's
    last position.

    Args:
        weights: weight format; None: the format of the adapters' base, or the default of ``Engine``.
        adapter: a folder of LoRA adapters that will be added to the engine; empty: none.

    Raises:
        WhetValueError: the engine does not support the model.
        CheckpointError: the adapters were trained on other weights, or on a quantised base in another format.
    """
    source = open_pretrained(model)
    if n_tokens is not None and source.short_position is not None and n_tokens <= source.short_position:
        source = open_pretrained(model, max_position=source.short_position)
    record = read_binding(adapter, source, weights is not None, where) if adapter else None
    if record is not None:
        if weights is not None:
            check_formats(source, {"weights": weights}, record, where, adapter)
        source = pack_recorded(source, record, where, adapter).source()
    kv_bytes = _KV_BYTES
    if n_tokens is not None:
        n_pages = min(n_tokens, source.config.max_position) // PAGE_TOKENS + 1 + SPARE_PAGES
        kv = source.base.kv_format if source.base else kv_format(choose_formats(source, weights, None, None, where))
        kv_bytes = max(_KV_BYTES, n_pages * page_bytes(source.config, kv))
    return Engine(source, weights=weights, kv_bytes=kv_bytes, where=where)


def load_chat_tokenizer(model: str | GGUFFile, where: str, chat_template: str = "") -> Any:
    """Load the tokenizer of a folder or GGUF file; ``chat_template`` is a file whose template replaces the tokenizer's.

    Raises:
        WhetValueError: tokenizer or template do not exist or cannot be read.
        MissingExtraError: the model is a folder, and transformers is not installed.
    """
    template = read_template(chat_template, where) if chat_template else None
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        tokenizer = tokenizers.load_tokenizer(model, where)
    except WhetValueError as error:
        raise WhetValueError(f"{error} Or pass another --tokenizer.") from error
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def read_template(path: str, where: str) -> str:
    """Read a chat template from a file.

    Raises:
        WhetValueError: the file cannot be read, or is empty.
    """
    try:
        template = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise WhetValueError(f"{where}: chat_template {path!r} cannot be read: {error}.") from error
    if not template.strip():
        raise WhetValueError(f"{where}: chat_template {path!r} is empty, expected a Jinja template.")
    return template


def find_stop_ids(model: str, tokenizer: Any, vocab_size: int, where: str) -> list[int]:
    """Return the stop tokens: of a GGUF file's tokenizer, or EOS of a tokenizer and of the folder's generation config.

    Raises:
        WhetValueError: a stop token is outside the model's vocabulary.
    """
    found = set(getattr(tokenizer, "stop_token_ids", [tokenizer.eos_token_id]))
    for name in ("generation_config.json", "config.json"):
        path = Path(model) / name
        if path.is_file():
            try:
                eos = parse_json(map_file(path, model).tobytes(), name).get("eos_token_id")
            except WhetError:
                continue  # optional; the engine has read the required config.json
            found.update(eos if isinstance(eos, list) else [eos])
            break
    stops = sorted(i for i in found if isinstance(i, int))
    for token in stops:
        if not 0 <= token < vocab_size:
            raise WhetValueError(
                f"{where}: EOS is token {token} in the tokenizer or {name}, outside the model's vocabulary of "
                f"{vocab_size} tokens. Pass the model's own --tokenizer, or fix {name}."
            )
    return stops


def detokenise_stream(tokenizer: Any, token_ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens incrementally; the parts add up to the text of all tokens.

    A character whose bytes span several tokens is yielded with the last of them. Tokens are decoded together with the
    previous part, because the text of a token, such as a leading space, may depend on the tokens before it.
    """
    ids: list[int] = []
    begin = shown = 0  # ids[begin:shown] is the previous part

    def text(part: list[int]) -> str:
        return tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def rest() -> str:
        return text(ids[begin:])[len(text(ids[begin:shown])) :]

    for token_id in token_ids:
        ids.append(token_id)
        new_text = rest()
        if new_text and not new_text.endswith("\ufffd"):
            yield new_text
            begin, shown = shown, len(ids)
    if new_text := rest():
        yield new_text
