"""Settings of every algorithm: flat dataclasses filled from a TOML table, flags or keyword arguments.

Each field documents its effect and unit. Construction rejects values of the wrong type, out of range, or without effect
given the other settings; a field at its default is never rejected. Reads no files except grammars, and does not import
torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from whet.config.episodes import EpisodeSettings
from whet.config.fields import (
    AboveZero,
    BelowOne,
    Count,
    NonNegative,
    OptionalAboveZero,
    OptionalCount,
    Positive,
    Range,
    Seed,
    StopStrings,
    Temperature,
    TokenIds,
    check_range,
    check_types,
    reject_ineffective,
)
from whet.config.grammars import GrammarText, parse_schema
from whet.config.sampling import (
    DISTRIBUTION_SETTINGS,
    GRAMMAR_SETTINGS,
    ROLLOUT_MAX_NEW_TOKENS,
    SamplingParams,
    SamplingSettings,
)
from whet.errors import WhetValueError, check_choice
from whet.models.formats import FILE_TYPES, TABLE, FileType, Weights

GRPOLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo", "gmpo", "dppo_tv"]
RatioLevel = Literal["token", "sequence", "sequence_product"]
SFTLossType = Literal["nll", "dft"]
Advantage = Literal["group", "leave_one_out", "max_rl", "pass_k", "per_reward"]
KLEstimator = Literal["k1", "k2", "k3"]
SamplerCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon", "schedule_free_adamw"]
ComputeDtype = Literal["auto", "bfloat16", "float32"]
Compute = Literal[ComputeDtype, "torch"]
EngineName = Literal["auto", "native", "torch", "ray"]
RolloutWeights = Literal["auto", Weights]
Device = Literal["cpu", "gpu"]
"""Processor of a native engine; gpu: any with Metal, Vulkan or Direct3D 12."""
_GroupSize = Annotated[
    int,
    Range("an integer >= 2: the advantage of a single completion is 0", lambda n: n >= 2),
]
_Share = Annotated[float, Range("a number from 0 to 1", lambda share: 0 <= share <= 1)]
_Cap = Annotated[float, Range("a number > 0", lambda cap: cap > 0)]
_Ddof = Annotated[int, Range("0 or 1", lambda n: n in (0, 1))]
_Eps = Annotated[float | None, Range("a finite number >= 0, or None", lambda x: x is None or 0 <= x < math.inf)]
_Beta = Annotated[float | None, Range("a finite number >= 0, or None", lambda x: x is None or 0 <= x < math.inf)]
_Timeout = Annotated[float | None, Range("seconds > 0, or None", lambda s: s is None or 0 < s < math.inf)]
_Port = Annotated[int, Range("a number from 0 to 65535", lambda port: 0 <= port <= 65535)]
_MinScore = Annotated[float | None, Range("a finite number, or None", lambda s: s is None or math.isfinite(s))]
_TokenId = Annotated[int | None, Range("a token id >= 0", lambda token: token is None or token >= 0)]
_Clip = Annotated[
    list[float], Range("a lower and a higher number", lambda clip: not clip or (len(clip) == 2 and clip[0] < clip[1]))
]
_Weights = Annotated[list[float], Range("finite numbers", lambda weights: all(map(math.isfinite, weights)))]

_WHOLE_COMPLETION = (*GRAMMAR_SETTINGS, "stop", "presence_penalty", "frequency_penalty", "min_new_tokens")
"""Sampling settings that depend on all tokens of a completion before the next."""

_UNCLIPPED = ("cispo", "sapo")
_OF_TOKENS = ("gmpo", "dppo_tv")
"""Losses that bound each token."""
REWARD_SETTINGS = ("reward_weights", "reward_policy", "reward_timeout_s")
"""Settings of reward functions."""


@dataclass(kw_only=True)
class TrainerConfig:
    """Settings of every training algorithm.

    Raises:
        WhetTypeError: a value has the wrong type.
        WhetValueError: a value is out of range, or has no effect given the other settings.
    """

    fixed_at_construction: ClassVar[tuple[str, ...]] = (
        "compute", "optimizer", "adam_beta1", "adam_beta2", "adam_epsilon", "muon_momentum", "weight_decay",
        "loraplus_lr_ratio", "qat", "deterministic_reduction",
    )  # fmt: skip
    """Fields that a trainer reads only in its constructor."""
    samples: ClassVar[bool] = False
    """Whether the algorithm samples completions with an engine."""
    is_paired: ClassVar[bool] = False
    """Whether the algorithm trains on pairs of completions; ``micro_batch_size`` then counts pairs."""

    trains_reward: ClassVar[bool] = False
    """Whether the algorithm trains a reward model: a scalar head instead of the LM head."""

    learning_rate: NonNegative = 1e-6
    """Learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or decay to zero at the end of the schedule."""
    warmup_steps: Count = 0
    """Steps over which the rate rises linearly to learning_rate."""
    schedule_steps: Count = 0
    """Length of the schedule in steps; 0: up to the last step of the longest ``train`` call so far: continuing a run
    with more steps raises the rate again."""
    batch_size: Positive = 8
    """Rows of the dataset per step, in ``train``."""
    micro_batch_size: Count = 0
    """Rows per forward and backward pass; 0: see max_tokens_per_step. Fewer rows need less memory."""
    max_tokens_per_step: Count = 768
    """Tokens per forward and backward pass on Whet's kernels if micro_batch_size is 0; 0: no limit."""
    activation_bytes: OptionalCount = None
    """Memory in which a forward pass on Whet's kernels keeps activations of layers for the backward pass, besides the
    inputs of all layers; the other layers are computed again, with the same results. None: a quarter of the unused
    memory."""
    compute: Compute = "auto"
    """Backend of the step: Whet's kernels (whet.nn.accelerate), with matmuls in bfloat16 or float32, or torch.

    auto: the kernels for a Hugging Face model of the supported families with float32 weights on the CPU, in bfloat16
    if the processor supports it; else torch. Master weights are float32 either way: AdamW keeps them for bfloat16 and
    float16 parameters."""
    optimizer: OptimizerName = "adamw"
    """adamw. adamw_8bit: its moments in 8 bits, a quarter of their memory. muon: orthogonal updates of matrices, AdamW
    for the other parameters. schedule_free_adamw: trains at a constant rate and returns an average of the steps; needs
    the extra schedulefree. A Learner has the first two."""
    muon_momentum: BelowOne = 0.95
    """Decay rate of muon's momentum of matrices."""
    adam_beta1: BelowOne = 0.9
    """Decay rate of AdamW's first moment."""
    adam_beta2: BelowOne = 0.999
    """Decay rate of AdamW's second moment."""
    adam_epsilon: NonNegative = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, per unit of learning rate, of matrices; norms and biases do not decay."""
    loraplus_lr_ratio: AboveZero = 1.0
    """Learning rate of the matrices B of adapters, as a multiple of the others' (LoRA+, Hayou et al. 2024, who use 16
    with a lower learning_rate)."""
    qat: FileType | None = None
    """Quantisation-aware training: compute with matrices rounded to their formats in a GGUF file of this type
    (whet.nn.rounding). Adapters are rounded with their matrix, as merged."""
    router_aux_loss_coef: _Beta = None
    """Factor of the balance loss of a mixture's routers (whet.nn.balance), the mean over the passes of a step, whose
    metric is balance_loss; None: the model's, 0: none. Not for a Learner, whose routers are frozen."""
    max_grad_norm: NonNegative = 1.0
    """Gradient norm above which gradients are clipped; 0: no clipping."""
    max_skipped_steps: Positive = 10
    """Abort after this many consecutive updates were skipped because loss or gradient was not finite."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Under torchrun, dtype of the gradient all-reduce; bfloat16 rounds the gradients and halves the traffic."""
    deterministic_reduction: bool = False
    """Sum gradients exactly: any number of ranks, including 1, gives the same bits; 8 more bytes per parameter."""
    training_mode: bool = False
    """Update in training mode, with dropout and gradient checkpointing."""
    stop_token_ids: TokenIds = field(default_factory=list)
    """Tokens that end a completion; empty: the EOS token of tokenizer or model."""
    seed: Seed = 0
    """Seed of data order and sampling, from 0 to 2^64 - 1."""

    def __post_init__(self) -> None:
        check_types(self)
        decays = self.lr_schedule != "constant"
        reject_ineffective(self, ["muon_momentum"], self.optimizer == "muon", f"optimizer is {self.optimizer!r}")
        is_free = self.optimizer == "schedule_free_adamw"
        why = "optimizer is 'schedule_free_adamw', whose average replaces a decay"
        reject_ineffective(self, ["lr_schedule"], not is_free, why)
        if is_free and self.samples:
            raise WhetValueError(
                f"{type(self).__name__}: optimizer is 'schedule_free_adamw', which computes gradients at other weights "
                f"than the average that samples. Use 'adamw'."
            )
        reject_ineffective(self, ["schedule_steps"], decays, "lr_schedule is 'constant', which has no length")
        if self.schedule_steps:
            ends = f"at most schedule_steps={self.schedule_steps}, where the rate reaches zero"
            check_range(self, "warmup_steps", self.warmup_steps <= self.schedule_steps, ends)
        reject_ineffective(
            self, ["reduce_dtype"], not self.deterministic_reduction, "deterministic_reduction needs every bit"
        )
        if self.qat is not None:
            is_lossy = not TABLE[FILE_TYPES[self.qat].base].is_float
            check_range(self, "qat", is_lossy, "a type with quantised matrices")
        packed = ["max_tokens_per_step"] if self.max_tokens_per_step else []
        reject_ineffective(self, packed, not self.micro_batch_size, "micro_batch_size sets the rows of a pass")
        reject_ineffective(self, packed, self.compute != "torch", "compute is 'torch', which uses micro_batch_size")
        reject_ineffective(self, ["activation_bytes"], self.compute != "torch", "compute is 'torch', which keeps all")

    def has_reference(self) -> bool:
        """Whether the loss uses a reference."""
        return False

    def uses_reference_model(self) -> bool:
        """Whether the reference computes log-probs in every step."""
        return self.has_reference()

    def moves_reference(self) -> bool:
        """Whether the reference follows the policy, see ``MovingReference``."""
        return False

    def completions_per_prompt(self) -> int:
        """Return the number of completions per prompt in a step."""
        return 2 if self.is_paired else 1


