"""``whet eval``: accuracy of a model on a task's held-out items, or a comparison of two models.

Tables are printed to standard output, everything else to standard error; ``--out`` writes JSON, see docs/evaluation.md.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import UseAppendAction

import whet
from whet.cli.settings import parse_flags
from whet.cli.text_options import EngineSettings, TextConfig
from whet.config.episodes import EpisodeSettings, check_episode_settings
from whet.config.fields import Count, Paths, PathText, Positive, check_range, reject_ineffective
from whet.config.sampling import SamplingParams
from whet.config.settings import Device
from whet.engine import Engine
from whet.errors import WhetValueError
from whet.evaluation import (
    EmptyRows,
    EpisodesResult,
    Estimate,
    RewardedRows,
    TaskResult,
    compare,
    evaluate,
    evaluate_episodes,
    read_items,
)
from whet.evaluation.evaluate import FULL_SCORE
from whet.files import replace_text, temporary_next_to
from whet.models.adapter_files import read_peft_modules
from whet.models.formats import Weights
from whet.models.sources.gguf_container import GGUFFile
from whet.models.sources.pretrained import open_pretrained
from whet.report.page import versions
from whet.report.terminal import terminal_table
from whet.rewards.processes import TIMEOUT_S, check_timeout
from whet.rollout.players import make_player
from whet.runs.rows import load_rewards
from whet.tasks import Task, open_task
from whet.tasks.code import prepare, runs_programs
from whet.tasks.environment import load_environment
from whet.tasks.settings import read_spec
from whet.tasks.tools import load_tools
from whet.text.checkpoint_model import resolve_adapter
from whet.text.model import find_model, find_stop_ids, load_chat_tokenizer, load_engine, longest_sequence

_WHERE = "whet eval"
_NO_ADAPTER = "none"
_SIZE = 500


@dataclasses.dataclass(kw_only=True)
class EvalConfig(TextConfig, EngineSettings, EpisodeSettings):
    """Measure the accuracy of a model on a task's held-out items, or compare two models.

    The flags --weights and --adapter may be given once for all models, or once per model."""

    models: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="MODEL [MODEL]")]
    """Folders that save_pretrained or whet train wrote, also of adapters, or .gguf files. With two, the second is
    compared with the first."""
    task: UseAppendAction[Paths] = dataclasses.field(default_factory=list)
    """reasoning_gym:NAME, package.module:Class or path/file.py:Class, with options as in
    reasoning_gym:chain_sum,max_terms=2; may be given several times."""
    data: Paths = dataclasses.field(default_factory=list)
    """Instead of a task: rows with a prompt. Files (.jsonl, .json, .csv, also with .gz, .parquet), patterns such as
    "rows/*.jsonl", or datasets as NAME:CONFIG:SPLIT."""
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field names and their columns in the data: prompt=question,answer=solution."""
    reward: UseAppendAction[Paths] = dataclasses.field(default_factory=list)
    """Functions that score completions of --data: file.py:function or package.module:function, folders of reward
    models, or .toml files of judges. They get an episode's messages."""
    env: PathText = ""
    """An environment that answers the model's turns and rewards them: file.py:Class or package.module:Class, also in
    TRL's form, or a game, gem:ID or textarena:ID. Without a task or data its rows are empty."""
    tools: UseAppendAction[Paths] = dataclasses.field(default_factory=list)
    """Functions that the model calls: file.py:function,other or package.module:function."""
    success: float = FULL_SCORE
    """Minimum reward of an episode that solves its item."""
    unsafe_local: bool = False
    """Let programs of the model run without a sandbox, as this user, if tools or reward functions run programs
    (whet.tasks.code)."""
    size: int | None = None
    """Number of items per task, of rows, or of episodes without them; None: the task's size option or 500, and all rows
    of --data."""
    n: Annotated[Positive, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of completions per item."""
    temperature: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Divides the logits; 0: greedy. None: 0 for one completion per item, 1 for several."""
    score_timeout_s: float | None = TIMEOUT_S
    """Time limit in seconds for scoring a completion, which then scores 0. None: no limit, the only choice on
    Windows."""
    weights: UseAppendAction[list[Weights]] = dataclasses.field(default_factory=list)
    """Weight format, for all models or for each. Default: the format of the adapters' base, the GGUF file's own format,
    or bf16 for folders."""
    adapter: UseAppendAction[Paths] = dataclasses.field(default_factory=list)
    """A folder of LoRA adapters that PEFT or whet train saved, for all models or for each; "none": no adapters."""
    rollout_workers: Count = 0
    """Number of Ray processes that sample, on one or many machines; 0: this process. Completions are the same."""
    ray_address: str = ""
    """Address of a Ray cluster whose nodes have the models at the same paths; auto: this machine's cluster; empty:
    RAY_ADDRESS, or a new local one."""
    raw: bool = False
    """Use plain-text prompts, without the chat template."""
    out: PathText = ""
    """JSON file to write; must not exist."""
    records: bool = False
    """Also write every item with completions and scores to --out."""

    def sampling(self, stop_token_ids: Sequence[int] = ()) -> SamplingParams:
        default = 1.0 if self.n > 1 else 0.0
        temperature = default if self.temperature is None else self.temperature
        return SamplingParams.from_settings(self, temperature=temperature, stop_token_ids=stop_token_ids)

    def check(self) -> None:
        super().check()
        check_range(self, "size", self.size is None or self.size >= 1, "an integer >= 1")
        check_timeout("whet eval", "score_timeout_s", self.score_timeout_s)
        reject_ineffective(self, ["chat_template"], not self.raw, "raw prompts have no chat template")
        reject_ineffective(
            self, ["ray_address"], self.rollout_workers > 0, "rollout_workers is 0: this process samples"
        )
        reject_ineffective(self, ["columns"], bool(self.data), "there is no data")
        reject_ineffective(self, ["records"], bool(self.out), "there is no out file")
        check_episode_settings(self, has_environment=bool(self.env), has_tools=bool(self.tools))
        reject_ineffective(self, ["success"], self.plays_episodes(), "there are no environment and no tools")
        reject_ineffective(self, ["raw"], not self.plays_episodes(), "episodes need the chat template")
        programs = runs_programs([*self.reward, *self.tools])
        reject_ineffective(self, ["unsafe_local"], programs, "no tool and no reward function runs programs")

    def plays_episodes(self) -> bool:
        """Whether there is an environment, or there are tools."""
        return bool(self.env or self.tools)

    def unused_if_greedy(self) -> list[str]:
        unused = [*super().unused_if_greedy(), "n"]
        return [name for name in unused if name != "seed" or not self.env]  # an environment draws its episodes from it


@dataclasses.dataclass(frozen=True)
class Side:
    """A model to evaluate."""

    model: str
    weights: Weights | None
    adapter: str
    expert_bytes: int
    device: Device

    def label(self, model: str) -> str:
        """Return the label for tables; ``model`` is the model's short name."""
        return " ".join(filter(None, (model, self.weights, self.adapter and f"with {self.adapter}")))


def _make_labels(sides: Sequence[Side]) -> list[str]:
    """Return labels with the last part of each path, or with whole paths if the last parts are ambiguous."""
    paths = {side.model for side in sides}
    short = len({Path(path).name for path in paths}) == len(paths)
    return [side.label(Path(side.model).name if short else side.model) for side in sides]


def main(argv: Sequence[str]) -> int:
    """Print a table per task and return 0."""
    options = parse_flags(EvalConfig, argv, _WHERE)
    options.check()
    sides = _check_options(options)
    resolved = [_resolve(side) for side in sides]
    models = [find_model(side.model, _WHERE) for side in resolved]
    tasks = _open_tasks(options)
    labels = _make_labels(sides)
    results = [_evaluate(options, *each, tasks) for each in zip(resolved, labels, models, strict=True)]
    by_task = [list(pair) for pair in zip(*results, strict=True)]
    comparison = [compare(*pair) for pair in by_task] if len(sides) == 2 else []
    for i, pair in enumerate(by_task):
        _print_table(labels, pair, comparison[i] if comparison else None)
    if options.out:
        replace_text(options.out, json.dumps(_build_report(options, sides, results, comparison), indent=1) + "\n")
    return 0


# --- options ---------------------------------------------------------------------------------------------


def _check_options(options: EvalConfig) -> list[Side]:
    """Return the models if the options are consistent. Loads nothing."""
    if len(options.models) not in (1, 2):
        raise WhetValueError(f"{_WHERE}: expected one model, or two to compare, not {len(options.models)}.")
    if bool(options.task) == bool(options.data) and (options.task or not options.env):
        raise WhetValueError(
            f"{_WHERE}: expected one of --task (such as reasoning_gym:chain_sum) and --data (a file), or --env."
        )
    if bool(options.data) != bool(options.reward) and not (options.env and options.data):
        raise WhetValueError(f"{_WHERE}: --data and --reward go together: rows, and functions that score them.")
    if options.env and options.tools:
        raise WhetValueError(f"{_WHERE}: --env and --tools exclude each other: an environment lists its own tools.")
    if options.out:
        _check_out(Path(options.out))
    weights, adapters = _values_per_model(options, "weights"), _values_per_model(options, "adapter")
    sides = [
        Side(
            model,
            weights[i],
            "" if adapters[i] in (None, _NO_ADAPTER) else adapters[i],
            options.expert_bytes,
            options.device,
        )
        for i, model in enumerate(options.models)
    ]
    if len(sides) == 2 and sides[0] == sides[1]:
        raise WhetValueError(
            f"{_WHERE}: both models are {_make_labels(sides)[0]}. Pass another one, or --weights or --adapter for each."
        )
    return sides


def _resolve(side: Side) -> Side:
    """Return the model and the adapters to load, also for a folder of adapters given as a model."""
    model, adapter = resolve_adapter(side.model, side.adapter, _WHERE)
    return replace(side, model=model, adapter=adapter)


def _check_out(path: Path) -> None:
    """Raise a WhetValueError unless the file can be created."""
    try:
        if path.exists():
            raise WhetValueError(f"{_WHERE}: {path} exists already. Remove it, or choose another file for --out.")
        if not path.absolute().parent.is_dir():
            raise WhetValueError(f"{_WHERE}: there is no folder {str(path.parent)!r} to write {path} to.")
        with temporary_next_to(path, "writing"):
            pass
    except OSError as error:
        raise WhetValueError(
            f"{_WHERE}: {path} cannot be written: {error.strerror}. Choose another file for --out."
        ) from error


def _values_per_model(options: EvalConfig, name: str) -> list[Any]:
    """Return an option's value for each model."""
    given, n = getattr(options, name), len(options.models)
    if len(given) not in {0, 1, n}:
        raise WhetValueError(f"{_WHERE}: --{name} is given {len(given)} times for {n} models, expected 1 or {n} times.")
    return list(given) * n if len(given) == 1 else list(given) or [None] * n


def _open_tasks(options: EvalConfig) -> list[tuple[Task, list[Any]]]:
    """Open the tasks, and generate their rows once for all models."""
    specs = [read_spec(spec) for spec in options.task]
    for settings in specs:
        reject_ineffective(settings, ["weight"], False, "each task is evaluated separately")
    sizes = [options.size or settings.size or _SIZE for settings in specs]
    tasks: list[Task] = [open_task(spec, split="eval", size=n) for spec, n in zip(options.task, sizes, strict=True)]
    if options.data:
        functions = load_rewards(options.reward, unsafe_local=options.unsafe_local)
        tasks = [RewardedRows(options.data, functions, options.columns, is_played=bool(options.env))]
    if not options.data and not options.task:
        tasks = [EmptyRows(options.env, options.size or _SIZE)]
    return [(task, list(task.rows[: options.size])) for task in tasks]


# --- evaluation -----------------------------------------------------------------------------------------


def _evaluate(
    options: EvalConfig,
    side: Side,
    label: str,
    model: str | GGUFFile,
    tasks: Sequence[tuple[Task, list[Any]]],
) -> list[TaskResult]:
    """Load a model, here or in workers, and return its results on all tasks."""
    tokenizer = load_chat_tokenizer(model, _WHERE, options.chat_template, side.adapter, options.tokenizer)
    if options.plays_episodes():
        return _play(options, side, label, model, tokenizer, tasks)
    every = [read_items(task, tokenizer, rows=rows, raw=options.raw, where=_WHERE) for task, rows in tasks]
    longest = max(len(prompt) for items in every for prompt in items.prompt_ids)
    config = open_pretrained(model).config
    for items in every:
        items.check_context(options.max_new_tokens, config.max_position, _WHERE)
    sampling = options.sampling(find_stop_ids(side.model, tokenizer, config.vocab_size, _WHERE))
    with closing(_open_engine(options, side, model, tokenizer, longest + options.max_new_tokens)) as engine:
        results = []
        for items in every:
            with _progress(f"{label}: {items.task.name}", len(items.rows)) as on_item:
                settings = {"n": options.n, "sampling": sampling, "timeout_s": options.score_timeout_s}
                results.append(evaluate(engine, items, tokenizer, on_item=on_item, **settings))
            _print_timing(label, results[-1])
    return results


def _play(
    options: EvalConfig,
    side: Side,
    label: str,
    model: str | GGUFFile,
    tokenizer: Any,
    tasks: Sequence[tuple[Task, list[Any]]],
) -> list[TaskResult]:
    """Load a model, and return its results on the episodes of all tasks."""
    config = open_pretrained(model).config
    stops = find_stop_ids(side.model, tokenizer, config.vocab_size, _WHERE)
    environment = load_environment(options.env) if options.env else None
    tools = prepare(load_tools(options.tools), unsafe_local=options.unsafe_local)
    with closing(_open_engine(options, side, model, tokenizer, None)) as engine:
        longest = longest_sequence(engine) if isinstance(engine, Engine) else config.max_position
        player = make_player(environment, tools, tokenizer, stops, longest, options, _WHERE)
        results: list[TaskResult] = []
        for task, rows in tasks:
            with _progress(f"{label}: {task.name}", len(rows)) as on_item:
                settings: dict[str, Any] = {"n": options.n, "sampling": options.sampling(stops)}
                settings |= {"success": options.success, "timeout_s": options.score_timeout_s}
                results.append(evaluate_episodes(engine, player, task, rows=rows, on_item=on_item, **settings))
            _print_timing(label, results[-1])
    return results


def _open_engine(options: EvalConfig, side: Side, model: str | GGUFFile, tokenizer: Any, n_tokens: int | None) -> Any:
    """Open an engine in this process, or a pool of workers."""
    if not options.rollout_workers:
        return _load(model, side, n_tokens, tokenizer)
    from whet.rollout.ray_pool import RayPool

    remote = replace(side, model=os.path.abspath(side.model), adapter=side.adapter and os.path.abspath(side.adapter))
    load = partial(_load, remote.model, remote, n_tokens, os.path.abspath(options.tokenizer or side.model))
    pool = RayPool(load=load, workers=options.rollout_workers, address=options.ray_address)
    pool.load()  # now, so that loading does not count as time of the first task
    return pool


def _load(model: str | GGUFFile, side: Side, n_tokens: int | None, tokenizer: Any) -> Engine:
    engine = load_engine(
        model, side.weights, n_tokens, _WHERE, side.adapter, expert_bytes=side.expert_bytes, device=side.device
    )
    engine.tokenizer = tokenizer  # for stop strings
    if side.adapter:
        engine.sync(read_peft_modules(side.adapter))
    return engine


@contextmanager
def _progress(text: str, n_items: int) -> Iterator[Callable[[], object]]:
    """Show a progress bar on standard error if that is a terminal; yields the function that advances it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # No refresh thread: scoring forks, and the child could inherit a lock that the thread holds.
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    with bar:
        row = bar.add_task(text, total=n_items)

        def on_item() -> None:
            bar.advance(row)
            bar.refresh()

        yield on_item


def _print_timing(label: str, result: TaskResult) -> None:
    """Print the elapsed time, and a warning if scoring failed."""
    name, n_items = result.items.task.name, len(result.items.rows)
    rate = n_items / result.elapsed_s
    print(f"{label}: {name}, {n_items:,} items in {result.elapsed_s:.1f} s, {rate:.1f} items/s", file=sys.stderr)
    for (i, j), reason in list(result.failures.items())[:1]:
        text = result.texts[i][j]
        print(
            f"whet: warning: {name} could not score {len(result.failures):,} completions, which count as 0; first "
            f"failure: item {i}, {text!r:.80}: {reason}",
            file=sys.stderr,
        )


# --- results -------------------------------------------------------------------------------------------


def _print_table(labels: Sequence[str], results: Sequence[TaskResult], comparison: dict[str, Any] | None) -> None:
    """Print the table of a task: a column per model, and for two models their difference."""
    first = results[0]
    n_items, n = first.scores.shape
    graded, failed = any(r.is_graded for r in results), any(r.failures for r in results)
    rows = [["accuracy", *(_format_percent(r.accuracy) for r in results)]]
    rows += [["score", *(_format_score(r.score) for r in results)]] * graded
    rows += [[f"pass@{k}", *(_format_percent(r.pass_at[k]) for r in results)] for k in first.pass_at if k > 1]
    rows += [["tokens", *(f"{r.summary()['completion_tokens']:.1f}" for r in results)]]
    episodes = [result for result in results if isinstance(result, EpisodesResult)]
    if episodes:
        rows += [["turns", *(_format_score(r.turns, digits=1) for r in episodes)]]
        ends = [end for end in episodes[0].ended_by if any(r.ended_by[end] for r in episodes)]
        rows += [[f"ended by {end}", *(f"{r.ended_by[end]:.1%}" for r in episodes)] for end in ends]
    rows += [["truncated", *(f"{r.summary()['truncated']:.1%}" for r in results)]]
    rows += [["not scored", *(f"{len(r.failures):,}" for r in results)]] * failed
    headers, summary = ["", *labels], ""
    if comparison is not None:
        accuracy, score = (_read_estimate(comparison[f"{name}_difference"]) for name in ("accuracy", "score"))
        differences = {"accuracy": _format_percent(accuracy, "+"), "score": _format_score(score, "+")}
        rows = [[*row, differences.get(row[0], "")] for row in rows]
        headers.append("difference")
        summary = (
            f"The second model is better on {comparison['better']:,} items and worse on {comparison['worse']:,}: "
            f"p = {comparison['p_value']:.2g} (sign test)"
        )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{first.items.task.name}: {n_items:,} items{f', {n} completions each' if n > 1 else ''}")
    console.print(terminal_table(_WHERE, headers, [False] * len(headers), rows), soft_wrap=False)
    console.print(f"{summary}\n" if summary else "")


def _format_percent(estimate: Estimate, sign: str = "") -> str:
    value, low, high = (format(100 * x, f"{sign}.1f") for x in estimate)
    return f"{value}% ({low} to {high})"


def _format_score(estimate: Estimate, sign: str = "", digits: int = 3) -> str:
    value, low, high = (format(x, f"{sign}.{digits}f") for x in estimate)
    return f"{value} ({low} to {high})"


def _read_estimate(figures: dict[str, float | None]) -> Estimate:
    return Estimate(*(math.nan if value is None else value for value in figures.values()))


def _build_report(
    options: EvalConfig,
    sides: Sequence[Side],
    results: Sequence[Sequence[TaskResult]],
    comparison: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return the JSON report that docs/evaluation.md documents."""

    def report_task(result: TaskResult) -> dict[str, Any]:
        return {**result.summary(), **({"records": result.records()} if options.records else {})}

    return {
        "schema": 1,
        "versions": versions(),
        "isa": whet.isa(),
        "n_threads": whet.get_num_threads(),
        "settings": {**dataclasses.asdict(options), "temperature": options.sampling().temperature},
        "models": [
            {**dataclasses.asdict(side), "tasks": [report_task(result) for result in task_results]}
            for side, task_results in zip(sides, results, strict=True)
        ],
        "comparison": list(comparison),
    }
