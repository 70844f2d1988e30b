"""``whet eval``: the share of a task's held-out items that a model solves; of two models also which is better.

Tables go to standard output, all else to standard error; ``--out`` writes a JSON file, see docs/evaluation.md.
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
from whet.cli.text_model import TextConfig, find_model, load_chat_tokenizer, load_engine, stop_ids, with_adapters
from whet.config.fields import Paths, PathText, check_range, reject_ineffective
from whet.config.sampling import SamplingParams
from whet.engine import Engine
from whet.errors import WhetValueError
from whet.evaluation import Estimate, RewardedRows, TaskResult, compare, evaluate, read_items
from whet.files import replace_text, temporary_next_to
from whet.models.adapter_files import read_peft
from whet.models.formats import Weights
from whet.models.sources.gguf_container import GGUFFile
from whet.models.sources.pretrained import open_pretrained
from whet.report.page import versions
from whet.report.terminal import terminal_table
from whet.rewards.functions import load_function
from whet.tasks import Task, open_task
from whet.tasks.settings import read_spec

_WHERE = "whet eval"
_NO_ADAPTER = "none"
_SIZE = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(TextConfig):
    """Measures what share of a task's held-out items a model solves; of two models also which is better.

    Options that say so may be given once for all models, or once for each."""

    models: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="MODEL [MODEL]")]
    """Folders that save_pretrained or whet train wrote, adapters too, or .gguf files. Of two, the second is compared
    with the first."""
    task: UseAppendAction[Paths] = dataclasses.field(default_factory=list)
    """reasoning_gym:NAME, package.module:Class or path/file.py:Class, with options as in
    reasoning_gym:chain_sum,max_terms=2; may be given several times."""
    data: Paths = dataclasses.field(default_factory=list)
    """In place of a task: rows with a prompt each. Files (.jsonl, .json, .csv, these with .gz, .parquet), patterns such
    as "rows/*.jsonl", or datasets as NAME:CONFIG:SPLIT."""
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Columns of the data under the names of fields: prompt=question,answer=solution."""
    reward: UseAppendAction[Paths] = dataclasses.field(default_factory=list)
    """Functions that score completions of data: file.py:function or package.module:function."""
    size: int | None = None
    """Items of each task, or rows of data; None: as the task's options say, or else 500, and all rows of data."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Completions of each item."""
    temperature: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Divides the logits; 0: always the most probable token. None: 0, and with several completions 1."""
    score_timeout_s: float = 10.0
    """Seconds that scoring a completion may take; it then scores 0."""
    weights: UseAppendAction[list[Weights]] = dataclasses.field(default_factory=list)
    """Format of the matrices, for all models or for each; none: bf16 of a folder, of a GGUF file its own, and beside
    adapters that of their base."""
    adapter: UseAppendAction[Paths] = dataclasses.field(default_factory=list)
    """A folder of LoRA adapters that PEFT or whet train saved, for all models or for each; "none": without."""
    rollout_workers: int = 0
    """Processes that sample, by Ray, on this machine or many; 0: this one. Completions are the same."""
    ray_address: str = ""
    """Of the Ray cluster, whose nodes have the models in the same places, auto for the one that this machine belongs
    to; empty: RAY_ADDRESS, or one of its own."""
    raw: bool = False
    """Ask in plain text, though there is a chat template."""
    out: PathText = ""
    """A JSON file to write, which must not be there yet."""
    records: bool = False
    """Write every item, its completions and their scores there too."""

    def sampling(self, stop_token_ids: Sequence[int] = ()) -> SamplingParams:
        usual = 1.0 if self.n > 1 else 0.0
        temperature = usual if self.temperature is None else self.temperature
        return SamplingParams.from_settings(self, temperature=temperature, stop_token_ids=stop_token_ids)

    def check(self) -> None:
        check_range(self, "n", self.n >= 1, "an integer >= 1")
        super().check()
        check_range(self, "size", self.size is None or self.size >= 1, "an integer >= 1")
        check_range(self, "score_timeout_s", 0 < self.score_timeout_s < math.inf, "seconds > 0")
        check_range(self, "rollout_workers", self.rollout_workers >= 0, "an integer >= 0")
        reject_ineffective(self, ["chat_template"], not self.raw, "raw asks without one")
        reject_ineffective(
            self, ["ray_address"], self.rollout_workers > 0, "rollout_workers is 0: this process samples"
        )
        reject_ineffective(self, ["columns"], bool(self.data), "there is no data, whose columns they are")
        reject_ineffective(self, ["records"], bool(self.out), "there is no file (--out) to write them to")

    def unused_if_greedy(self) -> list[str]:
        return [*super().unused_if_greedy(), "n"]


@dataclasses.dataclass(frozen=True)
class Side:
    """A model as it is evaluated."""

    model: str
    weights: Weights | None
    adapter: str

    def label(self, model: str) -> str:
        """As tables have it, ``model`` being its name there."""
        return " ".join(filter(None, (model, self.weights, self.adapter and f"with {self.adapter}")))


def _labels(sides: Sequence[Side]) -> list[str]:
    """The models by the last part of their paths, unless different ones have the same."""
    paths = {side.model for side in sides}
    short = len({Path(path).name for path in paths}) == len(paths)
    return [side.label(Path(side.model).name if short else side.model) for side in sides]


def main(argv: Sequence[str]) -> int:
    """Prints a table per task; the exit status is 0."""
    asked = parse_flags(EvalConfig, argv, _WHERE)
    asked.check()
    sides = _check(asked)
    loaded = [_resolve(side) for side in sides]
    models = [find_model(side.model, _WHERE) for side in loaded]
    tasks = _open_tasks(asked)
    labels = _labels(sides)
    results = [_evaluate(asked, *each, tasks) for each in zip(loaded, labels, models, strict=True)]
    by_task = [list(pair) for pair in zip(*results, strict=True)]
    comparison = [compare(*pair) for pair in by_task] if len(sides) == 2 else []
    for i, pair in enumerate(by_task):
        _print(labels, pair, comparison[i] if comparison else None)
    if asked.out:
        replace_text(asked.out, json.dumps(_report(asked, sides, results, comparison), indent=1) + "\n")
    return 0


# --- what is asked --------------------------------------------------------------------------------------


def _check(asked: EvalConfig) -> list[Side]:
    """The models, if what is asked makes sense; nothing is loaded."""
    if len(asked.models) not in (1, 2):
        raise WhetValueError(f"{_WHERE}: expected one model, or two to compare; there are {len(asked.models)}.")
    if bool(asked.task) == bool(asked.data):
        raise WhetValueError(f"{_WHERE}: expected one of --task (such as reasoning_gym:chain_sum) and --data (a file).")
    if bool(asked.data) != bool(asked.reward):
        raise WhetValueError(f"{_WHERE}: --data and --reward come together: rows, and functions that score them.")
    if asked.out:
        _check_out(Path(asked.out))
    weights, adapters = _for_each(asked, "weights"), _for_each(asked, "adapter")
    sides = [
        Side(model, weights[i], "" if adapters[i] in (None, _NO_ADAPTER) else adapters[i])
        for i, model in enumerate(asked.models)
    ]
    if len(sides) == 2 and sides[0] == sides[1]:
        raise WhetValueError(
            f"{_WHERE}: both models are {_labels(sides)[0]}. Name another one, or give --weights or --adapter for each."
        )
    return sides


def _resolve(side: Side) -> Side:
    """The model and the adapters that are loaded, where a folder of adapters was named as a model."""
    model, adapter = with_adapters(side.model, side.adapter, _WHERE)
    return Side(model, side.weights, adapter)


def _check_out(path: Path) -> None:
    """Raise a WhetValueError unless a file can be made there."""
    try:
        if path.exists():
            raise WhetValueError(f"{_WHERE}: {path} is there already. Remove it, or choose another file for --out.")
        if not path.absolute().parent.is_dir():
            raise WhetValueError(f"{_WHERE}: there is no folder {str(path.parent)!r} to write {path} to.")
        with temporary_next_to(path, "writing"):
            pass
    except OSError as error:
        raise WhetValueError(
            f"{_WHERE}: {path} cannot be written: {error.strerror}. Choose another file for --out."
        ) from error


def _for_each(asked: EvalConfig, name: str) -> list[Any]:
    """An option's value for each model."""
    given, n = getattr(asked, name), len(asked.models)
    if len(given) not in {0, 1, n}:
        raise WhetValueError(f"{_WHERE}: --{name} is given {len(given)} times for {n} models. Give one, or {n}.")
    return list(given) * n if len(given) == 1 else list(given) or [None] * n


