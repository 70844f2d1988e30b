"""The settings of the commands: for each one flat dataclass, the algorithm's config and the run's.

The fields' own words are the flags' help. Does not import torch, so that --help is quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from whet.config.fields import (
    BelowOne,
    Count,
    Paths,
    PathText,
    Positive,
    TemperatureOrZero,
    check_range,
    reject_ineffective,
)
from whet.config.settings import BestOfNConfig, DPOConfig, GRPOConfig, OnlineDPOConfig, SFTConfig
from whet.errors import WhetValueError, check_installed
from whet.files import FolderLock
from whet.models.formats import Weights
from whet.tasks.settings import spec_text

StoredDtype = Literal["auto", "float32", "bfloat16"]
Base = Literal["auto", "none", "own", Weights]
Columns = Mapping[str, str]


@dataclass(kw_only=True)
class RunConfig:
    """Settings of every ``whet train``."""

    model: PathText = ""
    """Required: a folder with a Hugging Face model, a .gguf file, or a name on the hub."""
    data: Paths = field(default_factory=list)
    """Required: rows to train on. Files (.jsonl, .json, .csv, these with .gz, .parquet), patterns such as
    "rows/*.jsonl", or datasets as NAME:CONFIG:SPLIT, each a folder or a name on the hub; several are read in order."""
    eval_data: Paths = field(default_factory=list)
    """Rows that only measure, likewise; empty: none."""
    columns: Columns = field(default_factory=dict)
    """Columns of the data under the names of fields: prompt=question,completion=answer."""
    output_dir: PathText = ""
    """Required: where the run is left."""
    steps: Count = 0
    """Steps in all; 0: one pass over the data."""
    dtype: StoredDtype = "float32"
    """Of the weights; auto: as they are stored. In bfloat16 torch computes the step, which is slower on the CPU; the
    optimizer keeps float32 masters, so that no update is lost and weights and optimizer take the same memory."""
    lora_rank: Count = 0
    """Train adapters of this rank beside the frozen model; 0: train the model itself."""
    lora_alpha: Positive = 32
    """The adapters' output is multiplied by this and divided by their rank."""
    lora_dropout: BelowOne = 0.0
    """Share of the adapters' inputs that is dropped in training mode."""
    use_rslora: bool = False
    """Divide the adapters' output by the root of their rank (rsLoRA), not by the rank."""
    lora_layers: list[str] = field(default_factory=list)
    """Names of the layers that get adapters, embed_tokens and lm_head among them; empty or all-linear: every linear
    layer but the head."""
    modules_to_save: list[str] = field(default_factory=list)
    """Names of modules that are trained whole, beside adapters, and saved with them."""
    chat_template: PathText = ""
    """A file with a Jinja chat template, which is saved with the model; empty: the tokenizer's."""
    adapter: PathText = ""
    """A folder of adapters that PEFT or whet train saved, to go on with; it says rank, alpha and layers itself."""
    base: Base = "auto"
    """Format in which the model beside adapters is packed, once, to train on and to sample from; none: float weights.

    own: a GGUF file's own. auto: that, of a quantised file; else bf16 where products are bfloat16, and float32 where
    they are not: the numbers that are multiplied anyway. Where adapters, dtype or a GPU need float weights, none."""
    eval_every: Positive = 100
    """Steps between evaluations; there is one before the first step and one after the last in any case."""
    checkpoint_every: Positive = 100
    """Steps between checkpoints; there is one after the last step in any case."""
    keep_checkpoints: Positive = 2
    """Number of checkpoints to keep, the newest ones."""
    ranks: Positive = 1
    """Processes that train together on this machine, started by torchrun: each has its share of the batch and of the
    processors."""
    resume: bool = True
    """Continue from the newest whole checkpoint in output_dir; if not, a folder that holds a run is refused."""
    loggers: list[Literal["csv", "tensorboard", "wandb"]] = field(default_factory=list)
    """Loggers beside the progress bar and metrics.jsonl."""
    wandb_project: str = "whet"
    """The project's name at Weights & Biases."""

    def check(self, where: str) -> None:
        """Refuse a run that lacks something; ``where`` is the command.

        Raises:
            WhetValueError: naming the setting and its flag.
            MissingExtraError: a logger or LoRA without its package.
        """
        rows, measured = self.sources()
        check_given(where, self, "model", rows, "output_dir")
        check_range(self, "loggers", len(set(self.loggers)) == len(self.loggers), "each of them once")
        self.check_adapters()
        reject_ineffective(self, ["eval_every"], bool(getattr(self, measured)), f"there is no {measured}")
        reject_ineffective(self, ["wandb_project"], "wandb" in self.loggers, "'wandb' is not among loggers")
        for package in [*(name for name in self.loggers if name != "csv"), *(["peft"] if self.has_adapters() else [])]:
            check_installed(where, package, extra=package)

    def check_adapters(self) -> None:
        """Refuse settings of adapters that have no effect.

        Raises:
            WhetValueError: naming the setting.
        """
        shape = ["lora_alpha", "lora_dropout", "use_rslora", "lora_layers", "modules_to_save"]
        reject_ineffective(self, ["lora_rank", *shape], not self.adapter, "adapter names a folder that says it itself")
        reject_ineffective(self, shape, self.has_adapters(), "lora_rank is 0, and there are no adapters")
        in_training = getattr(self, "training_mode", True)
        reject_ineffective(self, ["lora_dropout"], in_training, "training_mode is off, in which nothing is dropped")
        reject_ineffective(self, ["base"], self.has_adapters(), "lora_rank is 0, and every weight is trained")
        reject_ineffective(self, ["dtype"], self.base in ("auto", "none"), "base is the format of the weights")

    def has_adapters(self) -> bool:
        """Whether adapters are trained beside a frozen model."""
        return self.lora_rank > 0 or self.adapter != ""

    def sources(self) -> tuple[str, str]:
        """The settings that name the rows to train on, and those that only measure."""
        return "data", "eval_data"

    def trained_on(self) -> str:
        """The rows to train on, in words."""
        return ", ".join(self.data)

    def evaluated_on(self) -> str:
        """The rows that only measure, in words; empty: there are none."""
        return ", ".join(self.eval_data)


