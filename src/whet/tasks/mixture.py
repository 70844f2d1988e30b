"""Several tasks as one data set with reward functions, with rows interleaved by weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.data.messages import text_of, tool_calls
from whet.tasks.choose import open_task
from whet.tasks.protocol import Split, Task, make_prompt
from whet.tasks.settings import read_spec


class Mixture(Sequence[dict[str, Any]]):
    """The rows of several tasks, interleaved by weight.

    Task t has a fraction w_t / sum(w) of the ``len(self)`` rows, evenly spaced. Every row of every task occurs; rows of
    a task with more weight than rows are repeated. Row i is a pure function of i.

    A row has the fields of the task's row, ``prompt`` with the system prompt, ``task`` (the name) and ``item`` (the
    task's row).

    Args:
        tasks: one or more tasks.
        weights: a weight per task.

    Attributes:
        names: unique names of the tasks; repeated names get a suffix: "name_2", ...
    """

    def __init__(self, tasks: Sequence[Task], weights: Sequence[float]) -> None:
        self.tasks = list(tasks)
        self.names = _make_unique([task.name for task in tasks])
        shares = np.array(weights, np.float64) / sum(weights)
        n_rows = max(len(task.rows) / share for task, share in zip(tasks, shares, strict=True))
        # Row j of a task has the position (j + 1/2) / share.
        counts = np.ceil(shares * n_rows - 1e-9).astype(int)
        positions = np.concatenate([(np.arange(n) + 0.5) / share for n, share in zip(counts, shares, strict=True)])
        order = np.argsort(positions, kind="stable")
        self._task = np.repeat(np.arange(len(counts)), counts)[order]
        self._row = np.concatenate([np.arange(n) for n in counts])[order]

    def __len__(self) -> int:
        return len(self._task)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        which = self._task[i]
        task = self.tasks[which]
        row = task.rows[int(self._row[i]) % len(task.rows)]
        return {**row, "prompt": make_prompt(task, row), "task": self.names[which], "item": row}

    def reward_functions(self) -> list[Callable[..., list[float | None]]]:
        """Return a function per task, with its name, that scores the task's rows and returns None for others."""
        return [_reward_function(name, task) for name, task in zip(self.names, self.tasks, strict=True)]


def open_tasks(specs: Sequence[str | Mapping[str, Any]], *, split: Split = "train", size: int | None = None) -> Mixture:
    """Open the tasks that texts or tables name; see ``open_task`` for the arguments and errors.

    Weights apply to training only: each evaluation row occurs once.
    """
    tasks = [open_task(spec, split=split, size=size) for spec in specs]
    if split == "eval":
        return Mixture(tasks, [len(task.rows) for task in tasks])
    return Mixture(tasks, [read_spec(spec).weight for spec in specs])


def _reward_function(own_name: str, own_task: Task) -> Callable[..., list[float | None]]:
    def score(
        completions: Sequence[Any],
        task: Sequence[str],
        item: Sequence[Any],
        opening_tag: Sequence[str] | None = None,
    ) -> list[float | None]:
        tags = [""] * len(completions) if opening_tag is None else opening_tag
        scored = zip(completions, tags, task, item, strict=True)
        return [
            own_task.score(prepend_tag(final_answer(completion), tag), row) if name == own_name else None
            for completion, tag, name, row in scored
        ]

    score.__name__ = own_name
    return score


def final_answer(completion: Any) -> Any:
    """Return a completion, or of an episode's messages the text of the last turn; "" if that turn called tools."""
    if not isinstance(completion, list):
        return completion
    last = next((message for message in reversed(completion) if message["role"] == "assistant"), {})
    return "" if tool_calls(last) else text_of(last)


def prepend_tag(completion: Any, opening_tag: str) -> Any:
    """Return a completion with the opening tag of thinking, if the prompt ends with that tag."""
    return f"{opening_tag}{completion}" if opening_tag else completion


def _make_unique(names: Sequence[str]) -> list[str]:
    return [f"{name}_{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names)]
