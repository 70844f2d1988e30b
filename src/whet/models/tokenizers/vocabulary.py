"""Read and check the keys ``tokenizer.ggml.*`` of a GGUF file, and derive special and stop tokens as in llama.cpp.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (the keys), llama.cpp's src/llama-vocab.cpp (defaults,
texts of special tokens, stop tokens). Departure: missing BOS and EOS of a BPE file are none, not token 11.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whet.errors import WhetValueError
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_MOST_TOKENS = 1 << 22
"""Sixteen times the largest known vocabulary."""


class TokenType(enum.IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
"""Types of tokens that are matched in a text literally."""


class _Kind(NamedTuple):
    """A ``tokenizer.ggml.model``: a description and default values."""

    name: str
    special_ids: Mapping[str, int] = {}
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False


_KINDS = {
    "gpt2": _Kind("byte-level BPE"),
    "gemma4": _Kind("BPE over characters"),
    "llama": _Kind("SentencePiece BPE", {"bos": 1, "eos": 2, "unknown": 0}, add_bos=True, add_space_prefix=True),
    "t5": _Kind("SentencePiece unigram", {"eos": 1, "unknown": 2, "padding": 0}, add_eos=True),
}
_REFUSED = {
    "bert": "WordPiece, of embedding models",
    "rwkv": "RWKV's greedy tokenizer",
    "plamo2": "PLaMo 2's tokenizer",
    "hybriddna": "a DNA tokenizer",
    "whitespace": "a whole-word tokenizer",
    "none": "no tokenizer: the file was written without one",
    "no_vocab": "no tokenizer: the file was written without one",
}
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "cls")
_FILL_IN_THE_MIDDLE = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
"""Key -> texts of the token; the first that exists is used if the file lacks the key."""
_ENDS_GENERATION = ("fim_pad", "fim_rep", "fim_sep", "eos", "eot", "eom")
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""Texts of tokens that end a generation in any vocabulary."""
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class Vocabulary(NamedTuple):
    """The tokens of a file, their types, and the settings of tokenization."""

    model: str
    """gpt2, gemma4, llama or t5; ``kind`` describes it."""
    tokens: list[str]
    types: list[TokenType]
    scores: list[float]
    """SentencePiece scores; else empty."""
    merges: list[str]
    """BPE merges, two tokens separated by a space, without duplicates; else empty. Checked by ``check_merges``."""
    pre_tokenizer: PreTokenizer | None
    special_ids: dict[str, int]
    """Role -> id: bos, eos, unknown, padding, seperator (spelt like the key), mask, cls. Roles of ordinary tokens are
    excluded: padding with "!" would remove it from every text."""
    stop_ids: list[int]
    """Tokens that end a generation, ascending."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    remove_extra_whitespaces: bool
    charsmap: bytes
    """SentencePiece's precompiled normalisation; empty: none."""
    strips_right: frozenset[int]
    """Special tokens that strip the whitespace after them."""

    @property
    def kind(self) -> str:
        return _KINDS[self.model].name

    def ids_of(self, *types: TokenType) -> list[int]:
        """Return the tokens of these types, ascending."""
        return [i for i, type in enumerate(self.types) if type in types]

    def check_merges(self, where: str) -> None:
        """Check merges, to name the one that the library rejects.

        Raises:
            WhetValueError: a merge is not two tokens whose concatenation is a token.
        """
        tokens = set(self.tokens)
        for merge in self.merges:
            left, space, right = merge.partition(" ")
            if not space or not tokens.issuperset((left, right, left + right)):
                raise _wrong(where, "merges", merge, "two tokens separated by a space, whose concatenation is a token")


