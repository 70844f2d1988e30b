"""Translate a Hugging Face tokenizer into the keys ``tokenizer.*`` of a GGUF file: the inverse of ``vocabulary``.

Supports byte-level BPE ("gpt2") and SentencePiece BPE ("llama") in ``tokenizer.json``. The result is read back and has
to produce the same tokens as the folder's tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import WhetValueError, check_installed
from whet.models.families import FAMILIES, text_options
from whet.models.sources.mapped import map_file, parse_json
from whet.models.tokenizers.folder import read_json, read_settings, read_templates, special_text
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS, find_name
from whet.models.tokenizers.tokenizer import GGUFTokenizer
from whet.models.tokenizers.vocabulary import TokenType, is_phi3

_PROBES = (
    "Hello, world!  It's 12:30.\n\n\tx = [1, 2]", "naïve 日本語 👩‍🚀 été", " a", "don't WE'LL 1234567 3.14e-10",
    "def f(x):\r\n    return x**2  # ok\n\n\n", "CamelCaseHTTPServer snake_case", "Привет, мир! ΑΒΓ … “quoted”", "    ",
)  # fmt: skip
_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
    "cls_token": "cls",
    "mask_token": "mask",
}
_SPACE = "\u2581"


def tokenizer_metadata(
    folder: Path, n_rows: int, where: str, name: str, pre: str | None = None, chat_template: str | None = None
) -> dict[str, Any]:
    """Return the keys of a folder's tokenizer and chat template, and the name, by which llama.cpp detects Phi-3.

    Args:
        folder: with tokenizer.json and its companions.
        n_rows: rows of the embedding; ids without a token get an unused one.
        where: prefix of error messages.
        name: name of the model.
        pre: name of the pre-tokenizer. Default: found by its patterns.
        chat_template: replaces the folder's template.

    Raises:
        WhetValueError: tokenizer.json is missing, is of an unsupported kind, has more tokens than the embedding has
            rows, or splits texts in a way without a name in llama.cpp.
        MissingExtraError: tokenizers is not installed.
    """
    check_installed(where, "tokenizers")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WhetValueError(
            f"{where}: {folder} has no tokenizer.json. Save the tokenizer there with transformers' save_pretrained, or "
            f"pass --tokenizer with another folder."
        )
    made = parse_json(map_file(path, where).tobytes(), f"{where}: tokenizer.json")
    settings = read_settings(folder, where)
    try:
        family = FAMILIES.get(text_options(read_json(folder / "config.json", where)).get("model_type", ""))
        kind = ((family and family.gguf) or {}).get("tokenizer", "llama")
        found = _tokens(made, n_rows, where, pre, kind)
        ids = _special_ids(made, settings, folder, where)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise WhetValueError(
            f"{where}: tokenizer.json cannot be read: {error!r:.80}. Save it again with transformers."
        ) from error
    found |= {f"tokenizer.ggml.{role}_token_id": i for role, i in ids.items()}
    templates = read_templates(folder, settings, where) if chat_template is None else {"default": chat_template}
    found |= {
        "tokenizer.chat_template" + ("" if key == "default" else f".{key}"): text for key, text in templates.items()
    }
    added = made["added_tokens"]
    found["general.name"] = _adjust_name(name, any(token.get("rstrip") for token in added))
    _check_same(path, found, ids, where, () if pre is not None else (*_PROBES, *_special_probes(made)))
    return found


def _adjust_name(name: str, strips: bool) -> str:
    """Change the model's name if llama.cpp would wrongly derive from it how special tokens strip whitespace."""
    if is_phi3(name) == strips:
        return name
    return f"Phi-3 {name}" if strips else re.sub("phi-?3", "Phi 3", name, flags=re.IGNORECASE)


def _special_probes(made: Mapping[str, Any]) -> list[str]:
    """Return texts with an added token of each kind, with whitespace around it.

    None if a space is added only before a text: llama.cpp adds it after special tokens too.
    """
    parts = _sequence(made["pre_tokenizer"], "pretokenizers")
    if any(part["type"] == "Metaspace" and part.get("prepend_scheme") == "first" for part in parts):
        return []
    flags = "special", "lstrip", "rstrip", "single_word", "normalized"
    kinds = {tuple(token.get(flag) for flag in flags): token["content"] for token in made["added_tokens"]}
    return [f"{text}\nHi  {text} there{text}\n\n{text}" for text in kinds.values()]


