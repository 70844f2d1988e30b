"""Models that generate text: engine, tokenizer, stop tokens and incremental detokenisation.

A GGUF file is self-contained: its tokenizer, chat template and end-of-turn tokens are used, without torch and
transformers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from whet.config.settings import Device
from whet.engine import Engine
from whet.errors import WhetValueError
from whet.models import tokenizers
from whet.models.base_record import check_formats, pack_recorded, read_binding
from whet.models.export import read_adapters
from whet.models.formats import PAGE_TOKENS, check_kv_dtype, choose_formats, kv_format
from whet.models.lora import read_adapted
from whet.models.row_reader import merge_slots
from whet.models.sizes import STATES, cache_bytes
from whet.models.slots import ModelSource, untie_adapted
from whet.models.sources.folder import open_classifier
from whet.models.sources.gguf_container import GGUFFile, read_gguf
from whet.models.sources.pretrained import open_pretrained
from whet.models.stop_tokens import read_stop_ids
from whet.models.tokenizers.folder import read_settings, read_templates

_KV_BYTES = 1 << 30
"""KV cache of an engine, unless a single sequence needs more."""
SPARE_PAGES = 1
"""Additional pages of a sequence: the last page of a prompt, if not full, is copied for the completion."""


def find_model(path: str, where: str) -> str | GGUFFile:
    """Return the path of a folder, or an open GGUF file, whose header engine and tokenizer share.

    Raises:
        WhetValueError: the path does not exist, or the file is damaged.
    """
    if not Path(path).exists():
        raise WhetValueError(f"{where}: {path!r} does not exist. Pass a model's folder or .gguf file.")
    return path if Path(path).is_dir() else read_gguf(Path(path), f"{where}: {path}")


def load_engine(
    model: str | GGUFFile,
    weights: str | None,
    n_tokens: int | None,
    where: str,
    adapter: str = "",
    kv_bytes: int = _KV_BYTES,
    kv_dtype: str | None = None,
    expert_bytes: int = 0,
    scores: bool = False,
    draft: str = "",
    device: Device = "cpu",
) -> Engine:
    """Create the engine of a model, for sequences of up to ``n_tokens``; None: limited by the KV cache.

    Length-dependent RoPE frequencies (longrope) are chosen for ``n_tokens``, as in transformers; None: for the model's
    last position.

    Args:
        weights: weight format; None: the format of the adapters' base, or the default of ``Engine``.
        adapter: a folder of LoRA adapters that will be added to the engine; empty: none. If an engine cannot compute
            it separately (DoRA, trained tokens, whole matrices, LoRA of the head), it is merged into the weights here,
            and adding it changes nothing.
        kv_bytes: size of the KV cache, unless a single sequence needs more.
        kv_dtype: as in ``Engine``.
        expert_bytes: as in ``Engine``.
        scores: whether the model is the folder of a sequence classifier, whose engine has no LM head.
        draft: a folder or GGUF file with the draft model; empty: none.
        device: as in ``Engine``.

    Raises:
        WhetValueError: the engine does not support the model.
        CheckpointError: the adapters were trained on other weights, or on a quantised base in another format.
    """

    def read(max_position: int | None = None) -> ModelSource:
        if scores:
            return open_classifier(cast(str, model), max_position=max_position).source
        return open_pretrained(model, max_position=max_position)

    source = read()
    if n_tokens is not None and source.short_position is not None and n_tokens <= source.short_position:
        source = read(source.short_position)
    record = read_binding(adapter, source, weights is not None, where) if adapter else None
    if record is not None:
        if weights is not None:
            check_formats(source, {"weights": weights}, record, where, adapter)
        source = pack_recorded(source, record, where, adapter).source()
    is_merged = False
    adapted = read_adapted(adapter, source, where) if adapter and record is None else None
    # DoRA in weights takes no time per token.
    if adapted is not None and (adapted.use_dora or not adapted.is_separable):
        changes = tuple(read_adapters(adapter, source, where))
        source, is_merged = merge_slots(untie_adapted(source._replace(adapters=changes)), where), True
    if n_tokens is not None:
        n_pages = min(n_tokens, source.config.max_position) // PAGE_TOKENS + 1 + SPARE_PAGES
        kv = source.base.kv_format if source.base else kv_format(choose_formats(source, weights, None, None, where))
        kv_bytes = max(kv_bytes, cache_bytes(source.config, check_kv_dtype(where, kv_dtype, kv), n_pages, STATES))
    engine = Engine(
        source, weights=weights, kv_bytes=kv_bytes, kv_dtype=kv_dtype, expert_bytes=expert_bytes,
        draft=find_model(draft, f"{where}: draft") if draft else None, device=device,
        tokenizer=model if draft else None, where=where,
    )  # fmt: skip
    engine.merged_adapter = adapter if is_merged else ""
    return engine


def longest_sequence(engine: Engine) -> int:
    """Return the most tokens of a sequence that positions and KV cache permit."""
    memory = engine.memory
    kv_bytes = memory["kv_bytes"] - STATES * memory["kv_state_bytes"]
    n_pages = kv_bytes // memory["kv_page_bytes"] - SPARE_PAGES
    return min(engine.config.max_position, n_pages * PAGE_TOKENS)


def load_chat_tokenizer(
    model: str | GGUFFile, where: str, chat_template: str = "", adapter: str = "", tokenizer: str = ""
) -> Any:
    """Load the tokenizer of a folder or GGUF file.

    Args:
        chat_template: see ``choose_template``.
        adapter: see ``choose_template``.
        tokenizer: another folder or .gguf file with the tokenizer, which also has the chat template instead of
            ``adapter``; empty: the model's.

    Raises:
        WhetValueError: tokenizer or template do not exist or cannot be read.
        MissingExtraError: the model is a folder, and transformers is not installed.
    """
    template = choose_template(chat_template, "" if tokenizer else adapter, where)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        loaded = tokenizers.load_tokenizer(tokenizer or model, where)
    except WhetValueError as error:
        raise WhetValueError(f"{error} Or pass another --tokenizer.") from error
    if template is not None and template != loaded.chat_template:
        loaded.chat_template, loaded.response_template = template, None
    return loaded


def load_transformers_tokenizer(source: str) -> Any:
    """Return the transformers tokenizer of a folder, hub name or .gguf file."""
    from transformers import AutoTokenizer  # lazy: chat and generate do not need transformers

    if Path(source).is_file():
        return tokenizers.read_tokenizer(read_gguf(Path(source), "load_transformers_tokenizer")).to_transformers()
    return AutoTokenizer.from_pretrained(source)


def choose_template(chat_template: str, adapter: str, where: str) -> str | None:
    """Return the chat template that replaces the tokenizer's; None: the tokenizer's stays.

    Args:
        chat_template: a file with the template; empty: none.
        adapter: a folder of adapters, whose template is chosen without a file if one was saved with them, since they
            were trained with it; empty: none.

    Raises:
        WhetValueError: a file cannot be read.
    """
    if chat_template:
        return read_template(chat_template, where)
    if not adapter:
        return None
    named = read_templates(Path(adapter), read_settings(Path(adapter), where), where)
    return named["default"] if [*named] == ["default"] else None


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
    found = {*getattr(tokenizer, "stop_token_ids", [tokenizer.eos_token_id])}
    if Path(model).is_dir():
        found.update(read_stop_ids(model))
    stops = sorted(i for i in found if isinstance(i, int))
    for token in stops:
        if not 0 <= token < vocab_size:
            raise WhetValueError(
                f"{where}: EOS is token {token} in the tokenizer or generation_config.json, outside the model's "
                f"vocabulary of {vocab_size} tokens. Pass the model's own --tokenizer, or fix generation_config.json."
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