@dataclass(kw_only=True)
class MovingReference:
    """Settings of a reference that follows the policy."""

    ref_sync_steps: Count = 0
    """Steps after which the reference moves to the policy (TR-DPO; 1: a moving average); 0: it stays."""
    ref_sync_alpha: Annotated[float, Range("a number in (0, 1]", lambda alpha: 0 < alpha <= 1)] = 0.6
    """Weight of the policy in the new reference: alpha policy + (1 - alpha) reference. Adapters need 1."""

    def moves_reference(self) -> bool:
        """Whether the reference follows the policy."""
        return self.ref_sync_steps > 0

    def check_reference(self, has_reference: bool) -> None:
        """Raise a WhetValueError if the settings have no effect."""
        reject_ineffective(self, ["ref_sync_steps"], has_reference, "the loss uses no reference")
        reject_ineffective(self, ["ref_sync_alpha"], self.moves_reference(), "ref_sync_steps is 0")


def learning_rate_at(step: int, config: TrainerConfig, horizon: int) -> float:
    """Return the learning rate after ``step`` completed steps, in a schedule of ``horizon`` steps.

    With the peak rate r, ``warmup: r (step + 1) / warmup_steps``; then, with p = (step - warmup_steps) / (horizon -
    warmup_steps), at most 1, ``constant: r``, ``linear: r (1 - p)``, ``cosine: r (1 + cos(pi p)) / 2``.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return peak
    progress = min(1.0, (step - config.warmup_steps) / max(1, horizon - config.warmup_steps))
    if config.lr_schedule == "linear":
        return peak * (1 - progress)
    return peak * (1 + math.cos(math.pi * progress)) / 2


@dataclass(kw_only=True)
class OfflineConfig(TrainerConfig):
    """Settings of algorithms that train on completions of the dataset."""

    max_length: Count = 0
    """Maximum tokens of a row, prompt plus completion; 0: the model's positions."""
    truncation: Literal["error", "drop", "truncate"] = "error"
    """Handling of longer rows: error; drop the row; truncate its completion. The shares of such rows are the metrics
    frac_truncated and frac_dropped."""


