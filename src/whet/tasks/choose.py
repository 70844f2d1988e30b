"""Opens tasks by name: data sets of reasoning-gym, or classes in a user's module or file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from whet.config.fields import reject_ineffective
from whet.data.messages import is_messages
from whet.errors import WhetTypeError, WhetValueError
from whet.rewards.functions import load_function
from whet.tasks.protocol import Split, Task, assign_split
from whet.tasks.reasoning_gym import PREFIX, ReasoningGymTask
from whet.tasks.settings import TaskSettings, read_spec


def open_task(spec: str | Mapping[str, Any], *, split: Split = "train", size: int | None = None) -> Task:
    """Open the task that a text or table names, with the rows of one split.

    Args:
        spec: "reasoning_gym:chain_sum,max_terms=2"; or a table with the fields of ``TaskSettings`` and options.
        split: "train" or "eval". No prompt occurs in both, for any seeds and sizes, if ``held_out`` is the same.
        size: number of rows, overrides ``spec``; for a user's task the maximum.

    Raises:
        WhetTypeError, WhetValueError: as for ``read_spec``; the task does not exist, rejects these settings, has no
            rows in this split, or is not a ``Task``.
        MissingExtraError: reasoning-gym is not installed.
    """
    settings = read_spec(spec)
    if split not in ("train", "eval"):
        raise WhetValueError(f"open_task: split is {split!r}, expected 'train' or 'eval'.")
    if settings.name.startswith(PREFIX):
        return ReasoningGymTask(settings if size is None else dataclasses.replace(settings, size=size), split)
    return UserTask(settings, split, size)


class UserTask:
    """A user's task with the rows of one split; each row is checked once, in the constructor."""

    def __init__(self, settings: TaskSettings, split: Split, size: int | None) -> None:
        reject_ineffective(
            settings, ["partial_credit"], False, "it is for reasoning_gym, and the task computes its own score"
        )
        task = _make_task(settings)
        self.name = task.name
        self.system_prompt = task.system_prompt if settings.system_prompt is None else settings.system_prompt
        self.score = task.score
        self.rows = _UserRows(task, split, settings.held_out, size)


class _UserRows(Sequence[Mapping[str, Any]]):
    """The rows of a task that belong to one split."""

    def __init__(self, task: Task, split: Split, held_out: float, size: int | None) -> None:
        self._rows = task.rows
        prompts = (_check_prompt(task, i) for i in range(len(task.rows)))
        self._indices = [i for i, prompt in enumerate(prompts) if assign_split(prompt, held_out) == split][:size]
        if not self._indices:
            raise WhetValueError(
                f"open_task: none of the {len(task.rows)} rows of {task.name} belongs to {split!r} with held_out = "
                f"{held_out:g}."
            )

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, i: Any) -> Any:
        return [self._rows[k] for k in self._indices[i]] if isinstance(i, slice) else self._rows[self._indices[i]]


def _check_prompt(task: Task, i: int) -> Any:
    row = task.rows[i]
    if not isinstance(row, Mapping) or "prompt" not in row:
        raise WhetTypeError(f"open_task: rows[{i}] of {task.name} is {row!r:.60}, expected a dict with a prompt.")
    prompt = row["prompt"]
    try:
        if not (isinstance(prompt, str) or is_messages(prompt)):
            raise TypeError(f"it is a {type(prompt).__name__}")
        json.dumps(prompt, ensure_ascii=False).encode()  # the split hashes it
    except (TypeError, ValueError) as error:
        raise WhetTypeError(
            f"open_task: rows[{i}] of {task.name} has the prompt {prompt!r:.60}, expected text or chat "
            f"messages: {error}."
        ) from error
    return prompt


def _make_task(settings: TaskSettings) -> Task:
    given = {name: getattr(settings, name) for name in ("seed", "size") if getattr(settings, name) is not None}
    make = load_function(settings.name)
    try:
        task = make(**given, **settings.options)
    except TypeError as error:
        raise WhetTypeError(f"open_task: {settings.name} rejects these options: {error}.") from error
    missing = [name for name in ("name", "system_prompt", "rows", "score") if not hasattr(task, name)]
    if missing:
        raise WhetTypeError(f"open_task: {settings.name} has no {', '.join(missing)}, which a task needs.")
    for attribute, is_valid, expected in (
        ("name", isinstance(task.name, str), "a text"),
        ("system_prompt", isinstance(task.system_prompt, (str, type(None))), 'a text, or "" for none'),
        ("rows", hasattr(task.rows, "__len__") and hasattr(task.rows, "__getitem__"), "a sequence"),
        ("score", callable(task.score), "a method (completion, row) -> float"),
    ):
        if not is_valid:
            value = getattr(task, attribute)
            raise WhetTypeError(f"open_task: {attribute} of {settings.name} is {value!r:.60}, expected {expected}.")
    return task
