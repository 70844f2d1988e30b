"""Valid and invalid user tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Doubles:
    """Numbers to be doubled."""

    name = "doubles"
    system_prompt = "Double it."

    def __init__(self, seed: int = 0, size: int = 40, factor: int = 2) -> None:
        self.rows = [{"prompt": str(i), "answer": str(factor * i)} for i in range(seed, seed + size)]

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        return float(completion == row["answer"])


class Chats(Doubles):
    """Numbers to be doubled, as chat messages."""

    name = "chats"

    def __init__(self) -> None:
        super().__init__()
        self.rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in self.rows]


class NoScore:
    name, system_prompt, rows = "no_score", "", ()


class NoPrompt(Doubles):
    def __init__(self) -> None:
        self.rows = [{"question": "1"}]


class OddPrompt(Doubles):
    def __init__(self) -> None:
        self.rows = [{"prompt": [{"role": "user", "content": {1, 2}}]}]


class TokenPrompt(Doubles):
    def __init__(self) -> None:
        self.rows = [{"prompt": [5, 6]}]


class HalfPrompt(Doubles):
    def __init__(self) -> None:
        self.rows = [{"prompt": "\ud800"}]
