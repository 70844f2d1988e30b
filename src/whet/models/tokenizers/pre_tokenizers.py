r"""The pre-tokenizers of byte-level BPE by their names in ``tokenizer.ggml.pre``.

A GGUF file contains only the name of its pre-tokenizer. This table has all names of llama.cpp. Each pattern isolates
its matches in the pieces left by the previous pattern. Patterns follow the ``tokenizer.json`` published with a model,
with which it was trained, even if llama.cpp only approximates them because std::regex has no Unicode classes, case
folding or possessive quantifiers:

    gpt-4o, tekken, granite, youtu, tiny_aya    \p{Lu}, \p{Ll} and \p{M}; llama.cpp distinguishes case only in ASCII
    kimi-k2                                     \p{M} within words; llama.cpp ends a word before a mark
    tiny_aya, afmoe                             groups of digits; llama.cpp joins the preceding text to the first
    deepseek-llm, deepseek-coder                ranges with U+3000 and others, which are spaces in llama.cpp
    patterns with (?i:'s|...)                   "'ſ", the long s, which folds to s

All others produce llama.cpp's ids for the texts in the tests.

Source: llama.cpp, src/llama-vocab.cpp (the names, what each implies, and the patterns with the originals they adapt).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class PreTokenizer(NamedTuple):
    """The meaning of a name of ``tokenizer.ggml.pre``."""

    patterns: tuple[str, ...]
    """Regular expressions in Oniguruma syntax, for ``tokenizers.Regex``."""
    ignore_merges: bool = False
    """Whether a piece that is a token is not split, regardless of merges."""
    add_bos: bool = False
    """Default of add_bos_token."""
    byte_level: bool = True
    """Whether tokens use GPT-2's byte alphabet; else UTF-8 with U+2581 for a space."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPACES = r"\s+(?!\S)|\s+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_MARKED_WORDS = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-"
    "\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57"
    "\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-"
    "\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-"
    "\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-"
    "\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-"
    "\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _words(digits: str, *, begin: str = _CONTRACTIONS + "|", marks: str = "", end: str = r"[\r\n]*|\s*[\r\n]+") -> str:
    """Return Llama 3's pattern: contractions, words, numbers, punctuation and spaces."""
    letter = rf"[\p{{L}}{marks}]" if marks else r"\p{L}"
    punctuation = rf"[^\s\p{{L}}{marks}\p{{N}}]+"
    return rf"{begin}[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}| ?{punctuation}{end}|{_SPACES}"


def _cased_words(suffix: str, without: str = "") -> str:
    """Return the pattern of words that end before a capital letter."""
    begin = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = (rf"[{cases}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]" for cases in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    return rf"{begin}{upper}*{lower}+{suffix}|{begin}{upper}+{lower}*{suffix}"


def _cased(digits: str, suffix: str = _CONTRACTIONS + "?") -> str:
    """Return GPT-4o's pattern."""
    return rf"{_cased_words(suffix)}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_HALVED_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, rf"{_MARKED_WORDS}[\r\n]*|\s*[\r\n]+|{_SPACES}")
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_HAN_FREE_WORDS = _cased_words(_CONTRACTIONS + "?", without=r"&&[^\p{Han}]")
_KIMI = (
    rf"\p{{Han}}+|{_HAN_FREE_WORDS}|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)

_TABLE = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "jais-2": PreTokenizer((_LLAMA3.replace(_SPACES, _HALVED_SPACES + r"|\s"),)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK_AND_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}")),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": PreTokenizer(_DEEPSEEK3),
    "spark2_5": PreTokenizer((*_DEEPSEEK3[:2], rf"{_MARKED_WORDS}|[\r\n]|{_SPACES}", r"\p{N}")),
    "youtu": PreTokenizer(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _cased(r"\p{N}"),
        ),
        ignore_merges=True,
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "modern-bert mpt olmo jais trillion granite-docling exaone4": PreTokenizer((_GPT2,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_words(r"\p{N}", marks=r"\p{M}"),)),
    "ufakzeka": PreTokenizer((_words(r"\p{N}", begin=""),)),
    "seed-coder": PreTokenizer((_QWEN2.replace(r"+[\r\n]*|", "+|").replace(r"\p{N}]+|", r"\p{N}\r\n]+|"),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (_words(r"\p{N}", begin=r"'(?i:[sdmt]|ll|ve|re)|", end=r"[\r\n]*|\s*[\r\n]"),)
    ),
    "exaone-moe": PreTokenizer(
        (_words(r"\p{N}", end=r"[\r\n/]?|\s*[\r\n]").replace(r"\p{L}+|", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|", 1),)
    ),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "poro-chat bloom gpt3-finnish": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "viking": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    "tekken": PreTokenizer((_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_cased(r"\p{N}{1,3}"),)),
    "granite-embed-multi-97m": PreTokenizer((_cased(r"\p{N}{1,3}"),), ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _cased(r"\p{N}{1,3}"))),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "afmoe": PreTokenizer((r"\p{N}+", r"(?<=\p{N})(?=(\p{N}{3})+(?!\p{N}))", _AFMOE_SCRIPTS, _DEEPSEEK3[2])),
    "chameleon": PreTokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": PreTokenizer((r"[^\n]+|[\n]+",), add_bos=True, byte_level=False),
    "sarvam-moe": PreTokenizer((r"[^\n]+|[\n]+",), byte_level=False),
}

PRE_TOKENIZERS = {name: entry for names, entry in _TABLE.items() for name in names.split()}
"""``tokenizer.ggml.pre`` -> its meaning."""


def find_name(parts: Sequence[Mapping[str, Any]], ignore_merges: bool) -> str | None:
    """Find the name of the pre-tokenizer of a ``tokenizer.json`` by its patterns; None: no such name.

    Args:
        parts: the steps of the pre-tokenizer in order.
        ignore_merges: option of the BPE model; decides between names with the same patterns.
    """
    patterns = [_pattern_of(part) for part in parts]
    wanted = [_canonical(pattern) for pattern in patterns if pattern]
    if None in patterns or not wanted:
        return None
    names = [name for name, entry in PRE_TOKENIZERS.items() if list(map(_canonical, entry.patterns)) == wanted]
    names = [name for name in names if PRE_TOKENIZERS[name].byte_level]
    return next((name for name in names if PRE_TOKENIZERS[name].ignore_merges == ignore_merges), (*names, None)[0])


def _pattern_of(part: Mapping[str, Any]) -> str | None:
    """Return the pattern whose matches a step isolates; empty: it does not split; None: not supported."""
    kind = part.get("type")
    if kind == "Split" and "Regex" in part["pattern"]:
        is_isolated = part["behavior"] == "Isolated" and not part["invert"]
        return part["pattern"]["Regex"] if is_isolated or (part["behavior"] == "Removed" and part["invert"]) else None
    if kind == "Digits":
        return r"\p{N}" if part["individual_digits"] else r"\p{N}+"
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return _GPT2 if part.get("use_regex", True) else ""
    return None


def _canonical(pattern: str) -> str:
    """Strip a branch without effect: unmatched spaces are a separate piece anyway."""
    return pattern.removesuffix(r"|\s+")
