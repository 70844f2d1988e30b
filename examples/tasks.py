"""Custom task: rows, a system prompt, and a score. Whet withholds a tenth of its prompts from training."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any


class SortLetters:
    """Write letters in alphabetical order. ``examples/custom_task.toml`` trains on this task."""

    name = "sort_letters"
    system_prompt = "Write the letters in alphabetical order, and nothing else."

    def __init__(self, seed: int = 0, size: int = 1000, letters: int = 4) -> None:
        draw = random.Random(seed)
        words = ["".join(draw.choices("abcdefgh", k=letters)) for _ in range(size)]
        self.rows = [{"prompt": [{"role": "user", "content": word}], "answer": "".join(sorted(word))} for word in words]

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return the share of letters at the right position."""
        text, right = completion.strip(), row["answer"]
        return sum(a == b for a, b in zip(text, right, strict=False)) / max(len(text), len(right))
