"""Settings of the algorithms that learn from preferences: pairs of completions, or rated completions.

Like ``whet.config.settings``, whose rules hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from whet.config.fields import NonNegative, PathText, Range, check_range, check_types, reject_ineffective
from whet.config.settings import MovingReference, OfflineConfig, OnlineConfig, TrainerConfig
from whet.errors import WhetValueError, check_choice

DPOLossType = Literal[
    "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "aot", "aot_unpaired", "sft",
]  # fmt: skip
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

CPOLossType = Literal["sigmoid", "hinge", "ipo"]
KTOLossType = Literal["kto", "apo_zero_unpaired"]

_SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired")
_DIVERGENT = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "sft")
"""Losses of the difference of two scores, which an f-divergence defines."""
SORTED_LOSSES = ("aot", "aot_unpaired")
"""Losses that compare completions of different pairs."""
_UNWEIGHTED = (*SORTED_LOSSES, "sft")

_Losses = Annotated[
    Mapping[str, float],
    Range(
        "finite factors >= 0, one above 0", lambda of: not of or (min(of.values()) >= 0 < max(of.values()) < math.inf)
    ),
]
_Share = Annotated[float | None, Range("a number from 0 to 1, or None", lambda x: x is None or 0 <= x <= 1)]


@dataclass(kw_only=True)
class PreferenceConfig(MovingReference):
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
    loss_weights: _Losses = field(default_factory=dict)
    """Several losses and their factors, instead of loss_type: sigmoid=0.8,bco_pair=0.2,sft=1."""
    f_divergence_type: FDivergence = "reverse_kl"
    """Divergence from the reference that the loss regularises, see ``dpo_loss``."""
    f_alpha_divergence_coef: float = 0.5
    """alpha of 'alpha_divergence'."""
    use_weighting: bool = False
    """Multiply the loss of a pair by its probability under the policy, relative to a typical sample (WPO): answers that
    the policy would not give count less. A step has one more pass without gradient."""
    ld_alpha: _Share = None
    """Factor of the log-probs of a completion's tokens after the length of the other (LD-DPO); None: 1."""

    def __post_init__(self) -> None:
        check_types(self)
        where, losses, divergence = type(self).__name__, self.losses(), self.f_divergence_type
        check_dpo_options(where, losses, self.beta, self.label_smoothing, divergence, self.f_alpha_divergence_coef)
        reject_ineffective(self, ["loss_type"], not self.loss_weights, "loss_weights names the losses")
        compares = set(losses) != {"sft"}
        reject_ineffective(self, ["beta"], compares, "'sft' uses only the chosen completion")
        reject_ineffective(self, ["f_divergence_type"], compares, "'sft' has no divergence")
        is_alpha = divergence == "alpha_divergence"
        reject_ineffective(self, ["f_alpha_divergence_coef"], is_alpha, f"f_divergence_type is {divergence!r}")
        self.check_reference(self.has_reference())
        reject_ineffective(self, ["ld_alpha"], "sft" not in losses, "'sft' counts every token")
        unweighted = next((name for name in losses if name in _UNWEIGHTED), "")
        reject_ineffective(self, ["use_weighting"], not unweighted, f"the loss {unweighted!r} has no term of each pair")

    def losses(self) -> Mapping[str, float]:
        """Return the losses and their factors."""
        return self.loss_weights or {self.loss_type: 1.0}

    def has_reference(self) -> bool:
        """Whether the loss uses the reference."""
        return not self.reference_free and set(self.losses()) != {"sft"}


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
        is_whole = not self.precompute_reference
        reject_ineffective(self, ["ref_sync_steps"], is_whole, "precompute_reference computes the reference once")
        reject_ineffective(self, ["ld_alpha"], is_whole, "precompute_reference keeps sums over whole completions")

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
class KTOConfig(MovingReference, OfflineConfig):
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
        self.check_reference(True)
        others = "an integer >= 2: the baseline of 'kto' pairs prompts with the completions of other rows"
        check_range(self, "batch_size", self.batch_size > 1 or self.loss_type != "kto", others)

    def has_reference(self) -> bool:
        """Whether the loss uses a reference: always."""
        return True


