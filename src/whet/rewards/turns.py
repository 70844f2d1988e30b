"""Advantages of the turns of episodes, from rewards of turns.

With the rewards r_it of the T_i turns of episode i of a group, and the score s_i that is not from turns, such as a
verifier's:

    G_it = r_it + r_i,t+1 + ... + r_iT_i + s_i        the reward to go
    A_it = (G_it - mean G) / std G                    mean and deviation over all turns of the group

A turn is credited with what follows it only (Williams 1992; Sutton and Barto 2018, section 13.3), and compared with all
turns of its group, as completions are in GRPO (Shao et al. 2024, section 4.1.2). Episodes of one turn have GRPO's
advantages. Departure from process supervision (section 4.1.3 there), which divides before it adds: its advantages grow
with the number of turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from whet.errors import WhetValueError
from whet.ops import compute_batch_group_advantages


def turn_advantages(
    turn_rewards: Sequence[Sequence[float]], totals: np.ndarray, group_size: int, **options: Any
) -> list[np.ndarray]:
    """Return the advantages of each episode's turns, (T_i,) float64.

    Args:
        turn_rewards: r of each of N episodes, of T_i turns.
        totals: (N,) sum of r plus s; NaN: the episode has no reward, and its turns the advantage 0.
        group_size: episodes per group.
        options: ``scale``, ``ddof`` and ``eps`` of ``compute_batch_group_advantages``.

    Raises:
        WhetValueError: lengths differ, or N is not a multiple of group_size.
    """
    n = len(turn_rewards)
    if len(totals) != n or n % group_size:
        raise WhetValueError(
            f"turn_advantages: there are {n} episodes and {len(totals)} totals, expected a total for each, and a "
            f"multiple of group_size={group_size}."
        )
    to_go = [total - np.cumsum([0.0, *rewards])[:-1] for total, rewards in zip(totals, turn_rewards, strict=True)]
    groups = [np.concatenate(to_go[i : i + group_size]) for i in range(0, n, group_size)]
    width = max(map(len, groups), default=0)
    if not width:
        return to_go
    table = np.stack([np.pad(group, (0, width - len(group)), constant_values=np.nan) for group in groups])
    advantages = compute_batch_group_advantages(table, **options)
    found = []
    for i, row in enumerate(advantages):
        lengths = [len(each) for each in to_go[i * group_size : (i + 1) * group_size]]
        ends = list(itertools.accumulate(lengths, initial=0))
        found += [row[begin:end] for begin, end in itertools.pairwise(ends)]
    return found


def begins_of_turns(sampled: Sequence[bool]) -> np.ndarray:
    """Return whether each token of an episode begins a turn, (T,) bool; tokens that were not sampled separate turns."""
    mask = np.asarray(sampled, bool)
    return mask & ~np.concatenate([[False], mask[:-1]])


def token_advantages(advantages: np.ndarray, branches: Sequence[Sequence[bool]]) -> list[np.ndarray]:
    """Return the advantages of an episode's tokens by branch; 0 for tokens that were not sampled.

    Args:
        advantages: of the turns, which the branches divide among them in order.
        branches: of each branch, whether each token was sampled.
    """
    found, n_turns = [], 0
    for sampled in branches:
        turn = n_turns + np.cumsum(begins := begins_of_turns(sampled)) - 1
        found.append(np.where(sampled, advantages[np.maximum(turn, 0)], 0.0) if len(sampled) else np.zeros(0))
        n_turns += int(begins.sum())
    return found