@dataclass(kw_only=True)
class SFTConfig(OfflineConfig):
    """Settings of SFT."""

    learning_rate: NonNegative = 2e-5
    """Learning rate after the warm-up."""
    training_mode: bool = True
    """Update in training mode, with dropout and gradient checkpointing."""
    loss_type: SFTLossType = "nll"
    """nll: negative log-likelihood. dft: it times the token's probability, a constant in the gradient, so that tokens
    which the model finds improbable do not dominate (Dynamic Fine-Tuning). Evaluation is always nll."""
    label_smoothing: BelowOne = 0.0
    """Share of the target that is uniform over the vocabulary (Szegedy et al. 2015); only of nll, and not of
    evaluation."""
    neftune_alpha: NonNegative = 0.0
    """Noise on the embeddings in updates, uniform in +-neftune_alpha / sqrt(tokens of the row x hidden_dim) (NEFTune,
    Jain et al. 2023, who use 5 to 15); 0: none."""
    loss_on: Literal["completion", "last_turn", "all"] = "completion"
    """Tokens that are trained on.

    completion: the completion; in messages, every assistant turn.
    last_turn: in messages, only the last turn.
    all: every token except the first of the row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_ineffective(self, ["label_smoothing"], self.loss_type == "nll", f"loss_type is {self.loss_type!r}")
        reject_ineffective(self, ["neftune_alpha"], self.training_mode, "training_mode is off, which disables noise")


@dataclass(kw_only=True)
class KDConfig(OfflineConfig):
    """Settings of KD."""

    learning_rate: NonNegative = 2e-5
    """Learning rate after the warm-up."""
    training_mode: bool = True
    """Update in training mode, with dropout."""


@dataclass(kw_only=True)
class RolloutConfig(SamplingSettings):
    """Settings of sampling and of rewards; ``SamplingParams`` documents the sampling settings that it shares."""

    max_new_tokens: int = ROLLOUT_MAX_NEW_TOKENS
    """Maximum length of a completion in tokens, including the stop token. A reasoning model may need thousands."""
    temperature: Temperature = SamplingParams.temperature
    """Divisor of the logits before sampling; above 0."""
    stop_token_ids: TokenIds = field(default_factory=list)
    """Tokens that end a completion; empty: the EOS token of tokenizer or model."""
    stop: StopStrings = field(default_factory=list)
    """Strings that end a completion: reward functions see the text before them, all sampled tokens are trained on.
    Needs a tokenizer."""
    schema: GrammarText = ""
    """A JSON schema that the completions follow: its text, or a file. Grammars need the extra serve (llguidance), a
    tokenizer and the native engine; GRPO trains the distribution over the tokens that they allow."""
    regex: str = ""
    """A regular expression that matches the completions."""
    lark: GrammarText = ""
    """A grammar of the completions in llguidance's dialect of Lark: its text, or a file."""
    engine: EngineName = "auto"
    """Engine that samples: native, or the model through torch; auto: native if it supports the model; ray: native
    engines in other processes, on one machine or many, with the same completions."""
    rollout_workers: Count = 0
    """Number of sampling processes with engine='ray'; 0: 2."""
    ray_address: str = ""
    """Address of the Ray cluster; auto: this machine's cluster; empty: RAY_ADDRESS, or a new local cluster."""
    rollout_weights: RolloutWeights = "auto"
    """Weight format of the native engine; auto: bf16 or float32, as in the policy's matmuls."""
    rollout_device: Device = "cpu"
    """Processor of the native engine; gpu: any with Metal, Vulkan or Direct3D 12, through wgpu. Torch trains where the
    model is."""
    kv_bytes: Count = 0
    """KV cache of the native engine in bytes, committed lazily; 0: 1 GiB, or more if the longest sequence needs it. A
    sequence that exceeds an explicit size is an error."""
    reward_weights: _Weights = field(default_factory=list)
    """One weight per reward function; empty: 1 each."""
    reward_policy: Literal["raise", "skip", "zero"] = "raise"
    """When a reward function fails: end the run, leave the sample unscored, or score it 0."""
    reward_timeout_s: _Timeout = None
    """Time limit of a reward function call in seconds; None: no limit."""
    seed: Seed = 0
    """Seed of sampling, from 0 to 2^64 - 1."""

    def __post_init__(self) -> None:
        check_types(self)
        native = ["rollout_weights", "rollout_device", "kv_bytes"]
        reject_ineffective(self, native, self.engine != "torch", "engine is 'torch', which samples from the model")
        reject_ineffective(
            self, ["rollout_workers", "ray_address"], self.engine == "ray", f"engine is {self.engine!r}, not 'ray'"
        )
        grammars = self.sampling((), self.seed).grammar_settings()
        reject_ineffective(self, grammars, self.engine != "torch", "engine is 'torch', which follows no grammar")

    def uses_unmodified_distribution(self) -> bool:
        """Whether tokens are sampled from the model's distribution: temperature 1, no filters, no penalties."""
        neutral = SamplingParams()
        return all(getattr(self, name) == getattr(neutral, name) for name in DISTRIBUTION_SETTINGS)

    def sampling(self, stop_ids: Sequence[int], seed: int) -> SamplingParams:
        """Return the ``SamplingParams`` for an engine; ``stop_ids`` is used if the config has no stop_token_ids."""
        schema = parse_schema(self.schema, type(self).__name__)
        return SamplingParams.from_settings(
            self, stop_token_ids=self.stop_token_ids or stop_ids, seed=seed, schema=schema
        )


