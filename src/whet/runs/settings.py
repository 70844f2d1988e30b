"""Settings of ``whet train`` and ``whet best-of-n``: a flat dataclass each, of algorithm and run settings.

Docstrings of fields are the help texts of flags. Does not import torch, so that --help is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from whet.config.algorithms import ALGORITHMS
from whet.config.fields import (
    BelowOne,
    Count,
    Paths,
    PathText,
    Positive,
    Range,
    TemperatureOrZero,
    TokenIds,
    check_range,
    reject_ineffective,
)
from whet.config.preferences import (
    CPOConfig,
    DPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    ORPOConfig,
    RewardConfig,
    SimPOConfig,
)
from whet.config.settings import (
    REWARD_SETTINGS,
    BestOfNConfig,
    DistillConfig,
    GRPOConfig,
    KDConfig,
    RAFTConfig,
    RLOOConfig,
    SDPOConfig,
    SFTConfig,
)
from whet.errors import WhetValueError, check_installed
from whet.files import FolderLock
from whet.models.formats import Weights
from whet.models.lora import LoraInit, LoraSettings
from whet.tasks.code import runs_programs
from whet.tasks.settings import format_spec

_Ranks = Annotated[Mapping[str, int], Range("ranks >= 1", lambda ranks: all(rank >= 1 for rank in ranks.values()))]
StoredDtype = Literal["auto", "float32", "bfloat16"]
Base = Literal["auto", "none", "own", Weights]
Columns = Mapping[str, str]
Backend = Literal["auto", "native", "torch"]


ADAPTER_SETTINGS = (
    "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "lora_init", "use_dora",
    "trainable_token_indices", "lora_layers", "modules_to_save",
)  # fmt: skip
"""Settings of new adapters, besides their rank."""


@dataclass(kw_only=True)
class RunConfig:
    """Settings common to all methods of ``whet train``."""

    model: PathText = ""
    """Required: a Hugging Face model folder, a .gguf file, or a name on the hub: owner/name, or owner/name:Q4_K_M for
    a .gguf file."""
    data: Paths = field(default_factory=list)
    """Required: training rows. Files (.jsonl, .json, .csv, also with .gz, .parquet), patterns such as "rows/*.jsonl",
    or datasets as NAME:CONFIG:SPLIT, each a folder or a name on the hub; several are read in order."""
    eval_data: Paths = field(default_factory=list)
    """Held-out rows for evaluation, in the forms of data; empty: none."""
    columns: Columns = field(default_factory=dict)
    """Field names and their columns in the data: prompt=question,completion=answer."""
    output_dir: PathText = ""
    """Required: folder of the run."""
    steps: Count = 0
    """Total number of steps; 0: one pass over the data."""
    dtype: StoredDtype = "float32"
    """Dtype of the weights; auto: as stored. A bfloat16 step runs in torch, slower on the CPU, and takes as much
    memory: the optimizer keeps float32 master weights, so that no update is lost."""
    lora_rank: Count = 0
    """Train LoRA adapters of this rank on the frozen model; 0: full fine-tuning."""
    lora_alpha: Positive = 32
    """Adapter outputs are scaled by lora_alpha / lora_rank."""
    lora_dropout: BelowOne = 0.0
    """Dropout probability of the adapters' inputs in training mode."""
    use_rslora: bool = False
    """Scale adapter outputs by lora_alpha / sqrt(lora_rank) instead (rsLoRA)."""
    rank_pattern: _Ranks = field(default_factory=dict)
    """Ranks of some layers instead of lora_rank, by regular expressions of ends of their names, as in PEFT:
    q_proj=32,layers.[01].mlp.*=4. The first that matches counts."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Values of lora_alpha of some layers, by the same rule."""
    lora_init: LoraInit = "zero"
    """zero: A is random and B is zero. pissa: A B is the principal part of the matrix, which is subtracted from it
    (Meng et al. 2024); saved as a plain adapter of twice the rank."""
    use_dora: bool = False
    """Also train the length of each row of W + B A (DoRA, Liu et al. 2024). In modules of torch it needs
    float weights, in a learner lora_dropout 0."""
    trainable_token_indices: TokenIds = field(default_factory=list)
    """Tokens whose rows of the embedding, and of a tied head, are trained too. Needs torch and float weights."""
    lora_layers: list[str] = field(default_factory=list)
    """Names of the layers that get adapters, which may include embed_tokens and lm_head; empty or all-linear: every
    linear layer except the head."""
    modules_to_save: list[str] = field(default_factory=list)
    """Names of modules that are fully trained, and saved with the adapters."""
    chat_template: PathText = ""
    """A file with a Jinja chat template, which is saved with the model; empty: the one saved with adapter, or else the
    tokenizer's."""
    adapter: PathText = ""
    """A folder of adapters that PEFT or whet train saved, to train further; determines rank, alpha and layers."""
    base: Base = "auto"
    """Format of the packed base model that adapters are trained on and sampled with; none: float weights.

    own: a GGUF file's own format. auto: own for a quantised file, otherwise bf16 or float32, whichever the step's
    products use, so that results do not change; none if adapters, dtype or a GPU need float weights."""
    backend: Backend = "auto"
    """native: a learner trains adapters and norms on packed weights, without torch. torch: modules on Whet's kernels.
    auto: native if adapters of linear layers are trained on the CPU and nothing needs torch."""
    eval_every: Positive = 100
    """Steps between evaluations, in addition to those before the first step and after the last."""
    checkpoint_every: Positive = 100
    """Steps between checkpoints, in addition to that after the last step."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints to keep."""
    ranks: Positive = 1
    """Data-parallel processes on this machine, started by torchrun, which share batch and processors."""
    resume: bool = True
    """Resume from the newest complete checkpoint in output_dir; otherwise, a folder that contains a run is an error."""
    loggers: list[Literal["csv", "tensorboard", "wandb"]] = field(default_factory=list)
    """Loggers in addition to the progress bar and metrics.jsonl."""
    wandb_project: str = "whet"
    """Project name at Weights & Biases."""

    def check(self, where: str) -> None:
        """Check that the run is complete and consistent; ``where`` is the command.

        Raises:
            WhetValueError: names the setting and its flag.
            MissingExtraError: the package of a logger or of LoRA is not installed.
        """
        rows, eval_rows = self.sources()
        check_given(where, self, "model", *([rows] if self.needs_rows() else []), "output_dir")
        check_range(self, "loggers", len(set(self.loggers)) == len(self.loggers), "each logger once")
        self.check_adapters()
        reject_ineffective(self, ["eval_every"], bool(getattr(self, eval_rows)), f"there is no {eval_rows}")
        reject_ineffective(self, ["wandb_project"], "wandb" in self.loggers, "'wandb' is not among loggers")
        for package in (name for name in self.loggers if name != "csv"):
            check_installed(where, package, extra=package)
        if self.backend == "torch" or not self.has_adapters():
            self.check_torch(where)

    def torch_packages(self) -> list[str]:
        """Return the packages that the run needs if modules of torch are trained."""
        return ["torch", "transformers", *(["peft"] if self.has_adapters() else [])]

    def check_torch(self, where: str) -> None:
        """Raise a MissingExtraError for the first of ``torch_packages`` that is not installed."""
        for package in self.torch_packages():
            check_installed(where, package, extra="peft" if package == "peft" else "train")

    def check_adapters(self) -> None:
        """Reject adapter settings that have no effect.

        Raises:
            WhetValueError: names the setting.
        """
        shape = ADAPTER_SETTINGS
        reject_ineffective(self, ["lora_rank", *shape], not self.adapter, "the adapter folder determines it")
        reject_ineffective(self, shape, self.has_adapters(), "lora_rank is 0, so there are no adapters")
        in_training = getattr(self, "training_mode", True)
        reject_ineffective(self, ["lora_dropout"], in_training, "training_mode is off, which disables dropout")
        reject_ineffective(self, ["base"], self.has_adapters(), "lora_rank is 0, so every weight is trained")
        why = f"use_dora is {self.use_dora}, and DoRA's magnitudes are of the whole weight"
        reject_ineffective(self, ["lora_init"], not self.use_dora, why)
        reject_ineffective(self, ["dtype"], self.base in ("auto", "none"), "base determines the format of the weights")

    def method(self) -> str:
        """Return the name of the method in ``whet train METHOD``."""
        return next(name for name, settings in RUNS.items() if isinstance(self, settings))

    def lora_settings(self) -> LoraSettings:
        """Return the settings of new adapters."""
        return LoraSettings(
            self.lora_rank, self.lora_layers, self.modules_to_save, self.rank_pattern, self.alpha_pattern,
            self.lora_init, self.use_dora, self.trainable_token_indices,
        )  # fmt: skip

    def has_adapters(self) -> bool:
        """Whether adapters are trained on a frozen model."""
        return self.lora_rank > 0 or self.adapter != ""

    def needs_rows(self) -> bool:
        """Whether rows have to be given."""
        return True

    def sources(self) -> tuple[str, str]:
        """Return the names of the settings of training rows and of held-out rows."""
        return "data", "eval_data"

    def trained_on(self) -> str:
        """Describe the training rows."""
        return ", ".join(self.data)

    def evaluated_on(self) -> str:
        """Describe the held-out rows; empty if there are none."""
        return ", ".join(self.eval_data)


