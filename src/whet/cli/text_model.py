"""A model that continues text, from flags to pieces of its text: what ``whet generate``, ``chat`` and ``eval`` share.

A GGUF file is all that is needed: its own tokenizer, chat template and end-of-turn tokens are used, without torch and
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
"""For keys and values, where the sequence that is asked for does not need more."""
SPARE_PAGES = 1
"""Beside those of a sequence: the prompt's last page, where it is not full, is copied for the completion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How tokens are drawn, and the tokenizer that says what they are."""

    max_new_tokens: int = 256
    """Longest continuation in tokens."""
    min_new_tokens: int = 0
    """Tokens before which it does not end."""
    stop: Sequence[str] = ()
    """Texts that end it, and are not shown."""
    temperature: float = 1.0
    """Divides the logits; 0: always the most probable token."""
    top_k: int = 0
    """Sample from the k most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this mass; 1: from all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one; 0: none."""
    repetition_penalty: float = 1.0
    """Makes tokens that are there already, in prompt or continuation, less probable; 1: does not."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the continuation has; -2 to 2."""
    frequency_penalty: float = 0.0
    """The same for each time that it has them; -2 to 2."""
    logit_bias: Annotated[Mapping[int, float], tyro.conf.arg(metavar="[TOKEN BIAS [TOKEN BIAS ...]]")] = (
        dataclasses.field(default_factory=dict)
    )
    """Added to the logits of tokens, by id; -100 to 100."""
    seed: int = 0
    """Keys the sampling: the same seed, the same text."""
    tokenizer: PathText = ""
    """A folder with the tokenizer, or a .gguf file that has it; empty: the model's."""
    chat_template: PathText = ""
    """A file with a Jinja chat template; empty: the tokenizer's."""

    def sampling(self, stop_token_ids: Sequence[int] = ()) -> SamplingParams:
        """The settings for an engine; the stop tokens are the model's.

        Raises:
            WhetValueError: one is out of range; it is named.
        """
        return SamplingParams.from_settings(self, stop_token_ids=stop_token_ids)

    def check(self) -> None:
        """Refuse what is wrong before anything is loaded.

        Raises:
            WhetValueError: naming the setting.
        """
        always = "temperature is 0, which takes the most probable token always"
        reject_ineffective(self, self.unused_if_greedy(), self.sampling().temperature > 0, always)

    def unused_if_greedy(self) -> list[str]:
        """The settings that change nothing where always the most probable token is taken."""
        return ["top_k", "top_p", "min_p", "seed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneModelConfig(TextConfig):
    """A model, and how its tokens are drawn."""

    model: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained or whet train wrote, also a checkpoint, or a .gguf file; of parts any of them."""
    weights: Weights | None = None
    """Format of the matrices; none: bf16 of a folder, of a GGUF file its own, and of adapters that of their base."""
    adapter: PathText = ""
    """A folder of LoRA adapters that PEFT or whet train saved, for this model."""


def with_adapters(model: str, adapter: str, where: str) -> tuple[str, str]:
    """A model's path and that of its adapters: of a folder of adapters, the model that they were trained on.

    Args:
        model: what was asked for; the folder of a ``whet train`` stands for the model in it, and so do its checkpoints.
        adapter: what was asked for with it; empty: nothing.

    Raises:
        WhetValueError: a folder of adapters, and others for it, or its model is not there.
    """
    model, adapter = resolve_model(model, where), adapter and resolve_model(adapter, where)
    if not (Path(model) / "adapter_config.json").is_file():
        return model, adapter
    base = base_name(model, where)
    if adapter:
        raise WhetValueError(f"{where}: {model!r} holds adapters, of {base!r}: name that with --adapter {adapter}.")
    if not Path(base).exists():
        raise WhetValueError(
            f"{where}: {model!r} holds adapters of {base!r}, which is not there. Name the model that they were trained "
            f"on, and --adapter {model}."
        )
    return base, model


def find_model(path: str, where: str) -> str | GGUFFile:
    """A folder as it is called; a GGUF file with what its head says, which engine and tokenizer share.

    Raises:
        WhetValueError: there is neither, or the file is damaged.
    """
    if not Path(path).exists():
        raise WhetValueError(f"{where}: there is no {path!r}. Pass a model's folder or its .gguf file.")
    return path if Path(path).is_dir() else read_gguf(Path(path), f"{where}: {path}")


def load_engine(
    model: str | GGUFFile, weights: str | None, n_tokens: int | None, where: str, adapter: str = ""
) -> Engine:
    """The engine of a model, for a sequence of up to ``n_tokens``; None: of what a GiB of keys and values holds.

    Frequencies that depend on the length (longrope) are those for so many tokens, as in transformers; None: for the
    model's last position.

    Args:
        weights: format of the matrices; None: as in ``Engine``, or that of the base that the adapters were trained on.
        adapter: a folder of LoRA adapters that will be added to it; empty: none.

    Raises:
        WhetValueError: the engine does not run it.
        CheckpointError: adapters that were trained on other weights, or on a quantised base in another format.
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
    """The tokenizer of a folder or of a GGUF file; ``chat_template`` names a file with a template in place of its own.

    Raises:
        WhetValueError: there is none, or it or the template cannot be read.
        MissingExtraError: of a folder, and transformers is not installed.
    """
    template = read_template(chat_template, where) if chat_template else None
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        tokenizer = tokenizers.load_tokenizer(model, where)
    except WhetValueError as error:
        raise WhetValueError(f"{error} Or pass --tokenizer with another.") from error
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def read_template(path: str, where: str) -> str:
    """The chat template in a file.

    Raises:
        WhetValueError: it cannot be read, or is empty.
    """
    try:
        template = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise WhetValueError(f"{where}: chat_template {path!r} cannot be read: {error}.") from error
    if not template.strip():
        raise WhetValueError(f"{where}: chat_template {path!r} is empty, expected a Jinja template.")
    return template


def stop_ids(model: str, tokenizer: Any, vocab_size: int, where: str) -> list[int]:
    """Tokens that end a text: those of a GGUF file's tokenizer, or EOS, and those of the folder's generation config.

    Raises:
        WhetValueError: one of them is outside the model's vocabulary.
    """
    found = set(getattr(tokenizer, "stop_token_ids", [tokenizer.eos_token_id]))
    for name in ("generation_config.json", "config.json"):
        path = Path(model) / name
        if path.is_file():
            try:
                eos = parse_json(map_file(path, model).tobytes(), name).get("eos_token_id")
            except WhetError:
                continue  # only the config is needed, and the engine has read that
            found.update(eos if isinstance(eos, list) else [eos])
            break
    stops = sorted(i for i in found if isinstance(i, int))
    for token in stops:
        if not 0 <= token < vocab_size:
            raise WhetValueError(
                f"{where}: EOS is token {token} by the tokenizer or {name}, outside the model's vocabulary of "
                f"{vocab_size} tokens. Pass --tokenizer with the model's own, or fix {name}."
            )
    return stops


def text_pieces(tokenizer: Any, token_ids: Iterable[int]) -> Iterator[str]:
    """The text of tokens, piece by piece, which together are the text of them all.

    A character whose bytes lie in several tokens comes with the last of them. Tokens are decoded with those of the
    piece before, because what a token says (a blank in front, say) may hang on what it follows.
    """
    ids: list[int] = []
    begin = shown = 0  # ids[begin:shown] is the piece before

    def text(part: list[int]) -> str:
        return tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def rest() -> str:
        return text(ids[begin:])[len(text(ids[begin:shown])) :]

    for token_id in token_ids:
        ids.append(token_id)
        piece = rest()
        if piece and not piece.endswith("\ufffd"):
            yield piece
            begin, shown = shown, len(ids)
    if piece := rest():
        yield piece
