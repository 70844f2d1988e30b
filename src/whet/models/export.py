"""Export models to GGUF for llama.cpp, in the mixtures of llama-quantize, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.errors import WhetValueError
from whet.models.adapter_files import Dora, TokenRows, read_peft_modules
from whet.models.architecture import ModelConfig, RowSlice
from whet.models.families import Family, family_of, model_config, text_options
from whet.models.formats import FILE_TYPES, Mixture, file_format
from whet.models.gguf_keys import (
    Keys,
    add_predicting,
    architecture_of,
    as_stored,
    check_keys,
    deviation_note,
    make_keys,
)
from whet.models.gguf_writer import Progress, Tensor, check_destination, read_encoded_metadata, write_gguf
from whet.models.reference import slice_values
from whet.models.row_reader import RowReader, encode
from whet.models.slots import (
    LoRA,
    ModelSource,
    ModuleSpec,
    NormValues,
    Rows,
    StoredTensor,
    WeightLocation,
    find_location,
    is_norm,
    iter_locations,
    locate_lora,
    locate_norm,
    locate_rows,
    stored_shape,
    to_stored,
    untie_adapted,
    with_expert_modules,
)
from whet.models.sources.folder import open_predicting, read_config
from whet.models.sources.gguf import predicting_tensors, read_options, rope_vectors
from whet.models.sources.gguf_container import GGUFFile, read_gguf
from whet.models.sources.mapped import map_file
from whet.models.sources.pretrained import open_pretrained
from whet.models.tokenizers.metadata import tokenizer_metadata

_QUANTIZATION_VERSION = 2  # of the block layouts, a field of GGUF


class Exported(NamedTuple):
    """A written file: its size, the number of tensors per format, and ``deviation_note``."""

    size_bytes: int
    formats: dict[str, int]
    note: str = ""


def export_gguf(
    model: str | os.PathLike[str] | GGUFFile,
    path: str | os.PathLike[str],
    quantize: str = "q4_k_m",
    *,
    source: ModelSource | None = None,
    adapters: Sequence[LoRA | NormValues | Rows] = (),
    tokenizer: str | os.PathLike[str] | None = None,
    pre: str | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    check: Callable[[Path], Any] | None = None,
) -> Exported:
    """Write a model as a GGUF file, with its tokenizer and chat template.

    Each matrix gets its type in llama-quantize's mixture: more bits for some value and down projections, and a fallback
    if its row length is not a multiple of the block. Norms and biases are float32. Tensors already stored in their type
    keep their bytes. Tensors are converted in chunks of rows.

    Args:
        model: a Hugging Face folder or a GGUF file, see ``open_pretrained``.
        path: the file to write.
        quantize: a name in ``FILE_TYPES``.
        source: the weights, for instance on a packed base. Default: the model's.
        adapters: merged into the weights, from ``read_adapters``.
        tokenizer: a folder with a tokenizer.json. Default: the model's.
        pre: llama.cpp's name of the pre-tokenizer of a folder's tokenizer. Default: found by the expressions of
            tokenizer.json.
        chat_template: replaces the tokenizer's template.
        overwrite: replace an existing file.
        progress: called with the bytes written and the total.
        check: see ``write_gguf``.

    Raises:
        WhetValueError: an unknown type; a model that the engine does not support or GGUF cannot express; a damaged
            file; NaN or infinity; or ``path`` cannot be written.
        DiskFullError: the disk is full. On any failure ``path`` is unchanged.
    """
    where = f'export_gguf("{path}")'
    mixture = find_mixture(quantize, where)
    check_destination(Path(path), overwrite, where)
    if not isinstance(model, GGUFFile) and Path(model).is_file():
        model = read_gguf(Path(model), f'open_gguf("{model}")')
    opened = open_pretrained(model) if source is None else source
    opened = untie_adapted(opened._replace(adapters=(*opened.adapters, *adapters)))
    if mixture.experts and not opened.config.n_experts:
        raise WhetValueError(
            f"{where}: quantize is {quantize!r}, and the model is not a mixture of experts. Pass q8_0."
        )
    keys: Keys | None = None
    if isinstance(model, GGUFFile):
        metadata, family, vectors = _read_gguf_metadata(model, where)
    else:
        metadata, family, keys = _read_folder_metadata(Path(model), opened, where)
        vectors = keys.vectors
    rows = RowReader(opened, where)
    stored = as_stored(opened.config, family)
    tensors = list(_iter_tensors(rows, stored, family.gguf_modules, mixture))
    if isinstance(model, GGUFFile):
        tensors += [_stored_tensor(*each) for each in predicting_tensors(model, opened.config).items()]
    elif (predicting := open_predicting(model)) is not None and keys is not None:
        tensors += _iter_predicting(*predicting, family, mixture, where)
        keys = add_predicting(keys, opened.config)
    if keys is not None:
        check_keys(keys, tensors, stored, where)
        metadata |= keys.metadata
    folder = model if tokenizer is None else tokenizer
    if not isinstance(folder, GGUFFile):
        metadata = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
        name = model.metadata.get("general.name", "") if isinstance(model, GGUFFile) else metadata["general.name"]
        metadata |= tokenizer_metadata(Path(folder), opened.config.vocab_size, where, name, pre, chat_template)
    elif pre is not None:
        raise WhetValueError(
            f"{where}: pre is {pre!r}, and the tokenizer is a GGUF file's, which names its pre-tokenizer."
        )
    elif chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    metadata |= {"general.file_type": mixture.file_type, "general.quantization_version": _QUANTIZATION_VERSION}
    tensors = [*(_vector_tensor(name, vector) for name, vector in vectors.items()), *tensors]
    size_bytes = write_gguf(path, metadata, tensors, overwrite=overwrite, where=where, progress=progress, check=check)
    return Exported(size_bytes, count_formats(tensors), deviation_note(opened.config, family))


def read_adapters(folder: str | os.PathLike[str], source: ModelSource, where: str) -> list[LoRA | NormValues | Rows]:
    """Read what a PEFT folder of LoRA changes in a model: also DoRA, trained tokens, and modules trained whole.

    Raises:
        CheckpointError: the adapters are damaged, or change more.
        WhetValueError: the adapters belong to another model.
        MissingExtraError: safetensors is not installed.
    """
    found: list[LoRA | NormValues | Rows] = []
    targets, config = with_expert_modules(source.targets), source.config
    for module, saved in read_peft_modules(folder, merged=True).items():
        location = find_location(targets, module, where)
        if isinstance(saved, TokenRows):
            found += locate_rows(config, location, {"weight": saved.values}, where, saved.ids)
        elif isinstance(saved, Dora):
            found += locate_lora(config, location, *saved.factors, where, saved.magnitude)
        elif isinstance(saved, tuple):
            found += locate_lora(config, location, *saved, where)
        else:
            found += (locate_norm if is_norm(location) else locate_rows)(config, location, saved, where)
    return found


def count_formats(tensors: Sequence[Tensor]) -> dict[str, int]:
    """Count the tensors in each format."""
    formats = [tensor.format for tensor in tensors]
    return {name: formats.count(name) for name in dict.fromkeys(formats)}


def find_mixture(name: str, where: str) -> Mixture:
    """Return a file type by its name.

    Raises:
        WhetValueError: an unknown file type.
    """
    if name not in FILE_TYPES:
        raise WhetValueError(f"{where}: quantize is {name!r}, expected one of {', '.join(FILE_TYPES)}.")
    return FILE_TYPES[name]


def _read_gguf_metadata(file: GGUFFile, where: str) -> tuple[dict[str, Any], Family, dict[str, np.ndarray]]:
    """Return a file's metadata, to be copied, its family, and its tensors that are not weights."""
    values = read_encoded_metadata(map_file(file.paths[0], where))
    metadata: dict[str, Any] = {key: value for key, value in values.items() if not key.startswith("split.")}
    return metadata, family_of(read_options(file, where), where), rope_vectors(file)


