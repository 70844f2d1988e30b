"""sft_loss: by hand, masks, and micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from tests.raising import assert_raises

from whet.errors import WhetTypeError, WhetValueError
from whet.losses import sft_loss

LOGPROBS = torch.tensor([[math.log(0.5), math.log(0.25)], [math.log(0.125), math.nan]])
MASK = torch.tensor([[True, True], [True, False]])


def test_value_metric_and_gradient_by_hand():
    logprobs = LOGPROBS.clone().requires_grad_()
    loss, metrics = sft_loss(logprobs, MASK)
    assert loss.item() == pytest.approx(2 * math.log(2))  # (1 + 2 + 3) log 2 / 3
    assert metrics == {"token_probability": pytest.approx((0.5 + 0.25 + 0.125) / 3)}
    third = -1 / 3
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [pytest.approx([third, third]), pytest.approx([third, 0])]


def test_micro_batches_add_up_to_the_whole():
    whole, whole_metrics = sft_loss(LOGPROBS, MASK)
    parts = [sft_loss(LOGPROBS[i : i + 1], MASK[i : i + 1], n_tokens=3) for i in range(2)]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    assert sum(m["token_probability"] for _, m in parts) == pytest.approx(whole_metrics["token_probability"])


def test_dft_multiplies_by_the_probability_outside_the_gradient():
    logprobs = LOGPROBS.clone().double().requires_grad_()
    loss, metrics = sft_loss(logprobs, MASK, loss_type="dft")
    # (0.5 log 2 + 0.25 log 4 + 0.125 log 8) / 3, and -p / 3
    assert loss.item() == pytest.approx(1.375 * math.log(2) / 3)
    expected = [pytest.approx([-0.5 / 3, -0.25 / 3]), pytest.approx([-0.125 / 3, 0])]
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == expected
    assert metrics["token_probability"] == pytest.approx(0.875 / 3)
    assert_raises(WhetValueError, ("loss_type", "'gem'", "nll, dft"), sft_loss, LOGPROBS, MASK, loss_type="gem")


def test_dft_is_the_formula_by_autograd():
    """TRL's expression, whose factor is detached."""
    x = -9 * torch.rand(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.requires_grad_()
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) < 0.7
    expected = (-x * x.exp().detach())[mask].sum() / mask.sum()
    found = sft_loss(x, mask, loss_type="dft")[0]
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=0)


def test_label_smoothing_by_hand():
    """Over four tokens of probabilities 1/2, 1/4, 1/8 and 1/8 the mean log-prob is -(1 + 2 + 3 + 3) / 4 log 2."""
    mean = torch.full((2, 2), -2.25 * math.log(2)).requires_grad_()
    logprobs = LOGPROBS.clone().requires_grad_()
    loss, metrics = sft_loss(logprobs, MASK, mean_logprobs=mean, label_smoothing=0.2)
    assert loss.item() == pytest.approx((0.8 * 2 + 0.2 * 2.25) * math.log(2))
    assert metrics == {"token_probability": pytest.approx((0.5 + 0.25 + 0.125) / 3)}
    found = torch.autograd.grad(loss, (logprobs, mean))
    for gradient, each in zip(found, (-0.8 / 3, -0.2 / 3), strict=True):
        assert gradient.tolist() == [pytest.approx([each, each]), pytest.approx([each, 0])]
    parts = [
        sft_loss(LOGPROBS[i : i + 1], MASK[i : i + 1], mean_logprobs=mean[i : i + 1], label_smoothing=0.2, n_tokens=3)
        for i in range(2)
    ]
    assert sum(part.item() for part, _ in parts) == pytest.approx(loss.item())
    for settings, facts in (
        ({"label_smoothing": 0.2}, ("mean_logprobs is missing", "0.2")),
        ({"mean_logprobs": mean}, ("mean_logprobs is given", "0.0")),
        ({"mean_logprobs": mean, "label_smoothing": 0.2, "loss_type": "dft"}, ("label_smoothing", "0.2", "'dft'")),
        ({"mean_logprobs": mean, "label_smoothing": 1.0}, ("label_smoothing", "1.0", "[0, 1)")),
    ):
        assert_raises(WhetValueError, ("sft_loss", *facts), sft_loss, LOGPROBS, MASK, **settings)


def test_a_batch_without_counted_tokens_is_zero():
    assert sft_loss(LOGPROBS, torch.zeros_like(MASK))[0].item() == 0


def test_invalid_arguments_are_rejected():
    assert_raises(WhetTypeError, ("sft_loss", "completion_mask", "bool"), sft_loss, LOGPROBS, MASK.float())
    assert_raises(WhetValueError, ("completion_mask", "(2, 1)"), sft_loss, LOGPROBS, MASK[:, :1])
