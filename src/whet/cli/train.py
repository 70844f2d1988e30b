"""``whet train``: trains a model and writes the results into the folder of the run.

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
import dataclasses
import errno
import json
import os
import random
import secrets
import signal
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet import _core
from whet.algorithms.dpo import DPO
from whet.algorithms.grpo import GRPO
from whet.algorithms.online_dpo import OnlineDPO
from whet.algorithms.sft import SFT
from whet.checkpoint.folder import latest_checkpoint, step_folder
from whet.cli.adapters import plan_adapters
from whet.cli.card import render_run_card
from whet.cli.inputs import check_inputs, describe_failure, read_inputs, write_inputs
from whet.cli.models import ADAPTERS, add_adapters, describe_size, load_model, system_errors
from whet.cli.rows import check_prompts_fit, open_rows
from whet.cli.run_memory import predict_memory
from whet.cli.runs import OnlineRunConfig
from whet.cli.settings import read_toml, write_toml
from whet.config.settings import learning_rate_at
from whet.errors import DiskFullError, RowError, WhetValueError
from whet.files import disk_full_errors, force_to_disk, replace_text, temporary_next_to
from whet.memory import MemoryReport
from whet.models.base_record import read_record
from whet.models.slots import ModelSource
from whet.models.sources.pretrained import open_pretrained
from whet.report.run import write_report
from whet.rewards.functions import RewardFunctions, load_function
from whet.rollout.choose import reward_functions
from whet.training.callbacks import CheckpointCallback, CompletionsCallback, EvaluationCallback
from whet.training.distributed import join_ranks, launched_rank
from whet.training.launch import is_over
from whet.training.loggers import CSVLogger, JSONLLogger, Logger, ProgressLogger, TensorBoardLogger, WandbLogger
from whet.training.sizes import RunMemory
from whet.training.trainer import Trainer

ALGORITHMS: dict[str, type[Trainer]] = {"sft": SFT, "dpo": DPO, "grpo": GRPO, "online-dpo": OnlineDPO}

_IDENTITY = (
    "model", "data", "columns", "task", "seed", "dtype", "base", "adapter", "lora_rank", "lora_alpha", "lora_dropout",
    "use_rslora", "lora_layers", "modules_to_save", "chat_template",
)  # fmt: skip
"""Settings that a resumed run cannot change. Changes of others are printed, except those in _SILENT."""

_SILENT = (
    "output_dir", "steps", "resume", "loggers", "wandb_project", "checkpoint_every", "keep_checkpoints",
    "eval_data", "eval_items", "eval_every", "eval_temperature",
)  # fmt: skip
"""Settings that do not affect a step, whose changes are not printed; for steps, see ``_report_schedule``."""


def main(method: str, run: Any) -> int:
    """Train with the settings ``run``, from the start or from the newest checkpoint. The caller locks the folder."""
    try:
        return _train(method, run)
    except DiskFullError as error:
        raise DiskFullError(error.errno or errno.ENOSPC, f"{error} The same command resumes the run.") from error


def _train(method: str, run: Any) -> int:
    folder = Path(run.output_dir)
    # Rank 0 chooses the checkpoint for all ranks.
    checkpoint, run.base = join_ranks().broadcast_from_first(lambda: (_find_checkpoint(run, folder), run.base))
    where = f"whet train {method}"
    plan = plan_adapters(run, _open_source(run, where), where, torch.cuda.is_available())
    run.base = plan.base
    if plan.floats_reason:
        _print_once(f"adapters are trained on float weights: {plan.floats_reason}")
    rows, held_out, functions = open_rows(run)
    rewards = reward_functions(run, functions) if functions else None
    inputs = read_inputs(run)
    for note in check_inputs(folder / "inputs.json", inputs, rows) if checkpoint else []:
        _print_once(note)
    is_one_pass = not run.steps
    run.steps = run.steps or max(1, len(rows) // run.batch_size)

    model, tokenizer = load_model(run.model, run.dtype, run.base if run.has_adapters() else "none", run.chat_template)
    if getattr(run, "task", []):
        for part in (rows, held_out):
            check_prompts_fit(model, tokenizer, part, where)
    predicted = predict_memory(method, run, model, tokenizer, rows)
    _set_seed(run.seed % 2**32)  # NumPy's seeds have 32 bits
    if run.has_adapters():
        model = add_adapters(model, run, plan.record)
    _print_once(f"{ALGORITHMS[method].__name__} of {run.model}: {describe_size(model)}")
    arguments = {"config": _make_config(method, run), "tokenizer": tokenizer, **_scoring_arguments(run, rewards)}
    if getattr(run, "precompute_reference", False):
        rows, held_out = add_reference_logprobs(model, arguments, rows, held_out)

    evaluation = EvaluationCallback(_make_evaluation(run, held_out, rewards), run.eval_every)
    checkpoints = StoppableCheckpoints(folder / "checkpoints", run.checkpoint_every, run.keep_checkpoints)
    arguments["callbacks"] = [
        *([evaluation] if held_out else []),
        *([CompletionsCallback(folder / "completions.jsonl")] if isinstance(run, OnlineRunConfig) else []),
        checkpoints,
    ]
    with contextlib.ExitStack() as stack:
        arguments["logger"] = [stack.enter_context(logger) for logger in _make_loggers(method, run, folder)]
        trainer = _make_trainer(ALGORITHMS[method], checkpoint, model, arguments)
        if checkpoint and is_one_pass:
            run.steps = _last_step_of_pass(trainer, len(rows))
        if checkpoint:
            _check_steps(trainer, checkpoint, run.steps)
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
    if not trainer.ranks.is_first:
        return 0
    if trainer.memory.fullest is not None:
        _write_memory(folder / "memory.json", trainer.memory.fullest, predicted)
        # No further step needs the freed memory, and drawing the report does.
        _core.release_freed_memory(trainer.memory.fullest.parts.get("activations", 0))
    _finish(trainer, run, folder, len(rows), evaluation.history)
    return 0


def _open_source(run: Any, where: str) -> ModelSource | None:
    """Open the base model of adapters, without reading weights; None: not downloaded, or only supported by torch.

    Raises:
        WhetValueError: the model itself contains adapters.
    """
    path = Path(run.model)
    is_adapter = (path / ADAPTERS).is_file()
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
    torch.manual_seed(seed)


def _print_once(text: str) -> None:
    if launched_rank() == 0:
        print(text, flush=True)


def _find_checkpoint(run: Any, folder: Path) -> Path | None:
    """Return the newest complete checkpoint if the run resumes; check the settings against the saved ones."""
    file = folder / "config.toml"
    if not _has_steps(folder):  # an error before the first step, such as an invalid row
        return None
    if not run.resume:
        if file.exists():
            raise WhetValueError(
                f"{folder} contains a run, and resume is off. Choose another output_dir, or remove the folder."
            )
        return None
    checkpoint = latest_checkpoint(folder / "checkpoints")
    now = dataclasses.asdict(run)
    # Runs from before packed bases had none. "auto" is resolved once, when the run begins.
    saved = {"base": "none" if run.has_adapters() else "auto", **_read_settings(file, now)} if file.exists() else now
    if run.base == "auto":
        run.base = now["base"] = saved["base"]
    # Settings that the run's version of Whet lacked have their default.
    before = {**dataclasses.asdict(type(run)()), **saved}
    changed = [name for name in now if name not in _SILENT and before[name] != _normalise(now[name])]
    for name in changed:
        if name in _IDENTITY:
            raise WhetValueError(
                f"{folder} contains a run with {name} = {before[name]!r}, but {name} is now {now[name]!r}. Choose "
                f"another output_dir, or restore {name}."
            )
    for name in changed if checkpoint else []:
        _print_once(f"{name} changes from {before[name]!r} to {now[name]!r}")
    return checkpoint


def _has_steps(folder: Path) -> bool:
    """Whether a run in the folder has finished a step: there are checkpoints, or metrics of a step."""
    if any((folder / "checkpoints").glob("step-*")):
        return True
    metrics = folder / "metrics.jsonl"
    return metrics.is_file() and '"learning_rate"' in metrics.read_text(encoding="utf-8")


def _read_settings(file: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings of a run; a single path may be a string instead of a list."""
    saved = read_toml(file)
    return {
        name: [value] if isinstance(now.get(name), list) and isinstance(value, str) else value
        for name, value in saved.items()
    }


