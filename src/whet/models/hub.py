"""Models by their name on the Hugging Face hub: found in the hub's cache, or downloaded into it by huggingface_hub.

    owner/name           a folder: config, safetensors and tokenizer
    owner/name:Q4_K_M    the .gguf file of that format, or its parts, as llama.cpp names it

Interrupted downloads resume; HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have their usual meanings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whet.errors import WhetValueError, check_installed

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
_FOLDER_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_OTHER_COPIES = ("original/*", "consolidated*", "onnx/*", "openvino/*")
"""Files of other libraries, with the same weights."""
_DEFAULT_TAG = "Q4_K_M"


def is_hub_name(model: str) -> bool:
    """Whether a model is a name on the hub rather than a path: owner/name that does not exist as a path."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


def find_on_hub(model: str, where: str, notify: Callable[[str], object] = lambda text: None) -> str:
    """Return the local folder or .gguf file of a name on the hub; a path, or another name, is returned unchanged.

    Args:
        model: a name for which ``is_hub_name`` is true, or anything else.
        where: prefix of errors.
        notify: called with a line of text before a download may begin.

    Raises:
        WhetValueError: the repository or format does not exist, or the model is not cached and the hub not reached.
        MissingExtraError: huggingface_hub is not installed.
    """
    if not is_hub_name(model):
        return model
    check_installed(where, "huggingface_hub", package="huggingface_hub")
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, tag = model.partition(":")
    try:
        notify(f"{model!r} is not a local path; looking for it on the Hugging Face hub")
        if not tag and (found := _download_folder(hub, repo)) is not None:
            return found
        return _download_gguf(hub, repo, tag, where)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WhetValueError(
            f"{where}: {model!r} is neither a local path nor a model that the hub provides ({reason:.200}). Check the "
            f"name, the network, and HF_TOKEN for a gated model."
        ) from error


def repository_of(path: str | os.PathLike[str]) -> str:
    """Return the name of the repository of a folder in the hub's cache; empty for any other path."""
    parts = Path(path).parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return ""


def _download_folder(hub: Any, repo: str) -> str | None:
    """Return the folder of a repository; None if it has no config."""
    folder = Path(hub.snapshot_download(repo, allow_patterns=_FOLDER_FILES, ignore_patterns=_OTHER_COPIES))
    names = ("config.json", "adapter_config.json")
    return str(folder) if any((folder / name).is_file() for name in names) and _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _download_gguf(hub: Any, repo: str, tag: str, where: str) -> str:
    """Return the .gguf file of a format, the first of its parts."""
    names = sorted(name for name in _list_files(hub, repo) if name.endswith(".gguf"))
    chosen = _match(names, tag or _DEFAULT_TAG)
    if len({re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", name) for name in chosen}) != 1:
        found = ", ".join(chosen or names)[:300] or "none"
        raise WhetValueError(
            f"{where}: {repo}:{tag or _DEFAULT_TAG} names {len(chosen)} models of the repository. Its .gguf files: "
            f"{found}. Pass {repo}:FORMAT with a part of one name, such as :Q8_0."
        )
    paths = [hub.hf_hub_download(repo, name) for name in chosen]
    return paths[0]


def _list_files(hub: Any, repo: str) -> Sequence[str]:
    """List the files of a repository, or without network those in the cache."""
    try:
        return hub.HfApi().list_repo_files(repo)
    except OSError:
        folder = Path(hub.snapshot_download(repo, local_files_only=True))
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _match(names: Sequence[str], tag: str) -> list[str]:
    """Return the files whose name contains the format as a word."""
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(tag)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [name for name in names if word.search(Path(name).name)]
