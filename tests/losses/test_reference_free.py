"""Losses of pairs without a reference: by hand, against TRL's in float64, gradients, and invalid arguments."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.losses import cpo_loss, orpo_loss, simpo_loss

LOSSES = [
    (cpo_loss, {}),
    (cpo_loss, {"beta": 0.4, "label_smoothing": 0.1, "nll_weight": 0.3}),
    (cpo_loss, {"loss_type": "hinge", "nll_weight": 0.0}),
    (cpo_loss, {"loss_type": "ipo"}),
    (simpo_loss, {}),
    (simpo_loss, {"beta": 2.5, "margin": 1.4, "label_smoothing": 0.2}),
    (orpo_loss, {}),
    (orpo_loss, {"beta": 0.7}),
]


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sides = {name: -torch.rand(7, generator=generator, dtype=torch.float64) * 9 for name in ("chosen", "rejected")}
    return {
        **{f"{name}_logprobs": values for name, values in sides.items()},
        "chosen_lengths": torch.arange(1, 8),
        "rejected_lengths": torch.tensor([3] * 7),
    }


def value(loss: Any, **options: Any) -> float:
    """Loss of c = -1 of 2 tokens and r = -4 of 1 token."""
    sides = {"chosen_logprobs": -1.0, "rejected_logprobs": -4.0, "chosen_lengths": 2.0, "rejected_lengths": 1.0}
    return loss(**{name: np.array([number]) for name, number in sides.items()}, **options).value


def test_values_by_hand() -> None:
    # c - r = 3, per token -1/2 + 4 = 3.5; negative log-likelihood 1/2.
    assert value(cpo_loss, beta=0.5) == pytest.approx(math.log1p(math.exp(-1.5)) + 0.5)
    assert value(cpo_loss, beta=0.5, nll_weight=2.0, loss_type="hinge") == 1.0  # relu(1 - 1.5) + 2 / 2
    assert value(cpo_loss, beta=0.5, nll_weight=0.0, loss_type="ipo") == pytest.approx((3.5 - 1) ** 2)
    assert value(simpo_loss, beta=2.0, margin=1.0) == pytest.approx(math.log1p(math.exp(-6)))
    odds = [p / (1 - p) for p in (math.exp(-0.5), math.exp(-4))]  # 1.5415 and 0.018657
    assert value(orpo_loss, beta=0.1) == pytest.approx(0.5 + 0.1 * math.log1p(odds[1] / odds[0]))


def trls(loss: Any, x: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """TRL's loss of the batch; of its trainers only the method that computes it."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    trainer: Any
    chosen, rejected = x["chosen_logprobs"], x["rejected_logprobs"]
    per_token = chosen / x["chosen_lengths"], rejected / x["rejected_lengths"]
    nll = -chosen.sum() / x["chosen_lengths"].sum()
    if loss is orpo_loss:
        keeps_float64: Any = [SimpleNamespace(float=lambda each=each: each, to=each.to) for each in per_token]
        trainer = SimpleNamespace(beta=options.get("beta", 0.1), accelerator=SimpleNamespace(device="cpu"))
        return nll - ORPOTrainer.odds_ratio_loss(trainer, *keeps_float64)[0].mean()
    settings = {"beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0, "nll_weight": 1.0} | options
    if loss is simpo_loss:
        settings = {"beta": 2.0, "margin": 0.5, "label_smoothing": 0.0, **options, "loss_type": "simpo"}
    averaged = settings["loss_type"] in ("simpo", "ipo")
    trainer = SimpleNamespace(
        alpha=0.0, simpo_gamma=settings.get("margin"), accelerator=SimpleNamespace(device="cpu"), **settings
    )
    sides: Any = per_token if averaged else (chosen, rejected)
    losses, *_ = CPOTrainer.cpo_loss(trainer, *sides)
    return losses.mean() + settings.get("nll_weight", 0.0) * nll


@pytest.mark.parametrize(("loss", "options"), LOSSES)
def test_values_and_gradients_are_trls(loss: Any, options: dict[str, Any]) -> None:
    pytest.importorskip("trl", reason="pip install 'whet[peers]'")
    results = []
    for compute in (lambda x: loss(**x, **options)[0], lambda x: trls(loss, x, options)):
        x = batch()
        at = [x[name].requires_grad_() for name in ("chosen_logprobs", "rejected_logprobs")]
        found = compute(x)
        results.append([found.detach(), *torch.autograd.grad(found, at)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("loss", "options"), LOSSES)
def test_gradients_are_differences(loss: Any, options: dict[str, Any]) -> None:
    x = {name: values.numpy() for name, values in batch().items()}
    for name, gradient in loss(**x, **options).gradients.items():
        for i in range(7):
            step = 1e-6 * np.eye(7)[i]
            ends = [loss(**{**x, name: x[name] + sign * step}, **options).value for sign in (1, -1)]
            assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("loss", "options"), LOSSES)
def test_micro_batches_add_up(loss: Any, options: dict[str, Any]) -> None:
    x = {name: values.numpy() for name, values in batch().items()}
    counts = {"n_pairs": 7} | ({} if loss is simpo_loss else {"n_tokens": x["chosen_lengths"].sum()})
    whole = loss(**x, **options)
    parts = [
        loss(**{name: each[part] for name, each in x.items()}, **options, **counts)
        for part in ([0, 4], [1, 2, 3, 5, 6])
    ]
    assert sum(part.value for part in parts) == pytest.approx(whole.value, rel=1e-12)
    for name in whole.metrics:
        assert sum(part.metrics[name] for part in parts) == pytest.approx(whole.metrics[name], rel=1e-12)


def test_certain_completions_have_finite_odds() -> None:
    """Log-probs of 0, and above 0 by rounding."""
    sides = {"chosen_logprobs": np.array([0.0, 1e-9]), "rejected_logprobs": np.array([-1e-20, -3.0])}
    found = orpo_loss(**sides, chosen_lengths=np.array([2, 1]), rejected_lengths=np.array([1, 2]))
    assert math.isfinite(found.value) and all(np.isfinite(each).all() for each in found.gradients.values())


def test_invalid_arguments_are_rejected() -> None:
    x = {name: values.numpy() for name, values in batch().items()}
    assert_raises(WhetValueError, ("cpo_loss", "loss_type", "robust"), cpo_loss, **x, loss_type="robust")
    assert_raises(WhetValueError, ("cpo_loss", "'hinge'"), cpo_loss, **x, loss_type="hinge", label_smoothing=0.1)
    assert_raises(WhetValueError, ("cpo_loss", "nll_weight", "-1"), cpo_loss, **x, nll_weight=-1)
    assert_raises(WhetValueError, ("simpo_loss", "margin", "-1"), simpo_loss, **x, margin=-1)
    assert_raises(WhetValueError, ("simpo_loss", "beta", "0"), simpo_loss, **x, beta=0.0)
    assert_raises(WhetValueError, ("orpo_loss", "beta", "-1"), orpo_loss, **x, beta=-1)
    assert_raises(WhetValueError, ("orpo_loss", "(6,)"), orpo_loss, **{**x, "chosen_lengths": x["chosen_lengths"][1:]})
    assert_raises(WhetTypeError, ("simpo_loss", "int64"), simpo_loss, **{**x, "chosen_logprobs": np.arange(7)})
