"""Open Hugging Face folders as sources: config.json, and model.safetensors or shards, memory-mapped.

The core parses safetensors (``cpp/files/safetensors.h``), as strictly as the safetensors package, which needs torch for
bfloat16. No code in the folder is executed: pickles and ambiguous files are rejected.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet import _core
from whet.errors import WhetValueError
from whet.models.adapter_files import SCORE, is_adapter_folder
from whet.models.architecture import RowSlice
from whet.models.families import (
    PREDICTING,
    PREDICTING_MODULES,
    Family,
    family_of,
    is_skipped,
    model_config,
    module_targets,
    short_position,
    text_options,
)
from whet.models.formats import TABLE
from whet.models.slots import ModelSource, StoredTensor, find_stored, iter_slices, unread_names
from whet.models.sources.mapped import map_file, parse_container, parse_json, view
from whet.ops.quant import bf16_values

FLOATS = {TABLE[name].gguf_name: TABLE[name] for name in ("float32", "float16", "bfloat16", "float64")}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Masks and frequencies in old checkpoints; their values follow from the config.
_BUFFERS = re.compile(r"(^|\.)((attn|attention)\.(masked_)?bias|rotary_emb\.inv_freq)$")


class Entry(NamedTuple):
    """A tensor of a file: its safetensors dtype, its shape, and its offset in the file."""

    file: str
    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    offset: int


def open_folder(path: str | os.PathLike[str], *, max_position: int | None = None) -> ModelSource:
    """Open the model of a Hugging Face folder.

    Args:
        path: a folder with config.json and model.safetensors, or shards and model.safetensors.index.json.
        max_position: see ``model_config``.

    Returns:
        A source whose slices are read-only views of the mapped files, which must not change while they are in use;
        bfloat16 is uint16. A head that equals the embedding, in a model whose config ties them, is tied.

    Raises:
        WhetValueError: an unsupported model, a missing, damaged or contradictory file, a tensor that is missing, has
            the wrong shape or is not float, or a tensor that the model does not have.
    """
    folder, where = Path(path), f'open_folder("{path}")'
    if not folder.is_dir():
        raise WhetValueError(f"{where}: the folder does not exist. Models are not downloaded; pass a path.")
    config = read_config(folder, where)
    family = family_of(config, where)
    return _open(config, family, read_entries(folder, where), max_position, where)


def is_classifier_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a sequence classifier of transformers."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        return False
    names = read_config(folder, f'open_classifier("{path}")').get("architectures")
    return isinstance(names, list) and any("ForSequenceClassification" in str(name) for name in names)


class Classifier(NamedTuple):
    """A sequence classifier with one label.

    Attributes:
        source: the decoder, with the embedding in place of an LM head.
        head: (1, hidden_dim) float32.
        pad_token_id: token that does not count at the end of a row; None: all count.
    """

    source: ModelSource
    head: np.ndarray
    pad_token_id: int | None


def open_classifier(path: str | os.PathLike[str], *, max_position: int | None = None) -> Classifier:
    """Open the folder of a sequence classifier with one label.

    Raises:
        WhetValueError: as ``open_folder``, or there is no head of one label.
    """
    folder, where = Path(path), f'open_classifier("{path}")'
    config, entries = {**read_config(folder, where), "tie_word_embeddings": True}, read_entries(folder, where)
    stored = entries.pop(f"{SCORE}.weight", None)
    if stored is None or stored.shape[0] != 1 or stored.dtype not in FLOATS:
        found = "nothing" if stored is None else f"{stored.dtype} of shape {stored.shape}"
        raise WhetValueError(
            f"{where}: {SCORE}.weight is {found}, expected floats of shape (1, hidden_dim): a reward model has one "
            f"label."
        )
    format = FLOATS[stored.dtype]
    values = view(stored.data, stored.offset, format.dtype, stored.shape)
    head = bf16_values(values) if format.name == "bfloat16" else values.astype(np.float32)
    pad_id = text_options(config).get("pad_token_id", config.get("pad_token_id"))
    return Classifier(_open(config, family_of(config, where), entries, max_position, where), head, pad_id)


def open_predicting(path: str | os.PathLike[str]) -> tuple[ModelSource, dict[str, StoredTensor]] | None:
    """Open the block of a Qwen3.5 folder that predicts one more token (MTP).

    Returns:
        The model with the block's layer as its last one, and the block's other tensors by their modules in GGUF. None:
        there is no block, or one of several layers or of other modules, which GGUF does not have.
    """
    folder, where = Path(path), f'open_folder("{path}")'
    config, entries = read_config(folder, where), read_entries(folder, where)
    family, described = family_of(config, where), model_config(config, where=where)
    first = f"{PREDICTING}layers.0."
    names = {name for name in entries if name.startswith(PREDICTING)}
    of_layer = {name for name in names if name.startswith(first)}
    if family.mixer != "delta" or not of_layer or names - of_layer != {f"{name}.weight" for name in PREDICTING_MODULES}:
        return None
    prefix = next(m.names[0] for m in family.modules if m.slot == "layers.{i}.norm1").partition("layers.{i}")[0]
    if not any(name.startswith(family.prefix) for name in entries):  # a checkpoint without the head
        prefix = prefix.removeprefix(family.prefix)
    kinds = ["linear_attention" if mixer == "delta" else "full_attention" for mixer in described.mixers]
    more = {"num_hidden_layers": described.n_layers + 1, "layer_types": [*kinds, "full_attention"]}
    nested = {"text_config": {**config["text_config"], **more}} if text_options(config) is not config else more
    layers = {f"{prefix}layers.{described.n_layers}.{name.removeprefix(first)}": entries[name] for name in of_layer}
    layers |= {name: entry for name, entry in entries.items() if not is_skipped(name)}
    found = _Tensors(entries, family, where)
    tensors = {ours: found.get([name], "weight") for name, ours in PREDICTING_MODULES.items()}
    return _open({**config, **nested}, family, layers, None, where), tensors


def _open(
    config: dict[str, Any], family: Family, entries: Mapping[str, Entry], max_position: int | None, where: str
) -> ModelSource:
    tensors = _Tensors(entries, family, where)
    described = model_config(config, max_position=max_position, where=where, tied_head=tensors.tied_head(config))

    modules = find_stored(described, family.modules, family.file_modules, tensors.has)

    def slices() -> Iterator[RowSlice]:
        return iter_slices(described, modules, tensors.get, where)

    for _ in slices():
        pass
    tensors.check_all_used(config, unread_names(described, family.modules))
    targets = module_targets(family, described)
    return ModelSource(described, slices, targets, short_position=short_position(config, where))


def read_config(folder: Path, where: str) -> dict[str, Any]:
    """Read config.json of a folder.

    Raises:
        WhetValueError: it is missing or not JSON.
    """
    path = folder / "config.json"
    if not path.is_file() and is_adapter_folder(folder):
        raise WhetValueError(
            f"{where}: this is an adapter. Open the model it was trained on, and add the adapter to it."
        )
    if not path.is_file() and (files := sorted(file.name for file in folder.glob("*.gguf"))):
        raise WhetValueError(
            f"{where}: the folder has no config.json, but GGUF files. Pass the path of one: {files[0]}."
        )
    return parse_json(map_file(path, where).tobytes(), f"{where}: config.json")


def read_safetensors(path: Path, where: str) -> dict[str, Entry]:
    """Read name -> tensor of a .safetensors file; see ``parse_safetensors``."""
    return parse_safetensors(map_file(path, where), f"{where}: {path.name}")


def parse_safetensors(data: np.ndarray, label: str) -> dict[str, Entry]:
    """Parse name -> tensor of a file's bytes, (n,) uint8; tensor data is not read.

    Raises:
        WhetValueError: the file violates the format.
    """
    return {
        name: Entry(label, data, dtype, shape, offset)
        for name, dtype, shape, offset, _ in parse_container(_core.parse_safetensors, data, label)
    }


def read_entries(folder: Path, where: str) -> dict[str, Entry]:
    """Read name -> tensor of all files of the folder.

    Raises:
        WhetValueError: a missing, damaged or contradictory file.
    """
    if (folder / SINGLE).is_file():
        return read_safetensors(folder / SINGLE, where)
    if (folder / INDEX).is_file():
        return _read_shards(folder, where)
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise WhetValueError(
            f"{where}: {pickles[0]} is a pickle, which can execute any code; it was not opened. If you trust it, load "
            f"it in transformers and call save_pretrained(..., safe_serialization=True)."
        )
    raise WhetValueError(f"{where}: the folder has neither {SINGLE} nor {INDEX}.")


def _read_shards(folder: Path, where: str) -> dict[str, Entry]:
    label = f"{where}: {INDEX}"
    files = parse_json(map_file(folder / INDEX, where).tobytes(), label).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise WhetValueError(f"{label} has weight_map {files!r:.80}, expected tensor names and their files.")
    for name, file in files.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w][\w.-]*\.safetensors", file, re.ASCII):
            raise WhetValueError(f"{label}: {name} is in {file!r:.80}, expected the name of a .safetensors file there.")
    entries: dict[str, Entry] = {}
    for file in sorted(set(files.values())):
        for name, entry in read_safetensors(folder / file, where).items():
            if files.get(name) != file:
                listed = f"lists in {files[name]}" if name in files else "does not list"
                raise WhetValueError(f"{where}: {file} has {name}, which {INDEX} {listed}.")
            entries[name] = entry
    absent = sorted(files.keys() - entries.keys())
    if absent:
        raise WhetValueError(f"{where}: {files[absent[0]]} lacks {absent[0]}, which {INDEX} lists in it.")
    return entries


class SplitBlocks:
    """Rows of MXFP4 blocks whose numbers and scales are apart, which are joined to GGUF's blocks when they are read.

    Args:
        blocks: (..., n, 16) uint8: byte i has the numbers 2 i, in its low nibble, and 2 i + 1 of a block of 32; in
            GGUF the numbers i and i + 16.
        scales: (..., n) uint8.
    """

    def __init__(self, blocks: np.ndarray, scales: np.ndarray) -> None:
        self.blocks, self.scales = blocks, scales
        self.shape = (*scales.shape[:-1], 17 * scales.shape[-1])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return len(self.scales)

    def __getitem__(self, rows: Any) -> SplitBlocks:
        return SplitBlocks(self.blocks[rows], self.scales[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.join()

    def join(self) -> np.ndarray:
        """Return GGUF's blocks, (..., 17 n) uint8."""
        joined = np.empty((*self.scales.shape, 17), np.uint8)
        joined[..., 0] = self.scales
        first, second = self.blocks[..., :8], self.blocks[..., 8:]
        joined[..., 1::2] = (first & 15) | (second << 4)
        joined[..., 2::2] = (first >> 4) | (second & 240)
        return joined.reshape(self.shape)


