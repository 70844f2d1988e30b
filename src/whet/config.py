"""The settings of every algorithm: flat dataclasses that a TOML table, flags or keyword arguments fill.

Each field says what it does, in its unit. A value of another type or out of range is refused when the config
is made, and so is one that has no effect beside the others; a field at its default never is. Reads no files, and
does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from whet.errors import WhetValueError
from whet.fields import check_choice, check_range, check_types, check_used
from whet.models.formats import Weights
from whet.sampling import SamplingParams

GRPOLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo"]
RatioLevel = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]
SamplerCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Compute = Literal["auto", "bfloat16", "float32", "torch"]
EngineName = Literal["auto", "native", "torch"]
RolloutWeights = Literal["auto", Weights]
DPOLossType = Literal[
    "sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "sft",
]  # fmt: skip

_UNCLIPPED = ("cispo", "sapo")
_SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair")


@dataclass(kw_only=True)
class TrainerConfig:
    """Settings of every training algorithm.

    Raises:
        WhetTypeError: a value of another type than its field.
        WhetValueError: a value out of range, or one that has no effect beside the others.
    """

    learning_rate: float = 1e-6
    """Step size at the top of the schedule."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: this rate for good, or a decay to zero at the end of the schedule."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly to its top."""
    schedule_steps: int = 0
    """Length of the schedule in steps; 0: to the last step of the longest ``train`` call so far."""
    batch_size: int = 8
    """Rows of the dataset per step, in ``train``."""
    micro_batch_size: int = 0
    """Rows per forward and backward pass; 0: as max_tokens_per_step says. Less memory, the same gradient."""
    max_tokens_per_step: int = 1536
    """Tokens per forward and backward pass where Whet's kernels compute it and micro_batch_size is 0; 0: all at once.
    The same gradient."""
    compute: Compute = "auto"
    """What computes the step: Whet's kernels (whet.nn.accelerate), with products in bfloat16 or float32, or torch.

    auto: the kernels for a Hugging Face model of the supported families with float32 weights on the CPU, in bfloat16
    where the processor has it; else torch."""
    adam_beta1: float = 0.9
    """Decay of the gradient's running mean."""
    adam_beta2: float = 0.999
    """Decay of the squared gradient's running mean."""
    adam_epsilon: float = 1e-8
    """Added to the root of the squared gradient's running mean."""
    weight_decay: float = 0.0
    """Decoupled weight decay, per unit of learning rate, of matrices; norms and biases have none."""
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this norm; 0: never."""
    max_skipped_steps: int = 10
    """So many updates in a row whose loss or gradient is not finite, and so skipped, are an error."""
    training_mode: bool = False
    """Update in training mode, which turns dropout and gradient checkpointing on."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion; empty: the EOS of tokenizer or model."""
    seed: int = 0
    """Keys the order of the data and the sampling; from 0 to 2^64 - 1."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("learning_rate", "adam_epsilon", "weight_decay", "max_grad_norm"):
            check_range(self, name, 0 <= getattr(self, name) < math.inf, "a finite number >= 0")
        for name in ("adam_beta1", "adam_beta2"):
            check_range(self, name, 0 <= getattr(self, name) < 1, "a number in [0, 1)")
        for name in ("warmup_steps", "schedule_steps", "micro_batch_size", "max_tokens_per_step"):
            check_range(self, name, getattr(self, name) >= 0, "an integer >= 0")
        for name in ("batch_size", "max_skipped_steps"):
            check_range(self, name, getattr(self, name) >= 1, "an integer >= 1")
        check_range(self, "seed", 0 <= self.seed < 1 << 64, "an integer from 0 to 2^64 - 1")
        check_range(self, "stop_token_ids", all(token >= 0 for token in self.stop_token_ids), "token ids >= 0")
        decays = self.lr_schedule != "constant"
        check_used(self, ["schedule_steps"], decays, "lr_schedule is 'constant', which has no end")
        if self.schedule_steps:
            ends = f"at most schedule_steps={self.schedule_steps}, where the rate is zero again"
            check_range(self, "warmup_steps", self.warmup_steps <= self.schedule_steps, ends)
        packed = ["max_tokens_per_step"] if self.max_tokens_per_step else []
        check_used(self, packed, not self.micro_batch_size, "micro_batch_size says what a pass takes")
        check_used(self, packed, self.compute != "torch", "compute is 'torch', which takes micro_batch_size rows")

    def has_reference(self) -> bool:
        """Whether the loss looks at a reference."""
        return False


def learning_rate_at(step: int, config: TrainerConfig, horizon: int) -> float:
    """The learning rate of the step that follows ``step`` finished ones, in a schedule of ``horizon`` steps.

    ``warmup: top (step + 1) / warmup_steps``; then, with p = (step - warmup_steps) / (horizon -
    warmup_steps), at most 1, ``constant: top``, ``linear: top (1 - p)``, ``cosine: top (1 + cos(pi p)) / 2``.
    """
    top = config.learning_rate
    if step < config.warmup_steps:
        return top * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return top
    progress = min(1.0, (step - config.warmup_steps) / max(1, horizon - config.warmup_steps))
    if config.lr_schedule == "linear":
        return top * (1 - progress)
    return top * (1 + math.cos(math.pi * progress)) / 2


@dataclass(kw_only=True)
class SFTConfig(TrainerConfig):
    """Settings of SFT."""

    learning_rate: float = 2e-5
    """Step size at the top of the schedule."""
    training_mode: bool = True
    """Update in training mode, which turns dropout and gradient checkpointing on."""
    loss_on: Literal["completion", "all"] = "completion"
    """Which tokens count: those of the completion, or all but the first of the row."""


@dataclass(kw_only=True)
class PreferenceConfig:
    """Settings of a loss on preference pairs."""

    beta: float = 0.1
    """Strength of the pull towards the reference."""
    loss_type: DPOLossType = "sigmoid"
    """The function of the log-ratios, see ``dpo_loss``."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong."""
    reference_free: bool = False
    """Leave the reference out, as if it gave every completion the same probability."""

    def __post_init__(self) -> None:
        check_types(self)
        check_dpo_options(type(self).__name__, self.loss_type, self.beta, self.label_smoothing)
        check_used(self, ["beta"], self.loss_type != "sft", "'sft' looks at the chosen completion alone")

    def has_reference(self) -> bool:
        """Whether the loss looks at the reference."""
        return not self.reference_free and self.loss_type != "sft"


