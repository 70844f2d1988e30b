"""Reward functions of the examples. Arguments are passed by name; the result is a score per completion.

Available arguments: ``prompts``, ``completions``, ``completion_ids`` and any column of the data, such as ``answer``.
"""

from __future__ import annotations

import re


def right_answer(completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 if the last number in the completion equals the data's column ``answer``, else 0."""
    return [float(last_number(text) == float(right)) for text, right in zip(completions, answer, strict=True)]


def short(completions: list[str]) -> list[float]:
    """Return 1 for up to 20 words, decreasing linearly to 0 at 60 words; 0 for an empty completion."""
    n_words = [len(text.split()) for text in completions]
    return [min(1.0, max(0.0, (60 - n) / 40)) if n else 0.0 for n in n_words]


def last_number(text: str) -> float | None:
    """Return the last number in a text, such as "1,250.5" or "-3"; None if there is none."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None
