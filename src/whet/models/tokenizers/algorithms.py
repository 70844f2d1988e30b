"""The algorithms of GGUF's tokenizers, built from parts of the library ``tokenizers``.

    gpt2, gemma4    merges in the file's order, within the splits of the pre-tokenizer
    llama           merges the adjacent pair with the best score first, in the whole text
    t5              maximises the sum of scores (Viterbi)

Ids equal llama.cpp's and those from the library that trained the vocabulary, except:

- Special tokens in a text are matched from left to right, the longest first, as in ``tokenizers``; llama.cpp matches
  the longest in the whole text first. Results differ if two such tokens overlap.
- llama: pieces of equal score merge in the order of their ids; in llama.cpp and SentencePiece from left to right.
  Trained pieces have distinct scores. llama.cpp and SentencePiece find pieces that are not the merge of two others;
  this implementation does not. Merges never produce a control token, as in SentencePiece; in llama.cpp they may. The
  space before a text (add_space_prefix) is also added after each special token, as in llama.cpp; SentencePiece adds
  only the first. The file's normalisation, if any, is applied, as in SentencePiece; llama.cpp ignores it.
- t5: SentencePiece replaces the longest match of its normalisation at each position, ``tokenizers`` the shortest in
  each grapheme: results differ for sequences of several combining marks. If the vocabulary has byte tokens, missing
  characters become bytes, as in SentencePiece; in llama.cpp they are unknown. Texts of only spaces, and
  add_space_prefix=False with remove_extra_whitespaces=True, follow SentencePiece too. Among segmentations with equal
  sums, SentencePiece, which uses 32-bit floats, may choose another.
- gemma4: a run of newlines is merged like any other text; llama.cpp looks it up as one token.
- Phi-3: special tokens strip all whitespace after them, as in its tokenizer; in llama.cpp only ASCII whitespace.
- ``pre_tokenizers`` lists the patterns that llama.cpp only approximates.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from whet.models.tokenizers.byte_level import from_byte_level, to_byte_level
from whet.models.tokenizers.vocabulary import SPECIAL, TokenType, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\u2581"


def build(vocabulary: Vocabulary) -> Tokenizer:
    """Build the tokenizer of a vocabulary.

    Raises:
        Exception: the library rejects it.
    """
    from tokenizers import Tokenizer

    model, parts = _BUILDERS[vocabulary.model](vocabulary)
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    _add_tokens(tokenizer, vocabulary)
    tokenizer.post_processor = _post_processor(vocabulary)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Add the tokens that are matched in a text literally, before splitting."""
    from tokenizers import AddedToken

    found = vocabulary.ids_of(*SPECIAL)
    tokenizer.add_tokens(
        [
            AddedToken(
                vocabulary.tokens[i],
                special=vocabulary.types[i] is not TokenType.USER_DEFINED,
                rstrip=i in vocabulary.strips_right,
                normalized=False,
            )
            for i in found
        ]
    )


def _post_processor(vocabulary: Vocabulary) -> Any:
    from tokenizers.processors import TemplateProcessing

    adds = {"bos": vocabulary.add_bos, "eos": vocabulary.add_eos}
    ids = {role: vocabulary.special_ids[role] for role, used in adds.items() if used}
    tokens = {role: vocabulary.tokens[i] for role, i in ids.items()}

    def part(name: str, type_id: int) -> list[str]:
        roles = [tokens.get("bos"), name, tokens.get("eos")]
        return [f"{role}:{type_id}" for role in roles if role is not None]

    return TemplateProcessing(
        single=part("$A", 0),
        pair=part("$A", 0) + part("$B", 1),
        special_tokens=[(tokens[role], i) for role, i in ids.items()],
    )


def _bpe(vocabulary: Vocabulary) -> tuple[Any, dict[str, Any]]:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    pre = vocabulary.pre_tokenizer
    assert pre is not None
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    model = models.BPE(
        _index(vocabulary),
        [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)],
        ignore_merges=pre.ignore_merges,
        byte_fallback=not pre.byte_level,
    )
    if pre.byte_level:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        decoder = _literal_tokens(vocabulary)
        decoder = decoders.Sequence([*decoder, decoders.ByteLevel()]) if decoder else decoders.ByteLevel()
        return model, {"pre_tokenizer": pre_tokenizers.Sequence(splits), "decoder": decoder}
    return model, {
        "normalizer": normalizers.Replace(" ", _SPACE),
        "pre_tokenizer": pre_tokenizers.Sequence(splits),
        "decoder": decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]),
    }


def _literal_tokens(vocabulary: Vocabulary) -> list[Any]:
    """Return decoder steps that spell special tokens in the byte alphabet if they would be read as bytes.

    DeepSeek's "õ" is such a token: it is the character, not the byte 0xF5.
    """
    from tokenizers import Regex, decoders

    texts = [vocabulary.tokens[i] for i in vocabulary.ids_of(*SPECIAL)]
    wrong = [text for text in texts if from_byte_level(text) not in (text, text.encode())]
    return [decoders.Replace(Regex(rf"\A{re.escape(text)}\z"), to_byte_level(text)) for text in wrong]


def _sentencepiece_bpe(vocabulary: Vocabulary) -> tuple[Any, dict[str, Any]]:
    from tokenizers import models

    unknown = vocabulary.special_ids.get("unknown")
    model = models.BPE(
        _index(vocabulary),
        _merges_of_scores(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=_has_bytes(vocabulary),
    )
    return model, {"normalizer": _piece_normalizer(vocabulary), "decoder": _piece_decoder(vocabulary)}


def _unigram(vocabulary: Vocabulary) -> tuple[Any, dict[str, Any]]:
    from tokenizers import models

    scores = [
        0.0 if type is TokenType.USER_DEFINED else score
        for type, score in zip(vocabulary.types, vocabulary.scores, strict=True)
    ]
    model = models.Unigram(
        list(zip(vocabulary.tokens, scores, strict=True)),
        vocabulary.special_ids.get("unknown"),
        _has_bytes(vocabulary),
    )
    return model, {"normalizer": _piece_normalizer(vocabulary), "decoder": _piece_decoder(vocabulary)}


def _piece_normalizer(vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.Precompiled(vocabulary.charsmap)] if vocabulary.charsmap else []
    if vocabulary.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.add_space_prefix:
        steps.append(normalizers.Prepend(" "))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _piece_decoder(vocabulary: Vocabulary) -> Any:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _index(vocabulary: Vocabulary) -> dict[str, int]:
    return {token: i for i, token in enumerate(vocabulary.tokens)}


def _has_bytes(vocabulary: Vocabulary) -> bool:
    """Whether the vocabulary has a token for each byte."""
    found = {vocabulary.tokens[i] for i in vocabulary.ids_of(TokenType.BYTE)}
    return found >= {f"<0x{byte:02X}>" for byte in range(256)}


def _merges_of_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is a piece, in descending order of its score."""
    kept = vocabulary.ids_of(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    pieces = {vocabulary.tokens[i] for i in kept}
    merges: list[tuple[str, str]] = []
    for i in sorted(kept, key=lambda i: -vocabulary.scores[i]):
        piece = vocabulary.tokens[i]
        pairs = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        merges += [pair for pair in pairs if pieces.issuperset(pair)]
    return merges


_BUILDERS = {"gpt2": _bpe, "gemma4": _bpe, "llama": _sentencepiece_bpe, "t5": _unigram}
