"""Tokenizers and chat templates of GGUF files and folders, with or without transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet import _core
from whet.errors import MissingExtraError, WhetValueError, check_installed
from whet.models.sources.gguf_container import GGUFFile, read_gguf
from whet.models.tokenizers import algorithms
from whet.models.tokenizers.backend import BackendTokenizer
from whet.models.tokenizers.folder import read_folder_tokenizer
from whet.models.tokenizers.vocabulary import Vocabulary, read_vocabulary

_TEMPLATE = "tokenizer.chat_template"
_ROLES = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "sep": "seperator",
    "mask": "mask",
    "cls": "cls",
}
"""transformers' names of special tokens -> GGUF's."""


def open_tokenizer(file: str | os.PathLike[str] | GGUFFile | Mapping[str, Any]) -> Any:
    """Open the tokenizer of a GGUF file as a transformers tokenizer; see ``read_tokenizer``.

    Returns:
        ``transformers.PreTrainedTokenizerFast`` with the file's special tokens, chat template, and settings of BOS and
        EOS. It decodes without changes (``clean_up_tokenization_spaces`` is off).

    Raises:
        WhetValueError: as ``read_tokenizer``, or the chat template cannot be compiled.
        MissingExtraError: transformers, tokenizers or jinja2 is not installed.
    """
    return read_tokenizer(file).to_transformers()


def read_tokenizer(file: str | os.PathLike[str] | GGUFFile | Mapping[str, Any]) -> GGUFTokenizer:
    """Read the tokenizer of a GGUF file, without transformers.

    Args:
        file: a path, for a split model any of its files; a ``GGUFFile``; or a file's metadata by key.

    Raises:
        WhetValueError: the tokenizer is missing or of an unsupported kind, or a key is invalid; the message names it.
        MissingExtraError: tokenizers is not installed.
    """
    if isinstance(file, Mapping):
        return GGUFTokenizer(file, "read_tokenizer")
    if not isinstance(file, GGUFFile):
        file = read_gguf(Path(file), f'read_tokenizer("{os.fspath(file)}")')
    where = f'read_tokenizer("{file.paths[0]}")'
    return GGUFTokenizer(load_texts(file.metadata, where), where)


def load_tokenizer(model: str | os.PathLike[str] | GGUFFile, where: str = "load_tokenizer") -> Any:
    """Load the tokenizer of a GGUF file (``read_tokenizer``) or of a Hugging Face folder.

    A folder whose tokenizer.json is the whole tokenizer is read without transformers (``read_folder_tokenizer``).

    Args:
        model: the folder, or a file, see ``read_tokenizer``.
        where: prefix of error messages.

    Raises:
        WhetValueError: there is no such folder or file, or its tokenizer cannot be read.
        MissingExtraError: tokenizers, or for a folder without a complete tokenizer.json transformers, is not installed.
    """
    if isinstance(model, GGUFFile) or Path(model).is_file():
        try:
            return read_tokenizer(model)
        except WhetValueError as error:
            raise WhetValueError(f"{where}: {error}") from error
    if not Path(model).is_dir():
        raise WhetValueError(f"{where}: folder or file {os.fspath(model)!r} does not exist.")
    if (tokenizer := read_folder_tokenizer(Path(model), where)) is not None:
        return tokenizer
    check_installed(where, "transformers")
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise WhetValueError(
            f"{where}: transformers cannot read a tokenizer in {os.fspath(model)} ({error})."
        ) from error


def load_texts(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a file's metadata with the texts of tokens and merges as lists.

    Raises:
        WhetValueError: a text is not UTF-8.
    """
    found = dict(metadata)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if isinstance(found.get(key), _core.GGUFTexts):
            try:
                found[key] = found[key].to_list()
            except ValueError as error:
                raise WhetValueError(f"{where}: {key} {error}") from None
    return found


class GGUFTokenizer(BackendTokenizer):
    """The tokenizer of a GGUF file.

    Args:
        metadata: the file's metadata by key.
        where: prefix of error messages.

    Attributes:
        vocabulary: the file's vocabulary.
        backend: the ``tokenizers.Tokenizer``. See ``algorithms`` for differences from llama.cpp.
        stop_token_ids: all tokens that end a generation, ascending: EOS, end of turn, and others.
    """

    template_key = _TEMPLATE

    def __init__(self, metadata: Mapping[str, Any], where: str = "GGUFTokenizer") -> None:
        self.vocabulary: Vocabulary = read_vocabulary(metadata, where)
        self.stop_token_ids = self.vocabulary.stop_ids
        special = self.vocabulary.special_ids
        texts = {
            f"{name}_token": self.vocabulary.tokens[special[role]] for name, role in _ROLES.items() if role in special
        }
        super().__init__(_build(self.vocabulary, where), texts, read_chat_template(metadata, where))
        # A file may have several tokens with the same text.
        self.bos_token_id, self.eos_token_id = special.get("bos"), special.get("eos")
        self.pad_token_id, self.unk_token_id = special.get("padding"), special.get("unknown")

    def __len__(self) -> int:
        return len(self.vocabulary.tokens)


def _build(vocabulary: Vocabulary, where: str) -> Any:
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("the tokenizer of a GGUF file", "tokenizers", "train") from error
    try:
        return algorithms.build(vocabulary)
    except Exception as error:  # the library raises nothing more precise
        vocabulary.check_merges(where)
        raise WhetValueError(
            f"{where}: the {vocabulary.model} tokenizer of tokenizer.ggml.* cannot be built: {error}. Convert the "
            f"model again, or pass the tokenizer's folder."
        ) from error


def read_chat_template(metadata: Mapping[str, Any], where: str) -> str | dict[str, str] | None:
    """Return the chat template, name -> template if there are several, or None."""
    begin = f"{_TEMPLATE}."
    found = {key.removeprefix(begin): value for key, value in metadata.items() if key.startswith(begin)}
    if _TEMPLATE in metadata:
        found["default"] = metadata[_TEMPLATE]
    for name, source in found.items():
        if not isinstance(source, str):
            raise WhetValueError(f"{where}: {_TEMPLATE} ({name}) is {source!r:.60}, expected a text. Remove the key.")
    return found.get("default") if found.keys() <= {"default"} else found