class _TasksAsTexts:
    """Before any check, tables of tasks become texts, as flags have them."""

    task: Paths

    def __post_init__(self) -> None:
        given: Any = [self.task] if isinstance(self.task, (str, Mapping)) else self.task
        self.task = [spec_text(spec) for spec in given] if isinstance(given, (list, tuple)) else given
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(kw_only=True)
class OnlineRunConfig(RunConfig):
    """Settings of every ``whet train`` that samples."""

    data: Paths = field(default_factory=list)
    """Rows to train on, this or task is required. Files (.jsonl, .json, .csv, these with .gz, .parquet), patterns such
    as "rows/*.jsonl", or datasets as NAME:CONFIG:SPLIT, each a folder or a name on the hub; several are read in
    order."""
    task: Paths = field(default_factory=list)
    """Tasks in place of data and reward: reasoning_gym:NAME, file.py:Class or package.module:Class, options after
    commas as in reasoning_gym:chain_sum,max_terms=2; in CONFIG.toml also [[task]] tables."""
    eval_items: Count = 0
    """Items of each task that only measure, none of which occurs in training; 0: none."""
    reward: Paths = field(default_factory=list)
    """Functions that score: file.py:function or package.module:function."""
    eval_temperature: TemperatureOrZero = 0.0
    """Of the completions that evaluation samples; 0: always the most probable token."""

    def check(self, where: str) -> None:
        super().check(where)
        reject_ineffective(
            self, ["data", "eval_data", "columns"], not self.task, "task brings rows to train and to evaluate on"
        )
        reject_ineffective(self, ["eval_items"], bool(self.task), "there is no task; eval_data names evaluation rows")
        measured = self.sources()[1]
        reject_ineffective(self, ["eval_temperature"], bool(getattr(self, measured)), f"there is no {measured}")
        is_float = self.base in ("auto", "none")
        reject_ineffective(self, ["rollout_weights"], is_float, "base is packed for sampling too")

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
class GRPORun(_TasksAsTexts, GRPOConfig, OnlineRunConfig):
    """Settings of ``whet train grpo``."""

    def __post_init__(self) -> None:
        self.beta = 0.0 if self.beta is None else self.beta  # a run has no ref_model
        super().__post_init__()

    def check(self, where: str) -> None:
        super().check(where)
        if not self.task:
            check_given(where, self, "reward")