class _Tensors:
    """The folder's tensors by the module names of the family."""

    def __init__(self, entries: Mapping[str, Entry], family: Family, where: str) -> None:
        if family.file_prefix:
            entries = {_replace_prefix(name, family.file_prefix, family.prefix): e for name, e in entries.items()}
        self.entries, self.family, self.where, self.used = entries, family, where, set()
        # A checkpoint of the model without its head has names without the prefix.
        self.prefix = "" if any(name.startswith(family.prefix) for name in entries) else family.prefix

    def has(self, name: str) -> bool:
        return name.removeprefix(self.prefix) in self.entries

    def find(self, names: Sequence[str], suffix: str) -> str | None:
        for name in names:
            found = f"{name.removeprefix(self.prefix)}.{suffix}"
            if found in self.entries:
                return found
        return None

    def get(self, names: Sequence[str], suffix: str) -> StoredTensor:
        name = self.find(names, suffix)
        if name is None and (blocks := self.find(names, f"{suffix}_blocks")) is not None:
            return self.get_blocks(blocks, f"{blocks.removesuffix('blocks')}scales")
        if name is None:
            raise WhetValueError(
                f"{self.where}: tensor {names[0]}.{suffix} is missing, which the config requires. The folder is "
                f"incomplete, or config.json belongs to another model."
            )
        self.used.add(name)
        entry = self.entries[name]
        if entry.dtype not in FLOATS:
            raise WhetValueError(f"{entry.file}: {name} is {entry.dtype}; this engine reads {', '.join(FLOATS)}.")
        format = FLOATS[entry.dtype]
        return StoredTensor(view(entry.data, entry.offset, format.dtype, entry.shape), format.name, entry.shape)

    def get_blocks(self, blocks: str, scales: str) -> StoredTensor:
        """Return MXFP4 weights, of which a folder has the numbers and the scales in two tensors."""
        entries = [self.entries.get(name) for name in (blocks, scales)]
        shapes = [() if entry is None or entry.dtype != "U8" else entry.shape for entry in entries]
        if not shapes[1] or shapes[0] != (*shapes[1], 16):
            raise WhetValueError(
                f"{self.where}: {blocks} is {shapes[0]} and {scales} {shapes[1]}, expected U8 tensors (..., n, 16) and "
                f"(..., n). The folder is incomplete or damaged."
            )
        self.used |= {blocks, scales}
        parts = [view(entry.data, entry.offset, "|u1", entry.shape) for entry in entries if entry is not None]
        return StoredTensor(SplitBlocks(*parts), "mxfp4", (*shapes[1][:-1], 32 * shapes[1][-1]))

    def tied_head(self, config: Mapping[str, Any]) -> bool | None:
        """Return False if the files have a different head although the config ties it; None: as in the config."""
        embedding, head = (next(m for m in self.family.modules if m.slot == slot) for slot in ("embedding", "head"))
        name = self.find(head.names, "weight")
        tied = text_options(config).get("tie_word_embeddings", self.family.defaults.get("tie_word_embeddings"))
        if name is None or tied is not True:
            return None
        table, output = self.get(embedding.names, "weight"), self.get(head.names, "weight")
        return table.shape == output.shape and np.array_equal(_bits(table.tensor), _bits(output.tensor))

    def check_all_used(self, config: Mapping[str, Any], unread: set[str]) -> None:
        unused = sorted(name for name in self.entries.keys() - self.used if name.rpartition(".")[0] not in unread)
        model_type = config["model_type"]
        has_towers = text_options(config) is not config
        if skipped := [name for name in unused if is_skipped(name, has_towers)]:
            unused = sorted({*unused}.difference(skipped))
            warnings.warn(
                f"{self.where}: {len(skipped)} tensors, such as {skipped[0]}, are not read: Whet runs the language "
                f"model of this {model_type}.",
                stacklevel=2,
            )
        for name in unused:
            if not _BUFFERS.search(name):
                raise WhetValueError(
                    f"{self.entries[name].file}: a {model_type} with this config has no {name}. config.json belongs "
                    f"to another model, or this variant is not supported."
                )


def _replace_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the bit patterns, so that NaN equals itself and -0 differs from 0."""
    return array.view(f"<u{array.itemsize}")
