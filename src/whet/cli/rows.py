"""The rows of a command that samples, and the functions that score them: files and functions, or tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from whet.data.rows import tokenize_prompt
from whet.data.sources import read_rows
from whet.errors import WhetValueError
from whet.nn.modules import position_limit
from whet.rewards.functions import load_function
from whet.tasks.mixture import Mixture, open_tasks

_LOOKED_AT = 64
"""Rows of a task whose length is known before the run: some generators take a quarter of a second for one."""


def open_rows(run: Any) -> tuple[Sequence[Any], Sequence[Any], list[Callable[..., Any]]]:
    """Rows to train on, held-out rows, and reward functions of a ``whet train``; those of its tasks come first."""
    functions = [load_function(spec) for spec in getattr(run, "reward", [])]
    if not getattr(run, "task", []):
        held_out = read_rows(run.eval_data, run.columns) if run.eval_data else []
        return read_rows(run.data, run.columns), held_out, functions
    tasks = open_tasks(run.task)
    return tasks, _held_out(run) if run.eval_items else [], [*tasks.reward_functions(), *functions]


def _held_out(run: Any) -> Mixture:
    held_out = open_tasks(run.task, split="eval", size=run.eval_items)
    for task in held_out.tasks:
        if len(task.rows) < run.eval_items:
            raise WhetValueError(
                f"eval_items is {run.eval_items}, and {task.name} has {len(task.rows)} held-out rows. Ask for fewer, "
                f"give the task more rows, or hold out a greater share (held_out)."
            )
    return held_out


def check_prompts_fit(model: nn.Module, tokenizer: Any, rows: Sequence[Any], where: str) -> None:
    """Refuse rows, of which the first are looked at, whose prompts leave the model no position to continue at.

    Raises:
        WhetValueError: how many of how many, and the longest.
    """
    limit = position_limit(model)
    if limit is None:
        return
    lengths = [(row["task"], len(tokenize_prompt(row, tokenizer))) for row in rows[:_LOOKED_AT]]
    too_long = [(task, n) for task, n in lengths if n >= limit]
    if too_long:
        names = ", ".join(dict.fromkeys(task for task, _ in too_long))
        longest = max(n for _, n in too_long)
        raise WhetValueError(
            f"{where}: {len(too_long)} of the first {len(lengths)} prompts do not fit into the model's {limit} "
            f"positions ({names}; the longest has {longest} tokens). Choose options that make shorter ones, or a "
            f"model with a longer context."
        )
