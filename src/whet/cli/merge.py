"""``whet merge``: a model with its LoRA adapters merged as a Hugging Face folder, which ``whet convert`` writes too."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from whet.cli.card import folder_card
from whet.cli.estimate import in_bytes
from whet.cli.models import import_peft, load_model, merge_adapters, system_errors
from whet.cli.settings import parse_flags
from whet.cli.text_model import find_model, with_adapters
from whet.config.fields import PathText
from whet.engine.probe import Comparison, Probe, original_position
from whet.errors import WhetValueError
from whet.files import check_folder_of, disk_full_errors, replace_folder, temporary_next_to, unwritable_errors
from whet.models.base_record import pack_recorded, read_binding
from whet.models.formats import TABLE
from whet.models.packed_base import PackedBase
from whet.models.slots import ModelSource
from whet.models.sources.pretrained import open_pretrained
from whet.models.written_folder import complete_folder

FolderDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class MergeConfig:
    """Write a model with its LoRA adapters merged as a Hugging Face folder, with its tokenizer."""

    model: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="MODEL")]
    """A folder that save_pretrained or whet train wrote, also of adapters or a checkpoint, or a .gguf file."""
    output: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="OUT")]
    """The folder to write."""
    adapter: PathText = ""
    """A folder of LoRA adapters that PEFT or whet train saved, for this model; empty: MODEL is one."""
    dtype: FolderDtype = "auto"
    """Of the weights; auto: that of the model's, and bfloat16 of a quantised one."""
    overwrite: bool = False
    """Replace a folder that is there."""


def main(argv: Sequence[str]) -> int:
    """Writes the folder; the exit status is 0."""
    asked = parse_flags(MergeConfig, argv, "whet merge")
    where = "whet merge"
    model, adapter = with_adapters(asked.model, asked.adapter, where)
    if not adapter:
        raise WhetValueError(f"{where}: {model!r} holds no adapters. Name them with --adapter FOLDER.")
    write_folder(model, adapter, asked.output, asked.dtype, asked.overwrite, where)
    return 0


def write_folder(model: str, adapter: str, output: str, dtype: FolderDtype, overwrite: bool, where: str) -> None:
    """A model, with adapters merged, as a Hugging Face folder that appears whole or not at all.

    Products of adapters are float32, and rounded with the weight. Adapters that were trained beside a quantised base
    are merged into its numbers.

    Args:
        adapter: the folder of the adapters; empty: none.

    Raises:
        WhetValueError: there is no such model, adapters that are not the model's, or nothing can be written there.
        DiskFullError: there is no room for it.
    """
    out = Path(output)
    check_place(out, overwrite, where)
    opened = find_model(model, where)
    source = open_pretrained(opened)
    kind = stored_dtype(source) if dtype == "auto" else dtype
    if adapter:
        import_peft()
    module: Any
    module, tokenizer = load_model(model, "float32")
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
    module = module.to(getattr(torch, kind))
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
            facts = {
                "Model": Path(model).name,
                "Adapters, merged into it": adapter and Path(adapter).name,
                "Parameters": f"{source.config.n_parameters:,}",
                "Stored as": kind,
            }
            (temporary / "README.md").write_text(folder_card(out, "Merged" if adapter else "Converted", facts))
        comparison.check(temporary, 0.01 if kind == "float32" else 0.3, by_length=True)
        replace_folder(temporary, out)
    print(f"{out}: {in_bytes(size_bytes)} of {kind}")
    if comparison.skipped:
        print(f"{where}: {comparison.skipped}.", file=sys.stderr)


@torch.no_grad()
def torch_logprobs(model: Any, probe: Probe) -> np.ndarray:
    """Log-probs of a probe by a model of transformers, perhaps with adapters."""
    kind = model.config._attn_implementation
    if getattr(model.config, "attn_logit_softcapping", None):
        model.config._attn_implementation = "eager"  # the others leave the cap out
    ids = torch.tensor([probe.ids])
    logits = model(ids, logits_to_keep=len(probe.ids) - probe.first + 1, use_cache=False).logits[0, :-1]
    model.config._attn_implementation = kind
    return logits.float().log_softmax(-1).gather(-1, ids[0, probe.first :, None])[:, 0].numpy()


def check_place(out: Path, overwrite: bool, where: str) -> None:
    """Refuse a place where no folder can be made, before anything is read.

    Raises:
        WhetValueError: there is something that is not to be replaced, or no folder for it.
    """
    check_folder_of(out, where)
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        what = "is a file" if out.is_file() else "is there already"
        raise WhetValueError(f"{where}: {out} {what}. Choose another name, or replace a folder with --overwrite.")


def stored_dtype(source: ModelSource) -> FolderDtype:
    """The dtype of most of a model's numbers; bfloat16 where they are quantised."""
    count: Counter[str] = Counter()
    for row_slice in source.slices():
        count[row_slice.format] += (
            row_slice.tensor.shape[0] * row_slice.tensor[0].size if row_slice.tensor.ndim > 1 else 0
        )
    [(most, _)] = count.most_common(1)
    return most if TABLE[most].is_float and most != "float64" else "bfloat16"  # type: ignore[return-value]


@torch.no_grad()
def copy_base(base: PackedBase, module: Any) -> None:
    """A packed base's numbers into the parameters of the model that it is of."""
    for name, child in module.named_modules():
        if name not in base.targets or not hasattr(child, "weight"):
            continue
        by_columns = type(child).__name__ == "Conv1D"
        rows = base.rows(name, torch.empty(child.weight.t().shape if by_columns else child.weight.shape))
        child.weight.copy_(rows.t() if by_columns else rows)
