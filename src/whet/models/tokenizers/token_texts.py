"""The bytes that each token of a tokenizer decodes to, by which text is told apart from tokens without the tokenizer.

A decoder of the library ``tokenizers`` is a chain of steps on the texts of tokens. Of those that are read here each
says what a token becomes whatever its neighbours are, so that the text of tokens is their bytes, one after the other.
Read are the decoders of byte-level BPE, of SentencePiece with bytes or without, and of unigram models.

One departure: of tokens of single bytes among which some are no UTF-8 SentencePiece's decoder turns all to U+FFFD, and
this only those.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from whet import _core
from whet.errors import WhetTypeError, WhetValueError, check_installed
from whet.models.sources.gguf_container import GGUFFile
from whet.models.tokenizers.byte_level import from_byte_level
from whet.models.tokenizers.tokenizer import read_tokenizer

_Step = Callable[[str | bytes], str | bytes]

_PROBES = ("Hello, world!  It's 12:30.\n\n\tx = [1, 2]", "naïve 日本語 👩‍🚀 été", " a", "User: yes\nAssistant: no")
"""Texts whose tokens have to decode to the same text both ways."""


class TokenTexts:
    """The text of every token, and of sequences of them.

    Args:
        tokens: the bytes of each, in order of id; special tokens have none.
        drops_first_space: whether the decoder leaves out a space that the text begins with.
        special_ids: special tokens by their names.
    """

    def __init__(
        self, tokens: Sequence[bytes], drops_first_space: bool = False, special_ids: Mapping[str, int] | None = None
    ) -> None:
        self.tokens = tokens
        self.drops_first_space = drops_first_space
        self.special_ids = special_ids or {}

    def special_among(self, stop: Iterable[str]) -> list[int]:
        """The special tokens that some of these strings name."""
        return [self.special_ids[text] for text in stop if text in self.special_ids]

    def bytes_of(self, token_ids: Iterable[int]) -> bytes:
        """The text of tokens that begin a text, in UTF-8, whose last character may be incomplete."""
        text = b"".join(map(self.bytes_in_text, token_ids))
        return text[1:] if self.drops_first_space and text.startswith(b" ") else text

    def text_of(self, token_ids: Iterable[int], held: int = 0) -> str:
        """The same as a string, without its last ``held`` bytes; what is no UTF-8 becomes U+FFFD."""
        text = self.bytes_of(token_ids)
        return text[: len(text) - held].decode(errors="replace")

    def bytes_in_text(self, token_id: int) -> bytes:
        """The text of a token that does not begin a text; a model may have more tokens than its tokenizer."""
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    @cached_property
    def core(self) -> Any:
        """The same for ``_core.StopStrings``."""
        ends = np.cumsum([len(token) for token in self.tokens], dtype=np.int32)
        return _core.TokenTexts(b"".join(self.tokens), ends=ends, drops_first_space=self.drops_first_space)


class TextStream:
    """The text of tokens that come one by one, as far as it is certain."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting = b""
        self._has_text = False

    def add(self, token_id: int, held: int, is_last: bool) -> str:
        """The text that a token makes certain, where ``held`` bytes at the end of all are not."""
        own = self._texts.bytes_in_text(token_id)
        self._waiting += own if self._has_text else self._texts.bytes_of([token_id])
        self._has_text |= own != b""
        certain = len(self._waiting) - held
        shown, self._waiting = self._waiting[:certain], self._waiting[certain:]
        return self._decoder.decode(shown, is_last)


def read_token_texts(tokenizer: Any, where: str) -> TokenTexts:
    """The texts of the tokens of a tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers; a ``GGUFTokenizer``; a ``tokenizers.Tokenizer``; or the path of a
            folder with a tokenizer.json or of a GGUF file, or what ``read_gguf`` gave.
        where: the caller's name, for errors.

    Raises:
        WhetTypeError: it is none of these.
        WhetValueError: there is no such file; or what a token decodes to depends on its neighbours.
        MissingExtraError: of a path, and tokenizers is not installed.
    """
    backend = _backend(tokenizer, where)
    if backend.decoder is None:
        raise _refusal(where, "it has no decoder")
    vocabulary: Mapping[str, int] = backend.get_vocab(with_added_tokens=True)
    try:
        steps, drops_first_space = _read_steps(json.loads(backend.decoder.__getstate__()), vocabulary)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _refusal(where, f"its decoder is not read: {error}") from None
    added = backend.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    tokens = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, i in vocabulary.items():
        if text not in special:
            tokens[i] = _apply(steps, text)
    texts = TokenTexts(tokens, drops_first_space, special)
    for probe in _PROBES:
        ids = backend.encode(probe, add_special_tokens=False).ids
        expected, found = backend.decode(ids, skip_special_tokens=True), texts.text_of(ids)
        if found != expected:
            raise _refusal(where, f"its tokens one by one say {found!r:.60}, and together {expected!r:.60}")
    return texts


