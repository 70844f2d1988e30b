"""Training runs: ``train`` trains a model and writes the results into the folder of the run.

    config.toml      the resolved settings: ``whet train METHOD config.toml`` repeats the run
    inputs.json      sizes and digests of the input files, versions of the tasks' packages
    metrics.jsonl    a line per step; completions.jsonl: sampled completions
    checkpoints/     step-000100, ...: the same command resumes from the newest complete one, bitwise identically
    model/           weights, tokenizer, chat template, generation config; for LoRA the adapters,
                     and the digest of the packed base that they are trained on
    memory.json      memory by owner in the step with the highest use, measured and predicted
    README.md        the model card
    report.html      curves, samples, settings; curve.svg: the main curve as a picture

A resumed run has the same metrics, checkpoints and model as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import json
import random
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from whet import _core
from whet.config.algorithms import ALGORITHMS
from whet.config.toml import write_toml
from whet.errors import RowError, WhetError, WhetValueError
from whet.files import replace_text
from whet.models.adapter_files import is_adapter_folder
from whet.models.base_record import read_record
from whet.models.hub import find_on_hub
from whet.models.slots import ModelSource
from whet.models.sources.pretrained import open_pretrained
from whet.rewards.functions import RewardFunctions, load_function
from whet.rollout.choose import reward_functions
from whet.runs.adapters import Plan, plan_adapters
from whet.runs.inputs import check_inputs, describe_failure, read_inputs, write_inputs
from whet.runs.memory import predict_memory
from whet.runs.native import describe_learner, load_learner, uses_learner
from whet.runs.resume import Notify, check_steps, find_checkpoint, last_step_of_pass
from whet.runs.rows import check_prompts_fit, load_preference, open_rows
from whet.runs.save import write_memory, write_results
from whet.runs.settings import RunConfig, lock_folder
from whet.runs.stopping import StoppableCheckpoints
from whet.system.machine import may_have_gpu
from whet.tasks.code import prepare
from whet.tasks.environment import load_environment
from whet.tasks.tools import load_tools
from whet.training.callbacks import CompletionsCallback, EvaluationCallback
from whet.training.distributed import join_ranks, launched_rank, launched_size
from whet.training.loggers import CSVLogger, JSONLLogger, Logger, TensorBoardLogger, WandbLogger
from whet.training.sizes import RunMemory
from whet.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a training run.

    Attributes:
        folder: folder of the run; ``model_folder`` has model, tokenizer and card.
        trainer: the trainer after the last step; ``trainer.model`` is the trained model.
        steps: total number of steps.
        evaluations: metrics on held-out rows by evaluation, each with its ``step``.
        summary: a sentence on the run; empty on ranks other than the first.
    """

    folder: Path
    trainer: Trainer
    steps: int
    evaluations: list[dict[str, float]]
    summary: str = ""

    @property
    def model_folder(self) -> Path:
        """Folder of the model, in the run's folder."""
        return self.folder / "model"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of all steps and evaluations, also from before the run was resumed: the rows of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def train(settings: RunConfig, *, loggers: Sequence[Logger] = (), notify: Notify = lambda text: None) -> RunResult:
    """Train a model, from the start or from the newest checkpoint in ``output_dir``, and write the results there.

    Ctrl-C and SIGTERM stop the run after the current step, with a checkpoint, if this is the main thread.

    Args:
        settings: settings of the run and the algorithm, such as ``SFTRun``; not changed.
        loggers: loggers in addition to ``settings.loggers``, such as a ``ProgressLogger``.
        notify: called with a line of text on the model, on resuming, and on changed settings and inputs.

    Raises:
        WhetValueError: a setting is missing or wrong, or conflicts with the run in the folder.
        FolderInUseError: another process has a run in the folder.
        DiskFullError: the disk is full; previous checkpoints are intact.
        Stopped: a signal stopped the run.
    """
    where = f"whet train {settings.method()}"
    settings.check(where)
    if settings.ranks not in (1, launched_size()):
        raise WhetValueError(f"{where}: ranks is {settings.ranks}, but {launched_size()} were launched. Omit ranks.")
    is_first = launched_rank() == 0
    with lock_folder(settings.output_dir) if is_first else contextlib.nullcontext():  # only rank 0 writes
        return _train(copy.copy(settings), loggers, notify if is_first else lambda text: None)


