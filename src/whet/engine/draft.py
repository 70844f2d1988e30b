"""Draft models: smaller models of the same vocabulary that propose tokens to an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from whet.errors import WhetTypeError, WhetValueError
from whet.models.architecture import ModelConfig
from whet.models.packed_base import PackedBase, pack_base
from whet.models.sources.gguf_container import GGUFFile
from whet.models.sources.pretrained import open_pretrained
from whet.models.tokenizers.token_texts import find_difference, read_token_texts


def open_draft(draft: Any, config: ModelConfig, tokenizer: Any, where: str) -> PackedBase:
    """Return the packed weights of a draft model.

    Args:
        draft: a folder, a .gguf file, or packed weights.
        config: of the engine's model.
        tokenizer: the engine's, compared with the tokenizer of a folder or file; None: not compared.

    Raises:
        WhetTypeError: ``draft`` is none of these.
        WhetValueError: the draft model or the engine's has convolutions or linear attention, whose state cannot return
            to an earlier token, or the draft model has another tokenizer.
    """
    is_path = isinstance(draft, (str, os.PathLike, GGUFFile))
    if not is_path and not isinstance(draft, PackedBase):
        raise WhetTypeError(
            f"{where}: draft is {draft!r:.60}, expected the path of a folder or .gguf file, or a PackedBase."
        )
    source = open_pretrained(draft) if is_path else draft.source()
    for name, each in (("the model", config), ("the draft model", source.config)):
        if {*each.mixers} - {"attention", "none"}:
            raise WhetValueError(
                f"{where}: draft is set, and {name} has convolutions or linear attention, whose state cannot return to "
                f"an earlier token. Omit draft."
            )
    if is_path and tokenizer is not None:
        _check_tokenizer(draft, tokenizer, where)
    return pack_base(source, where=f"{where}: draft") if source.base is None else source.base


def _check_tokenizer(draft: Any, tokenizer: Any, where: str) -> None:
    if _have_same_tokens(tokenizer, draft):
        return
    if not isinstance(draft, GGUFFile) and Path(draft).is_dir() and not (Path(draft) / "tokenizer.json").is_file():
        raise WhetValueError(
            f"{where}: the draft model {os.fspath(draft)} has no tokenizer.json to compare with the model's. Copy it "
            f"into the folder, or pass pack_base(open_pretrained(...)), which is not compared."
        )
    found = find_difference(*(read_token_texts(each, f"{where}: draft") for each in (tokenizer, draft)))
    if found is not None:
        i, text, other = found
        raise WhetValueError(
            f"{where}: the draft model has another tokenizer: token {i} is {text!r} for the model and {other!r} "
            f"for the draft model. Choose a draft model of the same family."
        )


def _have_same_tokens(*tokenizers: Any) -> bool:
    """Whether these are GGUF files that list the same tokens: a quick check."""
    key = "tokenizer.ggml.tokens"
    if not all(isinstance(each, GGUFFile) and key in each.metadata for each in tokenizers):
        return False
    first, second = (each.metadata[key].to_list() for each in tokenizers)
    return first == second