class _TasksAsTexts:
    """Converts tables of tasks to the text form of flags, before any check."""

    task: Paths

    def __post_init__(self) -> None:
        given: Any = [self.task] if isinstance(self.task, (str, Mapping)) else self.task
        self.task = [format_spec(spec) for spec in given] if isinstance(given, (list, tuple)) else given
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(kw_only=True)
class OnlineRunConfig(RunConfig):
    """Settings common to all methods of ``whet train`` that sample."""

    data: Paths = field(default_factory=list)
    """Training rows; data or task is required. Files (.jsonl, .json, .csv, also with .gz, .parquet), patterns such as
    "rows/*.jsonl", or datasets as NAME:CONFIG:SPLIT, each a folder or a name on the hub; several are read in order."""
    task: Paths = field(default_factory=list)
    """Tasks instead of data and reward: reasoning_gym:NAME, file.py:Class or package.module:Class, with options after
    commas as in reasoning_gym:chain_sum,max_terms=2; in CONFIG.toml also [[task]] tables."""
    eval_items: Count = 0
    """Number of held-out items per task for evaluation, which never occur in training; 0: none."""
    reward: Paths = field(default_factory=list)
    """Reward functions: file.py:function or package.module:function, folders of reward models, or .toml files of
    judges. Options may follow the name of a class: file.py:Class,level=3, or
    whet.rewards.penalties:SoftOverlong,max_length=512,buffer=128."""
    unsafe_local: bool = False
    """Let programs of the model run without a sandbox, as this user, if tools or reward functions run programs
    (whet.tasks.code)."""
    eval_temperature: TemperatureOrZero = 0.0
    """Sampling temperature of evaluations; 0: greedy."""

    def check(self, where: str) -> None:
        super().check(where)
        reject_ineffective(
            self, ["data", "eval_data", "columns"], not self.task, "task provides training and held-out rows"
        )
        reject_ineffective(self, ["eval_items"], bool(self.task), "there is no task; eval_data names held-out rows")
        eval_rows = self.sources()[1]
        reject_ineffective(self, ["eval_temperature"], bool(getattr(self, eval_rows)), f"there is no {eval_rows}")
        programs = runs_programs([*self.reward, *getattr(self, "tools", [])])
        reject_ineffective(self, ["unsafe_local"], programs, "no tool and no reward function runs programs")
        if self.needs_reward():
            check_given(where, self, "reward")
        is_float = self.base in ("auto", "none")
        reject_ineffective(self, ["rollout_weights"], is_float, "base is the format for sampling too")

    def is_scored(self) -> bool:
        """Whether reward functions score completions, in training or evaluation."""
        return True

    def needs_reward(self) -> bool:
        """Whether reward functions have to be given."""
        return self.is_scored() and not self.task

    def sources(self) -> tuple[str, str]:
        return ("task", "eval_items") if self.task else super().sources()

    def trained_on(self) -> str:
        return "; ".join(self.task) or super().trained_on()

    def evaluated_on(self) -> str:
        return f"{self.eval_items:,} held-out items of each task" if self.eval_items else super().evaluated_on()