def _read_folder_metadata(folder: Path, source: ModelSource, where: str) -> tuple[dict[str, Any], Family, Keys]:
    """Return the metadata from a folder's name, its family, and the options of its config."""
    config = read_config(folder, where)
    config = {**text_options(config), "tie_word_embeddings": source.config.tied_head}
    architecture_of(config, where)
    described = model_config(config, vocab_size=source.config.vocab_size, where=where)
    keys = make_keys(config, described, where)
    name = folder.resolve().name
    return {"general.type": "model", "general.name": name}, family_of(config, where), keys


def _iter_tensors(
    rows: RowReader, stored: ModelConfig, modules: Sequence[ModuleSpec], mixture: Mixture
) -> Iterator[Tensor]:
    """Yield the tensors of the file, layer by layer: the model's, and copies or zeros that llama.cpp requires."""
    slots, existing = stored.slots(), rows.config.slots()
    found = [location for location in iter_locations(stored, modules) if location.weight in slots or location.bias]
    embedding = next(location for location in found if location.weight == "embedding")
    for location in sorted(found, key=lambda location: _depth(location, stored.n_layers)):
        for suffix, slot in ((location.module.parameter, location.weight), (location.module.bias, location.bias)):
            if slot not in slots or slot is None:
                continue
            shape = stored_shape(stored, location, slot != location.weight)
            format = file_format(mixture, stored, location) if slot == location.weight else "float32"

            def chunks(
                location: WeightLocation = location,
                slot: str = slot,
                format: str = format,
                shape: tuple[int, ...] = shape,
            ) -> Iterable[np.ndarray]:
                if slot in existing and location.module.transposed:
                    return [to_stored(stored, location, np.concatenate(list(rows.iter_chunks(location, slot, format))))]
                if slot in existing:
                    return rows.iter_chunks(location, slot, format)
                if slot == "head":
                    return rows.iter_chunks(embedding, "embedding", format)
                return [np.zeros(shape, np.float32)]

            yield Tensor(f"{location.names[0]}.{suffix}", format, shape, chunks)