def _tokens(made: Mapping[str, Any], n_rows: int, where: str, pre: str | None, kind: str) -> dict[str, Any]:
    """Return the keys of the model, its tokens, and its merges or scores; ``kind``: of BPE over characters."""
    model, added = made["model"], {token["id"]: token for token in made["added_tokens"]}
    parts = _sequence(made["pre_tokenizer"], "pretokenizers")
    is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
    if model["type"] != "BPE" or not (is_byte_level or model.get("byte_fallback")):
        raise WhetValueError(
            f"{where}: tokenizer.json is a {model['type']} model, expected byte-level BPE, or SentencePiece BPE with "
            f"byte_fallback: other kinds are not supported."
        )
    texts = {i: text for text, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    if max(texts) >= n_rows:
        raise WhetValueError(
            f"{where}: the tokenizer has {max(texts) + 1} tokens and the embedding {n_rows} rows. It belongs to "
            f"another model: pass --tokenizer with the model's, or resize the embedding."
        )
    unknown = model.get("unk_token")

    def type_of(i: int) -> TokenType:
        if i not in texts:
            return TokenType.UNUSED
        if not is_byte_level and texts[i] == unknown:
            return TokenType.UNKNOWN
        if i in added:
            return TokenType.CONTROL if added[i]["special"] else TokenType.USER_DEFINED
        is_byte = not is_byte_level and len(texts[i]) == 6 and texts[i].startswith("<0x")
        return TokenType.BYTE if is_byte else TokenType.NORMAL

    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if is_byte_level else kind,
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(n_rows)],
        "tokenizer.ggml.token_type": np.array([type_of(i) for i in range(n_rows)], np.int32),
    }
    if is_byte_level:
        found["tokenizer.ggml.pre"] = _name(parts, bool(model.get("ignore_merges")), where, pre)
    if merges and (is_byte_level or kind == "gemma4"):
        found["tokenizer.ggml.merges"] = [f"{left} {right}" for left, right in merges]
    if is_byte_level:
        return found
    # Scores encode the order of merges, counting down from 0, as in SentencePiece's models.
    ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
    scores = [-float(ranks.get(texts.get(i, ""), len(merges))) for i in range(n_rows)]
    found["tokenizer.ggml.scores"] = np.array(scores, np.float32)
    found["tokenizer.ggml.add_space_prefix"] = _adds_space(made["normalizer"], parts)
    return found


def _name(parts: Sequence[Mapping[str, Any]], ignore_merges: bool, where: str, pre: str | None) -> str:
    if pre is None:
        pre = find_name(parts, ignore_merges)
    elif pre not in PRE_TOKENIZERS:
        raise WhetValueError(f"{where}: pre is {pre!r}, expected a name of llama.cpp: {', '.join(PRE_TOKENIZERS)}.")
    if pre is None:
        raise WhetValueError(
            f"{where}: the tokenizer splits texts by {json.dumps(list(parts))[:200]}, and no pre-tokenizer of "
            f"llama.cpp has these patterns. Name the nearest with --pre: {', '.join(list(PRE_TOKENIZERS)[1:5])}, ..."
        )
    return pre


def _adds_space(normalizer: Mapping[str, Any] | None, parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a space is added before a text."""
    steps = [*_sequence(normalizer, "normalizers"), *parts]
    return any(
        (step["type"] == "Prepend" and step["prepend"] in (_SPACE, " "))
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _sequence(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part[name]) if part["type"] == "Sequence" else [part]


def _special_ids(made: Mapping[str, Any], settings: Mapping[str, Any], folder: Path, where: str) -> dict[str, int]:
    """Return role -> id, from the tokenizer's settings or the model's config."""
    index = {**made["model"]["vocab"], **{token["content"]: token["id"] for token in made["added_tokens"]}}
    config = read_json(folder / "config.json", where)
    config = {**text_options(config), **config}
    ids: dict[str, int] = {}
    for name, role in _ROLES.items():
        text = special_text(settings, name)
        i = index.get(text) if isinstance(text, str) else config.get(f"{name}_id") if name not in settings else None
        if isinstance(i, int) and not isinstance(i, bool) and i >= 0:
            ids[role] = i
    ends = read_json(folder / "generation_config.json", where).get("eos_token_id")
    others = [i for i in ends if isinstance(i, int) and i != ids.get("eos")] if isinstance(ends, list) else []
    if others and "eos" in ids:
        ids["eot"] = others[0]
    return ids


def _check_same(path: Path, found: dict[str, Any], ids: Mapping[str, int], where: str, probes: Sequence[str]) -> None:
    """Add add_bos_token and add_eos_token, and compare the tokens of some texts with the folder's tokenizer."""
    from tokenizers import Tokenizer

    original = Tokenizer.from_file(str(path))
    bare, full = (original.encode("a", add_special_tokens=added).ids for added in (False, True))
    found["tokenizer.ggml.add_bos_token"] = full[:1] != bare[:1] and full[:1] == [ids.get("bos")]
    found["tokenizer.ggml.add_eos_token"] = full[-1:] != bare[-1:] and full[-1:] == [ids.get("eos")]
    lists = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}
    written = GGUFTokenizer(lists, where)
    for text in probes:
        if written.encode(text) != original.encode(text).ids:
            raise WhetValueError(
                f"{where}: as a GGUF file this tokenizer would produce other tokens for {text!r}: llama.cpp cannot "
                f"normalise or split texts this way. Name the nearest pre-tokenizer with --pre."
            )
