"""kto_loss: by hand, against TRL's in float64, micro-batches, and invalid arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.losses import kto_loss

OPTIONS: list[dict[str, Any]] = [
    {},
    {"beta": 0.7, "desirable_weight": 1.33, "undesirable_weight": 0.4},
    {"loss_type": "apo_zero_unpaired"},
    {"loss_type": "apo_zero_unpaired", "beta": 0.5, "desirable_weight": 0.0, "undesirable_weight": 2.0},
]


def batch() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    sides = {name: -9 * generator.random(7) for name in ("logprobs", "ref_logprobs")}
    return {**sides, "labels": np.array([True, False, True, True, False, True, False])}


def test_values_by_hand() -> None:
    """Log-ratios 2 (desirable) and -1 (undesirable), beta 1/2, baseline 1: sigmoids of 0.5 and 1."""
    x = {"logprobs": np.array([-1.0, -4.0]), "ref_logprobs": np.array([-3.0, -3.0]), "labels": np.array([True, False])}

    def sig(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    found = kto_loss(**x, kl=1.0, beta=0.5, desirable_weight=3.0)
    assert found.value == pytest.approx((3 * (1 - sig(0.5)) + 1 - sig(1.0)) / 2)
    slopes = [-3 * 0.5 * sig(0.5) * sig(-0.5) / 2, 0.5 * sig(1.0) * sig(-1.0) / 2]
    assert found.gradients["logprobs"].tolist() == pytest.approx(slopes)
    assert found.metrics == pytest.approx(
        {
            "rewards/chosen": 1.0,
            "rewards/rejected": -0.5,
            "rewards/margins": 1.5,
            "logps/chosen": -1,
            "logps/rejected": -4,
        }
    )
    apo = kto_loss(**x, beta=0.5, loss_type="apo_zero_unpaired")
    assert apo.value == pytest.approx((1 - sig(1.0) + sig(-0.5)) / 2)
    good = kto_loss(**{name: each[:1] for name, each in x.items()})
    assert set(good.metrics) == {"rewards/chosen", "logps/chosen"}


@pytest.mark.parametrize("options", OPTIONS)
def test_value_and_gradient_are_autograds(options: dict[str, Any]) -> None:
    """The formula by autograd; tests/algorithms/test_kto.py compares a step with TRL's."""
    x = {name: torch.from_numpy(each) for name, each in batch().items()}
    kl = 0.0 if options.get("loss_type") else 0.8
    at = x["logprobs"].requires_grad_()
    found = kto_loss(**x, kl=kl, **options)[0]
    beta, c = options.get("beta", 0.1), at - x["ref_logprobs"]
    good = options.get("desirable_weight", 1.0) * (1 - torch.sigmoid(beta * (c - kl)))
    bad = options.get("undesirable_weight", 1.0) * (1 - torch.sigmoid(beta * (kl - c)))
    expected = torch.where(x["labels"], good, bad).mean()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(loss, at, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS[1:3])
def test_micro_batches_add_up(options: dict[str, Any]) -> None:
    x, counts = batch(), {"n_rows": 7, "n_desirable": 4}
    whole = kto_loss(**x, **options)
    parts = [
        kto_loss(**{name: each[part] for name, each in x.items()}, **options, **counts)
        for part in ([0, 4], [1, 6], [2, 3, 5])
    ]
    assert sum(part.value for part in parts) == pytest.approx(whole.value, rel=1e-12)
    for name in whole.metrics:
        assert sum(part.metrics.get(name, 0.0) for part in parts) == pytest.approx(whole.metrics[name], rel=1e-12)


def test_invalid_arguments_are_rejected() -> None:
    x = batch()
    assert_raises(WhetValueError, ("kto_loss", "loss_type", "'bco'"), kto_loss, **x, loss_type="bco")
    assert_raises(WhetValueError, ("kto_loss", "beta", "0"), kto_loss, **x, beta=0)
    assert_raises(WhetValueError, ("undesirable_weight", "-1"), kto_loss, **x, undesirable_weight=-1)
    assert_raises(WhetValueError, ("desirable_weight", "0"), kto_loss, **x, undesirable_weight=0, desirable_weight=0)
    assert_raises(WhetValueError, ("kl", "-1"), kto_loss, **x, kl=-1.0)
    assert_raises(WhetValueError, ("kl", "no effect"), kto_loss, **x, kl=1.0, loss_type="apo_zero_unpaired")
    assert_raises(WhetValueError, ("labels", "(6,)"), kto_loss, **{**x, "labels": x["labels"][1:]})
    assert_raises(WhetTypeError, ("labels", "bool"), kto_loss, **{**x, "labels": np.ones(7)})
    assert_raises(WhetTypeError, ("ref_logprobs", "float"), kto_loss, **{**x, "ref_logprobs": 1.0})
    assert_raises(WhetValueError, ("empty",), kto_loss, **{name: each[:0] for name, each in x.items()})
