"""A model as a GGUF file that llama.cpp opens, in the mixtures of llama-quantize; needs no compiler and no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.errors import WhetValueError
from whet.models.adapter_files import read_peft
from whet.models.architecture import ModelConfig
from whet.models.families import FAMILIES, model_config
from whet.models.formats import FILE_TYPES, Mixture, file_format
from whet.models.gguf_keys import Keys, architecture_of, as_stored, check_keys, make_keys, window_note
from whet.models.gguf_writer import Progress, Tensor, check_place, encoded_metadata, write_gguf
from whet.models.row_reader import RowReader
from whet.models.slots import (
    LoRA,
    ModelSource,
    ModuleSpec,
    WeightLocation,
    find_location,
    iter_locations,
    locate_lora,
    untie_adapted,
)
from whet.models.sources.folder import read_config
from whet.models.sources.gguf import own_vectors, read_options
from whet.models.sources.gguf_container import GGUFFile, read_gguf
from whet.models.sources.mapped import map_file
from whet.models.sources.pretrained import open_pretrained
from whet.models.tokenizers.metadata import tokenizer_metadata

_QUANTIZATION_VERSION = 2
"""Of the layouts of blocks, which GGUF files say."""


class Exported(NamedTuple):
    """A file that was written: its bytes, the number of its tensors in each format, and ``window_note``."""

    size_bytes: int
    formats: dict[str, int]
    note: str = ""


def export_gguf(
    model: str | os.PathLike[str] | GGUFFile,
    path: str | os.PathLike[str],
    quantize: str = "q4_k_m",
    *,
    source: ModelSource | None = None,
    adapters: Sequence[LoRA] = (),
    tokenizer: str | os.PathLike[str] | None = None,
    pre: str | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    check: Callable[[Path], Any] | None = None,
) -> Exported:
    """Write a model as a GGUF file, with its tokenizer and chat template.

    Each matrix gets the type that llama-quantize gives it in a mixture: more bits for some values and down projections,
    and other blocks where its rows are no whole number of blocks. Norms and biases are float32. Tensors that are stored
    in their type already keep their bytes. Memory is that of one tensor's rows, some at a time.

    Args:
        model: a Hugging Face folder, or a GGUF file, as ``open_pretrained`` takes them.
        path: of the file to write.
        quantize: of ``FILE_TYPES``.
        source: the weights, where they are not the model's own: on a packed base, say.
        adapters: merged into them, as ``read_adapters`` gives them.
        tokenizer: a folder with a tokenizer.json; None: the model's.
        pre: llama.cpp's name of the pre-tokenizer; None: the one that has the expressions of tokenizer.json. Of a
            folder's tokenizer.
        chat_template: in place of the tokenizer's.
        overwrite: whether a file that is there is replaced.
        progress: called with the bytes that are written, and those that will be.
        check: as of ``write_gguf``.

    Raises:
        WhetValueError: no such type; a model that the engine does not run or that GGUF has no place for; a damaged
            file; NaN or infinity; or nothing can be written there.
        DiskFullError: there is no room for it. Whatever fails, nothing is left at ``path`` that was not there.
    """
    where = f'export_gguf("{path}")'
    mixture = find_mixture(quantize, where)
    check_place(Path(path), overwrite, where)
    if not isinstance(model, GGUFFile) and Path(model).is_file():
        model = read_gguf(Path(model), f'open_gguf("{model}")')
    opened = open_pretrained(model) if source is None else source
    opened = untie_adapted(opened._replace(adapters=(*opened.adapters, *adapters)))
    keys: Keys | None = None
    if isinstance(model, GGUFFile):
        metadata, model_type, vectors = _of_gguf(model, where)
    else:
        metadata, model_type, keys = _of_folder(Path(model), opened, where)
        vectors = keys.vectors
    rows = RowReader(opened, where)
    stored = as_stored(opened.config, model_type)
    tensors = list(_tensors(rows, stored, FAMILIES[model_type].gguf_modules, mixture))
    if keys is not None:
        check_keys(keys, tensors, stored, where)
        metadata |= keys.metadata
    folder = model if tokenizer is None else tokenizer
    if not isinstance(folder, GGUFFile):
        metadata = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
        name = model.metadata.get("general.name", "") if isinstance(model, GGUFFile) else metadata["general.name"]
        metadata |= tokenizer_metadata(Path(folder), opened.config.vocab_size, where, name, pre, chat_template)
    elif pre is not None:
        raise WhetValueError(f"{where}: pre is {pre!r}, and the tokenizer is a GGUF file's, which says its own.")
    elif chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    metadata |= {"general.file_type": mixture.file_type, "general.quantization_version": _QUANTIZATION_VERSION}
    tensors = [*(_vector_tensor(name, vector) for name, vector in vectors.items()), *tensors]
    size_bytes = write_gguf(path, metadata, tensors, overwrite=overwrite, where=where, progress=progress, check=check)
    return Exported(size_bytes, count_formats(tensors), window_note(opened.config, model_type))


def read_adapters(folder: str | os.PathLike[str], source: ModelSource, where: str) -> list[LoRA]:
    """The LoRA adapters in a folder of PEFT's, for a model.

    Raises:
        CheckpointError: they are damaged, or more than plain LoRA.
        WhetValueError: they are another model's.
        MissingExtraError: safetensors is not installed.
    """
    return [
        locate_lora(source.config, find_location(source.targets, module, where), a, b, scaling, where)
        for module, (a, b, scaling) in read_peft(folder).items()
    ]


def count_formats(tensors: Sequence[Tensor]) -> dict[str, int]:
    """The number of tensors in each format."""
    formats = [tensor.format for tensor in tensors]
    return {name: formats.count(name) for name in dict.fromkeys(formats)}


def find_mixture(name: str, where: str) -> Mixture:
    """A file type by its name.

    Raises:
        WhetValueError: there is none of that name.
    """
    if name not in FILE_TYPES:
        raise WhetValueError(f"{where}: quantize is {name!r}, expected one of {', '.join(FILE_TYPES)}.")
    return FILE_TYPES[name]


def _of_gguf(file: GGUFFile, where: str) -> tuple[dict[str, Any], str, dict[str, np.ndarray]]:
    """A file's own metadata, to be written again as they are, its model_type, and its tensors that are no weights."""
    values = encoded_metadata(map_file(file.paths[0], where))
    metadata: dict[str, Any] = {key: value for key, value in values.items() if not key.startswith("split.")}
    return metadata, read_options(file, where)["model_type"], own_vectors(file)


