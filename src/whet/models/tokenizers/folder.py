"""The tokenizer of a Hugging Face folder: tokenizer.json, its settings and its chat templates, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.errors import WhetValueError, check_installed
from whet.models.sources.mapped import map_file, parse_json
from whet.models.tokenizers.backend import BackendTokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_folder_tokenizer(folder: Path, where: str) -> BackendTokenizer | None:
    """Read a folder's tokenizer; None if only transformers can read it.

    transformers changes the tokenizer of tokenizer.json if the settings name special tokens that it lacks, or BOS and
    EOS contradict it, and has none if there is only a SentencePiece model or a class with code.

    Raises:
        WhetValueError: a file is damaged.
        MissingExtraError: tokenizers is not installed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    check_installed(where, "tokenizers")
    from tokenizers import Tokenizer

    settings = read_settings(folder, where)
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise WhetValueError(f"{where}: {path} cannot be read: {error}. Save the tokenizer again.") from None
    backend.no_truncation()
    backend.no_padding()
    texts = {name: text for name in _SPECIAL if isinstance(text := special_text(settings, name), str)}
    is_complete = "auto_map" not in settings and all(backend.token_to_id(text) is not None for text in texts.values())
    if not is_complete or not _adds_as_set(backend, settings, texts):
        return None
    templates = read_templates(folder, settings, where)
    only = templates.get("default") if templates.keys() <= {"default"} else templates
    return BackendTokenizer(backend, texts, only, settings.get("response_template"))


def _adds_as_set(backend: Any, settings: Mapping[str, Any], texts: Mapping[str, str]) -> bool:
    """Whether the tokenizer adds BOS and EOS as in the settings, by which transformers changes it."""
    bare, full = (backend.encode("a", add_special_tokens=added).ids for added in (False, True))
    for name, added in (("bos", full[:1] != bare[:1]), ("eos", full[-1:] != bare[-1:])):
        wanted = settings.get(f"add_{name}_token")
        if isinstance(wanted, bool) and wanted != added and f"{name}_token" in texts:
            return False
    return True


def read_settings(folder: Path, where: str) -> dict[str, Any]:
    """Read the settings of a folder's tokenizer; empty if it has none."""
    return {
        **read_json(folder / "special_tokens_map.json", where),
        **read_json(folder / "tokenizer_config.json", where),
    }


def special_text(settings: Mapping[str, Any], name: str) -> Any:
    """Return the text of a special token in the settings of a tokenizer."""
    text = settings.get(name)
    return text.get("content") if isinstance(text, Mapping) else text


def read_templates(folder: Path, settings: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the chat templates by name, "default" for the main one, from files or from the settings."""
    template, file = settings.get("chat_template"), folder / "chat_template.jinja"
    named = {entry["name"]: entry["template"] for entry in template} if isinstance(template, list) else {}
    if isinstance(template, str):
        named["default"] = template
    if file.is_file():
        named["default"] = _read_template(file, where)
    for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[other.stem] = _read_template(other, where)
    return named


def _read_template(path: Path, where: str) -> str:
    """Read a template, with newlines as in transformers."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise WhetValueError(f"{where}: {path.name} cannot be read: {error}. Save the template as UTF-8.") from None


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Read a JSON object; empty if the file does not exist."""
    return parse_json(map_file(path, where).tobytes(), f"{where}: {path.name}") if path.is_file() else {}