@dataclass(kw_only=True)
class DPOConfig(PreferenceConfig, TrainerConfig):
    """Settings of DPO. ``batch_size`` counts pairs."""

    precompute_reference: bool = False
    """Compute the reference's log-probs once, before ``train``, and keep no copy of the model for them."""
    reference_cache: str = ""
    """Folder that keeps precomputed log-probs, by weights and rows, for the next run; empty: they are not kept."""

    def __post_init__(self) -> None:
        TrainerConfig.__post_init__(self)
        PreferenceConfig.__post_init__(self)
        check_used(self, ["precompute_reference"], self.has_reference(), "the loss looks at no reference")
        check_used(self, ["reference_cache"], self.precompute_reference, "it keeps what precompute_reference computes")


@dataclass(kw_only=True)
class RolloutConfig:
    """Settings of sampling and of rewards."""

    max_new_tokens: int = 128
    """Longest completion in tokens, the stop token included."""
    temperature: float = 1.0
    """Divides the logits before sampling; above 0."""
    top_k: int = 0
    """Sample from the k most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this mass; 1: from all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one; 0: none."""
    repetition_penalty: float = 1.0
    """Makes tokens that are there already less probable; 1: does not."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion; empty: the EOS of tokenizer or model."""
    engine: EngineName = "auto"
    """What samples: the native engine, or the model through torch; auto: native where it runs the model."""
    rollout_weights: RolloutWeights = "auto"
    """Format of the native engine's matrices; auto: bf16 or float32, as the policy multiplies them."""
    kv_bytes: int = 0
    """Memory of the native engine for keys and values, asked of the system as it is used; 0: 1 GiB, or what the longest
    sequence takes that comes, if that is more. A sequence that needs more than is set is an error."""
    reward_weights: list[float] = field(default_factory=list)
    """One weight per reward function; empty: 1 each."""
    reward_policy: Literal["raise", "skip", "zero"] = "raise"
    """What a failing reward function does: end the run, leave the sample unscored, or score it 0."""
    reward_timeout_s: float | None = None
    """Seconds that one call of a reward function may take; None: no limit."""
    seed: int = 0
    """Keys the sampling; from 0 to 2^64 - 1."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "temperature", 0 < self.temperature < math.inf, "a finite number > 0")
        check_range(self, "reward_weights", all(map(math.isfinite, self.reward_weights)), "finite numbers")
        timeout_s = self.reward_timeout_s
        check_range(self, "reward_timeout_s", timeout_s is None or 0 < timeout_s < math.inf, "seconds > 0, or None")
        check_range(self, "kv_bytes", self.kv_bytes >= 0, "an integer >= 0")
        check_used(
            self,
            ["rollout_weights", "kv_bytes"],
            self.engine != "torch",
            "engine is 'torch', which samples from the model",
        )
        self.sampling((), self.seed)

    def samples_plainly(self) -> bool:
        """Whether tokens are drawn from the model's own distribution: temperature 1, nothing filtered."""
        plain = SamplingParams()
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return all(getattr(self, name) == getattr(plain, name) for name in names)

    def sampling(self, stop_ids: Sequence[int], seed: int) -> SamplingParams:
        """As the engine wants them; ``stop_ids`` are the model's, for where the config names none."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids or stop_ids,
            seed=seed,
        )


@dataclass(kw_only=True)
class OnlineConfig(RolloutConfig, TrainerConfig):
    """Settings of the training algorithms that sample. ``batch_size`` counts prompts."""

    def __post_init__(self) -> None:
        TrainerConfig.__post_init__(self)
        RolloutConfig.__post_init__(self)


@dataclass(kw_only=True)
class GRPOConfig(OnlineConfig):
    """Settings of GRPO. ``batch_size`` counts prompts, ``micro_batch_size`` completions."""

    group_size: int = 8
    """Completions per prompt, at least 2: an advantage is a difference within them."""
    num_iterations: int = 1
    """Updates per batch of completions."""
    loss_type: GRPOLossType = "dapo"
    """The member of the family, see ``grpo_loss``."""
    level: RatioLevel = "token"
    """Whether the probability ratio is per token or per sequence (GSPO)."""
    epsilon: float = 0.2
    """How far below 1 the ratio may fall before it is clipped."""
    epsilon_high: float | None = None
    """How far above 1; None: as epsilon. In cispo the cap of the ratio itself, which has to be given."""
    delta: float | None = None
    """Cap of the ratio where the advantage is negative; None: no cap."""
    beta: float = 0.0
    """Weight of the KL term; 0: none, and no reference model. ``kl_coef`` is another name for it."""
    kl_estimator: KLEstimator = "k3"
    """The estimator of the KL."""
    kl_bias_correction: bool = True
    """Multiply k3 by the ratio, which makes its gradient that of the KL."""
    sapo_tau_positive: float = 1.0
    """sapo's temperature for advantages above 0."""
    sapo_tau_negative: float = 1.05
    """sapo's temperature for the others."""
    sampler_correction: Literal["auto", "off"] | SamplerCorrection = "auto"
    """How to weigh completions of an engine whose log-probs differ from the policy's; auto: token_truncate where
    rollout_weights asks for bf16 or fewer bits, else off."""
    sampler_cap: float = 3.0
    """The largest of these weights."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides the advantages."""
    advantage_ddof: int = 0
    """0: population standard deviation; 1: sample."""
    advantage_eps: float | None = None
    """Added to the standard deviation (TRL: 1e-4, with ddof 1); None: nothing, but zeros below 1e-8."""
    drop_zero_spread: bool = False
    """Leave groups whose rewards are all equal out of the update, instead of counting them."""
    mask_truncated_completions: bool = False
    """Leave completions that max_new_tokens ended out of the update."""

    def has_reference(self) -> bool:
        """Whether the loss has a KL term."""
        return self.beta != 0

    def correction(self) -> SamplerCorrection | None:
        """``sampler_correction`` with "auto" decided; None: off."""
        if self.sampler_correction == "auto":
            return None if self.rollout_weights in ("auto", "float32") else "token_truncate"
        return None if self.sampler_correction == "off" else self.sampler_correction

    def __post_init__(self) -> None:
        super().__post_init__()
        one = "an integer >= 2: of one completion every advantage is 0, and nothing is learnt"
        check_range(self, "group_size", self.group_size >= 2, one)
        check_range(self, "num_iterations", self.num_iterations >= 1, "an integer >= 1")
        check_range(self, "sampler_cap", self.sampler_cap > 0, "a number > 0")
        for name in ("sapo_tau_positive", "sapo_tau_negative"):
            check_range(self, name, 0 < getattr(self, name) < math.inf, "a finite number > 0")
        check_range(self, "beta", 0 <= self.beta < math.inf, "a finite number >= 0")
        check_range(self, "advantage_ddof", self.advantage_ddof in (0, 1), "0 or 1")
        eps = self.advantage_eps
        check_range(self, "advantage_eps", eps is None or 0 <= eps < math.inf, "a finite number >= 0, or None")
        check_grpo_options(
            type(self).__name__,
            self.loss_type,
            self.level,
            self.kl_estimator,
            self.epsilon,
            self.epsilon_high,
            self.delta,
        )
        self._check_used()

    def _check_used(self) -> None:
        loss_type = self.loss_type
        if loss_type == "cispo" and self.epsilon_high is None:
            raise WhetValueError(
                f"{type(self).__name__}: epsilon_high is None, and in 'cispo' it caps the ratio itself: at epsilon, "
                f"{self.epsilon:g}, it would scale every gradient down to that. Pass epsilon_high, for example 5.0."
            )
        check_used(
            self, ["epsilon"], loss_type not in _UNCLIPPED, f"{loss_type!r} does not clip the ratio at 1 - epsilon"
        )
        taus = ["sapo_tau_positive", "sapo_tau_negative"]
        check_used(self, taus, loss_type == "sapo", f"{loss_type!r} has no temperature")
        check_used(self, ["kl_estimator"], self.beta != 0, "beta is 0, and there is no KL term")
        check_used(
            self, ["sampler_cap"], self.correction() is not None, "sampler_correction is off, and nothing is weighed"
        )
        spread = ["advantage_ddof", "advantage_eps"]
        check_used(self, spread, self.scale_rewards != "none", "scale_rewards is 'none', and nothing divides")