@dataclass(kw_only=True)
class SFTRun(SFTConfig, RunConfig):
    """Settings of ``whet train sft``."""


@dataclass(kw_only=True)
class DPORun(DPOConfig, RunConfig):
    """Settings of ``whet train dpo``."""


@dataclass(kw_only=True)
class SimPORun(SimPOConfig, RunConfig):
    """Settings of ``whet train simpo``."""


@dataclass(kw_only=True)
class CPORun(CPOConfig, RunConfig):
    """Settings of ``whet train cpo``."""


@dataclass(kw_only=True)
class ORPORun(ORPOConfig, RunConfig):
    """Settings of ``whet train orpo``."""


@dataclass(kw_only=True)
class KTORun(KTOConfig, RunConfig):
    """Settings of ``whet train kto``."""


@dataclass(kw_only=True)
class RewardRun(RewardConfig, RunConfig):
    """Settings of ``whet train reward``."""


@dataclass(kw_only=True)
class EpisodeRunConfig(OnlineRunConfig):
    """Settings common to all methods of ``whet train`` that train on episodes."""

    env: PathText = ""
    """An environment that answers the model's turns and rewards them: file.py:Class or package.module:Class, also in
    TRL's form, or a game, gem:ID or textarena:ID. Options may follow: file.py:Class,level=3. It gets the rows of data
    or task, without them empty ones; reward functions are optional, and get messages."""
    tools: Paths = field(default_factory=list)
    """Functions that the model calls: file.py:function,other or package.module:function. Reward functions get messages,
    and the verifier of a task the last turn."""

    agent: PathText = ""
    """A function (row, server) -> reward that samples by requests to an OpenAI URL, instead of an environment:
    file.py:play or package.module:play. Needs the extra serve."""

    def check(self, where: str) -> None:
        super().check(where)
        if len(given := [name for name in ("env", "tools", "agent") if getattr(self, name)]) > 1:
            raise WhetValueError(
                f"{where}: {' and '.join(given)} are set, and an environment lists its own tools (attribute tools). "
                f"Set one of them."
            )

    def needs_reward(self) -> bool:
        return not (self.env or self.agent) and super().needs_reward()

    def needs_rows(self) -> bool:
        return not (self.env or self.agent)

    def trained_on(self) -> str:
        return super().trained_on() or self.env or self.agent