@dataclass(kw_only=True)
class OnlineConfig(RolloutConfig, TrainerConfig):
    """Settings of training algorithms that sample. ``batch_size`` counts prompts."""

    samples: ClassVar[bool] = True
    fixed_at_construction: ClassVar[tuple[str, ...]] = (
        *TrainerConfig.fixed_at_construction, "engine", "rollout_workers", "ray_address", "rollout_weights",
        "rollout_device", "kv_bytes",
        *REWARD_SETTINGS, "async_lag", "async_tokens",
    )  # fmt: skip

    async_lag: Count = 0
    """Steps by which sampling is ahead of training: step t trains on completions that the weights after step
    t - async_lag sampled, while the steps between them trained. 0: sampling and training alternate."""
    async_tokens: Count = 0
    """Tokens after which a completion is continued by the weights of the next step, up to one step before its own; 0:
    one version of the weights samples the whole completion. Needs async_lag of 2 or more."""

    def __post_init__(self) -> None:
        TrainerConfig.__post_init__(self)
        RolloutConfig.__post_init__(self)
        why = "engine is 'torch', which samples from the weights in training"
        reject_ineffective(self, ["async_lag"], self.engine != "torch", why)
        why = f"qat is {self.qat!r}, and weights that are sampled ahead are not rounded"
        reject_ineffective(self, ["async_lag"], self.qat is None, why)
        why = f"async_lag is {self.async_lag}: there is no newer version before the step"
        reject_ineffective(self, ["async_tokens"], self.async_lag > 1, why)
        for name in _WHOLE_COMPLETION if self.async_tokens else ():
            if getattr(self, name):
                raise WhetValueError(
                    f"{type(self).__name__}: async_tokens is {self.async_tokens}, and {name} is "
                    f"{getattr(self, name)!r}, which depends on all tokens of a completion, while another version "
                    f"continues it. Leave one of them at its default."
                )


