"""Evaluation of episodes: an environment or tools, and the scorers of a task or of reward functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from whet.config.sampling import SamplingParams
from whet.errors import WhetValueError
from whet.evaluation.evaluate import FULL_SCORE, Items, TaskResult, score_completions
from whet.evaluation.rewarded import RewardedRows
from whet.evaluation.statistics import Estimate, mean
from whet.rewards.processes import TIMEOUT_S
from whet.rollout.episodes import End, Episode, Player
from whet.rollout.protocol import RolloutEngine
from whet.tasks import Task, make_prompt
from whet.tasks.mixture import final_answer

_AT_ONCE = 64
"""Most episodes that are played at the same time, each with a child process."""


@dataclass(frozen=True)
class EpisodesResult(TaskResult):
    """The episodes of N items of a task, n of each; scores are rewards, and texts are the last turns.

    Attributes:
        episodes: N x n.
    """

    episodes: Sequence[Sequence[Episode]] = ()

    @property
    def turns(self) -> Estimate:
        """Mean number of turns of the model."""
        return mean(np.array([[len(episode.rewards) for episode in group] for group in self.episodes]).mean(axis=1))

    @property
    def ended_by(self) -> dict[str, float]:
        """Share of episodes by their ends."""
        ends = [episode.end for group in self.episodes for episode in group]
        return {end: ends.count(end) / len(ends) for end in get_args(End)}

    def summary(self) -> dict[str, Any]:
        """Return the results as a JSON value, without messages."""
        episodes = [episode for group in self.episodes for episode in group]
        counts = {"calls": [e.n_calls for e in episodes], "failed_calls": [e.n_failed_calls for e in episodes]}
        return {
            **super().summary(),
            "success_reward": self.full_score,
            "turns": self.turns._asdict(),
            "ended_by": self.ended_by,
            **{name: float(np.mean(values)) for name, values in counts.items()},
        }

    def records(self) -> list[dict[str, Any]]:
        """Return each item's plain fields and its episodes with their messages, as JSON values."""
        found = super().records()
        for record, group in zip(found, self.episodes, strict=True):
            for sample, episode in zip(record["completions"], group, strict=True):
                sample |= {"messages": episode.messages, "rewards": episode.rewards, "end": episode.end}
        return found


def evaluate_episodes(
    engine: RolloutEngine,
    player: Player,
    task: Task,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    n: int = 1,
    sampling: SamplingParams,
    success: float = FULL_SCORE,
    timeout_s: float | None = TIMEOUT_S,
    on_item: Callable[[], object] = lambda: None,
) -> EpisodesResult:
    """Play ``n`` episodes of each item, and score them.

    The reward of an episode is the sum of its turns' rewards and the score of its last turn; reward functions get its
    messages. An episode succeeds if its reward is at least ``success``. One whose environment or scorer fails has the
    reward 0 and is counted in ``failures``.

    Args:
        player: of the environment or tools.
        task: its rows, and the score; see ``RewardedRows`` for an environment whose turns are all rewards.
        rows: rows of the task; None: all.
        on_item: called after an item is played.

    Raises:
        WhetValueError: there are no rows, or as for ``Player.play``.
    """
    rows = list(task.rows if rows is None else rows)
    if not rows:
        raise WhetValueError(f"evaluate_episodes: the task {task.name} has no items.")
    start_s = time.perf_counter()
    prompts = [make_prompt(task, row) if "prompt" in row else None for row in rows]
    given = [  # as in training
        {**row, "prompt": prompt, "task": task.name, "item": row} for row, prompt in zip(rows, prompts, strict=True)
    ]
    played: list[list[Episode]] = []
    step = max(1, _AT_ONCE // n)
    for start in range(0, len(rows), step):
        part = range(start, min(start + step, len(rows)))
        episodes = player.play(engine, [given[i] for i in part], n, sampling, part)
        for i in range(len(part)):
            played.append(episodes[i * n : (i + 1) * n])
            on_item()
    messages = [[episode.messages[episode.n_opening :] for episode in group] for group in played]
    texts = [[final_answer(each) for each in group] for group in messages]
    if isinstance(task, RewardedRows):  # functions get the opening and the messages, as in training
        openings = [group[0].messages[: group[0].n_opening] for group in played]
        opened = [{**row, "prompt": opening} for row, opening in zip(rows, openings, strict=True)]
        scores, failures = score_completions(task, opened, messages, timeout_s)
    else:
        scores, failures = score_completions(task, rows, texts, timeout_s)
    for i, group in enumerate(played):
        for j, episode in enumerate(group):
            if episode.reward is None:
                failures[i, j] = f"its environment failed: {episode.error}"
            scores[i, j] = 0.0 if (i, j) in failures else scores[i, j] + (episode.reward or 0.0)
    items = Items(task, rows, [group[0].prompt_ids for group in played])
    completions = [[episode.completion() for episode in group] for group in played]
    elapsed_s = time.perf_counter() - start_s
    return EpisodesResult(items, completions, texts, scores, failures, elapsed_s, success, played)
