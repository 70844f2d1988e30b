"""Episodes in the report of a run: counts of their ends, and transcripts with calls, results and rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.data.messages import call_text, text_of, tool_calls
from whet.report.page import escape_html, table

_PER_STEP = 2
"""Transcripts of the first and of the last step: the episodes with the highest and the lowest reward."""


def episode_sections(rows: Sequence[Mapping[str, Any]], shorten: Callable[[str], str]) -> str:
    """Return the HTML of the sections on episodes.

    Args:
        rows: of completions.jsonl, with ``step``, ``prompt``, ``completion``, ``reward``, ``end`` and ``turn_rewards``.
        shorten: applied to the text of a message.
    """
    steps = sorted({row["step"] for row in rows})
    parts = {f"step {step:,}": [row for row in rows if row["step"] == step] for step in (steps[0], steps[-1])}
    sections = ["<h2>Ends of episodes</h2>", _ends({**parts, "all steps": list(rows)})]
    for name, part in parts.items():
        ordered = sorted(part, key=_reward, reverse=True)
        chosen = ordered if len(ordered) <= _PER_STEP else [ordered[0], ordered[-1]]
        sections += [f"<h2>Episodes of {name}</h2>", *(_transcript(row, shorten) for row in chosen)]
    return "\n".join(sections)


def _reward(row: Mapping[str, Any]) -> float:
    """Return the reward of a row; one without a reward is last."""
    reward = row.get("reward")
    return float(reward) if isinstance(reward, (int, float)) and math.isfinite(reward) else -math.inf


def _ends(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a table of the number of episodes by end."""
    ends = sorted({row["end"] for rows in parts.values() for row in rows})
    counts = [[end, *(sum(row["end"] == end for row in rows) for rows in parts.values())] for end in ends]
    cells = [[end, *(f"{count:,}" for count in row)] for end, *row in counts]
    return table(["Ended by", *parts], cells, ["", *("number" for _ in parts)])


def _transcript(row: Mapping[str, Any], shorten: Callable[[str], str]) -> str:
    """Return a heading and a table of the messages of an episode; a turn of the model has a reward."""
    rewards = iter(row["turn_rewards"] if any(row["turn_rewards"]) else ())
    cells = [[message["role"], shorten(message_text(message)), ""] for message in row["prompt"]]
    for message in row["completion"]:
        reward = next(rewards, None) if message["role"] == "assistant" else None
        cells.append([message["role"], shorten(message_text(message)), "" if reward is None else f"{reward:.3g}"])
    reward = _reward(row)
    heading = f"Reward {reward:.3g}" if math.isfinite(reward) else "No reward"
    error = f": {row['error']}" if row.get("error") else ""
    title = escape_html(f"{heading}, ended by {row['end']}{error}")
    return f"<h3>{title}</h3>\n{table(['Role', 'Message', 'Reward'], cells, ['', 'text', 'number'])}"


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its thinking and calls."""
    thinking = message.get("reasoning_content")
    calls = (f"→ {call_text(call)}" for call in tool_calls(message))
    return "\n".join(filter(None, [f"({thinking})" if thinking else "", text_of(message), *calls]))
