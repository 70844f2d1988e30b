"""The algorithms of GGUF's tokenizers, built from parts of the library ``tokenizers``.

    gpt2, gemma4    merges in the file's order, in the pieces of the pre-tokenizer
    llama           the adjacent pair whose piece has the best score is merged first, in the whole text
    t5              the pieces with the largest sum of scores (Viterbi)

Ids equal those of llama.cpp and of the library that a vocabulary was trained with, but for this:

- Tokens that stand in a text are found from left to right, the longest first, as in ``tokenizers``; llama.cpp looks
  for the longest in the whole text first. They differ where two such tokens overlap.
- llama: pieces of equal score are merged in the order of their ids; llama.cpp and SentencePiece go from left to right.
  Trained pieces have different scores. A piece that no two others make is found by llama.cpp and SentencePiece,
  and not here. A text never becomes a control token by merges, as in SentencePiece; in llama.cpp it may. The space
  before a text (add_space_prefix) also comes behind each special token, as in llama.cpp; SentencePiece adds one alone.
  Normalisation, where the file has one, is done, as in SentencePiece; llama.cpp passes over it.
- t5: SentencePiece replaces the longest match of its normalisation at each place, ``tokenizers`` the shortest in each
  grapheme: they differ in sequences of several combining marks. Where the vocabulary has tokens of bytes, characters
  that it lacks become those, as in SentencePiece; in llama.cpp they are unknown. A text of spaces alone, and
  add_space_prefix=False with remove_extra_whitespaces=True, are those of SentencePiece too. Of segmentations with the
  same sum SentencePiece, in 32-bit floats, may find another one.
- gemma4: a run of newlines is merged as any other text; llama.cpp looks it up whole.
- Phi-3: special tokens take all whitespace behind them, as in its own tokenizer; in llama.cpp ASCII's alone.
- ``pre_tokenizers`` says which patterns llama.cpp only approximates.
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
    """The tokenizer of a vocabulary.

    Raises:
        Exception: the library refuses it.
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
    """Tokens that are found in a text as they stand, before anything else."""
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
    """Steps of a decoder that spell special tokens in the alphabet of bytes, where they would be taken for bytes.

    DeepSeek's "õ" is such a token: it stands for itself, and not for the byte 0xF5.
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
    """Whether there is a token for each byte."""
    found = {vocabulary.tokens[i] for i in vocabulary.ids_of(TokenType.BYTE)}
    return found >= {f"<0x{byte:02X}>" for byte in range(256)}


def _merges_of_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, those of the best score first."""
    kept = vocabulary.ids_of(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    pieces = {vocabulary.tokens[i] for i in kept}
    merges: list[tuple[str, str]] = []
    for i in sorted(kept, key=lambda i: -vocabulary.scores[i]):
        piece = vocabulary.tokens[i]
        pairs = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        merges += [pair for pair in pairs if pieces.issuperset(pair)]
    return merges


_BUILDERS = {"gpt2": _bpe, "gemma4": _bpe, "llama": _sentencepiece_bpe, "t5": _unigram}