def _normalise(value: Any) -> Any:
    """Return a setting as TOML stores it: the keys of tables are strings."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


def _make_config(method: str, run: Any) -> Any:
    config_class = ALGORITHMS[method].config_class
    settings = {field.name: getattr(run, field.name) for field in dataclasses.fields(config_class)}
    if getattr(run, "preference", ""):  # rewards are only for evaluation
        settings = {name: value for name, value in settings.items() if not name.startswith("reward_")}
    return config_class(**settings)


def _scoring_arguments(run: Any, rewards: RewardFunctions | None) -> dict[str, Any]:
    """Return the constructor arguments that score completions, for algorithms that sample."""
    if getattr(run, "preference", ""):
        return {"preference_fn": load_function(run.preference)}
    return {} if rewards is None else {"reward_fn": rewards}


def add_reference_logprobs(model: Any, arguments: Mapping[str, Any], *parts: Any) -> list[list[Any]]:
    """Return the rows with log-probs of the reference, which is the model before training.

    The trainer that computes them, with a bfloat16 copy of all weights, is freed before the run creates its own.
    """
    reference = DPO(model, **arguments)
    return [reference.add_reference_logprobs(part) if part else [] for part in parts]


def _make_evaluation(
    run: Any, rows: Sequence[Any], rewards: RewardFunctions | None
) -> Callable[[Any], dict[str, float]]:
    """Return the function that evaluates a trainer on held-out rows."""
    options = {} if rewards is None else {"reward_fn": rewards, "temperature": run.eval_temperature}
    return lambda trainer: trainer.evaluation_metrics(rows, **options)


def _make_loggers(method: str, run: Any, folder: Path) -> list[Logger]:
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
    loggers = [JSONLLogger(folder / "metrics.jsonl"), *(makers[name]() for name in run.loggers)]
    return [*loggers, ProgressLogger(description=method)]


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


def _last_step_of_pass(trainer: Trainer, n_rows: int) -> int:
    """Return the last step of the first pass over the rows, which may have begun with another batch size."""
    n_remaining = n_rows - trainer.position if trainer.epoch == 0 else 0
    return trainer.step + max(0, n_remaining // trainer.config.batch_size)


def _check_steps(trainer: Trainer, checkpoint: Path, steps: int) -> None:
    if trainer.step > steps:
        raise WhetValueError(f"{checkpoint} is beyond steps = {steps}. Choose another output_dir, or more steps.")
    _print_once(f"resuming from {checkpoint}")
    _report_schedule(trainer, steps)


def _report_schedule(trainer: Trainer, steps: int) -> None:
    """Print a note if a decaying learning rate ends at other steps than the run (at the most steps so far)."""
    end, config = trainer.schedule_end, trainer.config
    if config.lr_schedule == "constant" or config.schedule_steps or end == steps:
        return
    effect = "the rate does not reach 0"
    if steps > end:
        before, now = (learning_rate_at(trainer.step, config, last) for last in (end, steps))
        effect = f"the next learning rate is {now:.3g} instead of {before:.3g}"
    _print_once(
        f"the {config.lr_schedule} schedule was made for {end} steps, and steps is {steps}: {effect}. To keep it, set "
        f"schedule_steps"
    )


class Stopped(KeyboardInterrupt):
    """A run ended by a signal."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number


