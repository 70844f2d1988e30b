"""Export LoRA adapters to a separate GGUF file, which llama.cpp loads next to the model's.

llama.cpp multiplies by ``alpha / rank`` with one alpha for all adapters and the rank of each; if PEFT's patterns give
different alphas, B is scaled. Rows follow the model's file: Llama's q and k in llama.cpp's order; adapters of modules
that are fused in the file become one adapter, whose rank is the sum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.errors import WhetValueError
from whet.models.export import Exported, count_formats, find_mixture
from whet.models.families import family_of, text_options
from whet.models.formats import TABLE
from whet.models.gguf_keys import architecture_of
from whet.models.gguf_writer import Progress, Tensor, check_destination, write_gguf
from whet.models.row_reader import adapters_of, encode
from whet.models.slots import (
    LoRA,
    ModelSource,
    ModuleSpec,
    NormValues,
    Rows,
    factor_values,
    iter_locations,
    slot_columns,
    slot_rows,
)
from whet.models.sources.gguf_container import GGUFFile, read_gguf
from whet.models.sources.pretrained import open_pretrained, read_model_config


def export_adapters(
    model: str | os.PathLike[str] | GGUFFile,
    path: str | os.PathLike[str],
    adapters: Sequence[LoRA | NormValues | Rows],
    quantize: str = "f32",
    *,
    name: str = "",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write adapters without weights, for use with a GGUF file of their model.

    Args:
        model: a Hugging Face folder or a GGUF file; its weights are not read.
        path: the file to write.
        adapters: from ``read_adapters``.
        quantize: a float type in ``FILE_TYPES``: f32, f16 or bf16.
        name: ``general.name``. Default: the name of the file.
        overwrite: replace an existing file.
        progress: called with the bytes written and the total.

    Raises:
        WhetValueError: an unknown type, no adapters, trained norms, an adapter of a tensor that the model's file
            lacks, or ``path`` cannot be written.
        DiskFullError: the disk is full.
    """
    where = f'export_adapters("{path}")'
    mixture = find_mixture(quantize, where)
    if not TABLE[mixture.base].is_float:
        raise WhetValueError(f"{where}: quantize is {quantize!r}, and adapters are floats: expected f32, f16 or bf16.")
    check_destination(Path(path), overwrite, where)
    if not isinstance(model, GGUFFile) and Path(model).is_file():
        model = read_gguf(Path(model), f'open_gguf("{model}")')
    options = text_options(read_model_config(model, where))
    architecture = architecture_of(options, where)
    low_rank = [each for each in adapters if isinstance(each, LoRA)]
    if other := next((each for each in adapters if not isinstance(each, LoRA) or each.magnitude is not None), None):
        raise WhetValueError(
            f"{where}: {other.slot} is trained too, or DoRA, and llama.cpp's adapters are plain LoRA of matrices. "
            f"Merge it: omit --adapter-only."
        )
    if not low_rank:
        raise WhetValueError(f"{where}: there are no adapters. Name them with --adapter FOLDER.")
    source, modules = open_pretrained(model), family_of(options, where).gguf_modules
    alpha = low_rank[0].scaling * len(low_rank[0].a) or 1.0
    tensors = []
    for name_there, a, b in _factors(source, modules, low_rank, alpha, where):
        tensors += [_tensor(f"{name_there}.lora_a", a, mixture.base), _tensor(f"{name_there}.lora_b", b, mixture.base)]
    metadata: dict[str, Any] = {
        "general.type": "adapter",
        "general.architecture": architecture,
        "general.name": name or Path(path).stem,
        "general.file_type": mixture.file_type,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    size_bytes = write_gguf(path, metadata, tensors, overwrite=overwrite, where=where, progress=progress)
    return Exported(size_bytes, count_formats(tensors))


def _factors(
    source: ModelSource, modules: Sequence[ModuleSpec], adapters: Sequence[LoRA], alpha: float, where: str
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield name, A (r, k) and B (n, r) of each tensor with adapters, in its order; B is scaled for alpha / r.

    Factors of experts have a first axis for them.
    """
    slots = source.config.slots()
    for adapter in adapters:
        if adapter.slot not in slots:
            raise WhetValueError(
                f"{where}: an adapter changes the {adapter.slot}, which is the embedding in this model, and its file "
                f"has no such tensor. Merge it: omit --adapter-only."
            )
        if adapter.slot == "layer_inputs":
            raise WhetValueError(
                f"{where}: an adapter changes per_layer_model_proj, whose adapters llama.cpp ignores. Merge it: omit "
                f"--adapter-only."
            )
        if not all(np.isfinite(factor_values(factor)).all() for factor in (adapter.a, adapter.b)):
            raise WhetValueError(
                f"{where}: the adapter of {adapter.slot} holds NaN or infinity. Check the training run."
            )
    for location in iter_locations(source.config, modules):
        orders = np.split(slot_rows(source.config, location), location.n_experts)
        each = [list(adapters_of(location.weight, order, adapters)) for order in orders]
        rank = max(sum(len(part.a) for _, part in parts) for parts in each)
        if rank == 0:
            continue
        a = np.zeros((len(orders), rank, location.shape[1]), np.float32)
        b = np.zeros((len(orders), len(orders[0]), rank), np.float32)
        for e, (order, parts) in enumerate(zip(orders, each, strict=True)):
            column = 0
            for rows, part in parts:
                end, factor = column + len(part.a), np.float32(part.scaling * rank / alpha)
                a[e, column:end] = factor_values(part.a)
                b[e, rows, column:end] = factor * factor_values(part.b)[order[rows] - part.first_row]
                column = end
        columns = slot_columns(source.config, location)
        a = a if columns is None else a[:, :, columns]
        if location.n_experts == 1:
            a, b = a[0], b[0]
        yield f"{location.names[0]}.weight", a, b


def _tensor(name: str, values: np.ndarray, format: str) -> Tensor:
    return Tensor(name, format, values.shape, lambda: [encode(values, format, name)])
