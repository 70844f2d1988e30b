"""Reward functions of the examples. Each gets by name what it asks for, and returns a score per completion.

They may ask for ``prompts``, ``completions``, ``completion_ids`` and any column of the data, such as ``answer``.
"""

from __future__ import annotations

import re


def right_answer(completions: list[str], answer: list[str]) -> list[float]:
    """1 where the last number in the completion is the one in the data's column ``answer``, else 0."""
    return [float(last_number(text) == float(right)) for text, right in zip(completions, answer, strict=True)]


def short(completions: list[str]) -> list[float]:
    """1 up to 20 words, then less, down to 0 at 60 words; and 0 for a completion without a word."""
    n_words = [len(text.split()) for text in completions]
    return [min(1.0, max(0.0, (60 - n) / 40)) if n else 0.0 for n in n_words]


def last_number(text: str) -> float | None:
    """The last number in a text, "1,250.5" or "-3" for instance; None if there is none."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None