@dataclass(kw_only=True)
class GroupConfig(MovingReference, EpisodeSettings, OnlineConfig):
    """Settings of GRPO and RLOO. ``batch_size`` counts prompts, ``micro_batch_size`` completions."""

    kl_in_reward: ClassVar[bool] = False
    """Whether the KL term is part of the reward, instead of the loss."""

    group_size: _GroupSize = 8
    """Completions per prompt, at least 2; advantages are relative to the group."""
    num_iterations: Positive = 1
    """Passes over a batch of completions."""
    steps_per_generation: Positive = 1
    """Updates of a pass over a batch of completions: each takes its share of the prompts. Above 1 a pass without
    gradient first computes the log-probs of the policy that sampled."""
    epsilon: float = 0.2
    """Clip the ratio below at 1 - epsilon; in gmpo its logarithm at -epsilon (Zhao et al. 2025: 0.4). In dppo_tv the
    largest decrease of a probability (Qi et al. 2026: 0.15)."""
    epsilon_high: float | None = None
    """Clip the ratio above at 1 + epsilon_high, in gmpo its logarithm, and in dppo_tv the increase of a probability, at
    epsilon_high; None: epsilon. In cispo, where it is required, the cap of the ratio."""
    off_policy_mask_threshold: OptionalAboveZero = None
    """Exclude completions with a negative advantage from the policy loss if their tokens have become less probable
    since they were sampled, by more than this many nats per token (DeepSeek-V3.2; for example 0.5); None: none."""
    entropy_coef: NonNegative = 0.0
    """Weight of the mean entropy per token that is subtracted from the loss, against the collapse of the distribution;
    0: none."""
    echo_alpha: NonNegative = 0.0
    """Weight of the cross-entropy of the tokens that environment or tools answered, which is added to the loss (ECHO;
    prime-rl's alpha, where it is 0.1): the mean over the contents of messages between turns, without what the chat
    template adds to them; 0: none."""
    sampler_correction: Literal["auto", "off"] | SamplerCorrection = "auto"
    """Importance correction for an engine whose log-probs differ from the policy's; auto: token_truncate if
    rollout_weights is bf16 or narrower, the base is quantised, or an older policy sampled; else off."""
    sampler_cap: _Cap = 3.0
    """Maximum importance weight."""
    router_replay: bool = True
    """In a mixture of experts, give tokens to the experts that the sampler chose (Ma et al. 2025), unless torch samples
    or computes the policy. The metric sampler/replaced_experts is the share of other choices."""
    reward_clip: _Clip = field(default_factory=list)
    """Lower and upper bound of a completion's reward, the weighted sum, before the advantages; empty: none."""
    filter_zero_variance: bool = False
    """Exclude groups with identical rewards from the update; they have no gradient, but count in its mean."""
    mask_truncated_completions: bool = False
    """Exclude completions truncated by max_new_tokens from the update."""
    serve_port: _Port = 0
    """Port at which the engine serves an agent; with several ranks the first of as many. 0: any free one."""

    def completions_per_prompt(self) -> int:
        return self.group_size

    def learns_answers(self) -> bool:
        """Whether the tokens that an environment answered are trained."""
        return self.echo_alpha > 0

    def correction(self) -> SamplerCorrection | None:
        """Return ``sampler_correction`` with "auto" resolved; None: off."""
        if self.sampler_correction == "auto":
            return None if self.rollout_weights in ("auto", "float32") else "token_truncate"
        return None if self.sampler_correction == "off" else self.sampler_correction

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grpo_options(type(self).__name__, self)
        fewer = f"at most batch_size={self.batch_size}, the number of prompts"
        check_range(self, "steps_per_generation", self.steps_per_generation <= self.batch_size, fewer)
        # With both at "auto" the model decides: GRPO corrects a quantised base.
        may_correct = self.correction() is not None or self.sampler_correction == self.rollout_weights == "auto"
        may_correct |= self.sampler_correction == "auto" and self.async_lag > 0
        reject_ineffective(self, ["sampler_cap"], may_correct, "sampler_correction is off")