def _refusal(where: str, why: str) -> WhetValueError:
    return WhetValueError(
        f"{where}: stop needs a tokenizer whose tokens have a text of their own, and that of this one is not known: "
        f"{why}. Pass stop_token_ids, or a tokenizer of byte-level BPE, SentencePiece or unigram."
    )


def _backend(tokenizer: Any, where: str) -> Any:
    """The ``tokenizers.Tokenizer`` of it."""
    if isinstance(tokenizer, GGUFFile) or (isinstance(tokenizer, (str, os.PathLike)) and Path(tokenizer).is_file()):
        return read_tokenizer(tokenizer).backend
    if isinstance(tokenizer, (str, os.PathLike)):
        file = Path(tokenizer) / "tokenizer.json"
        if not file.is_file():
            raise WhetValueError(f"{where}: stop needs a tokenizer, and there is no {file}. Set engine.tokenizer.")
        check_installed(f"{where}: stop", "tokenizers")
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))
    for candidate in (tokenizer, getattr(tokenizer, "backend", None), getattr(tokenizer, "backend_tokenizer", None)):
        if hasattr(candidate, "decoder") and hasattr(candidate, "get_added_tokens_decoder"):
            return candidate
    raise WhetTypeError(
        f"{where}: tokenizer is a {type(tokenizer).__name__}, expected a fast tokenizer of transformers or that of a "
        f"GGUF file, whose tokens' texts stop needs."
    )


def _apply(steps: Sequence[_Step], text: str) -> bytes:
    said: str | bytes = text
    for step in steps:
        said = step(said)
    return said.encode() if isinstance(said, str) else said


def _read_steps(decoder: Mapping[str, Any], vocabulary: Iterable[str]) -> tuple[list[_Step], bool]:
    """The steps of a decoder as functions of one token, and whether they leave out a first space."""
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    steps: list[_Step] = []
    drops_first_space = is_fused = False
    for part in parts:
        kind = part["type"]
        if kind == "Strip" and is_fused and (part["content"], part["start"], part["stop"]) == (" ", 1, 0):
            drops_first_space = True
        elif drops_first_space or (is_fused and kind != "Fuse"):
            raise ValueError(f"{kind} comes behind what changes the whole text")
        elif kind == "Fuse":
            is_fused = True
        elif kind == "ByteLevel":
            steps.append(lambda said: from_byte_level(said) if isinstance(said, str) else said)
        elif kind == "ByteFallback":
            steps.append(_from_byte_token)
        elif kind == "Replace" and "String" in part["pattern"]:
            steps.append(_replace(part["pattern"]["String"], part["content"]))
        elif kind == "Replace" and part["pattern"]["Regex"].startswith(r"\A"):  # a whole token of ``algorithms``
            steps.append(_replace_whole(part["pattern"]["Regex"], part["content"]))
        elif kind == "Metaspace":
            steps.append(_replace(part["replacement"], " "))
            drops_first_space = part.get("prepend_scheme", "always") != "never"
            several = next((token for token in vocabulary if part["replacement"] in token[1:]), None)
            if drops_first_space and several is not None:
                raise ValueError(f"of {several!r} it leaves out all spaces in the beginning of a text, and no others")
        else:
            raise ValueError(f"it has the step {kind}")
    return steps, drops_first_space


def _replace(old: str, new: str) -> _Step:
    return lambda said: said.replace(old, new) if isinstance(said, str) else said


def _replace_whole(pattern: str, new: str) -> _Step:
    old = re.compile(pattern.replace(r"\z", r"\Z"))
    return lambda said: new if isinstance(said, str) and old.match(said) else said


def _from_byte_token(said: str | bytes) -> str | bytes:
    """<0x41> is the byte 65."""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", said) if isinstance(said, str) else None
    return said if byte is None else bytes.fromhex(byte[1])
