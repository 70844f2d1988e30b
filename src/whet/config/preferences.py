"""Settings of the algorithms that learn from preferences: pairs of completions, or rated completions.

Like ``whet.config.settings``, whose rules hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from whet.config.fields import NonNegative, PathText, check_range, check_types, reject_ineffective
from whet.config.settings import OfflineConfig, OnlineConfig, TrainerConfig
from whet.errors import WhetValueError, check_choice

DPOLossType = Literal[
    "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "sft",
]  # fmt: skip

CPOLossType = Literal["sigmoid", "hinge", "ipo"]
KTOLossType = Literal["kto", "apo_zero_unpaired"]

_SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair")


@dataclass(kw_only=True)
class PreferenceConfig:
    """Settings of a loss on preference pairs."""

    is_paired: ClassVar[bool] = True

    beta: float = 0.1
    """Strength of the KL regularisation towards the reference."""
    loss_type: DPOLossType = "sigmoid"
    """Loss function of the log-ratios, see ``dpo_loss``."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong."""
    reference_free: bool = False
    """Ignore the reference, as if it assigned every completion the same probability."""

    def __post_init__(self) -> None:
        check_types(self)
        check_dpo_options(type(self).__name__, self.loss_type, self.beta, self.label_smoothing)
        reject_ineffective(self, ["beta"], self.loss_type != "sft", "'sft' uses only the chosen completion")

    def has_reference(self) -> bool:
        """Whether the loss uses the reference."""
        return not self.reference_free and self.loss_type != "sft"


@dataclass(kw_only=True)
class DPOConfig(PreferenceConfig, OfflineConfig):
    """Settings of DPO. ``batch_size`` counts pairs."""

    precompute_reference: bool = False
    """Compute the reference's log-probs once, before ``train``, instead of keeping a copy of the model."""
    reference_cache: PathText = ""
    """Folder that caches precomputed log-probs for later runs, keyed by weights and rows; empty: no cache."""

    def __post_init__(self) -> None:
        TrainerConfig.__post_init__(self)
        PreferenceConfig.__post_init__(self)
        reject_ineffective(self, ["precompute_reference"], self.has_reference(), "the loss uses no reference")
        reject_ineffective(
            self, ["reference_cache"], self.precompute_reference, "it caches what precompute_reference computes"
        )

    def uses_reference_model(self) -> bool:
        """Whether the reference computes log-probs in every step, which precomputed log-probs make unnecessary."""
        return self.has_reference() and not self.precompute_reference


@dataclass(kw_only=True)
class CPOConfig(OfflineConfig):
    """Settings of CPO. ``batch_size`` counts pairs."""

    is_paired: ClassVar[bool] = True

    beta: float = 0.1
    """Factor of the difference of log-probs."""
    loss_type: CPOLossType = "sigmoid"
    """Loss of the difference, see ``dpo_loss``."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong; only 'sigmoid' has it."""
    nll_weight: NonNegative = 1.0
    """Factor of the negative log-likelihood per token of the chosen completions; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dpo_options(type(self).__name__, self.loss_type, self.beta, self.label_smoothing)


@dataclass(kw_only=True)
class SimPOConfig(OfflineConfig):
    """Settings of SimPO. ``batch_size`` counts pairs."""

    is_paired: ClassVar[bool] = True

    beta: float = 2.0
    """Factor of the difference of log-probs per token."""
    margin: NonNegative = 0.5
    """Target of the scaled difference, gamma in the paper."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dpo_options(type(self).__name__, "sigmoid_norm", self.beta, self.label_smoothing)


@dataclass(kw_only=True)
class ORPOConfig(OfflineConfig):
    """Settings of ORPO. ``batch_size`` counts pairs."""

    is_paired: ClassVar[bool] = True

    beta: NonNegative = 0.1
    """Factor of the odds-ratio term, lambda in the paper."""


@dataclass(kw_only=True)
class KTOConfig(OfflineConfig):
    """Settings of KTO. ``batch_size`` counts completions; the baseline of 'kto' needs at least 2."""

    beta: float = 0.1
    """Strength of the KL regularisation towards the reference."""
    loss_type: KTOLossType = "kto"
    """Loss function of the log-ratio, see ``kto_loss``."""
    desirable_weight: float = 1.0
    """Factor of the loss of desirable completions."""
    undesirable_weight: float = 1.0
    """Factor of the loss of undesirable completions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = self.desirable_weight, self.undesirable_weight
        check_kto_options(type(self).__name__, self.loss_type, self.beta, *weights)
        others = "an integer >= 2: the baseline of 'kto' pairs prompts with the completions of other rows"
        check_range(self, "batch_size", self.batch_size > 1 or self.loss_type != "kto", others)

    def has_reference(self) -> bool:
        """Whether the loss uses a reference: always."""
        return True


@dataclass(kw_only=True)
class OnlineDPOConfig(PreferenceConfig, OnlineConfig):
    """Settings of OnlineDPO. ``batch_size`` counts prompts, ``micro_batch_size`` pairs."""

    def __post_init__(self) -> None:
        OnlineConfig.__post_init__(self)
        PreferenceConfig.__post_init__(self)


def check_dpo_options(where: str, loss_type: str, beta: float, label_smoothing: float) -> None:
    """Validate the options of ``dpo_loss``; errors begin with ``where``, the caller's name.

    Raises:
        WhetValueError: an unknown loss_type, a number out of range, or label smoothing in a loss without it.
    """
    check_choice(where, "loss_type", loss_type, DPOLossType)
    if not (beta > 0 and math.isfinite(beta)):
        raise WhetValueError(f"{where}: beta is {beta!r}, expected a finite number > 0.")
    if not 0 <= label_smoothing < 0.5:
        raise WhetValueError(f"{where}: label_smoothing is {label_smoothing!r}, expected a number in [0, 0.5).")
    if label_smoothing and loss_type not in _SMOOTHED:
        raise WhetValueError(
            f"{where}: label_smoothing is {label_smoothing}, but {loss_type!r} has no smoothing. Pass 0, or "
            f"a loss_type among {', '.join(_SMOOTHED)}."
        )
    if loss_type == "exo_pair" and not label_smoothing:
        raise WhetValueError(f"{where}: 'exo_pair' needs label_smoothing > 0, for example 1e-3.")


def check_kto_options(where: str, loss_type: str, beta: float, *weights: float) -> None:
    """Validate the options of ``kto_loss``; errors begin with ``where``, the caller's name.

    Raises:
        WhetValueError: an unknown loss_type, a number out of range, or two weights of 0.
    """
    check_choice(where, "loss_type", loss_type, KTOLossType)
    if not (beta > 0 and math.isfinite(beta)):
        raise WhetValueError(f"{where}: beta is {beta!r}, expected a finite number > 0.")
    for name, weight in zip(("desirable_weight", "undesirable_weight"), weights, strict=True):
        if not 0 <= weight < math.inf:
            raise WhetValueError(f"{where}: {name} is {weight!r}, expected a finite number >= 0.")
    if not any(weights):
        raise WhetValueError(f"{where}: desirable_weight and undesirable_weight are 0. Set one of them above 0.")