class StoppableCheckpoints(CheckpointCallback):
    """Writes checkpoints also when an error ends the run and, within its context, after the current step on Ctrl-C or
    SIGTERM.

    A second signal ends the run at once, without a checkpoint.

    Raises:
        Stopped: when the checkpoint is complete.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> None:
        self._signal: int | None = None
        self._process = os.getpid()
        self._previous_handlers = {number: signal.signal(number, self._stop) for number in self._SIGNALS}

    def __exit__(self, *exception: object) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: object) -> None:
        if os.getpid() != self._process:  # a fork by a reward function, such as a pool of workers
            self._restore_handlers()
            os.kill(os.getpid(), number)
        elif self._signal is None:
            self._signal = number
            if is_over():  # torchrun ends this rank because of another rank's error
                return
            # Not print, which is not reentrant.
            os.write(2, b"\nstopping after this step, with a checkpoint; repeat the signal to stop at once\n")
        else:
            raise Stopped(number)

    def on_step_end(self, trainer: Any, metrics: MutableMapping[str, float]) -> None:
        super().on_step_end(trainer, metrics)
        self._stop_if_signalled(trainer)

    def on_train_end(self, trainer: Any) -> None:
        super().on_train_end(trainer)
        self._stop_if_signalled(trainer)

    def on_train_failure(self, trainer: Any, error: Exception) -> None:
        super().on_train_failure(trainer, error)
        checkpoint = step_folder(self.folder, trainer.step)
        if checkpoint.is_dir():
            _print_once(f"wrote {checkpoint}; the same command resumes from it once the cause is fixed")

    def _stop_if_signalled(self, trainer: Any) -> None:
        # A signal may reach ranks in different steps, or only one rank: all stop after the same step.
        signals = [number for number in trainer.ranks.all_gather(self._signal) if number is not None]
        if signals:
            super().on_train_end(trainer)
            _print_once(f"wrote {step_folder(self.folder, trainer.step)}; the same command resumes from it")
            raise Stopped(signals[0])


def _save_model(trainer: Trainer, folder: Path) -> None:
    """Write model and tokenizer via a temporary folder, so that a full disk leaves the existing files intact."""
    size_bytes = sum(parameter.nbytes for parameter in trainer.model.parameters())
    with disk_full_errors(folder, size_bytes), temporary_next_to(folder, "saving", folder=True) as temporary:
        with system_errors():
            trainer.save_pretrained(temporary)
        folder.mkdir(exist_ok=True)
        for file in temporary.iterdir():
            force_to_disk(file)
            os.replace(file, folder / file.name)


def _write_memory(file: Path, fullest: MemoryReport, predicted: RunMemory | None) -> None:
    """Write the memory of the step with the highest use, by part in bytes, and its prediction."""
    parts = {} if predicted is None else predicted.at_peak()
    figures = {"measured": fullest.parts, "resident": fullest.resident, "peak": fullest.peak, "predicted": parts}
    replace_text(file, json.dumps(figures, indent=2) + "\n")


def _finish(trainer: Trainer, run: Any, folder: Path, n_rows: int, evaluations: list[dict[str, float]]) -> None:
    """Write model, card and report, and print a summary."""
    name = type(trainer).__name__
    card = render_run_card(name, run, n_rows, trainer.num_tokens, evaluations)
    _save_model(trainer, folder / "model")
    for path in (folder / "README.md", folder / "model" / "README.md"):
        replace_text(path, card)
    summary = f"{name} of {run.model} on {run.trained_on()}, {run.steps:,} steps"
    write_report(folder, title=f"{name}: {folder.resolve().name}", summary=f"{summary}.")
    if evaluations:
        metric = next(name for name in evaluations[-1] if name != "step")
        summary += f", held-out {metric} {evaluations[0][metric]:.4g} -> {evaluations[-1][metric]:.4g}"
    _print_once(f"{summary}: the model is in {folder / 'model'}, the report in {folder / 'report.html'}")