def _open_tasks(asked: EvalConfig) -> list[tuple[Task, list[Any]]]:
    """The tasks, and their rows, which are generated once for all models."""
    every = [read_spec(spec) for spec in asked.task]
    for settings in every:
        reject_ineffective(settings, ["weight"], False, "each task is evaluated for itself")
    sizes = [asked.size or settings.size or _SIZE for settings in every]
    tasks: list[Task] = [open_task(spec, split="eval", size=n) for spec, n in zip(asked.task, sizes, strict=True)]
    if asked.data:
        tasks = [RewardedRows(asked.data, [load_function(spec) for spec in asked.reward], asked.columns)]
    return [(task, list(task.rows[: asked.size])) for task in tasks]


# --- the work -------------------------------------------------------------------------------------------


def _evaluate(
    asked: EvalConfig,
    side: Side,
    label: str,
    model: str | GGUFFile,
    tasks: Sequence[tuple[Task, list[Any]]],
) -> list[TaskResult]:
    """The results of a model, which is in memory meanwhile, here or in the workers."""
    tokenizer = load_chat_tokenizer(asked.tokenizer or model, _WHERE, asked.chat_template)
    every = [read_items(task, tokenizer, rows=rows, raw=asked.raw, where=_WHERE) for task, rows in tasks]
    longest = max(len(prompt) for items in every for prompt in items.prompt_ids)
    config = open_pretrained(model).config
    for items in every:
        items.check_context(asked.max_new_tokens, config.max_position, _WHERE)
    sampling = asked.sampling(stop_ids(side.model, tokenizer, config.vocab_size, _WHERE))
    with closing(_open_engine(asked, side, model, tokenizer, longest + asked.max_new_tokens)) as engine:
        results = []
        for items in every:
            with _progress(f"{label}: {items.task.name}", len(items.rows)) as on_item:
                settings = {"n": asked.n, "sampling": sampling, "timeout_s": asked.score_timeout_s}
                results.append(evaluate(engine, items, tokenizer, on_item=on_item, **settings))
            _say(label, results[-1])
    return results