def _train(run: Any, extra_loggers: Sequence[Logger], notify: Notify) -> RunResult:
    folder, method = Path(run.output_dir), run.method()
    # Rank 0 chooses the checkpoint for all ranks.
    checkpoint, run.base = join_ranks().broadcast_from_first(lambda: (find_checkpoint(run, folder, notify), run.base))
    where, given = f"whet train {method}", run.model
    if run.has_adapters():  # transformers loads others by name
        run.model = find_on_hub(run.model, where, notify)
    plan = plan_adapters(run, _open_source(run, where), where, run.backend != "native" and _has_gpu())
    run.base = plan.base
    is_native = uses_learner(run, plan, where)
    if not is_native:
        run.check_torch(where)
    if plan.floats_reason:
        notify(f"adapters are trained on float weights: {plan.floats_reason}")
    rows, held_out, functions = open_rows(run)
    rewards = reward_functions(run, functions) if functions else None
    inputs = read_inputs(run)
    for note in check_inputs(folder / "inputs.json", inputs, rows) if checkpoint else []:
        notify(note)
    is_one_pass = not run.steps
    run.steps = run.steps or max(1, len(rows) // run.batch_size)

    load = _load_learner if is_native else _load_modules
    model, tokenizer, predicted, size = load(run, plan, rows, held_out, where, notify)
    run.model = given  # the name, by which the same command resumes
    notify(f"{ALGORITHMS[method].class_name} of {run.model}: {size}")
    arguments = {"config": _make_config(method, run), "tokenizer": tokenizer, **_scoring_arguments(run, rewards)}
    if getattr(run, "precompute_reference", False):
        rows, held_out = add_reference_logprobs(ALGORITHMS[method].load(), model, arguments, rows, held_out)

    evaluation = EvaluationCallback(_make_evaluation(run, held_out, rewards), run.eval_every)
    checkpoints = StoppableCheckpoints(folder / "checkpoints", run.checkpoint_every, run.keep_checkpoints, notify)
    arguments["callbacks"] = [
        *([evaluation] if held_out else []),
        *([CompletionsCallback(folder / "completions.jsonl")] if run.samples else []),
        checkpoints,
    ]
    with contextlib.ExitStack() as stack:
        arguments["logger"] = [stack.enter_context(logger) for logger in _make_loggers(run, folder, extra_loggers)]
        trainer = _make_trainer(ALGORITHMS[method].load(), checkpoint, model, arguments)
        if method == "sft" and not checkpoint and trainer.policy.packs_batches:
            notify("rows are packed without padding; none is cut or attends to another")
        if checkpoint and is_one_pass:
            run.steps = last_step_of_pass(trainer, len(rows))
        if checkpoint:
            check_steps(trainer, checkpoint, run.steps, notify)
        if trainer.ranks.is_first:
            write_toml(folder / "config.toml", dataclasses.asdict(run))
            write_inputs(folder / "inputs.json", inputs)
        stack.enter_context(checkpoints)
        try:
            trainer.train(rows, run.steps - trainer.step)
        except RowError as error:
            if trainer.ranks.is_first:
                failure = describe_failure(error, rows, trainer.config.seed, trainer.epoch, trainer.position)
                write_inputs(folder / "inputs.json", inputs | failure)
            raise
    result = RunResult(folder, trainer, run.steps, evaluation.history)
    if not trainer.ranks.is_first:
        return result
    if trainer.memory.fullest is not None:
        write_memory(folder / "memory.json", trainer.memory.fullest, predicted)
        # No further step needs the freed memory, and drawing the report does.
        _core.release_freed_memory(trainer.memory.fullest.parts.get("activations", 0))
    return dataclasses.replace(result, summary=write_results(trainer, run, folder, len(rows), evaluation.history))


def _has_gpu() -> bool:
    if not may_have_gpu() or importlib.util.find_spec("torch") is None:  # importing torch takes a second
        return False
    import torch

    return torch.cuda.is_available()


def _load_learner(
    run: Any, plan: Plan, rows: Sequence[Any], held_out: Sequence[Any], where: str, notify: Notify
) -> tuple[Any, Any, RunMemory | None, str]:
    """Return the learner of a run, its tokenizer, its predicted memory, and a description of its size."""
    model, tokenizer = load_learner(run, plan, where)
    _check_tasks(run, model.base.config.max_position, tokenizer, (rows, held_out), where)
    predicted = predict_memory(run, cast(ModelSource, plan.source), model.base.nbytes, tokenizer, rows)
    _set_seed(run.seed % 2**32)  # NumPy's seeds have 32 bits
    return model, tokenizer, predicted, describe_learner(model)


def _load_modules(
    run: Any, plan: Plan, rows: Sequence[Any], held_out: Sequence[Any], where: str, notify: Notify
) -> tuple[Any, Any, RunMemory | None, str]:
    """Return the modules of torch that a run trains, and the rest as ``_load_learner``."""
    from whet.models.sources.live import open_module
    from whet.nn.frozen import base_of
    from whet.nn.modules import position_limit
    from whet.runs.models import add_adapters, as_reward_model, describe_size, load_model

    base = run.base if run.has_adapters() else "none"
    model, tokenizer = load_model(run.model, run.dtype, base, run.chat_template, notify, run.adapter)
    _check_tasks(run, position_limit(model), tokenizer, (rows, held_out), where)
    parameters, packed, predicted = list(model.parameters()), base_of(model), None
    if all(str(parameter.dtype) == "torch.float32" for parameter in parameters):
        weights = sum(parameter.nbytes for parameter in parameters) + (0 if packed is None else packed.nbytes)
        with contextlib.suppress(WhetError):  # a model that the engine does not support
            predicted = predict_memory(run, open_module(model), weights, tokenizer, rows)
    _set_seed(run.seed % 2**32)
    if run.trains_reward:
        model = as_reward_model(model, tokenizer, where)
    if run.has_adapters():
        model = add_adapters(model, run, plan.record)
    return model, tokenizer, predicted, describe_size(model)


def _check_tasks(run: Any, limit: int | None, tokenizer: Any, parts: Sequence[Sequence[Any]], where: str) -> None:
    if getattr(run, "task", []):
        for part in parts:
            check_prompts_fit(limit, tokenizer, part, where)


def _open_source(run: Any, where: str) -> ModelSource | None:
    """Open the base model of adapters, without reading weights; None: not downloaded, or only supported by torch.

    Raises:
        WhetValueError: the model itself contains adapters.
    """
    path = Path(run.model)
    is_adapter = is_adapter_folder(path)
    record = read_record(path, where) if is_adapter else None
    is_quantised = record is not None and record["is_quantised"]
    if is_adapter and (run.has_adapters() or is_quantised):
        merged = "" if is_quantised else ", or pass lora_rank=0 to train the model with the adapters merged"
        raise WhetValueError(
            f"{where}: {run.model!r} contains adapters. To continue training them, pass their base model as --model, "
            f"and --adapter {run.model}{merged}."
        )
    if not run.has_adapters() or not path.exists():
        return None
    try:
        return open_pretrained(path)
    except WhetValueError:
        if run.base not in ("auto", "none"):
            raise
        return None  # transformers may support it


def _set_seed(seed: int) -> None:
    """Seed every global generator. (``transformers.set_seed`` would import peft, which takes a second.)"""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(seed)


def _make_config(method: str, run: Any) -> Any:
    config_class = ALGORITHMS[method].config
    settings = {field.name: getattr(run, field.name) for field in dataclasses.fields(config_class)}
    if getattr(run, "preference", ""):  # rewards are only for evaluation
        settings = {name: value for name, value in settings.items() if not name.startswith("reward_")}
    return config_class(**settings)


def _scoring_arguments(run: Any, rewards: RewardFunctions | None) -> dict[str, Any]:
    """Return the constructor arguments that score completions, for algorithms that sample."""
    if getattr(run, "preference", ""):
        return {"preference_fn": load_preference(run.preference)}
    episodes: dict[str, Any] = {"environment": load_environment(run.env)} if getattr(run, "env", "") else {}
    episodes |= {"agent": load_function(run.agent)} if getattr(run, "agent", "") else {}
    if tools := getattr(run, "tools", []):
        episodes = {"tools": prepare(load_tools(tools), unsafe_local=run.unsafe_local)}
    if teacher := getattr(run, "teacher", ""):
        episodes = {"teacher": find_on_hub(teacher, f"whet train {run.method()}: teacher")}
    if feedback := getattr(run, "feedback", ""):
        episodes = {"feedback_fn": load_function(feedback)}
    return episodes if rewards is None else {"reward_fn": rewards, **episodes}


def add_reference_logprobs(algorithm: Any, model: Any, arguments: Mapping[str, Any], *parts: Any) -> list[list[Any]]:
    """Return the rows with log-probs of the reference, which is the model before training.

    The trainer that computes them, with a bfloat16 copy of all weights, is freed before the run creates its own.
    """
    reference = algorithm(model, **arguments)
    return [reference.add_reference_logprobs(part) if part else [] for part in parts]


def _make_evaluation(
    run: Any, rows: Sequence[Any], rewards: RewardFunctions | None
) -> Callable[[Any], dict[str, float]]:
    """Return the function that evaluates a trainer on held-out rows."""
    options = {} if rewards is None else {"reward_fn": rewards, "temperature": run.eval_temperature}
    return lambda trainer: trainer.evaluation_metrics(rows, **options)


def _make_loggers(run: Any, folder: Path, extra: Sequence[Logger]) -> list[Logger]:
    makers: dict[str, Callable[[], Logger]] = {
        "csv": lambda: CSVLogger(folder / "metrics.csv"),
        "tensorboard": lambda: TensorBoardLogger(folder / "tensorboard"),
        "wandb": lambda: WandbLogger(
            run.wandb_project,
            name=folder.name,
            dir=str(folder),
            config=dataclasses.asdict(run),
            id=_load_or_create_id(folder / "wandb" / "id.txt"),
            resume="allow",
        ),
    }
    if launched_rank() > 0:
        return []
    return [JSONLLogger(folder / "metrics.jsonl"), *(makers[name]() for name in run.loggers), *extra]


def _load_or_create_id(file: Path) -> str:
    """Return the run's id at Weights & Biases, which a resumed run reuses."""
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        replace_text(file, secrets.token_hex(4))
    return file.read_text(encoding="utf-8").strip()


def _make_trainer(algorithm: type[Trainer], checkpoint: Path | None, model: Any, arguments: dict[str, Any]) -> Trainer:
    if checkpoint is None:
        for logger in arguments["logger"]:
            if hasattr(logger, "truncate_after"):
                logger.truncate_after(-1)  # lines of a run that was killed before its first checkpoint
        return algorithm(model, **arguments)
    return algorithm.from_checkpoint(checkpoint, model, **arguments)