@dataclass(kw_only=True)
class GRPOConfig(GroupConfig):
    """Settings of GRPO. ``batch_size`` counts prompts, ``micro_batch_size`` completions."""

    loss_type: GRPOLossType = "dapo"
    """Variant of the loss, see ``grpo_loss``."""
    level: RatioLevel = "token"
    """Level of the probability ratio: per token, its geometric mean over a sequence (sequence: GSPO), or its product
    (sequence_product: RLOO)."""
    delta: float | None = None
    """Cap of the ratio for negative advantages; None: no cap."""
    top_entropy_quantile: _Share = 1.0
    """Train only this share of the tokens, of the highest entropy (Wang et al. 2025: 0.2); the KL term is of all.
    Costs a forward pass per batch."""
    beta: _Beta = None
    """Weight of the KL term; 0: no KL term and no reference. None: 0.1 with a ref_model, else 0. Alias: ``kl_coef``."""
    kl_estimator: KLEstimator = "k3"
    """KL estimator: k1, k2 or k3 (Schulman 2020)."""
    kl_bias_correction: bool = True
    """Multiply k3 by the ratio, so that its gradient is the gradient of the KL."""
    sapo_tau_positive: AboveZero = 1.0
    """Temperature of sapo for advantages above 0."""
    sapo_tau_negative: AboveZero = 1.05
    """Temperature of sapo for advantages <= 0."""
    advantage: Advantage = "group"
    """Advantage of a completion in its group (whet.rewards.advantages): GRPO's, RLOO's leave_one_out, max_rl (relative
    to the mean reward), pass_k (only of the best), or GDPO's per_reward, which normalises each reward function."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Scope of the standard deviation that divides the advantages."""
    advantage_level: Literal["episode", "turn"] = "episode"
    """Advantages of episodes, or of their turns, from the rewards that follow each turn (``whet.rewards.turns``)."""
    advantage_ddof: _Ddof = 0
    """0: population standard deviation; 1: sample."""
    advantage_eps: _Eps = None
    """Added to the standard deviation (TRL: 1e-4, with ddof 1); None: nothing, but advantages are 0 if it is < 1e-8."""

    def has_reference(self) -> bool:
        """Whether the loss has a KL term."""
        return bool(self.beta)

    def __post_init__(self) -> None:
        super().__post_init__()
        loss_type = self.loss_type
        if loss_type == "cispo" and self.epsilon_high is None:
            raise WhetValueError(
                f"{type(self).__name__}: epsilon_high is None, but 'cispo' caps the ratio with it: a cap of "
                f"epsilon={self.epsilon:g} would scale down every gradient. Pass epsilon_high, for example 5.0."
            )
        reject_ineffective(
            self, ["epsilon"], loss_type not in _UNCLIPPED, f"{loss_type!r} does not clip the ratio at 1 - epsilon"
        )
        taus = ["sapo_tau_positive", "sapo_tau_negative"]
        reject_ineffective(self, taus, loss_type == "sapo", f"{loss_type!r} has no temperature")
        if self.top_entropy_quantile < 1 and (self.level != "token" or loss_type == "gmpo"):
            raise WhetValueError(
                f"{type(self).__name__}: top_entropy_quantile is {self.top_entropy_quantile:g}, and the ratio of a "
                f"sequence has the gradient of every token. Leave it at 1.0, or level at 'token' and another loss_type."
            )
        reject_ineffective(self, ["kl_estimator"], self.beta != 0, "beta is 0: no KL term")
        self.check_reference(self.beta != 0)
        spread = ["advantage_ddof", "advantage_eps"]
        reject_ineffective(
            self, spread, self.scale_rewards != "none", "scale_rewards is 'none': advantages are not divided"
        )
        why = f"advantage is {self.advantage!r}"
        reject_ineffective(self, spread, self.advantage in ("group", "per_reward"), f"{why}, without a deviation")
        reject_ineffective(self, ["scale_rewards", "advantage_level"], self.advantage == "group", why)
        reject_ineffective(self, ["reward_clip"], self.advantage != "per_reward", f"{why}, which sums no rewards")
        reject_ineffective(self, ["reward_clip"], self.advantage_level != "turn", "advantage_level is 'turn'")


