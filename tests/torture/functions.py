"""Reward functions: one that is well behaved, and those of ``rewards.py`` that are not."""

from __future__ import annotations


def share(completions, answer):
    """Something between 0 and 1 that tells completions apart."""
    return [sum(map(ord, text)) % 97 / 97 + (text == right) for text, right in zip(completions, answer, strict=True)]
