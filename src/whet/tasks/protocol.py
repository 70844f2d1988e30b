"""A task as training and evaluation see it, and the rule that keeps its held-out rows out of training.

A row belongs to evaluation if a hash of its prompt says so, and to training if not: not by its seed, as generators of
small items draw the same ones from any seed, and not by a list, which would have to be kept. So no prompt occurs on
both sides, whatever seeds, sizes and options two runs have, as long as they hold out the same share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

Split = Literal["train", "eval"]


class Task(Protocol):
    """Something to do that can be verified.

    A class of a user's own needs these three attributes and one method; ``open_task("file.py:MyTask")`` makes it,
    with ``seed``, ``size`` and options as keywords where they are given, and divides its rows between the splits.
    """

    name: str
    """As it is shown, and the key of its metrics."""
    system_prompt: str
    """Put before each prompt by ``prompt_of``; "": nothing."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Each has ``prompt`` (text, or chat messages) and whatever ``score`` needs.

        ``rows[i]`` is a pure function of i: it may be made when it is asked for, and is the same when asked for again.
        """
        ...

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """How good a completion of ``row`` is, from 0 to 1: right.

        Where the chat template opens the thinking, the completion begins with that tag here, as that of a model which
        writes it itself; ``whet.data.thinking.answer_in`` gives the answer.
        """
        ...


def prompt_of(task: Task, row: Mapping[str, Any]) -> Any:
    """``row["prompt"]`` with the task's system prompt: a first message of chat messages, a paragraph before a text."""
    prompt = row["prompt"]
    if not task.system_prompt:
        return prompt
    if isinstance(prompt, str):
        return f"{task.system_prompt}\n\n{prompt}"
    return [{"role": "system", "content": task.system_prompt}, *prompt]


def split_of(prompt: Any, held_out: float) -> Split:
    """The split that a prompt belongs to.

    Args:
        prompt: without the system prompt.
        held_out: the share of all prompts that are held out, from 0 to 1. With a greater one they stay held out.
    """
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") < held_out * 2**64 else "train"
