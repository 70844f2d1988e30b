"""Advantages of turns: values by hand, episodes of one turn, episodes without a reward, tokens."""

from __future__ import annotations

import numpy as np
import pytest
from tests.raising import assert_raises

from whet.errors import WhetValueError
from whet.ops import compute_batch_group_advantages
from whet.rewards.turns import begins_of_turns, token_advantages, turn_advantages

NAN = float("nan")


def test_advantages_by_hand() -> None:
    # Rewards to go: 3 2 | 0 | 1, with a score of 1 in the first episode and 0 in the others; mean 1.5, variance 1.25.
    found = turn_advantages([[1, 1], [0], [1]], np.array([3.0, 0.0, 1.0]), 3)
    deviation = 1.25**0.5
    for advantages, expected in zip(found, [[1.5, 0.5], [-1.5], [-0.5]], strict=True):
        np.testing.assert_allclose(advantages, np.array(expected) / deviation, rtol=1e-12)


def test_a_turn_is_not_credited_with_the_rewards_before_it() -> None:
    first, second = turn_advantages([[1, 0, 0], [0, 0, 1]], np.array([1.0, 1.0]), 2)
    # To go: 1 0 0 | 1 1 1, with mean 2/3; as episodes, both would have the advantage 0.
    assert first[0] == second[0] == second[2] > 0 > first[1] == first[2]
    assert sum(first) + sum(second) == pytest.approx(0)


def test_episodes_of_one_turn_have_the_advantages_of_completions() -> None:
    rewards = np.random.default_rng(0).normal(size=12)
    for options in ({}, {"scale": "batch"}, {"scale": "none"}, {"ddof": 1, "eps": 1e-4}):
        found = turn_advantages([[reward] for reward in rewards], rewards, 4, **options)
        expected = compute_batch_group_advantages(rewards, 4, **options)
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-12)


def test_groups_do_not_mix_and_episodes_without_a_reward_have_none() -> None:
    found = turn_advantages(
        [[0, 2], [0, 0, 0], [5], [5, 0], [1], [], [3], []], np.array([2.0, 0, 5, NAN, 1, NAN, 3, NAN]), 4
    )  # fmt: skip
    first_group = turn_advantages([[0, 2], [0, 0, 0], [5]], np.array([2.0, 0, 5]), 3)
    for one, other in zip(found, first_group, strict=False):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    assert found[3].tolist() == [0, 0] and found[5].size == found[7].size == 0
    assert [found[4][0], found[6][0]] == [-1, 1]
    assert [each.tolist() for each in turn_advantages([[], []], np.array([NAN, NAN]), 2)] == [[], []]


def test_tokens_have_the_advantages_of_their_turns() -> None:
    first, second = [True, True, False, False, True], [False, True, False, True, True]
    advantages = np.array([1.0, 2, 3, 4])
    assert [row.tolist() for row in token_advantages(advantages, [first, second])] == [
        [1, 1, 0, 0, 2], [0, 3, 0, 4, 4]]  # fmt: skip
    assert token_advantages(advantages[:0], [[]])[0].size == 0
    assert begins_of_turns(first).tolist() == [True, False, False, False, True]


def test_other_lengths_are_rejected() -> None:
    assert_raises(WhetValueError, ("3 episodes", "2 totals"), turn_advantages, [[1]] * 3, np.zeros(2), 3)
    assert_raises(WhetValueError, ("3 episodes", "group_size=2"), turn_advantages, [[1]] * 3, np.zeros(3), 2)