@dataclass(kw_only=True)
class RLOOConfig(GroupConfig):
    """Settings of RLOO. ``batch_size`` counts prompts, ``micro_batch_size`` completions."""

    kl_in_reward: ClassVar[bool] = True
    loss_type: ClassVar[GRPOLossType] = "grpo"
    level: ClassVar[RatioLevel] = "sequence_product"
    delta: ClassVar[float | None] = None
    top_entropy_quantile: ClassVar[float] = 1.0
    kl_estimator: ClassVar[KLEstimator] = "k1"
    advantage: ClassVar[Advantage] = "leave_one_out"
    advantage_level: ClassVar[str] = "episode"
    advantage_ddof: ClassVar[int] = 1
    advantage_eps: ClassVar[float | None] = 1e-4

    group_size: _GroupSize = 2
    """Completions per prompt, at least 2; the baseline of each is the mean reward of the others."""
    beta: NonNegative = 0.05
    """Weight of the log-ratio to the reference that is subtracted from the reward; 0: no reference."""
    normalize_advantages: bool = False
    """Subtract the mean of the advantages of the batch, and divide them by their standard deviation."""

    @property
    def scale_rewards(self) -> str:
        """Scope of the standard deviation that divides the advantages."""
        return "batch" if self.normalize_advantages else "none"

    def has_reference(self) -> bool:
        """Whether the reward has a KL term."""
        return self.beta > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_reference(self.beta > 0)


@dataclass(kw_only=True)
class RAFTConfig(OnlineConfig):
    """Settings of RAFT. ``batch_size`` counts prompts, ``micro_batch_size`` completions."""

    n: _GroupSize = 8
    """Completions per prompt, at least 2, of which the best is trained on."""
    min_score: _MinScore = None
    """Least reward of a completion that is trained on; None: the best of every prompt."""

    def completions_per_prompt(self) -> int:
        return self.n


@dataclass(kw_only=True)
class DistillationConfig(OnlineConfig):
    """Settings of distillation on the student's samples."""

    fixed_at_construction: ClassVar[tuple[str, ...]] = (*OnlineConfig.fixed_at_construction, "divergence")

    n: Positive = 1
    """Completions per prompt."""
    divergence: Literal["sampled", "full"] = "sampled"
    """sampled: the reverse KL divergence, estimated from the log-probs of the sampled tokens.
    full: of whole distributions, in tiles of the vocabulary; needs a Learner, and the teacher's weights."""
    beta: float = 1.0
    """Divergence of 'full', with m = (1 - beta) student + beta teacher: beta KL(teacher || m) + (1 - beta)
    KL(student || m); 1 is KL(student || teacher), 0 is KL(teacher || student)."""
    sampler_cap: _Cap = 3.0
    """Maximum importance weight of a token that the engine sampled with another probability than the student's."""

    def completions_per_prompt(self) -> int:
        return self.n

    def __post_init__(self) -> None:
        super().__post_init__()
        is_full = self.divergence == "full"
        check_range(self, "beta", 0 <= self.beta <= 1, "a number from 0 to 1")
        reject_ineffective(self, ["beta"], is_full, "divergence is 'sampled', which is the reverse KL divergence")
        reject_ineffective(self, ["sampler_cap"], not is_full, "divergence is 'full', which has no importance weights")
        drawn, neutral = self.sampling((), self.seed), SamplingParams()
        changed = [name for name in DISTRIBUTION_SETTINGS if getattr(drawn, name) != getattr(neutral, name)]
        for name in (*changed, *drawn.grammar_settings()):
            if name != "temperature":
                raise WhetValueError(
                    f"{type(self).__name__}: {name} is {getattr(self, name)!r}, and the divergence is of whole "
                    f"distributions: tokens are drawn from all of the vocabulary. Omit it."
                )


