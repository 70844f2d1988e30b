"""The keys ``tokenizer.ggml.*`` of a GGUF file, checked, and what llama.cpp derives from them.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (the keys), llama.cpp's src/llama-vocab.cpp (defaults,
texts by which tokens are special, tokens that end a generation). It leaves out what is wrong there: BOS and EOS of a
BPE file that does not say them are token 11 in llama.cpp, and none here.
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
"""Sixteen times the largest vocabulary that is known."""


class TokenType(enum.IntEnum):
    """``tokenizer.ggml.token_type``, in the numbers of the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
"""Tokens that are found in a text as they stand."""


class _Kind(NamedTuple):
    """A ``tokenizer.ggml.model`` in words, and its defaults where the file does not say."""

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
    "bert": "WordPiece, of models that embed a text and do not continue it",
    "rwkv": "RWKV's greedy tokenizer",
    "plamo2": "PLaMo 2's tokenizer",
    "hybriddna": "a tokenizer of DNA",
    "whitespace": "a tokenizer of whole words",
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
"""Key -> texts of the token, of which the first that is there counts where the file has no such key."""
_ENDS_GENERATION = ("fim_pad", "fim_rep", "fim_sep", "eos", "eot", "eom")
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""Texts of tokens that end a generation in whichever vocabulary they are."""
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class Vocabulary(NamedTuple):
    """The tokens of a file, what each of them is, and how a text becomes them."""

    model: str
    """gpt2, gemma4, llama or t5; ``kind`` is the same in words."""
    tokens: list[str]
    types: list[TokenType]
    scores: list[float]
    """Of SentencePiece; else empty."""
    merges: list[str]
    """Of BPE: two tokens with a space between them, each pair once; else empty. ``check_merges`` checks them."""
    pre_tokenizer: PreTokenizer | None
    special_ids: dict[str, int]
    """Ids by role: bos, eos, unknown, padding, seperator (as the key spells it), mask, cls. A role of an ordinary token
    is left out: padding by "!" would take it out of every text."""
    stop_ids: list[int]
    """Tokens that end a generation, ascending."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    remove_extra_whitespaces: bool
    charsmap: bytes
    """SentencePiece's compiled normalisation; empty: none."""
    strips_right: frozenset[int]
    """Special tokens that take the whitespace behind them."""

    @property
    def kind(self) -> str:
        return _KINDS[self.model].name

    def ids_of(self, *types: TokenType) -> list[int]:
        """The tokens of these types, ascending."""
        return [i for i, type in enumerate(self.types) if type in types]

    def check_merges(self, where: str) -> None:
        """Find the merge that a library refuses.

        Raises:
            WhetValueError: one is not two tokens that make a third.
        """
        tokens = set(self.tokens)
        for merge in self.merges:
            left, space, right = merge.partition(" ")
            if not space or not tokens.issuperset((left, right, left + right)):
                raise _wrong(where, "merges", merge, "two tokens, with a space between them, that make a third")


def read_vocabulary(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    """The tokenizer that a file's metadata describe.

    Args:
        metadata: by key; arrays are lists, of strings too.
        where: the caller's name, for errors.

    Raises:
        WhetValueError: there is none, it is of a kind that is not read, or a key is wrong; the message names it.
    """
    return _Reader(metadata, where).vocabulary()


def _wrong(where: str, name: str, found: Any, expected: str) -> WhetValueError:
    return WhetValueError(
        f"{where}: tokenizer.ggml.{name} is {found!r:.80}, expected {expected}. Convert the model again, or pass the "
        f"tokenizer's own folder."
    )


class _Reader:
    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where

    def wrong(self, name: str, found: Any, expected: str) -> WhetValueError:
        return _wrong(self.where, name, found, expected)

    def value(self, name: str, kind: type, expected: str, default: Any = None) -> Any:
        """The value of a key, of exactly this type."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is not default and type(value) is not kind:
            raise self.wrong(name, value, expected)
        return value

    def items(self, name: str, kinds: set[type], expected: str, n: int | None = None) -> list[Any]:
        """The items of an array of ``n``, all of one of these types; of a missing one none."""
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
                f"{self.where}: tokenizer.ggml.model is {model!r:.60}, which {known}; {', '.join(_KINDS)} are read. "
                f"Pass the tokenizer's own folder. (Of a model in parts the first part has the tokenizer.)"
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
            raise self.wrong("tokens", twice, "each token once: it is there twice")
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
        return list(dict.fromkeys(self.items("merges", {str}, "texts")))  # the first of equal ones counts

    def pre_tokenizer(self, model: str) -> PreTokenizer | None:
        if model in ("llama", "t5"):
            return None
        name = "gemma4" if model == "gemma4" else self.value("pre", str, "a text", "default")
        if name not in PRE_TOKENIZERS:
            raise self.wrong(
                "pre", name, f"a pre-tokenizer that is known, such as {', '.join(list(PRE_TOKENIZERS)[:4])}"
            )
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
            expected = "a size, a trie of so many bytes whose indices lie inside, and texts that end in 0"
            raise self.wrong("precompiled_charsmap", f"{len(found)} bytes", expected)
        return found

    def strips_right(self, tokens: Sequence[str], types: Sequence[TokenType]) -> frozenset[int]:
        """Phi-3's: GGUF has no place for it, and llama.cpp goes by the model's name."""
        if not is_phi3(self.metadata.get("general.name")):
            return frozenset()
        kept = ("<unk>", "<s>", "<|endoftext|>")
        return frozenset(i for i, type in enumerate(types) if type in SPECIAL and tokens[i] not in kept)


def is_phi3(name: Any) -> bool:
    """Whether llama.cpp strips the whitespace behind special tokens in a file of this ``general.name``."""
    return isinstance(name, str) and any(part in name.lower() for part in ("phi-3", "phi3"))


def _is_charsmap(data: bytes) -> bool:
    """Whether no text leads ``tokenizers`` out of SentencePiece's normalisation, which it follows unchecked.

    It is the number of bytes of a trie, 32-bit, the trie, and texts, each with a 0 behind it. Unit i of the trie, a
    double array of Darts-clone, leads by the byte c to unit i ^ offset ^ c; where bit 8 is set, unit i ^ offset holds
    the place of a text in its lower 31 bits.
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
    is_node[0] = True  # the root, which every search begins with
    nodes = np.flatnonzero(is_node)
    offsets = (units[nodes] >> 10) << ((units[nodes] & 512) >> 6)
    bases = nodes ^ offsets
    if ((bases | 255) >= len(units)).any():
        return False
    places = units[bases[(units[nodes] & 256) != 0]] & ((1 << 31) - 1)
    begins = np.flatnonzero((np.frombuffer(texts, np.uint8) & 0xC0) != 0x80)  # of characters
    return bool(np.isin(places, begins).all())


def _mark_special(index: Mapping[str, int], types: list[TokenType], ids: dict[str, int]) -> list[int]:
    """Makes control tokens of those whose text says so; adds roles found by text; the tokens that end a generation."""
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