def read_vocabulary(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    """Read the vocabulary from a file's metadata.

    Args:
        metadata: key -> value; arrays are lists, also of strings.
        where: prefix of error messages.

    Raises:
        WhetValueError: the tokenizer is missing or of an unsupported kind, or a key is invalid; the message names it.
    """
    return _Reader(metadata, where).vocabulary()


def _wrong(where: str, name: str, found: Any, expected: str) -> WhetValueError:
    return WhetValueError(
        f"{where}: tokenizer.ggml.{name} is {found!r:.80}, expected {expected}. Convert the model again, or pass the "
        f"tokenizer's folder."
    )


class _Reader:
    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where

    def wrong(self, name: str, found: Any, expected: str) -> WhetValueError:
        return _wrong(self.where, name, found, expected)

    def value(self, name: str, kind: type, expected: str, default: Any = None) -> Any:
        """Return the value of a key, checked for this exact type."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is not default and type(value) is not kind:
            raise self.wrong(name, value, expected)
        return value

    def items(self, name: str, kinds: set[type], expected: str, n: int | None = None) -> list[Any]:
        """Return the items of an array of ``n``, checked for these types; of a missing key, none."""
        items = self.value(name, list, f"an array of {expected}", default=[])
        if items and n is not None and len(items) != n:
            raise self.wrong(name, f"{len(items)} items", f"one for each of the {n} tokens")
        if not set(map(type, items)) <= kinds:
            raise self.wrong(name, next(item for item in items if type(item) not in kinds), f"an array of {expected}")
        return items

    def vocabulary(self) -> Vocabulary:
        model = self.value("model", str, "a text")
        if model not in _KINDS:
            known = f"is {_REFUSED[model]}" if model in _REFUSED else "is not known"
            raise WhetValueError(
                f"{self.where}: tokenizer.ggml.model is {model!r:.60}, which {known}; expected one of "
                f"{', '.join(_KINDS)}. Pass the tokenizer's folder. (In a split model, the first file has it.)"
            )
        kind = _KINDS[model]
        tokens = self.tokens()
        index = {token: i for i, token in enumerate(tokens)}
        types = self.types(len(tokens))
        pre = self.pre_tokenizer(model)
        ids = self.special_ids(kind, len(tokens))
        stop_ids = _mark_special(index, types, ids)
        is_pieces = model in ("llama", "t5")
        add_bos = self.value("add_bos_token", bool, "a bool", kind.add_bos or (pre is not None and pre.add_bos))
        add_eos = self.value("add_eos_token", bool, "a bool", kind.add_eos)
        for role, is_needed in (("bos", add_bos), ("eos", add_eos), ("unknown", model == "t5")):
            if is_needed and role not in ids:
                raise self.wrong(f"{role}_token_id", None, "an id: this tokenizer needs the token")
        for role, is_special in (("bos", add_bos), ("eos", True), ("unknown", is_pieces)):
            if is_special and role in ids and types[ids[role]] not in SPECIAL:
                types[ids[role]] = TokenType.CONTROL
        return Vocabulary(
            model=model,
            tokens=tokens,
            types=types,
            scores=self.scores(len(tokens)) if is_pieces else [],
            merges=[] if is_pieces else self.merges(),
            pre_tokenizer=pre,
            special_ids={role: i for role, i in ids.items() if role in _ROLES and types[i] in SPECIAL},
            stop_ids=stop_ids,
            add_bos=add_bos,
            add_eos=add_eos,
            add_space_prefix=self.value("add_space_prefix", bool, "a bool", kind.add_space_prefix),
            remove_extra_whitespaces=self.value("remove_extra_whitespaces", bool, "a bool", False),
            charsmap=self.charsmap() if is_pieces else b"",
            strips_right=self.strips_right(tokens, types),
        )

    def tokens(self) -> list[str]:
        given = self.items("tokens", {str}, "texts")
        if not 1 <= len(given) <= _MOST_TOKENS:
            raise self.wrong("tokens", f"{len(given)} items", f"1 to {_MOST_TOKENS} tokens")
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(given)]
        if len(set(tokens)) < len(tokens):
            seen: set[str] = set()
            twice = next(token for token in tokens if token in seen or seen.add(token))
            raise self.wrong("tokens", twice, "no duplicate tokens")
        return tokens

    def types(self, n: int) -> list[TokenType]:
        numbers = self.items("token_type", {int}, "integers", n)
        types = {0: TokenType.UNUSED, **{int(type): type for type in TokenType}}
        if not set(numbers) <= set(types):
            raise self.wrong("token_type", max(set(numbers) - set(types)), "0 to 6")
        return [types[number] for number in numbers] or [TokenType.NORMAL] * n

    def scores(self, n: int) -> list[float]:
        scores = [float(score) for score in self.items("scores", {float, int}, "numbers", n)]
        if not scores:
            raise self.wrong("scores", None, f"an array of {n} numbers")
        bad = next((score for score in scores if not math.isfinite(score)), None)
        if bad is not None:
            raise self.wrong("scores", bad, "finite numbers")
        return scores

    def merges(self) -> list[str]:
        if "tokenizer.ggml.merges" not in self.metadata:
            raise self.wrong("merges", None, "an array of texts")
        return list(dict.fromkeys(self.items("merges", {str}, "texts")))  # the first of duplicates counts

    def pre_tokenizer(self, model: str) -> PreTokenizer | None:
        if model in ("llama", "t5"):
            return None
        name = "gemma4" if model == "gemma4" else self.value("pre", str, "a text", "default")
        if name not in PRE_TOKENIZERS:
            raise self.wrong("pre", name, f"a known pre-tokenizer, such as {', '.join(list(PRE_TOKENIZERS)[:4])}")
        return PRE_TOKENIZERS[name]

    def special_ids(self, kind: _Kind, n: int) -> dict[str, int]:
        ids = {role: i for role, i in kind.special_ids.items() if i < n}
        for role in (*_ROLES, *_FILL_IN_THE_MIDDLE):
            found = self.value(f"{role}_token_id", int, "an id")
            if found is not None and not 0 <= found < n:
                raise self.wrong(f"{role}_token_id", found, f"one of the {n} tokens")
            if found is not None:
                ids[role] = found
        return ids

    def charsmap(self) -> bytes:
        numbers = self.items("precompiled_charsmap", {int}, "bytes")
        if any(not -128 <= number < 256 for number in numbers):
            raise self.wrong("precompiled_charsmap", numbers, "an array of bytes")
        found = bytes(number % 256 for number in numbers)
        if found and not _is_charsmap(found):
            expected = "a size, a trie of this many bytes with valid indices, and texts that end in 0"
            raise self.wrong("precompiled_charsmap", f"{len(found)} bytes", expected)
        return found

    def strips_right(self, tokens: Sequence[str], types: Sequence[TokenType]) -> frozenset[int]:
        """Return Phi-3's: GGUF has no key for it, and llama.cpp decides by the model's name."""
        if not is_phi3(self.metadata.get("general.name")):
            return frozenset()
        excluded = ("<unk>", "<s>", "<|endoftext|>")
        return frozenset(i for i, type in enumerate(types) if type in SPECIAL and tokens[i] not in excluded)


def is_phi3(name: Any) -> bool:
    """Whether llama.cpp strips the whitespace after special tokens in a file of this ``general.name``."""
    return isinstance(name, str) and any(part in name.lower() for part in ("phi-3", "phi3"))


def _is_charsmap(data: bytes) -> bool:
    """Whether SentencePiece's normalisation has no out-of-bounds index, which ``tokenizers`` does not check.

    Format: the size of a trie in bytes (32-bit), the trie, and texts terminated by 0. Unit i of the trie, a Darts-clone
    double array, leads by the byte c to unit i ^ offset ^ c; if bit 8 is set, unit i ^ offset contains the position of
    a text in its lower 31 bits.
    """
    size = int.from_bytes(data[:4], "little")
    texts = data[4 + size :]
    if size == 0 or size % 4 or texts[-1:] != b"\0":
        return False
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    units = np.frombuffer(data, "<u4", size // 4, 4)
    is_node = units < 1 << 31
    is_node[0] = True  # the root of every search
    nodes = np.flatnonzero(is_node)
    offsets = (units[nodes] >> 10) << ((units[nodes] & 512) >> 6)
    bases = nodes ^ offsets
    if ((bases | 255) >= len(units)).any():
        return False
    places = units[bases[(units[nodes] & 256) != 0]] & ((1 << 31) - 1)
    begins = np.flatnonzero((np.frombuffer(texts, np.uint8) & 0xC0) != 0x80)  # of characters
    return bool(np.isin(places, begins).all())


def _mark_special(index: Mapping[str, int], types: list[TokenType], ids: dict[str, int]) -> list[int]:
    """Mark control tokens by their text, add roles found by text, and return the stop tokens."""
    for role, texts in _FILL_IN_THE_MIDDLE.items():
        found = next((index[text] for text in texts if text in index), None)
        if role not in ids and found is not None:
            ids[role] = found
            types[found] = TokenType.CONTROL
    by_text = {text: index[text] for text in _ENDS if text in index}
    for i in by_text.values():
        types[i] = TokenType.CONTROL
    for text in _ALWAYS_SHOWN:
        if text in index:
            types[index[text]] = TokenType.USER_DEFINED
    stops = {*by_text.values(), *(ids[role] for role in _ENDS_GENERATION if role in ids)}
    stop_texts = {text for text, i in by_text.items() if i in stops}
    if {"<|return|>", "<|flush|>"} & stop_texts and {"<|call|>", "<|calls|>"} & stop_texts and "<|end|>" in stop_texts:
        stops.discard(index["<|end|>"])  # ends a message there, not the generation
        types[index["<|end|>"]] = TokenType.USER_DEFINED
    if "</s>" in stop_texts and ("<|tool_response>" in stop_texts or index.get("<|plamo:eos|>") in stops):
        stops.discard(index["</s>"])  # a piece of HTML there
        types[index["</s>"]] = TokenType.NORMAL
    return sorted(stops)
