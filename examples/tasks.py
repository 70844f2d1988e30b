"""A task of one's own: rows, a system prompt, and a score. Whet keeps a tenth of its prompts out of training."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any


class SortLetters:
    """Letters to be written in alphabetical order. ``examples/own_task.toml`` trains on it."""

    name = "sort_letters"
    system_prompt = "Write the letters in alphabetical order, and nothing else."

    def __init__(self, seed: int = 0, size: int = 1000, letters: int = 4) -> None:
        draw = random.Random(seed)
        words = ["".join(draw.choices("abcdefgh", k=letters)) for _ in range(size)]
        self.rows = [{"prompt": [{"role": "user", "content": word}], "answer": "".join(sorted(word))} for word in words]

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """The share of letters that stand where they should."""
        said, right = completion.strip(), row["answer"]
        return sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right))
