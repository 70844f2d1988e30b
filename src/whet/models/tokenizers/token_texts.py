"""The bytes of each token of a tokenizer, so that the engine can decode without the tokenizer.

A decoder of the library ``tokenizers`` is a chain of steps on the texts of tokens. Supported steps decode each token
independently of its neighbours, so that a text is the concatenation of its tokens' bytes: the decoders of byte-level
BPE, SentencePiece with or without bytes, and unigram models.

Departure: in a run of byte tokens with invalid UTF-8, SentencePiece's decoder replaces all bytes by U+FFFD, this one
only the invalid ones.
"""

from __future__ import annotations

import codecs
import hashlib
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

PROBES = ("Hello, world!  It's 12:30.\n\n\tx = [1, 2]", "naïve 日本語 👩‍🚀 été", " a", "User: yes\nAssistant: no")
"""Texts whose tokens have to decode to the same text with the tokenizer and with their bytes."""


class TokenTexts:
    """The text of every token and of sequences of tokens.

    Args:
        tokens: bytes of each token by id; empty for special tokens.
        drops_first_space: whether the decoder strips a leading space of the text.
        special_ids: text -> id of special tokens.
    """

    def __init__(
        self, tokens: Sequence[bytes], drops_first_space: bool = False, special_ids: Mapping[str, int] | None = None
    ) -> None:
        self.tokens = tokens
        self.drops_first_space = drops_first_space
        self.special_ids = special_ids or {}

    def special_among(self, stop: Iterable[str]) -> list[int]:
        """Return the special tokens among these strings."""
        return [self.special_ids[text] for text in stop if text in self.special_ids]

    def bytes_of(self, token_ids: Iterable[int]) -> bytes:
        """Return the UTF-8 text of tokens at the start of a text; its last character may be incomplete."""
        text = b"".join(map(self.bytes_in_text, token_ids))
        return text[1:] if self.drops_first_space and text.startswith(b" ") else text

    def text_of(self, token_ids: Iterable[int], n_withheld: int = 0) -> str:
        """Return this text as a str without its last ``n_withheld`` bytes; invalid UTF-8 becomes U+FFFD."""
        text = self.bytes_of(token_ids)
        return text[: len(text) - n_withheld].decode(errors="replace")

    def bytes_in_text(self, token_id: int) -> bytes:
        """Return the text of a token inside a text; empty for ids above the tokenizer's."""
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    @cached_property
    def core(self) -> Any:
        """The texts for ``_core.StopStrings``."""
        ends = np.cumsum([len(token) for token in self.tokens], dtype=np.int32)
        return _core.TokenTexts(b"".join(self.tokens), ends=ends, drops_first_space=self.drops_first_space)