@dataclass(kw_only=True)
class GRPORun(_TasksAsTexts, GRPOConfig, EpisodeRunConfig):
    """Settings of ``whet train grpo``."""

    def __post_init__(self) -> None:
        self.beta = 0.0 if self.beta is None else self.beta  # a run has no ref_model
        super().__post_init__()


@dataclass(kw_only=True)
class RLOORun(_TasksAsTexts, RLOOConfig, EpisodeRunConfig):
    """Settings of ``whet train rloo``."""


@dataclass(kw_only=True)
class OnlineDPORun(_TasksAsTexts, OnlineDPOConfig, OnlineRunConfig):
    """Settings of ``whet train online-dpo``."""

    preference: PathText = ""
    """A function that judges pairs instead of rewards: file.py:function or package.module:function; or the .toml file
    of a judge."""

    def check(self, where: str) -> None:
        super().check(where)
        rewards = ["reward", *REWARD_SETTINGS]
        why = f"preference judges, and there is no {self.sources()[1]} to score"
        reject_ineffective(self, rewards, self.is_scored(), why)

    def is_scored(self) -> bool:
        return not self.preference or bool(getattr(self, self.sources()[1]))


@dataclass(kw_only=True)
class RAFTRun(_TasksAsTexts, RAFTConfig, OnlineRunConfig):
    """Settings of ``whet train raft``."""


@dataclass(kw_only=True)
class DistillRun(_TasksAsTexts, DistillConfig, OnlineRunConfig):
    """Settings of ``whet train distill``."""

    teacher: PathText = ""
    """Required: a model folder, a .gguf file, or the URL of a server that returns log-probs of prompts, such as
    http://127.0.0.1:8000/v1 of whet serve."""
    reward: Paths = field(default_factory=list)
    """Reward functions for metrics and evaluation; see --reward of whet train grpo --help."""

    def check(self, where: str) -> None:
        super().check(where)
        check_given(where, self, "teacher")
        reject_ineffective(self, REWARD_SETTINGS, self.is_scored(), "there are neither reward functions nor tasks")
        reject_ineffective(self, ["eval_temperature"], self.is_scored(), "nothing scores completions")

    def is_scored(self) -> bool:
        return bool(self.reward or self.task)

    def needs_reward(self) -> bool:
        return False