@dataclass(kw_only=True)
class OnlineDPORun(_TasksAsTexts, OnlineDPOConfig, OnlineRunConfig):
    """Settings of ``whet train online-dpo``."""

    preference: PathText = ""
    """A function that judges pairs in place of the rewards: file.py:function or package.module:function."""

    def check(self, where: str) -> None:
        super().check(where)
        measured = self.sources()[1]
        scored = not self.preference or bool(getattr(self, measured))
        if scored and not self.task:
            check_given(where, self, "reward")
        rewards = ["reward", "reward_weights", "reward_policy", "reward_timeout_s"]
        reject_ineffective(self, rewards, scored, f"preference judges, and there is no {measured} to score")


RUNS: dict[str, type[RunConfig]] = {"sft": SFTRun, "dpo": DPORun, "grpo": GRPORun, "online-dpo": OnlineDPORun}


@dataclass(kw_only=True)
class _BestOfNInputs:
    """Settings of ``whet best-of-n`` that are not the algorithm's."""

    model: PathText = ""
    """Required: a folder with a Hugging Face model, a .gguf file, or a name on the hub."""
    chat_template: PathText = ""
    """A file with a Jinja chat template; empty: the tokenizer's."""
    prompts: Paths = field(default_factory=list)
    """Rows with a prompt each, see data of whet train grpo --help."""
    columns: Columns = field(default_factory=dict)
    """Columns of the prompts under the names of fields: prompt=question,answer=solution."""
    prompt: str = ""
    """A single prompt, in place of prompts."""
    task: Paths = field(default_factory=list)
    """Tasks in place of prompts and reward, see whet train grpo --help; their rows to train on."""
    reward: Paths = field(default_factory=list)
    """Functions that score: file.py:function or package.module:function."""
    output: PathText = ""
    """The .jsonl file to write; empty: print."""
    all_candidates: bool = False
    """Give every candidate and its score, not only the best."""
    batch_size: Positive = 8
    """Prompts to sample for at a time."""
    dtype: StoredDtype = "auto"
    """Of the weights; auto: as they are stored."""


@dataclass(kw_only=True)
class BestOfNRun(_TasksAsTexts, BestOfNConfig, _BestOfNInputs):
    """Settings of ``whet best-of-n``."""

    def check(self, where: str) -> None:
        """Refuse a command that lacks something; ``where`` is the command.

        Raises:
            WhetValueError: naming the setting and its flag.
        """
        check_given(where, self, "model", *([] if self.task else ["reward"]))
        reject_ineffective(self, ["columns"], bool(self.prompts), "there are no prompts, whose columns they are")
        if [bool(self.prompts), bool(self.prompt), bool(self.task)].count(True) != 1:
            raise WhetValueError(f"{where}: expected one of --prompts (a file), --prompt (a text) and --task.")


def lock_folder(output_dir: str) -> FolderLock:
    """The folder of a run, made and locked until it ends; to be used as a context.

    Raises:
        WhetValueError: it cannot be made.
        FolderInUseError: another process has a run in it.
    """
    lock = FolderLock(output_dir)
    try:
        lock.acquire()
    except OSError as error:
        raise WhetValueError(f"output_dir {output_dir!r} cannot be made: {error}.") from error
    return lock


def check_given(where: str, config: Any, *names: str) -> None:
    """Refuse a config in which one of these is empty."""
    for name in names:
        if not getattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise WhetValueError(
                f"{where}: {name} is missing. Set it in the config file or with {flag}; --help lists every setting."
            )
