"""Advantages by name: by hand, the defining formulas, unscored completions, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.raising import assert_raises
from tests.tiny import tiny_llama

from whet.algorithms import GRPO
from whet.errors import WhetValueError
from whet.rewards.advantages import relative_advantages
from whet.rewards.functions import RewardBatch

NAN = np.nan


def scored(*by_function: list[float], weights: tuple[float, ...] = (1.0,)) -> RewardBatch:
    scores = np.array(by_function)
    total = np.where(np.isnan(scores).all(0), NAN, np.nansum(scores * np.array(weights)[:, None], 0))
    return RewardBatch(total, {f"f{i}": each for i, each in enumerate(scores)}, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Of (3, 0, 1, 0): the others' means are 1/3, 4/3, 1, 4/3; the mean is 1. Of (2, 2, NaN, 5): the mean is 3.
        ("leave_one_out", [8 / 3, -4 / 3, 0, -4 / 3, -1.5, -1.5, 0, 3]),
        ("max_rl", [2, -1, 0, -1, -1 / 3, -1 / 3, 0, 2 / 3]),
        ("pass_k", [2, 0, 0, 0, 0, 0, 0, 3]),
    ],
)
def test_values_by_hand(name: Any, expected: list[float]) -> None:
    found = relative_advantages(scored([3, 0, 1, 0, 2, 2, NAN, 5]), 4, name)
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["leave_one_out", "max_rl", "pass_k", "per_reward"])
def test_equal_and_unscored_groups_have_no_advantage(name: Any) -> None:
    found = relative_advantages(scored([0, 0, 0, 0, NAN, NAN, NAN, NAN, NAN, 2, NAN, NAN]), 4, name, weights=(1.0,))
    assert found.tolist() == [0.0] * 12


def test_leave_one_out_is_a_loop() -> None:
    rewards = np.random.default_rng(0).normal(size=(3, 5))
    loop = [[row[i] - np.delete(row, i).mean() for i in range(5)] for row in rewards]
    found = relative_advantages(scored(rewards.ravel().tolist()), 5, "leave_one_out")
    np.testing.assert_allclose(found, np.ravel(loop), rtol=1e-13)


def test_leave_one_out_over_the_deviation_of_the_batch_by_hand() -> None:
    # Of (3, 0, 1, 0), (2, 2, NaN, 5) and a single score, which has no baseline: the advantages of the others, as above,
    # have the mean 0 and the sum of squares 96 / 9 + 13.5.
    rewards = [3, 0, 1, 0, 2, 2, NAN, 5, NAN, 7, NAN, NAN]
    found = relative_advantages(scored(rewards), 4, "leave_one_out", (), {"scale": "batch", "ddof": 1, "eps": 1e-4})
    std = ((96 / 9 + 13.5) / 6) ** 0.5 + 1e-4
    expected = [8 / 3, -4 / 3, 0, -4 / 3, -1.5, -1.5, 0, 3, 0, 0, 0, 0]
    assert found.tolist() == pytest.approx([each / std for each in expected])


def test_per_reward_is_the_formula() -> None:
    """TRL's normalize_then_sum, with its settings: the functions have unlike scales, and one score is missing."""
    rng = np.random.default_rng(1)
    scores, weights = np.stack([rng.normal(size=12), 100 * rng.random(12)]), (0.7, 2.0)
    scores[1, 3] = NAN
    grouped = scores.reshape(2, 3, 4)
    mean, std = np.nanmean(grouped, 2, keepdims=True), np.nanstd(grouped, 2, ddof=1, keepdims=True)
    total = np.nansum((grouped - mean) / (std + 1e-4) * np.array(weights)[:, None, None], 0).ravel()
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    options = {"scale": "group", "ddof": 1, "eps": 1e-4}
    batch = scored(*scores.tolist(), weights=weights)
    found = relative_advantages(batch, 4, "per_reward", weights=weights, options=options)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_grpo_trains_with_each_and_names_what_has_no_effect() -> None:
    def rewards(completions: list[Any], **_: Any) -> list[float]:
        return [float(4 in ids) for ids in completions]

    settings = {"group_size": 4, "max_new_tokens": 4, "compute": "float32", "learning_rate": 0.0}
    for name in ("leave_one_out", "max_rl", "pass_k", "per_reward"):
        trainer = GRPO(tiny_llama(), reward_fn=[rewards], advantage=name, **settings)
        metrics = trainer.train_step([[5, 6], [7], [8, 9, 10]])
        assert np.isfinite(metrics["loss"])
        scores, found = ([row[key] for row in trainer.last_completions] for key in ("reward", "advantage"))
        assert found == relative_advantages(scored(scores), 4, name, weights=(1.0,)).tolist()
    assert_raises(WhetValueError, ("max_rl", "-1"), relative_advantages, scored([-1, 1]), 2, "max_rl")
    assert_raises(WhetValueError, ("advantage", "'rloo'"), relative_advantages, scored([1, 1]), 2, "rloo")
    for field, value in (("scale_rewards", "none"), ("advantage_eps", 1e-4), ("advantage_level", "turn")):
        given = {"advantage": "leave_one_out", field: value}
        assert_raises(WhetValueError, (field, "leave_one_out"), GRPO, tiny_llama(), reward_fn=rewards, **given)