@dataclass(kw_only=True)
class RewardConfig(OfflineConfig):
    """Settings of Reward. ``batch_size`` counts pairs."""

    is_paired: ClassVar[bool] = True
    trains_reward: ClassVar[bool] = True

    learning_rate: NonNegative = 1e-4
    """Learning rate after the warm-up."""
    center_rewards_coefficient: NonNegative = 0.0
    """Weight of the mean square of the sum of both rewards, which centres rewards at 0; 0.01 is usual."""

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_ineffective(self, ["router_aux_loss_coef"], False, "a reward model has no balance loss")


@dataclass(kw_only=True)
class OnlineDPOConfig(PreferenceConfig, OnlineConfig):
    """Settings of OnlineDPO. ``batch_size`` counts prompts, ``micro_batch_size`` pairs."""

    def __post_init__(self) -> None:
        OnlineConfig.__post_init__(self)
        PreferenceConfig.__post_init__(self)


def check_dpo_options(
    where: str,
    losses: str | Mapping[str, float],
    beta: float,
    label_smoothing: float,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> None:
    """Validate the options of ``dpo_loss``; errors begin with ``where``, the caller's name.

    Raises:
        WhetValueError: an unknown loss or divergence, a number out of range, label smoothing without a loss that has
            it, or a divergence that a loss does not have.
    """
    names = [losses] if isinstance(losses, str) else list(losses)
    for name in names:
        check_choice(where, "loss_type", name, DPOLossType)
    _check_beta(where, beta)
    if not 0 <= label_smoothing < 0.5:
        raise WhetValueError(f"{where}: label_smoothing is {label_smoothing!r}, expected a number in [0, 0.5).")
    if label_smoothing and not set(names) & set(_SMOOTHED):
        raise WhetValueError(
            f"{where}: label_smoothing is {label_smoothing}, but {', '.join(map(repr, names))} has no smoothing. Pass "
            f"0, or a loss_type among {', '.join(_SMOOTHED)}."
        )
    if "exo_pair" in names and not label_smoothing:
        raise WhetValueError(f"{where}: 'exo_pair' needs label_smoothing > 0, for example 1e-3.")
    check_choice(where, "f_divergence_type", f_divergence_type, FDivergence)
    others = [name for name in names if name not in _DIVERGENT]
    if f_divergence_type != "reverse_kl" and others:
        raise WhetValueError(
            f"{where}: f_divergence_type is {f_divergence_type!r}, which {others[0]!r} does not have. Leave it at "
            f"'reverse_kl', or choose losses among {', '.join(_DIVERGENT)}."
        )
    if not (math.isfinite(f_alpha_divergence_coef) and f_alpha_divergence_coef != 1):
        raise WhetValueError(
            f"{where}: f_alpha_divergence_coef is {f_alpha_divergence_coef!r}, expected a finite number other than 1, "
            f"which is 'reverse_kl'."
        )


def check_kto_options(where: str, loss_type: str, beta: float, *weights: float) -> None:
    """Validate the options of ``kto_loss``; errors begin with ``where``, the caller's name.

    Raises:
        WhetValueError: an unknown loss_type, a number out of range, or two weights of 0.
    """
    check_choice(where, "loss_type", loss_type, KTOLossType)
    _check_beta(where, beta)
    for name, weight in zip(("desirable_weight", "undesirable_weight"), weights, strict=True):
        if not 0 <= weight < math.inf:
            raise WhetValueError(f"{where}: {name} is {weight!r}, expected a finite number >= 0.")
    if not any(weights):
        raise WhetValueError(f"{where}: desirable_weight and undesirable_weight are 0. Set one of them above 0.")


def _check_beta(where: str, beta: float) -> None:
    if not (beta > 0 and math.isfinite(beta)):
        raise WhetValueError(f"{where}: beta is {beta!r}, expected a finite number > 0.")