@dataclass(kw_only=True)
class DistillConfig(DistillationConfig):
    """Settings of Distill. ``batch_size`` counts prompts, ``micro_batch_size`` completions."""


@dataclass(kw_only=True)
class SDPOConfig(MovingReference, DistillationConfig):
    """Settings of SDPO. ``batch_size`` counts prompts, ``micro_batch_size`` completions."""

    fixed_at_construction: ClassVar[tuple[str, ...]] = (
        *DistillationConfig.fixed_at_construction, "teacher_weights", "demonstration",
    )  # fmt: skip

    n: Positive = 8
    """Completions per prompt; at least 2 if samples teach each other."""
    success_threshold: float = 1.0
    """Least reward of a sample that succeeded, and teaches the others of its group."""
    taught: Literal["all", "failed"] = "all"
    """Samples that are taught: all, also a successful one by another that succeeded; or only those that failed."""
    demonstration: str = ""
    """Column of the rows with a text that teaches every sample, in place of samples that succeeded (SDFT); empty:
    none."""
    teacher_weights: Literal["live", "reference"] = "live"
    """Weights of the teacher: the policy's, or the reference's, which are the policy's before training, and follow it
    with ref_sync_steps."""
    reprompt_template: str = "{prompt}{solution}{feedback}\n\nAnswer the question again, and correctly."
    """Text of the teacher's prompt, the last message of a conversation; a part that is missing is empty."""
    solution_template: str = "\n\nA correct answer:\n\n{solution}"
    """Text of {solution}."""
    feedback_template: str = "\n\nAn earlier answer was wrong:\n\n{feedback}"
    """Text of {feedback}."""

    def has_reference(self) -> bool:
        """Whether the teacher has the reference's weights."""
        return self.teacher_weights == "reference"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_reference(self.has_reference())
        if self.divergence == "full" and self.has_reference():
            raise WhetValueError(
                f"{type(self).__name__}: teacher_weights is 'reference', and divergence is 'full', of which the policy "
                f"is the teacher. Set divergence to 'sampled', or teacher_weights to 'live'."
            )
        for name, parts in (
            ("reprompt_template", ("prompt", "solution", "feedback")),
            ("solution_template", ("solution",)),
            ("feedback_template", ("feedback",)),
        ):
            text = getattr(self, name)
            missing = [part for part in parts if f"{{{part}}}" not in text]
            check_range(self, name, not missing, "a text with " + ", ".join(f"{{{part}}}" for part in parts))


@dataclass(kw_only=True)
class BestOfNConfig(RolloutConfig):
    """Settings of BestOfN."""

    n: Positive = 8
    """Candidates per prompt."""
    pad_token_id: _TokenId = None
    """Token that pads shorter rows on the right; None: the tokenizer's padding token, or 0."""


def check_grpo_options(where: str, options: Any) -> None:
    """Validate the options of ``grpo_loss``, an object with fields of ``GRPOConfig``; errors begin with ``where``.

    Raises:
        WhetValueError: an unknown name, a number out of range, or a bound that the loss does not have.
    """
    for name, choices in (("loss_type", GRPOLossType), ("level", RatioLevel), ("kl_estimator", KLEstimator)):
        check_choice(where, name, getattr(options, name), choices)
    loss_type = options.loss_type
    for name, least, unbounded in (
        ("epsilon", 0, ()),
        ("epsilon_high", 0, ("sapo",)),
        ("delta", 1, (*_UNCLIPPED, *_OF_TOKENS)),
        ("off_policy_mask_threshold", 0, ()),
    ):
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise WhetValueError(f"{where}: {name} is {value!r}, expected a number >= {least}.")
        if value is not None and loss_type in unbounded:
            raise WhetValueError(
                f"{where}: {name} is {value!r} and has no effect: {loss_type!r} has no such bound. Pass None."
            )
    if loss_type in _OF_TOKENS and options.level != "token":
        raise WhetValueError(
            f"{where}: level is {options.level!r}, and {loss_type!r} bounds each token. Leave it at 'token'."
        )
