"""``whet merge``: writes a Hugging Face folder with LoRA adapters merged into the model. ``whet convert`` shares it."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from whet.cli.settings import parse_flags
from whet.config.fields import PathText
from whet.engine.probe import Comparison, Probe, original_position
from whet.errors import WhetValueError
from whet.files import check_folder_of, disk_full_errors, replace_folder, temporary_next_to, unwritable_errors
from whet.memory import format_bytes
from whet.models.base_record import pack_recorded, read_binding
from whet.models.formats import TABLE
from whet.models.packed_base import PackedBase
from whet.models.slots import ModelSource
from whet.models.sources.folder import read_entries
from whet.models.sources.gguf_container import GGUFFile
from whet.models.sources.pretrained import open_pretrained
from whet.models.written_folder import complete_folder, copy_predicting
from whet.nn.frozen import parameter_values
from whet.runs.card import render_folder_card
from whet.runs.models import import_peft, load_model, merge_adapters
from whet.runs.save import system_errors
from whet.text.checkpoint_model import resolve_adapter
from whet.text.model import find_model

FolderDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class MergeConfig:
    """Merge LoRA adapters into their model, and write it as a Hugging Face folder with tokenizer."""

    model: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained or whet train wrote, also of adapters, a checkpoint, or a .gguf file."""
    output: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="OUT")]
    """Folder to write."""
    adapter: PathText = ""
    """A folder of LoRA adapters that PEFT or whet train saved; empty: MODEL is such a folder."""
    dtype: FolderDtype = "auto"
    """Dtype of the weights; auto: the model's dtype, or bfloat16 if it is quantised."""
    overwrite: bool = False
    """Replace an existing folder."""


def main(argv: Sequence[str]) -> int:
    """Write the folder and return 0."""
    options = parse_flags(MergeConfig, argv, "whet merge")
    where = "whet merge"
    model, adapter = resolve_adapter(options.model, options.adapter, where)
    if not adapter:
        raise WhetValueError(f"{where}: {model!r} contains no adapters. Pass --adapter FOLDER.")
    write_folder(model, adapter, options.output, options.dtype, options.overwrite, where)
    return 0


def write_folder(model: str, adapter: str, output: str, dtype: FolderDtype, overwrite: bool, where: str) -> None:
    """Write a model, with adapters merged, as a Hugging Face folder. The folder is replaced atomically.

    The products of adapters are computed in float32 and added before rounding. Adapters that were trained on a
    quantised base are merged into its dequantised weights.

    Args:
        adapter: the folder of the adapters; empty: none.

    Raises:
        WhetValueError: the model does not exist, the adapters do not fit it, or the folder cannot be written.
        DiskFullError: the disk is full.
    """
    out = Path(output)
    check_output_folder(out, overwrite, where)
    opened = find_model(model, where)
    source = open_pretrained(opened)
    kind = choose_dtype(source) if dtype == "auto" else dtype
    if adapter:
        import_peft()
    module: Any
    notify = functools.partial(print, file=sys.stderr)
    module, tokenizer = load_model(model, "float32", notify=notify, adapter=adapter)
    module = module.cpu()
    original = original_position(module.config.to_dict(), where)
    comparison = Comparison(source.config, tokenizer, original, where)

    def measure(model: Any) -> None:
        comparison.measure(lambda probe: torch_logprobs(model, probe))

    if adapter:
        if (record := read_binding(adapter, source, False, where)) is not None:
            copy_base(pack_recorded(source, record, where, adapter), module)
        try:
            module = merge_adapters(module, adapter, measure)
        except (RuntimeError, ValueError, OSError, KeyError, TypeError) as error:
            raise WhetValueError(f"{where}: {adapter!r} does not fit {model!r}: {error}") from error
    else:
        measure(module)
    wide = _float32_parameters(opened, module) if dtype == "auto" else {}
    module = module.to(getattr(torch, kind))
    for name, values in wide.items():
        module.get_parameter(name).data = values
    size_bytes = sum(parameter.nbytes for parameter in module.parameters())
    with (
        unwritable_errors(out, where),
        disk_full_errors(out, size_bytes),
        temporary_next_to(out, "merging", folder=True) as temporary,
    ):
        with system_errors():
            module.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            complete_folder(temporary)
            if not isinstance(opened, GGUFFile):
                copy_predicting(Path(opened), temporary)
            facts = {
                "Model": Path(model).name,
                "Adapters, merged into it": adapter and Path(adapter).name,
                "Parameters": f"{source.config.n_parameters:,}",
                "Stored as": kind,
            }
            (temporary / "README.md").write_text(render_folder_card(out, "Merged" if adapter else "Converted", facts))
        comparison.check(temporary, 0.01 if kind == "float32" else 0.3, by_length=True)
        replace_folder(temporary, out)
    print(f"{out}: {format_bytes(size_bytes)} of {kind}")
    if comparison.skipped:
        print(f"{where}: {comparison.skipped}.", file=sys.stderr)


