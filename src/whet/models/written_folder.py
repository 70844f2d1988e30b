"""Completes a folder that ``save_pretrained`` of transformers or PEFT wrote, for those who read it.

transformers 5 writes what transformers 4 refuses, or reads as another model without an error: the class of a tokenizer,
and rotary settings in ``rope_parameters`` only. safetensors 0.8 writes files that only their owner may read. Imports
neither.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from whet.files import replace_text

_MOVED = ("rope_theta", "partial_rotary_factor")
"""Settings that transformers 4 has next to ``rope_scaling``, and transformers 5 in ``rope_parameters``."""
_ORIGINAL = "original_max_position_embeddings"
_GPT_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
"""Their names there in GPT-NeoX."""


def complete_folder(folder: str | os.PathLike[str]) -> None:
    """Make a model's or an adapter's folder, just written, one that transformers 4 and 5 and other users read alike.

    ``tokenizer_class`` becomes PreTrainedTokenizerFast where it is transformers 5's TokenizersBackend, and extra
    special tokens go where both read them; ``rope_theta`` and ``rope_scaling`` stand next to ``rope_parameters``;
    weights get the mode of new files.
    """
    folder = Path(folder)
    _rewrite(folder / "config.json", _with_rope)
    _rewrite(folder / "tokenizer_config.json", _with_tokenizer_keys)
    for file in folder.glob("*.safetensors"):
        if file.stat().st_mode & 0o077 == 0:
            file.chmod(_new_file_mode(folder))


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    if file.is_file():
        before = json.loads(file.read_text("utf-8"))
        if (after := change(before)) != before:
            replace_text(file, json.dumps(after, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """A config with transformers 4's keys next to ``rope_parameters``, in the configs inside it too."""
    config = {key: _with_rope(value) if isinstance(value, dict) else value for key, value in config.items()}
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return config
    own = dict(given.get("full_attention", given))  # Gemma 3 has settings for each kind of layer
    kind = own.get("rope_type", "default")
    moved = {key: own.pop(key) for key in _MOVED if key in own}
    config |= moved
    if config.get("model_type") == "gpt_neox":
        config |= {_GPT_NEOX[key]: value for key, value in moved.items()}
    if kind == "longrope" and _ORIGINAL in own:
        config[_ORIGINAL] = own[_ORIGINAL]
    if config.get("model_type") == "phi3":  # which takes three settings, under these names
        own = {"type": kind} | {key: own[key] for key in ("short_factor", "long_factor") if key in own}
    if kind != "default":
        config["rope_scaling"] = own
    if "sliding_attention" in given:
        config["rope_local_base_freq"] = given["sliding_attention"].get("rope_theta")
    return config


def _with_tokenizer_keys(config: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's config under the names of transformers 4, which 5 reads too."""
    config = dict(config)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config


def _new_file_mode(folder: Path) -> int:
    """The mode that the umask, or the folder's own rules, give a new file."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    return mode