class TextStream:
    """Decodes a stream of tokens, as far as the text is final."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting = b""
        self._has_text = False

    def add(self, token_id: int, n_withheld: int, is_last: bool) -> str:
        """Return the text that becomes final with a token, if ``n_withheld`` bytes at the end are not."""
        added = self._texts.bytes_in_text(token_id)
        self._waiting += added if self._has_text else self._texts.bytes_of([token_id])
        self._has_text |= added != b""
        certain = len(self._waiting) - n_withheld
        shown, self._waiting = self._waiting[:certain], self._waiting[certain:]
        return self._decoder.decode(shown, is_last)

    def end(self) -> str:
        """Return the text that was withheld, at the end of the stream."""
        shown, self._waiting = self._waiting, b""
        return self._decoder.decode(shown, True)


def read_token_texts(tokenizer: Any, where: str) -> TokenTexts:
    """Read the texts of all tokens of a tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers, a ``GGUFTokenizer``, a ``tokenizers.Tokenizer``, the path of a
            folder with a tokenizer.json or of a GGUF file, or a ``GGUFFile``.
        where: prefix of error messages.

    Raises:
        WhetTypeError: another type of ``tokenizer``.
        WhetValueError: there is no such file, or tokens decode differently depending on their neighbours.
        MissingExtraError: ``tokenizer`` is a path and tokenizers is not installed.
    """
    backend = find_backend(tokenizer, where)
    if backend.decoder is None:
        raise _refusal(where, "it has no decoder")
    vocabulary: Mapping[str, int] = backend.get_vocab(with_added_tokens=True)
    try:
        steps, drops_first_space = _read_steps(json.loads(backend.decoder.__getstate__()), vocabulary)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _refusal(where, f"its decoder is not supported: {error}") from None
    added = backend.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    tokens = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, i in vocabulary.items():
        if text not in special:
            tokens[i] = _apply(steps, text)
    texts = TokenTexts(tokens, drops_first_space, special)
    for probe in PROBES:
        ids = backend.encode(probe, add_special_tokens=False).ids
        expected, found = backend.decode(ids, skip_special_tokens=True), texts.text_of(ids)
        if found != expected:
            raise _refusal(where, f"its tokens decode to {found!r:.60} one by one, and to {expected!r:.60} together")
    return texts


def find_difference(first: TokenTexts, second: TokenTexts) -> tuple[int, str, str] | None:
    """Return the lowest id that has different texts, and both texts, or None; ids that only one has are ignored."""
    for i, (a, b) in enumerate(zip(first.tokens, second.tokens, strict=False)):
        if a != b:
            return i, a.decode(errors="replace"), b.decode(errors="replace")
    return None


def vocabulary_digest(tokenizer: Any, where: str) -> str:
    """Return a digest of the bytes of all tokens, which tokenizers with the same ids share."""
    digest = hashlib.sha256()
    for text in read_token_texts(tokenizer, where).tokens:
        digest.update(len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()[:16]


def _refusal(where: str, why: str) -> WhetValueError:
    return WhetValueError(
        f"{where}: stop needs a tokenizer that decodes tokens independently, and this one is not supported: {why}. "
        f"Pass stop_token_ids, or a tokenizer of byte-level BPE, SentencePiece or unigram."
    )


def find_backend(tokenizer: Any, where: str) -> Any:
    """Return the ``tokenizers.Tokenizer`` of a tokenizer."""
    if isinstance(tokenizer, GGUFFile) or (isinstance(tokenizer, (str, os.PathLike)) and Path(tokenizer).is_file()):
        return read_tokenizer(tokenizer).backend
    if isinstance(tokenizer, (str, os.PathLike)):
        file = Path(tokenizer) / "tokenizer.json"
        if not file.is_file():
            raise WhetValueError(f"{where}: stop needs a tokenizer, and {file} is missing. Set engine.tokenizer.")
        check_installed(f"{where}: stop", "tokenizers")
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))
    for candidate in (tokenizer, getattr(tokenizer, "backend", None), getattr(tokenizer, "backend_tokenizer", None)):
        if hasattr(candidate, "decoder") and hasattr(candidate, "get_added_tokens_decoder"):
            return candidate
    raise WhetTypeError(
        f"{where}: tokenizer is a {type(tokenizer).__name__}, expected a fast tokenizer of transformers or the "
        f"tokenizer of a GGUF file, because stop decodes tokens."
    )


def _apply(steps: Sequence[_Step], text: str) -> bytes:
    decoded: str | bytes = text
    for step in steps:
        decoded = step(decoded)
    return decoded.encode() if isinstance(decoded, str) else decoded


def _read_steps(decoder: Mapping[str, Any], vocabulary: Iterable[str]) -> tuple[list[_Step], bool]:
    """Return the steps of a decoder as functions of one token, and whether they strip a leading space."""
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    steps: list[_Step] = []
    drops_first_space = is_fused = False
    for part in parts:
        kind = part["type"]
        if kind == "Strip" and is_fused and (part["content"], part["start"], part["stop"]) == (" ", 1, 0):
            drops_first_space = True
        elif drops_first_space or (is_fused and kind != "Fuse"):
            raise ValueError(f"{kind} follows a step that changes the whole text")
        elif kind == "Fuse":
            is_fused = True
        elif kind == "ByteLevel":
            steps.append(lambda text: from_byte_level(text) if isinstance(text, str) else text)
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
                raise ValueError(f"it strips all leading spaces of {several!r}, only at the beginning of a text")
        else:
            raise ValueError(f"it has a step {kind}")
    return steps, drops_first_space


def _replace(old: str, new: str) -> _Step:
    return lambda text: text.replace(old, new) if isinstance(text, str) else text


def _replace_whole(pattern: str, new: str) -> _Step:
    old = re.compile(pattern.replace(r"\z", r"\Z"))
    return lambda text: new if isinstance(text, str) and old.match(text) else text


def _from_byte_token(text: str | bytes) -> str | bytes:
    """Decode "<0x41>" to the byte 65."""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", text) if isinstance(text, str) else None
    return text if byte is None else bytes.fromhex(byte[1])
