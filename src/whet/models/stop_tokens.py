"""Tokens that end a completion: of a model's files, of its tokenizer, or chosen by the user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from whet.errors import WhetError, WhetValueError
from whet.models.families import text_options
from whet.models.packed_base import PackedBase
from whet.models.sources.gguf_container import read_gguf
from whet.models.sources.mapped import map_file, parse_json
from whet.models.tokenizers.tokenizer import load_texts
from whet.models.tokenizers.vocabulary import read_vocabulary


def read_stop_ids(model: str | os.PathLike[str]) -> list[int]:
    """Return the EOS of a folder's generation config, else of its config, or all stop tokens of a GGUF file's
    vocabulary.
    """
    path = Path(model)
    if path.is_file():
        metadata = read_gguf(path, "read_stop_ids").metadata
        return read_vocabulary(load_texts(metadata, "read_stop_ids"), "read_stop_ids").stop_ids
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            try:
                config = parse_json(map_file(path / name, os.fspath(model)).tobytes(), name)
                eos = {**text_options(config), **config}.get("eos_token_id")
            except WhetError:
                continue  # optional; config.json is read with the model
            return [token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)]
    return []


def base_stop_ids(base: PackedBase, tokenizer: Any, chosen: Sequence[int] = ()) -> list[int]:
    """Return the tokens that end a completion of a packed model, see ``choose_stop_ids``.

    The model's tokens come from a GGUF file's tokenizer, or from the files that the base was packed from.
    """
    model_ids = getattr(tokenizer, "stop_token_ids", None)
    if model_ids is None:
        model_ids = _read_once(base.path) if base.path else []
    return choose_stop_ids(model_ids, base.config.vocab_size, tokenizer, chosen)


@lru_cache(maxsize=8)
def _read_once(path: str) -> list[int]:
    return read_stop_ids(path)  # parsing the vocabulary of a GGUF file takes 50 ms, and every step asks


def choose_stop_ids(model_ids: Sequence[int], n_tokens: float, tokenizer: Any, chosen: Sequence[int] = ()) -> list[int]:
    """Return the tokens that end a completion: ``chosen``, else the tokenizer's EOS if it differs, else the model's.

    Args:
        model_ids: the model's EOS and other stop tokens; empty: it has none.
        n_tokens: size of the model's vocabulary.
        tokenizer: with ``eos_token_id``, or None.
        chosen: the user's tokens; empty: none.

    Raises:
        WhetValueError: a stop token is outside the model's vocabulary, so that it is never drawn.
    """
    ids, tokenizer_eos = list(model_ids), getattr(tokenizer, "eos_token_id", None)
    name, fix = "the model's eos_token_id", "Set it in its generation_config, or pass stop_token_ids."
    if chosen:
        ids, name, fix = list(chosen), "stop_token_ids", "Pass tokens that it has."
    elif tokenizer_eos is not None and tokenizer_eos not in ids:
        ids, name, fix = [tokenizer_eos], "the tokenizer's eos_token_id", "Pass the model's own, or stop_token_ids."
    for token in ids:
        if not 0 <= token < n_tokens:
            raise WhetValueError(
                f"stop_token_ids: {name} is {token}, outside the model's vocabulary of {n_tokens} tokens: no "
                f"completion would end with it. {fix}"
            )
    return ids
