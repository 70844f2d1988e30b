"""reward_loss: by hand, against autograd in float64, micro-batches, and invalid arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.losses import reward_loss


def batch() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    names = ("chosen_rewards", "rejected_rewards", "margins")
    return {name: 2 * generator.normal(size=6) for name in names}


def test_values_by_hand() -> None:
    """Differences 2 - 1 = 1 and -1 - 2 = -3 less margins of 1 and 0; sums 3 and 1."""
    chosen, rejected, margins = np.array([2.0, -1.0]), np.array([1.0, 2.0]), np.array([1.0, 0.0])
    found = reward_loss(chosen, rejected, margins, center_rewards_coefficient=0.5)
    assert found.value == pytest.approx((math.log(2) + 0.5 * 9 + math.log(1 + math.exp(3)) + 0.5 * 1) / 2)
    right = 1 / (1 + math.exp(-3))  # sigmoid(3)
    assert found.gradients["chosen_rewards"].tolist() == pytest.approx([(3 - 0.5) / 2, (1 - right) / 2])
    assert found.gradients["rejected_rewards"].tolist() == pytest.approx([(3 + 0.5) / 2, (1 + right) / 2])
    assert found.metrics == {"accuracy": 0.5, "margin": -1.0, "mean_reward": 1.0}
    plain = reward_loss(np.array([0.3]), np.array([0.3]))
    assert plain.value == pytest.approx(math.log(2)) and plain.metrics["accuracy"] == 0


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
@pytest.mark.parametrize("with_margins", [True, False])
def test_value_and_gradient_are_autograds(coefficient: float, with_margins: bool) -> None:
    """The formula by autograd; tests/algorithms/test_reward.py compares a step with TRL's."""
    x = {name: torch.from_numpy(each) for name, each in batch().items()}
    c, r, m = x["chosen_rewards"].requires_grad_(), x["rejected_rewards"].requires_grad_(), x["margins"]
    found, _ = reward_loss(c, r, m if with_margins else None, center_rewards_coefficient=coefficient)
    expected = -torch.nn.functional.logsigmoid(c - r - (m if with_margins else 0)).mean()
    expected = expected + coefficient * ((c + r) ** 2).mean()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(loss, (c, r), retain_graph=True) for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_micro_batches_add_up() -> None:
    x = batch()
    whole = reward_loss(**x, center_rewards_coefficient=0.1)
    parts = [
        reward_loss(**{name: each[part] for name, each in x.items()}, center_rewards_coefficient=0.1, n_pairs=6)
        for part in ([0, 4], [1], [2, 3, 5])
    ]
    assert sum(part.value for part in parts) == pytest.approx(whole.value, rel=1e-12)
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name] for part in parts) == pytest.approx(value, rel=1e-12)


def test_wrong_arguments_are_rejected() -> None:
    x = batch()
    chosen, rejected = x["chosen_rewards"], x["rejected_rewards"]
    assert_raises(WhetTypeError, ("chosen_rewards", "list"), reward_loss, [1.0], rejected)
    assert_raises(WhetTypeError, ("rejected_rewards", "list"), reward_loss, chosen, [1.0])
    assert_raises(WhetValueError, ("margins", "(5,)", "(6,)"), reward_loss, chosen, rejected, x["margins"][:5])
    assert_raises(WhetValueError, ("empty",), reward_loss, chosen[:0], rejected[:0])
    for bad in (-0.1, math.nan):
        wrong = {"center_rewards_coefficient": bad}
        assert_raises(WhetValueError, ("center_rewards_coefficient", bad), reward_loss, chosen, rejected, **wrong)