def _of_folder(folder: Path, source: ModelSource, where: str) -> tuple[dict[str, Any], str, Keys]:
    """The metadata that a folder's name gives, its model_type, and the options of its config."""
    config = read_config(folder, where)
    config = {**config, "tie_word_embeddings": source.config.tied_head}
    architecture_of(config, where)
    described = model_config(config, vocab_size=source.config.vocab_size, where=where)
    keys = make_keys(config, described, where)
    name = folder.resolve().name
    return {"general.type": "model", "general.name": name}, config["model_type"], keys


def _tensors(rows: RowReader, stored: ModelConfig, modules: Sequence[ModuleSpec], mixture: Mixture) -> Iterator[Tensor]:
    """The tensors of a model as it is stored, layer by layer: those that it has, and those that the file needs."""
    slots, own = stored.slots(), rows.config.slots()
    found = [location for location in iter_locations(stored, modules) if location.weight in slots or location.bias]
    embedding = next(location for location in found if location.weight == "embedding")
    for location in sorted(found, key=lambda location: _depth(location, stored.n_layers)):
        for suffix, slot in (("weight", location.weight), ("bias", location.bias)):
            if slot not in slots or slot is None:
                continue
            shape = location.shape if suffix == "weight" else location.shape[:1]
            format = file_format(mixture, stored, location) if suffix == "weight" else "float32"

            def chunks(
                location: WeightLocation = location,
                slot: str = slot,
                format: str = format,
                shape: tuple[int, ...] = shape,
            ) -> Iterable[np.ndarray]:
                if slot in own:
                    return rows.chunks(location, slot, format)
                if slot == "head":
                    return rows.chunks(embedding, "embedding", format)
                return [np.zeros(shape, np.float32)]

            yield Tensor(f"{location.names[0]}.{suffix}", format, shape, chunks)


def _depth(location: WeightLocation, n_layers: int) -> int:
    """The place of a tensor in the file: before the layers, in one of them, or behind."""
    begin, _, rest = location.weight.partition(".")
    if begin == "layers":
        return int(rest.partition(".")[0])
    return -1 if begin in ("embedding", "positions") else n_layers


def _vector_tensor(name: str, vector: np.ndarray) -> Tensor:
    return Tensor(name, "float32", vector.shape, lambda: [vector])
