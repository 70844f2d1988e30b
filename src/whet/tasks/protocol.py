"""The interface of tasks, and the rule that keeps held-out rows out of training.

The split of a row is a hash of its prompt. Splitting by seed would leak, because generators of small items repeat them
with any seed, and a list of held-out rows would have to be stored. No prompt occurs in both splits, for any seeds,
sizes and options of two runs, if they hold out the same fraction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

Split = Literal["train", "eval"]


class Task(Protocol):
    """Prompts with verifiable answers.

    A custom class needs these three attributes and one method. ``open_task("file.py:MyTask")`` constructs it, with
    ``seed``, ``size`` and options as keywords if they are set, and splits its rows.
    """

    name: str
    """Display name, and key of its metrics."""
    system_prompt: str
    """Text that ``make_prompt`` puts before each prompt; "": none."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Rows with ``prompt`` (text or chat messages) and the fields that ``score`` needs.

        ``rows[i]`` is a pure function of i, and may be generated on access.
        """
        ...

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return the score of a completion of ``row``, from 0 (wrong) to 1 (right).

        If the chat template opens the thinking, the completion begins with the opening tag, as if the model had
        generated it. ``whet.data.thinking.answer_in`` returns the answer.
        """
        ...


def make_prompt(task: Task, row: Mapping[str, Any]) -> Any:
    """Return ``row["prompt"]`` with the task's system prompt as first message, or as first paragraph of a text."""
    prompt = row["prompt"]
    if not task.system_prompt:
        return prompt
    if isinstance(prompt, str):
        return f"{task.system_prompt}\n\n{prompt}"
    return [{"role": "system", "content": task.system_prompt}, *prompt]


def assign_split(prompt: Any, held_out: float) -> Split:
    """Return the split of a prompt.

    Args:
        prompt: the prompt without system prompt.
        held_out: fraction of prompts that are held out, from 0 to 1. Raising it only adds held-out prompts.
    """
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") < held_out * 2**64 else "train"
