"""Runs whose adapters a ``Learner`` trains, without torch: whether it can, and their model."""

from __future__ import annotations

from typing import Any, cast

from whet.errors import WhetValueError
from whet.learner import Learner
from whet.learner.learner import find_unlearnable
from whet.models.adapter_files import SCORE
from whet.models.slots import ModelSource
from whet.runs.adapters import Plan, torch_setting
from whet.text.model import find_model, load_chat_tokenizer


def uses_learner(run: Any, plan: Plan, where: str) -> bool:
    """Whether a ``Learner`` trains the run's adapters, by its ``backend``.

    Raises:
        WhetValueError: backend is "native", and something of the run needs torch.
    """
    obstacle = "" if run.backend == "torch" else _find_obstacle(run, plan)
    if run.backend == "native" and obstacle:
        raise WhetValueError(f"{where}: backend is 'native', but {obstacle}. Change that, or pass --backend torch.")
    if run.backend != "torch" and not obstacle:
        return True
    if run.trains_reward and run.has_adapters() and plan.base != "none":
        raise WhetValueError(
            f"{where}: base is {plan.base!r}, and {obstacle or 'backend is torch'}, but only a learner trains a reward "
            f"model on a packed base. Pass --base none."
        )
    return False


def _find_obstacle(run: Any, plan: Plan) -> str:
    """Return what of a run needs torch; empty: nothing."""
    if not run.has_adapters():
        return "lora_rank is 0, so every weight is trained"
    if plan.adapters is None or plan.base == "none":
        return plan.floats_reason or "base is 'none', and the learner needs a packed base"
    return torch_setting(run) or find_unlearnable(plan.adapters)


def load_learner(run: Any, plan: Plan, where: str) -> tuple[Learner, Any]:
    """Return the learner of a run, and its tokenizer."""
    model, source = find_model(run.model, where), cast(ModelSource, plan.source)
    tokenizer = load_chat_tokenizer(model, where, run.chat_template, run.adapter)
    options: dict[str, Any] = {"compute": run.compute, "seed": run.seed % 2**64}
    if run.adapter:
        options["adapter"] = run.adapter
    else:
        names = ("lora_rank", "lora_alpha", "lora_layers", "lora_dropout", "lora_init")
        names += ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
        options |= {name: getattr(run, name) for name in names}
        options["modules_to_save"] = [*run.modules_to_save, *([SCORE] if run.trains_reward else [])]
    options["weights"] = None if plan.base == "own" else plan.base
    options["qat"] = run.qat
    options["max_position"] = source.short_position  # as long as the rotary frequencies of short sequences apply
    return Learner(model, **options), tokenizer


def describe_learner(learner: Learner) -> str:
    """Describe the numbers of parameters and trained parameters, and the formats of the base."""
    trained = learner.n_parameters
    total = learner.base.config.n_parameters + trained
    rounded = f", rounded as a file in {learner.qat}" if learner.qat else ""
    return f"{total:,} parameters ({trained:,} trained natively), packed in {learner.base.summary}{rounded}"