def _float32_parameters(opened: str | GGUFFile, module: Any) -> dict[str, torch.Tensor]:
    """Return the values of parameters that a folder stores in float32, also next to others in bfloat16."""
    if isinstance(opened, GGUFFile):
        return {}
    names = {name for name, entry in read_entries(Path(opened), "whet merge").items() if entry.dtype == "F32"}
    return {name: p.detach().float().clone() for name, p in module.named_parameters() if name in names}


@torch.no_grad()
def torch_logprobs(model: Any, probe: Probe) -> np.ndarray:
    """Return the log-probs of a probe under a transformers model, with or without adapters."""
    kind = model.config._attn_implementation
    if getattr(model.config, "attn_logit_softcapping", None):
        model.config._attn_implementation = "eager"  # other implementations ignore the soft-cap
    ids = torch.tensor([probe.ids])
    logits = model(ids, logits_to_keep=len(probe.ids) - probe.first + 1, use_cache=False).logits[0, :-1]
    model.config._attn_implementation = kind
    return logits.float().log_softmax(-1).gather(-1, ids[0, probe.first :, None])[:, 0].numpy()


def check_output_folder(out: Path, overwrite: bool, where: str) -> None:
    """Raise if the folder cannot be written; called before the model is read.

    Raises:
        WhetValueError: the path exists and may not be replaced, or its parent folder does not exist.
    """
    check_folder_of(out, where)
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        reason = "is a file" if out.is_file() else "exists already"
        raise WhetValueError(f"{where}: {out} {reason}. Choose another name, or pass --overwrite to replace a folder.")


def choose_dtype(source: ModelSource) -> FolderDtype:
    """Return the most frequent dtype of a model's weights; bfloat16 if they are quantised."""
    count: Counter[str] = Counter()
    for row_slice in source.slices():
        count[row_slice.format] += (
            row_slice.tensor.shape[0] * row_slice.tensor[0].size if row_slice.tensor.ndim > 1 else 0
        )
    [(most, _)] = count.most_common(1)
    return most if TABLE[most].is_float and most != "float64" else "bfloat16"  # type: ignore[return-value]


@torch.no_grad()
def copy_base(base: PackedBase, module: Any) -> None:
    """Copy the dequantised weights of a packed base into the parameters of its model."""
    for name, child in module.named_modules():
        if name not in base.targets or not hasattr(child, "weight"):
            continue
        by_columns = type(child).__name__ == "Conv1D"
        rows = base.rows(name, torch.empty(child.weight.t().shape if by_columns else child.weight.shape))
        child.weight.copy_(rows.t() if by_columns else rows)
    for name, location in base.targets.items():
        if location.module.parameter != "weight":
            parameter = module.get_parameter(name)
            parameter.copy_(parameter_values(base, name, parameter.shape))