def _open_engine(asked: EvalConfig, side: Side, model: str | GGUFFile, tokenizer: Any, n_tokens: int) -> Any:
    """In this process, or those of a pool."""
    if not asked.rollout_workers:
        return _load(model, side, n_tokens, tokenizer)
    from whet.rollout.ray_pool import RayPool

    there = replace(side, model=os.path.abspath(side.model), adapter=side.adapter and os.path.abspath(side.adapter))
    load = partial(_load, there.model, there, n_tokens, os.path.abspath(asked.tokenizer or side.model))
    pool = RayPool(load=load, workers=asked.rollout_workers, address=asked.ray_address)
    pool.load()  # now, as its time is not that of the first task
    return pool


def _load(model: str | GGUFFile, side: Side, n_tokens: int, tokenizer: Any) -> Engine:
    engine = load_engine(model, side.weights, n_tokens, _WHERE, side.adapter)
    engine.tokenizer = tokenizer  # for stop strings
    if side.adapter:
        engine.sync(read_peft(side.adapter))
    return engine


@contextmanager
def _progress(text: str, n_items: int) -> Iterator[Callable[[], object]]:
    """A bar on standard error where that is a terminal; what moves it on."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # No thread that refreshes it: what scores is forked, and could inherit a lock that the thread holds.
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    with bar:
        row = bar.add_task(text, total=n_items)

        def on_item() -> None:
            bar.advance(row)
            bar.refresh()

        yield on_item


def _say(label: str, result: TaskResult) -> None:
    """The time that it took, and why scoring failed if it did."""
    name, n_items = result.items.task.name, len(result.items.rows)
    rate = n_items / result.elapsed_s
    print(f"{label}: {name}, {n_items:,} items in {result.elapsed_s:.1f} s, {rate:.1f} items/s", file=sys.stderr)
    for (i, j), why in list(result.failures.items())[:1]:
        text = result.texts[i][j]
        print(
            f"whet: warning: {name} could not score {len(result.failures):,} completions, which count as 0; the first "
            f"is of item {i}, {text!r:.80}: {why}",
            file=sys.stderr,
        )


# --- what is found --------------------------------------------------------------------------------------


def _print(labels: Sequence[str], results: Sequence[TaskResult], comparison: dict[str, Any] | None) -> None:
    """The table of a task: a column per model, and one of differences."""
    first = results[0]
    n_items, n = first.scores.shape
    graded, failed = any(r.is_graded for r in results), any(r.failures for r in results)
    rows = [["accuracy", *(_percent(r.accuracy) for r in results)]]
    rows += [["score", *(_figure(r.score) for r in results)]] * graded
    rows += [[f"pass@{k}", *(_percent(r.pass_at[k]) for r in results)] for k in first.pass_at if k > 1]
    rows += [["tokens", *(f"{r.summary()['completion_tokens']:.1f}" for r in results)]]
    rows += [["cut off", *(f"{r.summary()['truncated']:.1%}" for r in results)]]
    rows += [["not scored", *(f"{len(r.failures):,}" for r in results)]] * failed
    headers, summary = ["", *labels], ""
    if comparison is not None:
        accuracy, score = (_estimate(comparison[f"{name}_difference"]) for name in ("accuracy", "score"))
        differences = {"accuracy": _percent(accuracy, "+"), "score": _figure(score, "+")}
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


def _percent(estimate: Estimate, sign: str = "") -> str:
    value, low, high = (format(100 * x, f"{sign}.1f") for x in estimate)
    return f"{value}% ({low} to {high})"


def _figure(estimate: Estimate, sign: str = "") -> str:
    value, low, high = (format(x, f"{sign}.3f") for x in estimate)
    return f"{value} ({low} to {high})"


def _estimate(found: dict[str, float | None]) -> Estimate:
    return Estimate(*(math.nan if value is None else value for value in found.values()))


def _report(
    asked: EvalConfig,
    sides: Sequence[Side],
    results: Sequence[Sequence[TaskResult]],
    comparison: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """As docs/evaluation.md describes it."""

    def of(result: TaskResult) -> dict[str, Any]:
        return {**result.summary(), **({"records": result.records()} if asked.records else {})}

    return {
        "schema": 1,
        "versions": versions(),
        "isa": whet.isa(),
        "n_threads": whet.get_num_threads(),
        "settings": {**dataclasses.asdict(asked), "temperature": asked.sampling().temperature},
        "models": [
            {**dataclasses.asdict(side), "tasks": [of(result) for result in every]}
            for side, every in zip(sides, results, strict=True)
        ],
        "comparison": list(comparison),
    }
