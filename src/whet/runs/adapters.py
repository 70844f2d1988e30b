"""Adapters of a ``whet train`` before its model is loaded: checks that they fit, and the choice of their base."""

from __future__ import annotations

from typing import Any, NamedTuple

from whet.errors import CheckpointError, WhetValueError
from whet.models.adapter_files import has_reward_head
from whet.models.base_record import check_formats, read_binding
from whet.models.formats import check_fits, is_quantised
from whet.models.lora import Adapted, choose_adapted, read_adapted
from whet.models.slots import ModelSource
from whet.training.sizes import multiplies_bfloat16


class Plan(NamedTuple):
    """The trained adapters and their base model.

    Attributes:
        adapters: None: no adapters, or the model is unknown before it is loaded.
        base: ``run.base`` with "auto" resolved.
        floats_reason: why "auto" became "none"; empty if it did not.
        record: the base that existing adapters were trained on, if they require that base.
        source: the model; None as for ``adapters``.
    """

    adapters: Adapted | None
    base: str
    floats_reason: str = ""
    record: dict[str, Any] | None = None
    source: ModelSource | None = None


def plan_adapters(run: Any, source: ModelSource | None, where: str, on_gpu: bool = False) -> Plan:
    """Check the adapters of a run against its model, and resolve its base if that is "auto". Loads nothing.

    Args:
        run: the settings, an instance of one of the classes in ``whet.runs.settings``.
        source: the model; None: the engine does not support it, or it is not on this machine yet.
        where: prefix of errors.
        on_gpu: whether the model would be trained on a GPU.

    Raises:
        WhetValueError: unknown layers, a rank above the matrices' size, a format that no matrix supports, or adapters
            that a packed base does not support; with the values that fit.
        CheckpointError: the adapters belong to another model, or were trained on another base.
    """
    if not run.has_adapters():
        return Plan(None, run.base)
    if source is None:
        if run.base not in ("auto", "none"):
            raise WhetValueError(
                f"{where}: base is {run.base!r}, but {run.model!r} is not a local folder or .gguf file of a model that "
                f"the engine supports, and only those can be packed. Download it, or pass --base none."
            )
        return Plan(None, "none", "the engine does not support the model, or it is not downloaded yet")
    if run.adapter:
        if has_reward_head(run.adapter) != run.trains_reward:
            kinds = ("not a reward model", "other methods"), ("a reward model", "whet train reward")
            kind, method = kinds[not run.trains_reward]
            raise WhetValueError(f"{where}: the adapters in {run.adapter} are {kind}, which only {method} can train.")
        adapters = read_adapted(run.adapter, source, where)
        record = read_binding(run.adapter, source, run.base != "auto" or on_gpu, where)
    else:
        adapters, record = choose_adapted(source, run.lora_settings(), where), None
    base, reason = run.base, ""
    if record is not None:
        base = base if base != "auto" else record["weights"] or ("own" if is_quantised(source) else "bf16")
    elif base == "auto":
        reason = _floats_reason(run, adapters, on_gpu)
        base = "none" if reason else _default_base(run, source)
    if base != "none":
        _check_packed(run, base, adapters, source, where)
    if record is not None:
        if base == "none":
            raise CheckpointError(
                f"{where}: {run.adapter} was trained on a base in {record['formats']}, but base is 'none'."
            )
        check_formats(source, {"weights": None if base == "own" else base}, record, where, run.adapter)
    return Plan(adapters, base, reason, record, source)


def torch_setting(run: Any) -> str:
    """Return the setting of a run with adapters that makes it train modules of torch; empty: none."""
    if run.backend == "torch":
        return "backend is 'torch'"
    if run.compute == "torch":
        return "compute is 'torch'"
    if getattr(run, "engine", "auto") not in ("auto", "native"):
        return f"engine is {run.engine!r}"
    if run.use_dora and run.lora_dropout:
        return f"lora_dropout is {run.lora_dropout}, which a learner does not apply to DoRA"
    return ""


def _torch_rounding(run: Any, adapters: Adapted) -> str:
    """Return why modules of torch compute a run with ``qat``; empty: a learner may."""
    if run.samples:
        return "samples are drawn from rounded weights"
    if run.lora_dropout:
        return f"lora_dropout is {run.lora_dropout}"
    return torch_setting(run) or adapters.floats_reason(in_torch=True)


def _default_base(run: Any, source: ModelSource) -> str:
    """Return the base with the same numbers that a step without a packed base multiplies."""
    if is_quantised(source):
        return "own"
    # Rounding begins with the numbers that an export reads.
    return "bf16" if multiplies_bfloat16(run) and not run.qat else "float32"


def _floats_reason(run: Any, adapters: Adapted, on_gpu: bool) -> str:
    """Return why a run with ``base="auto"`` needs float weights; empty if it does not."""
    if on_gpu:
        return "the model is trained on a GPU, and packed weights are CPU-only"
    if run.qat and (reason := _torch_rounding(run, adapters)):
        return f"qat is {run.qat!r}, and {reason}"
    if run.dtype != "float32":
        return f"dtype is {run.dtype!r}"
    if run.trains_reward and run.backend == "torch":
        return "backend is 'torch', which trains the head of a reward model on floats"
    setting = torch_setting(run)
    if feature := adapters.floats_reason(bool(setting)):
        return f"{feature} needs float weights" + (f" as {setting}" if feature == "use_dora=True" else "")
    if run.samples:
        if run.rollout_weights != "auto":
            return f"rollout_weights is {run.rollout_weights!r}"
        if not adapters.is_separable and run.engine != "torch":
            return "the engine merges adapters outside the layers into them"
    return ""


def _check_packed(run: Any, base: str, adapters: Adapted, source: ModelSource, where: str) -> None:
    """Raise if the base cannot be packed."""
    if run.qat and (reason := _torch_rounding(run, adapters)):
        raise WhetValueError(
            f"{where}: base is {base!r}, but qat is {run.qat!r}, and {reason}, so that torch rounds weights in floats. "
            f"Omit base, or pass none."
        )
    setting = torch_setting(run)
    if feature := adapters.floats_reason(bool(setting)):
        why = f" as {setting}" if feature == "use_dora=True" else ""
        raise WhetValueError(
            f"{where}: base is {base!r}, but {feature} needs float weights{why}. Pass --base none, or omit {feature}."
        )
    if base != "own":
        check_fits(source, base, where)
    elif not is_quantised(source):
        raise WhetValueError(f"{where}: base is 'own', but the model is stored in floats. Pass bf16 or another format.")
