"""Rows and reward functions of a command, from files and functions or from tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from whet.data.rows import tokenize_prompt
from whet.data.sources import read_rows
from whet.errors import WhetValueError
from whet.rewards.functions import load_function
from whet.rollout.episodes import environment_reward
from whet.rollout.judge import Judge
from whet.tasks.code import prepare
from whet.tasks.mixture import Mixture, open_tasks
from whet.tasks.rewards import load_reward
from whet.text.reward_model import RewardModel

_N_EMPTY = 1000
"""Episodes of an epoch without data: environments differ by their seeds."""
_N_CHECKED = 64
"""Number of a task's rows that are checked before the run: some generators take 0.25 s per row."""


def load_rewards(specs: Iterable[str], *, unsafe_local: bool = False) -> list[Callable[..., Any]]:
    """Return the reward functions of a command: by ``load_reward``, or of folders a ``RewardModel``, of .toml files a
    ``Judge``. Programs among them are prepared, see ``whet.tasks.code.prepare``.

    Raises:
        WhetValueError: one of them cannot be loaded.
    """
    return prepare(map(_load_reward, specs), unsafe_local=unsafe_local)


def _load_reward(spec: str) -> Callable[..., Any]:
    if spec.endswith(".toml"):
        return Judge.read(spec)
    return RewardModel(spec) if Path(spec).is_dir() else load_reward(spec)


def load_preference(spec: str) -> Callable[..., Any]:
    """Return a preference function of a command: by ``load_function``, or of a .toml file ``Judge.prefer``.

    Raises:
        WhetValueError: it cannot be loaded.
    """
    return Judge.read(spec).prefer if spec.endswith(".toml") else load_function(spec)


def open_rows(run: Any) -> tuple[Sequence[Any], Sequence[Any], list[Callable[..., Any]]]:
    """Return training rows, held-out rows, and reward functions of a run, with rewards of task or episode first."""
    functions = load_rewards(getattr(run, "reward", []), unsafe_local=getattr(run, "unsafe_local", False))
    if getattr(run, "env", "") or getattr(run, "agent", ""):
        functions.insert(0, environment_reward)
    if not getattr(run, "task", []):
        eval_rows = read_rows(run.eval_data, run.columns) if run.eval_data else []
        rows = read_rows(run.data, run.columns) if run.data or run.needs_rows() else [{}] * _N_EMPTY
        return rows, eval_rows, functions
    tasks = open_tasks(run.task)
    return tasks, _open_held_out(run) if run.eval_items else [], [*tasks.reward_functions(), *functions]


def _open_held_out(run: Any) -> Mixture:
    held_out = open_tasks(run.task, split="eval", size=run.eval_items)
    for task in held_out.tasks:
        if len(task.rows) < run.eval_items:
            raise WhetValueError(
                f"eval_items is {run.eval_items}, but {task.name} has {len(task.rows)} held-out rows. Lower it, add "
                f"rows to the task, or hold out a larger fraction (held_out)."
            )
    return held_out


def check_prompts_fit(limit: int | None, tokenizer: Any, rows: Sequence[Any], where: str) -> None:
    """Raise if prompts among the first rows leave none of the model's ``limit`` positions for a completion.

    Raises:
        WhetValueError: with the number of such prompts and the longest length.
    """
    if limit is None:
        return
    lengths = [(row["task"], len(tokenize_prompt(row, tokenizer))) for row in rows[:_N_CHECKED]]
    too_long = [(task, n) for task, n in lengths if n >= limit]
    if too_long:
        names = ", ".join(dict.fromkeys(task for task, _ in too_long))
        longest = max(n for _, n in too_long)
        raise WhetValueError(
            f"{where}: {len(too_long)} of the first {len(lengths)} prompts do not fit into the model's {limit} "
            f"positions ({names}; the longest has {longest} tokens). Choose task options with shorter prompts, or a "
            f"model with a longer context."
        )