def _iter_predicting(
    source: ModelSource, others: Mapping[str, StoredTensor], family: Family, mixture: Mixture, where: str
) -> Iterator[Tensor]:
    """Yield the tensors of a block that predicts one more token, the last layer of ``source``."""
    stored = as_stored(source.config, family)
    block = f"blk.{stored.n_layers - 1}."
    for tensor in _iter_tensors(RowReader(source, where), stored, family.gguf_modules, mixture):
        if tensor.name.startswith(block):
            yield tensor
    for module, (tensor, format, shape) in others.items():
        name, slot = f"{block}nextn.{module}", f"layers.{stored.n_layers - 1}.{module}"
        kind = file_format(mixture, stored, WeightLocation((name,), slot, None, 0, shape, ModuleSpec((name,), slot)))
        offset = family.norm_offset if len(shape) == 1 else 0

        def chunks(
            tensor: Any = tensor, format: str = format, kind: str = kind, name: str = name, offset: float = offset
        ) -> Iterable[np.ndarray]:
            values = np.asarray(slice_values(RowSlice(name, 0, tensor, format)), np.float32) + np.float32(offset)
            return [encode(values, kind, f"{where}: {name}")]

        yield Tensor(f"{name}.weight", kind, shape, chunks)


def _depth(location: WeightLocation, n_layers: int) -> int:
    """Return a tensor's sort key: before the layers, its layer, or after them."""
    begin, _, rest = location.weight.partition(".")
    if begin == "layers":
        return int(rest.partition(".")[0])
    return -1 if begin in ("embedding", "positions") else n_layers


def _stored_tensor(name: str, stored: StoredTensor) -> Tensor:
    return Tensor(name, stored.format, stored.shape, lambda: [stored.tensor])


def _vector_tensor(name: str, vector: np.ndarray) -> Tensor:
    return Tensor(name, "float32", vector.shape, lambda: [vector])