@dataclass(kw_only=True)
class SDPORun(_TasksAsTexts, SDPOConfig, OnlineRunConfig):
    """Settings of ``whet train sdpo``."""

    feedback: PathText = ""
    """A function that returns a text for each completion, such as the error message of a test, or None:
    file.py:function or package.module:function."""

    def check(self, where: str) -> None:
        super().check(where)
        scores = [*REWARD_SETTINGS, "taught", "success_threshold"]
        reject_ineffective(self, scores, self.is_scored(), "there are neither reward functions nor tasks")
        reject_ineffective(self, ["eval_temperature"], self.is_scored(), "nothing scores completions")

    def is_scored(self) -> bool:
        return bool(self.reward or self.task)

    def needs_reward(self) -> bool:
        return not (self.task or self.feedback or self.demonstration)


@dataclass(kw_only=True)
class KDRun(KDConfig, RunConfig):
    """Settings of ``whet train kd``."""


RUNS: dict[str, type[RunConfig]] = {name: globals()[f"{each.class_name}Run"] for name, each in ALGORITHMS.items()}
"""Settings of each method of ``whet train``: the class ``FooRun`` of the algorithm ``Foo``."""


@dataclass(kw_only=True)
class _BestOfNInputs:
    """Settings of ``whet best-of-n`` in addition to the algorithm's."""

    model: PathText = ""
    """Required: a Hugging Face model folder, a .gguf file, or a name on the hub: owner/name, or owner/name:Q4_K_M for
    a .gguf file."""
    chat_template: PathText = ""
    """A file with a Jinja chat template; empty: the tokenizer's."""
    prompts: Paths = field(default_factory=list)
    """Rows with a prompt; see --data of whet train grpo --help."""
    columns: Columns = field(default_factory=dict)
    """Field names and their columns in the prompts: prompt=question,answer=solution."""
    prompt: str = ""
    """A single prompt instead of prompts."""
    task: Paths = field(default_factory=list)
    """Tasks instead of prompts and reward, see whet train grpo --help; uses their training rows."""
    reward: Paths = field(default_factory=list)
    """Reward functions: file.py:function or package.module:function, folders of reward models, or .toml files of
    judges. Options may follow the name of a class: file.py:Class,level=3, or
    whet.rewards.penalties:SoftOverlong,max_length=512,buffer=128."""
    output: PathText = ""
    """The .jsonl file to write; empty: standard output."""
    all_candidates: bool = False
    """Write every candidate and its score, not only the best."""
    min_score: float | None = None
    """Write only prompts whose best completion has at least this score, as rows for whet train sft (rejection
    sampling); None: every prompt."""
    unsafe_local: bool = False
    """Let programs of the model run without a sandbox, as this user, if reward functions run programs
    (whet.tasks.code)."""
    batch_size: Positive = 8
    """Number of prompts per batch."""
    dtype: StoredDtype = "auto"
    """Dtype of the weights; auto: as stored."""


@dataclass(kw_only=True)
class BestOfNRun(_TasksAsTexts, BestOfNConfig, _BestOfNInputs):
    """Settings of ``whet best-of-n``."""

    def check(self, where: str) -> None:
        """Check that the settings are complete and consistent; ``where`` is the command.

        Raises:
            WhetValueError: names the setting and its flag.
        """
        check_given(where, self, "model", *([] if self.task else ["reward"]))
        reject_ineffective(self, ["columns"], bool(self.prompts), "there are no prompts")
        reject_ineffective(self, ["unsafe_local"], runs_programs(self.reward), "no reward function runs programs")
        if [bool(self.prompts), bool(self.prompt), bool(self.task)].count(True) != 1:
            raise WhetValueError(f"{where}: expected one of --prompts (a file), --prompt (a text) and --task.")


def lock_folder(output_dir: str) -> FolderLock:
    """Create the folder of a run and lock it, until the context that is returned exits.

    Raises:
        WhetValueError: the folder cannot be created.
        FolderInUseError: another process has a run in the folder.
    """
    lock = FolderLock(output_dir)
    try:
        lock.acquire()
    except OSError as error:
        raise WhetValueError(f"output_dir {output_dir!r} cannot be created: {error}.") from error
    return lock


def check_given(where: str, config: Any, *names: str) -> None:
    """Raise a WhetValueError if one of these settings is empty."""
    for name in names:
        if not getattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise WhetValueError(
                f"{where}: {name} is missing. Set it in the config file or with {flag}; --help lists every setting."
            )
