"""The adapters of a ``whet train`` before its model is loaded: that they fit, and the base that they are trained on."""

from __future__ import annotations

from typing import Any, NamedTuple

from whet.config.settings import OnlineConfig
from whet.errors import CheckpointError, WhetValueError
from whet.models.base_record import check_formats, read_binding
from whet.models.formats import check_fits, is_quantised
from whet.models.lora import Adapted, choose_adapted, read_adapted
from whet.models.slots import ModelSource
from whet.training.sizes import multiplies_bfloat16


class Plan(NamedTuple):
    """The adapters that are trained, and the base beside them.

    Attributes:
        adapters: None: none, or those of a model of which nothing is known before it is loaded.
        base: ``run.base``, decided.
        why_floats: why that is "none" where the run left it open; empty: it did not.
        record: of the base that the adapters to go on with were trained on, where they go with that only.
    """

    adapters: Adapted | None
    base: str
    why_floats: str = ""
    record: dict[str, Any] | None = None


def plan_adapters(run: Any, source: ModelSource | None, where: str, on_gpu: bool = False) -> Plan:
    """Check the adapters of a run against its model, and decide its base where that is "auto". Nothing is loaded.

    Args:
        run: the settings, of one of the classes in ``whet.cli.runs``.
        source: the model; None: the engine does not run it, or it is not on this machine yet.
        where: begins the errors.
        on_gpu: whether the model would be trained on a GPU.

    Raises:
        WhetValueError: no such layers, a rank beyond the matrices, a format that no matrix takes, or adapters that a
            packed base does not take; with what would fit.
        CheckpointError: adapters of another model, or that were trained on another base.
    """
    if not run.has_adapters():
        return Plan(None, run.base)
    if source is None:
        if run.base not in ("auto", "none"):
            raise WhetValueError(
                f"{where}: base is {run.base!r}, and {run.model!r} is no folder or .gguf file of a model that the "
                f"engine runs: only those are packed. Fetch it, or pass --base none."
            )
        return Plan(None, "none", "the engine does not run the model, or it is not here yet")
    if run.adapter:
        adapters = read_adapted(run.adapter, source, where)
        record = read_binding(run.adapter, source, run.base != "auto" or on_gpu, where)
    else:
        settings = run.lora_rank, run.lora_layers, run.modules_to_save
        adapters, record = choose_adapted(source, *settings, where), None
    base, why = run.base, ""
    if record is not None:
        base = base if base != "auto" else record["weights"] or ("own" if is_quantised(source) else "bf16")
    elif base == "auto":
        why = _why_floats(run, adapters, on_gpu)
        base = "none" if why else _usual_base(run, source)
    if base != "none":
        _check_packed(base, adapters, source, where)
    if record is not None:
        if base == "none":
            raise CheckpointError(
                f"{where}: {run.adapter} was trained on a base in {record['formats']}, and base is 'none'."
            )
        check_formats(source, {"weights": None if base == "own" else base}, record, where, run.adapter)
    return Plan(adapters, base, why, record)


def _usual_base(run: Any, source: ModelSource) -> str:
    """The base of the numbers that the step multiplies without one."""
    if is_quantised(source):
        return "own"
    return "bf16" if multiplies_bfloat16(run) else "float32"


def _why_floats(run: Any, adapters: Adapted, on_gpu: bool) -> str:
    """Why a run keeps float weights whose base is left open; empty: it need not."""
    if on_gpu:
        return "there is a GPU, and packed weights are the CPU's"
    if run.dtype != "float32":
        return f"dtype is {run.dtype!r}"
    if adapters.needs_floats:
        return f"{adapters.needs_floats} needs them"
    if isinstance(run, OnlineConfig):
        if run.rollout_weights != "auto":
            return f"rollout_weights is {run.rollout_weights!r}"
        if not adapters.is_apart and run.engine != "torch":
            return "the engine merges adapters outside the layers into them"
    return ""


def _check_packed(base: str, adapters: Adapted, source: ModelSource, where: str) -> None:
    """Refuse what cannot be packed."""
    if adapters.needs_floats:
        raise WhetValueError(
            f"{where}: base is {base!r}, and {adapters.needs_floats} needs float weights. Pass --base none, or leave "
            f"that out."
        )
    if base != "own":
        check_fits(source, base, where)
    elif not is_quantised(source):
        raise WhetValueError(
            f"{where}: base is 'own', and the model is stored in floats. Pass bf16, or any other format."
        )