@dataclass(kw_only=True)
class OnlineDPOConfig(PreferenceConfig, OnlineConfig):
    """Settings of OnlineDPO. ``batch_size`` counts prompts, ``micro_batch_size`` pairs."""

    def __post_init__(self) -> None:
        OnlineConfig.__post_init__(self)
        PreferenceConfig.__post_init__(self)


@dataclass(kw_only=True)
class BestOfNConfig(RolloutConfig):
    """Settings of BestOfN."""

    n: int = 8
    """Candidates per prompt."""
    pad_token_id: int | None = None
    """Fills the right of shorter rows; None: the tokenizer's padding token, or 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "n", self.n >= 1, "an integer >= 1")
        check_range(self, "pad_token_id", self.pad_token_id is None or self.pad_token_id >= 0, "a token id >= 0")


def check_grpo_options(
    where: str,
    loss_type: str,
    level: str,
    kl_estimator: str,
    epsilon: float,
    epsilon_high: float | None,
    delta: float | None,
) -> None:
    """Refuse options that ``grpo_loss`` cannot use; ``where`` is who asks.

    Raises:
        WhetValueError: an unknown name, a number out of range, or a bound that the loss has no use for.
    """
    check_choice(where, "loss_type", loss_type, GRPOLossType)
    check_choice(where, "level", level, RatioLevel)
    check_choice(where, "kl_estimator", kl_estimator, KLEstimator)
    bounds = {"epsilon": (epsilon, 0), "epsilon_high": (epsilon_high, 0), "delta": (delta, 1)}
    for name, (value, least) in bounds.items():
        if value is not None and not value >= least:
            raise WhetValueError(f"{where}: {name} is {value!r}, expected a number >= {least}.")
    unused = {"epsilon_high": (epsilon_high, ("sapo",)), "delta": (delta, _UNCLIPPED)}
    for name, (value, losses) in unused.items():
        if value is not None and loss_type in losses:
            raise WhetValueError(
                f"{where}: {name} is {value!r} and has no effect: {loss_type!r} has no such bound. Pass None."
            )


def check_dpo_options(where: str, loss_type: str, beta: float, label_smoothing: float) -> None:
    """Refuse options that ``dpo_loss`` cannot use; ``where`` is who asks.

    Raises:
        WhetValueError: an unknown loss_type, a number out of range, or a smoothing that it has no use for.
    """
    check_choice(where, "loss_type", loss_type, DPOLossType)
    if not (beta > 0 and math.isfinite(beta)):
        raise WhetValueError(f"{where}: beta is {beta!r}, expected a finite number > 0.")
    if not 0 <= label_smoothing < 0.5:
        raise WhetValueError(f"{where}: label_smoothing is {label_smoothing!r}, expected one in [0, 0.5).")
    if label_smoothing and loss_type not in _SMOOTHED:
        raise WhetValueError(
            f"{where}: label_smoothing is {label_smoothing}, but {loss_type!r} has no such term. Pass 0, or "
            f"a loss_type among {', '.join(_SMOOTHED)}."
        )
    if loss_type == "exo_pair" and not label_smoothing:
        raise WhetValueError(f"{where}: 'exo_pair' needs label_smoothing > 0, for example 1e-3.")
