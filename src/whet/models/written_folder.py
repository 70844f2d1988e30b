"""Make folders from ``save_pretrained`` of transformers or PEFT compatible with transformers 4, and complete.

transformers 4 rejects a tokenizer class that transformers 5 writes, and silently ignores rotary settings that are only
in ``rope_parameters``. safetensors 0.8 writes files readable only by their owner. transformers does not load, and so
does not save, tensors that predict further tokens. Neither package is imported.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from whet.files import replace_text
from whet.models.families import PREDICTING
from whet.models.sources.folder import FLOATS, INDEX, SINGLE, read_entries, read_safetensors

_SHARD, _PREDICTING = "model-00001-of-00001.safetensors", "model-mtp.safetensors"
_ROPE_OPTIONS = ("rope_theta", "partial_rotary_factor")
"""Options next to ``rope_scaling`` in transformers 4, and in ``rope_parameters`` in transformers 5."""
_ORIGINAL = "original_max_position_embeddings"
_GPT_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
"""Names of these options in GPT-NeoX."""


def complete_folder(folder: str | os.PathLike[str]) -> None:
    """Make a newly written folder of a model or adapter compatible with transformers 4 and 5, and readable by others.

    ``tokenizer_class`` TokenizersBackend becomes PreTrainedTokenizerFast, extra special tokens move to the key that
    both read, ``rope_theta`` and ``rope_scaling`` are added, and weights get the default mode of new files.
    """
    folder = Path(folder)
    _rewrite(folder / "config.json", _with_rope)
    _rewrite(folder / "tokenizer_config.json", _with_tokenizer_keys)
    for file in folder.glob("*.safetensors"):
        if file.stat().st_mode & 0o077 == 0:
            file.chmod(_new_file_mode(folder))


def copy_predicting(source: Path, folder: Path) -> None:
    """Copy tensors that predict further tokens, which transformers does not load, to a folder written from another.

    They are in one more file, listed in the index.
    """
    entries = {n: entry for n, entry in read_entries(source, "copy_predicting").items() if n.startswith(PREDICTING)}
    if not entries:
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, begin = [], 0
    for name, entry in entries.items():
        size = math.prod(entry.shape) * FLOATS[entry.dtype].block_bytes
        parts.append(entry.data[entry.offset : entry.offset + size].tobytes())
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, begin + size)}
        begin += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / _PREDICTING).write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))
    if (single := folder / SINGLE).is_file():
        files = dict.fromkeys(read_safetensors(single, "copy_predicting"), single.rename(folder / _SHARD).name)
    else:
        files = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    size_bytes = sum((folder / file).stat().st_size for file in {*files.values(), _PREDICTING})
    index = {"metadata": {"total_size": size_bytes}, "weight_map": files | dict.fromkeys(entries, _PREDICTING)}
    replace_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    if file.is_file():
        before = json.loads(file.read_text("utf-8"))
        if (after := change(before)) != before:
            replace_text(file, json.dumps(after, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config, and its nested configs, with transformers 4's keys next to ``rope_parameters``."""
    config = {key: _with_rope(value) if isinstance(value, dict) else value for key, value in config.items()}
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return config
    settings = dict(given.get("full_attention", given))  # Gemma 3 has settings for each kind of layer
    kind = settings.get("rope_type", "default")
    if kind == "proportional":  # not in transformers 4
        return config
    options = {key: settings.pop(key) for key in _ROPE_OPTIONS if key in settings}
    config |= options
    if config.get("model_type") == "gpt_neox":
        config |= {_GPT_NEOX[key]: value for key, value in options.items()}
    if kind == "longrope" and _ORIGINAL in settings:
        config[_ORIGINAL] = settings[_ORIGINAL]
    if config.get("model_type") == "phi3":  # allows three settings only
        settings = {"type": kind} | {key: settings[key] for key in ("short_factor", "long_factor") if key in settings}
    if kind != "default":
        config["rope_scaling"] = settings
    if "sliding_attention" in given:
        config["rope_local_base_freq"] = given["sliding_attention"].get("rope_theta")
    return config


def _with_tokenizer_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's config with the names of transformers 4, which transformers 5 reads too."""
    config = dict(config)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config


def _new_file_mode(folder: Path) -> int:
    """Return the mode of a new file in the folder, by the umask or the folder's ACL."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    return mode
