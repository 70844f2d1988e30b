"""Write src/facts.ts: what whet's Python modules say of tokenizers, adapters and sampling settings, for TypeScript.

python facts.py OUT
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import typing
from pathlib import Path
from typing import Any

from whet.config.fields import Range
from whet.config.sampling import SamplingParams
from whet.models import adapter_files, architecture, families, formats
from whet.models.sources import folder
from whet.models.tokenizers import algorithms, vocabulary
from whet.models.tokenizers.pre_tokenizers import PRE_TOKENIZERS


def camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


def settings() -> dict[str, Any]:
    """Name -> default and accepted values of every sampling setting."""
    hints = typing.get_type_hints(SamplingParams, include_extras=True)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingParams):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        (note,) = (note for note in typing.get_args(hints[field.name])[1:] if isinstance(note, Range))
        found[camel(field.name)] = {"default": default, "expected": note.expected}
    return found


def pre_tokenizers() -> list[list[Any]]:
    """[names, meaning]: names of the same meaning share one entry."""
    entries: dict[Any, list[str]] = {}
    for name, entry in PRE_TOKENIZERS.items():
        entries.setdefault(entry, []).append(name)
    return [[names, {camel(key): value for key, value in entry._asdict().items()}] for entry, names in entries.items()]


def model_families() -> dict[str, Any]:
    """model_type -> what the config and the tensors of a family are, its own and what it has of another."""
    fields = ("keys", "settings", "defaults", "gguf", "window", "rope")
    fields += ("partial_rotary", "rope_off", "rope_local", "root_of_embedding")
    return {
        name: {field: getattr(family, field) for field in fields} | {"modules": families._resolve(name)["modules"]}
        for name, family in families.FAMILIES.items()
    }


def facts() -> dict[str, Any]:
    kinds = {}
    for model in algorithms._BUILDERS:
        kind = vocabulary._KINDS[model]
        kinds[model] = {camel(key): value for key, value in kind._asdict().items()}
    return {
        "families": model_families(),
        "gguf": families.GGUF_NAMES,
        "activations": families._ACTIVATIONS,
        "plain": families._PLAIN,
        "notRun": families._NOT_RUN,
        "largest": architecture.LARGEST,
        "largestSize": architecture.LARGEST_SIZE,
        "formats": {
            name: {camel(k): s[k] for k in ("alias", "embedding_format", "next") if k in s}
            for name, s in formats._SETTINGS.items()
        },
        "folder": {"buffers": folder._BUFFERS.pattern},
        "sampling": settings(),
        "adapters": {
            "prefix": adapter_files.PEFT_PREFIX,
            "plain": adapter_files._PLAIN,
            "changesBase": adapter_files._CHANGES_BASE,
        },
        "preTokenizers": pre_tokenizers(),
        "vocabulary": {
            "kinds": kinds,
            "refused": vocabulary._REFUSED,
            "types": {kind.name: int(kind) for kind in vocabulary.TokenType},
            "special": [int(kind) for kind in vocabulary.SPECIAL],
            "roles": vocabulary._ROLES,
            "fillInTheMiddle": vocabulary._FILL_IN_THE_MIDDLE,
            "endsGeneration": vocabulary._ENDS_GENERATION,
            "ends": vocabulary._ENDS,
            "alwaysShown": vocabulary._ALWAYS_SHOWN,
            "mostTokens": vocabulary._MOST_TOKENS,
        },
    }


if __name__ == "__main__":
    lines = ["// Written by facts.py out of src/whet: change it there."]
    for name, value in facts().items():  # each by itself, so that a bundle has what it uses
        lines.append(f"export const {name} = {json.dumps(value, ensure_ascii=False, separators=(',', ':'))} as const;")
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
